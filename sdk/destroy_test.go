package sdk_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func destroyAlice() sdk.DestroyRequest {
	return sdk.DestroyRequest{Tenant: "acme", Subject: "alice", RequestID: "req-1", Reason: "gdpr-art17"}
}

func TestDestroyKey(t *testing.T) {
	c, f, clock, blob := watched(t)
	bob := sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}
	mustSeal(t, c, bob, "data")
	d, err := c.DestroyKey(t.Context(), destroyAlice())
	if err != nil {
		t.Fatal(err)
	}
	now, _ := clock.Now()
	if string(d.Receipt) != "receipt" || d.LedgerIndex != 7 || !d.DrainedBy.Equal(now.Add(time.Minute)) || d.Already {
		t.Errorf("%+v", d)
	}
	// At once, not when the revocation is heard.
	if n := known(c); n != 1 {
		t.Errorf("%d keys are kept, want bob's", n)
	}
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
	f.with(func() {
		want := &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("alice"), RequestId: "req-1", Reason: "gdpr-art17"}
		if len(f.destroys) != 1 || !proto.Equal(f.destroys[0], want) {
			t.Errorf("sent %v", f.destroys)
		}
	})
	r, err := c.Reinstate(t.Context(), sdk.ReinstateRequest{Tenant: "acme", Subject: "alice", IfGeneration: 1, RequestID: "req-2", Reason: "error"})
	if err != nil || r.Generation != 2 || r.LedgerIndex != 8 || string(r.Receipt) != "receipt" {
		t.Fatalf("%+v, %v", r, err)
	}
	mustOpen(t, c, alice, mustSeal(t, c, alice, "new life"), "new life")
	if _, err := c.Open(t.Context(), alice, blob); err == nil {
		t.Error("the old life's data opened")
	}
}

func TestDestroyKeySendsEverything(t *testing.T) {
	c, f, _ := start(t)
	r := destroyAlice()
	r.Classes = []string{"trace", "backup"}
	r.IfGeneration = 3
	r.NotBefore = time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC)
	r.WaitForHolds = true
	if _, err := c.DestroyKey(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	sent := f.destroys[0]
	if len(sent.Classes) != 2 || sent.IfGeneration != 3 || !sent.NotBefore.AsTime().Equal(r.NotBefore) || !sent.WaitForHolds {
		t.Errorf("sent %v", sent)
	}
}

func TestDestroyKeyRefused(t *testing.T) {
	c, f, _ := start(t)
	for field, change := range map[string]func(*sdk.DestroyRequest){
		"tenant":     func(r *sdk.DestroyRequest) { r.Tenant = "" },
		"subject_id": func(r *sdk.DestroyRequest) { r.Subject = "" },
		"classes":    func(r *sdk.DestroyRequest) { r.Classes = []string{} },
		"class":      func(r *sdk.DestroyRequest) { r.Classes = []string{"trace", ""} },
		"request_id": func(r *sdk.DestroyRequest) { r.RequestID = "" },
		"reason":     func(r *sdk.DestroyRequest) { r.Reason = "because she asked" },
	} {
		r := destroyAlice()
		change(&r)
		_, err := c.DestroyKey(t.Context(), r)
		var e *sdk.Error
		if !errors.Is(err, sdk.ErrInvalidArgument) || !errors.As(err, &e) || e.Metadata["field"] != field {
			t.Errorf("%s: %v", field, err)
		}
		_, err = c.Reinstate(t.Context(), sdk.ReinstateRequest{Tenant: r.Tenant, Subject: r.Subject, Classes: r.Classes, RequestID: r.RequestID, Reason: r.Reason})
		if !errors.Is(err, sdk.ErrInvalidArgument) {
			t.Errorf("Reinstate, %s: %v", field, err)
		}
	}
	f.with(func() {
		if len(f.destroys) != 0 {
			t.Errorf("sent %v", f.destroys)
		}
	})
}

// An unavailable keyd is asked again, for the same intent; any other answer is
// final.
func TestDestroyKeyRetries(t *testing.T) {
	c, f, clock := start(t)
	f.with(func() {
		f.failing = []error{
			status.Error(codes.Unavailable, "down"),
			outcomeError(keydv1.Outcome_OUTCOME_UNAVAILABLE, codes.Unavailable),
			status.Error(codes.DeadlineExceeded, "slow"),
		}
	})
	done := make(chan error, 1)
	go func() { _, err := c.DestroyKey(context.Background(), destroyAlice()); done <- err }()
	passUntil(t, clock, 100*time.Millisecond, "it is done", func() bool { return len(done) == 1 })
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := len(f.destroys); n != 4 {
		t.Errorf("sent %d times", n)
	}
	for _, r := range f.destroys {
		if !proto.Equal(r, f.destroys[0]) {
			t.Errorf("a retry differs: %v", r)
		}
	}
	for _, s := range sentinels {
		if s.outcome == keydv1.Outcome_OUTCOME_UNAVAILABLE {
			continue
		}
		f.with(func() { f.failing, f.destroys = []error{outcomeError(s.outcome, s.code)}, nil })
		if _, err := c.DestroyKey(t.Context(), destroyAlice()); !errors.Is(err, s.err) || len(f.destroys) != 1 {
			t.Errorf("%v: %v after %d attempts", s.outcome, err, len(f.destroys))
		}
	}
	f.with(func() { f.failing, f.destroys = []error{status.Error(codes.Internal, "?")}, nil })
	if _, err := c.DestroyKey(t.Context(), destroyAlice()); err == nil || len(f.destroys) != 1 {
		t.Errorf("unclassified: %v after %d attempts", err, len(f.destroys))
	}
}

