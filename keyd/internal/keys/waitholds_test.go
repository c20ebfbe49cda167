package keys_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// wait asks for a destruction that waits for holds.
func (r *rig) wait(subject, id string, classes ...string) *keys.Recorded {
	r.t.Helper()
	req := destroyRequest(subject, id, classes...)
	req.WaitForHolds = true
	rec, err := r.DestroyKey(context.Background(), req)
	if err != nil {
		r.t.Fatalf("destroy that waits: %v", err)
	}
	return rec
}

// opens asks for the key that something was sealed under.
func (r *rig) opens(subject, class string, k *keydv1.BlobKey) error {
	_, err := r.ask(openQuery("acme", subject, class, k))
	return err
}

func TestWaitForHolds(t *testing.T) {
	r := newRig(t)
	ann, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
	free := r.wait("zoe", "r0")
	if !free.Due.IsZero() || r.verify(free).Stages().Destroyed.IsZero() {
		t.Error("without a hold there is nothing to wait for")
	}

	r.want("hold", r.hold("ann", "h1"), ok)
	r.want("hold", r.hold("", "all"), ok)
	first := r.wait("ann", "r1")
	if s := r.verify(first).Stages(); first.Due.IsZero() || s.Due.IsZero() || !s.Destroyed.IsZero() || s.Denied.IsZero() {
		t.Errorf("due %v, the receipt says %+v", first.Due, s)
	}
	ofClass := r.wait("bob", "r2", "trace")
	r.want("open", r.opens("ann", "trace", ann), isPending)
	_, err := r.ask(sealQuery("acme", "ann", "memory"))
	r.want("seal", err, isPending)
	r.want("one class", r.opens("bob", "trace", bob), isPending)
	if _, err := r.ask(sealQuery("acme", "bob", "memory")); err != nil {
		t.Errorf("another class: %v", err)
	}
	_, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r1"))
	r.want("the same id for one that does not wait", err, isConflict)
	_, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r3"))
	r.want("one that does not wait", err, isHeld)

	// It waits on, whatever comes.
	still := func(what string) {
		t.Helper()
		r.duty()
		r.want(what, r.opens("ann", "trace", ann), isPending)
		if again := r.wait("ann", "r1"); !bytes.Equal(again.Receipt, first.Receipt) || again.Due.IsZero() {
			t.Errorf("%s: the repeated request has another answer", what)
		}
		if d, err := r.DescribeSubject(t.Context(), "acme", []byte("ann")); err != nil || len(d.Scheduled) != 1 || len(d.Holds) == 0 {
			t.Errorf("%s: %v, %v", what, d, err)
		}
	}
	still("held twice")
	r.reopen()
	still("after a restart")
	if _, err := r.TurnEpoch(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	still("in another epoch")
	r.want("release", r.release("", "all"), ok)
	still("one of two holds released")
	r.want("the other subject's hold", r.opens("bob", "trace", bob), isErased)
	if again := r.wait("bob", "r2", "trace"); !again.Due.IsZero() || len(r.verify(again).Entries) != 2 || bytes.Equal(again.Receipt, ofClass.Receipt) {
		t.Error("the repeated request does not tell of the destruction")
	}
	r.want("hold", r.hold("ann", "h2"), ok)
	r.want("release", r.release("ann", "h1"), ok)
	still("held again before it came to it")

	r.clock.Advance(time.Minute)
	size := r.LedgerSize()
	r.want("release", r.release("ann", "h2"), ok)
	r.duty()
	r.want("released", r.opens("ann", "trace", ann), isErased)
	again := r.wait("ann", "r1")
	if v := r.verify(again); len(v.Entries) != 2 || v.Stages().Destroyed.IsZero() || !again.Due.IsZero() || !again.DrainedBy.After(first.DrainedBy) {
		t.Errorf("%d entries, stages %+v", len(v.Entries), v.Stages())
	}
	r.duty()
	if n := r.LedgerSize() - size; n != 2 {
		t.Errorf("%d entries for a release and a destruction", n)
	}
	if n := len(r.rows("D")); n != 0 {
		t.Errorf("%d rows are left in the index of what is due", n)
	}
}

// A time before which not to destroy, and a hold, are both waited for.
func TestWaitForHoldsUntilDue(t *testing.T) {
	r := newRig(t)
	ann, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
	for _, s := range []string{"ann", "bob"} {
		r.want("hold", r.hold(s, "h"), ok)
		req := destroyRequest(s, "r"+s)
		req.WaitForHolds, req.NotBefore = true, timestamppb.New(r.clock.Now().Add(3*time.Hour))
		if rec, err := r.DestroyKey(t.Context(), req); err != nil || !rec.Due.Equal(req.NotBefore.AsTime().Truncate(time.Millisecond)) {
			t.Fatalf("%+v, %v", rec, err)
		}
	}
	r.want("released early", r.release("ann", "h"), ok)
	r.pass(2 * time.Hour)
	r.want("not due", r.opens("ann", "trace", ann), isPending)
	r.pass(2 * time.Hour)
	r.want("due", r.opens("ann", "trace", ann), isErased)
	r.want("due and held", r.opens("bob", "trace", bob), isPending)
	r.want("released late", r.release("bob", "h"), ok)
	r.duty()
	r.want("due and free", r.opens("bob", "trace", bob), isErased)
}

func TestWaitForHoldsCancelled(t *testing.T) {
	r := newRig(t)
	ann := r.seal("ann", "trace")
	r.want("hold", r.hold("ann", "h"), ok)
	r.wait("ann", "r1")
	rec, err := r.CancelDestruction(t.Context(), &keydv1.CancelDestructionRequest{
		Tenant: "acme", SubjectId: []byte("ann"), DestroyRequestId: "r1", RequestId: "c1", Reason: "mistake",
	})
	if err != nil {
		t.Fatal(err)
	}
	if s := r.verify(rec).Stages(); s.Cancelled.IsZero() || !s.Destroyed.IsZero() {
		t.Errorf("stages %+v", s)
	}
	r.want("cancelled", r.opens("ann", "trace", ann), ok)
	r.want("release", r.release("ann", "h"), ok)
	r.duty()
	r.want("released", r.opens("ann", "trace", ann), ok)
}

// What waits for a class does not reach the class's next life.
func TestWaitAndReinstate(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "trace")
	r.seal("bob", "trace")
	r.destroy("ann", "r1", "trace")
	reinstate := func(subject, id string) error {
		_, err := r.Reinstate(context.Background(), &keydv1.ReinstateRequest{
			Tenant: "acme", SubjectId: []byte(subject), Classes: []string{"trace"}, RequestId: id, Reason: "again",
		})
		return err
	}
	r.want("hold", r.hold("ann", "h"), ok)
	r.wait("ann", "r2")
	r.want("under what waits for the person", reinstate("ann", "i1"), isPending)

	req := destroyRequest("bob", "r3", "trace", "memory")
	req.NotBefore = timestamppb.New(r.clock.Now().Add(time.Hour))
	if _, err := r.DestroyKey(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	r.destroy("bob", "r4", "trace")
	r.want("under what is scheduled for it and another class", reinstate("bob", "i2"), isPending)
	r.pass(2 * time.Hour)
	r.want("when that is over", reinstate("bob", "i3"), ok)
}

// A hold that ends by its date ends by a clock that is believed alone.
func TestWaitForTheEndOfAHold(t *testing.T) {
	r := newRig(t)
	ann := r.seal("ann", "trace")
	_, err := r.PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte("ann"), HoldId: "h", Reason: "litigation", RequestId: "p1",
		End: timestamppb.New(r.clock.Now().Add(30 * day)),
	})
	if err != nil {
		t.Fatal(err)
	}
	r.duty()
	r.wait("ann", "r1")
	r.clock.Advance(60 * day)
	if err := keys.Duty(t.Context(), r.Keys); err == nil {
		t.Error("the clock has jumped, and is believed")
	}
	r.want("the clock is doubted", r.opens("ann", "trace", ann), isPending)
	_, err = r.DestroyKey(t.Context(), destroyRequest("ann", "r2"))
	r.want("nor does it end the hold for who asks", err, isHeld)
	_, err = r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "r3", Reason: "left"})
	r.want("nor for the tenant", err, isHeld)
	r.want("another hold", r.hold("ann", "h2"), ok)
	if holds, err := r.Holds(t.Context(), "acme", []byte("ann")); err != nil || len(holds) != 2 {
		t.Errorf("another hold has put an end to the first: %v, %v", holds, err)
	}
	r.want("release", r.release("ann", "h2"), ok)
	r.pass(0)
	r.want("an operator has confirmed the clock", r.opens("ann", "trace", ann), isErased)
}

