package sdk_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// watched returns a client that hears acme's revocations, with a blob of
// alice's and leases to seal and open in hand.
func watched(t *testing.T) (*sdk.Client, *fakeKeyd, *fakeClock, []byte) {
	t.Helper()
	c, f, clock := start(t)
	f.setLease(time.Hour) // longer than any test waits
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	eventually(t, "the stream is open", func() bool { return f.isWatching("acme") })
	return c, f, clock, blob
}

func known(c *sdk.Client) int {
	_, n := c.Leases()
	return n
}

func TestRevocation(t *testing.T) {
	for _, outcome := range []keydv1.Outcome{erased, pending, expired} {
		t.Run(outcome.String(), func(t *testing.T) {
			c, f, _, blob := watched(t)
			bob := sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}
			mustSeal(t, c, bob, "data")
			sealers, openers := c.Sealers(), c.Openers()
			f.kill("alice", outcome, true)
			eventually(t, "alice's keys are gone", func() bool { return known(c) == 1 })
			wiped := 0
			for _, s := range sealers {
				if _, err := s.Append(nil, nil, envelope.Context{}); errors.Is(err, envelope.ErrWiped) {
					wiped++
				}
			}
			for _, o := range openers {
				if _, err := o.Append(nil, blob, envelope.Context{}); errors.Is(err, envelope.ErrWiped) {
					wiped++
				}
			}
			if wiped != 2 {
				t.Errorf("%d keys were wiped, want alice's two", wiped)
			}
			// keyd is asked again, and its answer is what counts.
			calls := f.calls.Load()
			if got := sdk.OutcomeOf(openErr(t, c, blob)); got != outcome {
				t.Errorf("Open: %v", got)
			}
			if _, err := c.Seal(t.Context(), alice, nil); sdk.OutcomeOf(err) != outcome {
				t.Errorf("Seal: %v", err)
			}
			if n := f.calls.Load() - calls; n != 2 {
				t.Errorf("keyd was asked %d times", n)
			}
			calls = f.calls.Load()
			mustSeal(t, c, bob, "data")
			if f.calls.Load() != calls {
				t.Error("bob's key was dropped too")
			}
		})
	}
}

// A destruction that was cancelled brings the key back; one that happened
// does not, whatever a confused keyd says.
func TestRevokedKeyIsLeasedAgain(t *testing.T) {
	c, f, _, blob := watched(t)
	f.kill("alice", pending, true)
	eventually(t, "alice's keys are gone", func() bool { return known(c) == 0 })
	f.kill("alice", keydv1.Outcome_OUTCOME_UNSPECIFIED, false)
	mustOpen(t, c, alice, blob, "data")

	f.kill("alice", erased, true)
	eventually(t, "alice's keys are gone", func() bool { return known(c) == 0 })
	f.kill("alice", keydv1.Outcome_OUTCOME_UNSPECIFIED, false)
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
	// Pending after erased does not bring it back either.
	f.kill("alice", pending, true)
	f.kill("alice", keydv1.Outcome_OUTCOME_UNSPECIFIED, false)
	time.Sleep(5 * time.Millisecond)
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
}

// A bucket that has expired is dropped; whether somebody's part of it was kept,
// for a legal hold, is for keyd to say.
func TestBucketRevocation(t *testing.T) {
	c, f, _, blob := watched(t)
	other := sdk.Target{Tenant: "acme", Subject: "alice", Class: "backup"}
	mustSeal(t, c, other, "data")
	bob := sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}
	held := mustSeal(t, c, bob, "data")
	mustOpen(t, c, bob, held, "data")
	h, _, _ := envelope.ParseHeader(blob)
	f.kill("alice", expired, false)
	f.with(func() {
		f.tell(&keydv1.Revocation{Tenant: "other", ClassNumber: uint32(h.Class), Bucket: h.Bucket, Outcome: expired})
		f.tell(&keydv1.Revocation{Tenant: "acme", ClassNumber: uint32(h.Class), Bucket: h.Bucket, Outcome: expired})
	})
	eventually(t, "the bucket's keys are gone", func() bool { return known(c) == 1 })
	for range 2 {
		if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrExpired) {
			t.Errorf("got %v", err)
		}
		mustOpen(t, c, bob, held, "data")
	}
}

// A revocation that names something unknown drops the whole tenant.
func TestStrangeRevocation(t *testing.T) {
	c, f, _, blob := watched(t)
	f.with(func() { f.tell(&keydv1.Revocation{Tenant: "acme", KeyId: []byte("odd"), Outcome: erased}) })
	eventually(t, "all keys are gone", func() bool { return known(c) == 0 })
	mustOpen(t, c, alice, blob, "data")
}

