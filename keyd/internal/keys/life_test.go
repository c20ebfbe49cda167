package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

func TestSealThenOpenGiveTheSameKey(t *testing.T) {
	r := newRig(t)
	k := r.seal("ann", "trace")
	if len(k.Key) != 32 || len(k.KeyId) != 16 || k.Lease.AsDuration() != time.Minute || k.Generation != 1 {
		t.Fatalf("unexpected key: id %x, lease %v, generation %d", k.KeyId, k.Lease, k.Generation)
	}
	if now := uint64(r.clock.Now().Unix()); k.Bucket > now || now >= k.BucketEnd || k.BucketEnd-k.Bucket != 86400 {
		t.Errorf("bucket [%d, %d) around %d", k.Bucket, k.BucketEnd, now)
	}
	again := r.seal("ann", "trace")
	opened, err := r.ask(openQuery("acme", "ann", "trace", k))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(k.Key, again.Key) || !bytes.Equal(k.Key, opened.Key) {
		t.Error("three asks, not one key")
	}
	r.reopen()
	if after := r.seal("ann", "trace"); !bytes.Equal(k.Key, after.Key) {
		t.Error("another key after a restart")
	}
}

// Every subject, class and bucket has a key of its own.
func TestGuaranteeNoMixing(t *testing.T) {
	r := newRig(t)
	if _, err := r.CreateTenant(t.Context(), "a", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.CreateTenant(t.Context(), "a.b", nil); err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]string)
	for _, s := range []struct{ tenant, subject, class string }{
		{"acme", "ann", "trace"}, {"acme", "ann", "memory"}, {"acme", "bob", "trace"},
		{"a", "b:c", "trace"}, {"a", "b", "trace"}, {"a.b", "c", "trace"}, {"a.b", ":c", "trace"}, {"a", ".b:c", "trace"},
		{"a", "12", "trace"}, {"a", "012", "trace"}, {"a", "12 ", "trace"},
		{"a", "\u00e9", "trace"}, {"a", "e\u0301", "trace"},
	} {
		k, err := r.ask(sealQuery(s.tenant, s.subject, s.class))
		if err != nil {
			t.Fatal(err)
		}
		if other, dup := seen[string(k.Key)]; dup {
			t.Errorf("%q shares a key with %s", s, other)
		}
		seen[string(k.Key)] = fmt.Sprintf("%q", s)
		if _, dup := seen[string(k.KeyId)]; dup {
			t.Errorf("%q shares a key id", s)
		}
		seen[string(k.KeyId)] = fmt.Sprintf("%q", s)
	}
	r.clock.Advance(24 * time.Hour)
	k, err := r.ask(sealQuery("a", "12", "trace"))
	if err != nil {
		t.Fatal(err)
	}
	if _, dup := seen[string(k.Key)]; dup {
		t.Error("the next bucket has the same key")
	}

	bob := r.seal("bob", "trace")
	_, err = r.ask(openQuery("acme", "ann", "trace", bob))
	r.want("another subject's blob", err, isWrong)
	_, err = r.ask(openQuery("a", "bob", "trace", bob))
	r.want("another tenant's blob", err, isWrong)
	_, err = r.ask(openQuery("acme", "bob", "memory", bob))
	r.want("another class", err, isWrong)
	r.destroy("bob", "r1")
	_, err = r.ask(openQuery("acme", "ann", "trace", bob))
	r.want("another subject's blob, erased: whose it is comes first", err, isWrong)

	unseen := openQuery("acme", "bob", "trace", bob)
	unseen.KeyId = make([]byte, 16)
	_, err = r.ask(unseen)
	r.want("a key id never seen", err, isUnknown)
	other := openQuery("acme", "ann", "trace", r.seal("ann", "trace"))
	other.Bucket += 86400 * 7
	_, err = r.ask(other)
	r.want("a bucket never seen", err, isUnknown)
}

