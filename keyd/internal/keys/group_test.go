package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
)

// gatedRig is a rig whose anchor takes nothing while the gate is shut.
func gatedRig(t *testing.T, gather time.Duration, subjects int) (r *rig, shut *atomic.Bool, open func()) {
	r = newRig(t)
	r.close()
	shut, open = r.gate()
	r.gather = gather
	r.open(false)
	for i := range subjects {
		r.seal(fmt.Sprint("person ", i), "memory")
	}
	return r, shut, open
}

// gate has the rig's anchor take nothing while it is shut.
func (r *rig) gate() (shut *atomic.Bool, open func()) {
	shut = new(atomic.Bool)
	gate := make(chan struct{})
	r.anchor.Inject = func(ctx context.Context, op string) anchortest.Fault {
		if op == "put" && shut.Load() {
			select {
			case <-gate:
			case <-ctx.Done():
				return anchortest.Lost
			}
		}
		return anchortest.None
	}
	return shut, sync.OnceFunc(func() { close(gate) })
}

// destroying starts the destruction of these subjects. What it returns waits for
// them, and returns the sizes of their receipts' trees. Each must be the receipt
// that the store has of its request.
func (r *rig) destroying(from, to int) (sizes func() []uint64) {
	all, errs := make([]*keys.Recorded, to-from), make([]error, to-from)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			all[i], errs[i] = r.DestroyKey(context.Background(), destroyRequest(fmt.Sprint("person ", from+i), fmt.Sprint("d", from+i)))
		})
	}
	return func() (sizes []uint64) {
		r.t.Helper()
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			r.t.Fatal(err)
		}
		for i, rec := range all {
			sizes = append(sizes, r.verify(rec).Entries[0].Checkpoint.Size)
			r.asStored(rec, "acme", fmt.Sprint("d", from+i))
		}
		return sizes
	}
}