// An answer that a revocation overtakes on its way is neither used nor cached.
func TestRevocationOvertakesFetch(t *testing.T) {
	for name, revoke := range map[string]func(f *fakeKeyd, h *envelope.Header){
		"key":    func(f *fakeKeyd, _ *envelope.Header) { f.kill("alice", erased, true) },
		"bucket": func(f *fakeKeyd, h *envelope.Header) { f.kill("alice", erased, false); tellBucket(f, h) },
		"reset":  func(f *fakeKeyd, _ *envelope.Header) { f.kill("alice", erased, false); f.reset() },
	} {
		for _, seal := range []bool{true, false} {
			t.Run(fmt.Sprint(name, "/seal=", seal), func(t *testing.T) {
				c, f, clock, blob := watched(t)
				h, _, _ := envelope.ParseHeader(blob)
				clock.StepWall(time.Hour) // the leases are over
				eventually(t, "no flight", func() bool { return c.Flights() == 0 })

				// A canary's key is wiped when the stream's messages have been
				// applied. Alice's, whose lease is over, may still be known.
				canary := sdk.Target{Tenant: "acme", Subject: "canary", Class: "trace"}
				before := c.Sealers()
				mustSeal(t, c, canary, "x")
				sealers := slices.DeleteFunc(c.Sealers(), func(s *envelope.Sealer) bool { return slices.Contains(before, s) })
				if len(sealers) != 1 {
					t.Fatalf("%d new keys to seal with", len(sealers))
				}
				gate := make(chan struct{})
				f.with(func() { f.answer = held(gate) })
				done := make(chan error, 1)
				go func() {
					var err error
					if seal {
						_, err = c.Seal(context.Background(), alice, []byte("late"))
					} else {
						_, err = c.Open(context.Background(), alice, blob)
					}
					done <- err
				}()
				calls := f.calls.Load()
				eventually(t, "the call is under way", func() bool { return f.calls.Load() > calls || c.Flights() == 1 })
				eventually(t, "keyd has answered", func() bool { return f.asked.Load() >= 4 })
				revoke(f, h)
				f.kill("canary", erased, true)
				eventually(t, "the revocation is applied", func() bool {
					_, err := sealers[0].Append(nil, nil, envelope.Context{})
					return errors.Is(err, envelope.ErrWiped)
				})
				f.with(func() { f.answer = nil })
				close(gate)
				if err := <-done; !errors.Is(err, sdk.ErrErased) && !(name == "bucket" && errors.Is(err, sdk.ErrExpired)) {
					t.Errorf("got %v", err)
				}
				if n := known(c); n != 0 {
					t.Errorf("%d keys are kept", n)
				}
			})
		}
	}
}

// The same for a key that a renewal brings: that of the next bucket, or that of
// a subject's next life.
func TestRevocationOvertakesRenewal(t *testing.T) {
	for name, change := range map[string]func(*fakeKeyd, *fakeKey){
		"next bucket": func(f *fakeKeyd, _ *fakeKey) { f.skew = 24 * time.Hour },
		"next life":   func(_ *fakeKeyd, k *fakeKey) { k.id = slices.Repeat([]byte{7}, 16) },
	} {
		t.Run(name, func(t *testing.T) {
			c, f, clock, _ := watched(t)
			f.setLease(30 * time.Second) // renewed before the stream counts as silent
			carol := sdk.Target{Tenant: "acme", Subject: "carol", Class: "trace"}
			mustSeal(t, c, carol, "data")
			mustSeal(t, c, carol, "data") // hot
			mustSeal(t, c, subject(1), "data")
			canary := c.Sealers()
			gate := make(chan struct{})
			f.with(func() {
				f.answer = held(gate)
				for _, k := range f.keys {
					if k.subject == "carol" {
						change(f, k)
					}
				}
			})
			asked := f.asked.Load()
			for n := 0; f.asked.Load() == asked; n++ {
				if n == 30 {
					t.Fatal("nothing is renewed")
				}
				clock.Advance(time.Second)
				eventually(t, "the client follows the clock", func() bool { return f.asked.Load() > asked || c.Settled() })
			}
			f.kill("carol", erased, true)
			f.kill("subject-1", erased, true)
			eventually(t, "the revocations are applied", func() bool {
				wiped := 0
				for _, s := range canary {
					if _, err := s.Append(nil, nil, envelope.Context{}); errors.Is(err, envelope.ErrWiped) {
						wiped++
					}
				}
				return name == "next bucket" && wiped == 2 || name == "next life" && wiped == 1
			})
			f.with(func() { f.answer = nil })
			close(gate)
			eventually(t, "the renewal is over", c.Settled)
			if _, err := c.Seal(t.Context(), carol, nil); !errors.Is(err, sdk.ErrErased) {
				t.Errorf("got %v", err)
			}
			if n := known(c); n != 2 { // alice's
				t.Errorf("%d keys are kept", n)
			}
		})
	}
}

