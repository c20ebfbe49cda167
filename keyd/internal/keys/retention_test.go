package keys_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/keys"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

const day = 24 * time.Hour

// pass lets time go by, tells keyd that it really did, and has the background
// work done.
func (r *rig) pass(d time.Duration) {
	r.t.Helper()
	r.clock.Advance(d)
	if _, err := r.ConfirmClock(context.Background()); err != nil {
		r.t.Fatal(err)
	}
	r.duty()
}

func (r *rig) duty() {
	r.t.Helper()
	if err := keys.Duty(context.Background(), r.Keys); err != nil {
		r.t.Fatalf("background work: %v", err)
	}
}

func (r *rig) retain(name string, width, retention time.Duration, end keydv1.EndAction) {
	r.t.Helper()
	c := class(name, width, time.Minute)
	c.ApprovedBy, c.EndAction = "dpo-2026-03", end
	if retention != 0 {
		c.Retention = durationpb.New(retention)
	} else {
		c.EndAction = keydv1.EndAction_END_ACTION_UNSPECIFIED
	}
	if _, err := r.PutClass(context.Background(), "acme", c); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) hold(subject, id string) error {
	_, err := r.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte(subject), HoldId: id, Reason: "litigation", RequestId: "hold-" + subject + id,
	})
	return err
}

func (r *rig) release(subject, id string) error {
	_, err := r.ReleaseHold(context.Background(), &keydv1.ReleaseHoldRequest{
		Tenant: "acme", SubjectId: []byte(subject), HoldId: id, Reason: "over", RequestId: "release-" + subject + id,
	})
	return err
}

// The worked example: full payloads of traces for 14 days, beside metadata for
// 13 months.
func TestRetention(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, 14*day, keydv1.EndAction_END_ACTION_DESTROY)
	r.retain("trace-metadata", day, 396*day, keydv1.EndAction_END_ACTION_DESTROY)
	payload, metadata := r.seal("ann", "trace"), r.seal("ann", "trace-metadata")
	due := time.Unix(int64(payload.BucketEnd), 0).Add(keys.MaxLease + 14*day)
	_, cursor, _, _, err := r.Revocations(t.Context(), []string{"acme"}, 0)
	if err != nil {
		t.Fatal(err)
	}

	r.pass(due.Sub(r.clock.Now()) - 30*time.Second)
	k, err := r.ask(openQuery("acme", "ann", "trace", payload))
	if err != nil || !bytes.Equal(k.Key, payload.Key) {
		t.Fatalf("before the end: %v", err)
	}
	if k.Lease.AsDuration() > 30*time.Second {
		t.Errorf("a lease of %v reaches beyond the end of the retention", k.Lease.AsDuration())
	}
	// It is refused on time, whether or not the background work comes to it.
	r.clock.Advance(30 * time.Second)
	_, err = r.ask(openQuery("acme", "ann", "trace", payload))
	r.want("at the end", err, isExpired)
	r.duty()

	// In the grace a longer retention takes it back.
	r.retain("trace", day, 15*day, keydv1.EndAction_END_ACTION_DESTROY)
	if _, err := r.ask(openQuery("acme", "ann", "trace", payload)); err != nil {
		t.Errorf("lengthened within the grace: %v", err)
	}
	if s := r.newest(receipt.ClassSet); s == nil || s.RetentionS != int64(15*day/time.Second) || s.ApprovedBy != "dpo-2026-03" || s.Classes[0].Name != "trace" {
		t.Errorf("the change is logged as %+v", s)
	}
	r.duty()
	r.retain("trace", day, 14*day, keydv1.EndAction_END_ACTION_DESTROY)
	r.duty()
	r.pass(23 * time.Hour)
	if n := r.live('B'); n != 2 {
		t.Errorf("%d bucket keys live within the grace, want 2", n)
	}
	r.pass(2 * time.Hour)
	if n := r.live('B'); n != 1 {
		t.Errorf("%d bucket keys live after the grace, want 1", n)
	}
	// Nothing brings it back now.
	r.retain("trace", day, 1000*day, keydv1.EndAction_END_ACTION_DESTROY)
	r.retain("trace", day, 0, keydv1.EndAction_END_ACTION_UNSPECIFIED)
	_, err = r.ask(openQuery("acme", "ann", "trace", payload))
	r.want("dead, under a new policy", err, isExpired)
	if _, err := r.ask(openQuery("acme", "ann", "trace-metadata", metadata)); err != nil {
		t.Errorf("the metadata: %v", err)
	}
	fresh := r.seal("ann", "trace")
	if _, err := r.ask(openQuery("acme", "ann", "trace", fresh)); err != nil {
		t.Errorf("a later bucket: %v", err)
	}

	revoked, _, _, _, err := r.Revocations(t.Context(), []string{"acme"}, cursor)
	if err != nil || len(revoked) != 1 || len(revoked[0].KeyId) != 0 || revoked[0].Bucket != payload.Bucket || revoked[0].ClassNumber != payload.ClassNumber {
		t.Errorf("revoked %v, %v", revoked, err)
	}
	entry := r.newest(receipt.Expired)
	if s := entry; s == nil || s.BucketStartS != int64(payload.Bucket) || s.Classes[0].Name != "trace" {
		t.Errorf("statement %+v", s)
	}

	// Erased goes before expired.
	r.destroy("ann", "r1")
	_, err = r.ask(openQuery("acme", "ann", "trace", payload))
	r.want("erased and expired", err, isErased)
}

