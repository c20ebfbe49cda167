package keys_test

import (
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