// asStored holds an answer against what the store has of the request.
func (r *rig) asStored(rec *keys.Recorded, tenant, request string) {
	r.t.Helper()
	got, err := r.GetReceipt(context.Background(), &keydv1.GetReceiptRequest{
		Tenant: tenant, By: &keydv1.GetReceiptRequest_RequestId{RequestId: request},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if !bytes.Equal(rec.Receipt, got.Receipt) || rec.Index != got.Index || !rec.DrainedBy.Equal(got.DrainedBy) || !rec.Due.Equal(got.Due) {
		r.t.Errorf("%s: entry %d was answered, and %d is in the store, or another receipt of it", request, rec.Index, got.Index)
	}
}

// committed waits until the ledger has this many entries.
func (r *rig) committed(size uint64) {
	r.t.Helper()
	for range 20_000 {
		if r.LedgerSize() == size {
			return
		}
		time.Sleep(time.Millisecond)
	}
	r.t.Fatalf("the ledger has %d entries, not %d", r.LedgerSize(), size)
}

// Operations that come while the anchor is busy wait for each other, and share a
// group as soon as they fill one or the anchor is done.
func TestGatherGroup(t *testing.T) {
	r, shut, open := gatedRig(t, time.Hour, keys.MaxGroup+4)
	defer open()
	before := r.LedgerSize()
	shut.Store(true)
	first := r.destroying(0, 1)
	r.committed(before + 1)
	full := r.destroying(1, 1+keys.MaxGroup)
	r.committed(before + 1 + keys.MaxGroup)
	rest := r.destroying(1+keys.MaxGroup, 4+keys.MaxGroup)
	open()
	for i, sizes := range [][]uint64{first(), full()} {
		for _, size := range sizes {
			if want := before + 1 + uint64(i)*keys.MaxGroup; size != want {
				t.Fatalf("group %d: an entry of a tree of %d, want %d", i, size, want)
			}
		}
	}
	rest()
	r.committed(before + 4 + keys.MaxGroup)
}

// None waits longer for an anchor that is slow, or out of reach.
func TestGatherNoLonger(t *testing.T) {
	r, shut, open := gatedRig(t, time.Millisecond, 3)
	defer open()
	before := r.LedgerSize()
	shut.Store(true)
	var all []func() []uint64
	for i := range 3 {
		all = append(all, r.destroying(i, i+1))
		r.committed(before + 1 + uint64(i))
	}
	open()
	for _, sizes := range all {
		sizes()
	}
}

// Nothing waits for others while keyd ends.
func TestGatherEnds(t *testing.T) {
	r, shut, open := gatedRig(t, time.Hour, 1)
	defer open()
	before := r.LedgerSize()
	shut.Store(true)
	first := r.destroying(0, 1)
	r.committed(before + 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	waiting := []*keys.Op{keys.NewOp(ctx, true), keys.NewOp(ctx, false)}
	if got := r.Gather(ctx, waiting); !slices.Equal(got, waiting) {
		t.Errorf("%d operations of %d come back", len(got), len(waiting))
	}
	open()
	first()
}

// What is too large for one transaction is run again, one by one.
func TestGroupTooLarge(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.close()
	shut, open := r.gate()
	defer open()
	r.gather = time.Hour
	r.Keys = r.another()
	const n = 1 + keys.MaxGroup
	for i := range n {
		r.seal(fmt.Sprint("person ", i), "memory")
	}
	before := r.LedgerSize()
	shut.Store(true)
	first := r.destroying(0, 1)
	r.committed(before + 1)
	store.large = 50
	rest := r.destroying(1, n)
	r.committed(before + n)
	open()
	seen := make(map[uint64]bool)
	for _, size := range append(first(), rest()...) {
		if seen[size] {
			t.Errorf("two entries of a tree of %d", size)
		}
		seen[size] = true
	}
}

// What was logged by a transaction that did not commit is told to nobody.
func TestGroupRunAgain(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	other := r.another()
	r.seal("ann", "memory")
	before := r.LedgerSize()
	var once sync.Once
	var first *keys.Recorded
	store.fault = func(string) fault {
		once.Do(func() {
			// A repeat of the request gets through at another keyd, in between.
			store.fault = nil
			var err error
			if first, err = other.DestroyKey(context.Background(), destroyRequest("ann", "d1")); err != nil {
				t.Error(err)
			}
			other.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{Tenant: "acme", SubjectId: []byte("bob"), HoldId: "h", RequestId: "h1", Reason: "court"})
		})
		return none
	}
	rec := r.destroy("ann", "d1")
	r.verify(rec)
	r.asStored(rec, "acme", "d1")
	if !bytes.Equal(rec.Receipt, first.Receipt) {
		t.Error("two receipts of one request")
	}
	if n := r.LedgerSize(); n != before {
		t.Errorf("it takes the ledger for one of %d entries by an append that did not commit, after %d", n, before)
	}
}

// Every operation is answered with the receipt that the store has of it, to the byte.
func TestAnswersAsStored(t *testing.T) {
	ctx := context.Background()
	r := newRig(t)
	for _, who := range []string{"ann", "bob", "eve"} {
		r.seal(who, "memory")
		r.seal(who, "trace")
	}
	for _, o := range []struct {
		request string
		do      func(id string) (*keys.Recorded, error)
	}{
		{"person", func(id string) (*keys.Recorded, error) { return r.DestroyKey(ctx, destroyRequest("ann", id)) }},
		{"person who had none", func(id string) (*keys.Recorded, error) { return r.DestroyKey(ctx, destroyRequest("nobody", id)) }},
		{"done by another", func(id string) (*keys.Recorded, error) { return r.DestroyKey(ctx, destroyRequest("ann", id)) }},
		{"classes", func(id string) (*keys.Recorded, error) {
			return r.DestroyKey(ctx, destroyRequest("bob", id, "memory", "trace"))
		}},
		{"reinstated", func(id string) (*keys.Recorded, error) {
			return r.Reinstate(ctx, &keydv1.ReinstateRequest{Tenant: "acme", SubjectId: []byte("ann"), RequestId: id, Reason: "again"})
		}},
		{"scheduled", func(id string) (*keys.Recorded, error) {
			req := destroyRequest("eve", id)
			req.NotBefore = timestamppb.New(r.clock.Now().Add(time.Hour))
			return r.DestroyKey(ctx, req)
		}},
		{"cancelled", func(id string) (*keys.Recorded, error) {
			return r.CancelDestruction(ctx, &keydv1.CancelDestructionRequest{
				Tenant: "acme", SubjectId: []byte("eve"), DestroyRequestId: "scheduled", RequestId: id, Reason: "no",
			})
		}},
		{"hold", func(id string) (*keys.Recorded, error) {
			return r.PlaceHold(ctx, &keydv1.PlaceHoldRequest{Tenant: "acme", SubjectId: []byte("eve"), HoldId: "h", RequestId: id, Reason: "court"})
		}},
		{"release", func(id string) (*keys.Recorded, error) {
			return r.ReleaseHold(ctx, &keydv1.ReleaseHoldRequest{Tenant: "acme", SubjectId: []byte("eve"), HoldId: "h", RequestId: id, Reason: "court"})
		}},
		{"hold of all", func(id string) (*keys.Recorded, error) {
			return r.PlaceHold(ctx, &keydv1.PlaceHoldRequest{Tenant: "acme", HoldId: "h", RequestId: id, Reason: "court"})
		}},
		{"release of all", func(id string) (*keys.Recorded, error) {
			return r.ReleaseHold(ctx, &keydv1.ReleaseHoldRequest{Tenant: "acme", HoldId: "h", RequestId: id, Reason: "court"})
		}},
		{"tenant", func(id string) (*keys.Recorded, error) {
			return r.DestroyTenant(ctx, &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: id, Reason: "left"})
		}},
	} {
		for range 2 { // a repeat is answered alike
			rec, err := o.do(o.request)
			if err != nil {
				t.Fatalf("%s: %v", o.request, err)
			}
			r.verify(rec)
			r.asStored(rec, "acme", o.request)
		}
	}
}