func TestGuaranteeFinalWord(t *testing.T) {
	r := newRig(t)
	trace, memory := r.seal("ann", "trace"), r.seal("ann", "memory")
	bob := r.seal("bob", "trace")
	before := r.clock.Now().Truncate(time.Millisecond)
	rec := r.destroy("ann", "r1")
	if rec.Repeated {
		t.Error("the first destroy says that it was done before")
	}
	if want := before.Add(time.Minute + 5*time.Second); !rec.DrainedBy.Equal(want) {
		t.Errorf("drained by %v, want %v", rec.DrainedBy, want)
	}
	for range 2 {
		for name, k := range map[string]*keydv1.BlobKey{"trace": trace, "memory": memory} {
			_, err := r.ask(openQuery("acme", "ann", name, k))
			r.want("open after destroy", err, isErased)
		}
		for _, name := range []string{"trace", "memory", "backup"} {
			_, err := r.ask(sealQuery("acme", "ann", name))
			r.want("a late seal", err, isErased)
		}
		if k, err := r.ask(openQuery("acme", "bob", "trace", bob)); err != nil || !bytes.Equal(k.Key, bob.Key) {
			t.Errorf("bystander: %v", err)
		}
		r.reopen()
	}

	v := r.verify(rec)
	s := v.Entries[0].Statement
	if s.Kind != receipt.Destroyed || s.Scope != receipt.ScopePerson || s.Tenant != "acme" || s.Existed != receipt.ExistedYes || len(s.DeadKeys) != 2 {
		t.Errorf("statement: %+v", s)
	}
	again := r.destroy("ann", "r1")
	if !bytes.Equal(again.Receipt, rec.Receipt) || again.Repeated {
		t.Error("the same request, another receipt")
	}
	spelled := destroyRequest("ann", "r1")
	spelled.IfGeneration = 1
	if same, err := r.DestroyKey(t.Context(), spelled); err != nil || !bytes.Equal(same.Receipt, rec.Receipt) {
		t.Errorf("the same request, with the first generation spelled out: %v", err)
	}
	other := r.destroy("ann", "r2")
	if !bytes.Equal(other.Receipt, rec.Receipt) || !other.Repeated {
		t.Error("a second destroy of a dead subject should answer with the receipt of the first")
	}
	_, err := r.DestroyKey(t.Context(), destroyRequest("bob", "r1"))
	r.want("a request id used twice", err, isConflict)
	got, err := r.GetReceipt(t.Context(), &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "r1"}})
	if err != nil || !bytes.Equal(got.Receipt, rec.Receipt) {
		t.Errorf("GetReceipt by request id: %v", err)
	}
	got, err = r.GetReceipt(t.Context(), &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_SubjectId{SubjectId: []byte("ann")}})
	if err != nil || !bytes.Equal(got.Receipt, rec.Receipt) {
		t.Errorf("GetReceipt by subject: %v", err)
	}
	if _, err := r.CreateTenant(t.Context(), "other", nil); err != nil {
		t.Fatal(err)
	}
	_, err = r.GetReceipt(t.Context(), &keydv1.GetReceiptRequest{Tenant: "other", By: &keydv1.GetReceiptRequest_LedgerIndex{LedgerIndex: rec.Index}})
	r.want("another tenant's receipt", err, isUnknown)
}

func TestDestroyNeverSeenSubject(t *testing.T) {
	r := newRig(t)
	rec := r.destroy("nobody", "r1")
	if s := r.verify(rec).Entries[0].Statement; s.Existed != receipt.ExistedNo || len(s.DeadKeys) != 0 {
		t.Errorf("statement: %+v", s)
	}
	_, err := r.ask(sealQuery("acme", "nobody", "trace"))
	r.want("seal after the fence", err, isErased)
}

