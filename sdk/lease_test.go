package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

func TestConcurrentFirstUseIsOneCall(t *testing.T) {
	c, f, _ := start(t)
	gate := make(chan struct{})
	f.with(func() { f.answer = held(gate) })
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if _, err := c.Seal(t.Context(), alice, []byte(fmt.Sprint(i))); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "the call is under way", func() bool { return f.calls.Load() > 0 })
	close(gate)
	wg.Wait()
	if n := f.calls.Load(); n != 1 {
		t.Errorf("%d calls", n)
	}

	// The same for opening, with the first caller gone before the answer.
	blob := mustSeal(t, c, alice, "data")
	gate = make(chan struct{})
	f.with(func() { f.answer = held(gate) })
	impatient, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() { _, err := c.Open(impatient, alice, blob); left <- err }()
	eventually(t, "the call is under way", func() bool { return f.calls.Load() > 1 })
	for range 49 {
		wg.Go(func() {
			if _, err := c.Open(t.Context(), alice, blob); err != nil {
				t.Errorf("a caller that waited: %v", err)
			}
		})
	}
	leave() // the one that began the call
	if err := <-left; !errors.Is(err, context.Canceled) || !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("the caller that left: %v", err)
	}
	time.Sleep(5 * time.Millisecond) // for the others to be inside
	close(gate)
	wg.Wait()
	if n := f.calls.Load(); n != 2 {
		t.Errorf("%d calls", n)
	}
}

// held answers once gate is closed.
func held(gate <-chan struct{}) func(context.Context, *keydv1.GetBlobKeysRequest, *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
	return func(ctx context.Context, _ *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
		select {
		case <-gate:
			return resp, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// A lease is over when either clock says so, and nothing that happens to the
// wall clock prolongs it.
func TestLeaseEndsByEitherClock(t *testing.T) {
	for name, tt := range map[string]struct {
		pass func(*fakeClock)
		over bool
	}{
		"a moment before":              {func(c *fakeClock) { c.Advance(time.Minute - 1) }, false},
		"at the end":                   {func(c *fakeClock) { c.Advance(time.Minute) }, true},
		"wall clock alone":             {func(c *fakeClock) { c.StepWall(time.Minute) }, true},
		"suspended, wall clock slow":   {func(c *fakeClock) { c.suspend(time.Minute, false) }, true},
		"wall clock set back":          {func(c *fakeClock) { c.StepWall(-24 * time.Hour) }, false},
		"wall clock set back, passed":  {func(c *fakeClock) { c.StepWall(-24 * time.Hour); c.Advance(time.Minute) }, true},
		"wall clock set back meantime": {func(c *fakeClock) { c.Advance(59 * time.Second); c.StepWall(-time.Hour); c.Advance(time.Second) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			c, f, clock := start(t, sdk.WithRevocations(false))
			blob := mustSeal(t, c, alice, "data")
			mustOpen(t, c, alice, blob, "data")
			f.setDown(true)
			tt.pass(clock)
			_, sealErr := c.Seal(t.Context(), alice, []byte("more"))
			out, openErr := c.Open(t.Context(), alice, blob)
			if !tt.over {
				if sealErr != nil || openErr != nil {
					t.Errorf("Seal: %v; Open: %v", sealErr, openErr)
				}
				return
			}
			for _, err := range []error{sealErr, openErr} {
				if !errors.Is(err, sdk.ErrUnavailable) || errors.Is(err, sdk.ErrErased) || len(out) != 0 {
					t.Errorf("got %q, %v", out, err)
				}
			}
			f.setDown(false)
			mustOpen(t, c, alice, blob, "data")
			mustSeal(t, c, alice, "more")
		})
	}
}

// The time that the call itself takes is part of the lease.
func TestLeaseCountsFromBeforeTheRequest(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	f.with(func() {
		f.answer = func(_ context.Context, _ *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			clock.Advance(40 * time.Second)
			return resp, nil
		}
	})
	mustSeal(t, c, alice, "data")
	f.with(func() { f.answer = nil })
	f.setDown(true)
	clock.Advance(19 * time.Second)
	mustSeal(t, c, alice, "data")
	clock.Advance(time.Second)
	if _, err := c.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("a minute after the request: %v", err)
	}
	// A lease that is over when it comes is asked for again, not for ever.
	f.setDown(false)
	f.with(func() {
		f.answer = func(_ context.Context, _ *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			clock.Advance(2 * time.Minute)
			return resp, nil
		}
	})
	before := f.calls.Load()
	if _, err := c.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("answers that are always too late: %v", err)
	}
	if n := f.calls.Load() - before; n < 2 || n > 5 {
		t.Errorf("asked %d times", n)
	}
}

func TestLeaseIsAtMostAnHour(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	f.setLease(48 * time.Hour)
	mustSeal(t, c, alice, "data")
	f.setDown(true)
	clock.Advance(time.Hour - 1)
	mustSeal(t, c, alice, "data")
	clock.Advance(1)
	if _, err := c.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("after an hour: %v", err)
	}
}