// live counts the wrapped rows of a kind that hold a key.
func (r *rig) live(kind byte) (n int) {
	r.t.Helper()
	for k, v := range r.rows("w") {
		var w storev1.Wrapped
		if k[5] != kind {
			continue
		}
		if err := proto.Unmarshal(v, &w); err != nil {
			r.t.Fatal(err)
		}
		if !w.Dead {
			n++
		}
	}
	return n
}

// newest returns the newest statement of a kind about tenant acme.
func (r *rig) newest(kind receipt.Kind) (found *receipt.Statement) {
	r.t.Helper()
	var from uint64
	for {
		page, next, err := r.ListReceipts(context.Background(), "acme", nil, from, 1000)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range page {
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				r.t.Fatal(err)
			}
			if s.Kind == kind {
				found = s
			}
		}
		if from = next; next == 0 {
			return found
		}
	}
}

func TestRetentionThatOnlyDenies(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DENY)
	k := r.seal("ann", "trace")
	r.pass(30 * day)
	r.pass(30 * day)
	_, err := r.ask(openQuery("acme", "ann", "trace", k))
	r.want("denied", err, isExpired)
	if r.live('B') != 1 {
		t.Error("the key is gone")
	}
	r.retain("trace", day, 100*day, keydv1.EndAction_END_ACTION_DENY)
	if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
		t.Errorf("an operator decided otherwise: %v", err)
	}
	// Whose word it is to destroy it has the grace to take that back.
	for range 2 {
		r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
		r.duty()
		r.pass(23 * time.Hour)
		if r.live('B') != 1 {
			t.Fatal("an operator decided to destroy it, and there was no grace")
		}
		r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DENY)
		r.duty()
		r.pass(30 * day)
		if r.live('B') != 1 {
			t.Fatal("the operator took it back, and the key is gone")
		}
	}
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	r.duty()
	r.pass(25 * time.Hour)
	if r.live('B') != 0 {
		t.Error("an operator decided to destroy it, and it lives")
	}
}

// The grace counts from the newest word, whether the background work has seen
// what was said in between or not; nor has a store that is restored.
func TestGraceBeginsAnew(t *testing.T) {
	for _, restored := range []bool{false, true} {
		for _, between := range []struct {
			retention time.Duration
			end       keydv1.EndAction
		}{
			{day, keydv1.EndAction_END_ACTION_DENY},
			{100 * day, keydv1.EndAction_END_ACTION_DESTROY},
		} {
			r := newRig(t)
			r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
			r.seal("ann", "trace")
			r.pass(4 * day) // it is expiring from now on
			file := r.backup()
			r.pass(23 * time.Hour)
			r.retain("trace", day, between.retention, between.end)
			if restored {
				r.duty()
			}
			r.clock.Advance(time.Hour)
			r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
			if restored {
				r.restoreFrom(file)
				r.replay(keys.ReplayOptions{})
			}
			r.pass(23 * time.Hour)
			if r.live('B') != 1 {
				t.Errorf("restored %v, %v: the grace of what was said last is not over, and the key is gone", restored, between.end)
			}
			r.pass(2 * time.Hour)
			if r.live('B') != 0 {
				t.Errorf("restored %v, %v: the key lives on", restored, between.end)
			}
		}
	}
}

