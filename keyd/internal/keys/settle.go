package keys

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// After a replay the ledger knows epochs that the store's keys never came to.
// The newest of them is open, and its root lives; every tenant gets a KEK of
// it, in the place of the one that was lost. The store's keys are then carried
// over to it as in any turn: the epoch that they are wrapped in drains, once
// more if the ledger says that it has drained.

// settleEpochs makes what the store reads agree with what the ledger says.
func (p *replay) settleEpochs(ctx context.Context) error {
	k := p.k
	var meta storev1.Meta
	var all []*storev1.Epoch
	err := k.store.View(ctx, func(r Reader) (err error) {
		if err := getRow(r, metaKey(), &meta); err != nil {
			return err
		}
		all, err = allEpochs(r)
		return err
	})
	if err != nil {
		return err
	}
	rows := make(map[uint32]*storev1.Epoch, len(all))
	var open *storev1.Epoch
	stated := meta.Draining // the epoch that the ledger says drains
	for _, e := range all {
		rows[e.Number] = e
		switch e.State {
		case storev1.EpochState_EPOCH_STATE_OPEN:
			open = e
		case storev1.EpochState_EPOCH_STATE_DRAINING:
			stated = e.Number
		}
	}
	if open == nil || rows[meta.Epoch] == nil {
		return damaged("no epoch is open", nil)
	}
	old, draining := meta.Epoch, meta.Draining
	if draining != 0 {
		left, err := p.uncarried(ctx, draining, old)
		if err != nil {
			return err
		}
		switch {
		case !left && rows[draining].State != storev1.EpochState_EPOCH_STATE_DRAINING:
			draining = 0 // nothing is read from it
		case old != open.Number && !left:
			draining = 0
		}
	}
	if old == open.Number && draining == meta.Draining && draining == stated &&
		(draining == 0 || rows[draining].State == storev1.EpochState_EPOCH_STATE_DRAINING) {
		return nil
	}
	if old != open.Number {
		if err := p.giveKEKs(ctx, old, open); err != nil {
			return err
		}
		if draining != 0 {
			// Two epochs with keys, and a third that is open: the oldest is
			// carried over here, so that there are two, as in any turn.
			if err := p.carryOver(ctx, draining, old, open.Number); err != nil {
				return err
			}
		}
		draining = old
	}
	return p.stateEpochs(ctx, &meta, rows, open.Number, draining)
}