// A release makes what waits go on by itself, and so does a start, without
// anybody's looking now and then.
func TestReleaseWakes(t *testing.T) {
	r := newRig(t)
	busy := func() {
		t.Helper()
		r.Keys.Close()
		cfg := r.config()
		cfg.DutyInterval = 24 * time.Hour
		var err error
		if r.Keys, err = keys.Open(context.Background(), cfg); err != nil {
			t.Fatal(err)
		}
	}
	erased := func(subject string, k *keydv1.BlobKey) {
		t.Helper()
		for {
			changed := r.Changed()
			err := r.opens(subject, "trace", k)
			if outcome(err) == isErased {
				return
			}
			r.want("until then", err, isPending)
			select {
			case <-changed:
			case <-time.After(time.Minute):
				t.Fatal("it does not go on")
			}
		}
	}
	held := make(map[string]*keydv1.BlobKey)
	for _, s := range []string{"ann", "bob", "carl", "dora"} {
		held[s] = r.seal(s, "trace")
		r.want("hold", r.hold(s, "h"), ok)
		r.wait(s, "r"+s)
	}
	busy()
	r.want("release", r.release("ann", "h"), ok)
	erased("ann", held["ann"])

	r.want("the tenant's hold", r.hold("", "all"), ok)
	r.want("release", r.release("bob", "h"), ok)
	r.want("release", r.release("carl", "h"), ok)
	r.want("still held", r.opens("bob", "trace", held["bob"]), isPending)
	r.want("release of the tenant's", r.release("", "all"), ok)
	erased("bob", held["bob"])
	erased("carl", held["carl"])

	r.reopen() // nothing is done in the background
	r.want("release", r.release("dora", "h"), ok)
	r.want("nobody has come to it", r.opens("dora", "trace", held["dora"]), isPending)
	busy()
	erased("dora", held["dora"])
}

