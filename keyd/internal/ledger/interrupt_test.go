package ledger_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lethe/internal/logtest"
	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/ledger"
)

// hanging is an anchor whose calls of one kind do not return before they are
// released, whatever their context says, as a file system's do not.
type hanging struct {
	*anchortest.Memory
	op       string
	released chan struct{}
	began    atomic.Int32 // calls, of all kinds
	hung     atomic.Int32 // those that hung
}

func hang(m *anchortest.Memory, op string) *hanging {
	h := &hanging{Memory: m, op: op, released: make(chan struct{})}
	m.Inject = func(_ context.Context, op string) anchortest.Fault {
		h.began.Add(1)
		if op == h.op {
			select {
			case <-h.released:
			default:
				h.hung.Add(1)
				<-h.released
			}
		}
		return anchortest.None
	}
	return h
}

// TestHangingAnchorIsTold: an anchor that does not return from a call is told of
// as unavailable, nothing else is asked of it meanwhile, and it is well again by
// itself.
func TestHangingAnchorIsTold(t *testing.T) {
	for _, op := range []string{"put", "get", "enter", "newest"} {
		t.Run(op, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, m, k := initialised(t)
				left, err := k.Enter(t.Context(), "one", false, func(ledger.Term, ledger.Term) error { return nil })
				if err != nil || !left {
					t.Fatalf("Enter: %v, %v", left, err)
				}
				h := hang(m, op)
				ctx, cancel := context.WithCancel(t.Context())
				var run sync.WaitGroup
				run.Go(func() { wantErr(t, "Run", k.Run(ctx), context.Canceled) })
				size := s.add(1).Size
				if op == "newest" {
					time.Sleep(time.Minute) // until it compares
				} else {
					k.Notify()
				}
				time.Sleep(4 * time.Second)
				if h.hung.Load() != 1 {
					t.Fatalf("%d calls hang", h.hung.Load())
				}
				must(t, "Last, while it may be slow", k.Last())
				began := h.began.Load()
				time.Sleep(2 * time.Second)
				wantErr(t, "Last", k.Last(), ledger.ErrAnchorUnavailable)
				if said := k.Last().Error(); !strings.Contains(said, "does not answer since 2000-01-01T00:0") || !strings.Contains(said, "memory") {
					t.Errorf("it says %s", said)
				}
				must(t, "Err: keyd may serve what needs no anchor", k.Err())
				time.Sleep(10 * time.Minute)
				wantErr(t, "Last, much later", k.Last(), ledger.ErrAnchorUnavailable)
				if n := h.began.Load(); n != began {
					t.Errorf("%d more calls beside the one that hangs", n-began)
				}
				if op == "put" {
					wantErr(t, "Leave", k.Leave(t.Context()), ledger.ErrAnchorUnavailable)
				}

				close(h.released)
				must(t, "WaitFor, once it answers", k.WaitFor(t.Context(), size))
				synctest.Wait()
				must(t, "Last, once it answers", k.Last())
				cancel()
				run.Wait()
			})
		})
	}
}

// Who asks an anchor that hangs is answered when his context is over, or ended,
// also who comes later.
func TestHangingAnchorIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, m, k := initialised(t)
		h := hang(m, "put")
		ctx, cancel := context.WithCancel(t.Context())
		run := make(chan error, 1)
		go func() { run <- k.Run(ctx) }()
		s.add(1)
		k.Notify()
		synctest.Wait()
		cancel()
		if err := <-run; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
		wantErr(t, "Last", k.Last(), ledger.ErrAnchorUnavailable)
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		err := k.Check(short)
		wantErr(t, "Check", err, context.DeadlineExceeded)
		wantErr(t, "Check", err, ledger.ErrAnchorUnavailable)
		wantErr(t, "Audit", k.Audit(short), ledger.ErrAnchorUnavailable)
		if n := h.hung.Load(); n != 1 {
			t.Errorf("%d calls hang", n)
		}
		close(h.released)
		must(t, "Check", k.Check(t.Context()))
		must(t, "Last", k.Last())
		wantAnchored(t, k, m, 3)
	})
}

// What is waited for is logged, ever more seldom, and that it is over.
func TestHangingAnchorIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out logtest.Buffer
		h := hang(anchortest.NewMemory(), "enter")
		a := ledger.Interrupt(h, slog.New(slog.NewTextHandler(&out, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		answered := make(chan error, 1)
		go func() {
			_, err := a.Enter(ctx, ledger.Term{})
			answered <- err
		}()
		waits := func() int { return strings.Count(out.String(), "which does not answer") }
		for _, at := range []struct {
			after time.Duration
			lines int
		}{{4, 0}, {6, 1}, {14, 1}, {16, 2}, {34, 2}, {36, 3}, {74, 3}, {76, 4}} {
			time.Sleep(at.after*time.Second - time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)))
			synctest.Wait()
			if n := waits(); n != at.lines {
				t.Errorf("%d lines after %d s, want %d", n, at.after, at.lines)
			}
		}
		cancel()
		wantErr(t, "Enter", <-answered, context.Canceled)
		wantErr(t, "Overdue", a.Overdue(), ledger.ErrAnchorUnavailable)
		close(h.released)
		synctest.Wait()
		must(t, "Overdue", a.Overdue())
		if said := out.String(); !strings.Contains(said, "has answered") || !strings.Contains(said, "call=enter") {
			t.Errorf("it says %s", said)
		}
		lines := waits()
		time.Sleep(time.Hour)
		if waits() != lines {
			t.Error("it says so after that, too")
		}
	})
}
