package keys_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
	"lethe/sdk/receipt"
)

// The status tells how much later drained_by is for a clock that was set back.
func TestStatusTellsOfAClockSetBack(t *testing.T) {
	r := newRig(t)
	var up atomic.Int64
	r.uptime = func() time.Duration { return time.Duration(up.Load()) }
	r.reopen()
	said := func() bool {
		for _, c := range r.Status(t.Context()).Components {
			if c.Name == "epochs" {
				return c.Healthy && strings.Contains(c.Detail, "drained_by is 2h0m0s later")
			}
		}
		return false
	}
	r.duty()
	if said() {
		t.Error("told of a clock that was not set")
	}
	r.clock.Advance(-2 * time.Hour)
	if !said() {
		t.Error("not told of a clock that was set back")
	}
	if _, err := r.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	if said() {
		t.Error("told after the clock was confirmed")
	}
}

// A clock that was set back dates nothing earlier than what was stated or
// believed before, so that no promise is too early.
func TestStatementsDoNotGoBack(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "trace")
	r.seal("bob", "trace")
	r.duty()
	r.clock.Advance(2 * time.Hour)
	r.duty() // which believes the clock
	believed := r.clock.Now().Truncate(time.Millisecond)
	for i, subject := range []string{"ann", "bob"} {
		r.clock.Advance(-3 * day)
		_ = keys.Duty(t.Context(), r.Keys) // it is not believed
		rec := r.destroy(subject, "r"+subject)
		s := r.verify(rec).Entries[0].Statement
		if s.Time.Before(believed) || s.DrainedBy.Before(believed.Add(time.Minute)) {
			t.Errorf("destroy %d is dated %v, drained by %v; %v was believed", i, s.Time, s.DrainedBy, believed)
		}
		r.reopen()
	}
}

// restart stops keyd and starts it anew.
func (r *rig) restart() {
	r.t.Helper()
	r.close()
	if err := r.serve(); err != nil {
		r.t.Fatal(err)
	}
}

