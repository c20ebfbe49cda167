package keys_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"lethe/keyd/internal/keys"
	storev1 "lethe/proto/keyd/store/v1"
)

// drained_by looks back an hour: a policy that was shortened a moment ago may
// still have keys out.
func TestDrainedByAfterThePolicyWasShortened(t *testing.T) {
	r := newRig(t)
	if _, err := r.PutClass(t.Context(), "acme", class("trace", 24*time.Hour, time.Hour)); err != nil {
		t.Fatal(err)
	}
	r.seal("ann", "trace")
	r.seal("bob", "trace")
	r.seal("carl", "trace")
	if _, err := r.PutClass(t.Context(), "acme", class("trace", 24*time.Hour, 0)); err != nil {
		t.Fatal(err)
	}
	r.reopen()
	r.clock.Advance(10 * time.Minute)
	at := r.clock.Now().Truncate(time.Millisecond)
	if rec := r.destroy("ann", "r1"); !rec.DrainedBy.Equal(at.Add(time.Hour + 5*time.Second)) {
		t.Errorf("drained %v after the destroy, want an hour", rec.DrainedBy.Sub(at))
	}
	r.clock.Advance(time.Hour)
	at = r.clock.Now().Truncate(time.Millisecond)
	// The one operation of a lease of zero may last 5 s, and clocks may differ by as much.
	if rec := r.destroy("bob", "r2"); !rec.DrainedBy.Equal(at.Add(10 * time.Second)) {
		t.Errorf("drained %v after the destroy, want 10 s", rec.DrainedBy.Sub(at))
	}
	if k := r.seal("carl", "trace"); k.Lease.AsDuration() != 0 {
		t.Errorf("lease %v, want none", k.Lease.AsDuration())
	}
}

// However the policy changes, and however late a lease was issued, no lease
// outlives what a destroy would state.
func TestLongestLeaseCoversEveryLease(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_700_000_000, 0)
		leases := rapid.OneOf(rapid.Int64Range(0, 3_600_000), rapid.Just(int64(0)), rapid.Int64Range(1, 9_000))
		c := &storev1.Class{LeaseMs: leases.Draw(t, "lease")}
		var latest time.Time // when the last of all leases ends
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, 600_000).Draw(t, "wait")) * time.Millisecond)
			if rapid.Bool().Draw(t, "change") {
				keys.SetLease(c, leases.Draw(t, "lease"), now)
			} else {
				lease := time.Duration(c.LeaseMs) * time.Millisecond
				if lease == 0 { // which one operation has for as long
					lease = 5 * time.Second
				}
				if end := now.Add(lease); end.After(latest) {
					latest = end
				}
			}
			if by := now.Add(keys.LongestLease(c, now)); by.Before(latest) {
				t.Fatalf("a lease ends %v after drained_by", latest.Sub(by))
			}
			if len(c.LeaseHistory) > 16 {
				t.Fatalf("history of %d entries", len(c.LeaseHistory))
			}
		}
	})
}

// Buckets of one class never overlap, hold the moment that they are for, and
// never share a start, however the width changes and whoever asks ahead.
func TestBucketsNeverOverlap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		widths := rapid.SampledFrom([]int64{3600, 7200, 86400, 5000, 31 * 86400})
		now := time.Unix(1_700_000_000, 0)
		w := widths.Draw(t, "width")
		c := &storev1.Class{BucketWidthS: w, WidthFromS: now.Unix() / w * w}
		ends := make(map[int64]int64)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, 200_000).Draw(t, "wait")) * time.Second)
			if rapid.IntRange(0, 3).Draw(t, "change") == 0 {
				var next *storev1.Bucket
				_, end := keys.BucketAt(c, now)
				if e, made := ends[end]; made {
					next = &storev1.Bucket{StartS: end, EndS: e}
				}
				before := proto.Clone(c)
				if err := keys.SetWidth(c, widths.Draw(t, "width"), now, next); err != nil && (next == nil || !proto.Equal(before, c)) {
					t.Fatalf("refused: %v", err)
				}
			}
			at := now.Add(time.Duration(rapid.Int64Range(0, 3600).Draw(t, "ahead")) * time.Second)
			start, end := keys.BucketAt(c, at)
			if at.Unix() < start || at.Unix() >= end {
				t.Fatalf("%d is not in [%d, %d)", at.Unix(), start, end)
			}
			for s, e := range ends {
				if s == start && e != end || s != start && s < end && start < e {
					t.Fatalf("the buckets [%d, %d) and [%d, %d) overlap", s, e, start, end)
				}
			}
			ends[start] = end
		}
	})
}

func TestPutClass(t *testing.T) {
	r := newRig(t)
	c, err := r.PutClass(t.Context(), "acme", class("notes", 2*time.Hour, 0))
	if err != nil || c.Number != 5 {
		t.Fatalf("%v, %v", c, err)
	}
	first := r.seal("ann", "notes")
	if _, err := r.PutClass(t.Context(), "acme", class("notes", time.Hour, time.Minute)); err != nil {
		t.Fatal(err)
	}
	if again := r.seal("ann", "notes"); again.Bucket != first.Bucket || again.BucketEnd != first.BucketEnd {
		t.Error("the running bucket changed its width")
	}
	r.clock.Advance(2 * time.Hour)
	if next := r.seal("ann", "notes"); next.Bucket != first.BucketEnd || next.BucketEnd-next.Bucket != 3600 {
		t.Errorf("next bucket [%d, %d)", next.Bucket, next.BucketEnd)
	}
	for name, bad := range map[string]struct {
		width, lease time.Duration
	}{
		"unbounded lease": {time.Hour, time.Hour + 1},
		"negative lease":  {time.Hour, -1},
		"narrow":          {time.Minute, 0},
		"wide":            {400 * 24 * time.Hour, 0},
		"fractions":       {time.Hour + time.Millisecond, 0},
	} {
		_, err := r.PutClass(t.Context(), "acme", class("notes", bad.width, bad.lease))
		r.want(name, err, isInvalid)
	}
	_, err = r.PutClass(t.Context(), "acme", class("Notes", time.Hour, 0))
	r.want("a capital", err, isInvalid)
	classes, err := r.Classes(t.Context(), "acme")
	if err != nil || len(classes) != 5 || classes[4].Name != "notes" {
		t.Errorf("classes: %v, %v", classes, err)
	}
}
