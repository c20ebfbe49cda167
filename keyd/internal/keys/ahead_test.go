package keys_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
)

// ahead asks for the key with which to seal from a time on.
func (r *rig) ahead(subject, class string, from time.Time) (*keydv1.BlobKey, error) {
	q := sealQuery("acme", subject, class)
	q.SealFrom = uint64(from.Unix())
	return r.ask(q)
}

// near brings the clock to a while before the end of the bucket of a class.
func (r *rig) near(class string, before time.Duration) (end time.Time) {
	r.t.Helper()
	end = time.Unix(int64(r.seal("anybody", class).BucketEnd), 0)
	r.pass(end.Add(-before).Sub(r.clock.Now()))
	return end
}

func TestAskAhead(t *testing.T) {
	r := newRig(t)
	end := r.near("trace", 20*time.Second)
	running := r.seal("ann", "trace")
	next, err := r.ahead("ann", "trace", end)
	if err != nil {
		t.Fatal(err)
	}
	if next.Bucket != uint64(end.Unix()) || next.BucketEnd != uint64(end.Add(day).Unix()) || bytes.Equal(next.Key, running.Key) || !bytes.Equal(next.KeyId, running.KeyId) {
		t.Errorf("bucket [%d, %d)", next.Bucket, next.BucketEnd)
	}
	if in := next.StartsIn.AsDuration(); in != end.Sub(r.clock.Now().Truncate(time.Millisecond)) || next.Lease.AsDuration() != time.Minute {
		t.Errorf("it begins in %v, and is leased for %v", in, next.Lease.AsDuration())
	}
	if got := r.seal("ann", "trace"); got.Bucket != running.Bucket || got.StartsIn != nil {
		t.Error("who does not ask ahead gets another bucket")
	}
	// One call may ask for both.
	later := sealQuery("acme", "ann", "trace")
	later.SealFrom = uint64(end.Unix())
	both, err := r.BlobKeys(t.Context(), []*keydv1.BlobKeyQuery{later, sealQuery("acme", "ann", "trace"), later})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []*keydv1.BlobKey{next, running, next} {
		if got := both[i]; got.Err != nil || !bytes.Equal(got.Key.Key, want.Key) || got.Key.Bucket != want.Bucket {
			t.Errorf("query %d of three: %v", i, got.Err)
		}
	}
	// A clock that is behind the caller's past the boundary, or ahead of it.
	if again, err := r.ahead("ann", "trace", end.Add(time.Minute)); err != nil || !bytes.Equal(again.Key, next.Key) {
		t.Errorf("asked for later: %v", err)
	}
	if past, err := r.ahead("ann", "trace", end.Add(-day)); err != nil || past.Bucket != running.Bucket || past.StartsIn != nil {
		t.Errorf("asked for what is past: %v", err)
	}
	_, err = r.ahead("ann", "trace", r.clock.Now().Add(keys.MaxLease+2*time.Second))
	r.want("further ahead than a lease", err, isInvalid)
	q := openQuery("acme", "ann", "trace", running)
	q.SealFrom = uint64(end.Unix())
	_, err = r.ask(q)
	r.want("to open", err, isInvalid)

	r.pass(20 * time.Second)
	if got := r.seal("ann", "trace"); !bytes.Equal(got.Key, next.Key) || got.Bucket != next.Bucket {
		t.Error("when it has begun the bucket has another key")
	}
	r.want("what was sealed with it", r.opens("ann", "trace", next), ok)
}

// A key that was got ahead dies with its person, and its lease is counted.
func TestAskAheadAndDestroy(t *testing.T) {
	r := newRig(t)
	end := r.near("trace", 20*time.Second)
	r.seal("ann", "trace")
	_, cursor, _, _, err := r.Revocations(t.Context(), []string{"acme"}, 0)
	if err != nil {
		t.Fatal(err)
	}
	next, err := r.ahead("ann", "trace", end)
	if err != nil {
		t.Fatal(err)
	}
	over := r.clock.Now().Add(next.Lease.AsDuration())
	rec := r.destroy("ann", "r1")
	if rec.DrainedBy.Before(over) {
		t.Errorf("drained by %v, and the lease is over at %v", rec.DrainedBy, over)
	}
	revoked, _, _, _, err := r.Revocations(t.Context(), []string{"acme"}, cursor)
	if err != nil || len(revoked) != 1 || !bytes.Equal(revoked[0].KeyId, next.KeyId) {
		t.Errorf("revoked %v, %v", revoked, err)
	}
	_, err = r.ahead("ann", "trace", end)
	r.want("ahead for the erased", err, isErased)
	r.want("open", r.opens("ann", "trace", next), isErased)
}