func tellBucket(f *fakeKeyd, h *envelope.Header) {
	f.with(func() {
		f.tell(&keydv1.Revocation{Tenant: "acme", ClassNumber: uint32(h.Class), Bucket: h.Bucket, Outcome: expired})
	})
}

// reset makes the streams begin anew with a reset.
func (f *fakeKeyd) reset() {
	f.with(func() {
		f.log = append(f.log, &keydv1.Revocation{Tenant: "none", KeyId: make([]byte, 16)})
		f.oldest = len(f.log)
		close(f.changed)
		f.changed = make(chan struct{})
	})
}

// What was revoked while the stream was down is heard when it is back.
func TestReconnectMissesNothing(t *testing.T) {
	c, f, clock, blob := watched(t)
	f.cutStreams()
	eventually(t, "the stream is down", func() bool { return !f.isWatching("acme") })
	f.kill("alice", erased, true)
	if known(c) != 2 {
		t.Fatal("the keys went without a stream")
	}
	mustOpen(t, c, alice, blob, "data") // the lease is the bound
	eventually(t, "the client waits to connect", func() bool { d, ok := clock.nextTimer(); return ok && d <= 200*time.Millisecond })
	passUntil(t, clock, 50*time.Millisecond, "the keys are gone", func() bool { return known(c) == 0 })
	f.with(func() {
		if n := len(f.cursors); n < 2 || f.cursors[0] == 0 || f.cursors[n-1] == 0 {
			t.Errorf("cursors %v", f.cursors)
		}
	})
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
}

// A server that cannot tell what was missed has every key dropped, of its
// tenants and no other.
func TestReset(t *testing.T) {
	c, f, clock, blob := watched(t)
	f.cutStreams()
	eventually(t, "the stream is down", func() bool { return !f.isWatching("acme") })
	f.reset()
	passUntil(t, clock, 50*time.Millisecond, "the keys are gone", func() bool { return known(c) == 0 })
	mustOpen(t, c, alice, blob, "data")
}

// What is revoked after a lease was issued and before the stream is open is
// heard, since the stream begins where the lease did.
func TestRevocationBeforeTheStreamOpens(t *testing.T) {
	c, f, _ := start(t)
	late := make(chan struct{})
	f.with(func() { f.late = late })
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	f.kill("alice", erased, true)
	close(late)
	eventually(t, "the keys are gone", func() bool { return known(c) == 0 })
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}

	// The same for a tenant that joins a stream which is further on already.
	other := sdk.Target{Tenant: "other", Subject: "carol", Class: "trace"}
	f.with(func() {
		f.answer = func(_ context.Context, _ *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			f.kill("carol", erased, true) // before the answer leaves keyd
			f.kill("nobody", erased, true)
			return resp, nil
		}
	})
	mustSeal(t, c, subject(1), "data") // moves the stream on
	// The revocation may come before the key is used; then keyd is asked again.
	if _, err := c.Seal(t.Context(), other, nil); err != nil && !errors.Is(err, sdk.ErrErased) {
		t.Fatal(err)
	}
	eventually(t, "carol's key is gone", func() bool { return known(c) == 1 })
}

// Answers may come in another order than keyd gave them: the stream goes back
// to the oldest.
func TestStreamGoesBackForAnOlderLease(t *testing.T) {
	c, f, _ := start(t)
	for range 5 {
		f.kill("nobody", erased, true)
		f.with(func() { f.tell(&keydv1.Revocation{Tenant: "acme", KeyId: make([]byte, 16), Outcome: erased}) })
	}
	mustSeal(t, c, alice, "data")
	eventually(t, "the stream is open", func() bool { return f.isWatching("acme") })
	f.with(func() {
		f.answer = func(_ context.Context, _ *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			resp.Results[0].GetKey().LedgerSize = 3
			return resp, nil
		}
	})
	mustSeal(t, c, subject(1), "data")
	eventually(t, "the stream went back", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.cursors[len(f.cursors)-1] == 3
	})
	n := len(f.cursors)
	mustSeal(t, c, subject(2), "data")
	time.Sleep(5 * time.Millisecond)
	f.with(func() {
		if f.cursors[0] != 6 || len(f.cursors) != n {
			t.Errorf("cursors %v", f.cursors)
		}
	})
}

