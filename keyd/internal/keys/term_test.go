package keys_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

// owned is a store that no other process can have.
type owned struct{ *memory }

func (owned) Exclusive() bool { return true }

func newOwnedRig(t *testing.T) *rig {
	r, store, _ := newMemoryRig(t)
	r.close()
	r.store = owned{store}
	if err := r.serve(); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) allRows() map[string][]byte { return r.store.(owned).copyRows() }

// kill closes a store as if its keyd had been killed: nothing is said at the anchor.
func (r *rig) kill() {
	r.anchor.Inject = func(context.Context, string) anchortest.Fault { return anchortest.Lost }
	rows := r.allRows()
	r.close()
	r.anchor.Inject = nil
	r.store = owned{storeOf(rows)}
}

func (r *rig) beat() {
	r.t.Helper()
	if err := r.Beat(context.Background()); err != nil {
		r.t.Fatal(err)
	}
}

// TestCopyServedSince: a copy that is put back is not the store that was served
// last, though not an entry is missing, and serves once it was replayed: then it
// knows that keys were lost.
func TestCopyServedSince(t *testing.T) {
	ends := map[string]func(*rig){"stopped": (*rig).close, "killed": (*rig).kill}
	for first, endFirst := range ends {
		for second, endSecond := range ends {
			t.Run(first+", "+second, func(t *testing.T) {
				r := newOwnedRig(t)
				alice := r.seal("alice", "memory")
				endFirst(r)
				copied := r.allRows()
				if err := r.serve(); err != nil {
					t.Fatal(err)
				}
				bob := r.seal("bob", "memory")
				size := r.LedgerSize()
				endSecond(r)
				newest := r.allRows()

				r.store = owned{storeOf(copied)}
				if err := r.serve(); !errors.Is(err, keys.ErrCopyServed) || !errors.Is(err, ledger.ErrBehind) {
					t.Fatalf("a copy that lacks a key: %v", err)
				}
				done := r.replay(keys.ReplayOptions{})
				if !done.CopyServed || done.From != size || done.To != size {
					t.Errorf("replayed: %+v", done)
				}
				restored := r.clock.Now()
				if c := r.Status(t.Context()).Components[0]; !strings.Contains(c.Detail, "restored at") {
					t.Errorf("the store's status: %v", c)
				}
				if _, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil {
					t.Error(err)
				}
				_, err := r.ask(openQuery("acme", "bob", "memory", bob))
				r.want("a key that the copy lacks", err, isUnknown)
				s := r.verify(r.destroy("bob", "d1")).Entries[0].Statement
				if s.Existed != receipt.ExistedUnknown || s.DrainedBy.Before(restored.Add(time.Hour)) {
					t.Errorf("a destruction of what may be lost: existed %q, drained by %v", s.Existed, s.DrainedBy)
				}

				// It goes on like any other, and the newest one does not any more.
				endFirst(r)
				if err := r.serve(); err != nil {
					t.Fatalf("the copy, again: %v", err)
				}
				r.close()
				r.store = owned{storeOf(newest)}
				if err := r.serve(); !errors.Is(err, ledger.ErrBehind) {
					t.Errorf("the one that served before the copy: %v", err)
				}
			})
		}
	}
}

// TestRestoredInTurn: of two copies, each of which was replayed once more, the
// later one serves.
func TestRestoredInTurn(t *testing.T) {
	r := newOwnedRig(t)
	r.seal("alice", "memory")
	r.close()
	copies := []map[string][]byte{r.allRows(), r.allRows()}
	for n := range 4 {
		r.store = owned{storeOf(copies[n%2])}
		if err := r.serve(); (n == 0) != (err == nil) || n != 0 && !errors.Is(err, ledger.ErrBehind) {
			t.Fatalf("copy %d, before a replay: %v", n, err)
		}
		if n != 0 {
			r.replay(keys.ReplayOptions{})
		}
		r.close()
		if err := r.serve(); err != nil {
			t.Fatalf("copy %d, again: %v", n, err)
		}
		r.kill()
		copies[n%2] = r.allRows()
	}
}

