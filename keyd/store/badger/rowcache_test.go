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

func TestRowCache(t *testing.T) {
	var c rowCache
	if _, ok := c.get([]byte("ra")); ok {
		t.Error("an empty cache has a row")
	}
	value := []byte("1")
	c.put([]byte("ra"), value)
	value[0] = '2' // the caller's own
	got, ok := c.get([]byte("ra"))
	if !ok || string(got) != "1" {
		t.Errorf("%q, %v", got, ok)
	}
	got[0] = '3'
	if got, _ := c.get([]byte("ra")); string(got) != "1" {
		t.Error("a reader changed what others get")
	}
	// Two rows of one place: one of them is there, and is itself.
	place := c.slot([]byte("ra"))
	for i := 0; ; i++ {
		other := fmt.Append(nil, "r", i)
		if c.slot(other) != place {
			continue
		}
		c.put(other, other)
		if _, ok := c.get([]byte("ra")); ok {
			t.Error("a row under another's key")
		}
		if got, ok := c.get(other); !ok || string(got) != string(other) {
			t.Errorf("%q, %v", got, ok)
		}
		break
	}
	c.put([]byte("rb"), make([]byte, maxCachedValue+1))
	if _, ok := c.get([]byte("rb")); ok {
		t.Error("a large row was kept")
	}
}

func TestRowCacheOfWritten(t *testing.T) {
	c := cacheOf(map[string]write{
		"put":     {value: []byte("1")},
		"large":   {value: make([]byte, maxCachedValue+1)},
		"deleted": {deleted: true},
	})
	if v, ok := c.get([]byte("rput")); !ok || string(v) != "1" {
		t.Errorf("%q, %v", v, ok)
	}
	for _, key := range []string{"rlarge", "rdeleted"} {
		if v, ok := c.get([]byte(key)); ok {
			t.Errorf("%s: %d bytes", key, len(v))
		}
	}
}

// TestViewsSeeOneSnapshotOfHotRows: however often two rows are read, a view
// sees what one commit made of both, and nothing older than what was
// acknowledged before it began; so does an update, beside its own writes.
func TestViewsSeeOneSnapshotOfHotRows(t *testing.T) {
	s := openTest(t, t.TempDir())
	const commits = 300
	ctx := context.Background()
	a, b := []byte("a"), []byte("b")
	read := func(r keys.Reader, key []byte) (uint64, error) {
		v, err := r.Get(key)
		if err != nil {
			return 0, err
		}
		return binary.BigEndian.Uint64(v), nil
	}
	// pair reads both rows twice.
	pair := func(r keys.Reader) (n uint64, err error) {
		for i, key := range [][]byte{a, b, a, b} {
			got, err := read(r, key)
			if err != nil {
				return 0, err
			}
			if i > 0 && got != n {
				return 0, fmt.Errorf("%d and %d in one snapshot", n, got)
			}
			n = got
		}
		return n, nil
	}
	set := func(n uint64) error {
		return s.Update(ctx, func(tx keys.Tx) error {
			if n > 0 {
				if was, err := pair(tx); err != nil || was != n-1 {
					return errors.Join(fmt.Errorf("an update after commit %d reads %d", n-1, was), err)
				}
			}
			value := binary.BigEndian.AppendUint64(nil, n)
			if err := errors.Join(tx.Put(a, value), tx.Put(b, value)); err != nil {
				return err
			}
			if now, err := pair(tx); err != nil || now != n {
				return errors.Join(fmt.Errorf("an update that wrote %d reads %d", n, now), err)
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
			for last := uint64(0); ; {
				select {
				case <-done:
					return
				default:
				}
				err := s.View(ctx, func(r keys.Reader) error {
					n, err := pair(r)
					if n < last {
						return fmt.Errorf("a view reads %d after %d", n, last)
					}
					last = n
					return err
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
		err := s.View(ctx, func(r keys.Reader) error {
			got, err := pair(r)
			if err == nil && got != n {
				err = fmt.Errorf("after commit %d: %d", n, got)
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

// TestOldViewLeavesNoRowBehind: what a view reads that began before a commit
// is not what those read that begin after it.
func TestOldViewLeavesNoRowBehind(t *testing.T) {
	s := openTest(t, t.TempDir())
	put := func(value string) {
		t.Helper()
		if err := s.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte("k"), []byte(value)) }); err != nil {
			t.Fatal(err)
		}
	}
	get := func(r keys.Reader, want string) {
		t.Helper()
		if v, err := r.Get([]byte("k")); err != nil || string(v) != want {
			t.Errorf("%q, %v; want %q", v, err, want)
		}
	}
	view := func(fn func(keys.Reader)) {
		t.Helper()
		if err := s.View(t.Context(), func(r keys.Reader) error { fn(r); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	put("old")
	view(func(old keys.Reader) {
		get(old, "old")
		put("new")
		get(old, "old")
		view(func(r keys.Reader) { get(r, "new") })
		get(old, "old")
	})
	view(func(r keys.Reader) { get(r, "new") })
}

// TestDroppedRowsAreNotRead, however often they were read before.
func TestDroppedRowsAreNotRead(t *testing.T) {
	s := openTest(t, t.TempDir())
	read := func() error {
		return s.View(t.Context(), func(r keys.Reader) error { _, err := r.Get([]byte("pk")); return err })
	}
	err := s.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte("pk"), []byte("v")) })
	for range 3 {
		err = errors.Join(err, read())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DropRange(t.Context(), []byte("p")); err != nil {
		t.Fatal(err)
	}
	if err := read(); !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("the row was dropped: %v", err)
	}
	err = s.Update(t.Context(), func(tx keys.Tx) error { _, err := tx.Get([]byte("pk")); return err })
	if !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("an update reads it: %v", err)
	}
}