func TestDestroyOneClass(t *testing.T) {
	r := newRig(t)
	trace, memory := r.seal("ann", "trace"), r.seal("ann", "memory")
	rec := r.destroy("ann", "r1", "memory", "backup", "memory")
	s := r.verify(rec).Entries[0].Statement
	if s.Scope != receipt.ScopeClasses || len(s.Classes) != 2 || len(s.DeadKeys) != 1 {
		t.Errorf("statement: %+v", s)
	}
	_, err := r.ask(openQuery("acme", "ann", "memory", memory))
	r.want("the destroyed class", err, isErased)
	_, err = r.ask(sealQuery("acme", "ann", "backup"))
	r.want("a class destroyed before its first use", err, isErased)
	if _, err := r.ask(openQuery("acme", "ann", "trace", trace)); err != nil {
		t.Errorf("the other class: %v", err)
	}
	_, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r2", "nonsense"))
	r.want("a class that does not exist", err, isUnknown)
	_, err = r.Reinstate(t.Context(), &keydv1.ReinstateRequest{Tenant: "acme", SubjectId: []byte("ann"), Classes: []string{"memory"}, RequestId: "r3", Reason: "test"})
	r.want("reinstating the class", err, ok)
	fresh := r.seal("ann", "memory")
	if bytes.Equal(fresh.KeyId, memory.KeyId) || fresh.Generation != 2 {
		t.Errorf("generation %d", fresh.Generation)
	}
	_, err = r.ask(sealQuery("acme", "ann", "backup"))
	r.want("the class that was not reinstated", err, isErased)
	// Whole-person erasure reaches everything, whatever its generation.
	all := destroyRequest("ann", "r4")
	_, err = r.DestroyKey(t.Context(), all)
	r.want("a destroy that does not name the generation", err, isConflict)
	all.IfGeneration = 2
	if _, err = r.DestroyKey(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	for name, k := range map[string]*keydv1.BlobKey{"memory": fresh, "trace": trace} {
		_, err = r.ask(openQuery("acme", "ann", name, k))
		r.want(name, err, isErased)
	}
}

func TestReinstateStartsANewLife(t *testing.T) {
	r := newRig(t)
	first := r.seal("ann", "trace")
	reinstate := &keydv1.ReinstateRequest{Tenant: "acme", SubjectId: []byte("ann"), RequestId: "back", Reason: "signup"}
	_, err := r.Reinstate(t.Context(), reinstate)
	r.want("reinstating the living", err, isConflict)
	died := r.destroy("ann", "r1")
	rec, err := r.Reinstate(t.Context(), reinstate)
	if err != nil || rec.Generation != 2 {
		t.Fatalf("generation %v, %v", rec, err)
	}
	r.verify(rec)
	again, err := r.Reinstate(t.Context(), reinstate)
	if err != nil || again.Generation != 2 || !bytes.Equal(again.Receipt, rec.Receipt) {
		t.Errorf("repeated: %v, %v", again, err)
	}
	second := r.seal("ann", "trace")
	if second.Generation != 2 || bytes.Equal(second.KeyId, first.KeyId) || bytes.Equal(second.Key, first.Key) {
		t.Error("the second life has something of the first")
	}
	_, err = r.ask(openQuery("acme", "ann", "trace", first))
	r.want("a blob of the first life", err, isErased)

	// Late requests of the first life: the same one gets its receipt, another
	// one is refused; neither kills the second.
	if late := r.destroy("ann", "r1"); !bytes.Equal(late.Receipt, died.Receipt) {
		t.Error("the late duplicate has another receipt")
	}
	_, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r2"))
	r.want("a late destroy of the first life", err, isConflict)
	if _, err := r.ask(openQuery("acme", "ann", "trace", second)); err != nil {
		t.Fatalf("the second life: %v", err)
	}
	named := destroyRequest("ann", "r3")
	named.IfGeneration = 2
	if _, err := r.DestroyKey(t.Context(), named); err != nil {
		t.Fatal(err)
	}
	_, err = r.ask(openQuery("acme", "ann", "trace", second))
	r.want("a blob of the second life", err, isErased)
	d, err := r.DescribeSubject(t.Context(), "acme", []byte("ann"))
	if err != nil || d.State != keydv1.SubjectState_SUBJECT_STATE_DESTROYED || len(d.LedgerIndexes) != 3 || len(d.Classes[0].DeadKeyIds) != 2 {
		t.Errorf("described as %v, %v", d, err)
	}
}

func TestFirstUseRace(t *testing.T) {
	r := newRig(t)
	const n = 50
	var wg sync.WaitGroup
	got := make([]*keydv1.BlobKey, n)
	for i := range n {
		wg.Go(func() { got[i], _ = r.ask(sealQuery("acme", "ann", "trace")) })
	}
	wg.Wait()
	for i, k := range got {
		if k == nil || !bytes.Equal(k.Key, got[0].Key) || !bytes.Equal(k.KeyId, got[0].KeyId) {
			t.Fatalf("client %d has another key", i)
		}
	}
}

// A destroy that races first use: either order, but after the acknowledgement
// there is no key.
func TestDestroyRacesFirstUse(t *testing.T) {
	r := newRig(t)
	for i := range 100 {
		subject := fmt.Sprint("racer", i)
		var wg sync.WaitGroup
		sealed := make([]*keydv1.BlobKey, 4)
		for j := range sealed {
			wg.Go(func() { sealed[j], _ = r.ask(sealQuery("acme", subject, "trace")) })
		}
		wg.Go(func() {
			if _, err := r.DestroyKey(context.Background(), destroyRequest(subject, subject)); err != nil {
				t.Errorf("destroy: %v", err)
			}
			_, err := r.ask(sealQuery("acme", subject, "trace"))
			r.want("seal after the acknowledgement", err, isErased)
		})
		wg.Wait()
		for _, k := range sealed {
			if k != nil {
				_, err := r.ask(openQuery("acme", subject, "trace", k))
				r.want("open after the acknowledgement", err, isErased)
			}
		}
	}
}

func TestBatch(t *testing.T) {
	r := newRig(t)
	ann := r.seal("ann", "trace")
	r.destroy("carl", "r1")
	results, err := r.BlobKeys(t.Context(), []*keydv1.BlobKeyQuery{
		openQuery("acme", "ann", "trace", ann),
		sealQuery("acme", "new", "trace"),
		sealQuery("acme", "carl", "trace"),
		sealQuery("acme", "new", "trace"),
		sealQuery("nobody", "x", "trace"),
		sealQuery("acme", "bad\x00id", "trace"),
		sealQuery("acme", "x", "no-such-class"),
		{Tenant: "acme", SubjectId: []byte("x"), Class: "trace"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []keydv1.Outcome{ok, ok, isErased, ok, isUnknown, isInvalid, isUnknown, isInvalid} {
		r.want(fmt.Sprint("query ", i), results[i].Err, want)
	}
	if !bytes.Equal(results[1].Key.KeyId, results[3].Key.KeyId) {
		t.Error("two keys for one subject in one batch")
	}
	for _, n := range []int{0, keys.MaxBatch + 1} {
		_, err := r.BlobKeys(t.Context(), make([]*keydv1.BlobKeyQuery, n))
		r.want(fmt.Sprint(n, " queries"), err, isInvalid)
	}
}

func TestHolds(t *testing.T) {
	r := newRig(t)
	ann := r.seal("ann", "trace")
	place := func(subject, hold string, end *timestamppb.Timestamp) error {
		_, err := r.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{
			Tenant: "acme", SubjectId: []byte(subject), HoldId: hold, Reason: "litigation", RequestId: "place-" + subject + hold, End: end,
		})
		return err
	}
	release := func(subject, hold string) error {
		_, err := r.ReleaseHold(context.Background(), &keydv1.ReleaseHoldRequest{
			Tenant: "acme", SubjectId: []byte(subject), HoldId: hold, Reason: "over", RequestId: "release-" + subject + hold,
		})
		return err
	}
	tries := 0
	destroy := func(subject string, classes ...string) error {
		tries++
		_, err := r.DestroyKey(context.Background(), destroyRequest(subject, fmt.Sprint("try", tries), classes...))
		return err
	}
	for _, h := range []string{"h1", "h2"} {
		if err := place("ann", h, nil); err != nil {
			t.Fatal(err)
		}
	}
	r.want("whole person", destroy("ann"), isHeld)
	r.want("one class", destroy("ann", "trace"), isHeld)
	r.reopen()
	r.want("after a restart", destroy("ann"), isHeld)
	if _, err := r.ask(openQuery("acme", "ann", "trace", ann)); err != nil {
		t.Errorf("a hold does not stop opens: %v", err)
	}
	r.want("release", release("ann", "h1"), ok)
	r.want("one of two released", destroy("ann"), isHeld)
	r.want("release of nothing", release("ann", "h9"), isUnknown)
	r.want("release", release("ann", "h2"), ok)
	r.want("released", destroy("ann"), ok)
	r.want("too late", place("ann", "h3", nil), isErased)

	r.want("on a subject not seen yet", place("bob", "h1", nil), ok)
	r.seal("bob", "trace")
	r.want("binds from the beginning", destroy("bob"), isHeld)

	r.want("on the tenant", place("", "all", nil), ok)
	r.want("the tenant's hold", destroy("carl"), isHeld)
	r.want("released", release("", "all"), ok)
	r.want("free again", destroy("carl"), ok)

	end := timestamppb.New(r.clock.Now().Add(time.Hour))
	r.want("with an end", place("dora", "h1", end), ok)
	r.want("before the end", destroy("dora"), isHeld)
	r.clock.Advance(2 * time.Hour)
	r.want("after the end", destroy("dora"), ok)
}

// A hold and a destroy at the same instant: held and alive, or destroyed and
// refused.
func TestHoldRacesDestroy(t *testing.T) {
	r := newRig(t)
	for i := range 100 {
		subject := fmt.Sprint("s", i)
		k := r.seal(subject, "trace")
		var wg sync.WaitGroup
		var held, destroyed error
		wg.Go(func() {
			_, held = r.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{
				Tenant: "acme", SubjectId: []byte(subject), HoldId: "h", Reason: "litigation", RequestId: "h" + subject,
			})
		})
		wg.Go(func() { _, destroyed = r.DestroyKey(context.Background(), destroyRequest(subject, "d"+subject)) })
		wg.Wait()
		_, err := r.ask(openQuery("acme", subject, "trace", k))
		switch {
		case held == nil && outcome(destroyed) == isHeld && err == nil:
		case destroyed == nil && outcome(held) == isErased && outcome(err) == isErased:
		default:
			t.Fatalf("hold: %v, destroy: %v, open: %v", held, destroyed, err)
		}
	}
}

// While a destruction commits, nobody is leased a key that dies in it: the lease
// would be longer than the statement says, whose time is past already.
func TestNoLeaseWhileADestructionCommits(t *testing.T) {
	for name, destroy := range map[string]func(*rig) error{
		"person": func(r *rig) error {
			_, err := r.DestroyKey(context.Background(), destroyRequest("ann", "r1"))
			return err
		},
		"class": func(r *rig) error {
			_, err := r.DestroyKey(context.Background(), destroyRequest("ann", "r1", "trace"))
			return err
		},
		"tenant": func(r *rig) error {
			_, err := r.DestroyTenant(context.Background(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "r1", Reason: "test"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, store, _ := newMemoryRig(t)
				k, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
				commit := make(chan struct{})
				store.fault = func(string) fault { <-commit; return none }
				var destroyed, opened error
				var answered atomic.Bool
				var wg sync.WaitGroup
				wg.Go(func() { destroyed = destroy(r) })
				synctest.Wait()
				wg.Go(func() {
					opened = r.opens("ann", "trace", k)
					answered.Store(true)
				})
				synctest.Wait()
				if answered.Load() {
					t.Errorf("asked for while it commits: %v", opened)
				}
				if name != "tenant" {
					r.want("another's", r.opens("bob", "trace", bob), ok)
				}
				close(commit)
				wg.Wait()
				r.want("destroy", destroyed, ok)
				r.want("open", opened, isErased)
			})
		})
	}
}

// Of those that share a transaction, one whose key is damaged fails alone.
func TestDamageInAGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, store, _ := newMemoryRig(t)
		for _, s := range []string{"ann", "bob", "carl"} {
			r.seal(s, "trace")
		}
		r.put(r.rowOf("w", 'D', string(r.handle("bob"))), []byte(unreadable))
		commit := make(chan struct{})
		store.fault = func(string) fault { <-commit; return none }
		errs := make(map[string]*error)
		var wg sync.WaitGroup
		for _, s := range []string{"ann", "bob", "carl"} { // the first commits, the others wait for that
			err := new(error)
			errs[s] = err
			wg.Go(func() { _, *err = r.DestroyKey(context.Background(), destroyRequest(s, "r-"+s)) })
			synctest.Wait()
		}
		close(commit)
		wg.Wait()
		r.want("whole", *errs["carl"], ok)
		if err := *errs["bob"]; !errors.Is(err, keys.ErrDamaged) {
			t.Errorf("damaged: %v", err)
		}
	})
}