// newestAbout returns where the ledger has the newest entry of a kind about a
// subject or, where it is "", about the tenant; -1: none.
func (r *rig) newestAbout(subject string, kind receipt.Kind) int64 {
	r.t.Helper()
	newest := int64(-1)
	for from := uint64(0); ; {
		page, next, err := r.ListReceipts(context.Background(), "acme", []byte(subject), from, 1000)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range page {
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				r.t.Fatal(err)
			}
			if s.Kind == kind && (subject != "") == (s.Handle != nil) {
				newest = int64(e.LedgerIndex)
			}
		}
		if from = next; next == 0 {
			return newest
		}
	}
}

// Holds that come and go while a destruction waits for them, or is just asked
// for: the ledger never has a destruction after a hold that binds, and what it
// has is what opens.
func TestHoldsRaceWhatWaits(t *testing.T) {
	for _, whose := range []string{"the subject's", "the tenant's"} {
		t.Run(whose, func(t *testing.T) {
			r := newRig(t)
			died, survived := 0, 0
			for i := range 60 {
				subject := fmt.Sprint("s", i)
				holder := subject
				if whose == "the tenant's" {
					holder = ""
				}
				k := r.seal(subject, "trace")
				before, hold := fmt.Sprint("before", i), fmt.Sprint("hold", i)
				waits := i%3 != 0
				if waits {
					r.want("hold", r.hold(holder, before), ok)
					r.wait(subject, "r"+subject)
				}
				var wg sync.WaitGroup
				var placed error
				asked, over := make(chan struct{}), make(chan struct{})
				wg.Go(func() {
					defer close(asked)
					if waits {
						r.want("release", r.release(holder, before), ok)
					} else {
						r.wait(subject, "r"+subject)
					}
				})
				wg.Go(func() {
					defer close(over)
					if waits && i%2 == 0 {
						<-asked // to race with the background work
					}
					placed = r.hold(holder, hold)
				})
				wg.Go(func() {
					for {
						if err := keys.Duty(context.Background(), r.Keys); err != nil {
							t.Error(err)
						}
						select {
						case <-over:
							return
						default:
						}
					}
				})
				wg.Wait()
				r.duty()
				destroyed, held := r.newestAbout(subject, receipt.Destroyed), r.newestAbout(holder, receipt.HoldPlaced)
				open := r.opens(subject, "trace", k)
				switch {
				case destroyed < 0 && placed == nil && outcome(open) == isPending:
					survived++
				case destroyed >= 0 && outcome(open) == isErased && (outcome(placed) == isErased || placed == nil && holder == "" && destroyed < held):
					died++
				default:
					t.Fatalf("round %d: destroyed at %d, held at %d (%v), open: %v", i, destroyed, held, placed, open)
				}
				if placed == nil {
					r.want("release", r.release(holder, hold), ok)
				}
				r.duty()
				r.want("at last", r.opens(subject, "trace", k), isErased)
			}
			t.Logf("the hold came first %d times, the destruction %d times", survived, died)
		})
	}
}

