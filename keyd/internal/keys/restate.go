package keys

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

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
	if err := statedFinal(tx, s); err != nil {
		return err
	}
	switch s.Kind {
	case receipt.TenantCreated:
		return p.tenantCreated(tx, s)
	case receipt.ClassSet:
		return p.classSet(tx, it)
	case receipt.Destroyed, receipt.Scheduled, receipt.Cancelled, receipt.Reinstated, receipt.HoldPlaced, receipt.HoldReleased:
		return p.requested(tx, it)
	case receipt.Expired:
		return p.expired(tx, s)
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

func (p *replay) classSet(tx Tx, it item) error {
	s := it.s
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
	setLease(row, s.LeaseMS, s.Time, s.Time)
	setEnd(row, s.RetentionS, s.EndAction == receipt.EndDeny, s.Time)
	row.ApprovedBy, row.ChangedAt = s.ApprovedBy, it.index+1
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

// requested makes the request that the statement answered once more, and sees
// whether it comes to the same.
func (p *replay) requested(tx Tx, it item) error {
	s := it.s
	var tenant storev1.Tenant
	if err := getRow(tx, tenantKey(tenantID(s.Tenant)), &tenant); err != nil {
		return err
	}
	q := &request{tenant: s.Tenant, reason: s.Reason, principal: s.Principal, mac: s.Request, keys: p.keysOf(s.Tenant)}
	if s.Handle != nil {
		q.subject, q.handle = []byte{}, id16(s.Handle)
	}
	for _, c := range s.Classes {
		q.classes = append(q.classes, c.Name)
	}
	slices.Sort(q.classes)
	if s.Kind == receipt.Destroyed {
		if err := p.loseKeys(tx, s, q); err != nil {
			return err
		}
	}
	// What an entry of the same request wrote before, if there is one.
	before, err := readRequest(tx, q.mac)
	if err != nil {
		return err
	}
	made, err := p.plan(found{tx, tenant.State, tenantKey(q.keys.id)}, s, q)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReplay, err)
	}
	if err := sameEffect(made, s); err != nil {
		return err
	}
	if err := made.write(tx, it.index); err != nil {
		return err
	}
	if tenant.State == storev1.TenantState_TENANT_STATE_LOST {
		if err := loseAgain(tx, q.keys.id); err != nil {
			return err
		}
	}
	return markReplayed(tx, q, it, before)
}

// found shows a lost tenant as one that is active: what was done to it while
// it was there is replayed like anybody's.
type found struct {
	Reader
	state storev1.TenantState
	row   []byte
}

func (f found) Get(key []byte) ([]byte, error) {
	b, err := f.Reader.Get(key)
	if err != nil || f.state != storev1.TenantState_TENANT_STATE_LOST || !bytes.Equal(key, f.row) {
		return b, err
	}
	var t storev1.Tenant
	if err := decode(b, &t); err != nil {
		return nil, err
	}
	t.State = storev1.TenantState_TENANT_STATE_ACTIVE
	return encode(&t)
}

// loseAgain undoes what found showed, where it was written back.
func loseAgain(tx Tx, tenant id16) error {
	var t storev1.Tenant
	if err := getRow(tx, tenantKey(tenant), &t); err != nil || t.State != storev1.TenantState_TENANT_STATE_ACTIVE {
		return err
	}
	t.State = storev1.TenantState_TENANT_STATE_LOST
	return putRow(tx, tenantKey(tenant), &t)
}

