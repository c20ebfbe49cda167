package keys

import (
	"context"
	"errors"
	"fmt"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// state runs an operation that takes an epoch from one state to another and
// states it. fn changes the row, and makes the statement.
func (d *duties) state(ctx context.Context, number uint32, from storev1.EpochState,
	fn func(r Reader, row *storev1.Epoch, s *receipt.Statement, now time.Time) (also func(tx Tx, index uint64) error, err error)) error {
	o := &op{alone: true, check: func(r Reader, now time.Time) (*plan, error) {
		if err := d.fence(r); err != nil {
			return nil, err
		}
		row, err := readEpoch(r, number)
		if err != nil {
			return nil, err
		}
		if row.State != from {
			return nil, errTurned
		}
		s := &receipt.Statement{Time: now, Epoch: number}
		also, err := fn(r, row, s, now)
		if err != nil {
			return nil, err
		}
		return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
			switch s.Kind {
			case receipt.Sanitised:
				row.SanitisedAt = index + 1
			case receipt.EpochRetiring:
				row.RetiringAt = index + 1
			case receipt.EpochCancelled:
				row.CancelledAt = index + 1
			case receipt.EpochClosed:
				row.ClosedAt = index + 1
			}
			if err := putRow(tx, epochKey(number), row); err != nil {
				return err
			}
			if also != nil {
				return also(tx, index)
			}
			return nil
		}}, nil
	}}
	err := d.k.record(ctx, o)
	if err == nil {
		d.k.log.Info("epoch has come further", "epoch", number, "entry", o.index)
	}
	return err
}

// drained ends the reading of an epoch.
func (d *duties) drained(ctx context.Context, number uint32) error {
	return d.state(ctx, number, storev1.EpochState_EPOCH_STATE_DRAINING,
		func(r Reader, row *storev1.Epoch, s *receipt.Statement, now time.Time) (func(Tx, uint64) error, error) {
			var meta storev1.Meta
			if err := getRow(r, metaKey(), &meta); err != nil {
				return nil, err
			}
			if meta.Draining != number {
				return nil, errTurned
			}
			meta.Draining = 0
			s.Kind = receipt.EpochDrained
			row.State, row.DrainedMs = storev1.EpochState_EPOCH_STATE_DRAINED, now.UnixMilli()
			return func(tx Tx, _ uint64) error { return putRow(tx, metaKey(), &meta) }, nil
		})
}

// retire takes a drained epoch to the destruction of its root: tenants forget
// their KEKs of it, its rows are dropped, its root is disabled, soaks, and is
// scheduled for destruction.
func (d *duties) retire(ctx context.Context, es epochs, all []*storev1.Epoch, e *storev1.Epoch, clockOK bool) (bool, error) {
	k := d.k
	if e.DroppedMs == 0 {
		d.waits(e.Number, "its rows to be dropped")
		return true, d.dropRows(ctx, es, e)
	}
	if e.Kept {
		d.waits(e.Number, waitsForKeeper)
		return false, d.keep(ctx, e)
	}
	behind, err := d.behind(ctx, func(p peer) bool { return p.row.Oldest <= e.Number })
	if err != nil {
		return false, err
	}
	if behind != 0 {
		d.waits(e.Number, "%d other keyds to drop its keys", behind)
		return false, nil
	}
	if e.DisabledMs == 0 {
		d.waits(e.Number, "its root to be disabled")
		return true, d.disable(ctx, all, e)
	}
	now := k.now()
	if end := time.UnixMilli(e.DisabledMs).Add(k.cfg.soak()); now.Before(end) {
		d.waits(e.Number, "the end of the soak at %s", end.UTC().Format(time.RFC3339))
		return false, nil
	}
	if !clockOK {
		d.waits(e.Number, "an operator to say that the clock is right")
		return false, nil
	}
	if err := d.recent(e.Number); err != nil {
		return false, err
	}
	d.waits(e.Number, "the second verification of all keys")
	if err := k.verifyRetired(ctx, e.Number); errors.Is(err, ErrDamaged) {
		return false, d.failed(e.Number, err)
	} else if err != nil {
		return false, err
	}
	return true, d.schedule(ctx, all, e)
}