// Duplicates of one request in flight together make one entry.
func TestConcurrentRepeats(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "trace")
	var wg sync.WaitGroup
	got := make([]*keys.Recorded, 20)
	for i := range got {
		wg.Go(func() { got[i], _ = r.DestroyKey(context.Background(), destroyRequest("ann", "r1")) })
	}
	wg.Wait()
	for i, rec := range got {
		if rec == nil || !bytes.Equal(rec.Receipt, got[0].Receipt) {
			t.Fatalf("call %d has another receipt", i)
		}
	}
}

// No acknowledgement without the anchor, and a retry finds the receipt.
func TestAnchorDown(t *testing.T) {
	r := newRig(t)
	r.patience = 2 * time.Second
	r.reopen()
	k, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
	_, cursor, _, _, err := r.Revocations(t.Context(), []string{"acme"}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	fault := anchortest.Lost
	r.anchor.Inject = func(_ context.Context, op string) anchortest.Fault {
		mu.Lock()
		defer mu.Unlock()
		return fault
	}
	_, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r1"))
	r.want("destroy", err, isUnavail)
	// Denied at once all the same; erased is final, and not told before.
	size := r.AnchoredSize()
	_, err = r.ask(openQuery("acme", "ann", "trace", k))
	r.want("an open before the anchor has it", err, isUnavail)
	_, err = r.ask(sealQuery("acme", "ann", "trace"))
	r.want("a seal before the anchor has it", err, isUnavail)
	_, err = r.DescribeSubject(t.Context(), "acme", []byte("ann"))
	r.want("her state before the anchor has it", err, isUnavail)
	_, err = r.PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{Tenant: "acme", SubjectId: []byte("ann"), HoldId: "case-1", RequestId: "h1", Reason: "test"})
	r.want("a hold before the anchor has it", r.Told(t.Context(), err), isUnavail)
	both := [][]byte{k.KeyId, bob.KeyId}
	slices.SortFunc(both, bytes.Compare)
	states := func() (ann, bob keydv1.Outcome) {
		t.Helper()
		all, err := r.Recipients(t.Context(), "acme", both)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(both[0], k.KeyId) {
			return all[0].Outcome, all[1].Outcome
		}
		return all[1].Outcome, all[0].Outcome
	}
	if ann, bob := states(); ann != isUnavail || bob != 0 {
		t.Errorf("recipients are %v and %v before the anchor has it", ann, bob)
	}
	if told, next, reset, _, err := r.Revocations(t.Context(), []string{"acme"}, cursor); err != nil || len(told) != 0 || next != cursor || reset {
		t.Errorf("the stream tells %v, goes on from %d, reset %v, %v before the anchor has it", told, next, reset, err)
	}
	if alive, err := r.ask(openQuery("acme", "bob", "trace", bob)); err != nil || alive.LedgerSize != size {
		t.Errorf("bob's lease is %v, %v; the anchor covers %d", alive, err, size)
	}
	_, err = r.GetReceipt(t.Context(), &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "r1"}})
	r.want("no receipt before the anchor has it", err, isUnavail)
	mu.Lock()
	fault = anchortest.None
	mu.Unlock()
	var rec *keys.Recorded
	for range 50 {
		if rec, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r1")); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if rec.Repeated {
		t.Error("the retry says that it was destroyed before the request")
	}
	r.verify(rec)
	_, err = r.ask(openQuery("acme", "ann", "trace", k))
	r.want("an open now", err, isErased)
	if ann, bob := states(); ann != isErased || bob != 0 {
		t.Errorf("recipients are %v and %v now", ann, bob)
	}
	if s, err := r.DescribeSubject(t.Context(), "acme", []byte("ann")); err != nil || s.State != keydv1.SubjectState_SUBJECT_STATE_DESTROYED {
		t.Errorf("her state now: %v, %v", s, err)
	}
	if told, _, _, _, err := r.Revocations(t.Context(), []string{"acme"}, cursor); err != nil || len(told) != 1 {
		t.Errorf("the stream tells %v, %v now", told, err)
	}
}

