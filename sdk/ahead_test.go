package sdk_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// boundary is the first end of a bucket that a fake keyd comes to.
var boundary = time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)

// bucketOf is the bucket that a blob says it is of.
func bucketOf(blob []byte) time.Time {
	return time.Unix(int64(binary.BigEndian.Uint64(blob[8:])), 0)
}

// startAhead is start, with the clock a while before the boundary.
func startAhead(t *testing.T, before time.Duration, opts ...sdk.Option) (*sdk.Client, *fakeKeyd, *fakeClock) {
	t.Helper()
	c, f, clock := start(t, opts...)
	now, _ := clock.Now()
	clock.Advance(boundary.Add(-before).Sub(now))
	return c, f, clock
}

// untilBoundary seals once a second until a moment before the boundary.
func untilBoundary(t *testing.T, c *sdk.Client, clock *fakeClock, seal func() []byte) {
	t.Helper()
	for {
		now, _ := clock.Now()
		if left := boundary.Sub(now); left <= time.Second {
			pass(t, c, clock, left-time.Millisecond, left-time.Millisecond)
			return
		}
		pass(t, c, clock, time.Second, time.Second)
		if b := bucketOf(seal()); !b.Before(boundary) {
			t.Fatalf("sealed into the bucket of %v, which has not begun", b)
		}
	}
}

// Who seals all the time crosses the end of a bucket without a call: neither at
// the boundary, nor more than one before it.
func TestNextBucketIsThereAhead(t *testing.T) {
	memory := sdk.Group{Tenant: "acme", Class: "trace", Subjects: []string{"alice", "bob"}, Policy: sdk.Any}
	for name, seal := range map[string]func(*sdk.Client) ([]byte, error){
		"one": func(c *sdk.Client) ([]byte, error) { return c.Seal(context.Background(), alice, []byte("data")) },
		"two": func(c *sdk.Client) ([]byte, error) { return c.SealGroup(context.Background(), memory, []byte("data")) },
	} {
		t.Run(name, func(t *testing.T) {
			c, f, clock := startAhead(t, 5*time.Minute)
			do := func() []byte {
				t.Helper()
				blob, err := seal(c)
				if err != nil {
					t.Fatal(err)
				}
				return blob
			}
			do()
			untilBoundary(t, c, clock, do)
			f.with(func() {
				if n := len(f.aheads); n != 1 && n != 2 || name == "one" && n != 1 {
					t.Errorf("asked ahead %d times", n)
				}
				for _, at := range f.aheads {
					if left := boundary.Sub(at); left > 31*time.Second || left < 3*time.Second {
						t.Errorf("asked ahead %v before the end", left)
					}
				}
			})
			last := do()
			calls := f.calls.Load()
			clock.Advance(time.Millisecond)
			first := do()
			if n := f.calls.Load() - calls; n != 0 {
				t.Errorf("%d calls at the boundary", n)
			}
			if !bucketOf(last).Before(boundary) || !bucketOf(first).Equal(boundary) {
				t.Errorf("sealed into the buckets of %v, %v", bucketOf(last), bucketOf(first))
			}
			// It goes on as any lease does.
			for range 120 {
				pass(t, c, clock, time.Second, time.Second)
				do()
			}
			if n := f.calls.Load() - calls; n > 6 {
				t.Errorf("%d calls in two minutes", n)
			}
			if mapped, known := c.Leases(); mapped != 1 || known != 1 {
				t.Errorf("%d and %d leases are kept", mapped, known)
			}
		})
	}
}

func TestNextBucketOfColdKeysIsNotAskedFor(t *testing.T) {
	c, f, clock := startAhead(t, 50*time.Second)
	mustSeal(t, c, alice, "data")
	pass(t, c, clock, 49*time.Second, time.Second)
	if n := f.calls.Load(); n != 1 {
		t.Errorf("%d calls for a key that was used once", n)
	}
}

// What is destroyed between the asking ahead and the boundary is not sealed for
// after it: at once where the client is told, and else when the lease is over,
// which counts from the asking.
func TestNextBucketOfTheErased(t *testing.T) {
	c, f, clock := startAhead(t, 5*time.Minute)
	both := func() bool { _, known := c.Leases(); return known == 2 }
	for mustSeal(t, c, alice, "data"); !both(); mustSeal(t, c, alice, "data") {
		pass(t, c, clock, time.Second, time.Second)
	}
	f.kill("alice", keydv1.Outcome_OUTCOME_ERASED, true)
	passUntil(t, clock, 10*time.Millisecond, "both keys are dropped", func() bool { _, known := c.Leases(); return known == 0 })
	for range 60 {
		if _, err := c.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrErased) {
			t.Fatalf("sealed for the erased: %v", err)
		}
		pass(t, c, clock, time.Second, time.Second)
	}
}