// A lease of zero, unset or below is for one operation.
func TestZeroLease(t *testing.T) {
	for _, lease := range []*durationpb.Duration{nil, durationpb.New(0), durationpb.New(-time.Hour)} {
		c, f, _ := start(t)
		f.with(func() { f.lease = lease })
		var blob []byte
		for i := range 3 {
			blob = mustSeal(t, c, alice, "data")
			if n := f.asked.Load(); n != int64(i+1) {
				t.Errorf("%d queries for %d operations", n, i+1)
			}
		}
		mustOpen(t, c, alice, blob, "data")
		if mapped, known := c.Leases(); mapped != 0 || known != 0 {
			t.Errorf("%d and %d leases are kept", mapped, known)
		}
		// Concurrent operations do not share one either.
		f.asked.Store(0)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { mustOpen(t, c, alice, blob, "data") })
		}
		wg.Wait()
		if n := f.asked.Load(); n < 20 {
			t.Errorf("%d queries for 20 operations", n)
		}
	}
}

// The lease is checked again between the opening and the release of the
// plaintext.
func TestLeaseEndsInsideOpen(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	blob := mustSeal(t, c, alice, "secret plaintext")
	mustOpen(t, c, alice, blob, "secret plaintext")
	f.setDown(true)
	var readings atomic.Int64
	step := sync.OnceFunc(func() {
		clock.setOnNow(nil)
		clock.StepWall(2 * time.Minute)
	})
	clock.setOnNow(func() {
		// The keeper may be who reads second; Open's own second reading is not
		// before the step either.
		if readings.Add(1) >= 2 {
			step()
		}
	})
	dst := append(make([]byte, 0, 256), "dst"...)
	out, err := c.AppendOpen(t.Context(), dst, alice, blob)
	if readings.Load() < 2 {
		t.Fatal("the lease was not checked twice")
	}
	if !errors.Is(err, sdk.ErrUnavailable) || string(out) != "dst" {
		t.Errorf("got %q, %v", out, err)
	}
	if bytes.Contains(dst[:cap(dst)], []byte("secret")) {
		t.Error("the plaintext was left in dst")
	}
}

// When keyd can be asked, an operation whose lease ends under it goes on with
// a new one.
func TestLeaseEndsInsideAnOperation(t *testing.T) {
	c, _, clock := start(t)
	blob := mustSeal(t, c, alice, "data")
	for n := int64(1); n <= 4; n++ {
		mustOpen(t, c, alice, blob, "data")
		mustSeal(t, c, alice, "data")
		var readings atomic.Int64
		clock.setOnNow(func() {
			if readings.Add(1) == n {
				clock.setOnNow(nil)
				clock.StepWall(2 * time.Minute)
			}
		})
		mustOpen(t, c, alice, blob, "data")
		mustSeal(t, c, alice, "data")
		clock.setOnNow(nil)
	}
}

