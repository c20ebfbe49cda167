package keys_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
)

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
