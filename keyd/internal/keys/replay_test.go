package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/backup"
	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// restoreFrom replaces the rig's store by what a backup file holds. The anchor
// and the KMS stay as they are.
func (r *rig) restoreFrom(file []byte) {
	r.t.Helper()
	r.close()
	in, err := backup.NewReader(bytes.NewReader(file))
	if err != nil {
		r.t.Fatal(err)
	}
	if err := keys.CheckBackup(in.Header(), badger.Kind); err != nil {
		r.t.Fatal(err)
	}
	r.dir = r.t.TempDir()
	dir := filepath.Join(r.dir, "store")
	if err := badger.Restore(context.Background(), dir, in); err != nil {
		r.t.Fatal(err)
	}
	if r.store, err = badger.Open(badger.Options{Dir: dir}); err != nil {
		r.t.Fatal(err)
	}
	if err := keys.MarkRestored(context.Background(), r.store, in.Header().Created); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) backup() []byte {
	r.t.Helper()
	var b bytes.Buffer
	if err := r.Backup(context.Background(), &b); err != nil {
		r.t.Fatal(err)
	}
	return b.Bytes()
}

// serve opens the store as it is.
func (r *rig) serve() error {
	k, err := keys.Open(context.Background(), r.config())
	if err == nil {
		r.Keys = k
	}
	return err
}

// replay brings the store up to the anchor, and opens it.
func (r *rig) replay(o keys.ReplayOptions) *keys.Replayed {
	r.t.Helper()
	done, err := keys.Replay(context.Background(), r.config(), o)
	if err != nil {
		r.t.Fatalf("replay: %v", err)
	}
	if err := r.serve(); err != nil {
		r.t.Fatalf("after the replay: %v", err)
	}
	return done
}

