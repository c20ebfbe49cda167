package keys_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/kms/local"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// newMemoryRig is a rig over a store in memory, with a KMS and a store that a
// test can make fail.
func newMemoryRig(t *testing.T) (*rig, *memory, *faultyKMS) {
	t.Helper()
	r := &rig{
		t: t, dir: t.TempDir(), anchor: anchortest.NewMemory(),
		clock: &clock{now: time.Date(2026, 3, 1, 12, 30, 0, 123456, time.UTC)},
	}
	if err := local.GenerateKeyfile(filepath.Join(r.dir, "keyfile")); err != nil {
		t.Fatal(err)
	}
	roots, err := local.Open(local.Options{
		Path: filepath.Join(r.dir, "roots"), Keyfile: filepath.Join(r.dir, "keyfile"), Create: true, Clock: r.clock.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { roots.Close() })
	store := newMemory()
	kms := &faultyKMS{KMS: roots, fault: func(string) fault { return none }}
	r.store, r.kms = store, kms
	r.Keys = r.another()
	t.Cleanup(r.close)
	if _, err := r.CreateTenant(t.Context(), "acme", nil); err != nil {
		t.Fatal(err)
	}
	return r, store, kms
}

// another is another keyd over the same store, KMS and anchor. It ends with
// the test.
func (r *rig) another() *keys.Keys {
	r.t.Helper()
	k, err := keys.Open(context.Background(), r.config())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(k.Close)
	return k
}

// advance moves the clock, in steps between which keyd may look at it.
func (r *rig) advance(d time.Duration) {
	for d > 0 {
		step := min(d, 6*time.Hour)
		r.clock.Advance(step)
		d -= step
		_, _ = r.StepDuties(context.Background())
	}
}

// work does the duties until there is nothing to do at once.
func (r *rig) work() {
	r.t.Helper()
	for range 100 {
		again, err := r.StepDuties(context.Background())
		if err != nil {
			r.t.Fatalf("duties: %v", err)
		}
		if !again {
			return
		}
	}
	r.t.Fatal("the duties never end")
}

// epoch tells of one epoch.
func (r *rig) epoch(number uint32) *keydv1.Epoch {
	r.t.Helper()
	all, _, err := r.Epochs(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range all {
		if e.Number == number {
			return e
		}
	}
	r.t.Fatalf("no epoch %d", number)
	return nil
}

func (r *rig) wantState(number uint32, s keydv1.EpochState) {
	r.t.Helper()
	if e := r.epoch(number); e.State != s {
		r.t.Fatalf("epoch %d is %v, waiting for %q; want %v", number, e.State, e.WaitingFor, s)
	}
}

const (
	preparing = keydv1.EpochState_EPOCH_STATE_PREPARING
	abandoned = keydv1.EpochState_EPOCH_STATE_ABANDONED
	draining  = keydv1.EpochState_EPOCH_STATE_DRAINING
	open      = keydv1.EpochState_EPOCH_STATE_OPEN
	drained   = keydv1.EpochState_EPOCH_STATE_DRAINED
	retiring  = keydv1.EpochState_EPOCH_STATE_RETIRING
	closed    = keydv1.EpochState_EPOCH_STATE_CLOSED
)

// turn turns the open epoch, until its rows are dropped.
func (r *rig) turn() {
	r.t.Helper()
	if _, err := r.TurnEpoch(context.Background(), 0); err != nil {
		r.t.Fatal(err)
	}
	r.work()
}

// closeEpoch ends an epoch that was turned.
func (r *rig) closeEpoch(number uint32) {
	r.t.Helper()
	r.work()
	r.advance(3 * time.Hour)
	r.work()
	r.wantState(number, retiring)
	r.advance(2 * time.Hour)
	r.work()
	r.wantState(number, closed)
}

// kinds are the kinds of the ledger's entries from an index on, with their epochs.
func (r *rig) kinds(from uint64) (all []string) {
	r.t.Helper()
	err := r.store.View(context.Background(), func(tx keys.Reader) error {
		head, err := ledger.ReadHead(tx)
		if err != nil {
			return err
		}
		for i := from; i < head.Size; i++ {
			e, err := ledger.ReadEntry(tx, i)
			if err != nil {
				return err
			}
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				return err
			}
			all = append(all, fmt.Sprintf("%s %d", s.Kind, s.Epoch))
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

// getReceipt fetches and verifies a request's receipt.
func (r *rig) getReceipt(request string) (*keys.Recorded, *receipt.Verified) {
	r.t.Helper()
	rec, err := r.GetReceipt(context.Background(), &keydv1.GetReceiptRequest{
		Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: request},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return rec, r.verify(rec)
}

// An epoch's whole life, seen from outside.
func TestEpochTurns(t *testing.T) {
	r := newRig(t)
	ann, bob := r.seal("ann", "trace"), r.seal("bob", "memory")
	r.seal("eve", "trace")
	r.destroy("eve", "before")
	size := r.LedgerSize()

	r.turn()
	r.wantState(1, drained)
	r.wantState(2, open)
	if got := r.rows("w\x00\x00\x00\x01"); len(got) != 0 {
		t.Errorf("%d rows of the drained epoch", len(got))
	}
	for name, k := range map[string]*keydv1.BlobKey{"ann": ann, "bob": bob} {
		class := map[string]string{"ann": "trace", "bob": "memory"}[name]
		got, err := r.ask(openQuery("acme", name, class, k))
		if err != nil || !bytes.Equal(got.Key, k.Key) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if e := r.epoch(1); e.RowsRewrapped == 0 || e.RowsDead != 1 || e.RowsRewrapped+e.RowsDead != e.RowsTotal {
		t.Errorf("progress: %v", e)
	}
	if n := r.HeldKEKs(1); n != 0 {
		t.Errorf("%d KEKs of the drained epoch are held", n)
	}
	root := r.epoch(1).RootId
	if d, err := r.kms.Describe(t.Context(), root); err != nil || d.State != keys.RootDisabled {
		t.Errorf("the old root: %v, %v", d, err)
	}
	r.closeEpoch(1)
	if d, err := r.kms.Describe(t.Context(), root); err != nil || d.State != keys.RootDestroyed {
		t.Errorf("the old root: %v, %v", d, err)
	}
	want := []string{"epoch-opened 2", "epoch-draining 1", "epoch-drained 1", "sanitised 1", "epoch-retiring 1", "epoch-closed 1"}
	if got := r.kinds(size); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the ledger says %q, want %q", got, want)
	}
	r.reopen()
	if got, err := r.ask(openQuery("acme", "ann", "trace", ann)); err != nil || !bytes.Equal(got.Key, ann.Key) {
		t.Errorf("after a restart: %v", err)
	}
	r.destroy("ann", "after")
	_, v := r.getReceipt("before")
	if st := v.Stages(); st.Sanitised.IsZero() || st.Final.IsZero() || st.FinalBasis != local.FinalBasis {
		t.Errorf("stages %+v", st)
	}
	_, v = r.getReceipt("after")
	if st := v.Stages(); !st.Sanitised.IsZero() || !st.Final.IsZero() || st.FinalBy.IsZero() {
		t.Errorf("of the next epoch: stages %+v", st)
	}
}