func TestDestroyKeyGivesUpWithItsContext(t *testing.T) {
	c, f, clock := start(t)
	for range 1000 {
		f.failing = append(f.failing, outcomeError(keydv1.Outcome_OUTCOME_UNAVAILABLE, codes.Unavailable))
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := c.DestroyKey(ctx, destroyAlice()); done <- err }()
	passUntil(t, clock, 100*time.Millisecond, "it is tried again", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.destroys) >= 3
	})
	cancel()
	if err := <-done; !errors.Is(err, sdk.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	go func() { _, err := c.DestroyKey(context.Background(), destroyAlice()); done <- err }()
	eventually(t, "it waits", func() bool { d, ok := clock.nextTimer(); return ok && d < time.Second })
	c.Close()
	if err := <-done; !errors.Is(err, sdk.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// What keyd itself told is kept, and not how the last attempt was cut off.
func TestDestroyKeyKeepsWhatKeydTold(t *testing.T) {
	c, f, clock := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	f.with(func() {
		f.failing = []error{
			outcomeError(keydv1.Outcome_OUTCOME_UNAVAILABLE, codes.Unavailable),
			status.Error(codes.Unavailable, "stream terminated"),
		}
		f.onDestroy = func() { cancel(); <-t.Context().Done() } // the third is not answered
	})
	done := make(chan error, 1)
	go func() { _, err := c.DestroyKey(ctx, destroyAlice()); done <- err }()
	passUntil(t, clock, 100*time.Millisecond, "it gives up", func() bool { return len(done) == 1 })
	var e *sdk.Error
	if err := <-done; !errors.As(err, &e) || !errors.Is(err, sdk.ErrUnavailable) || !errors.Is(err, context.Canceled) || e.Message != "as scripted" {
		t.Errorf("got %v", err)
	}
}

// A key that was on its way when the destruction was asked for is not kept.
func TestDestroyKeyOvertakesFetch(t *testing.T) {
	c, f, _ := start(t, sdk.WithRevocations(false))
	gate := make(chan struct{})
	f.with(func() { f.answer = held(gate) })
	done := make(chan error, 1)
	go func() { _, err := c.Seal(context.Background(), alice, []byte("late")); done <- err }()
	eventually(t, "the call is under way", func() bool { return f.calls.Load() == 1 })
	if _, err := c.DestroyKey(t.Context(), destroyAlice()); err != nil {
		t.Fatal(err)
	}
	f.with(func() { f.answer = nil })
	close(gate)
	if err := <-done; !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
	if n := known(c); n != 0 {
		t.Errorf("%d keys are kept", n)
	}
}

// The keys go before the request is sent, and those that were leased while it
// was under way go with its answer.
func TestDestroyKeyDropsBeforeAndAfter(t *testing.T) {
	c, f, _ := start(t, sdk.WithRevocations(false))
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	f.with(func() {
		f.onDestroy = func() {
			if n := known(c); n != 0 {
				t.Errorf("%d keys are kept while the request is under way", n)
			}
			mustOpen(t, c, alice, blob, "data")
		}
	})
	if _, err := c.DestroyKey(t.Context(), destroyAlice()); err != nil {
		t.Fatal(err)
	}
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("got %v", err)
	}
}

func TestDescribe(t *testing.T) {
	c, _, _ := start(t)
	s, err := c.Describe(t.Context(), "acme", "alice")
	if err != nil {
		t.Fatal(err)
	}
	if s.State != keydv1.SubjectState_SUBJECT_STATE_ACTIVE || s.Generation != 2 || len(s.Classes) != 1 ||
		s.Classes[0].Class != "trace" || s.Classes[0].KeyID[0] != 1 || len(s.Classes[0].DeadKeyIDs) != 1 || s.Classes[0].DeadKeyIDs[0][0] != 2 ||
		len(s.Holds) != 1 || len(s.LedgerIndexes) != 2 {
		t.Errorf("%+v", s)
	}
	if _, err := c.Describe(t.Context(), "acme", "nobody"); !errors.Is(err, sdk.ErrUnknown) {
		t.Errorf("nobody: %v", err)
	}
	if _, err := c.Describe(t.Context(), "acme", ""); !errors.Is(err, sdk.ErrInvalidArgument) {
		t.Errorf("no subject: %v", err)
	}
	if _, err := c.Describe(t.Context(), "", "alice"); !errors.Is(err, sdk.ErrInvalidArgument) {
		t.Errorf("no tenant: %v", err)
	}
}