// dropRows drops what is wrapped in an epoch from the store.
func (d *duties) dropRows(ctx context.Context, es epochs, e *storev1.Epoch) error {
	k := d.k
	if es.needs(e.Number) {
		return damaged("a drained epoch is in use", nil)
	}
	if err := d.promote(ctx, es); err != nil {
		return err
	}
	k.ring.dropBelow(es.oldest())
	if err := k.anchored(ctx); err != nil {
		return err
	}
	if err := d.still(ctx); err != nil {
		return err
	}
	if err := k.store.DropRange(ctx, wrappedPrefix(e.Number)); err != nil {
		return fmt.Errorf("dropping the rows: %w", err)
	}
	if leaves, ok := k.store.(interface{ DropLeavesBytes() bool }); ok && leaves.DropLeavesBytes() {
		return d.change(ctx, e, func(row *storev1.Epoch, now time.Time) { row.DroppedMs = now.UnixMilli() })
	}
	return d.state(ctx, e.Number, e.State,
		func(_ Reader, row *storev1.Epoch, s *receipt.Statement, now time.Time) (func(Tx, uint64) error, error) {
			if row.DroppedMs != 0 {
				return nil, errTurned
			}
			s.Kind = receipt.Sanitised
			row.DroppedMs = now.UnixMilli()
			return nil, nil
		})
}

