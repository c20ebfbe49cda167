package keys

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/proto/ident"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// A scheduled destruction refuses opens and seals at once, and destroys when
// it is due and no hold binds, unless it is cancelled before. What is scheduled
// stands in the subject's row; an index by due time is what the duty looks at.

const (
	// maxAhead is how far ahead a destruction may be scheduled.
	maxAhead = 366 * 24 * time.Hour
	// maxSchedules bounds what is scheduled for one subject at a time.
	maxSchedules = 16
)

// notBefore reads the time of a request; zero if it has none.
func notBefore(ts *timestamppb.Timestamp) (time.Time, error) {
	if ts == nil {
		return time.Time{}, nil
	}
	if err := ts.CheckValid(); err != nil {
		return time.Time{}, invalid("not_before", err)
	}
	return ts.AsTime().Truncate(time.Millisecond), nil
}

// planSchedule schedules what planDestroy would do now; unless it waits for
// them, not while a hold binds.
func (k *Keys) planSchedule(r Reader, q *request, due, now time.Time, waits bool) (*plan, error) {
	if due.After(now.Add(maxAhead)) {
		return nil, invalid("not_before", errors.New("is more than 366 days ahead"))
	}
	es, err := readEpochs(r)
	if err != nil {
		return nil, err
	}
	epoch, err := readEpoch(r, es.open)
	if err != nil {
		return nil, err
	}
	a, p, err := aimOf(r, q, now)
	if p != nil || err != nil {
		return p, err
	}
	if a.dead { // nothing is left to wait for
		return k.planKill(r, q, a, nil, now, func(tx Tx, index uint64) error { return q.remember(tx, index, now, false, 0) })
	}
	if !waits {
		if err := k.heldBy(a, now); err != nil {
			return nil, err
		}
	}
	subject := &a.subject
	if len(subject.Schedules) >= maxSchedules || len(subject.LedgerIndexes) >= maxEntriesPerSubject {
		return nil, fail(keydv1.Outcome_OUTCOME_EXHAUSTED, "too much is scheduled for the subject")
	}
	classes, named := a.targets()
	var lease time.Duration
	for _, sc := range classes {
		class, err := classByNumber(r, q.keys.id, sc.ClassNumber)
		if err != nil {
			return nil, err
		}
		lease = max(lease, k.longestLease(class, now))
	}
	s := q.statement(receipt.Scheduled, now)
	s.Epoch, s.Generation, s.Scope, s.Classes, s.Due = epoch.Number, a.generation, a.scope(), named, due
	s.DrainedBy = latest(a.drained(), k.drainedBy(es, now, lease))
	s.Anchor, _ = k.anchor.Domain()
	return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
		e := &storev1.Schedule{
			DueMs: due.UnixMilli(), Request: q.mac, Reason: q.reason, Generation: a.generation, LedgerIndex: index,
		}
		for _, c := range named {
			e.Classes = append(e.Classes, c.Number)
		}
		subject.Schedules = append(subject.Schedules, e)
		restate(subject)
		subject.LedgerIndexes = append(subject.LedgerIndexes, index)
		if err := tx.Put(dueKey(e.DueMs, q.keys.id, q.handle), nil); err != nil {
			return err
		}
		if err := putRow(tx, subjectKey(q.keys.id, q.handle), subject); err != nil {
			return err
		}
		return q.remember(tx, index, now, false, 0)
	}}, nil
}

// restate sets the states of what is not destroyed from what is scheduled.
func restate(s *storev1.Subject) {
	person, any := false, false
	scheduled := make(map[uint32]bool)
	for _, e := range s.Schedules {
		person = person || len(e.Classes) == 0
		for _, n := range e.Classes {
			scheduled[n] = true
		}
	}
	for _, sc := range s.Classes {
		any = any || len(sc.KeyId) != 0
		switch {
		case sc.State == storev1.LifeState_LIFE_STATE_DESTROYED:
		case scheduled[sc.ClassNumber]:
			sc.State = storev1.LifeState_LIFE_STATE_SCHEDULED
		case len(sc.KeyId) != 0:
			sc.State = storev1.LifeState_LIFE_STATE_ACTIVE
		default:
			sc.State = storev1.LifeState_LIFE_STATE_UNSPECIFIED
		}
	}
	switch {
	case s.State == storev1.LifeState_LIFE_STATE_DESTROYED:
	case person:
		s.State = storev1.LifeState_LIFE_STATE_SCHEDULED
	case any || s.State == storev1.LifeState_LIFE_STATE_ACTIVE || s.Generation > 1:
		s.State = storev1.LifeState_LIFE_STATE_ACTIVE
	default:
		s.State = storev1.LifeState_LIFE_STATE_UNSPECIFIED
	}
}

