package sdk_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
	"lethe/sdk/sdktest"
)

// The tests here run against a real keyd, the others against a scripted one.

func dialKeyd(t *testing.T, k *sdktest.Keyd) *sdk.Client {
	t.Helper()
	c, err := sdk.Dial(t.Context(), k.Target())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// The life of a blob and of its erasure, as two clients see it.
func TestKeyd(t *testing.T) {
	k := sdktest.Start(t)
	// A lease so long that only a revocation can end it within the test.
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Hour), sdktest.Class("backup", 24*time.Hour, 0))
	agent, eraser := dialKeyd(t, k), dialKeyd(t, k)

	blob := mustSeal(t, agent, alice, "what alice said")
	mustOpen(t, agent, alice, blob, "what alice said")
	mustOpen(t, eraser, alice, blob, "what alice said")
	mustSeal(t, agent, sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}, "what bob said")
	if _, err := agent.Open(t.Context(), sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}, blob); !errors.Is(err, sdk.ErrWrongSubject) {
		t.Errorf("as bob: %v", err)
	}
	if _, err := agent.Seal(t.Context(), sdk.Target{Tenant: "acme", Subject: "alice", Class: "nothing"}, nil); err == nil || errors.Is(err, sdk.ErrErased) {
		t.Errorf("a class that is not there: %v", err)
	}
	if _, err := agent.Seal(t.Context(), sdk.Target{Tenant: "nobody", Subject: "alice", Class: "trace"}, nil); !errors.Is(err, sdk.ErrUnknown) {
		t.Errorf("a tenant that is not there: %v", err)
	}
	backup := sdk.Target{Tenant: "acme", Subject: "alice", Class: "backup"}
	long := sealStream(t, agent, backup, randomBytes(3<<20))

	s, err := eraser.Describe(t.Context(), "acme", "alice")
	if err != nil || s.State != keydv1.SubjectState_SUBJECT_STATE_ACTIVE || len(s.Classes) != 2 {
		t.Fatalf("%+v, %v", s, err)
	}
	running, err := agent.OpenReader(t.Context(), backup, bytes.NewReader(long))
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()

	d, err := eraser.DestroyKey(t.Context(), destroyAlice())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent has heard of it", func() bool {
		_, err := agent.Open(t.Context(), alice, blob)
		if err != nil && !errors.Is(err, sdk.ErrErased) {
			t.Fatal(err)
		}
		return err != nil
	})
	if _, err := agent.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("sealing for alice: %v", err)
	}
	if _, err := io.Copy(io.Discard, running); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("the running reader: %v", err)
	}
	if _, err := agent.OpenReader(t.Context(), backup, bytes.NewReader(long)); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("a new reader: %v", err)
	}

	keys, err := keydv1.NewLedgerServiceClient(agent.Conn()).GetLedgerKey(t.Context(), &keydv1.GetLedgerKeyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	pinned, err := receipt.PinKeys(keys.VerifierKeys...)
	if err != nil {
		t.Fatal(err)
	}
	v, err := receipt.Verify(d.Receipt, pinned)
	if err != nil {
		t.Fatal(err)
	}
	if v.Entries[0].Index != d.LedgerIndex || !v.Stages().DrainedBy.Equal(d.DrainedBy.Truncate(time.Millisecond)) {
		t.Errorf("the receipt says %v, the call %+v", v, d)
	}

	again, err := eraser.DestroyKey(t.Context(), destroyAlice())
	if err != nil || !bytes.Equal(again.Receipt, d.Receipt) {
		t.Errorf("a repeat: %+v, %v", again, err)
	}
	other := destroyAlice()
	other.Reason = "something-else"
	if _, err := eraser.DestroyKey(t.Context(), other); !errors.Is(err, sdk.ErrConflict) {
		t.Errorf("the same id for something else: %v", err)
	}
	if r, err := eraser.Reinstate(t.Context(), sdk.ReinstateRequest{
		Tenant: "acme", Subject: "alice", IfGeneration: 1, RequestID: "req-2", Reason: "returned",
	}); err != nil || r.Generation != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	mustOpen(t, agent, alice, mustSeal(t, agent, alice, "anew"), "anew")
	if _, err := agent.Open(t.Context(), alice, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("data of the life before: %v", err)
	}
}

// A hold forbids the destruction, and the client works on.
func TestKeydHold(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme")
	c := dialKeyd(t, k)
	blob := mustSeal(t, c, alice, "data")
	if _, err := keydv1.NewHoldServiceClient(c.Conn()).PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte("alice"), HoldId: "case-1", Reason: "litigation", RequestId: "hold-1",
	}); err != nil {
		t.Fatal(err)
	}
	_, err := c.DestroyKey(t.Context(), destroyAlice())
	var e *sdk.Error
	if !errors.Is(err, sdk.ErrHeld) || !errors.As(err, &e) || e.Metadata["hold"] != "case-1" {
		t.Errorf("got %v", err)
	}
	mustOpen(t, c, alice, blob, "data")
}

// keyd restarts; what was sealed opens again, and a destruction that happened
// meanwhile is heard.
func TestKeydRestart(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Hour))
	c := dialKeyd(t, k)
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	k.Stop()
	mustOpen(t, c, alice, blob, "data") // the lease goes on
	if _, err := c.Seal(t.Context(), subject(1), nil); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("without keyd: %v", err)
	}
	k.Restart(t)
	if _, err := dialKeyd(t, k).DestroyKey(t.Context(), destroyAlice()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is heard of", func() bool {
		_, err := c.Open(t.Context(), alice, blob)
		return errors.Is(err, sdk.ErrErased)
	})
}

// Many clients' first uses race; all their data opens for all of them.
func TestKeydFirstUseRace(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme")
	clients := make([]*sdk.Client, 4)
	for i := range clients {
		clients[i] = dialKeyd(t, k)
	}
	var wg sync.WaitGroup
	for s := range 10 {
		blobs := make([][]byte, len(clients))
		for i, c := range clients {
			wg.Go(func() {
				var err error
				if blobs[i], err = c.Seal(t.Context(), subject(s), []byte(fmt.Sprint(i))); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i, blob := range blobs {
			mustOpen(t, clients[(i+1)%len(clients)], subject(s), blob, fmt.Sprint(i))
		}
	}
}

// Sealing goes on across the beginning of a bucket without a call, as keyd and
// its clients really do it.
func TestKeydNextBucket(t *testing.T) {
	clock := newFakeClock()
	now, _ := clock.Now()
	clock.Advance(boundary.Add(-2 * time.Minute).Sub(now))
	k := sdktest.Start(t, sdktest.WithClock(func() time.Time { wall, _ := clock.Now(); return wall }))
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Minute))
	c, err := sdk.Dial(t.Context(), k.Target(), sdk.WithClock(clock))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	seal := func() []byte { t.Helper(); return mustSeal(t, c, alice, "data") }
	before := seal()
	untilBoundary(t, c, clock, seal)
	k.Stop() // what comes next asks nobody
	clock.Advance(time.Millisecond)
	after := seal()
	if !bucketOf(before).Before(boundary) || !bucketOf(after).Equal(boundary) {
		t.Errorf("sealed into the buckets of %v, %v", bucketOf(before), bucketOf(after))
	}
	k.Restart(t)
	passUntil(t, clock, 100*time.Millisecond, "keyd is back", func() bool { _, err := c.Open(t.Context(), alice, after); return err == nil })
	mustOpen(t, c, alice, before, "data")
}