// promote makes the open epoch's KEK every tenant's first.
func (d *duties) promote(ctx context.Context, es epochs) error {
	var ids []id16
	err := d.k.scanAll(ctx, []byte{'T'}, nil, func(_ Reader, key, value []byte) error {
		var t storev1.Tenant
		if err := decode(value, &t); err != nil {
			return err
		}
		if t.NextKekEpoch == es.open {
			ids = append(ids, id16(key[1:]))
		}
		return nil
	})
	if err != nil {
		return err
	}
	for len(ids) != 0 {
		n := min(len(ids), 256)
		err := d.k.update(ctx, func(tx Tx) error {
			if err := d.fence(tx); err != nil {
				return err
			}
			for _, id := range ids[:n] {
				var t storev1.Tenant
				if err := getRow(tx, tenantKey(id), &t); err != nil {
					return err
				}
				if t.NextKekEpoch != es.open {
					continue
				}
				t.KekId, t.KekEpoch, t.NextKekId, t.NextKekEpoch = t.NextKekId, t.NextKekEpoch, nil, 0
				if err := putRow(tx, tenantKey(id), &t); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		ids = ids[n:]
	}
	return nil
}

// ownRoot refuses to touch a root that another epoch has too.
func ownRoot(all []*storev1.Epoch, e *storev1.Epoch) error {
	for _, other := range all {
		if other.Number != e.Number && other.RootId == e.RootId {
			return damaged("two epochs have one root", nil)
		}
	}
	return nil
}

func (d *duties) disable(ctx context.Context, all []*storev1.Epoch, e *storev1.Epoch) error {
	if err := ownRoot(all, e); err != nil {
		return err
	}
	if err := d.k.anchored(ctx); err != nil {
		return err
	}
	if err := d.still(ctx); err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	if err := d.k.kms.Disable(call, e.RootId); err != nil {
		return fmt.Errorf("disabling the root: %w", err)
	}
	return d.change(ctx, e, func(row *storev1.Epoch, now time.Time) {
		if !row.Kept && row.DisabledMs == 0 {
			row.DisabledMs = now.UnixMilli()
		}
	})
}

// schedule has the KMS destroy the root, and looks that it says so of exactly
// this one.
func (d *duties) schedule(ctx context.Context, all []*storev1.Epoch, e *storev1.Epoch) error {
	k := d.k
	if err := ownRoot(all, e); err != nil {
		return err
	}
	if err := k.anchored(ctx); err != nil {
		return err
	}
	// Nobody has kept it meanwhile.
	err := k.store.View(ctx, func(r Reader) error {
		if row, err := readEpoch(r, e.Number); err != nil || row.State != e.State || row.Kept {
			return errors.Join(err, errTurned)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := d.still(ctx); err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	if _, err := k.kms.ScheduleDestruction(call, e.RootId); err != nil {
		return fmt.Errorf("scheduling the root's destruction: %w", err)
	}
	root, err := k.kms.Describe(call, e.RootId)
	if err != nil {
		return fmt.Errorf("describing the root: %w", err)
	}
	if (root.State != RootPending && root.State != RootDestroyed) || root.DestroyAt.IsZero() {
		return fmt.Errorf("the KMS does not say when the root is destroyed: %w", ErrKMSUnavailable)
	}
	due := wholeMillisecond(root.DestroyAt)
	return d.state(ctx, e.Number, e.State,
		func(_ Reader, row *storev1.Epoch, s *receipt.Statement, now time.Time) (func(Tx, uint64) error, error) {
			if row.Kept {
				return nil, errTurned
			}
			stateRetiring(row, s, now, due)
			return nil, nil
		})
}

func stateRetiring(row *storev1.Epoch, s *receipt.Statement, now, due time.Time) {
	s.Kind, s.KMS, s.Root = receipt.EpochRetiring, row.KmsKind, row.RootId
	s.Due = latest(due, now)
	row.State, row.RetiringMs, row.DestroyAtMs = storev1.EpochState_EPOCH_STATE_RETIRING, now.UnixMilli(), due.UnixMilli()
}

// wholeMillisecond rounds up: what is due then is due for certain.
func wholeMillisecond(t time.Time) time.Time {
	if r := t.Truncate(time.Millisecond); r.Before(t) {
		return r.Add(time.Millisecond)
	}
	return t
}

// watchRoot asks the KMS how a root is whose destruction is scheduled, and
// closes the epoch when it is destroyed: the KMS has said of exactly this root
// that it was pending and until when, that time has passed, and it answers for
// another root. No error of the KMS is evidence of anything.
func (d *duties) watchRoot(ctx context.Context, all []*storev1.Epoch, e *storev1.Epoch, clockOK bool) (bool, error) {
	k := d.k
	now := k.now()
	due := time.UnixMilli(e.DestroyAtMs)
	d.waits(e.Number, "its root to be destroyed at %s", due.UTC().Format(time.RFC3339))
	if !d.mayDescribe(e.Number, now, due) {
		return false, nil
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	root, err := k.kms.Describe(call, e.RootId)
	if err != nil {
		return false, fmt.Errorf("describing the root: %w", err)
	}
	switch root.State {
	case RootEnabled, RootDisabled:
		return true, d.rootKept(ctx, e)
	case RootPending:
		if e.Kept { // and the KMS has not been told, or not been reached
			return false, d.callOff(call, e)
		}
		if at := wholeMillisecond(root.DestroyAt); !at.Equal(due) {
			return true, d.state(ctx, e.Number, e.State,
				func(_ Reader, row *storev1.Epoch, s *receipt.Statement, now time.Time) (func(Tx, uint64) error, error) {
					stateRetiring(row, s, now, at)
					return nil, nil
				})
		}
		return false, nil
	case RootDestroyed:
	default:
		return false, fmt.Errorf("%w: the root is in no state that is known", ErrKMSUnavailable)
	}
	if e.DestroyAtMs == 0 || now.Before(due) {
		return false, fmt.Errorf("%w: the root is called destroyed before its time", ErrKMSUnavailable)
	}
	if !clockOK {
		d.waits(e.Number, "an operator to say that the clock is right")
		return false, nil
	}
	for _, older := range all {
		if older.Number < e.Number && older.State != storev1.EpochState_EPOCH_STATE_CLOSED && older.State != storev1.EpochState_EPOCH_STATE_ABANDONED {
			// Copies of this epoch's keys may lie under the older root.
			d.waits(e.Number, "epoch %d to be closed", older.Number)
			return false, nil
		}
	}
	if err := d.witness(call, all, e); err != nil {
		return false, err
	}
	if err := k.anchored(ctx); err != nil {
		return false, err
	}
	return true, d.state(ctx, e.Number, e.State,
		func(_ Reader, row *storev1.Epoch, s *receipt.Statement, now time.Time) (func(Tx, uint64) error, error) {
			s.Kind, s.KMS, s.Root, s.FinalBasis = receipt.EpochClosed, row.KmsKind, row.RootId, k.kms.FinalBasis()
			row.State, row.ClosedMs = storev1.EpochState_EPOCH_STATE_CLOSED, now.UnixMilli()
			return nil, nil
		})
}

// witness returns nil if the KMS describes the open epoch's root as enabled.
func (d *duties) witness(ctx context.Context, all []*storev1.Epoch, e *storev1.Epoch) error {
	for _, other := range all {
		if other.State != storev1.EpochState_EPOCH_STATE_OPEN || other.RootId == e.RootId || other.KmsKind != e.KmsKind {
			continue
		}
		root, err := d.k.kms.Describe(ctx, other.RootId)
		if err != nil {
			return fmt.Errorf("describing the open epoch's root: %w", err)
		}
		if root.State == RootEnabled {
			return nil
		}
	}
	return fmt.Errorf("%w: it does not answer for another root", ErrKMSUnavailable)
}

// mayDescribe paces the questions to the KMS: seldom while the time is far,
// often when it has come.
func (d *duties) mayDescribe(number uint32, now, due time.Time) bool {
	last, ok := d.described[number]
	distance := due.Sub(now).Abs()
	if ok && now.Sub(last) < min(max(distance/8, time.Second), time.Minute) && now.After(last) {
		return false
	}
	d.described[number] = now
	return true
}

// rootKept notices that a root's destruction was called off in the KMS: by an
// operator, whom keyd does not work against. The epoch waits for him.
func (d *duties) rootKept(ctx context.Context, e *storev1.Epoch) error {
	return d.state(ctx, e.Number, e.State, keepRoot)
}

func keepRoot(_ Reader, row *storev1.Epoch, s *receipt.Statement, _ time.Time) (func(Tx, uint64) error, error) {
	s.Kind, s.KMS, s.Root = receipt.EpochCancelled, row.KmsKind, row.RootId
	row.Kept, row.CalledOff = true, false
	endRetiring(row)
	return nil, nil
}

// endRetiring takes a row to where nobody is about to destroy the root.
func endRetiring(row *storev1.Epoch) {
	if row.State == storev1.EpochState_EPOCH_STATE_RETIRING {
		row.State = storev1.EpochState_EPOCH_STATE_DRAINED
	}
	row.DisabledMs, row.RetiringMs, row.DestroyAtMs = 0, 0, 0
}

// statedKept says whether the newest that the ledger says of the root is that
// its destruction was called off.
func statedKept(row *storev1.Epoch) bool { return row.CancelledAt > row.RetiringAt }

// keep sees to it that a root that is to be kept can be used: its destruction
// may have been scheduled, or it disabled, at the moment when it was kept.
func (d *duties) keep(ctx context.Context, e *storev1.Epoch) error {
	now := d.k.now()
	if !d.mayDescribe(e.Number, now, now.Add(time.Hour)) {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	root, err := d.k.kms.Describe(call, e.RootId)
	if err != nil {
		return fmt.Errorf("describing the root: %w", err)
	}
	if root.State == RootPending || root.State == RootDisabled {
		return d.callOff(call, e)
	}
	return nil
}

func (d *duties) callOff(ctx context.Context, e *storev1.Epoch) error {
	if err := d.k.kms.Cancel(ctx, e.RootId); err != nil {
		return fmt.Errorf("calling off the root's destruction: %w", err)
	}
	return nil
}

// CancelRetirement keeps the root of an epoch: nothing is scheduled any more,
// and what is scheduled is called off in the KMS, if it still can be. What the
// receipts of that epoch said of its end is superseded by an entry.
func (k *Keys) CancelRetirement(ctx context.Context, number uint32) error {
	// First the row, so that no duty goes on; then the KMS; then the statement.
	var e *storev1.Epoch
	err := k.update(ctx, func(tx Tx) (err error) {
		if e, err = pastEpoch(tx, number); err != nil {
			return err
		}
		e.Kept = true
		return putRow(tx, epochKey(number), e)
	})
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	if err := k.kms.Cancel(call, e.RootId); err != nil {
		return unavailable("the KMS did not call off the root's destruction", err)
	}
	o := &op{alone: true, check: func(r Reader, now time.Time) (*plan, error) {
		row, err := pastEpoch(r, number)
		if err != nil {
			return nil, err
		}
		if statedKept(row) && !row.CalledOff {
			return nil, errTurned // by a duty that saw it first, or a call that was not answered
		}
		s := &receipt.Statement{Time: now, Epoch: number, Principal: principalOf(ctx)}
		if _, err := keepRoot(r, row, s, now); err != nil {
			return nil, err
		}
		return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
			row.CancelledAt = index + 1
			return putRow(tx, epochKey(number), row)
		}}, nil
	}}
	defer k.duties.kick()
	if err := k.record(ctx, o); !errors.Is(err, errTurned) {
		return err
	}
	return k.anchored(ctx)
}

// ResumeRetirement lets the retirement of an epoch go on. What is stated of that
// is the new date of the root's destruction: a store that is replayed without it
// still keeps the root.
func (k *Keys) ResumeRetirement(ctx context.Context, number uint32) error {
	err := k.update(ctx, func(tx Tx) error {
		e, err := pastEpoch(tx, number)
		if err != nil {
			return err
		}
		e.Kept = false
		if e.State == storev1.EpochState_EPOCH_STATE_DRAINED {
			e.DisabledMs = 0 // it soaks anew
		}
		return putRow(tx, epochKey(number), e)
	})
	k.duties.kick()
	return err
}

// pastEpoch reads an epoch that drains or has drained, and is not closed.
func pastEpoch(r Reader, number uint32) (*storev1.Epoch, error) {
	var e storev1.Epoch
	switch err := getRow(r, epochKey(number), &e); {
	case errors.Is(err, ErrNotFound):
		return nil, unknown("the epoch")
	case err != nil:
		return nil, err
	}
	switch e.State {
	case storev1.EpochState_EPOCH_STATE_DRAINING, storev1.EpochState_EPOCH_STATE_DRAINED, storev1.EpochState_EPOCH_STATE_RETIRING:
		return &e, nil
	case storev1.EpochState_EPOCH_STATE_CLOSED:
		return nil, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the epoch is closed: its root is destroyed")
	}
	return nil, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the epoch does not retire")
}