// scheduledFor says whether something is scheduled that reaches a class.
func scheduledFor(s *storev1.Subject, number uint32) bool {
	return slices.ContainsFunc(s.Schedules, func(e *storev1.Schedule) bool {
		return len(e.Classes) == 0 || slices.Contains(e.Classes, number)
	})
}

// endedSchedules returns what a destruction of these classes (none: the whole
// person) leaves nothing to do for.
func endedSchedules(s *storev1.Subject, classes map[uint32]string) []*storev1.Schedule {
	var ended []*storev1.Schedule
	for _, e := range s.Schedules {
		left := len(e.Classes) == 0 && len(classes) != 0
		for _, n := range e.Classes {
			sc := classOf(s, n)
			if _, dies := classes[n]; !dies && len(classes) != 0 && (sc == nil || sc.State != storev1.LifeState_LIFE_STATE_DESTROYED) {
				left = true
			}
		}
		if !left {
			ended = append(ended, e)
		}
	}
	return ended
}

// unschedule removes schedules from a subject and from the index by due time.
// The caller puts the subject's row.
func unschedule(tx Tx, tenant, handle id16, s *storev1.Subject, gone []*storev1.Schedule) error {
	if len(gone) == 0 {
		return nil
	}
	s.Schedules = slices.DeleteFunc(slices.Clone(s.Schedules), func(e *storev1.Schedule) bool {
		return slices.ContainsFunc(gone, func(g *storev1.Schedule) bool { return g.LedgerIndex == e.LedgerIndex })
	})
	restate(s)
	for _, g := range gone {
		if slices.ContainsFunc(s.Schedules, func(e *storev1.Schedule) bool { return e.DueMs == g.DueMs }) {
			continue
		}
		if err := tx.Delete(dueKey(g.DueMs, tenant, handle)); err != nil {
			return err
		}
	}
	return nil
}

// putLater notes the entry that an earlier one led to.
func putLater(tx Tx, earlier, later uint64) error {
	return tx.Put(laterKey(earlier), binary.BigEndian.AppendUint64(nil, later))
}

// readLater returns the entry that an earlier one led to.
func readLater(r Reader, earlier uint64) (later uint64, ok bool, err error) {
	b, err := r.Get(laterKey(earlier))
	switch {
	case errors.Is(err, ErrNotFound):
		return 0, false, nil
	case err != nil:
		return 0, false, err
	case len(b) != 8:
		return 0, false, damaged("a ledger index has another length", nil)
	}
	return binary.BigEndian.Uint64(b), true, nil
}

// ledTo returns the entry that one which scheduled a destruction led to: that
// which ended it, or the destruction of its tenant.
func ledTo(r Reader, scheduled uint64, tenant string) (later uint64, ok bool, err error) {
	if later, ok, err = readLater(r, scheduled); ok || err != nil {
		return later, ok, err
	}
	var t storev1.Tenant
	if err := getRow(r, tenantKey(tenantID(tenant)), &t); err != nil || t.State != storev1.TenantState_TENANT_STATE_FENCED {
		return 0, false, err
	}
	return t.DestroyedAt - 1, true, nil
}

