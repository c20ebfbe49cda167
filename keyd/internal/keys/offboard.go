package keys

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// A tenant is erased by its KEKs: they are overwritten in the transaction that
// fences it, and nothing of the tenant's opens any more. What they wrapped is
// overwritten afterwards, in slices, by the duty.

// DestroyTenant erases a tenant for good.
func (k *Keys) DestroyTenant(ctx context.Context, req *keydv1.DestroyTenantRequest) (*Recorded, error) {
	q := &request{kind: "destroy-tenant", tenant: req.Tenant, id: req.RequestId, reason: req.Reason}
	if err := q.prepare(ctx, k); err != nil {
		return nil, err
	}
	var already bool
	o := &op{rows: q.rows(), alone: true, closes: string(tenantKey(q.keys.id)), check: func(r Reader, now time.Time) (*plan, error) {
		row, err := q.earlier(r)
		if err != nil {
			return nil, err
		}
		if row != nil {
			already = row.AlreadyDestroyed
			return repeat(row), nil
		}
		p, err := k.planDestroyTenant(r, q, now)
		already = err == nil && len(p.statements) == 0
		return p, err
	}}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	k.ring.forget(req.Tenant)
	k.duties.kick()
	rec, err := k.recorded(ctx, o)
	if err != nil {
		return nil, err
	}
	rec.Repeated = already
	return rec, nil
}

func (k *Keys) planDestroyTenant(r Reader, q *request, now time.Time) (*plan, error) {
	es, err := readEpochs(r)
	if err != nil {
		return nil, err
	}
	epoch, err := readEpoch(r, es.open)
	if err != nil {
		return nil, err
	}
	var t storev1.Tenant
	switch err := getRow(r, tenantKey(q.keys.id), &t); {
	case errors.Is(err, ErrNotFound):
		return nil, unknown("the tenant")
	case err != nil:
		return nil, err
	case t.Name != q.tenant:
		return nil, damaged("a tenant's row has another name", nil)
	case t.State == storev1.TenantState_TENANT_STATE_FENCED:
		return &plan{index: t.DestroyedAt - 1, write: func(tx Tx, index uint64) error {
			return q.remember(tx, index, now, true, 0)
		}}, nil
	}
	if h := k.holding(t.Holds, now); h != nil {
		return nil, held(h)
	}
	if err := noSubjectHeld(r, q.keys.id, k.holdTime(now)); err != nil {
		return nil, err
	}

	s := q.statement(receipt.Destroyed, now)
	s.Scope, s.Epoch, s.Existed = receipt.ScopeTenant, epoch.Number, receipt.ExistedYes
	s.FinalBy, s.FinalBasis = k.finality(epoch, now)
	s.Anchor, _ = k.anchor.Domain()
	var lease time.Duration
	for n := uint32(1); n < t.NextClass; n++ {
		c, err := classByNumber(r, q.keys.id, n)
		if err != nil {
			return nil, err
		}
		lease = max(lease, k.longestLease(c, now))
	}
	s.DrainedBy = k.drainedBy(es, now, lease)
	var doomed [][]byte
	for _, e := range []uint32{es.open, es.draining, es.preparing} {
		for _, key := range [][]byte{wrappedPseudonymKey(e, q.keys.id), kekRowOf(&t, e, q.keys.id)} {
			if e == 0 || key == nil {
				continue
			}
			switch _, err := r.Get(key); {
			case err == nil:
				doomed = append(doomed, key)
			case !errors.Is(err, ErrNotFound):
				return nil, err
			}
		}
	}
	return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
		t.State, t.DestroyedAt, t.Holds = storev1.TenantState_TENANT_STATE_FENCED, index+1, nil
		if err := putRow(tx, tenantKey(q.keys.id), &t); err != nil {
			return err
		}
		for _, key := range doomed {
			if err := putRow(tx, key, &storev1.Wrapped{Dead: true}); err != nil {
				return err
			}
		}
		if err := putRow(tx, sweepKey(q.keys.id), new(storev1.Sweep)); err != nil {
			return err
		}
		return q.remember(tx, index, now, false, 0)
	}}, nil
}

