package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// history drives a key store through what people do to it, and remembers what
// there is to ask about afterwards.
type history struct {
	*rig
	rt       *rapid.T
	requests int
	tenants  map[string]bool // by name; true: made after the backup
	backedUp bool

	keys []madeKey
	asks []madeRequest
}

type madeKey struct {
	tenant, subject, class string
	key                    *keydv1.BlobKey
	late                   bool // made, or its bucket was, after the backup
}

// madeRequest is a request that succeeded, to be made again.
type madeRequest struct {
	what   string
	tenant string
	again  func() (*keys.Recorded, error)
	logged bool // it has an entry of its own
}

// try makes a request, and remembers it if it succeeds.
func (h *history) try(what, tenant string, do func() (*keys.Recorded, error)) {
	size := h.LedgerSize()
	if rec, err := do(); err == nil {
		h.asks = append(h.asks, madeRequest{what, tenant, do, rec.Index >= size})
	}
}

var (
	peopleOfModel  = []string{"alice", "bob", "carol"}
	classesOfModel = []string{"memory", "trace"}
)

func (h *history) draw(what string, from []string) string {
	return rapid.SampledFrom(from).Draw(h.rt, what)
}

func (h *history) someClasses() []string {
	if rapid.Bool().Draw(h.rt, "whole person") {
		return nil
	}
	return rapid.SliceOfNDistinct(rapid.SampledFrom(classesOfModel), 1, len(classesOfModel), rapid.ID[string]).Draw(h.rt, "classes")
}

func (h *history) request() string {
	h.requests++
	return fmt.Sprint("request ", h.requests)
}

func (h *history) tenant() string {
	return h.draw("tenant", slices.Sorted(maps.Keys(h.tenants)))
}

// quiet does the duties until there is nothing left that can be done now.
func (h *history) quiet() {
	h.rt.Helper()
	for range 200 {
		again, err := h.StepDuties(context.Background())
		if err != nil {
			h.rt.Fatalf("duties: %v", err)
		}
		if !again {
			return
		}
	}
	h.rt.Fatal("the duties never end")
}