func (r *rig) place(subject, id, request string) {
	r.t.Helper()
	_, err := r.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte(subject), HoldId: id, RequestId: request, Reason: "court",
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) unplace(subject, id, request string) {
	r.t.Helper()
	_, err := r.ReleaseHold(context.Background(), &keydv1.ReleaseHoldRequest{
		Tenant: "acme", SubjectId: []byte(subject), HoldId: id, RequestId: request, Reason: "court",
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) reinstate(subject, request string, generation uint32, classes ...string) {
	r.t.Helper()
	_, err := r.Reinstate(context.Background(), &keydv1.ReinstateRequest{
		Tenant: "acme", SubjectId: []byte(subject), RequestId: request, Reason: "again", IfGeneration: generation, Classes: classes,
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestGuaranteeNoWayBack: a backup put back refuses to serve, says what it
// lacks, and after the replay answers as the store that was lost, but for the
// keys that it never had.
func TestGuaranteeNoWayBack(t *testing.T) {
	ctx := context.Background()
	r := newRig(t)
	alice, bob := r.seal("alice", "memory"), r.seal("bob", "memory")
	carol, carolTrace := r.seal("carol", "memory"), r.seal("carol", "trace")
	r.place("bob", "old", "h0")
	file := r.backup()

	// What happens after the backup.
	first := r.destroy("alice", "d1")
	r.place("bob", "new", "h1")
	r.unplace("bob", "old", "h2")
	r.place("dave", "early", "h3") // never seen
	r.destroy("carol", "d2", "trace")
	r.reinstate("alice", "r1", 1)
	again := r.seal("alice", "memory") // a key that the backup lacks
	second, err := r.DestroyKey(ctx, &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("alice"), RequestId: "d3", Reason: "test", IfGeneration: 2})
	if err != nil {
		t.Fatal(err)
	}
	r.destroy("erin", "d4") // never had a key
	frank := r.seal("frank", "memory")
	fifth := r.destroy("grace", "d5", "memory", "trace")
	if _, err := r.CreateTenant(ctx, "beta", []*keydv1.Class{class("note", time.Hour, time.Minute)}); err != nil {
		t.Fatal(err)
	}
	beta, err := r.ask(sealQuery("beta", "alice", "note"))
	if err != nil {
		t.Fatal(err)
	}
	ofBeta, err := r.DestroyKey(ctx, &keydv1.DestroyKeyRequest{Tenant: "beta", SubjectId: []byte("alice"), RequestId: "b1", Reason: "test"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.PutClass(ctx, "acme", class("memory", time.Hour, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.PutClass(ctx, "acme", class("extra", time.Hour, time.Second)); err != nil {
		t.Fatal(err)
	}

	r.restoreFrom(file)
	err = r.serve()
	if !errors.Is(err, ledger.ErrBehind) {
		t.Fatalf("a restored store: %v", err)
	}
	for _, part := range []string{"5 destructions", "1 reinstatement", "2 holds placed", "1 hold released", "1 new tenant", "3 class settings"} {
		if part == "5 destructions" {
			part = "6 destructions" // alice twice, carol, erin, grace, and one of beta's
		}
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not tell of %s", err, part)
		}
	}
	done := r.replay(keys.ReplayOptions{})
	if len(done.LostTenants) != 1 || done.LostTenants[0] != "beta" {
		t.Errorf("lost tenants: %q", done.LostTenants)
	}

	// Destroyed stays destroyed, whether or not the backup had the key.
	for what, q := range map[string]*keydv1.BlobKeyQuery{
		"a key of the backup": openQuery("acme", "alice", "memory", alice), "a key after it": openQuery("acme", "alice", "memory", again),
		"a class": openQuery("acme", "carol", "trace", carolTrace), "a new seal": sealQuery("acme", "alice", "trace"),
		"one never seen": sealQuery("acme", "erin", "memory"), "a class never used": sealQuery("acme", "grace", "trace"),
	} {
		_, err := r.ask(q)
		r.want(what, err, isErased)
	}
	// A stranger's blob, dead or not, is told apart.
	for what, k := range map[string]*keydv1.BlobKey{"alice's first": alice, "alice's second": again, "beta's": beta} {
		_, err := r.ask(openQuery("acme", "bob", "memory", k))
		r.want(what+" opened for bob", err, isWrong)
	}
	// The rest opens, with the key that it had.
	for _, c := range []struct {
		subject string
		key     *keydv1.BlobKey
	}{{"bob", bob}, {"carol", carol}} {
		k, err := r.ask(openQuery("acme", c.subject, "memory", c.key))
		if err != nil || !bytes.Equal(k.Key, c.key.Key) {
			t.Errorf("%s: %v", c.subject, err)
		}
	}
	// Lost is not erased.
	_, err = r.ask(openQuery("acme", "frank", "memory", frank))
	r.want("a key that the backup lacks", err, isUnknown)
	fresh, err := r.ask(sealQuery("acme", "frank", "memory"))
	if err != nil || bytes.Equal(fresh.KeyId, frank.KeyId) {
		t.Errorf("a new seal for the same: %v", err)
	}
	for _, q := range []*keydv1.BlobKeyQuery{openQuery("beta", "alice", "note", beta), sealQuery("beta", "alice", "note")} {
		_, err = r.ask(q)
		r.want("a lost tenant", err, isUnavail)
		var e *keys.Error
		if !errors.As(err, &e) || e.Metadata["lost"] != "tenant" {
			t.Errorf("a lost tenant: %v", err)
		}
	}
	_, err = r.CreateTenant(ctx, "beta", nil)
	r.want("a lost tenant's name", err, isConflict)

	// Holds.
	_, err = r.DestroyKey(ctx, destroyRequest("bob", "x1"))
	r.want("bob is held", err, isHeld)
	if holds, err := r.Holds(ctx, "acme", []byte("bob")); err != nil || len(holds) != 1 || holds[0].Id != "new" {
		t.Errorf("bob's holds: %v, %v", holds, err)
	}
	_, err = r.DestroyKey(ctx, destroyRequest("dave", "x2"))
	r.want("dave is held", err, isHeld)

	// Requests: the same answers, byte for byte.
	for _, c := range []struct {
		what string
		req  *keydv1.DestroyKeyRequest
		want *keys.Recorded
	}{
		{"d1", destroyRequest("alice", "d1"), first},
		{"d3", &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("alice"), RequestId: "d3", Reason: "test", IfGeneration: 2}, second},
		{"d5", destroyRequest("grace", "d5", "trace", "memory"), fifth},
	} {
		got, err := r.DestroyKey(ctx, c.req)
		if err != nil || !bytes.Equal(got.Receipt, c.want.Receipt) || got.Repeated != c.want.Repeated {
			t.Errorf("request %s again: %v", c.what, err)
			continue
		}
		r.verify(got)
	}
	_, err = r.DestroyKey(ctx, destroyRequest("bob", "d1"))
	r.want("an old id for another", err, isConflict)
	got, err := r.GetReceipt(ctx, &keydv1.GetReceiptRequest{Tenant: "beta", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "b1"}})
	if err != nil || !bytes.Equal(got.Receipt, ofBeta.Receipt) {
		t.Errorf("the receipt of a lost tenant: %v", err)
	}

	// Classes.
	classes, err := r.Classes(ctx, "acme")
	if err != nil || len(classes) != 5 || classes[3].Lease.AsDuration() != 10*time.Second || classes[4].Name != "extra" {
		t.Errorf("classes: %v, %v", classes, err)
	}

	// It says of itself what it is.
	if c := r.Status(ctx).Components[0]; !c.Healthy || !strings.Contains(c.Detail, "restored at") || !strings.Contains(c.Detail, "from a backup of") {
		t.Errorf("the store's status: %v", c)
	}

	// And it goes on as any other store: it can be closed, opened, backed up.
	r.destroy("bob's neighbour", "y1")
	r.close()
	if r.store, err = badger.Open(badger.Options{Dir: filepath.Join(r.dir, "store")}); err != nil {
		t.Fatal(err)
	}
	if err := r.serve(); err != nil {
		t.Fatal(err)
	}
}

// TestRestoreOfTheSame: a backup that lacks nothing must be replayed too: keys
// were made that no ledger knows.
func TestRestoreOfTheSame(t *testing.T) {
	r := newRig(t)
	alice := r.seal("alice", "memory")
	file := r.backup()
	r.clock.Advance(40 * 24 * time.Hour) // into another bucket
	lost := r.seal("alice", "memory")
	if lost.Bucket == alice.Bucket || !bytes.Equal(lost.KeyId, alice.KeyId) {
		t.Fatal("not what the test is about")
	}
	r.restoreFrom(file)
	if err := r.serve(); !errors.Is(err, keys.ErrReplayPending) {
		t.Fatalf("a restored store: %v", err)
	}
	done := r.replay(keys.ReplayOptions{})
	if done.From != done.To || done.NewBuckets == 0 {
		t.Errorf("replayed: %+v", done)
	}
	// The bucket's key is lost. It is unknown, and is never made anew under the
	// same name: what was sealed under it would seem corrupt.
	_, err := r.ask(openQuery("acme", "alice", "memory", lost))
	r.want("a bucket that the backup lacks", err, isUnknown)
	fresh := r.seal("alice", "memory")
	if fresh.Bucket == lost.Bucket {
		t.Fatal("a lost bucket was made anew")
	}
	_, err = r.ask(openQuery("acme", "alice", "memory", lost))
	r.want("a bucket that the backup lacks, after a seal", err, isUnknown)
	if k, err := r.ask(openQuery("acme", "alice", "memory", alice)); err != nil || !bytes.Equal(k.Key, alice.Key) {
		t.Errorf("a bucket of the backup: %v", err)
	}
	if k, err := r.ask(openQuery("acme", "alice", "memory", fresh)); err != nil || !bytes.Equal(k.Key, fresh.Key) {
		t.Errorf("a bucket of now: %v", err)
	}
	// The grid goes on from there.
	r.clock.Advance(31 * 24 * time.Hour)
	next := r.seal("alice", "memory")
	if next.Bucket != fresh.BucketEnd {
		t.Errorf("the next bucket begins at %d, not at %d", next.Bucket, fresh.BucketEnd)
	}
}

// TestReplayTwice: a second run finds nothing to do.
func TestReplayTwice(t *testing.T) {
	r := newRig(t)
	r.seal("alice", "memory")
	file := r.backup()
	r.destroy("alice", "d1")
	r.restoreFrom(file)
	r.replay(keys.ReplayOptions{})
	size := r.LedgerSize()
	r.Keys.Close()
	r.Keys = nil
	done := r.replay(keys.ReplayOptions{})
	if done.From != size || done.To != size || r.LedgerSize() != size {
		t.Errorf("a second replay: %+v, size %d", done, r.LedgerSize())
	}
}

// TestRestoredTwice: of two copies of a store that are put back, one goes on;
// the other has another history from then on, and never serves.
func TestRestoredTwice(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.seal("alice", "memory")
	rows := store.copyRows()
	r.destroy("alice", "d1")
	r.close()
	first := storeOf(rows)
	r.store = first
	r.replay(keys.ReplayOptions{})
	one := r.Keys
	defer one.Close()
	rec, err := one.DestroyKey(t.Context(), destroyRequest("bob", "d2"))
	if err != nil {
		t.Fatal(err)
	}
	r.verify(rec)

	// The second copy lacks what the first has said since, and comes to the same.
	second := storeOf(rows)
	r.store = second
	if _, err := keys.Replay(t.Context(), r.config(), keys.ReplayOptions{}); err != nil {
		t.Fatal(err)
	}
	two, err := keys.Open(t.Context(), r.config())
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	// Both serve one history until one of them adds to it.
	_, errTwo := two.DestroyKey(t.Context(), destroyRequest("carol", "d3"))
	_, errOne := one.DestroyKey(t.Context(), destroyRequest("dave", "d4"))
	if (errOne == nil) == (errTwo == nil) {
		t.Fatalf("two copies at once: %v and %v", errOne, errTwo)
	}
	if one.Serving() == nil && two.Serving() == nil {
		t.Error("both still serve")
	}
}

// TestRestoredBesideTheLiveOne: a copy that is put back while the store that it
// is of goes on elsewhere takes nothing from it that was acknowledged.
func TestRestoredBesideTheLiveOne(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	k := r.seal("alice", "memory")
	rows := store.copyRows()
	r.destroy("alice", "d1")
	live := r.Keys
	r.Keys = nil
	defer live.Close()
	r.store = storeOf(rows)
	r.replay(keys.ReplayOptions{})
	_, err := r.ask(openQuery("acme", "alice", "memory", k))
	r.want("alice", err, isErased)
	// The replay began new buckets, or either adds an entry: then one of the
	// two has another history, and says so.
	_, errLive := live.DestroyKey(t.Context(), destroyRequest("bob", "d2"))
	_, errCopy := r.DestroyKey(t.Context(), destroyRequest("carol", "d3"))
	if errLive == nil && errCopy == nil {
		t.Error("both were acknowledged")
	}
}

// dying is a store that dies after some updates: all of its calls fail from
// then on, and the last update may or may not have been written.
type dying struct {
	keys.Store
	left    int
	persist bool
}

var errDied = errors.New("died")

func (d *dying) Update(ctx context.Context, fn func(keys.Tx) error) error {
	if d.left < 0 {
		return errDied
	}
	if d.left--; d.left < 0 {
		if d.persist {
			_ = d.Store.Update(ctx, fn)
		}
		return errDied
	}
	return d.Store.Update(ctx, fn)
}

func (d *dying) View(ctx context.Context, fn func(keys.Reader) error) error {
	if d.left < 0 {
		return errDied
	}
	return d.Store.View(ctx, fn)
}

func (d *dying) DropRange(ctx context.Context, prefix []byte) error {
	if d.left--; d.left < 0 {
		return errDied
	}
	return d.Store.DropRange(ctx, prefix)
}

// TestReplayDies: a replay that dies at any of its writes, which is lost or
// not, leaves a store that refuses to serve and that another run completes.
func TestReplayDies(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.seal("alice", "memory")
	for i := range 8 {
		r.seal(fmt.Sprint("person ", i), "memory")
	}
	rows := store.copyRows()
	var receipts [][]byte
	for i := range 8 {
		receipts = append(receipts, r.destroy(fmt.Sprint("person ", i), fmt.Sprint("request ", i)).Receipt)
	}
	if _, err := r.CreateTenant(t.Context(), "beta", nil); err != nil {
		t.Fatal(err)
	}
	r.clock.Advance(40 * 24 * time.Hour)
	r.destroy("alice", "the last")
	r.close()
	anchor := r.anchor
	for n := 0; ; n++ {
		complete := false
		for _, persist := range []bool{false, true} {
			r.anchor = anchor.Clone()
			d := &dying{Store: storeOf(rows), left: n, persist: persist}
			r.store = d
			_, err := keys.Replay(t.Context(), r.config(), keys.ReplayOptions{})
			if err == nil {
				complete = true
			} else if !errors.Is(err, errDied) {
				t.Fatalf("after %d writes: %v", n, err)
			}
			d.left = 1 << 30
			if err := r.serve(); err == nil && !complete && !persist {
				t.Fatalf("after %d writes it serves", n)
			} else if err == nil {
				r.Keys.Close()
				r.Keys = nil
			}
			r.replay(keys.ReplayOptions{})
			for i, want := range receipts {
				got, err := r.DestroyKey(t.Context(), destroyRequest(fmt.Sprint("person ", i), fmt.Sprint("request ", i)))
				if err != nil || !bytes.Equal(got.Receipt, want) {
					t.Fatalf("after %d writes: request %d again: %v", n, i, err)
				}
			}
			_, err = r.ask(sealQuery("acme", "alice", "memory"))
			r.want("alice", err, isErased)
			r.Keys.Close()
			r.Keys = nil
		}
		if complete {
			if n < 3 {
				t.Errorf("only %d writes", n)
			}
			return
		}
	}
}

// TestReplayRefuses: what is not the store's own history is not replayed, and
// nothing is changed.
func TestReplayRefuses(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.seal("alice", "memory")
	rows := store.copyRows()
	r.destroy("alice", "d1")
	size := r.LedgerSize()
	r.destroy("bob", "d2")
	r.close()
	good := r.anchor
	edit := func(a *anchortest.Memory, fn func(o *ledger.Object)) {
		a.Edit(size, func(b []byte) []byte {
			o, err := ledger.DecodeObject(b)
			if err != nil {
				t.Fatal(err)
			}
			fn(&o)
			if b, err = o.Encode(); err != nil {
				t.Fatal(err)
			}
			return b
		})
	}
	for what, c := range map[string]struct {
		change func(a *anchortest.Memory)
		want   error
	}{
		"an edited statement": {func(a *anchortest.Memory) {
			edit(a, func(o *ledger.Object) {
				e := &o.Entries[0]
				e.Statement = bytes.Replace(e.Statement, []byte(`"reason":"test"`), []byte(`"reason":"tent"`), 1)
			})
		}, ledger.ErrForked},
		"an edited salt": {func(a *anchortest.Memory) {
			edit(a, func(o *ledger.Object) { o.Entries[0].Salt[3] ^= 1 })
		}, ledger.ErrForked},
		"rotten bytes":       {func(a *anchortest.Memory) { a.Edit(size, func(b []byte) []byte { b[40] ^= 1; return b }) }, ledger.ErrAnchorDamaged},
		"a truncated object": {func(a *anchortest.Memory) { a.Edit(size, func(b []byte) []byte { return b[:len(b)-5] }) }, ledger.ErrAnchorDamaged},
		"a gap":              {func(a *anchortest.Memory) { a.Edit(size, func([]byte) []byte { return nil }) }, ledger.ErrAnchorDamaged},
	} {
		r.anchor = good.Clone()
		c.change(r.anchor)
		m := storeOf(rows)
		r.store = m
		if _, err := keys.Replay(t.Context(), r.config(), keys.ReplayOptions{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		now := m.copyRows()
		if len(now) != len(rows) {
			t.Errorf("%s: rows were added", what)
		}
		for k, v := range rows {
			if !bytes.Equal(now[k], v) {
				t.Errorf("%s: a row of kind %c was changed", what, k[0])
			}
		}
		if err := r.serve(); err == nil {
			t.Errorf("%s: it serves", what)
		}
	}
	r.anchor, r.store = anchortest.NewMemory(), storeOf(rows)
	if _, err := keys.Replay(t.Context(), r.config(), keys.ReplayOptions{}); !errors.Is(err, ledger.ErrAnchorMissing) {
		t.Errorf("an empty anchor: %v", err)
	}
}

// storeOf is a store in memory that holds rows.
func storeOf(rows map[string][]byte) *memory {
	m := newMemory()
	m.rows = maps.Clone(rows)
	return m
}

// TestReplayOfDestroyedWhileLost: whoever was destroyed while his keys were lost
// is destroyed in a newer backup that has them, though no statement names them.
func TestReplayOfDestroyedWhileLost(t *testing.T) {
	ctx := context.Background()
	for _, sealsAnew := range []bool{false, true} {
		r, store, _ := newMemoryRig(t)
		r.seal("bob", "memory")
		older := store.copyRows()
		lost, other := r.seal("alice", "memory"), r.seal("alice", "trace")
		stays := r.seal("carol", "memory")
		newer := store.copyRows()
		r.close()

		r.store = storeOf(older)
		if err := keys.MarkRestored(ctx, r.store, r.clock.Now()); err != nil {
			t.Fatal(err)
		}
		r.replay(keys.ReplayOptions{})
		want := receipt.ExistedUnknown
		var anew *keydv1.BlobKey
		if sealsAnew {
			anew, want = r.seal("alice", "memory"), receipt.ExistedYes
		}
		rec := r.destroy("alice", "d1")
		if s := r.verify(rec).Entries[0].Statement; s.Existed != want {
			t.Errorf("existed: %q, want %q", s.Existed, want)
		}
		size := r.LedgerSize()
		r.close()

		r.store = storeOf(newer)
		if err := keys.MarkRestored(ctx, r.store, r.clock.Now()); err != nil {
			t.Fatal(err)
		}
		if done := r.replay(keys.ReplayOptions{}); done.To != size {
			t.Errorf("replayed up to %d of %d", done.To, size)
		}
		dead := map[string]*keydv1.BlobKey{"memory": lost, "trace": other}
		for class, k := range dead {
			_, err := r.ask(openQuery("acme", "alice", class, k))
			r.want("a key that was lost when it was destroyed", err, isErased)
			_, err = r.ask(openQuery("acme", "bob", class, k))
			r.want("the same for another", err, isWrong)
			for key, row := range r.store.(*memory).copyRows() {
				if key[0] == 'w' && bytes.Contains([]byte(key), k.KeyId) && len(row) > 8 {
					t.Errorf("%x still holds a wrapped key of %d bytes", key, len(row))
				}
			}
		}
		if anew != nil {
			_, err := r.ask(openQuery("acme", "alice", "memory", anew))
			r.want("the key that was destroyed", err, isErased)
		}
		_, err := r.ask(sealQuery("acme", "alice", "trace"))
		r.want("a new seal", err, isErased)
		if k, err := r.ask(openQuery("acme", "carol", "memory", stays)); err != nil || !bytes.Equal(k.Key, stays.Key) {
			t.Errorf("who was not destroyed: %v", err)
		}
		again, err := r.DestroyKey(ctx, destroyRequest("alice", "d1"))
		if err != nil || !bytes.Equal(again.Receipt, rec.Receipt) {
			t.Errorf("the request again: %v", err)
		}
		r.close()
	}
}