func TestNextBucketOfTheErasedUntold(t *testing.T) {
	c, f, clock := startAhead(t, 5*time.Minute, sdk.WithRevocations(false))
	seal := func() []byte { t.Helper(); return mustSeal(t, c, alice, "data") }
	seal()
	untilBoundary(t, c, clock, seal)
	if _, known := c.Leases(); known != 2 {
		t.Fatalf("%d leases, want the next one too", known)
	}
	killed, _ := clock.Now()
	f.kill("alice", keydv1.Outcome_OUTCOME_ERASED, false)
	clock.Advance(time.Millisecond)
	for {
		_, err := c.Seal(t.Context(), alice, []byte("late"))
		if errors.Is(err, sdk.ErrErased) {
			return
		}
		if now, _ := clock.Now(); err != nil || !now.Before(killed.Add(time.Minute)) {
			t.Fatalf("%v after the destruction: %v", now.Sub(killed), err)
		}
		pass(t, c, clock, time.Second, time.Second)
	}
}

// A client that destroys lets go of what it has asked for ahead, too.
func TestNextBucketOfWhomThisClientErases(t *testing.T) {
	c, _, clock := startAhead(t, 5*time.Minute)
	seal := func() []byte { t.Helper(); return mustSeal(t, c, alice, "data") }
	seal()
	untilBoundary(t, c, clock, seal)
	if _, err := c.DestroyKey(t.Context(), destroyAlice()); err != nil {
		t.Fatal(err)
	}
	if _, known := c.Leases(); known != 0 {
		t.Errorf("%d keys are kept", known)
	}
}

// A client whose clock is ahead of keyd's does not seal into a bucket that has
// not begun by keyd's, whatever it has asked for.
func TestNextBucketWaitsForKeyd(t *testing.T) {
	c, f, clock := startAhead(t, 5*time.Minute)
	f.with(func() { f.skew = -20 * time.Minute })
	f.setLease(time.Hour)
	for range 35 * 60 / 10 {
		now := f.now()
		blob := mustSeal(t, c, alice, "data")
		if b := bucketOf(blob); b.After(now) {
			t.Fatalf("at %v by keyd's clock, sealed into the bucket of %v", now, b)
		}
		pass(t, c, clock, 10*time.Second, 10*time.Second)
	}
	if b := bucketOf(mustSeal(t, c, alice, "data")); !b.Equal(boundary) {
		t.Errorf("at last in the bucket of %v", b)
	}
}

// A keyd that does not know that one may ask ahead answers with the running
// bucket; then it is as it was.
func TestNextBucketOfAnOldKeyd(t *testing.T) {
	c, f, clock := startAhead(t, 5*time.Minute)
	f.with(func() { f.old = true })
	seal := func() []byte { t.Helper(); return mustSeal(t, c, alice, "data") }
	seal()
	untilBoundary(t, c, clock, seal)
	clock.Advance(time.Millisecond)
	calls, seals := f.calls.Load(), f.seals.Load()
	if b := bucketOf(seal()); !b.Equal(boundary) || f.calls.Load() != calls+1 {
		t.Errorf("sealed into the bucket of %v", b)
	}
	if seals > 14 {
		t.Errorf("%d queries in five minutes", seals)
	}
}

// What is got ahead stays within the limits of the cache, and drives nothing out
// of it.
func TestNextBucketsTakeNoRoom(t *testing.T) {
	c, f, clock := startAhead(t, 5*time.Minute, sdk.WithCacheLimits(3, 1<<20))
	people := make([]sdk.Target, 3)
	for i := range people {
		people[i] = sdk.Target{Tenant: "acme", Subject: fmt.Sprint("s", i), Class: "trace"}
	}
	seal := func() (blob []byte) {
		t.Helper()
		for _, p := range people {
			blob = mustSeal(t, c, p, "data")
		}
		return blob
	}
	seal()
	bytes := c.CacheBytes()
	untilBoundary(t, c, clock, seal)
	if mapped, known := c.Leases(); mapped != 3 || known != 3 || c.CacheBytes() != bytes {
		t.Errorf("%d and %d leases, of %d bytes", mapped, known, c.CacheBytes())
	}
	clock.Advance(time.Millisecond)
	seal()
	if mapped, _ := c.Leases(); mapped != 3 || c.CacheBytes() != bytes || f.calls.Load() == 0 {
		t.Errorf("%d leases, of %d bytes", mapped, c.CacheBytes())
	}
}

// Clients that have all sealed since long before do not ask ahead all at once.
func TestClientsAskAheadApart(t *testing.T) {
	_, f, clock := startAhead(t, 3*time.Minute)
	var clients []*sdk.Client
	for range 16 {
		c, err := sdk.Dial(t.Context(), f.addr, sdk.WithClock(clock))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
	}
	for {
		now, _ := clock.Now()
		if !now.Before(boundary) {
			break
		}
		for _, c := range clients {
			mustSeal(t, c, alice, "data")
		}
		clock.Advance(time.Second)
		for _, c := range clients {
			eventually(t, "the client follows the clock", c.Settled)
		}
	}
	calls := f.calls.Load()
	for _, c := range clients {
		if b := bucketOf(mustSeal(t, c, alice, "data")); !b.Equal(boundary) {
			t.Errorf("sealed into the bucket of %v", b)
		}
	}
	if n := f.calls.Load() - calls; n != 0 {
		t.Errorf("%d calls of %d clients at the boundary", n, len(clients))
	}
	f.with(func() {
		at := make(map[time.Time]int)
		for _, a := range f.aheads {
			at[a]++
		}
		if len(f.aheads) != len(clients) || len(at) < 3 {
			t.Errorf("asked ahead %d times, at %d times of their own", len(f.aheads), len(at))
		}
	})
}
