package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/kms/local"
	keydv1 "lethe/proto/keyd/v1"
)

// stepUntil does duties until an epoch has come to a state.
func (r *rig) stepUntil(number uint32, s keydv1.EpochState) {
	r.t.Helper()
	for range 100 {
		all, _, err := r.Epochs(context.Background())
		if err != nil {
			r.t.Fatal(err)
		}
		if len(all) >= int(number) && all[number-1].State == s {
			return
		}
		if _, err := r.StepDuties(context.Background()); err != nil {
			r.t.Fatal(err)
		}
	}
	r.t.Fatalf("epoch %d never comes to %v", number, s)
}

// TestReplayAcrossEpochs: a backup whose epoch has gone further meanwhile, to
// every state, in every combination of the two.
func TestReplayAcrossEpochs(t *testing.T) {
	ctx := context.Background()
	begin := func(r *rig) {
		if _, err := r.TurnEpoch(ctx, 0); err != nil {
			r.t.Fatal(err)
		}
	}
	backups := []struct {
		name string
		come func(r *rig)
		open uint32 // the epoch that the backup calls open
	}{
		{"open", func(*rig) {}, 1},
		{"being left, the next prepared", func(r *rig) {
			begin(r)
			r.stepUntil(2, keydv1.EpochState_EPOCH_STATE_PREPARING)
		}, 1},
		{"draining", func(r *rig) { begin(r); r.stepUntil(1, draining) }, 2},
		{"drained, not dropped", func(r *rig) { begin(r); r.stepUntil(1, drained) }, 2},
		{"gone", func(r *rig) { r.turn() }, 2},
	}
	further := []struct {
		name string
		come func(r *rig)
	}{
		{"nothing", func(*rig) {}},
		{"draining", func(r *rig) { begin(r); r.stepUntil(r.openEpoch()+1, open); r.stepUntil(r.openEpoch()-1, draining) }},
		{"drained", func(r *rig) { r.turn() }},
		{"retiring", func(r *rig) { r.turn(); r.advance(3 * time.Hour); r.work() }},
		{"twice", func(r *rig) { r.turn(); r.turn() }},
		{"twice, draining", func(r *rig) { r.turn(); begin(r); r.stepUntil(r.openEpoch()+1, open) }},
	}
	for _, b := range backups {
		for _, f := range further {
			t.Run(b.name+"/"+f.name, func(t *testing.T) {
				r, store, _ := newMemoryRig(t)
				names := []string{"alice", "bob", "carol"}
				made := make(map[string]*keydv1.BlobKey)
				for _, n := range names {
					made[n] = r.seal(n, "memory")
				}
				b.come(r)
				made["dave"] = r.seal("dave", "memory") // under the epoch that is open by now
				rows := store.copyRows()
				first := r.destroy("alice", "d1")
				f.come(r)
				second := r.destroy("dave", "d2")
				r.close()

				r.store = storeOf(rows)
				calledOff := false
				done, err := keys.Replay(ctx, r.config(), keys.ReplayOptions{})
				if errors.Is(err, keys.ErrRootRetiring) {
					if !maps.EqualFunc(rows, r.store.(*memory).copyRows(), bytes.Equal) {
						t.Fatal("it refuses, and has changed the store")
					}
					calledOff = true
					done, err = keys.Replay(ctx, r.config(), keys.ReplayOptions{CallOff: true})
				}
				if err != nil {
					t.Fatal(err)
				}
				if calledOff != (len(done.CalledOff) != 0) {
					t.Errorf("called off: %v", done.CalledOff)
				}
				if err := r.serve(); err != nil {
					t.Fatal(err)
				}
				check := func(when string) {
					t.Helper()
					for n, k := range made {
						got, err := r.ask(openQuery("acme", n, "memory", k))
						if n == "alice" || n == "dave" {
							r.want(when+": "+n, err, isErased)
							continue
						}
						if err != nil || !bytes.Equal(got.Key, k.Key) {
							t.Errorf("%s: %s: %v", when, n, err)
						}
					}
					again, err := r.DestroyKey(ctx, destroyRequest("alice", "d1"))
					if err != nil || !bytes.Equal(again.Receipt, first.Receipt) {
						t.Errorf("%s: the first request again: %v", when, err)
					}
					again, err = r.DestroyKey(ctx, destroyRequest("dave", "d2"))
					if err != nil || !bytes.Equal(again.Receipt, second.Receipt) {
						t.Errorf("%s: the second request again: %v", when, err)
					}
				}
				check("after the replay")
				for _, rec := range []*keys.Recorded{first, second} {
					now, err := r.GetReceipt(ctx, &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_LedgerIndex{LedgerIndex: rec.Index}})
					if err != nil {
						t.Fatal(err)
					}
					v := r.verify(now)
					if e := v.Entries[0].Statement.Epoch; slices.Contains(done.CalledOff, e) && v.Stages().RootKept.IsZero() {
						t.Errorf("the root of epoch %d was kept, and the receipt does not say so", e)
					}
				}
				// Every epoch before the open one comes to its end, and the
				// receipts become final, as if nothing had been.
				for range 8 {
					r.work()
					r.advance(2 * time.Hour)
				}
				r.work()
				check("at the end")
				for n := uint32(1); n < r.openEpoch(); n++ {
					r.wantState(n, closed)
				}
				if r.openEpoch() > 1 {
					rec, err := r.GetReceipt(ctx, &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "d1"}})
					if err != nil {
						t.Fatal(err)
					}
					v := r.verify(rec)
					if e := v.Entries[0].Statement.Epoch; e < r.openEpoch() && v.Stages().Final.IsZero() {
						t.Errorf("the receipt of epoch %d is not final: %v", e, v.Stages())
					}
				}
				// And the next turn too.
				r.turn()
				check("after another turn")
			})
		}
	}
}

