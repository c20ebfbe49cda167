package keys

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"lethe/proto/ident"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// maxHolds bounds the holds on one subject or tenant.
const maxHolds = 64

// holdRequest is the part that placing and releasing share.
func (k *Keys) holdRequest(ctx context.Context, kind, tenant string, subject []byte, hold, id, reason string, end time.Time) (*request, error) {
	if err := ident.HoldID(hold); err != nil {
		return nil, invalid("hold_id", err)
	}
	q := &request{kind: kind, tenant: tenant, id: id, reason: reason, extra: holdExtra(hold, end)}
	if len(subject) != 0 {
		q.subject = slices.Clone(subject)
	}
	return q, q.prepare(ctx, k)
}

// holdExtra is what tells two requests about holds apart.
func holdExtra(hold string, end time.Time) []byte {
	extra := append([]byte(hold), 0)
	if !end.IsZero() {
		extra = binary.BigEndian.AppendUint64(extra, uint64(end.UnixMilli()))
	}
	return extra
}

// holdChange changes a list of holds, and completes the statement about it.
type holdChange func(holds []*storev1.Hold, s *receipt.Statement, now time.Time) ([]*storev1.Hold, error)

// PlaceHold binds a subject, known or not, or a whole tenant.
func (k *Keys) PlaceHold(ctx context.Context, req *keydv1.PlaceHoldRequest) (*Recorded, error) {
	var end time.Time
	if req.End != nil {
		if err := req.End.CheckValid(); err != nil {
			return nil, invalid("end", err)
		}
		end = req.End.AsTime().Truncate(time.Millisecond)
	}
	q, err := k.holdRequest(ctx, "place-hold", req.Tenant, req.SubjectId, req.HoldId, req.RequestId, req.Reason, end)
	if err != nil {
		return nil, err
	}
	return k.recordHold(ctx, q, receipt.HoldPlaced, req.HoldId, k.placing(req.HoldId, req.Reason, q.principal, end))
}

func (k *Keys) placing(id, reason, principal string, end time.Time) holdChange {
	return func(holds []*storev1.Hold, s *receipt.Statement, now time.Time) ([]*storev1.Hold, error) {
		s.Hold = id
		h := &storev1.Hold{Id: id, Reason: reason, Principal: principal, PlacedMs: now.UnixMilli()}
		if !end.IsZero() {
			if !end.After(now) {
				return nil, invalid("end", errors.New("is over already"))
			}
			h.EndMs, s.HoldEnd = end.UnixMilli(), end
		}
		// Holds that have ended make room, and free their ids.
		holds = slices.DeleteFunc(slices.Clone(holds), func(h *storev1.Hold) bool {
			return !binds(h, k.holdTime(now))
		})
		for _, other := range holds {
			if other.Id == h.Id {
				return nil, fail(keydv1.Outcome_OUTCOME_CONFLICT, "a hold with this id binds already").with("hold", h.Id)
			}
		}
		if len(holds) >= maxHolds {
			return nil, fail(keydv1.Outcome_OUTCOME_EXHAUSTED, "too many holds")
		}
		return append(holds, h), nil
	}
}

// ReleaseHold ends a hold.
func (k *Keys) ReleaseHold(ctx context.Context, req *keydv1.ReleaseHoldRequest) (*Recorded, error) {
	q, err := k.holdRequest(ctx, "release-hold", req.Tenant, req.SubjectId, req.HoldId, req.RequestId, req.Reason, time.Time{})
	if err != nil {
		return nil, err
	}
	// What waits for it goes on by itself, also where the answer is lost.
	defer k.duties.ofSubjects.rouse()
	return k.recordHold(ctx, q, receipt.HoldReleased, req.HoldId, releasing(req.HoldId))
}

func releasing(id string) holdChange {
	return func(holds []*storev1.Hold, s *receipt.Statement, _ time.Time) ([]*storev1.Hold, error) {
		s.Hold = id
		rest := slices.DeleteFunc(slices.Clone(holds), func(h *storev1.Hold) bool { return h.Id == id })
		if len(rest) == len(holds) {
			return nil, unknown("the hold").with("hold", id)
		}
		return rest, nil
	}
}

// noteHolds keeps the index of held subjects, and tells those who must not
// miss a change that there was one.
func noteHolds(tx Tx, tenant, handle id16, holds []*storev1.Hold) error {
	var changes storev1.Holders
	if err := getRow(tx, holdersKey(tenant), &changes); err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	changes.Changes++
	if err := putRow(tx, holdersKey(tenant), &changes); err != nil {
		return err
	}
	if len(holds) == 0 {
		return tx.Delete(heldKey(tenant, handle))
	}
	var row storev1.HeldSubject
	for _, h := range holds {
		row.UntilMs = max(row.UntilMs, h.EndMs)
	}
	for _, h := range holds {
		if h.EndMs == 0 {
			row.UntilMs = 0
		}
	}
	return putRow(tx, heldKey(tenant, handle), &row)
}

