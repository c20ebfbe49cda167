package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"

	"google.golang.org/protobuf/proto"
)

// rows returns every row whose key begins with prefix.
func (r *rig) rows(prefix string) map[string][]byte {
	r.t.Helper()
	rows := make(map[string][]byte)
	err := r.store.View(context.Background(), func(tx keys.Reader) error {
		return tx.Scan([]byte(prefix), nil, func(k, v []byte) bool {
			rows[string(k)] = bytes.Clone(v)
			return true
		})
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return rows
}

func (r *rig) put(key string, value []byte) {
	r.t.Helper()
	if err := r.store.Update(context.Background(), func(tx keys.Tx) error { return tx.Put([]byte(key), value) }); err != nil {
		r.t.Fatal(err)
	}
}

// A wrapped key opens in its own row only, whatever it is swapped with.
func TestWrappedKeysDoNotMove(t *testing.T) {
	r := newRig(t)
	if _, err := r.CreateTenant(t.Context(), "other", nil); err != nil {
		t.Fatal(err)
	}
	type key struct{ tenant, subject, class string }
	all := []key{{"acme", "ann", "trace"}, {"acme", "ann", "memory"}, {"acme", "bob", "trace"}, {"other", "ann", "trace"}}
	sealed := make(map[key][]byte)
	for _, k := range all {
		got, err := r.ask(sealQuery(k.tenant, k.subject, k.class))
		if err != nil {
			t.Fatal(err)
		}
		sealed[k] = got.Key
	}
	for _, kind := range []string{"D", "B"} {
		rows := r.rows("w\x00\x00\x00\x01" + kind)
		if len(rows) < 3 {
			t.Fatalf("%d rows of kind %s", len(rows), kind)
		}
		for k := range rows {
			for other, value := range rows {
				if k == other {
					continue
				}
				r.put(k, value)
				moved := 0
				for _, q := range all {
					got, err := r.ask(sealQuery(q.tenant, q.subject, q.class))
					switch {
					case err == nil && !bytes.Equal(got.Key, sealed[q]):
						t.Fatalf("a key of kind %s opened in another row", kind)
					case err != nil:
						moved++
						r.want("swapped row", err, isUnavail)
					}
				}
				if moved == 0 {
					t.Fatalf("rows of kind %s: the swap was not noticed", kind)
				}
			}
			r.put(k, rows[k])
		}
	}
}

// After a destroy the newest version of every row under the subject's key ids
// holds no ciphertext.
func TestDestroyOverwritesWrappedKeys(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "trace")
	r.seal("ann", "memory")
	r.seal("bob", "trace")
	r.destroy("ann", "r1")
	var live, dead int
	for _, v := range r.rows("w\x00\x00\x00\x01D") {
		var w storev1.Wrapped
		if err := proto.Unmarshal(v, &w); err != nil {
			t.Fatal(err)
		}
		switch {
		case w.Dead && len(w.Ciphertext) == 0 && len(w.KekId) == 0:
			dead++
		case !w.Dead:
			live++
		}
	}
	if live != 1 || dead != 2 {
		t.Errorf("%d live and %d dead rows, want 1 and 2", live, dead)
	}
}

// No row, key or value, holds a subject's id.
func TestGuaranteeNoNamesInRows(t *testing.T) {
	r := newRig(t)
	const subject = "Zaphod.Needle@example.org"
	r.seal(subject, "trace")
	r.destroy(subject, "request-needle")
	for k, v := range r.rows("") {
		for _, needle := range []string{"Needle", "needle", "4e6565646c65"} {
			if strings.Contains(k, needle) || bytes.Contains(v, []byte(needle)) {
				t.Errorf("row %q holds %q", k, needle)
			}
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Run("an empty store without Initialise", func(t *testing.T) {
		r := newRig(t)
		r.close()
		r.dir = t.TempDir()
		cfg := r.config()
		cfg.Store = emptyStore(t)
		cfg.Initialise = false
		if _, err := keys.Open(t.Context(), cfg); !errors.Is(err, keys.ErrNotInitialised) {
			t.Error(err)
		}
		cfg.Initialise = true
		if _, err := keys.Open(t.Context(), cfg); !errors.Is(err, keys.ErrOtherAnchor) {
			t.Errorf("an empty store beside an anchor that is not: %v", err)
		}
	})
	t.Run("a store behind its anchor", func(t *testing.T) {
		r := newRig(t)
		r.seal("ann", "trace")
		old := r.rows("")
		r.destroy("ann", "r1")
		r.close()
		cfg := r.config()
		cfg.Store = emptyStore(t)
		err := cfg.Store.Update(t.Context(), func(tx keys.Tx) error {
			for k, v := range old {
				if err := tx.Put([]byte(k), v); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		_, err = keys.Open(t.Context(), cfg)
		var behind *ledger.BehindError
		if !errors.As(err, &behind) || behind.Missing() != 1 {
			t.Error(err)
		}
	})
	t.Run("a store without its anchor", func(t *testing.T) {
		r := newRig(t)
		r.Keys.Close()
		cfg := r.config()
		cfg.Anchor = anchortest.NewMemory()
		cfg.Initialise = false
		if _, err := keys.Open(t.Context(), cfg); !errors.Is(err, ledger.ErrAnchorMissing) {
			t.Error(err)
		}
		// Initialise helps a store only that holds nothing but its first entry.
		cfg.Initialise = true
		if _, err := keys.Open(t.Context(), cfg); !errors.Is(err, ledger.ErrAnchorMissing) {
			t.Error(err)
		}
		r.Keys = nil
		r.store.Close()
	})
	t.Run("a newer format", func(t *testing.T) {
		r := newRig(t)
		var meta storev1.Meta
		if err := proto.Unmarshal(r.rows("M")["M"], &meta); err != nil {
			t.Fatal(err)
		}
		meta.FormatLevel++
		b, err := proto.Marshal(&meta)
		if err != nil {
			t.Fatal(err)
		}
		r.put("M", b)
		r.Keys.Close()
		if _, err := keys.Open(t.Context(), r.config()); !errors.Is(err, keys.ErrFormat) {
			t.Error(err)
		}
		r.Keys = nil
		r.store.Close()
	})
}

// A crash between the first commit and the anchor's first object is made good
// by starting again.
func TestInitialisationIsResumed(t *testing.T) {
	r := newRig(t)
	r.close()
	cfg := r.config()
	cfg.Store = emptyStore(t)
	anchor := anchortest.NewMemory()
	cfg.Anchor = anchor
	anchor.Inject = func(_ context.Context, op string) anchortest.Fault {
		if op == "put" {
			return anchortest.Lost
		}
		return anchortest.None
	}
	if _, err := keys.Open(t.Context(), cfg); err == nil {
		t.Fatal("opened without an anchor")
	}
	anchor.Inject = nil
	k, err := keys.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	k.Close()
}

// brittleKMS fails while down.
type brittleKMS struct {
	keys.KMS
	mu   sync.Mutex
	down error
}

func (b *brittleKMS) set(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.down = err
}

func (b *brittleKMS) Unwrap(ctx context.Context, root string, wrapped []byte, ec keys.EncryptionContext) ([]byte, error) {
	b.mu.Lock()
	err := b.down
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return b.KMS.Unwrap(ctx, root, wrapped, ec)
}

// keyd serves through an outage of the KMS for as long as the KEK's lease
// lasts, and then says unavailable, never erased.
func TestKMSOutage(t *testing.T) {
	r := newRig(t)
	kms := &brittleKMS{KMS: r.kms}
	r.kms = kms
	r.reopen()
	k := r.seal("ann", "trace")
	for _, down := range []error{keys.ErrKMSUnavailable, keys.ErrKMSDenied, keys.ErrRootNotUsable} {
		t.Run(fmt.Sprint(down), func(t *testing.T) {
			kms.set(down)
			r.clock.Advance(10 * time.Minute)
			for range 3 {
				if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
					t.Fatalf("within the lease: %v", err)
				}
			}
			r.clock.Advance(10 * time.Minute)
			_, err := r.ask(openQuery("acme", "ann", "trace", k))
			r.want("after the lease", err, isUnavail)
			kms.set(nil)
			if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
				t.Fatalf("KMS back: %v", err)
			}
		})
	}
	kms.set(keys.ErrKMSUnavailable)
	r.Keys.Close()
	if _, err := keys.Open(t.Context(), r.config()); outcome(err) != isUnavail {
		t.Errorf("a restart during the outage: %v", err)
	}
	r.Keys = nil
	r.store.Close()
}

func TestNextGroup(t *testing.T) {
	op := func(alone bool, rows ...string) *keys.Op { return keys.NewOp(t.Context(), alone, rows...) }
	names := func(ops []*keys.Op) string {
		var out []string
		for _, o := range ops {
			out = append(out, strings.Join(keys.OpRows(o), ""))
		}
		return strings.Join(out, " ")
	}
	for _, c := range []struct {
		in          []*keys.Op
		group, rest string
	}{
		{[]*keys.Op{op(false, "a"), op(false, "b")}, "a b", ""},
		{[]*keys.Op{op(false, "a"), op(false, "a"), op(false, "b")}, "a b", "a"},
		// The third depends on the second, which stays behind.
		{[]*keys.Op{op(false, "a"), op(false, "a", "b"), op(false, "b")}, "a", "ab b"},
		{[]*keys.Op{op(false, "a"), op(true, "x"), op(false, "b")}, "a", "x b"},
		{[]*keys.Op{op(true, "x"), op(false, "b")}, "x", "b"},
	} {
		group, rest := keys.NextGroup(c.in)
		if names(group) != c.group || names(rest) != c.rest {
			t.Errorf("group %q and rest %q, want %q and %q", names(group), names(rest), c.group, c.rest)
		}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	late := keys.NewOp(gone, false, "a")
	if group, rest := keys.NextGroup([]*keys.Op{late, op(false, "a")}); names(group) != "a" || len(rest) != 0 || !errors.Is(keys.OpErr(late), context.Canceled) {
		t.Errorf("a caller that left: group %q, rest %q", names(group), names(rest))
	}
}

// TestOpenRefusesOtherKMS: a KMS of another kind is asked for nothing.
func TestOpenRefusesOtherKMS(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.destroy("alice", "d1")
	r.close()
	rows := store.copyRows()
	r.kms = otherKind{}
	for name, open := range map[string]func(keys.Config) error{
		"Open": func(c keys.Config) error { _, err := keys.Open(t.Context(), c); return err },
		"Replay": func(c keys.Config) error {
			_, err := keys.Replay(t.Context(), c, keys.ReplayOptions{CallOff: true})
			return err
		},
	} {
		if err := open(r.config()); !errors.Is(err, keys.ErrOtherKMS) || !strings.Contains(err.Error(), "local") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !reflect.DeepEqual(store.copyRows(), rows) {
		t.Error("the store was changed")
	}
}

// otherKind is a KMS whose every call but Kind panics.
type otherKind struct{ keys.KMS }

func (otherKind) Kind() string { return "elsewhere" }