// settleRequest makes the repeat of a scheduling request return the entry by
// which its subject was destroyed before it was due.
func settleRequest(tx Tx, mac []byte, index uint64) error {
	var row storev1.Request
	switch err := getRow(tx, requestKey(mac), &row); {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	row.LedgerIndex, row.AlreadyDestroyed = index, true
	return putRow(tx, requestKey(mac), &row)
}

// repeatDestroy is the plan for a destroy that was asked for before: if it was
// scheduled then, what it led to belongs to the answer.
func repeatDestroy(r Reader, row *storev1.Request) (*plan, error) {
	p := repeat(row)
	s, err := statementAt(r, row.LedgerIndex)
	if err != nil || s.Kind != receipt.Scheduled {
		return p, err
	}
	later, ok, err := ledTo(r, row.LedgerIndex, s.Tenant)
	if err != nil || !ok {
		return p, err
	}
	after, err := statementAt(r, later)
	if err != nil {
		return nil, err
	}
	if after.Kind == receipt.Cancelled {
		return nil, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the scheduled destruction was cancelled").with("field", "request_id")
	}
	p.later = &later
	return p, nil
}

// CancelDestruction calls off what is scheduled for a subject: what one
// request asked for, or all.
func (k *Keys) CancelDestruction(ctx context.Context, req *keydv1.CancelDestructionRequest) (*Recorded, error) {
	q := &request{
		kind: "cancel", tenant: req.Tenant, subject: append([]byte{}, req.SubjectId...),
		id: req.RequestId, reason: req.Reason, extra: []byte(req.DestroyRequestId),
	}
	var only []byte
	if req.DestroyRequestId != "" {
		if err := ident.RequestID(req.DestroyRequestId); err != nil {
			return nil, invalid("destroy_request_id", err)
		}
		only = requestMAC(k.requestKey, req.Tenant, req.DestroyRequestId)
	}
	if err := q.prepare(ctx, k); err != nil {
		return nil, err
	}
	var again bool
	o := &op{rows: q.rows(), check: func(r Reader, now time.Time) (*plan, error) {
		row, err := q.earlier(r)
		if err != nil {
			return nil, err
		}
		if again = row != nil; again {
			return repeat(row), nil
		}
		return planCancel(r, q, only, now)
	}}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	rec, err := k.furthest(ctx, o)
	if err != nil {
		return nil, err
	}
	rec.Again = again
	err = k.store.View(ctx, func(r Reader) error {
		classes, err := cancelled(r, q, o.index)
		if err != nil {
			return err
		}
		state, _, err := stateNow(r, q, classes)
		rec.State = publicState(state)
		return err
	})
	return rec, err
}

// cancelled returns the numbers of the classes whose destruction a request
// called off, with its first entry at index; none: the whole person's.
func cancelled(r Reader, q *request, index uint64) (classes []uint32, err error) {
	var subject storev1.Subject
	if err := getRow(r, subjectKey(q.keys.id, q.handle), &subject); err != nil {
		return nil, err
	}
	for _, i := range subject.LedgerIndexes {
		if i < index || i >= index+maxSchedules {
			continue
		}
		s, err := statementAt(r, i)
		switch {
		case err != nil:
			return nil, err
		case s.Kind != receipt.Cancelled || !bytes.Equal(s.Request, q.mac):
			return classes, nil
		case s.Scope == receipt.ScopePerson:
			return nil, nil
		}
		for _, c := range s.Classes {
			classes = append(classes, c.Number)
		}
	}
	return classes, nil
}

func planCancel(r Reader, q *request, only []byte, now time.Time) (*plan, error) {
	if _, err := openEpoch(r); err != nil {
		return nil, err
	}
	if _, err := activeTenant(r, q.tenant); err != nil {
		return nil, err
	}
	var subject storev1.Subject
	err := getRow(r, subjectKey(q.keys.id, q.handle), &subject)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	var gone []*storev1.Schedule
	for _, e := range subject.Schedules {
		if only == nil || string(only) == string(e.Request) {
			gone = append(gone, e)
		}
	}
	if len(gone) == 0 {
		if subject.State == storev1.LifeState_LIFE_STATE_DESTROYED {
			return nil, erased("the subject, too late to cancel: it", subject.DestroyedAt)
		}
		return nil, fail(keydv1.Outcome_OUTCOME_UNKNOWN, "nothing is scheduled for this subject")
	}
	p := new(plan)
	for _, e := range gone {
		s := q.statement(receipt.Cancelled, now)
		s.Generation, s.Scope = e.Generation, receipt.ScopePerson
		if len(e.Classes) != 0 {
			s.Scope = receipt.ScopeClasses
		}
		for _, n := range e.Classes {
			c, err := classByNumber(r, q.keys.id, n)
			if err != nil {
				return nil, err
			}
			s.Classes = append(s.Classes, receipt.Class{Name: c.Name, Number: n})
		}
		s.Of = &e.LedgerIndex
		p.statements = append(p.statements, s)
	}
	p.write = func(tx Tx, index uint64) error {
		for i, e := range gone {
			subject.LedgerIndexes = append(subject.LedgerIndexes, index+uint64(i))
			if err := putLater(tx, e.LedgerIndex, index+uint64(i)); err != nil {
				return err
			}
		}
		if err := unschedule(tx, q.keys.id, q.handle, &subject, gone); err != nil {
			return err
		}
		if err := putRow(tx, subjectKey(q.keys.id, q.handle), &subject); err != nil {
			return err
		}
		return q.remember(tx, index, now, false, 0)
	}
	return p, nil
}

// maxDue bounds the destructions of one run.
const maxDue = 1000

// dueSubject is one for whom something is due.
type dueSubject struct {
	name           string // of the tenant
	tenant, handle id16
}

// destroyDue carries out what is due. What a hold binds waits, and holds
// nobody else up; nor does what is damaged.
func (d *duties) destroyDue(ctx context.Context) (again bool, err error) {
	var bad damage
	due, pointless, err := d.findDue(ctx)
	if err := bad.pass(err); err != nil {
		return false, err
	}
	for batch := range slices.Chunk(pointless, sweepBatch) {
		err := d.k.update(ctx, func(tx Tx) error {
			if err := d.fence(tx); err != nil {
				return err
			}
			for _, key := range batch {
				if err := tx.Delete(key); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return false, err
		}
	}
	done := 0
	// Together they share transactions.
	for group := range slices.Chunk(due, maxGroup) {
		errs := make([]error, len(group))
		var wg sync.WaitGroup
		for i, s := range group {
			wg.Go(func() {
				for more := true; more; {
					more, errs[i] = d.destroyOne(ctx, s)
				}
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err == nil {
				done++
			} else if err := bad.pass(err); err != nil {
				return false, err
			}
		}
		if done >= maxDue {
			return true, bad.first
		}
	}
	return false, bad.first
}

// findDue lists the subjects for whom something is due that no hold binds:
// what waits for a release may be many, and costs no transaction. pointless are
// the rows of the index by which tenants that were erased since are still found.
// Both are good if the error is ErrDamaged: what is damaged is left out.
func (d *duties) findDue(ctx context.Context) (due []dueSubject, pointless [][]byte, err error) {
	k := d.k
	now := k.stated()
	tenants := make(map[id16]*storev1.Tenant)
	var bad damage
	err = k.scanAll(ctx, []byte{'D'}, nil, func(r Reader, key, _ []byte) error {
		if int64(binary.BigEndian.Uint64(key[1:])) > now.UnixMilli() {
			return errEnough
		}
		s := dueSubject{tenant: id16(key[9:]), handle: id16(key[25:])}
		t := tenants[s.tenant]
		if t == nil {
			t = new(storev1.Tenant)
			if err := getRow(r, tenantKey(s.tenant), t); err != nil {
				return bad.pass(dueOfNobody(err))
			}
			tenants[s.tenant] = t
		}
		switch {
		case t.State == storev1.TenantState_TENANT_STATE_FENCED:
			pointless = append(pointless, key)
			return nil
		case t.State != storev1.TenantState_TENANT_STATE_ACTIVE, k.holding(t.Holds, now) != nil:
			return nil
		}
		var subject storev1.Subject
		if err := getRow(r, subjectKey(s.tenant, s.handle), &subject); err != nil {
			return bad.pass(dueOfNobody(err))
		}
		s.name = t.Name
		if k.holding(subject.Holds, now) == nil && !slices.Contains(due[max(0, len(due)-1):], s) {
			due = append(due, s)
		}
		return nil
	})
	if err == nil || errors.Is(err, errEnough) {
		err = bad.first
	}
	return due, pointless, err
}

// dueOfNobody is err, of reading whom something is due for; who is missing was
// lost.
func dueOfNobody(err error) error {
	if errors.Is(err, ErrNotFound) {
		return damaged("something is due for what is not there", err)
	}
	return err
}

// errEnough ends a scan.
var errEnough = errors.New("enough")

// destroyOne carries out one thing that is due for a subject, and reports
// whether there was one.
func (d *duties) destroyOne(ctx context.Context, s dueSubject) (bool, error) {
	k := d.k
	subjectRow := string(subjectKey(s.tenant, s.handle))
	nothing := false
	o := &op{rows: []string{subjectRow}, closes: subjectRow, check: func(r Reader, now time.Time) (*plan, error) {
		if err := d.fence(r); err != nil {
			return nil, err
		}
		p, err := k.planDue(r, s.name, s.tenant, s.handle, now)
		nothing = p == nil && err == nil
		if nothing {
			return &plan{nothing: true, write: func(Tx, uint64) error { return nil }}, nil
		}
		return p, err
	}}
	err := k.record(ctx, o)
	if is(err, keydv1.Outcome_OUTCOME_HELD) || is(err, keydv1.Outcome_OUTCOME_ERASED) {
		return false, nil // since findDue looked
	}
	return err == nil && !nothing, err
}

// planDue destroys the first of a subject's schedules that is due; nil if none is.
func (k *Keys) planDue(r Reader, tenantName string, tenant, handle id16, now time.Time) (*plan, error) {
	t, err := activeTenant(r, tenantName)
	if err != nil {
		return nil, err
	}
	a := &aim{classes: make(map[uint32]string), tenant: t}
	if err := getRow(r, subjectKey(tenant, handle), &a.subject); err != nil {
		return nil, err
	}
	var first *storev1.Schedule
	for _, e := range a.subject.Schedules {
		if e.DueMs <= now.UnixMilli() && (first == nil || e.DueMs < first.DueMs) {
			first = e
		}
	}
	if first == nil {
		return nil, nil
	}
	if err := k.heldBy(a, now); err != nil {
		return nil, err
	}
	a.generation = first.Generation
	for _, n := range first.Classes {
		c, err := classByNumber(r, tenant, n)
		if err != nil {
			return nil, err
		}
		a.classes[n] = c.Name
	}
	q := &request{tenant: tenantName, subject: []byte{}, keys: &tenantKeys{name: tenantName, id: tenant}, handle: handle, mac: first.Request, reason: first.Reason}
	return k.planKill(r, q, a, []*storev1.Schedule{first}, now, func(Tx, uint64) error { return nil })
}