// giveKEKs gives every tenant a KEK of the epoch that the ledger calls open.
func (p *replay) giveKEKs(ctx context.Context, old uint32, open *storev1.Epoch) error {
	k := p.k
	type poor struct {
		id   id16
		name string
	}
	var tenants []poor
	err := k.scanAll(ctx, []byte{'T'}, nil, func(_ Reader, key, value []byte) error {
		var t storev1.Tenant
		if err := decode(value, &t); err != nil {
			return err
		}
		if _, ok := kekFor(&t, open.Number); !ok && t.State == storev1.TenantState_TENANT_STATE_ACTIVE {
			tenants = append(tenants, poor{id16(key[1:]), t.Name})
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, t := range tenants {
		call, cancel := context.WithTimeout(ctx, kmsTimeout)
		f, err := k.newKEK(call, t.name, open)
		cancel()
		if err != nil {
			return fmt.Errorf("a KEK of epoch %d: %w", open.Number, err)
		}
		err = k.update(ctx, func(tx Tx) error {
			var row storev1.Tenant
			if err := getRow(tx, tenantKey(t.id), &row); err != nil {
				return err
			}
			if row.NextKekEpoch == old {
				row.KekId, row.KekEpoch = row.NextKekId, row.NextKekEpoch
			}
			row.NextKekId, row.NextKekEpoch = f.id[:], open.Number
			if err := tx.Put(wrappedKEKKey(open.Number, t.id, f.id), f.row); err != nil {
				return err
			}
			return putRow(tx, tenantKey(t.id), &row)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// carryOver carries the keys of an epoch that are not under middle over to
// another. Nothing else runs, so each row is only read, wrapped and written.
func (p *replay) carryOver(ctx context.Context, from, middle, to uint32) error {
	k := p.k
	cache := newKEKCache(k)
	var after []byte
	for {
		rows, err := k.nextRows(ctx, from, after)
		if err != nil || len(rows) == 0 {
			return err
		}
		after = rows[len(rows)-1].key
		var left []*wrappedRow
		err = k.store.View(ctx, func(r Reader) error {
			for _, row := range rows {
				switch _, err := r.Get(rekey(row.key, middle)); {
				case errors.Is(err, ErrNotFound):
					left = append(left, row)
				case err != nil:
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := k.wrapRows(ctx, cache, left, from, to); err != nil {
			return err
		}
		for _, row := range left {
			if row.damage != nil {
				return row.damage
			}
		}
		err = k.update(ctx, func(tx Tx) error {
			for _, row := range left {
				if row.carried == nil {
					continue
				}
				if err := tx.Put(row.target, row.carried); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
}

// stateEpochs writes, and states, from which epochs keys are read from now on.
func (p *replay) stateEpochs(ctx context.Context, meta *storev1.Meta, rows map[uint32]*storev1.Epoch, open, draining uint32) error {
	now := p.k.stated()
	var statements []*receipt.Statement
	state := func(kind receipt.Kind, e *storev1.Epoch) {
		s := &receipt.Statement{Kind: kind, Epoch: e.Number}
		if kind == receipt.EpochCancelled {
			s.KMS, s.Root = e.KmsKind, e.RootId
		}
		statements = append(statements, s)
	}
	cancelled := make(map[uint32]int) // epochs, and where in the statements
	anew := draining != 0 && (draining != meta.Draining || rows[draining].State != storev1.EpochState_EPOCH_STATE_DRAINING)
	for _, number := range slices.Sorted(maps.Keys(rows)) {
		e := rows[number]
		calledOff := slices.Contains(meta.Restore.GetCalledOff(), number)
		if e.State == storev1.EpochState_EPOCH_STATE_RETIRING && (number == draining || calledOff) ||
			e.State == storev1.EpochState_EPOCH_STATE_DRAINED && calledOff && !statedKept(e) {
			cancelled[number] = len(statements)
			state(receipt.EpochCancelled, e)
			endRetiring(e)
			e.CalledOff = true
		}
		switch {
		case number == draining:
			if e.State != storev1.EpochState_EPOCH_STATE_DRAINING {
				state(receipt.EpochDraining, e)
				e.State, e.DrainingMs = storev1.EpochState_EPOCH_STATE_DRAINING, now.UnixMilli()
			}
			e.TurnRequested = false
			e.DrainedMs, e.DroppedMs, e.DisabledMs, e.SanitisedAt = 0, 0, 0, 0
		case e.State == storev1.EpochState_EPOCH_STATE_DRAINING:
			// None of its keys is in this store.
			state(receipt.EpochDrained, e)
			e.State, e.DrainedMs, e.DroppedMs = storev1.EpochState_EPOCH_STATE_DRAINED, now.UnixMilli(), 0
		case e.State == storev1.EpochState_EPOCH_STATE_PREPARING && number < open:
			e.State, e.DroppedMs = storev1.EpochState_EPOCH_STATE_ABANDONED, 0
		}
	}
	meta.Epoch, meta.Draining = open, draining
	if meta.Preparing <= open {
		meta.Preparing = 0
	}
	o := &op{ctx: ctx, done: make(chan struct{})}
	o.check = func(_ Reader, now time.Time) (*plan, error) {
		for _, s := range statements {
			s.Time = now
		}
		return &plan{statements: statements, write: func(tx Tx, index uint64) error {
			for number, i := range cancelled {
				rows[number].CancelledAt = index + uint64(i) + 1
			}
			for number, e := range rows {
				if err := putRow(tx, epochKey(number), e); err != nil {
					return err
				}
			}
			if anew {
				if err := tx.Delete(rewrapKey(draining)); err != nil {
					return err
				}
			}
			return putRow(tx, metaKey(), meta)
		}}, nil
	}
	p.k.runGroup(ctx, []*op{o})
	return o.err
}

// dropUnread drops the wrapped rows of the older store that nothing reads any
// more: some of them are of epochs that no duty comes to again.
func (p *replay) dropUnread(ctx context.Context) error {
	k := p.k
	var unread []uint32
	err := k.store.View(ctx, func(r Reader) error {
		es, err := readEpochs(r)
		if err != nil {
			return err
		}
		all, err := allEpochs(r)
		if err != nil {
			return err
		}
		for _, e := range all {
			if es.needs(e.Number) {
				continue
			}
			err := r.Scan(wrappedPrefix(e.Number), nil, func([]byte, []byte) bool {
				unread = append(unread, e.Number)
				return false
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, number := range unread {
		if err := k.store.DropRange(ctx, wrappedPrefix(number)); err != nil {
			return err
		}
	}
	return nil
}