// plan plans what a statement tells of, at the time that it tells.
func (p *replay) plan(r Reader, s *receipt.Statement, q *request) (*plan, error) {
	k := p.k
	switch s.Kind {
	case receipt.Destroyed:
		if s.Scope == receipt.ScopeTenant {
			q.kind = "destroy-tenant"
			q.digest = q.sum()
			return k.planDestroyTenant(r, q, s.Time)
		}
		due, err := p.wasDue(r, s, q)
		if err != nil || due {
			if err != nil {
				return nil, err
			}
			made, err := k.planDue(r, s.Tenant, q.keys.id, q.handle, s.Time)
			if made == nil && err == nil {
				err = errors.New("nothing is due")
			}
			return made, err
		}
		q.kind, q.ifGeneration = "destroy", s.Generation
		q.digest = q.sum()
		return k.planDestroy(r, q, s.Time)
	case receipt.Scheduled:
		// Whether it was to wait for holds is not stated: it was scheduled.
		q.kind, q.ifGeneration, q.extra = "destroy", s.Generation, scheduledExtra(s)
		q.digest = q.sum()
		return k.planSchedule(r, q, s.Due, s.Time, true)
	case receipt.Cancelled:
		q.kind = "cancel"
		classes := q.classes
		q.classes = nil // the request named none
		q.digest = q.sum()
		q.classes = classes
		only, err := p.scheduledBy(r, s, q)
		if err != nil {
			return nil, err
		}
		return planCancel(r, q, only, s.Time)
	case receipt.Reinstated:
		from, err := p.reinstatedFrom(r, s, q)
		if err != nil {
			return nil, err
		}
		q.kind, q.ifGeneration = "reinstate", from
		q.digest = q.sum()
		made, _, err := planReinstate(r, q, s.Time)
		return made, err
	case receipt.HoldPlaced:
		q.kind, q.extra = "place-hold", holdExtra(s.Hold, s.HoldEnd)
		q.digest = q.sum()
		return k.planHold(r, q, s.Kind, s.Time, k.placing(s.Hold, s.Reason, s.Principal, s.HoldEnd))
	case receipt.HoldReleased:
		q.kind, q.extra = "release-hold", holdExtra(s.Hold, time.Time{})
		q.digest = q.sum()
		return k.planHold(r, q, s.Kind, s.Time, releasing(s.Hold))
	}
	return nil, fmt.Errorf("a %s is no request", s.Kind)
}

// scheduleOf returns what is scheduled for the subject by the entry that the
// statement is about; nil if nothing is.
func (p *replay) scheduleOf(r Reader, s *receipt.Statement, q *request) (*storev1.Schedule, error) {
	var subject storev1.Subject
	if err := getRow(r, subjectKey(q.keys.id, q.handle), &subject); err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	for _, e := range subject.Schedules {
		if s.Of != nil && e.LedgerIndex == *s.Of {
			return e, nil
		}
	}
	return nil, nil
}

// wasDue says whether a destruction carried out one that was scheduled, and
// was not asked for by a request of its own.
func (p *replay) wasDue(r Reader, s *receipt.Statement, q *request) (bool, error) {
	e, err := p.scheduleOf(r, s, q)
	return e != nil && bytes.Equal(e.Request, s.Request), err
}

// scheduledBy returns the request that asked for what a statement cancels.
func (p *replay) scheduledBy(r Reader, s *receipt.Statement, q *request) ([]byte, error) {
	e, err := p.scheduleOf(r, s, q)
	if err != nil {
		return nil, err
	}
	if e == nil {
		return nil, errors.New("it is not scheduled")
	}
	return e.Request, nil
}