func (h *history) step() {
	ctx := context.Background()
	h.clock.Advance(time.Duration(rapid.IntRange(0, 20*60).Draw(h.rt, "minutes")) * time.Minute)
	for range rapid.IntRange(1, 3).Draw(h.rt, "steps of duty") {
		_, _ = h.StepDuties(ctx)
	}
	tenant, subject := h.tenant(), h.draw("subject", peopleOfModel)
	generation := rapid.Uint32Range(0, 3).Draw(h.rt, "generation")
	if rapid.IntRange(0, 3).Draw(h.rt, "another generation") != 0 {
		if d, err := h.DescribeSubject(ctx, tenant, []byte(subject)); err == nil {
			generation = d.Generation
		}
	}
	switch op := rapid.SampledFrom([]string{
		"seal", "seal", "seal", "seal", "destroy", "destroy", "schedule", "schedule", "cancel", "cancel", "reinstate", "reinstate",
		"hold", "hold", "release", "release", "class", "class", "tenant", "erase tenant", "turn", "retire",
	}).Draw(h.rt, "operation"); op {
	case "seal":
		q := sealQuery(tenant, subject, h.draw("class", classesOfModel))
		if rapid.Bool().Draw(h.rt, "ahead") {
			q.SealFrom = uint64(h.clock.Now().Add(time.Duration(rapid.IntRange(0, 60).Draw(h.rt, "minutes ahead")) * time.Minute).Unix())
		}
		k, err := h.ask(q)
		if err == nil {
			h.remember(madeKey{tenant, subject, q.Class, k, h.backedUp})
		}
	case "destroy", "schedule":
		req := &keydv1.DestroyKeyRequest{
			Tenant: tenant, SubjectId: []byte(subject), Classes: h.someClasses(), IfGeneration: generation,
			RequestId: h.request(), Reason: "test", WaitForHolds: rapid.Bool().Draw(h.rt, "wait for holds"),
		}
		if op == "schedule" {
			req.NotBefore = timestamppb.New(h.clock.Now().Add(time.Duration(rapid.IntRange(-1, 40).Draw(h.rt, "hours")) * time.Hour))
		}
		h.try(op, tenant, func() (*keys.Recorded, error) { return h.DestroyKey(ctx, req) })
	case "cancel":
		req := &keydv1.CancelDestructionRequest{Tenant: tenant, SubjectId: []byte(subject), RequestId: h.request(), Reason: "mistake"}
		if h.requests > 2 && rapid.Bool().Draw(h.rt, "one") {
			req.DestroyRequestId = fmt.Sprint("request ", rapid.IntRange(1, h.requests-1).Draw(h.rt, "which"))
		}
		h.try(op, tenant, func() (*keys.Recorded, error) { return h.CancelDestruction(ctx, req) })
	case "reinstate":
		req := &keydv1.ReinstateRequest{
			Tenant: tenant, SubjectId: []byte(subject), Classes: h.someClasses(), IfGeneration: generation,
			RequestId: h.request(), Reason: "again",
		}
		h.try(op, tenant, func() (*keys.Recorded, error) { return h.Reinstate(ctx, req) })
	case "hold":
		req := &keydv1.PlaceHoldRequest{
			Tenant: tenant, SubjectId: []byte(subject), HoldId: h.draw("hold", []string{"one", "two"}), RequestId: h.request(), Reason: "court",
		}
		switch rapid.IntRange(0, 5).Draw(h.rt, "kind of hold") {
		case 0:
			req.SubjectId = nil
		case 1:
			req.End = timestamppb.New(h.clock.Now().Add(30 * time.Hour))
		}
		h.try(op, tenant, func() (*keys.Recorded, error) { return h.PlaceHold(ctx, req) })
	case "release":
		req := &keydv1.ReleaseHoldRequest{
			Tenant: tenant, SubjectId: []byte(subject), HoldId: h.draw("hold", []string{"one", "two"}), RequestId: h.request(), Reason: "court",
		}
		if rapid.IntRange(0, 2).Draw(h.rt, "of the tenant") == 0 {
			req.SubjectId = nil
		}
		h.try(op, tenant, func() (*keys.Recorded, error) { return h.ReleaseHold(ctx, req) })
	case "class":
		c := class(h.draw("class", append(classesOfModel, "note")),
			time.Duration(rapid.IntRange(1, 24).Draw(h.rt, "width"))*time.Hour, time.Duration(rapid.IntRange(0, 60).Draw(h.rt, "lease"))*time.Second)
		if rapid.Bool().Draw(h.rt, "retention") {
			c.Retention = durationpb.New(time.Duration(rapid.IntRange(1, 30).Draw(h.rt, "hours")) * time.Hour)
			c.ApprovedBy = "dpo"
			if rapid.IntRange(0, 3).Draw(h.rt, "deny only") == 0 {
				c.EndAction = keydv1.EndAction_END_ACTION_DENY
			}
		}
		_, _ = h.PutClass(ctx, tenant, c)
	case "tenant":
		name := h.draw("new tenant", []string{"beta", "gamma"})
		if _, err := h.CreateTenant(ctx, name, nil); err == nil {
			h.tenants[name] = h.backedUp
		}
	case "erase tenant":
		if rapid.IntRange(0, 3).Draw(h.rt, "really") != 0 {
			return
		}
		req := &keydv1.DestroyTenantRequest{Tenant: tenant, RequestId: h.request(), Reason: "left"}
		h.try(op, tenant, func() (*keys.Recorded, error) { return h.DestroyTenant(ctx, req) })
	case "turn":
		if _, err := h.TurnEpoch(ctx, 0); err != nil {
			h.rt.Fatal(err)
		}
		for range rapid.IntRange(1, 12).Draw(h.rt, "steps of duty") {
			if _, err := h.StepDuties(ctx); err != nil {
				h.rt.Fatal(err)
			}
		}
	case "retire":
		for range 4 {
			h.clock.Advance(90 * time.Minute)
			for range rapid.IntRange(1, 6).Draw(h.rt, "steps of duty") {
				if _, err := h.StepDuties(ctx); err != nil {
					h.rt.Fatal(err)
				}
			}
		}
	}
}

func (h *history) remember(k madeKey) {
	for _, old := range h.keys {
		if bytes.Equal(old.key.KeyId, k.key.KeyId) && old.key.Bucket == k.key.Bucket {
			return
		}
	}
	h.keys = append(h.keys, k)
}

// answers are what a key store says to everything that may be asked.
type answers struct {
	opens    []string
	subjects map[string]*keydv1.DescribeSubjectResponse
	failed   map[string]string // subjects that cannot be described
	lists    map[string]string // of whole tenants
}

