package keys

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
)

// rewrapBatch is how many rows one transaction carries over. The store is held
// for as long as it takes to read and write them, some milliseconds.
const rewrapBatch = 1024

// Kinds of wrapped rows that are carried over, in the order of their keys. KEKs
// are not: each epoch has its own.
var carriedKinds = []byte{'B', 'D', 'H', 'P', 'S'}

// owned says whose a wrapped row is, and what it is bound to.
type owned struct {
	tenant id16
	// live: the row's key is in use. When it is not, the row must be dead.
	live bool
	// fenced: the whole tenant is erased, which is not yet true of every row.
	fenced bool
	// row and value are what says so.
	row, value []byte
	// class and generation are bound into a DEK's wrapping.
	class, generation uint32
}

// identity is what a row with this key is bound to.
func (o *owned) identity(rowKey []byte, kek id16) []byte {
	if rowKey[5] == 'D' {
		return dekIdentity(rowKey, kek, o.class, o.generation)
	}
	return rowIdentity(rowKey, kek)
}

// ownerOf finds what makes a wrapped row live.
func ownerOf(r Reader, rowKey []byte) (*owned, error) {
	o := new(owned)
	rest := rowKey[6:]
	switch kind := rowKey[5]; kind {
	case 'S':
		o.live = id16(rest) == ledgerKeyName || id16(rest) == requestKeyName
		return o, nil
	case 'P':
		o.tenant, o.row = id16(rest), tenantKey(id16(rest))
	case 'B':
		o.tenant = id16(rest)
		o.row = append([]byte{'B'}, rest...)
	case 'D', 'H':
		o.tenant = id16(rest)
		o.row = subjectKey(o.tenant, id16(rest[16:]))
	default:
		return nil, damaged("a wrapped row of an unknown kind", nil)
	}
	var err error
	if o.value, err = r.Get(o.row); err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	return o, o.judge(rowKey)
}

// judge decides from o.value, nil if there is no such row.
func (o *owned) judge(rowKey []byte) error {
	o.live = false
	if o.value == nil {
		return nil
	}
	switch rowKey[5] {
	case 'P':
		var t storev1.Tenant
		if err := decode(o.value, &t); err != nil {
			return err
		}
		o.live = t.State == storev1.TenantState_TENANT_STATE_ACTIVE
		o.fenced = t.State == storev1.TenantState_TENANT_STATE_FENCED
	case 'B':
		var b storev1.Bucket
		if err := decode(o.value, &b); err != nil {
			return err
		}
		o.live = b.State != storev1.BucketState_BUCKET_STATE_DEAD && b.State != storev1.BucketState_BUCKET_STATE_UNSPECIFIED
	case 'D', 'H':
		var s storev1.Subject
		if err := decode(o.value, &s); err != nil {
			return err
		}
		id := rowKey[len(rowKey)-16:]
		for _, sc := range s.Classes {
			if bytes.Equal(sc.KeyId, id) && sc.State != storev1.LifeState_LIFE_STATE_DESTROYED && s.State != storev1.LifeState_LIFE_STATE_DESTROYED {
				o.live, o.class, o.generation = true, sc.ClassNumber, sc.Generation
			}
		}
		// A share of an erased subject is nothing, and not carried over; it is
		// overwritten in its own time.
		o.fenced = rowKey[5] == 'H' && !o.live
	}
	return nil
}

// wrappedRow is a wrapped row on its way to the next epoch.
type wrappedRow struct {
	key, value []byte
	w          storev1.Wrapped
	owner      *owned
	old, next  *kek
	nextID     id16

	target  []byte
	carried []byte // the new row; nil: it is dead, or damaged
	damage  error
}

// rekey is the row's key in another epoch.
func rekey(key []byte, epoch uint32) []byte {
	k := bytes.Clone(key)
	binary.BigEndian.PutUint32(k[1:5], epoch)
	return k
}

// kekCache holds the KEKs that a pass over an epoch's rows needs, freshly
// unwrapped by the KMS, for as long as the pass lasts, and no longer than the
// lease of KEKs. It is used by one goroutine.
type kekCache struct {
	k     *Keys
	since time.Time // when the oldest of keks was asked for
	keks  map[id16]*kek
	names map[id16]*storev1.Tenant
}

