package keys

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// apply makes the rows what the statement made them.
func (p *replay) apply(tx Tx, it item) error {
	s := it.s
	if s.Tenant != "" {
		if err := tx.Put(receiptIndexKey(tenantID(s.Tenant), it.index), nil); err != nil {
			return err
		}
	}
	switch s.Kind {
	case receipt.TenantCreated:
		return p.tenantCreated(tx, s)
	case receipt.ClassSet:
		return p.classSet(tx, s)
	case receipt.Destroyed, receipt.Reinstated, receipt.HoldPlaced, receipt.HoldReleased:
		return p.subjectChanged(tx, it)
	case receipt.EpochOpened, receipt.EpochDraining, receipt.EpochDrained, receipt.Sanitised,
		receipt.EpochRetiring, receipt.EpochCancelled, receipt.EpochClosed:
		return p.epochChanged(tx, it)
	}
	return fmt.Errorf("%w: this version does not know how", ErrReplay)
}

// tenantCreated keeps a name from being used again. Its keys are lost: had the
// store had them, it would have had the statement.
func (p *replay) tenantCreated(tx Tx, s *receipt.Statement) error {
	if err := absentTenant(tx, s.Tenant); err != nil {
		return err
	}
	return putRow(tx, tenantKey(tenantID(s.Tenant)), &storev1.Tenant{
		Name: s.Tenant, State: storev1.TenantState_TENANT_STATE_LOST, PseudonymCheck: s.PseudonymCheck, NextClass: 1,
	})
}

func (p *replay) classSet(tx Tx, s *receipt.Statement) error {
	id, stated := tenantID(s.Tenant), s.Classes[0]
	var t storev1.Tenant
	if err := getRow(tx, tenantKey(id), &t); err != nil {
		return err
	}
	row := new(storev1.Class)
	switch err := getRow(tx, classKey(id, classHash(stated.Name)), row); {
	case errors.Is(err, ErrNotFound):
		row.Name, row.Number, row.LeaseMs = stated.Name, stated.Number, s.LeaseMS
	case err != nil:
		return err
	case row.Number != stated.Number:
		return fmt.Errorf("%w: the class has another number", ErrReplay)
	}
	setLease(row, s.LeaseMS, s.Time)
	row.RetentionS = s.RetentionS
	row.BucketWidthS, row.WidthFromS = s.BucketWidthS, s.WidthFromS
	row.NextBucketWidthS, row.NextWidthFromS = s.NextBucketWidthS, s.NextWidthFromS
	if err := putClass(tx, id, row); err != nil {
		return err
	}
	if t.NextClass > stated.Number {
		return nil
	}
	t.NextClass = stated.Number + 1
	return putRow(tx, tenantKey(id), &t)
}

// subjectChanged makes the request that the statement answered once more, and
// sees whether it comes to the same.
func (p *replay) subjectChanged(tx Tx, it item) error {
	s := it.s
	var tenant storev1.Tenant
	if err := getRow(tx, tenantKey(tenantID(s.Tenant)), &tenant); err != nil {
		return err
	}
	q := &request{
		tenant: s.Tenant, reason: s.Reason, mac: s.Request,
		keys: &tenantKeys{name: s.Tenant, id: tenantID(s.Tenant)},
	}
	if s.Handle != nil {
		q.subject, q.handle = []byte{}, id16(s.Handle)
	}
	for _, c := range s.Classes {
		q.classes = append(q.classes, c.Name)
	}
	slices.Sort(q.classes)
	if tenant.State == storev1.TenantState_TENANT_STATE_LOST {
		return p.ofLost(tx, it, q)
	}

	var made *plan
	var err error
	switch s.Kind {
	case receipt.Destroyed:
		q.kind, q.ifGeneration = "destroy", s.Generation
		q.digest = q.sum()
		if err := p.loseKeys(tx, s, q); err != nil {
			return err
		}
		made, err = p.k.planDestroy(tx, q, s.Time)
	case receipt.Reinstated:
		q.kind = "reinstate"
		if q.ifGeneration, err = p.reinstatedFrom(tx, s, q); err != nil {
			return err
		}
		q.digest = q.sum()
		made, _, err = planReinstate(tx, q, s.Time)
	case receipt.HoldPlaced:
		q.kind, q.extra = "place-hold", holdExtra(s.Hold, s.HoldEnd)
		q.digest = q.sum()
		made, err = p.k.planHold(tx, q, s.Kind, s.Time, placing(s.Hold, s.Reason, s.HoldEnd))
	case receipt.HoldReleased:
		q.kind, q.extra = "release-hold", holdExtra(s.Hold, time.Time{})
		q.digest = q.sum()
		made, err = p.k.planHold(tx, q, s.Kind, s.Time, releasing(s.Hold))
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReplay, err)
	}
	if err := sameEffect(made, s); err != nil {
		return err
	}
	if err := made.write(tx, it.index); err != nil {
		return err
	}
	return markReplayed(tx, q)
}