func (h *history) ask1(k madeKey) string {
	got, err := h.ask(openQuery(k.tenant, k.subject, k.class, k.key))
	if err != nil {
		return outcome(err).String()
	}
	if !bytes.Equal(got.Key, k.key.Key) {
		return "another key"
	}
	return "opens"
}

func (h *history) answers() *answers {
	ctx := context.Background()
	a := &answers{subjects: make(map[string]*keydv1.DescribeSubjectResponse), failed: make(map[string]string), lists: make(map[string]string)}
	for _, k := range h.keys {
		a.opens = append(a.opens, h.ask1(k))
	}
	for _, tenant := range slices.Sorted(maps.Keys(h.tenants)) {
		for _, s := range peopleOfModel {
			d, err := h.DescribeSubject(ctx, tenant, []byte(s))
			if err != nil {
				a.failed[tenant+"/"+s] = outcome(err).String()
				continue
			}
			slices.SortFunc(d.Classes, func(x, y *keydv1.ClassState) int { return strings.Compare(x.Class, y.Class) })
			a.subjects[tenant+"/"+s] = d
		}
		// Evidence, lost tenants' too.
		entries, _, err := h.ListReceipts(ctx, tenant, nil, 0, 1000)
		if err != nil {
			h.rt.Fatal(err)
		}
		var b strings.Builder
		for _, e := range entries {
			fmt.Fprintf(&b, "%d %s\n", e.LedgerIndex, e.Statement)
		}
		a.lists[tenant] = b.String()
		if holds, err := h.Holds(ctx, tenant, nil); err == nil {
			a.lists["holds "+tenant] = fmt.Sprint(holds)
		} else {
			a.lists["holds "+tenant] = outcome(err).String()
		}
	}
	return a
}

// TestReplayedHistory: whatever happened before a backup and after it, the
// restored store answers, once it is replayed, as the one that was lost; but
// for keys that the backup lacks, which are erased where they were erased and
// unknown otherwise, and never another key under the same name.
func TestReplayedHistory(t *testing.T) {
	replayed := make(map[receipt.Kind]uint64)
	outcomes := make(map[string]int)
	defer func() { t.Logf("replayed %v; keys after it: %v", replayed, outcomes) }()
	rapid.Check(t, func(rt *rapid.T) {
		r, store, _ := newMemoryRig(t)
		defer r.close()
		h := &history{rig: r, rt: rt, tenants: map[string]bool{"acme": false}}
		for range rapid.IntRange(0, 40).Draw(rt, "before") {
			h.step()
		}
		rows := store.copyRows()
		h.backedUp = true
		for range rapid.IntRange(0, 60).Draw(rt, "after") {
			h.step()
		}
		h.quiet()
		want, requests := h.answers(), h.repeat()
		lost := h.LedgerSize()
		r.close()

		r.store = storeOf(rows)
		if err := r.serve(); err == nil {
			if r.LedgerSize() != lost {
				rt.Fatalf("a store with %d of %d entries serves", r.LedgerSize(), lost)
			}
			r.Keys.Close()
			r.Keys = nil
		} else if !errors.Is(err, ledger.ErrBehind) && !errors.Is(err, keys.ErrRootDestroyed) && !errors.Is(err, keys.ErrRootRetiring) {
			rt.Fatalf("a restored store: %v", err)
		}
		if err := keys.MarkRestored(context.Background(), r.store, r.clock.Now()); err != nil {
			rt.Fatal(err)
		}
		done, err := keys.Replay(context.Background(), r.config(), keys.ReplayOptions{})
		if errors.Is(err, keys.ErrRootRetiring) {
			done, err = keys.Replay(context.Background(), r.config(), keys.ReplayOptions{CallOff: true})
		}
		if errors.Is(err, keys.ErrRootDestroyed) {
			return // and nothing else would be right
		}
		if err != nil {
			rt.Fatalf("replay: %v", err)
		}
		for kind, n := range done.Missing {
			replayed[kind] += n
		}
		if err := r.serve(); err != nil {
			rt.Fatalf("after the replay of %s: %v", done.Kinds(), err)
		}
		// Much may have happened since the ledger's newest entry without one.
		if _, err := r.ConfirmClock(context.Background()); err != nil {
			rt.Fatal(err)
		}
		got := h.answers()
		for _, o := range got.opens {
			outcomes[o]++
		}
		h.compare(want, got)
		size := h.LedgerSize()
		h.compareRequests(requests, h.repeat())
		if h.LedgerSize() != size {
			rt.Fatalf("repeated requests added %d entries", h.LedgerSize()-size)
		}
		// The epochs go on, and so do the answers.
		h.quiet()
		epochs, _, err := r.Epochs(context.Background())
		if err != nil {
			rt.Fatal(err)
		}
		for _, e := range epochs {
			if e.State == keydv1.EpochState_EPOCH_STATE_DRAINING {
				rt.Fatalf("epoch %d does not drain: %s", e.Number, e.WaitingFor)
			}
		}
		got = h.answers()
		h.compare(want, got)
		// Nor does a seal bring a dead key back, or another under its name.
		for i, k := range h.keys {
			_, _ = h.ask(sealQuery(k.tenant, k.subject, k.class))
			if now := h.ask1(k); now != got.opens[i] {
				rt.Fatalf("a key of %s that was %s is %s after a seal", k.subject, got.opens[i], now)
			}
		}
	})
}