// maxCached bounds the KEKs that a pass holds. Rows come in the order of their
// tenants.
const maxCached = 4096

func newKEKCache(k *Keys) *kekCache {
	return &kekCache{k: k, keks: make(map[id16]*kek), names: make(map[id16]*storev1.Tenant)}
}

func (c *kekCache) tenant(ctx context.Context, id id16) (*storev1.Tenant, error) {
	if t := c.names[id]; t != nil {
		return t, nil
	}
	t := new(storev1.Tenant)
	err := c.k.store.View(ctx, func(r Reader) error { return getRow(r, tenantKey(id), t) })
	if err != nil {
		return nil, err
	}
	if len(c.names) >= maxCached {
		clear(c.names)
	}
	c.names[id] = t
	return t, nil
}

// get returns a KEK of a tenant and its epoch.
func (c *kekCache) get(ctx context.Context, tenant id16, id id16, epoch uint32) (*kek, error) {
	now := c.k.clock()
	if len(c.keks) >= maxCached || now.Sub(c.since) >= c.k.cfg.KEKLease {
		clear(c.keks)
	}
	if w := c.keks[id]; w != nil {
		return w, nil
	}
	if len(c.keks) == 0 {
		c.since = now
	}
	t, err := c.tenant(ctx, tenant)
	if err != nil {
		return nil, err
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	w, err := loadKEK(call, c.k.store, c.k.ring.unwrap, t.Name, tenant, id, epoch)
	if err != nil {
		return nil, err
	}
	c.keks[id] = w
	return w, nil
}

// drain carries the rows of an epoch over to the open one, waits until every
// keyd has seen that, verifies, and calls the epoch drained.
func (d *duties) drain(ctx context.Context, es epochs, e *storev1.Epoch) (bool, error) {
	k := d.k
	if es.draining != e.Number {
		return false, damaged("two epochs drain", nil)
	}
	progress, err := d.progress(ctx, e.Number)
	if err != nil {
		return false, err
	}
	if !progress.Done {
		d.waits(e.Number, "its keys to be carried over")
		return true, d.rewrap(ctx, e.Number, es.open, progress)
	}
	if err := d.recent(e.Number); err != nil {
		d.waits(e.Number, "damaged rows to be repaired")
		return false, err
	}
	if _, failed := d.failures[e.Number]; failed || progress.Damaged != 0 && progress.UpdatedMs <= d.k.now().Add(-retryAfter).UnixMilli() {
		// It may have been repaired: everything once more.
		delete(d.failures, e.Number)
		return true, d.beginAnew(ctx, e.Number)
	}
	if progress.Damaged != 0 {
		return false, d.failed(e.Number, fmt.Errorf("%w: %d wrapped rows cannot be carried over", ErrDamaged, progress.Damaged))
	}
	behind, err := d.behind(ctx, func(p peer) bool { return p.row.Epoch < es.open })
	if err != nil {
		return false, err
	}
	if behind != 0 {
		d.waits(e.Number, "%d other keyds to see the open epoch", behind)
		return false, nil
	}
	d.waits(e.Number, "the verification of all keys")
	if err := k.verifyDrained(ctx, e.Number, es.open); errors.Is(err, ErrDamaged) {
		return false, d.failed(e.Number, err)
	} else if err != nil {
		return false, err
	}
	return true, d.drained(ctx, e.Number)
}

// beginAnew has all rows gone over again.
func (d *duties) beginAnew(ctx context.Context, number uint32) error {
	return d.k.update(ctx, func(tx Tx) error {
		if err := d.fence(tx); err != nil {
			return err
		}
		var p storev1.Rewrap
		if err := getRow(tx, rewrapKey(number), &p); err != nil {
			return err
		}
		now := d.k.now().UnixMilli()
		return putRow(tx, rewrapKey(number), &storev1.Rewrap{Total: p.Total, StartedMs: now, UpdatedMs: now})
	})
}

// behind counts the other keyds that are alive and of which late is true.
func (d *duties) behind(ctx context.Context, late func(peer) bool) (n int, err error) {
	err = d.k.store.View(ctx, func(r Reader) error {
		others, err := d.peers.look(r, d.k.pulse.id, d.k.clock())
		for _, p := range others {
			if !p.lapsed && late(p) {
				n++
			}
		}
		return err
	})
	return n, err
}

// progress reads how far the rewrapping of an epoch is, and begins it.
func (d *duties) progress(ctx context.Context, number uint32) (*storev1.Rewrap, error) {
	k := d.k
	p := new(storev1.Rewrap)
	err := k.store.View(ctx, func(r Reader) error { return getRow(r, rewrapKey(number), p) })
	if !errors.Is(err, ErrNotFound) {
		return p, err
	}
	total, err := d.count(ctx, number)
	if err != nil {
		return nil, err
	}
	now := k.now().UnixMilli()
	p = &storev1.Rewrap{Total: total, StartedMs: now, UpdatedMs: now}
	err = k.update(ctx, func(tx Tx) error {
		if err := d.fence(tx); err != nil {
			return err
		}
		return putRow(tx, rewrapKey(number), p)
	})
	return p, err
}

// chunk is how many rows one snapshot of a long pass over the store covers.
const chunk = 4096

// count counts the rows that are to be carried over. None is added any more.
func (d *duties) count(ctx context.Context, number uint32) (uint64, error) {
	var total uint64
	for _, kind := range carriedKinds {
		err := d.k.scanAll(ctx, wrappedKey(number, kind, 0), nil, func(Reader, []byte, []byte) error {
			total++
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return total, nil
}

// scanAll calls fn for every row under prefix and after after, in several
// snapshots, each with the Reader that the row is from.
func (k *Keys) scanAll(ctx context.Context, prefix, after []byte, fn func(r Reader, key, value []byte) error) error {
	for {
		n := 0
		err := k.store.View(ctx, func(r Reader) error {
			var bad error
			err := r.Scan(prefix, after, func(key, value []byte) bool {
				after = key
				n++
				bad = fn(r, key, value)
				return bad == nil && n < chunk
			})
			return errors.Join(err, bad)
		})
		if err != nil || n < chunk {
			return err
		}
	}
}

// rewrap carries rows over until the end is reached. Reading and wrapping are
// ahead of the transactions that write, which look again at everything that
// the new row depends on.
func (d *duties) rewrap(ctx context.Context, from, to uint32, progress *storev1.Rewrap) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type batch struct {
		rows []*wrappedRow
		err  error
	}
	ahead := make(chan batch, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer close(ahead)
		cache := newKEKCache(d.k)
		after := progress.Cursor
		for {
			rows, err := d.k.nextRows(ctx, from, after)
			if err == nil {
				err = d.k.wrapRows(ctx, cache, rows, from, to)
			}
			select {
			case ahead <- batch{rows, err}:
			case <-ctx.Done():
				return
			}
			if err != nil || len(rows) == 0 {
				return
			}
			after = rows[len(rows)-1].key
		}
	})
	begun, done := d.k.clock(), 0
	for b := range ahead {
		if b.err != nil {
			return b.err
		}
		if len(b.rows) == 0 {
			return d.finishRewrap(ctx, from, to, progress)
		}
		if err := d.commitRows(ctx, from, to, progress, b.rows); err != nil {
			return err
		}
		done += len(b.rows)
		if rate := d.k.cfg.RewrapRate; rate > 0 {
			due := time.Duration(float64(done) / float64(rate) * float64(time.Second))
			if err := pause(ctx, due-d.k.clock().Sub(begun)); err != nil {
				return err
			}
		} else {
			runtime.Gosched()
		}
	}
	return ctx.Err()
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// nextRows reads the rows that follow after, with their owners; none at the end.
func (k *Keys) nextRows(ctx context.Context, epoch uint32, after []byte) ([]*wrappedRow, error) {
	var rows []*wrappedRow
	err := k.store.View(ctx, func(r Reader) error {
		for _, kind := range carriedKinds {
			prefix := wrappedKey(epoch, kind, 0)
			if len(after) >= len(prefix) && bytes.Compare(after[:len(prefix)], prefix) > 0 {
				continue
			}
			err := r.Scan(prefix, after, func(key, value []byte) bool {
				rows = append(rows, &wrappedRow{key: key, value: value})
				return len(rows) < rewrapBatch
			})
			if err != nil {
				return err
			}
			if len(rows) == rewrapBatch {
				break
			}
		}
		var last *owned // several keys of one subject follow each other
		for _, row := range rows {
			if err := decode(row.value, &row.w); err != nil {
				row.damage = err
				continue
			}
			if row.w.Dead {
				continue
			}
			var err error
			if last != nil && row.key[5] == 'D' && bytes.Equal(last.row, subjectKey(id16(row.key[6:]), id16(row.key[22:]))) {
				row.owner = &owned{tenant: last.tenant, row: last.row, value: last.value}
				err = row.owner.judge(row.key)
			} else {
				row.owner, err = ownerOf(r, row.key)
			}
			switch {
			case errors.Is(err, ErrDamaged):
				row.damage = err
			case err != nil:
				return err
			}
			last = row.owner
		}
		return nil
	})
	return rows, err
}

// wrapRows unwraps what rows hold and wraps it under the next epoch's KEKs.
func (k *Keys) wrapRows(ctx context.Context, cache *kekCache, rows []*wrappedRow, from, to uint32) error {
	for _, row := range rows {
		if row.w.Dead || row.damage != nil {
			continue
		}
		t, err := cache.tenant(ctx, row.owner.tenant)
		if errors.Is(err, ErrNotFound) {
			row.damage = damaged("a wrapped row of no tenant", nil)
			continue
		}
		if err != nil {
			return err
		}
		if t.State != storev1.TenantState_TENANT_STATE_ACTIVE {
			row.owner.fenced = true
			continue
		}
		if row.owner.fenced {
			continue
		}
		var ok bool
		if row.nextID, ok = kekFor(t, to); !ok {
			return damaged("a tenant has no KEK of the open epoch", nil)
		}
		if !row.owner.live || len(row.w.KekId) != len(id16{}) {
			row.damage = damaged("a wrapped row whose owner does not name it", nil)
			continue
		}
		if row.next, err = cache.get(ctx, row.owner.tenant, row.nextID, to); err != nil {
			return err
		}
		if row.old, err = cache.get(ctx, row.owner.tenant, id16(row.w.KekId), from); err != nil {
			return err
		}
	}
	eachRow(rows, func(row *wrappedRow) { row.wrap(to) })
	return nil
}

// eachRow calls fn for every row, on all cores but one.
func eachRow(rows []*wrappedRow, fn func(*wrappedRow)) {
	workers := max(1, runtime.GOMAXPROCS(0)-1)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for j := i; j < len(rows); j += workers {
				fn(rows[j])
			}
		})
	}
	wg.Wait()
}

