package badger

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"lethe/keyd/internal/keys"
)

func TestHotRows(t *testing.T) {
	var h hotRows
	h.init(10)
	key, other := []byte("rkey"), []byte("rother")
	has := func(ts uint64, want string) {
		t.Helper()
		v, ok := h.get(key, ts)
		if string(v) != want || ok != (want != "") {
			t.Errorf("at %d: %q, %v; want %q", ts, v, ok, want)
		}
	}
	twice := func(value string, ts, drops uint64) {
		h.put(key, []byte(value), ts, drops)
		h.put(key, []byte(value), ts, drops)
	}
	h.put(key, []byte("v10"), 10, 0)
	has(10, "") // once is not often
	h.put(key, []byte("v10"), 10, 0)
	has(10, "v10")
	has(12, "v10")
	has(9, "") // it may not have been so

	h.commit([][]byte{other}, 11)
	has(11, "v10")
	h.commit([][]byte{key}, 12)
	has(12, "")
	has(10, "")
	twice("v10", 11, 0) // by a reader that began before the commit
	has(12, "")
	twice("v12", 12, 0)
	has(12, "v12")
	has(11, "")

	h.drop()
	has(12, "")
	twice("v12", 12, 0) // by a reader that began before the drop
	has(12, "")
	twice("v12", 12, 1)
	has(12, "v12")

	twice(string(make([]byte, hotBytes+1)), 12, 1)
	if v, _ := h.get(key, 12); len(v) > hotBytes {
		t.Error("a large row was kept")
	}
}

// However hot two rows are, a view sees what one commit made of both.
func TestHotRowsAreOfTheSnapshot(t *testing.T) {
	s := openTest(t, t.TempDir())
	const commits = 300
	ctx := context.Background()
	set := func(n uint64) error {
		return s.Update(ctx, func(tx keys.Tx) error {
			for _, k := range []string{"a", "b"} {
				if err := tx.Put([]byte(k), binary.BigEndian.AppendUint64(nil, n)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := set(0); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			last := uint64(0)
			for {
				select {
				case <-done:
					return
				default:
				}
				err := s.View(ctx, func(r keys.Reader) error {
					var got [4]uint64
					for i, k := range []string{"a", "b", "a", "b"} {
						v, err := r.Get([]byte(k))
						if err != nil {
							return err
						}
						got[i] = binary.BigEndian.Uint64(v)
					}
					if got[0] != got[1] || got[0] != got[2] || got[0] != got[3] || got[0] < last {
						return fmt.Errorf("one view read %v, after %d", got, last)
					}
					last = got[0]
					return nil
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for n := uint64(1); n <= commits; n++ {
		if err := set(n); err != nil {
			t.Fatal(err)
		}
		// What was acknowledged is read, at once.
		err := s.View(ctx, func(r keys.Reader) error {
			v, err := r.Get([]byte("b"))
			if err == nil && binary.BigEndian.Uint64(v) != n {
				err = fmt.Errorf("after commit %d: %d", n, binary.BigEndian.Uint64(v))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	close(done)
	wg.Wait()
}

// A dropped row is gone for those who read it often, too.
func TestHotRowsAreDropped(t *testing.T) {
	s := openTest(t, t.TempDir())
	ctx := context.Background()
	if err := s.Update(ctx, func(tx keys.Tx) error { return tx.Put([]byte("pk"), []byte("v")) }); err != nil {
		t.Fatal(err)
	}
	read := func() (err error) {
		for range 3 {
			err = s.View(ctx, func(r keys.Reader) error { _, err := r.Get([]byte("pk")); return err })
		}
		return err
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}
	if err := s.DropRange(ctx, []byte("p")); err != nil {
		t.Fatal(err)
	}
	if err := read(); !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("the row was dropped: %v", err)
	}
}
