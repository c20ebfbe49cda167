package keys_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// Who made a request stands in its statement, and is replayed with it; it is no
// part of what tells two requests apart. What keyd does by itself names nobody.
func TestPrincipalsAreReplayed(t *testing.T) {
	r := newRig(t)
	for _, subject := range []string{"ann", "bob", "cleo"} {
		r.seal(subject, "memory")
	}
	file := r.backup()
	from := r.LedgerSize()
	as := func(name string) func(err error) {
		return func(err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	ctx := keys.WithPrincipal(t.Context(), "spiffe://test/one")
	placing := &keydv1.PlaceHoldRequest{Tenant: "acme", SubjectId: []byte("ann"), HoldId: "h", RequestId: "r1", Reason: "court"}
	_, err := r.PlaceHold(ctx, placing)
	as("place")(err)
	_, err = r.PlaceHold(ctx, &keydv1.PlaceHoldRequest{Tenant: "acme", HoldId: "all", RequestId: "r2", Reason: "court"})
	as("place on the tenant")(err)
	_, err = r.ReleaseHold(ctx, &keydv1.ReleaseHoldRequest{Tenant: "acme", HoldId: "all", RequestId: "r3", Reason: "court"})
	as("release")(err)
	_, err = r.DestroyKey(ctx, &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("bob"), RequestId: "r4", Reason: "test"})
	as("destroy")(err)
	_, err = r.Reinstate(ctx, &keydv1.ReinstateRequest{Tenant: "acme", SubjectId: []byte("bob"), RequestId: "r5", Reason: "test"})
	as("reinstate")(err)
	due := timestamppb.New(r.clock.Now().Add(time.Hour))
	_, err = r.DestroyKey(ctx, &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("cleo"), RequestId: "r6", Reason: "test", NotBefore: due})
	as("schedule")(err)
	_, err = r.CancelDestruction(ctx, &keydv1.CancelDestructionRequest{Tenant: "acme", SubjectId: []byte("cleo"), RequestId: "r7", Reason: "test"})
	as("cancel")(err)
	_, err = r.PutClass(ctx, "acme", &keydv1.Class{
		Name: "memory", BucketWidth: durationpb.New(30 * 24 * time.Hour), Lease: durationpb.New(time.Second),
	})
	as("class")(err)

	check := func(when string) {
		t.Helper()
		entries, _, err := r.ListReceipts(t.Context(), "acme", nil, from, 100)
		as("list")(err)
		if len(entries) < 8 {
			t.Fatalf("%s: %d entries", when, len(entries))
		}
		for i, e := range entries {
			want := "spiffe://test/one"
			if i >= 8 {
				want = "" // the replay's own
			}
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil || s.Principal != want {
				t.Errorf("%s: %s by %q, %v", when, s.Kind, s.Principal, err)
			}
		}
		holds, err := r.Holds(t.Context(), "acme", []byte("ann"))
		if err != nil || len(holds) != 1 || holds[0].Principal != "spiffe://test/one" {
			t.Errorf("%s: the holds are %v, %v", when, holds, err)
		}
	}
	check("at first")
	r.restoreFrom(file)
	if done := r.replay(keys.ReplayOptions{}); done.To-done.From < 8 {
		t.Errorf("replayed %+v", done)
	}
	check("replayed")
	again, err := r.PlaceHold(keys.WithPrincipal(t.Context(), "spiffe://test/two"), placing)
	if err != nil || !again.Again || !again.Binds {
		t.Errorf("repeated by another: %+v, %v", again, err)
	}
	check("repeated")
}

func TestWhatKeydDoesNamesNobody(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "memory")
	_, err := r.DestroyKey(keys.WithPrincipal(t.Context(), "erasure.test"), &keydv1.DestroyKeyRequest{
		Tenant: "acme", SubjectId: []byte("ann"), RequestId: "d", Reason: "test", NotBefore: timestamppb.New(r.clock.Now().Add(time.Hour)),
	})
	if err != nil {
		t.Fatal(err)
	}
	r.clock.Advance(2 * time.Hour)
	r.duty()
	entries, _, err := r.ListReceipts(t.Context(), "acme", []byte("ann"), 0, 100)
	if err != nil || len(entries) != 2 {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	for i, want := range []string{"erasure.test", ""} {
		if s, err := receipt.ParseStatement(entries[i].Statement); err != nil || s.Principal != want {
			t.Errorf("entry %d is by %q, %v", i, s.Principal, err)
		}
	}
}