// wrap makes the row's successor.
func (row *wrappedRow) wrap(to uint32) {
	if row.old == nil || row.next == nil {
		return
	}
	key, err := row.old.Unwrap(row.w.Ciphertext, row.owner.identity(row.key, id16(row.w.KekId)))
	if err != nil {
		row.damage = damaged("a wrapped row does not open", err)
		return
	}
	defer clear(key)
	row.target = rekey(row.key, to)
	// That it opens is proven by the scan, before the old row goes.
	c, err := row.next.WrapUnproven(key, row.owner.identity(row.target, row.nextID))
	if err == nil {
		row.carried, err = encode(&storev1.Wrapped{KekId: row.nextID[:], Ciphertext: c})
	}
	row.damage = err
}

// commitRows writes the successors of rows, and the cursor. A batch that is
// too large, or meets too much traffic, goes in halves.
func (d *duties) commitRows(ctx context.Context, from, to uint32, progress *storev1.Rewrap, rows []*wrappedRow) error {
	var next storev1.Rewrap
	err := d.k.update(ctx, func(tx Tx) error {
		if err := d.stillDraining(tx, from, to); err != nil {
			return err
		}
		next = storev1.Rewrap{
			Cursor: rows[len(rows)-1].key, Total: progress.Total, StartedMs: progress.StartedMs, UpdatedMs: d.k.now().UnixMilli(),
			Rewrapped: progress.Rewrapped, Dead: progress.Dead, Damaged: progress.Damaged,
		}
		c := carrier{tx: tx, to: to}
		for _, row := range rows {
			if err := c.carry(row, &next); err != nil {
				return err
			}
		}
		return putRow(tx, rewrapKey(from), &next)
	})
	if (errors.Is(err, ErrTooLarge) || errors.Is(err, ErrConflict)) && len(rows) > 1 {
		half := len(rows) / 2
		if err := d.commitRows(ctx, from, to, progress, rows[:half]); err != nil {
			return err
		}
		return d.commitRows(ctx, from, to, progress, rows[half:])
	}
	if err != nil {
		return err
	}
	progress.Cursor, progress.UpdatedMs = next.Cursor, next.UpdatedMs
	progress.Rewrapped, progress.Dead, progress.Damaged = next.Rewrapped, next.Dead, next.Damaged
	return nil
}