// recordHold changes the holds of a subject or of a tenant, in the row that
// every destruction reads.
func (k *Keys) recordHold(ctx context.Context, q *request, kind receipt.Kind, hold string, change holdChange) (*Recorded, error) {
	// Shares of buckets that are just being destroyed are kept by the hold
	// itself, which needs the KEKs at hand. An erased tenant has none, and can
	// only be answered as before.
	if q.subject != nil && kind == receipt.HoldPlaced {
		if err := k.holdKEKs(ctx, q.keys); err != nil && !is(err, keydv1.Outcome_OUTCOME_ERASED) {
			return nil, err
		}
	}
	rows := q.rows()
	if q.subject != nil {
		rows = append(rows, string(holdersKey(q.keys.id)))
	}
	var again bool
	o := &op{rows: rows, alone: q.subject == nil}
	o.check = func(r Reader, now time.Time) (*plan, error) {
		row, err := q.earlier(r)
		if err != nil {
			return nil, err
		}
		if again = row != nil; again {
			return repeat(row), nil
		}
		return k.planHold(r, q, kind, now, change)
	}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	rec, err := k.recorded(ctx, o)
	if err != nil {
		return nil, err
	}
	rec.Again = again
	err = k.store.View(ctx, func(r Reader) (err error) {
		rec.Binds, err = k.holds(r, q, hold)
		return err
	})
	return rec, err
}

// holds says whether a hold binds now, among those on whom a request is about.
func (k *Keys) holds(r Reader, q *request, id string) (bool, error) {
	t, err := activeTenant(r, q.tenant)
	if err != nil {
		if is(err, keydv1.Outcome_OUTCOME_ERASED) {
			return false, nil
		}
		return false, err
	}
	list := t.Holds
	if q.subject != nil {
		var s storev1.Subject
		if err := getRow(r, subjectKey(q.keys.id, q.handle), &s); err != nil && !errors.Is(err, ErrNotFound) {
			return false, err
		}
		list = s.Holds
	}
	now := k.holdTime(k.now())
	return slices.ContainsFunc(list, func(h *storev1.Hold) bool { return h.Id == id && binds(h, now) }), nil
}

func (k *Keys) planHold(r Reader, q *request, kind receipt.Kind, now time.Time, change holdChange) (*plan, error) {
	es, err := readEpochs(r)
	if err != nil {
		return nil, err
	}
	tenant, err := activeTenant(r, q.tenant)
	if err != nil {
		return nil, err
	}
	s := q.statement(kind, now)
	if q.subject == nil {
		s.Scope = receipt.ScopeTenant
		holds, err := change(tenant.Holds, s, now)
		if err != nil {
			return nil, err
		}
		return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
			setIndex(holds, s.Hold, index)
			tenant.Holds = holds
			if err := putRow(tx, tenantKey(q.keys.id), tenant); err != nil {
				return err
			}
			return q.remember(tx, index, now, false, 0)
		}}, nil
	}
	var subject storev1.Subject
	err = getRow(r, subjectKey(q.keys.id, q.handle), &subject)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	if subject.State == storev1.LifeState_LIFE_STATE_DESTROYED {
		return nil, erased("the subject, too late for a hold: it", subject.DestroyedAt)
	}
	if len(subject.LedgerIndexes) >= maxEntriesPerSubject && kind == receipt.HoldPlaced {
		return nil, fail(keydv1.Outcome_OUTCOME_EXHAUSTED, "the subject has had too many holds")
	}
	s.Scope = receipt.ScopePerson
	holds, err := change(subject.Holds, s, now)
	if err != nil {
		return nil, err
	}
	var shares []newRow
	if kind == receipt.HoldPlaced {
		if shares, err = k.sharesOfMaterialising(r, es, tenant, q.keys, q.handle, &subject); err != nil {
			return nil, err
		}
	}
	return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
		setIndex(holds, s.Hold, index)
		subject.Holds = holds
		if err := noteHolds(tx, q.keys.id, q.handle, holds); err != nil {
			return err
		}
		for _, s := range shares {
			if err := tx.Put(s.key, s.value); err != nil {
				return err
			}
		}
		subject.Generation = max(subject.Generation, 1)
		subject.LedgerIndexes = append(subject.LedgerIndexes, index)
		if err := putRow(tx, subjectKey(q.keys.id, q.handle), &subject); err != nil {
			return err
		}
		return q.remember(tx, index, now, false, 0)
	}}, nil
}

// setIndex records where a newly placed hold stands in the ledger.
func setIndex(holds []*storev1.Hold, id string, index uint64) {
	for _, h := range holds {
		if h.Id == id {
			h.LedgerIndex = index
		}
	}
}

// Holds lists the holds on a subject, or on the tenant itself if subject is empty.
func (k *Keys) Holds(ctx context.Context, tenant string, subject []byte) ([]*storev1.Hold, error) {
	if err := ident.Tenant(tenant); err != nil {
		return nil, invalid("tenant", err)
	}
	if len(subject) != 0 {
		if err := ident.Subject(string(subject)); err != nil {
			return nil, invalid("subject_id", err)
		}
	}
	t, err := k.ring.get(ctx, tenant)
	if err != nil {
		return nil, err
	}
	var holds []*storev1.Hold
	err = k.store.View(ctx, func(r Reader) error {
		row, err := activeTenant(r, tenant)
		if err != nil {
			return err
		}
		if len(subject) == 0 {
			holds = row.Holds
			return nil
		}
		var s storev1.Subject
		err = getRow(r, subjectKey(t.id, t.handle(subject)), &s)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		holds = s.Holds
		return err
	})
	return holds, err
}