// sameEffect compares what was planned with what was stated. What a statement
// says beside its effect (dates, which depend on settings, the anchor, the
// epoch) is taken as stated.
func sameEffect(made *plan, s *receipt.Statement) error {
	if len(made.statements) != 1 {
		return fmt.Errorf("%w: nothing was left to do", ErrReplay)
	}
	again := *made.statements[0]
	again.DrainedBy, again.FinalBy, again.FinalBasis = s.DrainedBy, s.FinalBy, s.FinalBasis
	again.Epoch, again.Anchor, again.Of = s.Epoch, s.Anchor, s.Of
	if len(again.DeadKeys) == 0 {
		again.Existed = s.Existed
	}
	a, err := again.Encode()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReplay, err)
	}
	b, err := s.Encode()
	if err != nil {
		return err
	}
	if !bytes.Equal(a, b) {
		return fmt.Errorf("%w: it would come to something else", ErrReplay)
	}
	return nil
}

// markReplayed notes in a request's row that its digest is of the statement.
func markReplayed(tx Tx, q *request) error {
	if len(q.mac) == 0 {
		return nil
	}
	var row storev1.Request
	if err := getRow(tx, requestKey(q.mac), &row); err != nil {
		return err
	}
	row.FromLedger = true
	return putRow(tx, requestKey(q.mac), &row)
}

// isReplayed says whether a request is the one that a replayed row is of. Its
// statement names the classes that were destroyed; the request may have named
// others besides, which were destroyed already.
func (q *request) isReplayed(r Reader, row *storev1.Request) (bool, error) {
	if !row.FromLedger || len(q.classes) == 0 {
		return false, nil
	}
	e, err := ledger.ReadEntry(r, row.LedgerIndex)
	if err != nil {
		return false, err
	}
	s, err := receipt.ParseStatement(e.Statement)
	if err != nil {
		return false, damaged("a ledger entry does not parse", err)
	}
	first := *q
	first.classes = nil
	for _, c := range s.Classes {
		if !slices.Contains(q.classes, c.Name) {
			return false, nil
		}
		first.classes = append(first.classes, c.Name)
	}
	slices.Sort(first.classes)
	sum := first.sum()
	return len(first.classes) != 0 && bytes.Equal(row.Digest, sum[:]), nil
}

// loseKeys puts the keys that a statement destroyed and that this store never
// had into the subject's row, as keys without a wrapped row: so they are
// destroyed as others are, and their ids are dead.
func (p *replay) loseKeys(tx Tx, s *receipt.Statement, q *request) error {
	if len(s.DeadKeys) == 0 {
		return nil
	}
	es, err := readEpochs(tx)
	if err != nil {
		return err
	}
	var subject storev1.Subject
	if err := getRow(tx, subjectKey(q.keys.id, q.handle), &subject); err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	changed := false
	for _, d := range s.DeadKeys {
		sc := classOf(&subject, d.ClassNumber)
		switch {
		case sc == nil:
			sc = &storev1.SubjectClass{ClassNumber: d.ClassNumber}
			subject.Classes = append(subject.Classes, sc)
		case bytes.Equal(sc.KeyId, d.KeyID[:]):
			continue
		case len(sc.KeyId) != 0:
			return fmt.Errorf("%w: another key lives in the place of the one that was destroyed", ErrReplay)
		}
		sc.State, sc.Generation, sc.KeyId = storev1.LifeState_LIFE_STATE_ACTIVE, d.Generation, bytes.Clone(d.KeyID[:])
		if err := putRow(tx, wrappedDEKKey(es.open, q.keys.id, q.handle, d.KeyID[:]), &storev1.Wrapped{Dead: true}); err != nil {
			return err
		}
		if err := putOwner(tx, q, d); err != nil {
			return err
		}
		changed = true
	}
	if !changed {
		return nil
	}
	subject.Generation = max(subject.Generation, 1)
	if subject.State == storev1.LifeState_LIFE_STATE_UNSPECIFIED {
		subject.State = storev1.LifeState_LIFE_STATE_ACTIVE
	}
	return putRow(tx, subjectKey(q.keys.id, q.handle), &subject)
}