// stillDraining fails unless this keyd has the duties and the epochs are those
// that the work was begun for.
func (d *duties) stillDraining(tx Tx, from, to uint32) error {
	if err := d.fence(tx); err != nil {
		return err
	}
	es, err := readEpochs(tx)
	if err != nil {
		return err
	}
	if es.open != to || es.draining != from {
		return errTurned
	}
	_, err = readEpoch(tx, to)
	return err
}

// carrier carries rows over in one transaction.
type carrier struct {
	tx Tx
	to uint32
	// What the newest row depended on: the next one often depends on the same.
	row      []byte
	current  []byte
	tenant   id16
	tenantOK bool
	kekID    id16
}

// carry writes a row's successor if all that it was made from still holds. A
// key that was destroyed meanwhile is not carried over.
func (c *carrier) carry(row *wrappedRow, p *storev1.Rewrap) error {
	if row.damage != nil {
		p.Damaged++
		return nil
	}
	if row.carried == nil {
		p.Dead++
		return nil
	}
	switch now, err := c.tx.Get(row.key); {
	case err != nil:
		return damaged("a wrapped row has gone", err)
	case !bytes.Equal(now, row.value):
		// Only a destruction changes such a row.
		p.Dead++
		return nil
	}
	if live, err := c.live(row); err != nil || !live {
		p.Dead++
		return err
	}
	p.Rewrapped++
	return c.tx.Put(row.target, row.carried)
}

