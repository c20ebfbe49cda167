package keys

import (
	"context"
	"errors"
	"slices"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// Retention is the death of a bucket's key. It counts from sealing, so a bucket
// is due when its youngest blob is: a lease after its end. From then on opens
// are refused, by the clock and without anybody's work. A bucket then goes
//
//	live → expiring → materialising → dead
//
// It is expiring for a grace, in which a longer retention takes it back, or for
// as long as opens are only to be refused; a change of either begins the grace
// anew. While it is materialising, the shares of held subjects are kept; when it
// is dead its key is overwritten, and what was sealed in it opens for nobody but
// them, for as long as they are held.

var errExpired = fail(keydv1.Outcome_OUTCOME_EXPIRED, "the retention of this bucket has ended")

// dueOf is when a bucket's retention ends; zero: never. A key of the bucket may
// have been out, and sealed with, for the longest lease beyond its end.
func dueOf(c *storev1.Class, b *storev1.Bucket) time.Time {
	if c.RetentionS == 0 {
		return time.Time{}
	}
	return time.Unix(b.EndS, 0).Add(MaxLease + time.Duration(c.RetentionS)*time.Second)
}

// expired says whether a bucket is past its retention. Where the key is dying
// or dead, no policy brings it back.
func expired(c *storev1.Class, b *storev1.Bucket, now time.Time) bool {
	switch b.State {
	case storev1.BucketState_BUCKET_STATE_MATERIALISING, storev1.BucketState_BUCKET_STATE_DEAD:
		return true
	}
	due := dueOf(c, b)
	return !due.IsZero() && !now.Before(due)
}

// newRow is a row to be put.
type newRow struct{ key, value []byte }

// shareRow derives a subject's share of a bucket and wraps it under the open
// epoch's KEK.
func shareRow(w *kek, kekID id16, t *tenantKeys, handle id16, class *storev1.Class, start uint64, bucketKey, keyID []byte) (newRow, error) {
	share, err := shareOf(bucketKey, t.name, class.Number, start, keyID)
	if err != nil {
		return newRow{}, err
	}
	defer clear(share)
	key := wrappedShareKey(w.epoch, t.id, handle, class.Number, start, keyID)
	wrapped, err := wrapRow(w.Wrapper, kekID, share, rowIdentity(key, kekID))
	if err != nil {
		return newRow{}, err
	}
	value, err := encode(wrapped)
	return newRow{key, value}, err
}

// sharesOf returns the rows that keep a subject's shares of a bucket; none if
// the subject has no key of the class.
func sharesOf(r Reader, es epochs, tenant *storev1.Tenant, t *tenantKeys, handle id16, s *storev1.Subject, class *storev1.Class, start uint64) ([]newRow, error) {
	sc := classOf(s, class.Number)
	if sc == nil || len(sc.KeyId) == 0 {
		return nil, nil
	}
	kekID, ok := kekFor(tenant, es.open)
	if !ok {
		return nil, damaged("a tenant has no KEK of the open epoch", nil)
	}
	w := t.wrapper(kekID)
	if w == nil {
		return nil, errNeedKEKs
	}
	var q query
	bk, err := readKey(r, es, t, &q, func(e uint32) []byte { return wrappedBucketKey(e, t.id, class.Number, start) }, rowIdentity)
	switch {
	case errors.Is(err, errAgain):
		return nil, errNeedKEKs
	case errors.Is(err, ErrNotFound):
		return nil, damaged("a bucket that is not dead has no key", err)
	case err != nil:
		return nil, err
	}
	defer clear(bk)
	one, err := shareRow(w, kekID, t, handle, class, start, bk, sc.KeyId)
	return []newRow{one}, err
}

// errNeedKEKs: the KEKs in use have changed since holdKEKs.
var errNeedKEKs = unavailable("keys are being loaded; repeat the request", nil)

// holdKEKs loads the KEKs of the epochs that are in use.
func (k *Keys) holdKEKs(ctx context.Context, t *tenantKeys) error {
	var es epochs
	var tenant *storev1.Tenant
	err := k.store.View(ctx, func(r Reader) (err error) {
		if es, err = readEpochs(r); err != nil {
			return err
		}
		tenant, err = activeTenant(r, t.name)
		return err
	})
	if err != nil {
		return err
	}
	for _, epoch := range es.read() {
		if id, ok := kekFor(tenant, epoch); ok {
			_, err := k.ring.kek(ctx, t, id, epoch)
			if epoch != es.open && errors.Is(err, errRootGone) {
				continue // what was carried over already is served
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// sharesOfMaterialising keeps what a hold that is just being placed has a claim
// to: the worker that keeps shares may have passed the subject by already.
func (k *Keys) sharesOfMaterialising(r Reader, es epochs, tenant *storev1.Tenant, t *tenantKeys, handle id16, s *storev1.Subject) ([]newRow, error) {
	var m storev1.Materialising
	if err := getRow(r, materialisingKey(t.id), &m); err != nil {
		if errors.Is(err, ErrNotFound) {
			return nil, nil
		}
		return nil, err
	}
	var rows []newRow
	for _, b := range m.Buckets {
		class, err := classByNumber(r, t.id, b.ClassNumber)
		if err != nil {
			return nil, err
		}
		more, err := sharesOf(r, es, tenant, t, handle, s, class, uint64(b.StartS))
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

const (
	// maxExpiring bounds the buckets that one run moves on.
	maxExpiring = 500
	// maxMaterialising bounds the buckets of a tenant that are in that state
	// together, and with them the work of placing a hold.
	maxMaterialising = 16
	// shareBatch is the number of held subjects in one transaction.
	shareBatch = 256
)

// expire moves the buckets of every class with a retention on. What a clock
// triggers and nobody can undo is done only while the clock is believed.
func (d *duties) expire(ctx context.Context, clockOK bool) (again bool, err error) {
	k := d.k
	type place struct {
		tenant string
		id     id16
		class  *storev1.Class
	}
	var places []place
	var bad damage
	err = k.scanAll(ctx, []byte{'T'}, nil, func(r Reader, key, value []byte) error {
		var t storev1.Tenant
		if err := decode(value, &t); err != nil {
			return bad.pass(err)
		}
		id := id16(key[1:])
		if t.State != storev1.TenantState_TENANT_STATE_ACTIVE || id == systemTenant {
			return nil
		}
		for n := uint32(1); n < t.NextClass; n++ {
			c, err := classByNumber(r, id, n)
			if err != nil {
				if err := bad.pass(err); err != nil {
					return err
				}
				continue
			}
			if c.RetentionS != 0 {
				places = append(places, place{t.Name, id, c})
			}
		}
		return nil
	})
	if err := bad.pass(err); err != nil {
		return false, err
	}
	moved := 0
	for _, p := range places {
		n, err := d.expireClass(ctx, p.tenant, p.id, p.class, clockOK, maxExpiring-moved)
		if err := bad.pass(err); err != nil {
			return false, err
		}
		if moved += n; moved >= maxExpiring {
			return true, bad.first
		}
	}
	return false, bad.first
}

// expireClass moves up to limit buckets of one class on.
func (d *duties) expireClass(ctx context.Context, tenant string, id id16, class *storev1.Class, clockOK bool, limit int) (moved int, err error) {
	k := d.k
	// Dead buckets stay, so that their blobs answer expired; they are not
	// looked at again.
	floor := string(bucketKey(id, class.Number, 0)[:19])
	after := d.floors[floor]
	dead := true // so far, in this class
	var todo []uint64
	var bad damage
	prefix := []byte(floor)
	err = k.scanAll(ctx, prefix, after, func(_ Reader, key, value []byte) error {
		var b storev1.Bucket
		if err := decode(value, &b); err != nil {
			dead = false
			return bad.pass(err)
		}
		if b.State == storev1.BucketState_BUCKET_STATE_DEAD {
			if dead {
				d.floors[floor] = key
			}
			return nil
		}
		dead = false
		now := k.now()
		switch {
		case b.State == storev1.BucketState_BUCKET_STATE_LIVE && !expired(class, &b, now):
			return errEnough // and so are those that began later
		case b.State == storev1.BucketState_BUCKET_STATE_EXPIRING && expired(class, &b, now) && !d.mayDie(class, &b, now, clockOK):
			return nil
		}
		todo = append(todo, uint64(b.StartS))
		if len(todo) >= limit {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		if err := bad.pass(err); err != nil {
			return 0, err
		}
	}
	for _, start := range todo {
		ok, err := d.expireBucket(ctx, tenant, id, class.Number, start, clockOK)
		if err := bad.pass(err); err != nil {
			return moved, err
		}
		if ok {
			moved++
		}
	}
	return moved, bad.first
}

// mayDie says whether an expiring bucket's grace is over.
func (d *duties) mayDie(class *storev1.Class, b *storev1.Bucket, now time.Time, clockOK bool) bool {
	from := time.UnixMilli(max(b.ExpiringMs, class.EndSetMs))
	return clockOK && !class.DenyOnly && !now.Before(from.Add(d.k.cfg.Grace))
}

// expireBucket takes the steps that one bucket is due for.
func (d *duties) expireBucket(ctx context.Context, tenant string, id id16, number uint32, start uint64, clockOK bool) (moved bool, err error) {
	moved, state, err := d.moveBucket(ctx, tenant, id, number, start, clockOK)
	if err != nil || state != storev1.BucketState_BUCKET_STATE_MATERIALISING || !clockOK {
		return moved, err
	}
	if err := d.keepShares(ctx, tenant, id, number, start, d.k.now); err != nil {
		return moved, err
	}
	died, err := d.killBucket(ctx, tenant, id, number, start)
	return moved || died, err
}

// moveBucket changes the state of a bucket that has not come to materialising
// yet, if it is time.
func (d *duties) moveBucket(ctx context.Context, tenant string, id id16, number uint32, start uint64, clockOK bool) (moved bool, state storev1.BucketState, err error) {
	k := d.k
	err = k.update(ctx, func(tx Tx) error {
		moved, state = false, 0
		if err := d.fence(tx); err != nil {
			return err
		}
		t, err := activeTenant(tx, tenant)
		if err != nil {
			return err
		}
		class, err := classByNumber(tx, id, number)
		if err != nil {
			return err
		}
		var b storev1.Bucket
		if err := getRow(tx, bucketKey(id, number, start), &b); err != nil {
			return err
		}
		now := k.now()
		next := b.State
		switch b.State {
		case storev1.BucketState_BUCKET_STATE_LIVE:
			if expired(class, &b, now) {
				next = storev1.BucketState_BUCKET_STATE_EXPIRING
				b.ExpiringMs = now.UnixMilli()
			}
		case storev1.BucketState_BUCKET_STATE_EXPIRING:
			switch {
			case !expired(class, &b, now):
				next = storev1.BucketState_BUCKET_STATE_LIVE
				b.ExpiringMs = 0
			case !d.mayDie(class, &b, now, clockOK), binding(t.Holds, now) != nil:
			default:
				var m storev1.Materialising
				if err := getRow(tx, materialisingKey(id), &m); err != nil && !errors.Is(err, ErrNotFound) {
					return err
				}
				if len(m.Buckets) >= maxMaterialising {
					break
				}
				m.Buckets = append(m.Buckets, &storev1.BucketName{ClassNumber: number, StartS: int64(start)})
				if err := putRow(tx, materialisingKey(id), &m); err != nil {
					return err
				}
				next, b.Cursor = storev1.BucketState_BUCKET_STATE_MATERIALISING, nil
			}
		}
		state = next
		if next == b.State {
			return nil
		}
		moved, b.State = true, next
		return putRow(tx, bucketKey(id, number, start), &b)
	})
	return moved, state, err
}

// keepShares keeps the shares of the subjects that are held at a time. The bucket is
// materialising, so whoever is held from now on sees to it in the same
// transaction.
func (d *duties) keepShares(ctx context.Context, tenant string, id id16, number uint32, start uint64, at func() time.Time) error {
	k := d.k
	keys, err := k.ring.get(ctx, tenant)
	if err != nil {
		return err
	}
	turned := 0 // an epoch may turn under it
	for {
		if err := k.holdKEKs(ctx, keys); err != nil {
			return err
		}
		finished := false
		err := k.update(ctx, func(tx Tx) error {
			if err := d.fence(tx); err != nil {
				return err
			}
			es, err := readEpochs(tx)
			if err != nil {
				return err
			}
			t, err := activeTenant(tx, tenant)
			if err != nil {
				return err
			}
			class, err := classByNumber(tx, id, number)
			if err != nil {
				return err
			}
			var b storev1.Bucket
			if err := getRow(tx, bucketKey(id, number, start), &b); err != nil {
				return err
			}
			if b.State != storev1.BucketState_BUCKET_STATE_MATERIALISING {
				finished = true
				return nil
			}
			after := b.Cursor
			if len(after) == 0 {
				after = nil
			}
			var handles []id16
			if err := tx.Scan(heldKey(id, id16{})[:17], after, func(key, _ []byte) bool {
				handles = append(handles, id16(key[17:]))
				b.Cursor = slices.Clone(key)
				return len(handles) < shareBatch
			}); err != nil {
				return err
			}
			finished = len(handles) < shareBatch
			now := at()
			for _, h := range handles {
				var s storev1.Subject
				if err := getRow(tx, subjectKey(id, h), &s); err != nil {
					return err
				}
				if binding(s.Holds, now) == nil {
					continue
				}
				rows, err := sharesOf(tx, es, t, keys, h, &s, class, start)
				if err != nil {
					return err
				}
				for _, r := range rows {
					if err := tx.Put(r.key, r.value); err != nil {
						return err
					}
				}
			}
			return putRow(tx, bucketKey(id, number, start), &b)
		})
		if errors.Is(err, errNeedKEKs) && turned < 3 {
			turned++
			continue
		}
		if err != nil || finished {
			return err
		}
	}
}

// killBucket destroys a bucket's key, unless a hold on the tenant binds now.
func (d *duties) killBucket(ctx context.Context, tenant string, id id16, number uint32, start uint64) (died bool, err error) {
	k := d.k
	bucketRow := string(bucketKey(id, number, start))
	o := &op{rows: []string{bucketRow}, check: func(r Reader, now time.Time) (*plan, error) {
		died = false
		nothing := &plan{nothing: true, write: func(Tx, uint64) error { return nil }}
		if err := d.fence(r); err != nil {
			return nil, err
		}
		es, err := readEpochs(r)
		if err != nil {
			return nil, err
		}
		epoch, err := readEpoch(r, es.open)
		if err != nil {
			return nil, err
		}
		t, err := activeTenant(r, tenant)
		if err != nil {
			return nil, err
		}
		class, err := classByNumber(r, id, number)
		if err != nil {
			return nil, err
		}
		var b storev1.Bucket
		if err := getRow(r, []byte(bucketRow), &b); err != nil {
			return nil, err
		}
		if b.State != storev1.BucketState_BUCKET_STATE_MATERIALISING || binding(t.Holds, now) != nil {
			return nothing, nil
		}
		var m storev1.Materialising
		if err := getRow(r, materialisingKey(id), &m); err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
		m.Buckets = slices.DeleteFunc(m.Buckets, func(n *storev1.BucketName) bool {
			return n.ClassNumber == number && n.StartS == int64(start)
		})
		var doomed [][]byte
		for _, e := range es.read() {
			key := wrappedBucketKey(e, id, number, start)
			switch _, err := r.Get(key); {
			case err == nil:
				doomed = append(doomed, key)
			case !errors.Is(err, ErrNotFound):
				return nil, err
			}
		}
		s := &receipt.Statement{
			Kind: receipt.Expired, Time: now, Tenant: tenant, Epoch: epoch.Number,
			Classes:      []receipt.Class{{Name: class.Name, Number: number}},
			BucketStartS: b.StartS, BucketEndS: b.EndS,
			// A hold that was released a moment ago has had keys leased beyond
			// the end of the retention.
			DrainedBy: k.drainedBy(es, now, k.longestLease(class, now)),
		}
		s.FinalBy, s.FinalBasis = k.finality(epoch, now)
		s.Anchor, _ = k.anchor.Domain()
		died = true
		return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, _ uint64) error {
			b.State, b.Cursor = storev1.BucketState_BUCKET_STATE_DEAD, nil
			if err := putRow(tx, []byte(bucketRow), &b); err != nil {
				return err
			}
			if err := putRow(tx, materialisingKey(id), &m); err != nil {
				return err
			}
			for _, key := range doomed {
				if err := putRow(tx, key, &storev1.Wrapped{Dead: true}); err != nil {
					return err
				}
			}
			return nil
		}}, nil
	}, alone: true}
	err = k.record(ctx, o)
	return died && err == nil, err
}

// dropShares overwrites the shares of subjects that no hold binds any more.
func (d *duties) dropShares(ctx context.Context) error {
	k := d.k
	var es epochs
	err := k.store.View(ctx, func(r Reader) (err error) {
		es, err = readEpochs(r)
		return err
	})
	if err != nil {
		return err
	}
	var bad damage
	for _, epoch := range es.read() {
		var doomed [][]byte
		err := k.scanAll(ctx, wrappedKey(epoch, 'H', 0), nil, func(r Reader, key, value []byte) error {
			var w storev1.Wrapped
			if err := decode(value, &w); err != nil || w.Dead {
				return bad.pass(err)
			}
			ended, err := k.holdEnded(r, key)
			if ended {
				doomed = append(doomed, key)
			}
			return bad.pass(err)
		})
		if err := bad.pass(err); err != nil {
			return err
		}
		for batch := range slices.Chunk(doomed, shareBatch) {
			err := k.update(ctx, func(tx Tx) error {
				if err := d.fence(tx); err != nil {
					return err
				}
				for _, key := range batch {
					ended, err := k.holdEnded(tx, key)
					if err != nil {
						return err
					}
					if ended {
						if err := putRow(tx, key, &storev1.Wrapped{Dead: true}); err != nil {
							return err
						}
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return bad.first
}

// holdEnded says whether a share is kept for nobody: its bucket is dead and no
// hold binds its subject or tenant.
func (k *Keys) holdEnded(r Reader, shareKey []byte) (bool, error) {
	tenant, handle := id16(shareKey[6:]), id16(shareKey[22:])
	now := k.holdTime(k.now())
	var t storev1.Tenant
	if err := getRow(r, tenantKey(tenant), &t); err != nil {
		return false, err
	}
	var s storev1.Subject
	if err := getRow(r, subjectKey(tenant, handle), &s); err != nil {
		return false, err
	}
	return binding(t.Holds, now) == nil && binding(s.Holds, now) == nil, nil
}