func TestRevocations(t *testing.T) {
	r := newRig(t)
	ann, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
	_, cursor, reset, _, err := r.Revocations(t.Context(), []string{"acme"}, 0)
	if err != nil || reset || cursor == 0 {
		t.Fatalf("cursor %d, reset %v, %v", cursor, reset, err)
	}
	changed := r.Changed()
	r.destroy("ann", "r1")
	<-changed
	r.destroy("bob", "r2")
	got, next, reset, more, err := r.Revocations(t.Context(), []string{"acme"}, cursor)
	if err != nil || reset || more || len(got) != 2 || !bytes.Equal(got[0].KeyId, ann.KeyId) || !bytes.Equal(got[1].KeyId, bob.KeyId) {
		t.Fatalf("got %v, reset %v, %v", got, reset, err)
	}
	if got, _, _, _, err := r.Revocations(t.Context(), []string{"acme"}, next); err != nil || len(got) != 0 {
		t.Errorf("got %v again, %v", got, err)
	}
	if got, _, _, _, err := r.Revocations(t.Context(), []string{"other"}, cursor); err != nil || len(got) != 0 {
		t.Errorf("another tenant was told %v, %v", got, err)
	}
	if _, _, reset, _, err := r.Revocations(t.Context(), []string{"acme"}, next+1); err != nil || !reset {
		t.Errorf("a cursor from the future: reset %v, %v", reset, err)
	}
}