// TestReplayedNewerBackup: a backup is restored and lived on with, and then a
// newer one of the lost store turns up. It is replayed up to what was logged
// meanwhile, and whatever was destroyed meanwhile is destroyed in it: keys too
// that were lost then, and that no statement names.
func TestReplayedNewerBackup(t *testing.T) {
	found := make(map[string]int)
	defer func() { t.Logf("keys that were lost, and came back: %v", found) }()
	rapid.Check(t, func(rt *rapid.T) {
		r, store, _ := newMemoryRig(t)
		defer r.close()
		h := &history{rig: r, rt: rt, tenants: map[string]bool{"acme": false}}
		live := func(most int, what string) {
			for range rapid.IntRange(0, most).Draw(rt, what) {
				h.step()
			}
		}
		restore := func(rows map[string][]byte) (serves bool) {
			r.close()
			r.store = storeOf(rows)
			if err := keys.MarkRestored(context.Background(), r.store, r.clock.Now()); err != nil {
				rt.Fatal(err)
			}
			_, err := keys.Replay(context.Background(), r.config(), keys.ReplayOptions{CallOff: true})
			if errors.Is(err, keys.ErrRootDestroyed) {
				return false
			}
			if err != nil {
				rt.Fatalf("replay: %v", err)
			}
			if err := r.serve(); err != nil {
				rt.Fatal(err)
			}
			if _, err := r.ConfirmClock(context.Background()); err != nil {
				rt.Fatal(err)
			}
			return true
		}
		live(20, "before")
		older := store.copyRows()
		live(20, "between")
		newer := store.copyRows()
		if !restore(older) {
			return
		}
		h.backedUp = true
		live(30, "after")
		h.quiet()
		requests, want := h.repeat(), h.answers()
		if !restore(newer) {
			return
		}
		got := h.answers()
		for i, k := range h.keys {
			a, b := want.opens[i], got.opens[i]
			lost := a == isUnknown.String() || a == isUnavail.String()
			switch {
			case lost && b == "opens" && destroyed(want.subjects[k.tenant+"/"+k.subject], k.class):
				rt.Fatalf("a key of %s/%s/%s opens, which was destroyed while it was lost", k.tenant, k.subject, k.class)
			case lost:
				found[b]++
			case a == b, h.tenants[k.tenant] && b == isUnavail.String():
			case k.late && a != isErased.String() && b == isUnknown.String():
			case k.late && a == "opens" && b == isExpired.String(): // see compare
			case a == isExpired.String() && b == "opens" && h.held(k.tenant, k.subject):
				// Its bucket was lost, and would have been dead by now; in the
				// newer backup a hold has kept the share.
				found["held"]++
			default:
				rt.Fatalf("a key of %s/%s/%s (late: %v): %s, was %s", k.tenant, k.subject, k.class, k.late, b, a)
			}
		}
		for name, a := range want.subjects {
			b := got.subjects[name]
			if gone := keydv1.SubjectState_SUBJECT_STATE_DESTROYED; b != nil && ((a.State == gone) != (b.State == gone) || a.Generation != b.Generation && a.State == gone) {
				rt.Fatalf("%s is\n%v\nwas\n%v", name, b, a)
			}
		}
		again := h.repeat()
		for i, m := range h.asks {
			if requests[i] == isUnavail.String() {
				again[i] = requests[i] // of a tenant that was lost
			}
			if h.tenants[m.tenant] {
				again[i] = requests[i]
			}
		}
		h.compareRequests(requests, again)
	})
}