// A clock that was set, either way, has no lease end sooner: what was leased
// before runs on, and what passes on no clock of keyd's passes for the client.
func TestDrainedByOutlastsAClockThatIsSet(t *testing.T) {
	for name, between := range map[string]func(*rig){
		"running": func(*rig) {},
		"stopped": (*rig).restart,
		"killed": func(r *rig) {
			r.kill()
			if err := r.serve(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		begin := func(t *testing.T) (r *rig, pass func(time.Duration)) {
			r = newOwnedRig(t)
			var up atomic.Int64
			r.uptime = func() time.Duration { return time.Duration(up.Load()) }
			r.restart()
			up.Add(123_456) // no whole milliseconds
			return r, func(d time.Duration) {
				up.Add(int64(d))
				r.clock.Advance(d)
			}
		}
		put := func(t *testing.T, r *rig, lease time.Duration) {
			t.Helper()
			if _, err := r.PutClass(t.Context(), "acme", class("trace", 24*time.Hour, lease)); err != nil {
				t.Fatal(err)
			}
		}
		destroyed := func(t *testing.T, r *rig, ends time.Time) *receipt.Statement {
			t.Helper()
			s := r.verify(r.destroy("ann", "r")).Entries[0].Statement
			if s.DrainedBy.Before(ends) {
				t.Errorf("drained by %v: a lease runs until %v", s.DrainedBy, ends)
			}
			if late := s.DrainedBy.Sub(ends); late > time.Minute {
				t.Errorf("drained by %v, %v later than the last lease", s.DrainedBy, late)
			}
			return s
		}
		t.Run("back, "+name, func(t *testing.T) {
			r, pass := begin(t)
			r.duty()
			pass(50 * time.Second)
			r.duty()
			issued := r.clock.Now().Truncate(time.Millisecond)
			lease := r.seal("ann", "trace").Lease.AsDuration()
			r.clock.Advance(-2 * time.Hour)
			between(r)
			pass(20 * time.Second)
			s := destroyed(t, r, issued.Add(20*time.Second+lease))
			if s.Time.Before(issued) {
				t.Errorf("denied since %v: the key was issued at %v", s.Time, issued)
			}
		})
		t.Run("forth, "+name, func(t *testing.T) {
			r, pass := begin(t)
			put(t, r, time.Hour)
			r.duty()
			pass(50 * time.Second)
			r.duty()
			r.seal("ann", "trace")
			put(t, r, time.Second)
			r.clock.Advance(2 * time.Hour)
			between(r)
			pass(20 * time.Second)
			put(t, r, 2*time.Second)
			destroyed(t, r, r.clock.Now().Add(time.Hour-20*time.Second))
			// An hour that does pass ends it.
			pass(time.Hour + time.Minute)
			r.duty()
			r.seal("bob", "trace")
			s := r.verify(r.destroy("bob", "rb")).Entries[0].Statement
			if d := s.DrainedBy.Sub(s.Time); d > time.Minute {
				t.Errorf("drained after %v, an hour after the lease was shortened", d)
			}
		})
		t.Run("back for long, "+name, func(t *testing.T) {
			r, pass := begin(t)
			r.duty()
			right := r.clock.Now()
			r.clock.Advance(-2 * time.Hour)
			for range 3 {
				pass(30 * time.Minute)
				r.duty()
				r.beat()
			}
			lease := r.seal("ann", "trace").Lease.AsDuration()
			between(r)
			pass(20 * time.Second)
			r.beat()
			between(r)
			destroyed(t, r, right.Add(90*time.Minute+20*time.Second+lease))
		})
		t.Run("forth, then back, "+name, func(t *testing.T) {
			r, pass := begin(t)
			r.duty()
			r.close()
			r.clock.Advance(time.Hour) // of two that pass
			r.restart()
			r.duty()
			pass(time.Minute)
			r.clock.Advance(time.Hour)
			r.duty()
			right := r.clock.Now()
			r.clock.Advance(-time.Hour)
			pass(50 * time.Minute)
			r.duty()
			r.beat()
			lease := r.seal("ann", "trace").Lease.AsDuration()
			between(r)
			pass(20 * time.Second)
			destroyed(t, r, right.Add(50*time.Minute+20*time.Second+lease))
		})
		t.Run("back, then forth, "+name, func(t *testing.T) {
			r, pass := begin(t)
			put(t, r, time.Hour)
			between(r)
			pass(2 * time.Hour)
			r.duty()
			r.clock.Advance(-2 * time.Hour)
			pass(70 * time.Minute)
			r.seal("ann", "trace")
			put(t, r, time.Second)
			r.clock.Advance(2 * time.Hour)
			pass(20 * time.Second)
			put(t, r, 2*time.Second)
			destroyed(t, r, r.clock.Now().Add(time.Hour-20*time.Second))
		})
		for _, confirmed := range []bool{false, true} {
			t.Run(fmt.Sprintf("forth later, confirmed %v, %s", confirmed, name), func(t *testing.T) {
				r, pass := begin(t)
				between(r)
				put(t, r, time.Hour)
				pass(2 * time.Hour)
				r.duty()
				r.seal("ann", "trace")
				put(t, r, time.Second)
				r.clock.Advance(2 * time.Hour)
				if confirmed {
					if _, err := r.ConfirmClock(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				pass(20 * time.Second)
				put(t, r, 2*time.Second)
				destroyed(t, r, r.clock.Now().Add(time.Hour-20*time.Second))
			})
		}
		t.Run("back, confirmed, "+name, func(t *testing.T) {
			r, pass := begin(t)
			pass(20 * time.Hour)
			r.duty()
			r.beat()
			lease := r.seal("ann", "trace").Lease.AsDuration()
			r.clock.Advance(-2 * time.Hour)
			r.restart()
			if _, err := r.ConfirmClock(t.Context()); err != nil {
				t.Fatal(err)
			}
			pass(time.Minute)
			r.beat()
			between(r)
			destroyed(t, r, r.clock.Now().Add(lease))
		})
		t.Run("far ahead and set right, "+name, func(t *testing.T) {
			r, pass := begin(t)
			r.duty()
			r.beat()
			r.seal("ann", "trace")
			r.clock.Advance(1000 * time.Hour)
			_ = keys.Duty(t.Context(), r.Keys) // it is not believed
			r.beat()
			r.clock.Advance(-1000 * time.Hour)
			between(r)
			pass(time.Minute)
			r.duty()
			destroyed(t, r, r.clock.Now().Add(time.Minute))
		})
	}
}

// How far ahead a clock was when keyd started is forgotten with that keyd, but
// for as much as a clock is believed.
func TestStartedByAClockFarAhead(t *testing.T) {
	r := newOwnedRig(t)
	r.uptime = func() time.Duration { return 0 }
	r.duty()
	r.seal("ann", "trace")
	const far = 1000 * time.Hour
	for _, by := range []time.Duration{far, -far} {
		r.clock.Advance(by)
		r.restart()
		r.beat()
	}
	s := r.verify(r.destroy("ann", "r")).Entries[0].Statement
	if d := s.DrainedBy.Sub(r.clock.Now()); d > 25*time.Hour {
		t.Errorf("drained in %v", d)
	}
}

// While the clock is in doubt nobody is told that data is gone for good.
func TestRetentionIsNotExpiredByAClockInDoubt(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, 0)
	k := r.seal("ann", "trace")
	r.duty()
	r.clock.Advance(30 * day)
	_, err := r.ask(openQuery("acme", "ann", "trace", k))
	r.want("far ahead of what was believed", err, isUnavail)
	if _, err := r.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = r.ask(openQuery("acme", "ann", "trace", k))
	r.want("confirmed", err, isExpired)
}

// Steps of the clock, each of which would be believed, are not when they come
// to too much: nothing that is due only by them is done, and nobody is told so.
func TestClockIsSetInSmallSteps(t *testing.T) {
	r := newRig(t)
	var up atomic.Int64
	r.uptime = func() time.Duration { return time.Duration(up.Load()) }
	pass := func(d time.Duration) {
		up.Add(int64(d))
		r.clock.Advance(d)
	}
	r.reopen()
	r.retain("trace", day, day, 0)
	k := r.seal("ann", "trace")
	open := openQuery("acme", "ann", "trace", k)
	duty := func(what string, doubted bool) {
		t.Helper()
		if err := keys.Duty(t.Context(), r.Keys); errors.Is(err, keys.ErrClock) != doubted {
			t.Errorf("%s: %v", what, err)
		}
	}
	duty("at first", false)
	r.clock.Advance(20 * time.Hour)
	duty("one step", false)
	end := time.Unix(int64(k.BucketEnd), 0).Add(time.Hour + day)
	for range 4 {
		r.clock.Advance(20 * time.Hour)
		duty("another step", true)
		want := ok
		if !r.clock.Now().Before(end) {
			want = isUnavail
		}
		_, err := r.ask(open)
		r.want("after another step", err, want)
	}
	// Set right again, it is believed by itself.
	r.clock.Advance(-80 * time.Hour)
	duty("set right", false)
	_, err := r.ask(open)
	r.want("set right", err, ok)

	// Time that passes is no step.
	for range 10 {
		pass(20 * time.Hour)
		duty("time passes", false)
	}
	// Backwards as well; an operator's word begins anew.
	for range 2 {
		r.clock.Advance(-20 * time.Hour)
		_ = keys.Duty(t.Context(), r.Keys)
	}
	duty("back", true)
	if _, err := r.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	duty("confirmed", false)
	r.clock.Advance(20 * time.Hour)
	duty("a step after it was confirmed", false)
	r.clock.Advance(20 * time.Hour)
	duty("two steps after it was confirmed", true)
}
