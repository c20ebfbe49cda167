package keys_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"lethe/keyd/internal/keys"
)

// A keyd that dies in the middle of carrying keys over tells until then how far
// it is, and the next one goes on from there: no row is gone over twice.
func TestRewrapGoesOnWhereItStopped(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(100)
	p.destroy("person-0")
	store.large = 40 // so that there are several transactions
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	commits := 0
	store.fault = func(op string) fault {
		if op != "update" {
			return none
		}
		r.clock.Advance(time.Second)
		if commits++; commits > 3 { // the row that tells of it, and two batches
			return lost
		}
		return none
	}
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, errInjected) {
		t.Fatalf("it does not die: %v", err)
	}
	store.fault = nil
	e := r.epoch(1)
	done := e.RowsRewrapped + e.RowsDead
	if done == 0 || done >= e.RowsTotal || e.RowsDamaged != 0 {
		t.Fatalf("not what the test is about: %v", e)
	}
	want := 2 * time.Second * time.Duration(e.RowsTotal-done) / time.Duration(done)
	if e.Eta == nil || (e.Eta.AsDuration()-want).Abs() > time.Millisecond {
		t.Errorf("%d of %d rows took 2 s; the rest is said to take %v, not %v", done, e.RowsTotal, e.Eta.AsDuration(), want)
	}
	g, err := r.EpochGauges(t.Context())
	if err != nil || g != (keys.EpochGauges{Open: 2, Unclosed: 1, Rows: e.RowsTotal, RowsDone: done}) {
		t.Errorf("gauges: %+v, %v", g, err)
	}

	r.reopen2()
	r.clock.Advance(keys.BeatLapse + time.Second)
	r.stepTo(1, drained)
	if e := r.epoch(1); e.RowsRewrapped+e.RowsDead != e.RowsTotal || e.RowsDead != 1 {
		t.Errorf("in the end: %v", e)
	}
	r.work()
	p.check()
}

// The rate bounds how fast keys are carried over, and nothing else waits for it.
func TestRewrapRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, _ := newMemoryRig(t)
		p := r.populate(20)
		if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		r.stepTo(1, draining)
		r.Keys.Close()
		cfg := r.config()
		cfg.RewrapRate = 2
		var err error
		if r.Keys, err = keys.Open(context.Background(), cfg); err != nil {
			t.Fatal(err)
		}
		r.clock.Advance(keys.BeatLapse + time.Second)
		// The time here is the test's own: it passes only where somebody waits for it.
		begun, stepped := time.Now(), make(chan error)
		go func() {
			_, err := r.StepDuties(context.Background())
			stepped <- err
		}()
		time.Sleep(time.Millisecond)
		e := r.epoch(1)
		if e.RowsRewrapped == 0 {
			t.Fatalf("not what the test is about: %v", e)
		}
		p.keys["late"] = r.seal("late", "trace")
		p.destroy("person-0")
		p.check()
		if err := <-stepped; err != nil {
			t.Fatal(err)
		}
		if took, least := time.Since(begun), time.Duration(e.RowsTotal)*time.Second/2; took < least {
			t.Errorf("%d rows took %v, at 2 a second", e.RowsTotal, took)
		}
	})
}