// held says whether a hold binds a subject.
func (h *history) held(tenant, subject string) bool {
	h.rt.Helper()
	for _, who := range [][]byte{[]byte(subject), nil} {
		holds, err := h.Holds(context.Background(), tenant, who)
		if err != nil {
			h.rt.Fatal(err)
		}
		for _, hold := range holds {
			if hold.EndMs == 0 || hold.EndMs > h.clock.Now().UnixMilli() {
				return true
			}
		}
	}
	return false
}

// destroyed says whether a class of a subject is.
func destroyed(d *keydv1.DescribeSubjectResponse, class string) bool {
	return d.GetState() == keydv1.SubjectState_SUBJECT_STATE_DESTROYED ||
		slices.ContainsFunc(d.GetClasses(), func(c *keydv1.ClassState) bool {
			return c.Class == class && c.State == keydv1.SubjectState_SUBJECT_STATE_DESTROYED
		})
}

func (h *history) compare(want, got *answers) {
	h.rt.Helper()
	for i, k := range h.keys {
		a, b := want.opens[i], got.opens[i]
		switch {
		case a == b:
		case h.tenants[k.tenant] && b == isUnavail.String():
		case k.late && a != isErased.String() && b == isUnknown.String():
		case k.late && a == "opens" && b == isExpired.String():
			// It opened by a share that a hold kept; that is lost with the bucket.
		default:
			h.rt.Fatalf("a key of %s/%s/%s (late: %v): %s, was %s", k.tenant, k.subject, k.class, k.late, b, a)
		}
	}
	late := make(map[string]bool)
	for _, k := range h.keys {
		late[k.tenant+"/"+k.subject] = late[k.tenant+"/"+k.subject] || k.late
	}
	for name, a := range want.subjects {
		b := got.subjects[name]
		if b == nil {
			tenant, _, _ := strings.Cut(name, "/")
			if !h.tenants[tenant] || got.failed[name] != isUnavail.String() {
				h.rt.Fatalf("%s: %s", name, got.failed[name])
			}
			continue
		}
		if late[name] {
			b = withoutLost(a, b)
			a = withoutLost(a, a)
		}
		if !proto.Equal(a, b) {
			h.rt.Fatalf("%s is\n%v\nwas\n%v", name, b, a)
		}
	}
	for what, a := range want.lists {
		b := got.lists[what]
		if tenant, isHolds := strings.CutPrefix(what, "holds "); isHolds && h.tenants[tenant] && b == isUnavail.String() {
			continue
		}
		if !strings.HasPrefix(b, a) { // classes may have begun new buckets since
			h.rt.Fatalf("%s:\n%s\nwas\n%s", what, b, a)
		}
	}
}

// withoutLost leaves out what a store cannot know that lacks some keys of d,
// which is of the store that had them: that they live.
func withoutLost(full, d *keydv1.DescribeSubjectResponse) *keydv1.DescribeSubjectResponse {
	d = proto.Clone(d).(*keydv1.DescribeSubjectResponse)
	d.Classes = slices.DeleteFunc(d.Classes, func(c *keydv1.ClassState) bool {
		return c.State != keydv1.SubjectState_SUBJECT_STATE_DESTROYED && len(c.DeadKeyIds) == 0
	})
	for _, c := range d.Classes {
		if c.State != keydv1.SubjectState_SUBJECT_STATE_DESTROYED {
			c.State, c.KeyId = keydv1.SubjectState_SUBJECT_STATE_UNSPECIFIED, nil
		}
	}
	if d.State != keydv1.SubjectState_SUBJECT_STATE_DESTROYED {
		d.State, d.Generation = keydv1.SubjectState_SUBJECT_STATE_UNSPECIFIED, 0
	}
	return d
}

// repeat makes every request that succeeded again, and returns the receipts or
// outcomes.
func (h *history) repeat() []string {
	var all []string
	for _, m := range h.asks {
		rec, err := m.again()
		if err != nil {
			all = append(all, outcome(err).String())
			continue
		}
		all = append(all, string(rec.Receipt))
	}
	return all
}

func (h *history) compareRequests(want, got []string) {
	h.rt.Helper()
	for i, m := range h.asks {
		switch {
		case got[i] == want[i]:
		case h.tenants[m.tenant] && got[i] == isUnavail.String():
		case !m.logged: // it found everything done already, of which no entry tells
		default:
			h.rt.Fatalf("%s again: %.200s\nwas %.200s", m.what, got[i], want[i])
		}
	}
}
