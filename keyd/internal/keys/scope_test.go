package keys_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// TestGuaranteeDrainedCountsWhatDiedBefore: a client may still hold the key of
// a class that died a moment ago, so nothing said of the whole is drained
// before it is.
func TestGuaranteeDrainedCountsWhatDiedBefore(t *testing.T) {
	later := func(r *rig, id string) (*keys.Recorded, error) {
		req := destroyRequest("ann", id)
		req.NotBefore = timestamppb.New(r.clock.Now().Add(time.Second))
		return r.DestroyKey(context.Background(), req)
	}
	for name, then := range map[string]func(*rig) (*keys.Recorded, error){
		"the whole person": func(r *rig) (*keys.Recorded, error) { return r.destroy("ann", "r2"), nil },
		"it again": func(r *rig) (*keys.Recorded, error) {
			r.destroy("ann", "r2")
			return r.destroy("ann", "r3"), nil
		},
		"scheduled": func(r *rig) (*keys.Recorded, error) { return later(r, "r2") },
		"scheduled, and due": func(r *rig) (*keys.Recorded, error) {
			if _, err := later(r, "r2"); err != nil {
				return nil, err
			}
			r.clock.Advance(2 * time.Second)
			r.duty()
			rec, _ := r.getReceipt("r2")
			return rec, nil
		},
		"waiting for a hold": func(r *rig) (*keys.Recorded, error) {
			r.place("ann", "h", "h1")
			return r.wait("ann", "r2"), nil
		},
		"with another class": func(r *rig) (*keys.Recorded, error) { return r.destroy("ann", "r2", "memory", "backup"), nil },
		"both again, each dead by its own": func(r *rig) (*keys.Recorded, error) {
			r.destroy("ann", "r2", "backup")
			return r.destroy("ann", "r3", "memory", "backup"), nil
		},
		"the next life": func(r *rig) (*keys.Recorded, error) {
			r.destroy("ann", "r2")
			r.reinstate("ann", "r3", 1)
			req := destroyRequest("ann", "r4")
			req.IfGeneration = 2
			return r.DestroyKey(context.Background(), req)
		},
		"the class's next life": func(r *rig) (*keys.Recorded, error) {
			r.reinstate("ann", "r2", 1, "memory")
			req := destroyRequest("ann", "r3", "memory")
			req.IfGeneration = 2
			return r.DestroyKey(context.Background(), req)
		},
		"the tenant": func(r *rig) (*keys.Recorded, error) {
			return r.DestroyTenant(context.Background(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "t", Reason: "offboarding"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.seal("ann", "memory")
			first := r.destroy("ann", "r1", "memory")
			r.clock.Advance(time.Second)
			rec, err := then(r)
			if err != nil {
				t.Fatal(err)
			}
			if by := r.verify(rec).Stages().DrainedBy; by.Before(first.DrainedBy) || !by.Equal(rec.DrainedBy) {
				t.Errorf("drained by %v, the answer says %v; of the class it was %v", by, rec.DrainedBy, first.DrainedBy)
			}
		})
	}

	// What is not in the scope does not count.
	r := newRig(t)
	r.seal("ann", "memory")
	first := r.destroy("ann", "r1", "memory")
	r.clock.Advance(time.Second)
	if rec := r.destroy("ann", "r2", "backup"); !rec.DrainedBy.Before(first.DrainedBy) {
		t.Errorf("another class, never used, is drained by %v", rec.DrainedBy)
	}
}

// A replay of what counts what died before comes to the same.
func TestReplayOfWhatDiedBefore(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "memory")
	r.seal("bob", "memory")
	r.seal("bob", "trace")
	file := r.backup()
	r.destroy("ann", "a1", "memory")
	both := r.destroy("ann", "a2", "backup", "memory")
	whole := r.destroy("ann", "a3")
	r.destroy("bob", "b1", "memory")
	req := destroyRequest("bob", "b2", "memory", "trace")
	req.NotBefore = timestamppb.New(r.clock.Now().Add(time.Hour))
	if _, err := r.DestroyKey(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	r.pass(2 * time.Hour)
	due, _ := r.getReceipt("b2")
	r.restoreFrom(file)
	r.replay(keys.ReplayOptions{})
	if again := r.destroy("ann", "a2", "backup", "memory"); !bytes.Equal(again.Receipt, both.Receipt) {
		t.Error("the repeated request for two classes has another receipt")
	}
	if again := r.destroy("ann", "a3"); !bytes.Equal(again.Receipt, whole.Receipt) {
		t.Error("the repeated request for the person has another receipt")
	}
	if again, _ := r.getReceipt("b2"); !bytes.Equal(again.Receipt, due.Receipt) {
		t.Error("what was due has another receipt")
	}
}

// A receipt names all that was asked for, and does not say that no key existed
// where one was destroyed before.
func TestReceiptNamesWhatWasDead(t *testing.T) {
	r := newRig(t)
	statement := func(rec *keys.Recorded) *receipt.Statement { return r.verify(rec).Entries[0].Statement }
	named := func(s *receipt.Statement) (names []string) {
		for _, c := range s.Classes {
			names = append(names, c.Name)
		}
		slices.Sort(names)
		return names
	}

	r.seal("ann", "memory")
	r.seal("ann", "trace")
	r.destroy("ann", "a1", "memory")
	s := statement(r.destroy("ann", "a2", "memory", "trace"))
	if got := named(s); !slices.Equal(got, []string{"memory", "trace"}) || len(s.DeadKeys) != 1 || s.Existed != receipt.ExistedYes {
		t.Errorf("one of two was dead: %v, %d keys, existed %s", got, len(s.DeadKeys), s.Existed)
	}
	whole := r.destroy("ann", "a3")
	if s := statement(whole); s.Existed != receipt.ExistedYes || len(s.DeadKeys) != 0 {
		t.Errorf("the person, class by class: existed %s, %d keys", s.Existed, len(s.DeadKeys))
	}

	// Two that died apart are stated together, once, hold or not.
	r.seal("bob", "memory")
	r.seal("bob", "trace")
	apart := r.destroy("bob", "b1", "memory")
	r.destroy("bob", "b2", "trace")
	if again := r.destroy("bob", "b3", "memory"); !again.Repeated || again.Index != apart.Index {
		t.Errorf("one class again: entry %d, repeated %v", again.Index, again.Repeated)
	}
	r.place("bob", "h", "bh")
	both := r.wait("bob", "b4", "trace", "memory")
	if s := statement(both); len(named(s)) != 2 || s.Kind != receipt.Destroyed || len(s.DeadKeys) != 0 || s.Existed != receipt.ExistedYes {
		t.Errorf("both: %s of %v, existed %s", s.Kind, named(s), s.Existed)
	}
	if again := r.destroy("bob", "b5", "memory", "trace"); !again.Repeated || again.Index != both.Index {
		t.Errorf("both again: entry %d, want %d", again.Index, both.Index)
	}

	// A key of an earlier life is none of this one.
	r.reinstate("ann", "a4", 1)
	req := destroyRequest("ann", "a5")
	req.IfGeneration = 2
	rec, err := r.DestroyKey(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if s := statement(rec); s.Existed != receipt.ExistedNo {
		t.Errorf("the next life, never used: existed %s", s.Existed)
	}
	r.seal("eve", "memory")
	r.destroy("eve", "e1", "memory")
	r.reinstate("eve", "e2", 1, "memory")
	req = destroyRequest("eve", "e3", "memory")
	req.IfGeneration = 2
	if rec, err = r.DestroyKey(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if s := statement(rec); s.Existed != receipt.ExistedNo {
		t.Errorf("the class's next life, never used: existed %s", s.Existed)
	}
	if s := statement(r.destroy("nobody", "n1")); s.Existed != receipt.ExistedNo {
		t.Errorf("nobody: existed %s", s.Existed)
	}
}

// A late request that names a class which lives again, beside others, destroys
// nothing, in whatever order they are looked at.
func TestLateRequestForSeveralClasses(t *testing.T) {
	r := newRig(t)
	classes := []string{"backup", "checkpoint", "memory", "trace"}
	for _, c := range classes {
		r.seal("ann", c)
	}
	r.destroy("ann", "r1", "memory")
	r.reinstate("ann", "r2", 1, "memory")
	memory := r.seal("ann", "memory")
	for range 8 { // classes are looked at in a random order
		_, err := r.DestroyKey(t.Context(), destroyRequest("ann", "r3", classes...))
		r.want("destroy", err, isConflict)
		r.want("open", r.opens("ann", "memory", memory), ok)
	}
}

// What was scheduled when its tenant or its person was destroyed is told with
// that; and what a tenant's requests were answered with, they are answered with
// when the tenant is erased.
func TestScheduledIsOvertaken(t *testing.T) {
	r := newRig(t)
	if _, err := r.CreateTenant(t.Context(), "other", nil); err != nil {
		t.Fatal(err)
	}
	r.seal("ann", "memory")
	scheduled := func(subject, id string) *keydv1.DestroyKeyRequest {
		req := destroyRequest(subject, id)
		req.NotBefore = timestamppb.New(r.clock.Now().Add(time.Hour).Truncate(time.Hour))
		return req
	}
	later, of := scheduled("ann", "a1"), scheduled("bob", "b1")
	for _, req := range []*keydv1.DestroyKeyRequest{later, of, scheduled("bob", "b2")} {
		if _, err := r.DestroyKey(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	bob := r.destroy("bob", "b3")
	for _, id := range []string{"b1", "b2"} {
		if rec, v := r.getReceipt(id); len(v.Entries) != 2 || v.Stages().Destroyed.IsZero() || rec.Index != bob.Index {
			t.Errorf("%s: %d entries, destroyed %v", id, len(v.Entries), v.Stages().Destroyed)
		}
	}
	r.seal("eve", "memory")
	eve := r.destroy("eve", "e1", "memory")
	r.place("zoe", "h", "z1")
	r.unplace("zoe", "h", "z2")
	erased, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "t", Reason: "offboarding"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for what, get := range map[string]func() (*keys.Recorded, error){
			"repeated": func() (*keys.Recorded, error) { return r.DestroyKey(context.Background(), later) },
			"asked for": func() (*keys.Recorded, error) {
				rec, _ := r.getReceipt("a1")
				return rec, nil
			},
		} {
			rec, err := get()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			s := r.verify(rec).Stages()
			if rec.Index != erased.Index || s.Destroyed.IsZero() || !s.DrainedBy.Equal(erased.DrainedBy) || !rec.DrainedBy.Equal(erased.DrainedBy) || !rec.Due.IsZero() {
				t.Errorf("%s: entry %d, due %v, %+v", what, rec.Index, rec.Due, s)
			}
		}
		if again := r.destroy("eve", "e1", "memory"); !bytes.Equal(again.Receipt, eve.Receipt) || again.Living != 0 {
			t.Errorf("an answered request: living %d", again.Living)
		}
		r.place("zoe", "h", "z1")
		_, err = r.DestroyKey(t.Context(), destroyRequest("eve", "e1", "trace"))
		r.want("the same id for other classes", err, isConflict)
		_, err = r.DestroyKey(t.Context(), destroyRequest("eve", "e2"))
		r.want("a new request", err, isErased)
		req := destroyRequest("eve", "e1", "memory")
		req.Tenant = "other"
		if rec, err := r.DestroyKey(t.Context(), req); err != nil || r.verify(rec).Entries[0].Statement.Tenant != "other" {
			t.Errorf("the same id in another tenant: %v", err)
		}
		r.reopen()
		r.duty()
	}
}
