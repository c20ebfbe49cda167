package keys_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// model is what a reader of the guarantees would expect of one tenant, written
// down as simply as can be. Retention, holds, destructions that are scheduled,
// reinstated and cancelled, turns of epochs and restarts cross each other in
// it, and keyd has to agree about every blob ever sealed.
type model struct {
	r        *rig
	t        *rapid.T
	next     int // numbers requests
	subjects map[string]*modelSubject
	held     map[string]bool // holds on the tenant
	buckets  map[modelBucket]*modelBucketState
	blobs    []modelBlob
	leases   map[modelLease]time.Time // when the longest that was granted ends
	read     uint64                   // how far the ledger has been read
}

type modelSubject struct {
	dead       bool
	generation uint32               // the newest
	life       uint32               // that of the person
	due        map[string]time.Time // by class; "" is the person
	request    map[string]string    // that scheduled it
	classes    map[string]*modelClass
	holds      map[string]bool
}

type modelClass struct {
	dead       bool
	generation uint32
	key        []byte // id of the live key
	died       [][]byte
}

type modelBucket struct {
	class string
	start uint64
}

type modelBucketState struct {
	end      uint64
	expiring time.Time
	dead     bool
	// kept are the subjects whose shares were kept; false: perhaps dropped since.
	kept map[string]bool
}

type modelBlob struct {
	subject, class string
	key            *keydv1.BlobKey
}

// modelLease is what keys are leased for.
type modelLease struct {
	subject, class string
	bucket         uint64
}

var (
	modelSubjects = []string{"ann", "bob", "carl"}
	// Only traces end.
	modelClasses = []string{"trace", "memory"}
)

const modelRetention = 3 * day

func (m *model) subject(id string) *modelSubject {
	s := m.subjects[id]
	if s == nil {
		s = &modelSubject{
			generation: 1, life: 1, due: make(map[string]time.Time), request: make(map[string]string),
			classes: make(map[string]*modelClass), holds: make(map[string]bool),
		}
		m.subjects[id] = s
	}
	return s
}

func (s *modelSubject) class(name string) *modelClass {
	c := s.classes[name]
	if c == nil {
		c = &modelClass{generation: s.life}
		s.classes[name] = c
	}
	return c
}

func (m *model) isHeld(s *modelSubject) bool { return len(m.held) != 0 || len(s.holds) != 0 }

func (m *model) request() string {
	m.next++
	return fmt.Sprint("request", m.next)
}

func (m *model) want(what string, err error, o keydv1.Outcome) {
	if got := outcome(err); got != o {
		m.t.Fatalf("%s: %v (%v), want %v", what, got, err, o)
	}
}

func (m *model) pick() (string, *modelSubject) {
	id := rapid.SampledFrom(modelSubjects).Draw(m.t, "subject")
	return id, m.subject(id)
}

// targets draws the whole person, or one class.
func (m *model) targets() []string {
	if c := rapid.SampledFrom(append([]string{""}, modelClasses...)).Draw(m.t, "class"); c != "" {
		return []string{c}
	}
	return nil
}

// generationOf is what a destroy of these targets has to name.
func (s *modelSubject) generationOf(classes []string) uint32 {
	if classes == nil {
		return s.generation
	}
	return s.class(classes[0]).generation
}

func (s *modelSubject) isDead(classes []string) bool {
	return s.dead || classes != nil && s.class(classes[0]).dead
}

func (s *modelSubject) kill(classes []string) {
	if classes == nil {
		s.dead = true
		clear(s.holds)
		clear(s.due)
		classes = slices.Collect(maps.Keys(s.classes))
	}
	for _, name := range classes {
		c := s.class(name)
		if len(c.key) != 0 {
			c.died = append(c.died, c.key)
			c.key = nil
		}
		c.dead = true
		delete(s.due, name)
	}
}

