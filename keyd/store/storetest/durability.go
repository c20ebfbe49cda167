package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"

	"lethe/keyd/internal/keys"
)

func reopened(t *testing.T, h Harness) {
	if !applies(t, h.Reopen != nil, "Reopen") {
		return
	}
	s := h.Store
	for round := range 3 {
		for i := range 50 {
			put(t, s, fmt.Sprintf("r%d/%d", round, i), fmt.Sprint(i), "last", fmt.Sprint(round), fmt.Sprint("gone", round), "x", "empty", "")
		}
		mustUpdate(t, s, func(tx keys.Tx) error { return tx.Delete(fmt.Append(nil, "gone", round)) })
		s = h.Reopen(t)
		for r := range round + 1 {
			for i := range 50 {
				wantRow(t, s, fmt.Sprintf("r%d/%d", r, i), fmt.Sprint(i))
			}
			wantRow(t, s, fmt.Sprint("gone", r), absent)
		}
		wantRow(t, s, "last", fmt.Sprint(round))
		wantRow(t, s, "empty", "")
	}
}

func crashed(t *testing.T, h Harness) {
	if !applies(t, h.Crash != nil, "Crash") {
		return
	}
	const clients = 8
	var acknowledged [clients]atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := int64(1); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				put(t, h.Store, fmt.Sprintf("c%d/%06d", c, i), "x", fmt.Sprintf("n%d", c), fmt.Sprint(i))
				acknowledged[c].Store(i)
			}
		})
	}
	for range 10 {
		var before [clients]int64
		for c := range before {
			before[c] = acknowledged[c].Load()
		}
		s := h.Crash(t)
		for c, n := range before {
			view(t, s, func(r keys.Reader) error {
				rows := keysUnder(t, r, fmt.Appendf(nil, "c%d/", c), nil)
				if int64(len(rows)) < n {
					t.Errorf("client %d: %d rows after the crash, %d were acknowledged", c, len(rows), n)
				}
				// Whole transactions, in order.
				if len(rows) > 0 {
					wantGet(t, r, fmt.Sprintf("n%d", c), fmt.Sprint(len(rows)))
					if want := fmt.Sprintf("c%d/%06d", c, len(rows)); rows[len(rows)-1] != want {
						t.Errorf("client %d: last row %q, want %q", c, rows[len(rows)-1], want)
					}
				}
				return nil
			})
		}
	}
	close(stop)
	wg.Wait()
}

func backup(t *testing.T, h Harness) {
	if !applies(t, h.Restore != nil, "Restore") {
		return
	}
	fill(t, h.Store, "row", 3000, []byte("value"))
	put(t, h.Store, "a", "0", "b", "0", "gone", "1", "empty", "", "\xff\xff", "1")
	put(t, h.Store, "gone", "2")
	put(t, h.Store, "overwritten", "what no copy may have")
	put(t, h.Store, "overwritten", "")
	mustUpdate(t, h.Store, func(tx keys.Tx) error { return tx.Delete([]byte("gone")) })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 1; ; i++ {
			select {
			case <-stop:
				return
			default:
				put(t, h.Store, "a", fmt.Sprint(i), "b", fmt.Sprint(i))
			}
		}
	})
	var buf bytes.Buffer
	err := h.Store.Backup(t.Context(), &buf)
	close(stop)
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(buf.Bytes(), []byte("what no copy may have")) {
		t.Error("the backup has the value of a row that was overwritten before")
	}
	s := h.Restore(t, &buf)
	view(t, s, func(r keys.Reader) error {
		if n := len(keysUnder(t, r, []byte("row"), nil)); n != 3000 {
			t.Errorf("%d rows restored, want 3000", n)
		}
		a, errA := r.Get([]byte("a"))
		b, errB := r.Get([]byte("b"))
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Errorf("rows that are written together: %q, %v and %q, %v", a, errA, b, errB)
		}
		wantGet(t, r, "row00001234", "value")
		wantGet(t, r, "gone", absent)
		wantGet(t, r, "empty", "")
		wantGet(t, r, "\xff\xff", "1")
		return nil
	})
	// The restored store is a store.
	put(t, s, "a", "new")
	wantRow(t, s, "a", "new")
}

func backupCancelled(t *testing.T, h Harness) {
	fill(t, h.Store, "row", 1000, []byte("value"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Store.Backup(ctx, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("Backup with an ended context: %v", err)
	}
	full := errors.New("no room")
	if err := h.Store.Backup(t.Context(), failingWriter{full}); !errors.Is(err, full) {
		t.Errorf("Backup to a failing writer: %v, want its error", err)
	}
	put(t, h.Store, "still", "works")
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

func closing(t *testing.T, h Harness) {
	// Updates and views that began before Close end well or say that it is
	// closed; what was acknowledged is there.
	var wg sync.WaitGroup
	var mu sync.Mutex
	var acknowledged []string
	started := make(chan struct{}, 64)
	for c := range 32 {
		wg.Go(func() {
			for i := 0; ; i++ {
				key := fmt.Sprintf("c%d/%d", c, i)
				err := h.Store.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte(key), []byte("x")) })
				if err != nil {
					if !errors.Is(err, keys.ErrUnavailable) {
						t.Errorf("Update: %v, want ErrUnavailable", err)
					}
					return
				}
				mu.Lock()
				acknowledged = append(acknowledged, key)
				mu.Unlock()
				select {
				case started <- struct{}{}:
				default:
				}
			}
		})
	}
	for range cap(started) {
		<-started
	}
	inView, closed := make(chan struct{}), make(chan error, 1)
	wg.Go(func() {
		err := h.Store.View(t.Context(), func(r keys.Reader) error {
			close(inView)
			for range 100 {
				keysUnder(t, r, nil, nil)
			}
			select {
			case <-closed:
				t.Error("Close did not wait for a view")
			default:
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-inView
	err := h.Store.Close()
	closed <- err
	if err != nil {
		t.Errorf("Close: %v", err)
	}
	wg.Wait()
	if err := h.Store.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	ctx := t.Context()
	for name, err := range map[string]error{
		"View":      h.Store.View(ctx, func(keys.Reader) error { return nil }),
		"Update":    h.Store.Update(ctx, func(keys.Tx) error { return nil }),
		"DropRange": h.Store.DropRange(ctx, []byte("c")),
		"Backup":    h.Store.Backup(ctx, io.Discard),
		"Check":     h.Store.Check(ctx),
	} {
		if !errors.Is(err, keys.ErrUnavailable) {
			t.Errorf("%s after Close: %v, want ErrUnavailable", name, err)
		}
	}
	if h.Reopen != nil {
		s := h.Reopen(t)
		for _, key := range acknowledged {
			wantRow(t, s, key, "x")
		}
	}
}

func check(t *testing.T, h Harness) {
	if err := h.Store.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
}
