package keys

import (
	"errors"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

// Bounds of a class's policy.
const (
	MaxLease       = time.Hour
	onceLease      = 5 * time.Second // for which the one operation of a lease of zero may last
	DefaultLease   = time.Minute
	MinBucketWidth = time.Hour
	MaxBucketWidth = 366 * 24 * time.Hour
	MaxClasses     = 64 // of a tenant
)

// DefaultClasses are those of a tenant that names none.
var DefaultClasses = []struct {
	Name  string
	Width time.Duration
}{
	{"checkpoint", 30 * 24 * time.Hour},
	{"trace", 24 * time.Hour},
	{"backup", 30 * 24 * time.Hour},
	{"memory", 30 * 24 * time.Hour},
}

// bucketAt returns the bucket of a class that now falls into, [start, end) in
// Unix seconds. Buckets of one class never overlap: a new width begins where a
// bucket of the old one ends. A clock before the grid's start counts as its start.
func bucketAt(c *storev1.Class, now time.Time) (start, end int64) {
	from, width := c.WidthFromS, c.BucketWidthS
	next := c.NextWidthFromS
	t := now.Unix()
	if c.NextBucketWidthS != 0 && t >= next {
		from, width = next, c.NextBucketWidthS
	}
	t = max(t, from)
	start = from + (t-from)/width*width
	return start, start + width
}

// longestLease is the longest for which a client may have had a key under the
// class's policy at any time in the hour before now, or later.
func longestLease(c *storev1.Class, now time.Time) time.Duration {
	longest := lasts(c.LeaseMs)
	since := now.Add(-MaxLease).UnixMilli()
	for _, p := range c.LeaseHistory {
		if p.UntilMs >= since {
			longest = max(longest, lasts(p.LeaseMs))
		}
	}
	return time.Duration(longest) * time.Millisecond
}

// lasts is for how many milliseconds a client has a key under a lease.
func lasts(leaseMs int64) int64 {
	if leaseMs == 0 {
		return onceLease.Milliseconds()
	}
	return leaseMs
}

// setLease changes the lease and remembers the old one for as long as keys may
// be out under it. The history is a list of what may still matter, so it stays
// short; where changes come faster than they lapse, neighbours are merged to
// the longer lease and the later end, which errs on the safe side. It is from to
// to now, as far as is known.
func setLease(c *storev1.Class, leaseMs int64, from, to time.Time) {
	if c.LeaseMs == leaseMs {
		return
	}
	since := from.Add(-MaxLease).UnixMilli()
	kept := c.LeaseHistory[:0]
	for _, p := range c.LeaseHistory {
		if p.UntilMs >= since {
			kept = append(kept, p)
		}
	}
	old := &storev1.LeasePolicy{LeaseMs: c.LeaseMs, UntilMs: to.UnixMilli()}
	if n := len(kept); n >= 16 {
		kept[n-1].LeaseMs = max(lasts(kept[n-1].LeaseMs), lasts(old.LeaseMs))
		kept[n-1].UntilMs = max(kept[n-1].UntilMs, old.UntilMs)
	} else {
		kept = append(kept, old)
	}
	c.LeaseHistory = kept
	c.LeaseMs = leaseMs
}

// nextBucket reads the bucket that follows the running one, if it was made
// already for somebody who asked ahead; nil if not.
func nextBucket(r Reader, tenant id16, c *storev1.Class, now time.Time) (*storev1.Bucket, error) {
	_, end := bucketAt(c, now)
	next := new(storev1.Bucket)
	err := getRow(r, bucketKey(tenant, c.Number, uint64(end)), next)
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	return next, err
}

// setWidth changes the bucket width from the end of the running bucket on or,
// where the next one was made already, from the end of that.
func setWidth(c *storev1.Class, widthS int64, now time.Time, next *storev1.Bucket) error {
	if c.NextBucketWidthS != 0 && now.Unix() >= c.NextWidthFromS {
		c.BucketWidthS, c.WidthFromS = c.NextBucketWidthS, c.NextWidthFromS
		c.NextBucketWidthS, c.NextWidthFromS = 0, 0
	}
	if next != nil && c.NextBucketWidthS != 0 && next.StartS == c.NextWidthFromS {
		if widthS == c.NextBucketWidthS {
			return nil
		}
		return fail(keydv1.Outcome_OUTCOME_CONFLICT,
			"the next bucket has its width already; repeat it when that bucket has begun").with("field", "bucket_width")
	}
	if c.BucketWidthS == widthS {
		c.NextBucketWidthS, c.NextWidthFromS = 0, 0
		return nil
	}
	_, end := bucketAt(&storev1.Class{BucketWidthS: c.BucketWidthS, WidthFromS: c.WidthFromS}, now)
	if next != nil {
		end = next.EndS
	}
	c.NextBucketWidthS, c.NextWidthFromS = widthS, end
	return nil
}

// binding returns the first hold that binds at now.
func binding(holds []*storev1.Hold, now time.Time) *storev1.Hold {
	for _, h := range holds {
		if binds(h, now) {
			return h
		}
	}
	return nil
}

// holding is binding at the time by which holds end. Most have no holds, and
// that time takes a call of the system.
func (k *Keys) holding(holds []*storev1.Hold, now time.Time) *storev1.Hold {
	if len(holds) == 0 {
		return nil
	}
	return binding(holds, k.holdTime(now))
}

func binds(h *storev1.Hold, now time.Time) bool {
	return h.EndMs == 0 || now.UnixMilli() < h.EndMs
}