// openEpoch is the number of the open epoch.
func (r *rig) openEpoch() uint32 {
	return r.Status(context.Background()).Epoch
}

// TestReplayKeepsFinalBy: what receipts state of an epoch's end is the same before
// a restore and after it, whatever the settings of the replay, and that it was
// missed is told.
func TestReplayKeepsFinalBy(t *testing.T) {
	for _, c := range []struct {
		name        string
		drain, soak time.Duration // of the keyd that turned
		late        bool          // the destruction comes after the planned end
		destroyed   bool          // one comes before the restore
	}{
		{"shorter", 3 * time.Hour, time.Hour, false, true},
		{"longer", 60 * time.Hour, 30 * time.Hour, false, true},
		{"nothing was stated", 24 * time.Hour, 2 * time.Hour, false, false},
		{"stated after the planned end", 24 * time.Hour, 2 * time.Hour, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, store, _ := newMemoryRig(t)
			cfg := r.config()
			serve := func() *keys.Keys {
				t.Helper()
				cfg.Store = r.store
				k, err := keys.Open(t.Context(), cfg)
				if err != nil {
					t.Fatal(err)
				}
				r.Keys = k
				return k
			}
			final := func(subject string) time.Time {
				t.Helper()
				return r.verify(r.destroy(subject, "of "+subject)).Entries[0].Statement.FinalBy
			}
			r.close()
			backup := store.copyRows()
			cfg.DrainBudget, cfg.Soak = c.drain, c.soak
			serve()
			r.turn()
			all, _, err := r.Epochs(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := all[1].FinalBy.AsTime()
			if c.late {
				r.clock.Advance(all[1].PlannedEnd.AsTime().Sub(r.clock.Now()) + time.Hour)
				if err := r.Beat(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			var stated time.Time
			if c.destroyed {
				stated = final("alice")
			}
			r.close()

			r.store = storeOf(backup)
			other := cfg
			other.Store, other.DrainBudget, other.Soak = r.store, 100*time.Hour, 100*time.Hour
			if _, err := keys.Replay(t.Context(), other, keys.ReplayOptions{CallOff: true}); err != nil {
				t.Fatal(err)
			}
			serve()
			after := final("bob")
			if c.destroyed && !after.Equal(stated) || !c.late && !after.Equal(want) {
				t.Errorf("final by %v after the restore, %v stated before it, %v planned", after, stated, want)
			}
			if all, _, err = r.Epochs(t.Context()); err != nil || !all[1].FinalBy.AsTime().Equal(want) {
				t.Errorf("the epoch: %v, %v; planned %v", all[1], err, want)
			}
			r.clock.Advance(want.Sub(r.clock.Now()) + time.Second)
			if all, _, err = r.Epochs(t.Context()); err != nil || !all[1].Late {
				t.Errorf("it is not late: %v, %v", all[1], err)
			}
		})
	}
}

// TestReplayPastACallOff: a newer backup is replayed past a restore that called the
// destruction of a root off: the root's end goes on, as it does there. Only an
// operator's word keeps a root, and then the replay says so.
func TestReplayPastACallOff(t *testing.T) {
	for _, kept := range []bool{false, true} {
		t.Run(fmt.Sprintf("kept %t", kept), func(t *testing.T) {
			r, store, _ := newMemoryRig(t)
			r.seal("alice", "memory")
			older := store.copyRows()
			r.turn()
			r.advance(3 * time.Hour)
			r.work()
			r.wantState(1, retiring)
			newer := store.copyRows()
			r.close()
			r.store = storeOf(older)
			if done := r.replay(keys.ReplayOptions{CallOff: true}); len(done.CalledOff) != 1 || len(done.Kept) != 0 {
				t.Fatalf("the older one: %+v", done)
			}
			if kept {
				if err := r.CancelRetirement(t.Context(), 1); err != nil {
					t.Fatal(err)
				}
			}
			r.close()
			r.store = storeOf(newer)
			done := r.replay(keys.ReplayOptions{})
			if (len(done.Kept) != 0) != kept {
				t.Fatalf("the newer one: %+v", done)
			}
			all, _, err := r.Epochs(t.Context())
			if err != nil || all[0].Kept != kept {
				t.Errorf("epoch 1: %v, %v", all[0], err)
			}
			if kept {
				if err := r.ResumeRetirement(t.Context(), 1); err != nil {
					t.Fatal(err)
				}
			}
			r.closeEpoch(1)
		})
	}
}

// TestReplayTooLate: a backup of an epoch that is closed is refused in plain
// words, and neither the store nor the KMS is touched; and nobody who has all
// of it can open anything.
func TestReplayTooLate(t *testing.T) {
	ctx := context.Background()
	r, store, kms := newMemoryRig(t)
	k := r.seal("alice", "memory")
	rows := store.copyRows()
	r.destroy("alice", "d1")
	r.turn()
	r.closeEpoch(1)
	live := store.copyRows()
	r.close()
	calls := 0
	kms.fault = func(op string) fault {
		if op != "describe" && op != "unwrap" {
			calls++
		}
		return none
	}
	for _, o := range []keys.ReplayOptions{{}, {CallOff: true}} {
		r.store = storeOf(rows)
		if _, err := keys.Replay(ctx, r.config(), o); !errors.Is(err, keys.ErrRootDestroyed) {
			t.Errorf("replay of a closed epoch's backup: %v", err)
		}
		if err := r.serve(); !errors.Is(err, keys.ErrRootDestroyed) {
			t.Errorf("serving a closed epoch's backup: %v", err)
		}
		if !maps.EqualFunc(rows, r.store.(*memory).copyRows(), bytes.Equal) {
			t.Error("the store was changed")
		}
	}
	if calls != 0 {
		t.Errorf("the KMS was asked to change something %d times", calls)
	}
	// One that was taken after the end serves.
	r.store = storeOf(live)
	r.replay(keys.ReplayOptions{})
	_, err := r.ask(openQuery("acme", "alice", "memory", k))
	r.want("alice", err, isErased)
}

// TestReplayRootPutBack: a KMS that has a root again which the ledger calls
// destroyed does not make an older backup serve.
func TestReplayRootPutBack(t *testing.T) {
	ctx := context.Background()
	r, store, _ := newMemoryRig(t)
	r.seal("alice", "memory")
	rows := store.copyRows()
	roots, err := os.ReadFile(filepath.Join(r.dir, "roots"))
	if err != nil {
		t.Fatal(err)
	}
	r.destroy("alice", "d1")
	r.turn()
	r.closeEpoch(1)
	r.close()
	older := filepath.Join(t.TempDir(), "roots")
	if err := os.WriteFile(older, roots, 0o600); err != nil {
		t.Fatal(err)
	}
	putBack, err := local.Open(local.Options{Path: older, Keyfile: filepath.Join(r.dir, "keyfile"), Clock: r.clock.Now})
	if err != nil {
		t.Fatal(err)
	}
	defer putBack.Close()
	r.kms, r.store = putBack, storeOf(rows)
	if _, err := keys.Replay(ctx, r.config(), keys.ReplayOptions{}); !errors.Is(err, keys.ErrRootDestroyed) {
		t.Errorf("replay under a root that was put back: %v", err)
	}
	if err := r.serve(); !errors.Is(err, ledger.ErrBehind) || !errors.Is(err, keys.ErrRootDestroyed) {
		t.Errorf("serving under a root that was put back: %v", err)
	}
	if !maps.EqualFunc(rows, r.store.(*memory).copyRows(), bytes.Equal) {
		t.Error("the store was changed")
	}
}
