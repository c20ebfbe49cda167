package keys_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/store/badger"
)

// copied opens a copy of the rig's store, which must be closed or at rest.
func (r *rig) copied(name string) keys.Store {
	r.t.Helper()
	dir := filepath.Join(r.dir, name)
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(r.dir, "store"))); err != nil {
		r.t.Fatal(err)
	}
	s, err := badger.Open(badger.Options{Dir: dir})
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
	if _, err := keys.Open(t.Context(), r.config()); !errors.Is(err, ledger.ErrForked) { // by the destruction that it did not acknowledge
		t.Errorf("the older one, again: %v", err)
	}
	r.Keys = nil
	r.store.Close()
}