// putOwner remembers whose a dead key was, so that a stranger's blob is told
// apart from an unknown one.
func putOwner(tx Tx, q *request, d receipt.DeadKey) error {
	return putRow(tx, ownerKey(d.KeyID[:]), &storev1.KeyOwner{
		Tenant: q.keys.id[:], Handle: q.handle[:], ClassNumber: d.ClassNumber, Generation: d.Generation,
	})
}

// reinstatedFrom is the generation whose end a reinstatement named.
func (p *replay) reinstatedFrom(r Reader, s *receipt.Statement, q *request) (uint32, error) {
	if s.Scope == receipt.ScopePerson {
		return s.Generation - 1, nil
	}
	var subject storev1.Subject
	if err := getRow(r, subjectKey(q.keys.id, q.handle), &subject); err != nil {
		return 0, err
	}
	sc := classOf(&subject, s.Classes[0].Number)
	if sc == nil {
		return 0, fmt.Errorf("%w: the class was never used", ErrReplay)
	}
	return sc.Generation, nil
}

// ofLost keeps what is known of the subject of a lost tenant: whose the dead
// keys were and which request it was. Its handle can never be made again.
func (p *replay) ofLost(tx Tx, it item, q *request) error {
	for _, d := range it.s.DeadKeys {
		if err := putOwner(tx, q, d); err != nil {
			return err
		}
	}
	if len(q.mac) == 0 {
		return nil
	}
	if err := q.remember(tx, it.index, it.s.Time, false, 0); err != nil {
		return err
	}
	return markReplayed(tx, q)
}

// epochChanged changes an epoch's row as the statement says. Which epoch keys
// are read from is another matter, and stays as the store has it; see settle.
func (p *replay) epochChanged(tx Tx, it item) error {
	s := it.s
	row := new(storev1.Epoch)
	err := getRow(tx, epochKey(s.Epoch), row)
	if err != nil && (!errors.Is(err, ErrNotFound) || s.Kind != receipt.EpochOpened) {
		return fmt.Errorf("%w: an epoch that never opened: %w", ErrReplay, err)
	}
	ms := s.Time.UnixMilli()
	switch s.Kind {
	case receipt.EpochOpened:
		row.Number, row.State, row.RootId, row.KmsKind = s.Epoch, storev1.EpochState_EPOCH_STATE_OPEN, s.Root, s.KMS
		row.OpenedMs, row.PlannedEndMs = ms, s.PlannedEnd.UnixMilli()
		row.FinalByMs = s.PlannedEnd.Add(p.k.endOf()).UnixMilli()
	case receipt.EpochDraining:
		row.State, row.DrainingMs, row.TurnRequested = storev1.EpochState_EPOCH_STATE_DRAINING, ms, false
	case receipt.EpochDrained:
		row.State, row.DrainedMs = storev1.EpochState_EPOCH_STATE_DRAINED, ms
	case receipt.Sanitised:
		row.DroppedMs, row.SanitisedAt = ms, it.index+1
	case receipt.EpochRetiring:
		row.State, row.RetiringMs, row.DestroyAtMs = storev1.EpochState_EPOCH_STATE_RETIRING, ms, s.Due.UnixMilli()
		row.Kept, row.RetiringAt = false, it.index+1
	case receipt.EpochCancelled:
		row.State, row.Kept = storev1.EpochState_EPOCH_STATE_DRAINED, true
		row.DisabledMs, row.RetiringMs, row.DestroyAtMs = 0, 0, 0
		row.CancelledAt = it.index + 1
	case receipt.EpochClosed:
		row.State, row.ClosedMs, row.ClosedAt = storev1.EpochState_EPOCH_STATE_CLOSED, ms, it.index+1
	}
	return putRow(tx, epochKey(s.Epoch), row)
}