// When no stream has ever told a cursor, and no lease a size, what came before
// the second stream is not known.
func TestStreamThatNeverSpoke(t *testing.T) {
	clock := newFakeClock()
	f := newFakeKeyd(t, clock)
	f.with(func() { f.mute, f.unsized = true, true })
	f.setLease(time.Hour)
	c, err := sdk.Dial(t.Context(), f.addr, sdk.WithClock(clock))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	blob := mustSeal(t, c, alice, "data")
	eventually(t, "the stream is open", func() bool { return f.isWatching("acme") })
	f.kill("alice", erased, true)
	f.cutStreams()
	eventually(t, "the stream is down", func() bool { return !f.isWatching("acme") })
	f.with(func() { f.mute = false })
	passUntil(t, clock, 50*time.Millisecond, "the keys are gone", func() bool { return known(c) == 0 })
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
}

// A stream without a sign of life is given up.
func TestSilentStream(t *testing.T) {
	c, f, clock, _ := watched(t)
	f.with(func() { f.mute = true })
	opened := func() (n int) { f.with(func() { n = len(f.cursors) }); return n }
	before := opened()
	pass(t, c, clock, 29*time.Second, time.Second)
	if opened() != before {
		t.Error("the stream was given up early")
	}
	passUntil(t, clock, 100*time.Millisecond, "the stream is opened again", func() bool { return opened() > before })
	f.with(func() { f.mute = false })
	f.cutStreams()
	eventually(t, "the stream is down", func() bool { return !f.isWatching("acme") })
	passUntil(t, clock, 100*time.Millisecond, "the stream is back", func() bool { return f.isWatching("acme") })
	mustSeal(t, c, alice, "data")
	f.kill("alice", erased, true)
	eventually(t, "the keys are gone", func() bool { return known(c) == 0 })
}

// A tenant that is used for the first time is watched from then on, and the
// others are not missed meanwhile.
func TestMoreTenants(t *testing.T) {
	c, f, _, _ := watched(t)
	for i := range 300 {
		target := sdk.Target{Tenant: fmt.Sprint("t", i), Subject: "s", Class: "trace"}
		mustSeal(t, c, target, "data")
	}
	eventually(t, "all are watched", func() bool {
		for i := range 300 {
			if !f.isWatching(fmt.Sprint("t", i)) {
				return false
			}
		}
		return f.isWatching("acme")
	})
	f.with(func() {
		for i, tenants := range f.tenants {
			if len(tenants) > 256 {
				t.Errorf("a stream watches %d tenants", len(tenants))
			}
			if slices.Contains(tenants, "acme") && i > 0 && f.cursors[i] == 0 {
				t.Errorf("stream %d began anew", i)
			}
		}
		if n := len(f.tenants); n > 302 {
			t.Errorf("%d streams were opened", n)
		}
	})
	before := known(c)
	f.kill("s", erased, true)
	eventually(t, "their keys are gone", func() bool { return known(c) == before-300 })
}

func TestWithoutRevocations(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	f.kill("alice", erased, true)
	pass(t, c, clock, 59*time.Second, 59*time.Second) // not in use yet, and so not renewed
	mustOpen(t, c, alice, blob, "data")
	clock.Advance(time.Second)
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
	f.with(func() {
		if len(f.cursors) != 0 {
			t.Error("a stream was opened")
		}
	})
}

// Revocations race with uses: whatever happens, once a revocation has been
// applied nothing opens, and nothing but erased or success is ever returned.
func TestRevocationRace(t *testing.T) {
	for round := range 12 {
		c, f, _, blob := watched(t)
		var stop atomic.Bool
		results := make(chan error, 4)
		for range 4 {
			go func() {
				var erasedAt error
				for !stop.Load() {
					_, err := c.Open(context.Background(), alice, blob)
					switch {
					case err == nil && erasedAt != nil:
						results <- errors.New("opened after it was erased")
						return
					case err != nil && !errors.Is(err, sdk.ErrErased):
						results <- err
						return
					case err != nil:
						erasedAt = err
					}
				}
				_, err := c.Open(context.Background(), alice, blob)
				results <- err
			}()
		}
		time.Sleep(time.Duration(round) * 100 * time.Microsecond)
		f.kill("alice", erased, true)
		eventually(t, "the key is gone", func() bool { return known(c) == 0 })
		stop.Store(true)
		for range 4 {
			if err := <-results; !errors.Is(err, sdk.ErrErased) {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		c.Close()
	}
}