// A backup brings back neither what was destroyed after waiting, nor the life
// of what still waits.
func TestWaitForHoldsReplayed(t *testing.T) {
	r := newRig(t)
	ann, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
	r.want("hold", r.hold("ann", "h"), ok)
	r.want("hold", r.hold("bob", "h"), ok)
	file := r.backup()
	waiting := r.wait("ann", "r1")
	r.wait("bob", "r2", "trace")
	r.want("release", r.release("bob", "h"), ok)
	r.duty()
	done := r.wait("bob", "r2", "trace")
	r.restoreFrom(file)
	r.replay(keys.ReplayOptions{})

	if again := r.wait("ann", "r1"); !bytes.Equal(again.Receipt, waiting.Receipt) {
		t.Error("what waits is answered otherwise after the replay")
	}
	if again := r.wait("bob", "r2", "trace"); !bytes.Equal(again.Receipt, done.Receipt) {
		t.Error("what has waited is answered otherwise after the replay")
	}
	_, err := r.DestroyKey(t.Context(), destroyRequest("ann", "r1"))
	r.want("the same id for one that does not wait", err, isConflict)
	r.duty()
	r.want("still held", r.opens("ann", "trace", ann), isPending)
	r.want("destroyed", r.opens("bob", "trace", bob), isErased)
	r.want("release", r.release("ann", "h"), ok)
	r.duty()
	r.want("released", r.opens("ann", "trace", ann), isErased)
	if v := r.verify(r.wait("ann", "r1")); len(v.Entries) != 2 {
		t.Errorf("%d entries in the receipt of what has waited", len(v.Entries))
	}
}

// A hold delays its own person's erasure, and nobody else's finality; what it
// has delayed is final with the epoch in which it comes to be destroyed.
func TestHoldDelaysNobody(t *testing.T) {
	r := newRig(t)
	for _, s := range []string{"ann", "bob"} {
		r.seal(s, "trace")
	}
	r.want("hold", r.hold("ann", "h"), ok)
	r.wait("ann", "ra")
	r.wait("bob", "rb")
	first := r.openEpoch()
	r.turn()
	r.closeEpoch(first)
	if _, v := r.getReceipt("rb"); v.Stages().Final.IsZero() {
		t.Errorf("a hold on another delays bob: %+v", v.Stages())
	}
	if _, v := r.getReceipt("ra"); !v.Stages().Destroyed.IsZero() || !v.Stages().Final.IsZero() {
		t.Errorf("ann, who is held: %+v", v.Stages())
	}
	r.want("release", r.release("ann", "h"), ok)
	r.duty()
	_, v := r.getReceipt("ra")
	if s := v.Entries[len(v.Entries)-1].Statement; s.Kind != receipt.Destroyed || s.Epoch <= first || !v.Stages().Final.IsZero() {
		t.Errorf("destroyed in epoch %d, stages %+v", s.Epoch, v.Stages())
	}
	second := r.openEpoch()
	r.turn()
	r.closeEpoch(second)
	if _, v := r.getReceipt("ra"); v.Stages().Final.IsZero() {
		t.Errorf("stages %+v", v.Stages())
	}
}

// Nothing waits for a tenant that was erased.
func TestWaitForHoldsOfAnErasedTenant(t *testing.T) {
	r := newRig(t)
	for i := range 3 {
		s := fmt.Sprint("s", i)
		r.want("hold", r.hold(s, "h"), ok)
		r.wait(s, "r"+s)
		r.want("release", r.release(s, "h"), ok)
	}
	if _, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "t1", Reason: "left"}); err != nil {
		t.Fatal(err)
	}
	size := r.LedgerSize()
	r.duty()
	if n := len(r.rows("D")); n != 0 || r.LedgerSize() != size {
		t.Errorf("%d rows are left in the index of what is due, and %d entries were added", n, r.LedgerSize()-size)
	}
}