func (m *model) Seal(t *rapid.T) {
	m.t = t
	id, s := m.pick()
	name := rapid.SampledFrom(modelClasses).Draw(t, "class")
	q, at := sealQuery("acme", id, name), uint64(m.r.clock.Now().Unix())
	if rapid.Bool().Draw(t, "ahead") {
		at += uint64(rapid.IntRange(0, 3600).Draw(t, "seconds ahead"))
		q.SealFrom = at
	}
	k, err := m.r.ask(q)
	c := s.class(name)
	_, person := s.due[""]
	_, scheduled := s.due[name]
	switch {
	case s.dead || c.dead:
		m.want("seal", err, isErased)
		return
	case person || scheduled:
		m.want("seal", err, isPending)
		return
	}
	m.want("seal", err, ok)
	if len(c.key) == 0 {
		c.key = k.KeyId
	}
	if !bytes.Equal(c.key, k.KeyId) || k.Generation != c.generation {
		t.Fatalf("sealed under generation %d, want %d, or under another key", k.Generation, c.generation)
	}
	if at < k.Bucket || at >= k.BucketEnd {
		t.Fatalf("%d is not in the bucket [%d, %d)", at, k.Bucket, k.BucketEnd)
	}
	b := modelBucket{name, k.Bucket}
	if m.buckets[b] == nil {
		m.buckets[b] = &modelBucketState{end: k.BucketEnd}
	}
	m.blobs = append(m.blobs, modelBlob{id, name, k})
	m.leased(id, name, k)
}

// leased notes until when somebody has a key.
func (m *model) leased(subject, class string, k *keydv1.BlobKey) {
	of := modelLease{subject, class, k.Bucket}
	if end := m.r.clock.Now().Add(k.Lease.AsDuration()); end.After(m.leases[of]) {
		m.leases[of] = end
	}
}

// drained reads what the ledger has got, and sees that no lease of what died, or
// is refused, lasts longer than is stated.
func (m *model) drained() {
	for {
		page, next, err := m.r.ListReceipts(context.Background(), "acme", nil, m.read, 1000)
		if err != nil {
			m.t.Fatal(err)
		}
		for _, e := range page {
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				m.t.Fatal(err)
			}
			m.read = e.LedgerIndex + 1
			for of, end := range m.leases {
				if m.ends(s, of) && end.After(s.DrainedBy) {
					m.t.Fatalf("%s at %v, drained by %v: a lease of class %s lasts %v longer", s.Kind, s.Time, s.DrainedBy, of.class, end.Sub(s.DrainedBy))
				}
			}
		}
		if next == 0 {
			return
		}
	}
}

// ends says whether a statement puts an end to what is leased.
func (m *model) ends(s *receipt.Statement, of modelLease) bool {
	named := s.Scope == receipt.ScopePerson || slices.ContainsFunc(s.Classes, func(c receipt.Class) bool { return c.Name == of.class })
	switch s.Kind {
	case receipt.Destroyed, receipt.Scheduled:
		d, err := m.r.DescribeSubject(context.Background(), "acme", []byte(of.subject))
		if err != nil {
			m.t.Fatal(err)
		}
		return named && bytes.Equal(d.Handle, s.Handle)
	case receipt.Expired:
		_, kept := m.buckets[modelBucket{of.class, of.bucket}].kept[of.subject]
		return named && uint64(s.BucketStartS) == of.bucket && !kept
	}
	return false
}

func (m *model) Destroy(t *rapid.T) {
	m.t = t
	id, s := m.pick()
	classes := m.targets()
	req := destroyRequest(id, m.request(), classes...)
	req.IfGeneration = s.generationOf(classes)
	if rapid.IntRange(0, 5).Draw(t, "late") == 0 && req.IfGeneration > 1 {
		req.IfGeneration-- // a late request, of an earlier life
		_, err := m.r.DestroyKey(context.Background(), req)
		m.want("late destroy", err, isConflict)
		return
	}
	var due time.Time
	if rapid.IntRange(0, 2).Draw(t, "schedule") == 0 {
		due = m.r.clock.Now().Add(time.Duration(rapid.IntRange(1, 48).Draw(t, "hours")) * time.Hour).Truncate(time.Millisecond)
		req.NotBefore = timestamppb.New(due)
	}
	req.WaitForHolds = rapid.Bool().Draw(t, "wait for holds")
	rec, err := m.r.DestroyKey(context.Background(), req)
	switch {
	case s.isDead(classes):
		m.want("destroy of the dead", err, ok)
		if !rec.Repeated {
			t.Fatal("it was dead, and the answer does not say so")
		}
	case m.isHeld(s) && !req.WaitForHolds:
		m.want("destroy under a hold", err, isHeld)
	default:
		m.want("destroy", err, ok)
		if due.IsZero() && m.isHeld(s) {
			due = m.r.clock.Now() // as soon as no hold binds
		}
		if rec.Due.IsZero() != due.IsZero() {
			t.Fatalf("due %v, want %v", rec.Due, due)
		}
		if due.IsZero() {
			s.kill(classes)
			break
		}
		target := ""
		if classes != nil {
			target = classes[0]
			s.class(target)
		}
		if old, has := s.due[target]; !has || due.Before(old) {
			s.due[target] = due
		}
	}
}