// sameEffect compares what was planned with what was stated. What a statement
// says beside its effect (dates, which depend on settings, the anchor, the
// epoch) is taken as stated. So are the keys, if no stated one is missing: where
// a store was restored from a backup, and is now from a newer one, it has keys
// that the statement's scope covers, and that the store which made it had lost.
// They die too.
func sameEffect(made *plan, s *receipt.Statement) error {
	if len(made.statements) != 1 {
		return fmt.Errorf("%w: nothing was left to do", ErrReplay)
	}
	// The rows remember it as it was stated.
	made.statements[0].DrainedBy = s.DrainedBy
	again := *made.statements[0]
	again.DrainedBy, again.FinalBy, again.FinalBasis = s.DrainedBy, s.FinalBy, s.FinalBasis
	again.Epoch, again.Anchor = s.Epoch, s.Anchor
	if !slices.ContainsFunc(s.DeadKeys, func(d receipt.DeadKey) bool { return !slices.Contains(made.statements[0].DeadKeys, d) }) {
		again.DeadKeys, again.Existed = s.DeadKeys, s.Existed
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

// readRequest reads a request's row, nil if there is none.
func readRequest(r Reader, mac []byte) (*storev1.Request, error) {
	row := new(storev1.Request)
	err := getRow(r, requestKey(mac), row)
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	return row, err
}

// markReplayed notes of which entry a request's digest is. Where one request
// made several entries, its row stays that of the first.
func markReplayed(tx Tx, q *request, it item, before *storev1.Request) error {
	if before != nil && before.FromEntry != 0 && it.s.Kind == receipt.Cancelled {
		return putRow(tx, requestKey(q.mac), before)
	}
	row, err := readRequest(tx, q.mac)
	if err != nil || row == nil || row.LedgerIndex != it.index {
		return err // it is of the request that scheduled this
	}
	row.FromEntry = it.index + 1
	return putRow(tx, requestKey(q.mac), row)
}

// isReplayed says whether a request is the one that a replayed row is of. The
// statement names the classes that were destroyed; the request may have named
// others besides, which were destroyed already, or a time that had passed. A
// cancellation's statement does not say how it named what it cancelled.
func (q *request) isReplayed(r Reader, row *storev1.Request) (bool, error) {
	if row.FromEntry == 0 {
		return false, nil
	}
	s, err := statementAt(r, row.FromEntry-1)
	if err != nil {
		return false, err
	}
	first := *q
	switch {
	case q.kind == "cancel" && s.Kind == receipt.Cancelled, q.kind == "destroy" && s.Kind == receipt.Destroyed:
		first.extra = nil
	case q.kind == "destroy" && s.Kind == receipt.Scheduled:
		due, waits := splitExtra(q.extra)
		first.extra = due
		if !s.Due.After(s.Time) && waits {
			first.extra = scheduledExtra(s)
		}
	default:
		return false, nil
	}
	if q.kind == "destroy" {
		if (len(s.Classes) == 0) != (len(q.classes) == 0) {
			return false, nil
		}
		first.classes = nil
		for _, c := range s.Classes {
			if !slices.Contains(q.classes, c.Name) {
				return false, nil
			}
			first.classes = append(first.classes, c.Name)
		}
		slices.Sort(first.classes)
	}
	sum := first.sum()
	return bytes.Equal(row.Digest, sum[:]), nil
}

// scheduledExtra is destroyExtra of a request that was scheduled, as far as
// its statement tells: what is due at once waited for a hold.
func scheduledExtra(s *receipt.Statement) []byte {
	if !s.Due.After(s.Time) {
		return destroyExtra(time.Time{}, true)
	}
	return destroyExtra(s.Due, false)
}

// loseKeys puts the keys that a statement destroyed and that this store never
// had into the subject's row, as keys without a wrapped row: so they are
// destroyed as others are, and their ids are dead. A key of the same life that
// the store has in such a place was lost when the other was made; it dies here.
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
		case len(sc.KeyId) != 0 && sc.Generation != d.Generation:
			return fmt.Errorf("%w: a key of another life is in the place of the one that was destroyed", ErrReplay)
		case len(sc.KeyId) != 0:
			rows, err := wrappedDEKRows(tx, es, q.keys.id, q.handle, sc.KeyId)
			if err != nil {
				return err
			}
			for _, row := range rows {
				if err := putRow(tx, row, &storev1.Wrapped{Dead: true}); err != nil {
					return err
				}
			}
			sc.DeadKeyIds = append(sc.DeadKeyIds, sc.KeyId)
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

// keysOf are a tenant's keys: those that were loaded, or only its name.
func (p *replay) keysOf(tenant string) *tenantKeys {
	if t := p.loaded[tenant]; t != nil {
		return t
	}
	return &tenantKeys{name: tenant, id: tenantID(tenant)}
}

// expired overwrites the key of a bucket whose retention has ended. The shares
// of those who were held are kept by then; see keepShares.
func (p *replay) expired(tx Tx, s *receipt.Statement) error {
	id, number, start := tenantID(s.Tenant), s.Classes[0].Number, uint64(s.BucketStartS)
	var t storev1.Tenant
	if err := getRow(tx, tenantKey(id), &t); err != nil || t.State == storev1.TenantState_TENANT_STATE_LOST {
		return err
	}
	es, err := readEpochs(tx)
	if err != nil {
		return err
	}
	var m storev1.Materialising
	switch err := getRow(tx, materialisingKey(id), &m); {
	case err == nil:
		m.Buckets = slices.DeleteFunc(m.Buckets, func(n *storev1.BucketName) bool {
			return n.ClassNumber == number && n.StartS == s.BucketStartS
		})
		if err := putRow(tx, materialisingKey(id), &m); err != nil {
			return err
		}
	case !errors.Is(err, ErrNotFound):
		return err
	}
	for _, e := range es.read() {
		key := wrappedBucketKey(e, id, number, start)
		switch _, err := tx.Get(key); {
		case errors.Is(err, ErrNotFound):
			continue
		case err != nil:
			return err
		}
		if err := putRow(tx, key, &storev1.Wrapped{Dead: true}); err != nil {
			return err
		}
	}
	return putRow(tx, bucketKey(id, number, start), &storev1.Bucket{
		State: storev1.BucketState_BUCKET_STATE_DEAD, StartS: s.BucketStartS, EndS: s.BucketEndS,
	})
}

// keepShares keeps the shares of the subjects that were held when a bucket
// died, as they were kept then: before its key goes.
func (p *replay) keepShares(ctx context.Context, s *receipt.Statement) error {
	k, id, number, start := p.k, tenantID(s.Tenant), s.Classes[0].Number, uint64(s.BucketStartS)
	has := false
	err := k.update(ctx, func(tx Tx) error {
		has = false
		var t storev1.Tenant
		if err := getRow(tx, tenantKey(id), &t); err != nil || t.State != storev1.TenantState_TENANT_STATE_ACTIVE {
			return err
		}
		var b storev1.Bucket
		switch err := getRow(tx, bucketKey(id, number, start), &b); {
		case errors.Is(err, ErrNotFound):
			return nil // its key is lost
		case err != nil:
			return err
		case b.State == storev1.BucketState_BUCKET_STATE_DEAD:
			return nil
		}
		has = true
		b.State, b.Cursor = storev1.BucketState_BUCKET_STATE_MATERIALISING, nil
		if err := putRow(tx, bucketKey(id, number, start), &b); err != nil {
			return err
		}
		return p.takeDuties(tx)
	})
	if err != nil || !has {
		return err
	}
	// Whom a hold bound then, not whom one binds now.
	return k.duties.keepShares(ctx, s.Tenant, id, number, start, func() time.Time { return s.Time })
}

// takeDuties makes this process the holder of the duties: no other is there.
func (p *replay) takeDuties(tx Tx) error {
	k := p.k
	var row storev1.Duty
	if err := getRow(tx, dutyKey(), &row); err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	if !bytes.Equal(row.Holder, k.pulse.id[:]) {
		row.Holder, row.Term = k.pulse.id[:], row.Term+1
	}
	k.duties.term.Store(row.Term)
	return putRow(tx, dutyKey(), &row)
}

// loadKeys loads the keys of a tenant a hold on whose subject must keep shares,
// as the hold did that was placed while buckets died.
func (p *replay) loadKeys(ctx context.Context, s *receipt.Statement) error {
	k, id := p.k, tenantID(s.Tenant)
	if s.Kind != receipt.HoldPlaced || s.Handle == nil {
		return nil
	}
	needed := false
	err := k.store.View(ctx, func(r Reader) error {
		var t storev1.Tenant
		err := getRow(r, tenantKey(id), &t)
		if errors.Is(err, ErrNotFound) || err == nil && t.State != storev1.TenantState_TENANT_STATE_ACTIVE {
			return nil // it is still to be replayed, or is lost
		}
		if err != nil {
			return err
		}
		var m storev1.Materialising
		err = getRow(r, materialisingKey(id), &m)
		needed = len(m.Buckets) != 0
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		return err
	})
	if err != nil || !needed {
		return err
	}
	t, err := k.ring.get(ctx, s.Tenant)
	if err != nil {
		return err
	}
	p.loaded[s.Tenant] = t
	return k.holdKEKs(ctx, t)
}

// lastEndOf is endOf as the keyd had it that opened the newest epoch of which
// it is known. The settings of that keyd are not this process's.
func (p *replay) lastEndOf(r Reader) (time.Duration, error) {
	all, err := allEpochs(r)
	if err != nil {
		return 0, err
	}
	for _, e := range slices.Backward(all) {
		if e.FinalByMs != 0 {
			return time.Duration(e.FinalByMs-e.PlannedEndMs) * time.Millisecond, nil
		}
	}
	return p.k.endOf(), nil
}

// statedFinal has an epoch's row say what receipts state of it: one of before
// its planned end states just what the row said, a later one no less.
func statedFinal(tx Tx, s *receipt.Statement) error {
	if s.FinalBy.IsZero() {
		return nil
	}
	row, err := readEpoch(tx, s.Epoch)
	if err != nil {
		return err
	}
	by := s.FinalBy.UnixMilli()
	if by == row.FinalByMs || s.Time.UnixMilli() > row.PlannedEndMs && by > row.FinalByMs {
		return nil
	}
	row.FinalByMs = by
	return putRow(tx, epochKey(s.Epoch), row)
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
		last, err := p.lastEndOf(tx)
		if err != nil {
			return err
		}
		row.FinalByMs = s.PlannedEnd.Add(last).UnixMilli()
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
		row.Kept, row.CalledOff, row.CancelledAt = row.Kept || !it.calledOff, it.calledOff, it.index+1
		endRetiring(row)
	case receipt.EpochClosed:
		row.State, row.ClosedMs, row.ClosedAt = storev1.EpochState_EPOCH_STATE_CLOSED, ms, it.index+1
	}
	return putRow(tx, epochKey(s.Epoch), row)
}