func TestTenants(t *testing.T) {
	r := newRig(t)
	_, err := r.CreateTenant(t.Context(), "acme", nil)
	r.want("a name taken", err, isConflict)
	_, err = r.CreateTenant(t.Context(), "Acme", nil)
	r.want("a name with a capital", err, isInvalid)
	_, err = r.CreateTenant(t.Context(), "", nil)
	r.want("keyd's own", err, isInvalid)
	names := make(map[string]bool)
	for i := range 25 {
		name := fmt.Sprint("t", i)
		names[name] = true
		if _, err := r.CreateTenant(t.Context(), name, nil); err != nil {
			t.Fatal(err)
		}
	}
	names["acme"] = true
	after := ""
	for range 10 {
		page, err := r.Tenants(t.Context(), after, 10)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range page {
			if !names[n] {
				t.Errorf("%q is listed twice, or was never made", n)
			}
			delete(names, n)
		}
		if len(page) < 10 {
			break
		}
		after = page[len(page)-1]
	}
	if len(names) != 0 {
		t.Errorf("not listed: %v", names)
	}
}

func TestListReceipts(t *testing.T) {
	r := newRig(t)
	for i := range 7 {
		r.destroy(fmt.Sprint("s", i), fmt.Sprint("r", i))
	}
	var got int
	var from uint64
	for {
		page, next, err := r.ListReceipts(t.Context(), "acme", nil, from, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page {
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				t.Fatal(err)
			}
			if s.Kind == receipt.Destroyed {
				got++
			}
		}
		if next == 0 {
			break
		}
		from = next
	}
	if got != 7 {
		t.Errorf("%d destructions listed, want 7", got)
	}
	page, next, err := r.ListReceipts(t.Context(), "acme", []byte("s3"), 0, 3)
	if err != nil || next != 0 || len(page) != 1 {
		t.Errorf("of one subject: %d, next %d, %v", len(page), next, err)
	}
}

