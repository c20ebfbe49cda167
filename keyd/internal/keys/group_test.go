package keys_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
)

// gatedRig is a rig whose anchor takes nothing while the gate is shut.
func gatedRig(t *testing.T, gather time.Duration, subjects int) (r *rig, shut *atomic.Bool, open func()) {
	r = newRig(t)
	r.close()
	shut = new(atomic.Bool)
	gate := make(chan struct{})
	r.anchor.Inject = func(ctx context.Context, op string) anchortest.Fault {
		if op == "put" && shut.Load() {
			select {
			case <-gate:
			case <-ctx.Done():
			}
		}
		return anchortest.None
	}
	r.gather = gather
	r.open(false)
	for i := range subjects {
		r.seal(fmt.Sprint("person ", i), "memory")
	}
	return r, shut, sync.OnceFunc(func() { close(gate) })
}

// destroying starts the destruction of these subjects. What it returns waits for
// them, and returns the sizes of their receipts' trees.
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
		for _, rec := range all {
			sizes = append(sizes, r.verify(rec).Entries[0].Checkpoint.Size)
		}
		return sizes
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