// A key is wiped when its lease is over, not only when it is asked for next.
func TestExpiredKeysAreWiped(t *testing.T) {
	for name, wait := range map[string]func(*testing.T, *sdk.Client, *fakeClock){
		"time passes": func(t *testing.T, c *sdk.Client, clock *fakeClock) { pass(t, c, clock, 2*time.Minute, 5*time.Second) },
		// Timers stand still in a suspend; the keys go soon after it.
		"suspend": func(t *testing.T, c *sdk.Client, clock *fakeClock) {
			eventually(t, "the keeper waits", c.Settled)
			clock.suspend(2*time.Minute, false)
			// The keeper's timer is late by the suspend, and by that alone.
			for range 20 {
				clock.Advance(time.Second)
			}
		},
		"wall clock": func(t *testing.T, c *sdk.Client, clock *fakeClock) {
			eventually(t, "the keeper waits", c.Settled)
			clock.StepWall(2 * time.Minute)
			pass(t, c, clock, 20*time.Second, time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, _, clock := start(t)
			blob := mustSeal(t, c, alice, "data")
			mustOpen(t, c, alice, blob, "data")
			sealers, openers := c.Sealers(), c.Openers()
			if len(sealers) != 1 || len(openers) != 1 {
				t.Fatalf("%d sealers and %d openers", len(sealers), len(openers))
			}
			wait(t, c, clock)
			eventually(t, "the keys are gone", func() bool {
				mapped, known := c.Leases()
				return mapped == 0 && known == 0
			})
			if _, err := sealers[0].Append(nil, nil, envelope.Context{}); !errors.Is(err, envelope.ErrWiped) {
				t.Errorf("the sealer: %v", err)
			}
			if _, err := openers[0].Append(nil, blob, envelope.Context{}); !errors.Is(err, envelope.ErrWiped) {
				t.Errorf("the opener: %v", err)
			}
			mustOpen(t, c, alice, blob, "data")
		})
	}
}

// With nothing to watch over, nothing wakes the client up.
func TestIdleClientHasNoTimers(t *testing.T) {
	c, _, clock := start(t, sdk.WithRevocations(false))
	mustSeal(t, c, alice, "data")
	pass(t, c, clock, 3*time.Minute, 5*time.Second)
	eventually(t, "no timer is left", func() bool { _, any := clock.nextTimer(); return !any })
	mustSeal(t, c, alice, "data")
	eventually(t, "a timer is set", func() bool { _, any := clock.nextTimer(); return any })
}

// Leases in use are renewed in the background, others are not.
func TestRenewal(t *testing.T) {
	c, f, clock := start(t)
	bob := sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	mustSeal(t, c, bob, "data")
	f.asked.Store(0)
	// Alice's data is opened all the time; nothing else is used.
	for range 60 {
		pass(t, c, clock, 5*time.Second, time.Second)
		mustOpen(t, c, alice, blob, "data")
	}
	// Five minutes of a lease of one, renewed after 30 to 45 seconds.
	if n := f.asked.Load(); n < 5 || n > 15 {
		t.Errorf("%d queries for one hot key in five minutes", n)
	}
	if n := f.seals.Load(); n != 2 {
		t.Errorf("%d queries to seal, want the first two", n)
	}
	if mapped, _ := c.Leases(); mapped != 1 {
		t.Errorf("%d leases, want the hot one", mapped)
	}
	// Renewed: keyd's absence is not felt for a while.
	f.setDown(true)
	pass(t, c, clock, 10*time.Second, time.Second)
	mustOpen(t, c, alice, blob, "data")
	f.setDown(false)
	// What was hot once and is no longer is let go.
	f.asked.Store(0)
	pass(t, c, clock, 3*time.Minute, time.Second)
	if n := known(c); n != 0 || f.asked.Load() > 1 {
		t.Errorf("%d keys are kept after %d queries", n, f.asked.Load())
	}
}

// A use without a miss is never slowed down by a call: the foreground makes
// none while a key is hot.
func TestHotKeysMissNothing(t *testing.T) {
	c, f, clock := start(t)
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	f.with(func() {
		f.answer = func(ctx context.Context, req *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			if c.Flights() != 0 {
				t.Error("somebody waits for a key that was in use")
			}
			return resp, nil
		}
	})
	for range 300 {
		pass(t, c, clock, time.Second, time.Second)
		mustOpen(t, c, alice, blob, "data")
		mustSeal(t, c, alice, "data")
	}
}

func TestRenewalFails(t *testing.T) {
	c, f, clock := start(t)
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	mustOpen(t, c, alice, blob, "data")
	began, _ := clock.Now()
	f.setDown(true)
	calls := f.calls.Load()
	for {
		pass(t, c, clock, time.Second, time.Second)
		now, _ := clock.Now()
		if now.Sub(began) >= time.Minute {
			break
		}
		// The old lease runs out by itself.
		mustOpen(t, c, alice, blob, "data")
	}
	if n := f.calls.Load() - calls; n < 2 || n > 60 {
		t.Errorf("%d attempts to renew", n)
	}
	if _, err := c.Open(t.Context(), alice, blob); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("after the lease: %v", err)
	}
}