// TestReplayBesideAnother: a replay takes over from one that serves; a term that
// begins after it is not one after which the replayed store may serve.
func TestReplayBesideAnother(t *testing.T) {
	r := newOwnedRig(t)
	r.close()
	copied := r.allRows()
	if err := r.serve(); err != nil {
		t.Fatal(err)
	}
	one := r.Keys
	r.store, r.Keys = owned{storeOf(copied)}, nil
	if _, err := keys.Replay(t.Context(), r.config(), keys.ReplayOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := one.DestroyKey(t.Context(), destroyRequest("bob", "d1")); err == nil || !errors.Is(one.Serving(), ledger.ErrSuperseded) {
		t.Errorf("beside a replay: %v, %v", err, one.Serving())
	}
	one.Close()
	replayed := r.allRows()
	if err := r.serve(); err != nil {
		t.Fatal(err)
	}
	r.close()
	r.store = owned{storeOf(replayed)}
	if err := r.serve(); !errors.Is(err, keys.ErrCopyServed) {
		t.Errorf("a replayed store of which a copy has served since: %v", err)
	}
	r.replay(keys.ReplayOptions{})
}

// TestTermsFromBefore: a store that remembers no term serves, whatever terms the
// anchor has.
func TestTermsFromBefore(t *testing.T) {
	for _, holder := range []string{"", "somebody"} {
		r, store, _ := newMemoryRig(t)
		r.close()
		if _, err := r.anchor.Enter(t.Context(), ledger.Term{Number: 1, Holder: holder}); err != nil {
			t.Fatal(err)
		}
		r.store = owned{store}
		for range 2 {
			if err := r.serve(); err != nil {
				t.Fatal(err)
			}
			r.kill()
		}
	}
}

// TestTermsOfAnotherTime: an anchor that has lost terms cannot tell who served
// last.
func TestTermsOfAnotherTime(t *testing.T) {
	r := newOwnedRig(t)
	older := r.anchor.Clone()
	r.close()
	for range 2 {
		if err := r.serve(); err != nil {
			t.Fatal(err)
		}
		r.close()
	}
	r.anchor = older
	if err := r.serve(); !errors.Is(err, keys.ErrCopyServed) {
		t.Errorf("beside an older anchor: %v", err)
	}
	r.replay(keys.ReplayOptions{})
}

// TestStartFailsAnywhere: wherever a start fails, or dies, the next one of the
// same store succeeds, and an older copy does not serve after it.
func TestStartFailsAnywhere(t *testing.T) {
	for _, f := range []struct {
		store  fault
		anchor anchortest.Fault
		dies   bool // nothing works any more
		full   bool // the store is
	}{
		{lost, anchortest.Lost, false, false}, {persisted, anchortest.Persisted, false, false}, {persisted, anchortest.Persisted, true, false},
		{lost, anchortest.Lost, true, false}, {lost, anchortest.None, true, true},
	} {
		t.Run(fmt.Sprintf("%+v", f), func(t *testing.T) {
			r := newOwnedRig(t)
			for failing, fired := 1, true; fired; failing++ {
				r.close()
				copied := r.allRows()
				calls := 0
				fired = false
				fails := func() (first, more bool) {
					calls++
					fired = fired || calls == failing
					return calls == failing, f.dies && calls > failing
				}
				store := storeOf(copied)
				if f.full {
					store.failure = keys.ErrFull
				}
				store.fault = func(string) fault {
					switch first, more := fails(); {
					case first:
						return f.store
					case more:
						return lost
					}
					return none
				}
				r.anchor.Inject = func(_ context.Context, op string) anchortest.Fault {
					if f.full || op != "enter" {
						return anchortest.None
					}
					switch first, more := fails(); {
					case first:
						return f.anchor
					case more:
						return anchortest.Lost
					}
					return anchortest.None
				}
				r.store = owned{store}
				served := r.serve() == nil
				if f.full && !served {
					t.Fatalf("a full store does not serve (call %d)", failing)
				}
				r.close()
				r.anchor.Inject, store.fault = nil, nil
				if err := r.serve(); err != nil {
					t.Fatalf("after a start that failed at call %d: %v", failing, err)
				}
				newest := r.store
				r.close()
				r.store = owned{storeOf(copied)}
				if err := r.serve(); !errors.Is(err, keys.ErrCopyServed) {
					t.Fatalf("a copy from before call %d: %v", failing, err)
				}
				r.store = newest
				if err := r.serve(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