// A caller that waits no longer than keyd would is told what it waits for.
func TestAnchorDownAndAnImpatientCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, _ := newMemoryRig(t)
		r.seal("ann", "trace")
		r.anchor.Inject = func(context.Context, string) anchortest.Fault { return anchortest.Lost }
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // as long as keyd's own patience
		defer cancel()
		_, err := r.DestroyKey(ctx, destroyRequest("ann", "r1"))
		r.want("destroy", err, isUnavail)
		if ctx.Err() != nil || !strings.Contains(err.Error(), "the anchor does not cover it yet; repeat the request") {
			t.Errorf("it is told %q, its context: %v", err, ctx.Err())
		}
	})
}

// A request for a tenant that was not answered, because the anchor was away, is
// repeated.
func TestTenantIsRequestedAgain(t *testing.T) {
	r := newRig(t)
	var down atomic.Bool
	r.anchor.Inject = func(context.Context, string) anchortest.Fault {
		if down.Load() {
			return anchortest.Lost
		}
		return anchortest.None
	}
	r.patience = 50 * time.Millisecond
	r.reopen()
	down.Store(true)
	note := func() []*keydv1.Class {
		c := class("note", time.Hour, time.Minute)
		c.Retention, c.ApprovedBy = durationpb.New(day), "dpo"
		return []*keydv1.Class{c, class("trace", 2*time.Hour, 0)}
	}
	for range 2 {
		_, err := r.RequestTenant(t.Context(), "beta", note(), "r1")
		r.want("the anchor is away", err, isUnavail)
	}
	down.Store(false)
	r.patience = 0
	r.reopen()
	made, err := r.RequestTenant(t.Context(), "beta", note(), "r1")
	if err != nil || len(made) != 2 || made[0].Name != "note" || made[0].Number != 1 || made[0].ApprovedBy != "dpo" {
		t.Fatalf("again: %v, %v", made, err)
	}
	size := r.LedgerSize()
	if _, err := r.PutClass(t.Context(), "beta", class("note", 3*time.Hour, time.Second)); err != nil {
		t.Fatal(err)
	}
	again, err := r.RequestTenant(t.Context(), "beta", note(), "r1")
	if err != nil || len(again) != 2 || !proto.Equal(again[0], made[0]) || !proto.Equal(again[1], made[1]) {
		t.Errorf("after a change of policy: %v, %v; want %v", again, err, made)
	}
	if got := r.LedgerSize(); got != size+1 {
		t.Errorf("the ledger has %d entries, want %d", got, size+1)
	}
	// The default classes are what it means to name none.
	first, err := r.RequestTenant(t.Context(), "gamma", nil, "r1")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := r.RequestTenant(t.Context(), "gamma", nil, "r1"); err != nil || len(again) != len(first) {
		t.Errorf("with default classes: %v, %v", again, err)
	}

	_, err = r.RequestTenant(t.Context(), "beta", note()[:1], "r1")
	r.want("the same id for other classes", err, isConflict)
	_, err = r.RequestTenant(t.Context(), "beta", note(), "r2")
	r.want("another request for the name", err, isConflict)
	_, err = r.RequestTenant(t.Context(), "beta", note(), "")
	r.want("a request without an id", err, isConflict)
	_, err = r.RequestTenant(t.Context(), "delta", note(), "a\x00b")
	r.want("an id with a NUL", err, isInvalid)
	_, err = r.DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{Tenant: "beta", SubjectId: []byte("ann"), RequestId: "r1", Reason: "test"})
	r.want("its id for something else", err, isConflict)
	if _, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "beta", RequestId: "r9", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	_, err = r.RequestTenant(t.Context(), "beta", note(), "r1")
	r.want("the tenant is erased", err, isErased)
}