// A renewal that keyd refuses ends the lease at once, even when no revocation
// was heard.
func TestRenewalRefused(t *testing.T) {
	for _, outcome := range []keydv1.Outcome{erased, pending, expired, keydv1.Outcome_OUTCOME_DENIED, keydv1.Outcome_OUTCOME_UNKNOWN} {
		t.Run(outcome.String(), func(t *testing.T) {
			c, f, clock := start(t, sdk.WithRevocations(false))
			blob := mustSeal(t, c, alice, "data")
			mustOpen(t, c, alice, blob, "data")
			mustOpen(t, c, alice, blob, "data")
			f.kill("alice", outcome, false)
			pass(t, c, clock, 50*time.Second, time.Second)
			if got := sdk.OutcomeOf(openErr(t, c, blob)); got != outcome {
				t.Errorf("got %v", got)
			}
		})
	}
}

// What one tenant is refused does not keep another's keys from being renewed.
func TestRenewalIsForOneTenant(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	other := sdk.Target{Tenant: "other", Subject: "alice", Class: "trace"}
	blob, lost := mustSeal(t, c, alice, "data"), mustSeal(t, c, other, "data")
	mustOpen(t, c, alice, blob, "data")
	mustOpen(t, c, other, lost, "data")
	mustOpen(t, c, other, lost, "data")
	f.with(func() {
		f.answer = func(_ context.Context, req *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			for _, q := range req.Queries {
				if q.Tenant == "other" {
					return nil, outcomeError(keydv1.Outcome_OUTCOME_DENIED, codes.PermissionDenied)
				}
			}
			if c.Flights() != 0 {
				t.Error("a hot key was missed")
			}
			return resp, nil
		}
	})
	mustOpen(t, c, alice, blob, "data")
	mustSeal(t, c, alice, "data")
	for range 5 {
		// All are due, and go in the same moment.
		pass(t, c, clock, 46*time.Second, 46*time.Second)
		mustOpen(t, c, alice, blob, "data")
		mustSeal(t, c, alice, "data")
	}
	if _, err := c.Open(t.Context(), other, lost); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("the other tenant: %v", err)
	}
}

func openErr(t *testing.T, c *sdk.Client, blob []byte) error {
	t.Helper()
	out, err := c.Open(t.Context(), alice, blob)
	if err == nil {
		t.Fatalf("opened %q", out)
	}
	return err
}

// Sealing goes to the next bucket at the boundary, while what was sealed
// before stays open.
func TestBucketBoundary(t *testing.T) {
	c, f, clock := start(t)
	f.with(func() { f.width = time.Hour })
	f.setLease(time.Hour)
	clock.Advance(50 * time.Minute)
	first := mustSeal(t, c, alice, "first")
	// The keeper looks first: a key that is in use then is asked for ahead.
	pass(t, c, clock, 10*time.Minute-1, 10*time.Minute-1)
	mustSeal(t, c, alice, "first")
	if n := f.seals.Load(); n != 1 {
		t.Errorf("%d queries to seal before the boundary", n)
	}
	clock.Advance(1)
	second := mustSeal(t, c, alice, "second")
	if n := f.seals.Load(); n != 2 {
		t.Errorf("%d queries to seal after it", n)
	}
	h1, _, _ := envelope.ParseHeader(first)
	h2, _, _ := envelope.ParseHeader(second)
	if h2.Bucket != h1.Bucket+3600 {
		t.Errorf("sealed into buckets %d and %d", h1.Bucket, h2.Bucket)
	}
	mustOpen(t, c, alice, first, "first")
	mustOpen(t, c, alice, second, "second")
	// keyd being away at the boundary is an outage, not a reason to go on.
	pass(t, c, clock, time.Hour-time.Second, time.Hour-time.Second)
	mustSeal(t, c, alice, "second")
	f.setDown(true)
	clock.Advance(time.Second)
	if _, err := c.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("sealing into a bucket that is over: %v", err)
	}
}