// materialise has the bucket of a key that was sealed with today, under a
// retention of a day, begin to die: which of the held keep their shares is being
// found out.
func (r *rig) materialise(k *keydv1.BlobKey) {
	r.t.Helper()
	r.pass(4 * day)
	r.clock.Advance(day)
	if _, err := r.ConfirmClock(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	if err := keys.Materialise(r.t.Context(), r.Keys, "acme", k.ClassNumber, k.Bucket); err != nil {
		r.t.Fatal(err)
	}
}

// What has begun to die is not taken back: shares have been kept by then, and
// who is not held has no more of it.
func TestDyingBucketIsNotTakenBack(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	k := r.seal("ann", "trace")
	r.materialise(k)
	r.retain("trace", day, 1000*day, keydv1.EndAction_END_ACTION_DESTROY)
	r.want("under a longer retention", r.opens("ann", "trace", k), isExpired)
	r.duty()
	if r.live('B') != 0 {
		t.Error("the bucket's key lives on")
	}
	r.want("dead", r.opens("ann", "trace", k), isExpired)
}

// Under a hold keys are leased beyond the retention. One that is released just
// before the bucket dies leaves leases, and the statement counts them.
func TestExpiredIsDrainedOfWhoWasHeld(t *testing.T) {
	for _, holder := range []string{"ann", ""} {
		r := newRig(t)
		c := class("trace", day, 40*time.Minute)
		c.Retention, c.ApprovedBy = durationpb.New(day), "dpo"
		if _, err := r.PutClass(t.Context(), "acme", c); err != nil {
			t.Fatal(err)
		}
		k := r.seal("ann", "trace")
		r.want("hold", r.hold(holder, "h"), ok)
		r.pass(4 * day)
		r.clock.Advance(day)
		if _, err := r.ConfirmClock(t.Context()); err != nil {
			t.Fatal(err)
		}
		leased, err := r.ask(openQuery("acme", "ann", "trace", k))
		if err != nil {
			t.Fatal(err)
		}
		end := r.clock.Now().Add(leased.Lease.AsDuration())
		r.want("release", r.release(holder, "h"), ok)
		r.duty()
		s := r.newest(receipt.Expired)
		if s == nil || r.live('B') != 0 {
			t.Fatal("the bucket lives")
		}
		if s.DrainedBy.Before(end) {
			t.Errorf("held %q: drained by %v, and a lease lasts until %v", holder, s.DrainedBy, end)
		}
	}
}

// A hold whose end only a doubted clock tells goes on to open what was kept.
func TestDoubtedClockEndsNoHoldOnADeadBucket(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	k := r.seal("ann", "trace")
	if _, err := r.PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte("ann"), HoldId: "h", Reason: "litigation", RequestId: "p",
		End: timestamppb.New(r.clock.Now().Add(30 * day)),
	}); err != nil {
		t.Fatal(err)
	}
	r.pass(4 * day)
	r.pass(25 * time.Hour)
	if r.live('B') != 0 || r.live('H') != 1 {
		t.Fatalf("%d bucket keys and %d shares live, want 0 and 1", r.live('B'), r.live('H'))
	}
	r.clock.Advance(60 * day)
	r.want("the clock is doubted", r.opens("ann", "trace", k), ok)
	r.pass(0)
	r.want("an operator has confirmed it", r.opens("ann", "trace", k), isExpired)
}