// A bucket that was made ahead keeps its bounds whatever becomes of the width,
// and its retention counts from its own end.
func TestAskAheadAndChangedWidth(t *testing.T) {
	r := newRig(t)
	end := r.near("trace", 20*time.Minute)
	width := func(w time.Duration) error {
		_, err := r.PutClass(context.Background(), "acme", class("trace", w, time.Minute))
		return err
	}
	next, err := r.ahead("ann", "trace", end)
	if err != nil {
		t.Fatal(err)
	}
	r.want("narrower", width(time.Hour), ok)
	r.pass(20 * time.Minute)
	if got := r.seal("ann", "trace"); got.Bucket != next.Bucket || got.BucketEnd != next.BucketEnd {
		t.Errorf("[%d, %d) has become [%d, %d)", next.Bucket, next.BucketEnd, got.Bucket, got.BucketEnd)
	}
	after := time.Unix(int64(next.BucketEnd), 0)
	r.pass(after.Add(-10 * time.Minute).Sub(r.clock.Now()))
	narrow, err := r.ahead("ann", "trace", after)
	if err != nil || narrow.Bucket != next.BucketEnd || narrow.BucketEnd-narrow.Bucket != 3600 {
		t.Fatalf("%v, %v", narrow, err)
	}
	r.want("its width again", width(time.Hour), ok)
	r.want("another width for a bucket that was made", width(2*time.Hour), isConflict)
	r.pass(10 * time.Minute)
	r.want("when it has begun", width(2*time.Hour), ok)
	if got := r.seal("ann", "trace"); got.Bucket != narrow.Bucket || got.BucketEnd != narrow.BucketEnd {
		t.Errorf("[%d, %d) has become [%d, %d)", narrow.Bucket, narrow.BucketEnd, got.Bucket, got.BucketEnd)
	}
}

// At midnight everybody comes at once: the bucket is made once, and all get
// their keys.
func TestMidnight(t *testing.T) {
	r := newRig(t)
	people := make([]*keydv1.BlobKey, 100)
	for i := range people {
		people[i] = r.seal(fmt.Sprint("s", i), "trace")
	}
	for name, ahead := range map[string]bool{"asked ahead": true, "nobody asked ahead": false} {
		end := r.near("trace", 20*time.Second)
		if ahead {
			if _, err := r.ahead("s0", "trace", end); err != nil {
				t.Fatal(err)
			}
		}
		made := r.live('B')
		r.pass(20 * time.Second)
		var wg sync.WaitGroup
		for i := range people {
			wg.Go(func() {
				k, err := r.ask(sealQuery("acme", fmt.Sprint("s", i), "trace"))
				if err != nil || k.Bucket != uint64(end.Unix()) {
					t.Errorf("%s: %v, %v", name, k, err)
				}
			})
		}
		wg.Wait()
		want := made + 1
		if ahead {
			want = made
		}
		if n := r.live('B'); n != want {
			t.Errorf("%s: %d bucket keys, want %d", name, n, want)
		}
	}
}

// A store that was put back from before somebody asked ahead does not make that
// bucket's key anew under its name.
func TestAskAheadReplayed(t *testing.T) {
	r := newRig(t)
	end := r.near("trace", 20*time.Minute)
	ann := r.seal("ann", "trace")
	file := r.backup()
	lost, err := r.ahead("ann", "trace", end)
	if err != nil {
		t.Fatal(err)
	}
	r.destroy("bob", "r1") // so that the store is behind
	r.restoreFrom(file)
	r.replay(keys.ReplayOptions{})
	r.pass(25 * time.Minute)
	if got := r.seal("ann", "trace"); got.Bucket == lost.Bucket {
		t.Errorf("the bucket from %d has another key (%v)", lost.Bucket, !bytes.Equal(got.Key, lost.Key))
	}
	r.want("what was sealed in the lost one", r.opens("ann", "trace", lost), isUnknown)
	r.want("what was sealed before", r.opens("ann", "trace", ann), ok)
}