// live looks again at the rows that make a wrapped row live.
func (c *carrier) live(row *wrappedRow) (bool, error) {
	o := row.owner
	if o.tenant != c.tenant || !c.tenantOK {
		var t storev1.Tenant
		if err := getRow(c.tx, tenantKey(o.tenant), &t); err != nil {
			return false, err
		}
		var ok bool
		c.kekID, ok = kekFor(&t, c.to)
		c.tenant, c.tenantOK = o.tenant, ok && t.State == storev1.TenantState_TENANT_STATE_ACTIVE
	}
	if !c.tenantOK || c.kekID != row.nextID {
		return false, nil
	}
	if o.row == nil {
		return true, nil
	}
	if !bytes.Equal(o.row, c.row) {
		value, err := c.tx.Get(o.row)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return false, err
		}
		c.row, c.current = o.row, value
	}
	if bytes.Equal(c.current, o.value) {
		return true, nil
	}
	now := owned{tenant: o.tenant, row: o.row, value: c.current}
	if err := now.judge(row.key); err != nil {
		return false, err
	}
	return now.live && now.class == o.class && now.generation == o.generation, nil
}

// finishRewrap records that every row was dealt with.
func (d *duties) finishRewrap(ctx context.Context, from, to uint32, progress *storev1.Rewrap) error {
	err := d.k.update(ctx, func(tx Tx) error {
		if err := d.stillDraining(tx, from, to); err != nil {
			return err
		}
		var p storev1.Rewrap
		if err := getRow(tx, rewrapKey(from), &p); err != nil {
			return err
		}
		p.Done, p.UpdatedMs = true, d.k.now().UnixMilli()
		return putRow(tx, rewrapKey(from), &p)
	})
	if err == nil {
		d.k.log.Info("keys are carried over", "epoch", from, "rewrapped", progress.Rewrapped, "dead", progress.Dead, "damaged", progress.Damaged)
	}
	return err
}
