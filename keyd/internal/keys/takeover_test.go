package keys_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
)

// copied opens a copy of the rig's store, which must be closed or at rest.
func (r *rig) copied(name string) keys.Store {
	r.t.Helper()
	s, err := badger.Open(badger.Options{Dir: r.copyTo(name)})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { s.Close() })
	return s
}

// TestTakenOver: of two keyds with copies of one store, the later one serves.
// The other issues no key that the later one has destroyed.
func TestTakenOver(t *testing.T) {
	r := newRig(t)
	k := r.seal("alice", "memory")
	r.close()
	older := r.copied("older")
	r.open(false)
	one := r.Keys
	copied := r.copied("copy")
	if _, err := r.ask(openQuery("acme", "alice", "memory", k)); err != nil {
		t.Fatal(err)
	}
	cfg := r.config()
	cfg.Store = copied
	two, err := keys.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := one.DestroyKey(t.Context(), destroyRequest("bob", "d1")); err == nil {
		t.Error("the older one acknowledges a destruction")
	}
	if err := one.Serving(); !errors.Is(err, ledger.ErrSuperseded) {
		t.Errorf("the older one: %v", err)
	}
	// What the older one said last has not got between.
	if _, err := two.DestroyKey(t.Context(), destroyRequest("alice", "d2")); err != nil {
		t.Error(err)
	}
	// A copy that is behind drives nobody out.
	cfg.Store = older
	if _, err := keys.Open(t.Context(), cfg); !errors.Is(err, ledger.ErrBehind) {
		t.Errorf("a copy that is behind: %v", err)
	}
	if _, err := two.DestroyKey(t.Context(), destroyRequest("carol", "d3")); err != nil || two.Serving() != nil {
		t.Errorf("the later one: %v, %v", err, two.Serving())
	}
	two.Close()
	one.Close()
	if _, err := keys.Open(t.Context(), r.config()); !errors.Is(err, keys.ErrOvertaken) { // by the destruction that it did not acknowledge
		t.Errorf("the older one, again: %v", err)
	}
	r.Keys = nil
	r.store.Close()
}

// TestStoodStillWhileTakenOver: one that stood still for so long that another may
// have taken over asks the anchor before it issues a key again, whoever reaches it
// first.
func TestStoodStillWhileTakenOver(t *testing.T) {
	r := newRig(t)
	alice, bob := r.seal("alice", "memory"), r.seal("bob", "memory")
	r.close()
	r.open(false)
	one := r.Keys
	var away atomic.Bool
	r.anchor.Inject = func(context.Context, string) anchortest.Fault {
		if away.Load() {
			return anchortest.Lost
		}
		return anchortest.None
	}
	still := func() { r.clock.Advance(keys.BeatLimit + time.Second) }

	// Nobody has.
	still()
	if _, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil {
		t.Errorf("nobody took over: %v", err)
	}
	// It cannot find out.
	away.Store(true)
	still()
	_, err := r.ask(openQuery("acme", "alice", "memory", alice))
	r.want("the anchor is away", err, isUnavail)
	if err := one.Beat(t.Context()); err == nil {
		t.Error("the heartbeat goes on without the anchor")
	}
	away.Store(false)
	if _, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil {
		t.Errorf("the anchor is back: %v", err)
	}
	// One that did not stand still goes on without the anchor.
	away.Store(true)
	if _, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil {
		t.Errorf("the anchor is away, and it has not stood still: %v", err)
	}
	away.Store(false)

	cfg := r.config()
	cfg.Store = r.copied("copy")
	two, err := keys.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	if _, err := two.DestroyKey(t.Context(), destroyRequest("alice", "d1")); err != nil {
		t.Fatal(err)
	}
	still()
	for _, q := range []*keydv1.BlobKeyQuery{
		openQuery("acme", "alice", "memory", alice), sealQuery("acme", "alice", "memory"), openQuery("acme", "bob", "memory", bob),
	} {
		_, err := r.ask(q)
		r.want(string(q.SubjectId)+", another one has taken over", err, isUnavail)
	}
	if err := one.Serving(); !errors.Is(err, ledger.ErrSuperseded) {
		t.Errorf("it is not known: %v", err)
	}
}
