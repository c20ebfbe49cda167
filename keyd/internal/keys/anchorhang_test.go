package keys_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
)

// hangAnchor has the anchor's calls of one kind not return before release,
// whatever their context says. hung receives when the first one hangs.
func (r *rig) hangAnchor(op string) (hung <-chan struct{}, release func()) {
	began, released := make(chan struct{}), make(chan struct{})
	var first, last sync.Once
	r.anchor.Inject = func(_ context.Context, called string) anchortest.Fault {
		if called == op {
			first.Do(func() { close(began) })
			<-released
		}
		return anchortest.None
	}
	release = func() { last.Do(func() { close(released) }) }
	r.t.Cleanup(release)
	return began, release
}

func (r *rig) anchorStatus() (healthy bool, detail string) {
	r.t.Helper()
	for _, c := range r.Status(r.t.Context()).Components {
		if c.Name == "anchor" {
			return c.Healthy, c.Detail
		}
	}
	r.t.Fatal("the status tells nothing of the anchor")
	return false, ""
}

// returns fails the test if fn does not return.
func (r *rig) returns(what string, fn func()) {
	r.t.Helper()
	done := make(chan struct{})
	go func() {
		fn()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		r.t.Fatalf("%s does not return", what)
	}
}

// TestClosesWhileTheAnchorHangs: keyd ends although the anchor does not return
// from a call. What it did not cover was not acknowledged, and is there when the
// next one has it covered.
func TestClosesWhileTheAnchorHangs(t *testing.T) {
	r := newRig(t)
	alice, bob := r.seal("alice", "memory"), r.seal("bob", "memory")
	r.close()
	r.patience = 10 * time.Millisecond
	r.open(false)
	hung, release := r.hangAnchor("put")
	_, err := r.DestroyKey(t.Context(), destroyRequest("alice", "d1"))
	r.want("the destruction", err, isUnavail)
	<-hung
	if _, err := r.ask(openQuery("acme", "bob", "memory", bob)); err != nil {
		t.Errorf("what needs no anchor: %v", err)
	}
	r.returns("Close", r.close)
	release()
	r.patience = 0
	r.open(false)
	_, err = r.ask(openQuery("acme", "alice", "memory", alice))
	r.want("alice", err, isErased)
	r.verify(r.destroy("alice", "d1"))
}

// TestHangingAnchorIsUnhealthy: a keyd that stood still, and asks an anchor that
// does not return, is unhealthy and answers its callers; it is well again when
// the anchor is.
func TestHangingAnchorIsUnhealthy(t *testing.T) {
	r := newRig(t)
	alice := r.seal("alice", "memory")
	r.close()
	r.open(false)
	hung, release := r.hangAnchor("newest")
	r.clock.Advance(keys.BeatLimit + time.Second)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-hung
		cancel()
	}()
	r.returns("the heartbeat", func() {
		if err := r.Beat(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("the heartbeat: %v", err)
		}
	})
	if healthy, detail := r.anchorStatus(); healthy || !strings.Contains(detail, "does not answer since") {
		t.Errorf("the anchor is healthy: %v, %s", healthy, detail)
	}
	release()
	if _, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil {
		t.Errorf("once it answers: %v", err)
	}
	if healthy, detail := r.anchorStatus(); !healthy {
		t.Errorf("once it answers: %s", detail)
	}
}

// TestStartIsStoppedWhileTheAnchorHangs: a start that waits for the anchor ends
// when it is told to, and the next one serves.
func TestStartIsStoppedWhileTheAnchorHangs(t *testing.T) {
	for _, op := range []string{"newest", "get", "enter"} {
		t.Run(op, func(t *testing.T) {
			r := newRig(t)
			alice := r.seal("alice", "memory")
			r.Close()
			hung, release := r.hangAnchor(op)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-hung
				cancel()
			}()
			r.returns("Open", func() {
				if _, err := keys.Open(ctx, r.config()); !errors.Is(err, context.Canceled) {
					t.Errorf("Open: %v", err)
				}
			})
			release()
			if err := r.serve(); err != nil {
				t.Fatal(err)
			}
			if _, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil {
				t.Error(err)
			}
		})
	}
}
