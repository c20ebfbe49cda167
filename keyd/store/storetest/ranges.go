package storetest

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"

	"lethe/keyd/internal/keys"
)

func dropExactly(t *testing.T, h Harness) {
	inside := []string{"w/5/", "w/5/\x00", "w/5/a", "w/5/a/b", "w/5/\xff\xff"}
	outside := []string{"w", "w/", "w/5", "w/50", "w/5.", "w/50/a", "w/4/\xff", "w/6/", "x"}
	for _, k := range append(inside, outside...) {
		put(t, h.Store, k, "v"+k)
	}
	mustUpdate(t, h.Store, func(tx keys.Tx) error { return tx.Delete([]byte(inside[2])) })
	if err := h.Store.DropRange(t.Context(), []byte("w/5/")); err != nil {
		t.Fatal(err)
	}
	for _, k := range inside {
		wantRow(t, h.Store, k, absent)
	}
	for _, k := range outside {
		wantRow(t, h.Store, k, "v"+k)
	}
	// A drop of nothing, a repeated drop.
	for _, p := range []string{"w/5/", "nothing"} {
		if err := h.Store.DropRange(t.Context(), []byte(p)); err != nil {
			t.Errorf("DropRange(%q): %v", p, err)
		}
	}
	// The range can be written again.
	put(t, h.Store, "w/5/a", "again")
	wantRow(t, h.Store, "w/5/a", "again")
	if err := h.Store.DropRange(t.Context(), nil); err == nil {
		t.Error("DropRange of everything was accepted")
	}
	wantRow(t, h.Store, "x", "vx")
}

func dropBesideTraffic(t *testing.T, h Harness) {
	const rows = 20_000
	value := make([]byte, 200)
	rand.Read(value)
	fill(t, h.Store, "w/1/", rows, value)
	fill(t, h.Store, "w/2/", 1000, value)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	counts := make([]int, 4)
	for c := range counts {
		wg.Go(func() {
			key := fmt.Sprintf("live%d", c)
			for {
				select {
				case <-stop:
					return
				default:
				}
				put(t, h.Store, key, fmt.Sprint(counts[c]+1))
				counts[c]++
				wantRow(t, h.Store, key, fmt.Sprint(counts[c]))
				wantRow(t, h.Store, "w/2/00000999", string(value))
			}
		})
	}
	if err := h.Store.DropRange(t.Context(), []byte("w/1/")); err != nil {
		t.Error(err)
	}
	close(stop)
	wg.Wait()
	for c, n := range counts {
		if n > 0 {
			wantRow(t, h.Store, fmt.Sprintf("live%d", c), fmt.Sprint(n))
		}
	}
	view(t, h.Store, func(r keys.Reader) error {
		if n := len(keysUnder(t, r, []byte("w/1/"), nil)); n > 0 {
			t.Errorf("%d rows of the range are left", n)
		}
		if n := len(keysUnder(t, r, []byte("w/2/"), nil)); n != 1000 {
			t.Errorf("%d rows of the next range, want 1000", n)
		}
		return nil
	})
}

func dropForGood(t *testing.T, h Harness) {
	if !applies(t, h.Reopen != nil, "Reopen") {
		return
	}
	fill(t, h.Store, "w/1/", 3000, []byte("x"))
	put(t, h.Store, "keep", "1")
	if err := h.Store.DropRange(t.Context(), []byte("w/1/")); err != nil {
		t.Fatal(err)
	}
	s := h.Reopen(t)
	wantRow(t, s, "keep", "1")
	view(t, s, func(r keys.Reader) error {
		if n := len(keysUnder(t, r, []byte("w/1/"), nil)); n > 0 {
			t.Errorf("%d rows came back", n)
		}
		return nil
	})
}

// dropBytes: of rows that were overwritten, deleted, left, deleted without a
// live one beside them, and read by a view that ends during the drop.
func dropBytes(t *testing.T, h Harness) {
	if !applies(t, h.Bytes != nil && h.Reopen != nil, "Bytes or Reopen") {
		return
	}
	secret := func() []byte { b := make([]byte, 32); rand.Read(b); return b }
	overwritten, deleted, left, kept, alone := secret(), secret(), secret(), secret(), secret()
	fill(t, h.Store, "w/1/", 5000, make([]byte, 100))
	put(t, h.Store, "w/1/a", string(overwritten), "w/1/b", string(deleted), "w/2/a", string(kept), "w/5/a", string(alone))
	fill(t, h.Store, "w/3/", 5000, make([]byte, 100))
	s := h.Reopen(t) // some backends move rows into other files
	mustUpdate(t, s, func(tx keys.Tx) error {
		return errors.Join(tx.Put([]byte("w/1/a"), []byte("dead")), tx.Delete([]byte("w/1/b")),
			tx.Put([]byte("w/1/c"), bytes.Clone(left)), tx.Delete([]byte("w/5/a")))
	})
	for _, b := range [][]byte{left, kept} {
		if !h.Bytes(t, b) {
			t.Fatal("a live row's bytes were not found: the search is blind")
		}
	}
	// A range whose rows are all deleted.
	if err := s.DropRange(t.Context(), []byte("w/5/")); err != nil {
		t.Fatal(err)
	}
	reading, read := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		view(t, s, func(r keys.Reader) error {
			wantGet(t, r, "w/1/c", string(left))
			close(reading)
			<-read
			return nil
		})
	})
	<-reading
	done := make(chan error, 1)
	go func() { done <- s.DropRange(t.Context(), []byte("w/1/")) }()
	close(read)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	look := func(when string) {
		t.Helper()
		for name, b := range map[string][]byte{"overwritten": overwritten, "deleted": deleted, "left": left, "deleted alone": alone} {
			if h.Bytes(t, b) {
				t.Errorf("%s: the bytes of the row that was %s are there", when, name)
			}
		}
		if !h.Bytes(t, kept) {
			t.Errorf("%s: a sibling's bytes are gone", when)
		}
	}
	look("after the drop")
	s = h.Reopen(t)
	look("after reopening")
	wantRow(t, s, "w/2/a", string(kept))
}
