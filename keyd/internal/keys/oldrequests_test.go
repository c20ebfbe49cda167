package keys_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
)

// TestOldRequestsBringNobodyBack: the requests that once made a key, sent again
// with their old ids: after its destruction, on an older copy that was put back
// and replayed, once the epoch is closed, and on a copy from then. They get the
// answers of then, or are told what has become of it, and make nothing.
func TestOldRequestsBringNobodyBack(t *testing.T) {
	ctx := context.Background()
	r, store, _ := newMemoryRig(t)
	empty := store.copyRows() // has none of the tenants
	request := func(tenant string) ([]*keydv1.Class, error) {
		return r.RequestTenant(ctx, tenant, []*keydv1.Class{class("trace", time.Hour, time.Minute)}, "create "+tenant)
	}
	made := make(map[string][]*keydv1.Class)
	for _, tenant := range []string{"beta", "gamma"} {
		var err error
		if made[tenant], err = request(tenant); err != nil {
			t.Fatal(err)
		}
	}
	p := &people{r: r, keys: make(map[string]*keydv1.BlobKey), dead: make(map[string]*keydv1.BlobKey)}
	for _, name := range []string{"ann", "bob", "carol"} {
		p.keys[name] = r.seal(name, "trace")
	}
	inBeta, err := r.ask(sealQuery("beta", "ann", "trace"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ask(sealQuery("gamma", "ann", "trace")); err != nil {
		t.Fatal(err)
	}
	before := store.copyRows()

	destroyBeta := &keydv1.DestroyKeyRequest{Tenant: "beta", SubjectId: []byte("ann"), RequestId: "d", Reason: "test"}
	destroyGamma := &keydv1.DestroyTenantRequest{Tenant: "gamma", RequestId: "d", Reason: "test"}
	reinstateCarol := &keydv1.ReinstateRequest{Tenant: "acme", SubjectId: []byte("carol"), RequestId: "again", Reason: "test", IfGeneration: 1}
	destroyCarol := destroyRequest("carol", "destroy-carol's second life")
	destroyCarol.IfGeneration = 2
	var receipts [4][]byte
	repeat := func() (now [4][]byte) {
		for i, fn := range []func() (*keys.Recorded, error){
			func() (*keys.Recorded, error) { return r.DestroyKey(ctx, destroyBeta) },
			func() (*keys.Recorded, error) { return r.DestroyTenant(ctx, destroyGamma) },
			func() (*keys.Recorded, error) { return r.Reinstate(ctx, reinstateCarol) },
			func() (*keys.Recorded, error) { return r.DestroyKey(ctx, destroyCarol) },
		} {
			rec, err := fn()
			if err != nil {
				t.Errorf("request %d: %v", i, err)
				continue
			}
			now[i] = rec.Receipt
			if i == 2 && receipts[3] == nil { // the first time, between two lives
				p.dead["carol"] = r.seal("carol", "trace")
			}
		}
		return now
	}
	p.destroy("ann")
	p.destroy("carol")
	receipts = repeat()

	check := func(when string) {
		t.Helper()
		size := r.LedgerSize()
		for range 2 {
			for i, got := range repeat() {
				if !bytes.Equal(got, receipts[i]) {
					t.Errorf("%s: request %d has another answer", when, i)
				}
			}
			again, err := request("beta")
			if err != nil || len(again) != 1 || !proto.Equal(again[0], made["beta"][0]) {
				t.Errorf("%s: the tenant's request: %v, %v", when, again, err)
			}
			_, err = request("gamma")
			r.want(when+": the request for a tenant that was destroyed", err, isErased)
			// The first uses, with what they were given then and without it.
			for _, q := range []*keydv1.BlobKeyQuery{
				sealQuery("beta", "ann", "trace"), openQuery("beta", "ann", "trace", inBeta),
				sealQuery("gamma", "ann", "trace"), sealQuery("gamma", "never seen", "trace"),
				sealQuery("acme", "ann", "trace"), sealQuery("acme", "carol", "trace"), sealQuery("acme", "carol", "memory"),
			} {
				_, err := r.ask(q)
				r.want(fmt.Sprintf("%s: %s/%s, %v", when, q.Tenant, q.SubjectId, q.Purpose), err, isErased)
			}
			p.check()
		}
		if got := r.LedgerSize(); got != size {
			t.Errorf("%s: the ledger has gone from %d to %d", when, size, got)
		}
		found := opens(t, r.store.(*memory).copyRows(), r.kms)
		if len(found) != 1 || !found[string(p.keys["bob"].KeyId)] {
			t.Errorf("%s: %d keys can be unwrapped, want the one of who lives", when, len(found))
		}
	}
	putBack := func(rows map[string][]byte) {
		t.Helper()
		r.close()
		r.store = storeOf(rows)
		if err := keys.MarkRestored(ctx, r.store, r.clock.Now()); err != nil {
			t.Fatal(err)
		}
		r.replay(keys.ReplayOptions{})
	}
	check("destroyed")
	r.reopen2()
	check("after a restart")
	live := r.store.(*memory).copyRows()

	// On a copy that knows of no tenant they are lost, and are not made anew: their
	// names stay taken.
	putBack(empty)
	for range 2 {
		for _, tenant := range []string{"beta", "gamma"} {
			_, err = request(tenant)
			r.want("the request for a tenant that the copy lacks", err, isConflict)
		}
		_, err = r.ask(sealQuery("beta", "ann", "trace"))
		r.want("a lost tenant's first use", err, isUnavail)
		_, err = r.ask(sealQuery("acme", "ann", "trace"))
		r.want("who was destroyed and is lost", err, isErased)
	}

	putBack(live)
	putBack(before)
	check("restored from before")
	r.turn()
	check("turned")
	r.closeEpoch(1)
	check("closed")
	fresh := r.store.(*memory).copyRows()
	r.destroy("bob's neighbour", "d9")
	putBack(fresh)
	check("restored from after the end")
}