// kekRowOf is the key of a tenant's KEK of an epoch, nil if it has none.
func kekRowOf(t *storev1.Tenant, epoch uint32, id id16) []byte {
	kek, ok := kekFor(t, epoch)
	if !ok {
		return nil
	}
	return wrappedKEKKey(epoch, id, kek)
}

// noSubjectHeld fails while a hold on any subject of a tenant binds. The scan
// does not conflict with a hold that is just being placed; the row that it
// reads first does.
func noSubjectHeld(r Reader, tenant id16, now time.Time) error {
	var changes storev1.Holders
	if err := getRow(r, holdersKey(tenant), &changes); err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	var found error
	err := r.Scan(heldKey(tenant, id16{})[:17], nil, func(key, value []byte) bool {
		var row storev1.HeldSubject
		if found = decode(value, &row); found != nil {
			return false
		}
		if row.UntilMs != 0 && now.UnixMilli() >= row.UntilMs {
			return true
		}
		var s storev1.Subject
		if found = getRow(r, subjectKey(tenant, id16(key[17:])), &s); found != nil {
			return false
		}
		if h := binding(s.Holds, now); h != nil {
			found = held(h)
		}
		return found == nil
	})
	return errors.Join(found, err)
}

// sweepBatch is the number of rows that one transaction overwrites.
const sweepBatch = 512

// sweepTenants overwrites what erased tenants' KEKs wrapped.
func (d *duties) sweepTenants(ctx context.Context) (again bool, err error) {
	var tenants []id16
	err = d.k.scanAll(ctx, []byte{'Z'}, nil, func(_ Reader, key, _ []byte) error {
		tenants = append(tenants, id16(key[1:]))
		return nil
	})
	if err != nil {
		return false, err
	}
	var bad damage
	for _, t := range tenants {
		if err := bad.pass(d.sweepTenant(ctx, t)); err != nil {
			return false, err
		}
	}
	return false, bad.first
}

// swept are the kinds of rows that a tenant's KEK wraps.
var swept = []byte{'B', 'D', 'H'}

// sweepTenant goes over the tenant's rows once. Nothing is added behind it:
// whatever wraps reads the tenant's row, and so does whatever carries rows over.
func (d *duties) sweepTenant(ctx context.Context, tenant id16) error {
	for finished := false; !finished; {
		err := d.k.update(ctx, func(tx Tx) error {
			if err := d.fence(tx); err != nil {
				return err
			}
			var row storev1.Sweep
			if err := getRow(tx, sweepKey(tenant), &row); err != nil {
				return err
			}
			es, err := readEpochs(tx)
			if err != nil {
				return err
			}
			var doomed [][]byte
			for _, e := range slices.Sorted(slices.Values(es.read())) {
				for _, kind := range swept {
					prefix := append(wrappedKey(e, kind, 16), tenant[:]...)
					after := row.Cursor
					switch {
					case bytes.HasPrefix(after, prefix):
					case bytes.Compare(after, prefix) > 0:
						continue
					default:
						after = nil
					}
					if err := tx.Scan(prefix, after, func(key, _ []byte) bool {
						doomed = append(doomed, slices.Clone(key))
						return len(doomed) < sweepBatch
					}); err != nil {
						return err
					}
				}
			}
			for _, key := range doomed[:min(len(doomed), sweepBatch)] {
				if err := putRow(tx, key, &storev1.Wrapped{Dead: true}); err != nil {
					return err
				}
				row.Cursor = key
			}
			if finished = len(doomed) == 0; finished {
				return tx.Delete(sweepKey(tenant))
			}
			return putRow(tx, sweepKey(tenant), &row)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