func (m *model) Cancel(t *rapid.T) {
	m.t = t
	id, s := m.pick()
	_, err := m.r.CancelDestruction(context.Background(), &keydv1.CancelDestructionRequest{
		Tenant: "acme", SubjectId: []byte(id), RequestId: m.request(), Reason: "test",
	})
	switch {
	case len(s.due) != 0:
		m.want("cancel", err, ok)
		clear(s.due)
	case s.dead:
		m.want("cancel too late", err, isErased)
	default:
		m.want("cancel nothing", err, isUnknown)
	}
}

func (m *model) Reinstate(t *rapid.T) {
	m.t = t
	id, s := m.pick()
	classes := m.targets()
	req := &keydv1.ReinstateRequest{
		Tenant: "acme", SubjectId: []byte(id), Classes: classes, IfGeneration: s.generationOf(classes), RequestId: m.request(), Reason: "test",
	}
	rec, err := m.r.Reinstate(context.Background(), req)
	switch {
	case classes == nil && s.dead:
		m.want("reinstate", err, ok)
		s.generation++
		s.dead, s.life = false, s.generation
		for _, c := range s.classes {
			c.dead, c.generation = false, s.generation
		}
	case classes != nil && s.dead:
		m.want("reinstate a class of the dead", err, isErased)
		return
	case classes != nil && s.class(classes[0]).dead && !s.due[""].IsZero():
		m.want("reinstate a class of whom is about to be erased", err, isPending)
		return
	case classes != nil && s.class(classes[0]).dead:
		m.want("reinstate a class", err, ok)
		s.generation++
		c := s.class(classes[0])
		c.dead, c.generation = false, s.generation
	default:
		if o := outcome(err); o != isConflict && o != isUnknown {
			t.Fatalf("reinstating the living: %v", err)
		}
		return
	}
	if rec.Generation != s.generation {
		t.Fatalf("generation %d, want %d", rec.Generation, s.generation)
	}
}

func (m *model) Hold(t *rapid.T) {
	m.t = t
	hold := rapid.SampledFrom([]string{"h1", "h2"}).Draw(t, "hold")
	if rapid.IntRange(0, 4).Draw(t, "tenant") == 0 {
		_, err := m.r.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{Tenant: "acme", HoldId: hold, Reason: "test", RequestId: m.request()})
		if m.held[hold] {
			m.want("hold twice", err, isConflict)
		} else {
			m.want("hold the tenant", err, ok)
		}
		m.held[hold] = true
		return
	}
	id, s := m.pick()
	_, err := m.r.PlaceHold(context.Background(), &keydv1.PlaceHoldRequest{Tenant: "acme", SubjectId: []byte(id), HoldId: hold, Reason: "test", RequestId: m.request()})
	switch {
	case s.dead:
		m.want("hold too late", err, isErased)
	case s.holds[hold]:
		m.want("hold twice", err, isConflict)
	default:
		m.want("hold", err, ok)
		s.holds[hold] = true
	}
}

func (m *model) Release(t *rapid.T) {
	m.t = t
	hold := rapid.SampledFrom([]string{"h1", "h2"}).Draw(t, "hold")
	req := &keydv1.ReleaseHoldRequest{Tenant: "acme", HoldId: hold, Reason: "test", RequestId: m.request()}
	holds, dead := m.held, false
	if rapid.IntRange(0, 2).Draw(t, "tenant") != 0 {
		id, s := m.pick()
		req.SubjectId, holds, dead = []byte(id), s.holds, s.dead
	}
	_, err := m.r.ReleaseHold(context.Background(), req)
	switch {
	case dead:
		m.want("release of the dead", err, isErased)
	case holds[hold]:
		m.want("release", err, ok)
		delete(holds, hold)
	default:
		m.want("release of nothing", err, isUnknown)
	}
	m.noteReleases()
	if rapid.Bool().Draw(t, "at once") {
		m.work() // otherwise a hold may come before what waited goes on
	}
}

// noteReleases marks the shares that may be dropped from now on.
func (m *model) noteReleases() {
	for _, b := range m.buckets {
		for id := range b.kept {
			if !m.isHeld(m.subject(id)) {
				b.kept[id] = false
			}
		}
	}
}

// Pass lets time go by, and the background work be done.
func (m *model) Pass(t *rapid.T) {
	m.t = t
	m.r.clock.Advance(time.Duration(rapid.IntRange(1, 50).Draw(t, "hours")) * time.Hour)
	if _, err := m.r.ConfirmClock(context.Background()); err != nil {
		t.Fatal(err)
	}
	m.work()
}

