package keys

import (
	"context"
	"errors"
	"fmt"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// kmsTimeout bounds one call of the KMS that a duty makes.
const kmsTimeout = 15 * time.Second

// rootRequest returns the id under which the root of an epoch is asked for: the
// one that was written down for it, by whichever keyd, or a new one.
func rootRequest(tx Tx, epoch uint32) (request RootRequest, again bool, err error) {
	var row storev1.Duty
	if err := getRow(tx, dutyKey(), &row); err != nil && !errors.Is(err, ErrNotFound) {
		return request, false, err
	}
	if row.RootEpoch == epoch && len(row.RootRequest) == len(request) {
		return RootRequest(row.RootRequest), true, nil
	}
	request = RootRequest(newID())
	row.RootEpoch, row.RootRequest = epoch, request[:]
	return request, false, putRow(tx, dutyKey(), &row)
}

// createRoot has the KMS make the root of an epoch, once, however often it is
// called and wherever a keyd dies. may is asked in the transaction that writes
// the request down.
func (k *Keys) createRoot(ctx context.Context, epoch uint32, may func(Reader) error) (rootID string, err error) {
	var request RootRequest
	again := false
	err = k.update(ctx, func(tx Tx) (err error) {
		if err := may(tx); err != nil {
			return err
		}
		request, again, err = rootRequest(tx, epoch)
		return err
	})
	if err != nil {
		return "", err
	}
	if again {
		// In a KMS that cannot tell for what request it made a root, one may be
		// left that nobody uses.
		k.log.Info("the root of an epoch is asked for again: there was no answer", "epoch", epoch)
	}
	ctx, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	if rootID, err = k.kms.Create(ctx, epoch, request); err != nil {
		return "", fmt.Errorf("making a root: %w", err)
	}
	return rootID, nil
}

// openNext begins the turn of the open epoch when it is time.
func (d *duties) openNext(ctx context.Context, es epochs, all []*storev1.Epoch, open *storev1.Epoch, clockOK bool) (bool, error) {
	k := d.k
	due := !k.now().Before(time.UnixMilli(open.PlannedEndMs))
	switch {
	case es.preparing != 0:
		return false, nil
	case !due && !open.TurnRequested:
		return false, nil
	case !open.TurnRequested && !clockOK:
		d.waits(open.Number, "an operator to say that the clock is right")
		return false, nil
	}
	for _, e := range all {
		switch e.State {
		case storev1.EpochState_EPOCH_STATE_DRAINING:
			d.waits(open.Number, "epoch %d to drain", e.Number)
			return false, nil
		case storev1.EpochState_EPOCH_STATE_DRAINED, storev1.EpochState_EPOCH_STATE_ABANDONED:
			if e.DroppedMs == 0 {
				d.waits(open.Number, "the keys of epoch %d to be dropped", e.Number)
				return false, nil
			}
		}
	}
	number := all[len(all)-1].Number + 1
	root, err := k.createRoot(ctx, number, d.fence)
	if err != nil {
		return false, err
	}
	err = k.update(ctx, func(tx Tx) error {
		if err := d.fence(tx); err != nil {
			return err
		}
		var meta storev1.Meta
		if err := getRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		if meta.Epoch != open.Number || meta.Draining != 0 || meta.Preparing != 0 {
			return errTurned
		}
		switch _, err := tx.Get(epochKey(number)); {
		case err == nil:
			return errTurned
		case !errors.Is(err, ErrNotFound):
			return err
		}
		meta.Preparing = number
		if err := putRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		return putRow(tx, epochKey(number), &storev1.Epoch{
			Number: number, State: storev1.EpochState_EPOCH_STATE_PREPARING, RootId: root, KmsKind: k.kms.Kind(),
		})
	})
	if err == nil {
		k.log.Info("epoch is being prepared", "epoch", number, "root", root)
	}
	return err == nil, err
}

// prepare gives every tenant, keyd itself among them, its KEK of the next
// epoch, and opens it.
func (d *duties) prepare(ctx context.Context, es epochs, next *storev1.Epoch) (bool, error) {
	k := d.k
	if es.preparing != next.Number {
		return false, damaged("two epochs are being prepared", nil)
	}
	d.waits(next.Number, "tenants to get their keys")
	var missing []*storev1.Tenant
	err := k.store.View(ctx, func(r Reader) error {
		var bad error
		err := r.Scan([]byte{'T'}, nil, func(_, value []byte) bool {
			t := new(storev1.Tenant)
			if bad = decode(value, t); bad != nil {
				return false
			}
			if _, ok := kekFor(t, next.Number); !ok && t.State == storev1.TenantState_TENANT_STATE_ACTIVE {
				missing = append(missing, t)
			}
			return true
		})
		return errors.Join(err, bad)
	})
	if err != nil {
		return false, err
	}
	for _, t := range missing {
		err := d.giveKEK(ctx, t.Name, next)
		if err != nil {
			return d.rootLost(ctx, next, err)
		}
	}
	return true, d.flip(ctx, next)
}

// giveKEK makes a tenant's KEK of the epoch that is being prepared.
func (d *duties) giveKEK(ctx context.Context, tenant string, next *storev1.Epoch) error {
	k := d.k
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	f, err := k.newKEK(call, tenant, next)
	if err != nil {
		return err
	}
	id := systemTenant
	if tenant != "" {
		id = tenantID(tenant)
	}
	given := false
	err = k.update(ctx, func(tx Tx) error {
		given = false
		if err := d.fence(tx); err != nil {
			return err
		}
		if es, err := readEpochs(tx); err != nil || es.preparing != next.Number {
			return errors.Join(err, errTurned)
		}
		var t storev1.Tenant
		if err := getRow(tx, tenantKey(id), &t); err != nil {
			return err
		}
		if _, ok := kekFor(&t, next.Number); ok || t.State != storev1.TenantState_TENANT_STATE_ACTIVE {
			return nil
		}
		t.NextKekId, t.NextKekEpoch = f.id[:], next.Number
		if err := tx.Put(wrappedKEKKey(next.Number, id, f.id), f.row); err != nil {
			return err
		}
		given = true
		return putRow(tx, tenantKey(id), &t)
	})
	if err == nil && given {
		// So that no call has to wait for it once the epoch is open.
		k.ring.keep(tenant, f)
	}
	return err
}

// rootLost gives up an epoch that never opened if its root is described as
// destroyed, or about to be. Nothing but KEKs is wrapped by it.
func (d *duties) rootLost(ctx context.Context, next *storev1.Epoch, cause error) (bool, error) {
	k := d.k
	if !errors.Is(cause, ErrRootNotUsable) && !errors.Is(cause, ErrKMSDenied) {
		return false, cause
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	root, err := k.kms.Describe(call, next.RootId)
	if err != nil || root.State != RootPending && root.State != RootDestroyed {
		return false, cause
	}
	err = k.update(ctx, func(tx Tx) error {
		if err := d.fence(tx); err != nil {
			return err
		}
		var meta storev1.Meta
		if err := getRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		e, err := readEpoch(tx, next.Number)
		if err != nil {
			return err
		}
		if meta.Preparing != next.Number || e.State != storev1.EpochState_EPOCH_STATE_PREPARING {
			return errTurned
		}
		meta.Preparing, e.State = 0, storev1.EpochState_EPOCH_STATE_ABANDONED
		if err := putRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		return putRow(tx, epochKey(next.Number), e)
	})
	if err == nil {
		k.log.Warn("epoch is abandoned before it opened: its root was destroyed", "epoch", next.Number, "root", next.RootId)
	}
	return err == nil, err
}

// dropAbandoned drops the KEKs of an epoch that never opened.
func (d *duties) dropAbandoned(ctx context.Context, e *storev1.Epoch) (bool, error) {
	if e.DroppedMs != 0 {
		return false, nil
	}
	if err := d.k.store.DropRange(ctx, wrappedPrefix(e.Number)); err != nil {
		return false, err
	}
	return true, d.change(ctx, e, func(row *storev1.Epoch, now time.Time) { row.DroppedMs = now.UnixMilli() })
}

// change changes the row of an epoch that is as e says, without a statement.
func (d *duties) change(ctx context.Context, e *storev1.Epoch, fn func(row *storev1.Epoch, now time.Time)) error {
	return d.k.update(ctx, func(tx Tx) error {
		if err := d.fence(tx); err != nil {
			return err
		}
		row, err := readEpoch(tx, e.Number)
		if err != nil {
			return err
		}
		if row.State != e.State {
			return errTurned
		}
		fn(row, d.k.now())
		return putRow(tx, epochKey(e.Number), row)
	})
}

// flip opens the epoch that was prepared, and lets the open one drain.
func (d *duties) flip(ctx context.Context, next *storev1.Epoch) error {
	k := d.k
	o := &op{alone: true, check: func(r Reader, now time.Time) (*plan, error) {
		if err := d.fence(r); err != nil {
			return nil, err
		}
		var meta storev1.Meta
		if err := getRow(r, metaKey(), &meta); err != nil {
			return nil, err
		}
		if meta.Preparing != next.Number || meta.Draining != 0 {
			return nil, errTurned
		}
		old, err := readEpoch(r, meta.Epoch)
		if err != nil {
			return nil, err
		}
		row, err := readEpoch(r, next.Number)
		if err != nil {
			return nil, err
		}
		if row.RootId != next.RootId {
			return nil, errTurned
		}
		end := now.Add(k.cfg.EpochLength)
		row.State, row.OpenedMs = storev1.EpochState_EPOCH_STATE_OPEN, now.UnixMilli()
		row.PlannedEndMs, row.FinalByMs = end.UnixMilli(), end.Add(k.endOf()).UnixMilli()
		old.State, old.DrainingMs, old.TurnRequested = storev1.EpochState_EPOCH_STATE_DRAINING, now.UnixMilli(), false
		meta.Epoch, meta.Draining, meta.Preparing = row.Number, old.Number, 0
		return &plan{
			statements: []*receipt.Statement{
				{Kind: receipt.EpochOpened, Time: now, Epoch: row.Number, KMS: row.KmsKind, Root: row.RootId, PlannedEnd: end},
				{Kind: receipt.EpochDraining, Time: now, Epoch: old.Number},
			},
			write: func(tx Tx, _ uint64) error {
				if err := putRow(tx, epochKey(row.Number), row); err != nil {
					return err
				}
				if err := putRow(tx, epochKey(old.Number), old); err != nil {
					return err
				}
				return putRow(tx, metaKey(), &meta)
			},
		}, nil
	}}
	err := k.record(ctx, o)
	if err == nil {
		k.log.Info("epoch is open", "epoch", next.Number, "root", next.RootId)
	}
	return err
}

// TurnEpoch asks for the turn of an epoch, of the open one if it is zero.
// Asking again for the same one changes nothing.
func (k *Keys) TurnEpoch(ctx context.Context, number uint32) (uint32, error) {
	turning := number
	err := k.update(ctx, func(tx Tx) error {
		es, err := readEpochs(tx)
		if err != nil {
			return err
		}
		switch {
		case number > es.open:
			return unknown("the epoch")
		case number != 0 && number < es.open:
			return nil // it has turned
		}
		turning = es.open
		e, err := readEpoch(tx, es.open)
		if err != nil {
			return err
		}
		if e.TurnRequested {
			return nil
		}
		e.TurnRequested = true
		return putRow(tx, epochKey(es.open), e)
	})
	k.duties.kick()
	return turning, err
}
