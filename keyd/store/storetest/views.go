package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"lethe/keyd/internal/keys"
)

func viewSeesAcknowledged(t *testing.T, h Harness) {
	var wg sync.WaitGroup
	for c := range 8 {
		wg.Go(func() {
			key := fmt.Sprint("client", c)
			for i := range 60 {
				put(t, h.Store, key, fmt.Sprint(i))
				wantRow(t, h.Store, key, fmt.Sprint(i))
			}
		})
	}
	wg.Wait()
}

func viewIsStable(t *testing.T, h Harness) {
	put(t, h.Store, "a", "1", "b", "1", "d", "1")
	view(t, h.Store, func(r keys.Reader) error {
		for round := range 3 {
			wantGet(t, r, "a", "1")
			wantGet(t, r, "c", absent)
			if got := keysUnder(t, r, nil, nil); !slices.Equal(got, []string{"a", "b", "d"}) {
				t.Errorf("round %d: scan %q", round, got)
			}
			put(t, h.Store, "a", fmt.Sprint("2", round), "c", "2")
			mustUpdate(t, h.Store, func(tx keys.Tx) error { return tx.Delete([]byte("d")) })
		}
		return nil
	})
	wantRow(t, h.Store, "a", "22")
	wantRow(t, h.Store, "c", "2")
	wantRow(t, h.Store, "d", absent)
}

func viewReturnsError(t *testing.T, h Harness) {
	boom := errors.New("boom")
	if err := h.Store.View(t.Context(), func(keys.Reader) error { return boom }); err != boom {
		t.Errorf("View: %v, want boom as it is", err)
	}
}

// viewGoesOn: a reader that has begun reads on while an update runs.
func viewGoesOn(t *testing.T, h Harness) {
	put(t, h.Store, "a", "1")
	running, finish := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	view(t, h.Store, func(r keys.Reader) error {
		wg.Go(func() {
			err := update(t.Context(), h.Store, func(tx keys.Tx) error {
				err := tx.Put([]byte("a"), []byte("2"))
				once.Do(func() { close(running) })
				<-finish
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
		<-running
		wantGet(t, r, "a", "1")
		if got := keysUnder(t, r, nil, nil); !slices.Equal(got, []string{"a"}) {
			t.Errorf("scan beside an update: %q", got)
		}
		close(finish)
		return nil
	})
	wg.Wait()
	wantRow(t, h.Store, "a", "2")
}

func readerEnds(t *testing.T, h Harness) {
	put(t, h.Store, "a", "1")
	var kept keys.Reader
	view(t, h.Store, func(r keys.Reader) error { kept = r; return nil })
	if v, err := kept.Get([]byte("a")); err == nil {
		t.Errorf("Get after View: %q", v)
	}
	if err := kept.Scan(nil, nil, func(_, _ []byte) bool { return true }); err == nil {
		t.Error("Scan after View succeeded")
	}
	var tx keys.Tx
	mustUpdate(t, h.Store, func(x keys.Tx) error { tx = x; return nil })
	if err := tx.Put([]byte("b"), nil); err == nil {
		t.Error("Put after Update succeeded")
	}
	wantRow(t, h.Store, "b", absent)
}