func (m *model) work() {
	if err := keys.Duty(context.Background(), m.r.Keys); err != nil {
		m.t.Fatalf("background work: %v", err)
	}
	now := m.r.clock.Now()
	for _, s := range m.subjects {
		if m.isHeld(s) {
			continue
		}
		for target, due := range s.due {
			switch {
			case due.After(now):
			case target == "":
				s.kill(nil)
			default:
				s.kill([]string{target})
			}
		}
	}
	for at, b := range m.buckets {
		if b.dead || at.class != "trace" || !m.expired(at, b) {
			continue
		}
		switch {
		case b.expiring.IsZero():
			b.expiring = now
		case now.Before(b.expiring.Add(24*time.Hour)) || len(m.held) != 0:
		default:
			b.dead, b.kept = true, make(map[string]bool)
			for id, s := range m.subjects {
				if c := s.classes["trace"]; c != nil && len(c.key) != 0 && len(s.holds) != 0 {
					b.kept[id] = true
				}
			}
		}
	}
	m.noteReleases()
}

func (m *model) expired(at modelBucket, b *modelBucketState) bool {
	due := time.Unix(int64(b.end), 0).Add(keys.MaxLease + modelRetention)
	return at.class == "trace" && !m.r.clock.Now().Before(due)
}

func (m *model) Restart(t *rapid.T) {
	m.t = t
	m.r.reopen()
}

func (m *model) Turn(t *rapid.T) {
	m.t = t
	if _, err := m.r.TurnEpoch(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	m.work()
}

// Check opens every blob ever sealed.
func (m *model) Check(t *rapid.T) {
	m.t = t
	m.drained()
	queries := make([]*keydv1.BlobKeyQuery, 0, len(m.blobs))
	for _, b := range m.blobs {
		queries = append(queries, openQuery("acme", b.subject, b.class, b.key))
	}
	for part := range slices.Chunk(queries, keys.MaxBatch) {
		results, err := m.r.BlobKeys(context.Background(), part)
		if err != nil {
			t.Fatal(err)
		}
		for i, res := range results {
			b := m.blobs[i]
			s := m.subject(b.subject)
			c := s.class(b.class)
			at := modelBucket{b.class, b.key.Bucket}
			bucket := m.buckets[at]
			_, person := s.due[""]
			_, scheduled := s.due[b.class]
			want := ok
			switch kept, was := bucket.kept[b.subject]; {
			case !bytes.Equal(c.key, b.key.KeyId):
				want = isErased
			case person || scheduled:
				want = isPending
			case (bucket.dead || m.expired(at, bucket)) && !m.isHeld(s):
				want = isExpired
			case bucket.dead && !was:
				want = isExpired
			case bucket.dead && !kept && res.Err != nil:
				want = isExpired // held anew, and the share was dropped meanwhile
			}
			m.want("open "+b.subject+" "+b.class, res.Err, want)
			if res.Err == nil && !bytes.Equal(res.Key.Key, b.key.Key) {
				t.Fatal("opened with another key")
			}
			if res.Err == nil {
				m.leased(b.subject, b.class, res.Key)
			}
		}
	}
}

// modelChecks is how many histories are tried unless -rapid.checks says more:
// each makes a key store of its own.
const modelChecks = "15"

func TestModel(t *testing.T) {
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		if err := f.Value.Set(modelChecks); err != nil {
			t.Fatal(err)
		}
		defer f.Value.Set(f.DefValue)
	}
	rapid.Check(t, func(rt *rapid.T) {
		r := newRig(t)
		defer func() {
			r.close()
			os.RemoveAll(r.dir)
		}()
		r.retain("trace", day, modelRetention, keydv1.EndAction_END_ACTION_DESTROY)
		m := &model{
			r: r, t: rt, subjects: make(map[string]*modelSubject), held: make(map[string]bool),
			buckets: make(map[modelBucket]*modelBucketState), leases: make(map[modelLease]time.Time),
		}
		rt.Repeat(map[string]func(*rapid.T){
			"seal": m.Seal, "seal more": m.Seal, "destroy": m.Destroy, "cancel": m.Cancel, "reinstate": m.Reinstate,
			"hold": m.Hold, "release": m.Release, "pass": m.Pass, "pass more": m.Pass, "restart": m.Restart, "turn": m.Turn,
			"": m.Check,
		})
	})
}