// Concurrent repeats of a request make one tenant, and get one answer.
func TestTenantIsRequestedAtOnce(t *testing.T) {
	r := newRig(t)
	size := r.LedgerSize()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			made, err := r.RequestTenant(t.Context(), "beta", nil, "r1")
			if err != nil || len(made) != 4 {
				t.Errorf("%v, %v", made, err)
			}
		})
	}
	wg.Wait()
	if got := r.LedgerSize(); got != size+5 {
		t.Errorf("%d entries, want 5", got-size)
	}
}

// A policy that is put again is not logged again.
func TestClassIsPutAgain(t *testing.T) {
	r := newRig(t)
	put := func() *keydv1.Class {
		c, err := r.PutClass(t.Context(), "acme", class("trace", 2*time.Hour, time.Second))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := put()
	size := r.LedgerSize()
	if again := put(); !proto.Equal(first, again) || r.LedgerSize() != size {
		t.Errorf("again: %v, %d entries; want %v, %d", again, r.LedgerSize(), first, size)
	}
	r.clock.Advance(3 * day) // the new width holds
	put()
	size = r.LedgerSize()
	if put(); r.LedgerSize() != size {
		t.Error("it is logged again once the width holds")
	}
}

// The repeat of a request that destroyed an earlier life says that there is a
// later one.
func TestRepeatedDestroyOfAnEarlierLife(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "trace")
	first := r.destroy("ann", "r1")
	second := r.destroy("ann", "r2") // finds it done
	if first.Living != 0 || second.Living != 0 {
		t.Errorf("living %d, %d", first.Living, second.Living)
	}
	reinstate := func(request string, generation uint32, classes ...string) {
		t.Helper()
		if _, err := r.Reinstate(t.Context(), &keydv1.ReinstateRequest{
			Tenant: "acme", SubjectId: []byte("ann"), Classes: classes, IfGeneration: generation, RequestId: request, Reason: "test",
		}); err != nil {
			t.Fatal(err)
		}
	}
	reinstate("r3", 1)
	r.seal("ann", "trace")
	for _, request := range []string{"r1", "r2"} {
		if again := r.destroy("ann", request); again.Living != 2 || string(again.Receipt) != string(first.Receipt) {
			t.Errorf("%s: living %d, entry %d", request, again.Living, again.Index)
		}
	}
	one := destroyRequest("ann", "r4", "trace")
	one.IfGeneration = 2
	destroyOne := func() *keys.Recorded {
		t.Helper()
		rec, err := r.DestroyKey(t.Context(), one)
		if err != nil {
			t.Fatal(err)
		}
		return rec
	}
	if rec := destroyOne(); rec.Living != 0 {
		t.Errorf("one class: living %d", rec.Living)
	}
	reinstate("r5", 2, "trace")
	if rec := destroyOne(); rec.Living != 3 {
		t.Errorf("one class, reinstated: living %d", rec.Living)
	}
	all := destroyRequest("ann", "r6")
	all.IfGeneration = 3
	if _, err := r.DestroyKey(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	if again := r.destroy("ann", "r1"); again.Living != 0 {
		t.Errorf("all is destroyed: living %d", again.Living)
	}
	if rec := destroyOne(); rec.Living != 0 {
		t.Errorf("all is destroyed: living %d", rec.Living)
	}
}