// When the client's clock is ahead of keyd's, the bucket that keyd says runs
// is used, but not kept.
func TestBucketEndedByClientsClockOnly(t *testing.T) {
	c, f, clock := start(t)
	f.with(func() { f.width, f.skew = time.Hour, -10*time.Second })
	f.setLease(time.Hour)
	clock.Advance(time.Hour + 5*time.Second)
	for range 3 {
		mustSeal(t, c, alice, "data")
	}
	if n := f.seals.Load(); n != 3 {
		t.Errorf("%d queries", n)
	}
	clock.Advance(10 * time.Second)
	for range 3 {
		mustSeal(t, c, alice, "data")
	}
	if n := f.seals.Load(); n != 4 {
		t.Errorf("%d queries", n)
	}
}

// A hot sealer that is renewed across the boundary gets the next bucket's key.
func TestRenewalAcrossBoundary(t *testing.T) {
	c, f, clock := start(t)
	f.with(func() { f.width = time.Hour })
	clock.Advance(59 * time.Minute)
	var last *envelope.Header
	for range 120 {
		pass(t, c, clock, time.Second, time.Second)
		h, _, err := envelope.ParseHeader(mustSeal(t, c, alice, "data"))
		if err != nil {
			t.Fatal(err)
		}
		if now, _ := clock.Now(); h.Bucket != uint64(now.Truncate(time.Hour).Unix()) {
			t.Fatalf("at %v sealed into the bucket of %v", now, time.Unix(int64(h.Bucket), 0).UTC())
		}
		last = h
	}
	if last == nil {
		t.Fatal("nothing was sealed")
	}
}

// Answers that are not what was asked for are refused, and are no outcome.
func TestMalformedAnswers(t *testing.T) {
	c, f, _ := start(t)
	blob := mustSeal(t, c, alice, "data")
	key := func(change func(*keydv1.BlobKey)) func(*keydv1.GetBlobKeysResponse) {
		return func(r *keydv1.GetBlobKeysResponse) { change(r.Results[0].GetKey()) }
	}
	for name, change := range map[string]func(*keydv1.GetBlobKeysResponse){
		"no result":     func(r *keydv1.GetBlobKeysResponse) { r.Results = nil },
		"two results":   func(r *keydv1.GetBlobKeysResponse) { r.Results = append(r.Results, r.Results[0]) },
		"empty result":  func(r *keydv1.GetBlobKeysResponse) { r.Results[0].Result = nil },
		"short key":     key(func(k *keydv1.BlobKey) { k.Key = k.Key[:31] }),
		"long key":      key(func(k *keydv1.BlobKey) { k.Key = append(k.Key, 0) }),
		"short id":      key(func(k *keydv1.BlobKey) { k.KeyId = k.KeyId[:15] }),
		"another id":    key(func(k *keydv1.BlobKey) { k.KeyId[0] ^= 1 }),
		"another class": key(func(k *keydv1.BlobKey) { k.ClassNumber++ }),
		"huge class":    key(func(k *keydv1.BlobKey) { k.ClassNumber += 1 << 16 }),
		"other bucket":  key(func(k *keydv1.BlobKey) { k.Bucket++ }),
		"a strange outcome": func(r *keydv1.GetBlobKeysResponse) {
			r.Results[0].Result = &keydv1.BlobKeyResult_Failure{Failure: &keydv1.Failure{Outcome: 99}}
		},
		"a blob's outcome": func(r *keydv1.GetBlobKeysResponse) {
			r.Results[0].Result = &keydv1.BlobKeyResult_Failure{Failure: &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_CORRUPT}}
		},
	} {
		f.with(func() {
			f.answer = func(_ context.Context, _ *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
				change(resp)
				return resp, nil
			}
		})
		err := openErr(t, c, blob)
		var e *sdk.Error
		if !errors.As(err, &e) || e.Outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.with(func() { f.answer = nil })
	mustOpen(t, c, alice, blob, "data")
	// Another secret than the blob was sealed under is not an outcome of
	// keyd's either, but a blob that does not open.
	c2, f2, _ := start(t)
	mustSeal(t, c2, alice, "data")
	h, _, _ := envelope.ParseHeader(blob)
	f2.with(func() {
		for _, k := range f2.keys {
			k.id = h.Recipients[0][:]
		}
	})
	if err := openErr(t, c2, blob); !errors.Is(err, sdk.ErrCorrupt) {
		t.Errorf("another secret: %v", err)
	}
}