// What is damaged is told, and holds nobody else's end up.
func TestDamageHoldsUpNobodyElse(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	r.retain("notes", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	r.seal("ann", "notes")
	sealed := make(map[string]*keydv1.BlobKey)
	schedule := func(subject string, in time.Duration) {
		t.Helper()
		sealed[subject] = r.seal(subject, "trace")
		req := destroyRequest(subject, "r-"+subject)
		req.NotBefore = timestamppb.New(r.clock.Now().Add(in))
		if _, err := r.DestroyKey(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	// damage spoils the rows of a kind in whose keys part occurs.
	damage := func(kind, part string) {
		t.Helper()
		n := 0
		for k := range r.rows(kind) {
			if strings.Contains(k, part) {
				r.put(k, []byte("no row"))
				n++
			}
		}
		if n != 1 {
			t.Fatalf("%d rows of kind %s are damaged", n, kind)
		}
	}
	duty := func() {
		t.Helper()
		if _, err := r.ConfirmClock(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := keys.Duty(t.Context(), r.Keys); !errors.Is(err, keys.ErrDamaged) {
			t.Errorf("background work: %v", err)
		}
	}
	schedule("lost", time.Hour)
	for i := range 80 { // more than share a transaction
		schedule(fmt.Sprint("s", i), 2*time.Hour)
	}
	damage("S", string(r.handle("lost")))
	r.clock.Advance(3 * time.Hour)
	duty()
	for subject, k := range sealed {
		want := isErased
		if subject == "lost" {
			want = isUnavail
		}
		r.want(subject, r.opens(subject, "trace", k), want)
	}

	of := binary.BigEndian.AppendUint16(nil, uint16(sealed["lost"].ClassNumber))
	damage("B", string(binary.BigEndian.AppendUint64(of, sealed["lost"].Bucket)))
	r.clock.Advance(4 * day)
	duty()
	r.clock.Advance(25 * time.Hour)
	duty()
	if s := r.newest(receipt.Expired); s == nil || s.Classes[0].Name != "notes" {
		t.Errorf("a damaged bucket of one class holds up another's: %+v", s)
	}
}

// rowOf is the key of the one wrapped row of a kind in whose key part occurs.
func (r *rig) rowOf(prefix string, kind byte, part string) (found string) {
	r.t.Helper()
	for k := range r.rows(prefix) {
		if k[5] == kind && strings.Contains(k, part) {
			if found != "" {
				r.t.Fatalf("two rows of kind %c", kind)
			}
			found = k
		}
	}
	return found
}

// A bucket dies whatever else is damaged: an older one of its class, the row of
// another class, another tenant; and a share is dropped beside one that cannot be.
func TestDamageHoldsUpNoBucket(t *testing.T) {
	for name, damage := range map[string]func(r *rig, first string) string{
		"bucket": func(_ *rig, first string) string { return first },
		"class": func(r *rig, _ string) string { // the first
			for k, v := range r.rows("C") {
				var c storev1.Class
				if proto.Unmarshal(v, &c) == nil && c.Number == 1 {
					return k
				}
			}
			return ""
		},
		"tenant": func(r *rig, _ string) string {
			for i := range 8 {
				if _, err := r.CreateTenant(t.Context(), fmt.Sprint("other", i), nil); err != nil {
					t.Fatal(err)
				}
			}
			first := slices.Min(slices.Collect(maps.Keys(r.rows("T"))))
			var row storev1.Tenant
			if err := proto.Unmarshal(r.rows("T")[first], &row); err != nil || row.Name == "acme" {
				t.Fatalf("the first is acme: %v", err)
			}
			return first
		},
	} {
		r, _, _ := newMemoryRig(t)
		r.retain("notes", day, day, keydv1.EndAction_END_ACTION_DESTROY)
		r.seal("ann", "notes")
		var first string
		for k := range r.rows("B") {
			first = k
		}
		r.clock.Advance(day)
		r.seal("ann", "notes")
		r.put(damage(r, first), []byte("no row"))
		for range 2 {
			r.clock.Advance(5 * day)
			if _, err := r.ConfirmClock(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := keys.MoveBuckets(t.Context(), r.Keys); !errors.Is(err, keys.ErrDamaged) {
				t.Errorf("%s: %v", name, err)
			}
		}
		want := 0
		if name == "bucket" {
			want = 1
		}
		if n := r.live('B'); n != want {
			t.Errorf("a damaged %s: %d buckets live, want %d", name, n, want)
		}
	}
}

func TestDamageHoldsUpNoShare(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	held := []string{"ann", "bob", "carl"}
	for _, s := range held {
		r.seal(s, "trace")
		r.want("hold", r.hold(s, "h"), ok)
	}
	r.pass(4 * day)
	r.pass(25 * time.Hour)
	if r.live('H') != 3 {
		t.Fatalf("%d shares are kept, want 3", r.live('H'))
	}
	for _, s := range held {
		r.want("release", r.release(s, "h"), ok)
	}
	row := "S" + r.rowOf("w", 'H', string(r.handle("ann")))[6:38]
	good := r.rows(row)[row]
	r.put(row, []byte("no row"))
	r.clock.Advance(time.Hour)
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := keys.WorkOnSubjects(t.Context(), r.Keys); !errors.Is(err, keys.ErrDamaged) {
		t.Errorf("background work: %v", err)
	}
	if r.live('H') != 1 {
		t.Errorf("%d shares live beside a damaged subject, want that one's", r.live('H'))
	}
	r.put(row, good)
	r.pass(time.Hour)
	if r.live('H') != 0 {
		t.Error("a share lives on after the repair")
	}
}

// What is due is carried out behind what is due for a tenant, or somebody, that
// cannot be found.
func TestDamageHoldsUpNothingDue(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	if _, err := r.CreateTenant(t.Context(), "other", nil); err != nil {
		t.Fatal(err)
	}
	sealed := r.seal("ann", "trace")
	for i, tenant := range []string{"other", "acme"} {
		req := destroyRequest("ann", "r1")
		req.Tenant, req.NotBefore = tenant, timestamppb.New(r.clock.Now().Add(time.Duration(2+i)*time.Hour))
		if _, err := r.DestroyKey(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	for k, v := range r.rows("T") {
		var row storev1.Tenant
		if err := proto.Unmarshal(v, &row); err != nil {
			t.Fatal(err)
		}
		switch row.Name {
		case "other":
			r.put(k, []byte(unreadable))
		case "acme": // and nobody of this name
			due := binary.BigEndian.AppendUint64([]byte("D"), uint64(r.clock.Now().UnixMilli()))
			r.put(string(due)+k[1:]+strings.Repeat("x", 16), nil)
		}
	}
	r.clock.Advance(4 * time.Hour)
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := keys.WorkOnSubjects(t.Context(), r.Keys); !errors.Is(err, keys.ErrDamaged) {
		t.Errorf("background work: %v", err)
	}
	r.want("whole", r.opens("ann", "trace", sealed), isErased)
}

func TestDamageHoldsUpNoSweep(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	for _, tenant := range []string{"left", "gone"} {
		if _, err := r.CreateTenant(t.Context(), tenant, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: tenant, RequestId: tenant, Reason: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	first := slices.Min(slices.Collect(maps.Keys(r.rows("Z"))))
	r.put(first, []byte("no row"))
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := keys.WorkOnSubjects(t.Context(), r.Keys); !errors.Is(err, keys.ErrDamaged) {
		t.Errorf("background work: %v", err)
	}
	if left := r.rows("Z"); len(left) != 1 || left[first] == nil {
		t.Errorf("%d tenants are not swept, want the damaged one", len(left))
	}
}

// What a clock triggers and nobody can undo waits when the clock has jumped.
func TestNothingDiesByAClockThatJumped(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	k := r.seal("ann", "trace")
	r.seal("bob", "memory")
	due := destroyRequest("bob", "later")
	due.NotBefore = timestamppb.New(r.clock.Now().Add(time.Hour))
	if _, err := r.DestroyKey(t.Context(), due); err != nil {
		t.Fatal(err)
	}
	r.duty()
	r.clock.Advance(400 * day)
	for range 3 {
		if err := keys.Duty(t.Context(), r.Keys); err == nil {
			t.Fatal("the jump was not noticed")
		}
	}
	_, err := r.ask(openQuery("acme", "ann", "trace", k))
	r.want("refused, and not as expired", err, isUnavail)
	r.clock.Advance(2 * day) // the grace is over, by this clock
	if err := keys.Duty(t.Context(), r.Keys); err == nil {
		t.Fatal("the jump was forgotten")
	}
	r.clock.Advance(-402 * day)
	r.duty()
	if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
		t.Errorf("the clock was set right: %v", err)
	}
	if d, err := r.DescribeSubject(t.Context(), "acme", []byte("bob")); err != nil || d.State != keydv1.SubjectState_SUBJECT_STATE_SCHEDULED {
		t.Errorf("the scheduled one is %v, %v", d.GetState(), err)
	}
}

// A hold on a subject outlives the retention, for that subject alone.
func TestHoldOutlivesRetention(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	sealed := make(map[string]*keydv1.BlobKey)
	for _, s := range []string{"held", "late", "free", "ended"} {
		sealed[s] = r.seal(s, "trace")
	}
	r.want("hold", r.hold("held", "h1"), ok)
	r.want("hold", r.hold("held", "h2"), ok)
	if _, err := r.PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte("ended"), HoldId: "h1", Reason: "litigation", RequestId: "e1",
		End: timestamppb.New(r.clock.Now().Add(day)),
	}); err != nil {
		t.Fatal(err)
	}
	r.pass(4 * day)
	r.pass(25 * time.Hour)
	if r.live('B') != 0 || r.live('H') != 1 {
		t.Fatalf("%d bucket keys and %d shares live, want 0 and 1", r.live('B'), r.live('H'))
	}
	r.want("too late for this bucket", r.hold("late", "h1"), ok)
	for subject, want := range map[string]keydv1.Outcome{"held": ok, "late": isExpired, "free": isExpired, "ended": isExpired} {
		k, err := r.ask(openQuery("acme", subject, "trace", sealed[subject]))
		r.want(subject, err, want)
		if err == nil && !bytes.Equal(k.Key, sealed[subject].Key) {
			t.Errorf("%s: another key", subject)
		}
	}
	r.reopen()
	r.want("one of two released", r.release("held", "h1"), ok)
	r.pass(time.Hour)
	if _, err := r.ask(openQuery("acme", "held", "trace", sealed["held"])); err != nil {
		t.Errorf("still held: %v", err)
	}
	r.want("released", r.release("held", "h2"), ok)
	_, err := r.ask(openQuery("acme", "held", "trace", sealed["held"]))
	r.want("released", err, isExpired)
	r.pass(time.Hour)
	if r.live('H') != 0 {
		t.Error("the share lives on")
	}
}

func TestTenantHoldKeepsBuckets(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	k := r.seal("ann", "trace")
	r.want("hold", r.hold("", "all"), ok)
	r.pass(10 * day)
	r.pass(10 * day)
	if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
		t.Errorf("held: %v", err)
	}
	r.want("release", r.release("", "all"), ok)
	r.pass(2 * day)
	_, err := r.ask(openQuery("acme", "ann", "trace", k))
	r.want("released", err, isExpired)
	if r.live('B') != 0 {
		t.Error("the bucket's key lives on")
	}
}

// However many are held, and whenever a hold is placed while shares are being
// kept: whoever was told that the hold binds keeps the data.
func TestHoldsRaceMaterialising(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	const n = 600
	sealed := make([]*keydv1.BlobKey, n)
	for i := range sealed {
		sealed[i] = r.seal(fmt.Sprint("s", i), "trace")
		if i < n/2 {
			r.want("hold", r.hold(fmt.Sprint("s", i), "h"), ok)
		}
	}
	r.pass(4 * day)
	r.clock.Advance(day)
	if _, err := r.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	placed := make([]error, n)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := n/2 + w; i < n; i += 4 {
				placed[i] = r.hold(fmt.Sprint("s", i), "h")
			}
		})
	}
	r.duty()
	wg.Wait()
	r.duty()
	if r.live('B') != 0 {
		t.Fatal("the bucket lives")
	}
	kept := 0
	for i, k := range sealed {
		if placed[i] != nil {
			t.Fatalf("hold %d: %v", i, placed[i])
		}
		got, err := r.ask(openQuery("acme", fmt.Sprint("s", i), "trace", k))
		switch {
		case err == nil && bytes.Equal(got.Key, k.Key):
			kept++
		case i < n/2:
			t.Fatalf("subject %d was held from the beginning: %v", i, err)
		case outcome(err) != isExpired:
			t.Fatalf("subject %d: %v", i, err)
		}
	}
	if kept != r.live('H') {
		t.Errorf("%d open and %d shares live", kept, r.live('H'))
	}
	t.Logf("%d of %d late holds were in time", kept-n/2, n/2)
}

// A hold that comes when the held subjects have been gone through, and the
// bucket's key still lives, is in time.
func TestHoldWhileMaterialising(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	// The held are gone through in the order of their handles: who is held in
	// time comes last, so that whoever comes late was passed by.
	late, early := "ann", "bob"
	k, other := r.seal(late, "trace"), r.seal(early, "trace")
	if bytes.Compare(r.handle(late), r.handle(early)) > 0 {
		late, early, k, other = early, late, other, k
	}
	r.want("hold", r.hold(early, "h"), ok)
	r.materialise(k)
	r.want("hold", r.hold(late, "h"), ok)
	r.reopen()
	r.duty()
	if r.live('B') != 0 || r.live('H') != 2 {
		t.Fatalf("%d bucket keys and %d shares live, want 0 and 2", r.live('B'), r.live('H'))
	}
	for subject, k := range map[string]*keydv1.BlobKey{late: k, early: other} {
		got, err := r.ask(openQuery("acme", subject, "trace", k))
		if err != nil || !bytes.Equal(got.Key, k.Key) {
			t.Errorf("held: %v", err)
		}
	}
}

// So is a hold on the tenant; and where one has come before the subject's own is
// released, what was kept stays.
func TestTenantHoldWhileMaterialising(t *testing.T) {
	r := newRig(t)
	r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
	ann, bob := r.seal("ann", "trace"), r.seal("bob", "trace")
	r.want("hold", r.hold("ann", "h"), ok)
	r.materialise(bob)
	r.place("", "all", "p1")
	r.duty()
	r.want("the tenant is held", r.opens("bob", "trace", bob), ok)
	r.unplace("", "all", "p2")
	r.duty()
	r.want("it is released", r.opens("bob", "trace", bob), isExpired)
	if r.live('B') != 0 || r.live('H') != 1 {
		t.Fatalf("%d bucket keys and %d shares live, want 0 and 1", r.live('B'), r.live('H'))
	}
	r.place("", "all", "p3")
	r.want("release", r.release("ann", "h"), ok)
	r.pass(time.Hour)
	r.want("the tenant is held again", r.opens("ann", "trace", ann), ok)
	r.unplace("", "all", "p4")
	r.pass(time.Hour)
	if r.live('H') != 0 {
		t.Error("the share lives on")
	}
}

// handle is what keyd calls a subject that it knows.
func (r *rig) handle(subject string) []byte {
	r.t.Helper()
	d, err := r.DescribeSubject(context.Background(), "acme", []byte(subject))
	if err != nil {
		r.t.Fatal(err)
	}
	return d.Handle
}

func TestScheduledDestruction(t *testing.T) {
	r := newRig(t)
	_, cursor, _, _, err := r.Revocations(t.Context(), []string{"acme"}, 0)
	if err != nil {
		t.Fatal(err)
	}
	schedule := func(subject, id string, in time.Duration, classes ...string) (*keys.Recorded, error) {
		req := destroyRequest(subject, id, classes...)
		req.NotBefore = timestamppb.New(r.clock.Now().Add(in))
		return r.DestroyKey(context.Background(), req)
	}
	ann := r.seal("ann", "trace")
	req := destroyRequest("ann", "r1")
	req.NotBefore = timestamppb.New(r.clock.Now().Add(3 * time.Hour))
	rec, err := r.DestroyKey(t.Context(), req)
	if err != nil || rec.Due.IsZero() {
		t.Fatalf("%v, %v", rec, err)
	}
	if s := r.verify(rec).Stages(); !s.Destroyed.IsZero() || s.Due.IsZero() || s.Denied.IsZero() {
		t.Errorf("the receipt of what is only scheduled: %+v", s)
	}
	_, err = r.ask(openQuery("acme", "ann", "trace", ann))
	r.want("open", err, isPending)
	_, err = r.ask(sealQuery("acme", "ann", "memory"))
	r.want("seal", err, isPending)
	revoked, _, _, _, err := r.Revocations(t.Context(), []string{"acme"}, cursor)
	if err != nil || len(revoked) != 1 || revoked[0].Outcome != keydv1.Outcome_OUTCOME_PENDING_ERASURE || !bytes.Equal(revoked[0].KeyId, ann.KeyId) {
		t.Errorf("revoked %v, %v", revoked, err)
	}
	r.reopen()
	r.pass(2 * time.Hour)
	_, err = r.ask(openQuery("acme", "ann", "trace", ann))
	r.want("not due yet", err, isPending)

	// Held when it falls due: it waits, and goes on by itself.
	r.want("hold", r.hold("ann", "h"), ok)
	r.pass(2 * time.Hour)
	_, err = r.ask(openQuery("acme", "ann", "trace", ann))
	r.want("due and held", err, isPending)
	r.want("release", r.release("ann", "h"), ok)
	r.duty()
	_, err = r.ask(openQuery("acme", "ann", "trace", ann))
	r.want("destroyed", err, isErased)
	again, err := r.DestroyKey(t.Context(), req)
	if err != nil || !again.Due.IsZero() {
		t.Fatalf("%+v, %v", again, err)
	}
	if v := r.verify(again); len(v.Entries) != 2 || v.Stages().Destroyed.IsZero() {
		t.Errorf("the receipt has %d entries", len(v.Entries))
	}
	got, err := r.GetReceipt(t.Context(), &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "r1"}})
	if err != nil || !bytes.Equal(got.Receipt, again.Receipt) {
		t.Errorf("GetReceipt: %v", err)
	}

	// Cancelled: as if nothing had been.
	bob := r.seal("bob", "trace")
	if _, err := schedule("bob", "r2", time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := schedule("bob", "r3", 2*time.Hour, "trace", "memory"); err != nil {
		t.Fatal(err)
	}
	cancel := &keydv1.CancelDestructionRequest{Tenant: "acme", SubjectId: []byte("bob"), DestroyRequestId: "r2", RequestId: "c1", Reason: "mistake"}
	called, err := r.CancelDestruction(t.Context(), cancel)
	if err != nil {
		t.Fatal(err)
	}
	if s := r.verify(called).Stages(); s.Cancelled.IsZero() || !s.Destroyed.IsZero() {
		t.Errorf("stages %+v", s)
	}
	_, err = schedule("bob", "r2", time.Hour)
	r.want("the request that was cancelled, again", err, isConflict)
	_, err = r.ask(openQuery("acme", "bob", "trace", bob))
	r.want("one class is still scheduled", err, isPending)
	if _, err := r.ask(sealQuery("acme", "bob", "backup")); err != nil {
		t.Errorf("another class: %v", err)
	}
	cancel = &keydv1.CancelDestructionRequest{Tenant: "acme", SubjectId: []byte("bob"), RequestId: "c2", Reason: "mistake"}
	if _, err := r.CancelDestruction(t.Context(), cancel); err != nil {
		t.Fatal(err)
	}
	r.pass(5 * time.Hour)
	if k, err := r.ask(openQuery("acme", "bob", "trace", bob)); err != nil || !bytes.Equal(k.Key, bob.Key) {
		t.Errorf("cancelled: %v", err)
	}
	_, err = r.CancelDestruction(t.Context(), &keydv1.CancelDestructionRequest{Tenant: "acme", SubjectId: []byte("bob"), RequestId: "c3", Reason: "mistake"})
	r.want("nothing to cancel", err, isUnknown)
	_, err = r.CancelDestruction(t.Context(), &keydv1.CancelDestructionRequest{Tenant: "acme", SubjectId: []byte("ann"), RequestId: "c4", Reason: "mistake"})
	r.want("too late to cancel", err, isErased)
	_, err = schedule("bob", "r9", 400*day)
	r.want("too far ahead", err, isInvalid)

	// Destroyed at once while scheduled.
	carl := r.seal("carl", "trace")
	if _, err := schedule("carl", "r4", time.Hour); err != nil {
		t.Fatal(err)
	}
	now := r.destroy("carl", "r5")
	_, err = r.ask(openQuery("acme", "carl", "trace", carl))
	r.want("destroyed before it was due", err, isErased)
	r.verify(now)
	r.pass(2 * time.Hour)
	if d, err := r.DescribeSubject(t.Context(), "acme", []byte("carl")); err != nil || len(d.Scheduled) != 0 || len(d.LedgerIndexes) != 2 {
		t.Errorf("%v, %v", d, err)
	}
	if n := len(r.rows("D")); n != 0 {
		t.Errorf("%d rows are left in the index of what is due", n)
	}
}

func TestDestroyTenant(t *testing.T) {
	r := newRig(t)
	if _, err := r.CreateTenant(t.Context(), "other", nil); err != nil {
		t.Fatal(err)
	}
	var sealed []*keydv1.BlobKey
	for i := range 40 {
		sealed = append(sealed, r.seal(fmt.Sprint("s", i), "trace"))
	}
	bystander, err := r.ask(sealQuery("other", "s0", "trace"))
	if err != nil {
		t.Fatal(err)
	}
	destroy := func(id string) (*keys.Recorded, error) {
		return r.DestroyTenant(context.Background(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: id, Reason: "offboarding"})
	}
	r.want("hold", r.hold("s7", "h"), ok)
	_, err = destroy("t1")
	r.want("a subject is held", err, isHeld)
	r.want("release", r.release("s7", "h"), ok)
	r.want("hold", r.hold("", "all"), ok)
	_, err = destroy("t1")
	r.want("the tenant is held", err, isHeld)
	r.want("release", r.release("", "all"), ok)
	rec, err := destroy("t1")
	if err != nil {
		t.Fatal(err)
	}
	if s := r.verify(rec).Entries[0].Statement; s.Scope != receipt.ScopeTenant || s.Tenant != "acme" {
		t.Errorf("statement %+v", s)
	}
	for range 2 {
		_, err = r.ask(openQuery("acme", "s3", "trace", sealed[3]))
		r.want("open", err, isErased)
		_, err = r.ask(sealQuery("acme", "new", "trace"))
		r.want("seal", err, isErased)
		_, err = r.DestroyKey(t.Context(), destroyRequest("s3", "r1"))
		r.want("destroy", err, isErased)
		_, err = r.DescribeSubject(t.Context(), "acme", []byte("s3"))
		r.want("describe", err, isErased)
		r.want("hold", r.hold("s3", "h9"), isErased)
		_, err = r.CreateTenant(t.Context(), "acme", nil)
		r.want("the name", err, isConflict)
		if k, err := r.ask(openQuery("other", "s0", "trace", bystander)); err != nil || !bytes.Equal(k.Key, bystander.Key) {
			t.Errorf("bystander: %v", err)
		}
		again, err := destroy("t1")
		if err != nil || !bytes.Equal(again.Receipt, rec.Receipt) {
			t.Errorf("repeated: %v", err)
		}
		got, err := r.GetReceipt(t.Context(), &keydv1.GetReceiptRequest{Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "t1"}})
		if err != nil || !bytes.Equal(got.Receipt, rec.Receipt) {
			t.Errorf("GetReceipt: %v", err)
		}
		r.reopen()
		r.duty()
	}
	if n := r.live('D'); n != 1 {
		t.Errorf("%d DEKs live after the sweep, want the bystander's", n)
	}
	if n := len(r.rows("Z")); n != 0 {
		t.Errorf("%d sweeps are left", n)
	}
	revoked, _, _, _, err := r.Revocations(t.Context(), []string{"acme"}, rec.Index)
	if err != nil || len(revoked) != 1 || len(revoked[0].KeyId) != 0 || revoked[0].ClassNumber != 0 {
		t.Errorf("revoked %v, %v", revoked, err)
	}
}
