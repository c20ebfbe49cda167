package keys

import (
	"context"
	"errors"
	"fmt"

	storev1 "lethe/proto/keyd/store/v1"
)

// The scans prove, from the store and from KEKs that the KMS has just
// unwrapped, that nothing depends on an epoch any more. They look at the store
// in many snapshots, which is enough: what each of them checks of a row stays
// true, but for destructions, and those keep it true.

// finding is what a scan found wrong. It is ErrDamaged.
func finding(what string, rowKey []byte) error {
	return fmt.Errorf("%w: verification: %s (a row of kind %c)", ErrDamaged, what, kindOf(rowKey))
}

func kindOf(rowKey []byte) byte {
	if rowKey[0] == 'w' && len(rowKey) > 5 {
		return rowKey[5]
	}
	return rowKey[0]
}

// verifyDrained is the first scan: all that is live under an epoch that drains
// is also under the open one, and opens there.
func (k *Keys) verifyDrained(ctx context.Context, from, to uint32) error {
	if err := k.verifyRows(ctx, to); err != nil {
		return err
	}
	if err := k.verifyCarried(ctx, from, to); err != nil {
		return err
	}
	return k.verifyOwners(ctx, to)
}

// verifyRetired is the second scan, before a root's destruction is scheduled:
// its epoch has no rows, and all that is live opens without its root.
func (k *Keys) verifyRetired(ctx context.Context, number uint32) error {
	var es epochs
	err := k.store.View(ctx, func(r Reader) (err error) {
		if es, err = readEpochs(r); err != nil {
			return err
		}
		var left error
		err = r.Scan(wrappedPrefix(number), nil, func(key, _ []byte) bool {
			left = finding("an epoch that was dropped has rows", key)
			return false
		})
		return errors.Join(err, left)
	})
	if err == nil && es.needs(number) {
		err = fmt.Errorf("%w: verification: a retired epoch is in use", ErrDamaged)
	}
	if err != nil {
		return err
	}
	for _, epoch := range es.read() {
		if err := k.verifyRows(ctx, epoch); err != nil {
			return err
		}
	}
	return k.verifyOwners(ctx, es.read()...)
}

// verifyRows checks that every key-bearing row of an epoch has a living owner
// that names it, and opens.
func (k *Keys) verifyRows(ctx context.Context, epoch uint32) error {
	cache := newKEKCache(k)
	var after []byte
	for {
		rows, err := k.nextRows(ctx, epoch, after)
		if err != nil || len(rows) == 0 {
			return err
		}
		after = rows[len(rows)-1].key
		for _, row := range rows {
			switch {
			case row.damage != nil:
				return finding("a row that does not parse", row.key)
			case row.w.Dead && len(row.w.Ciphertext) != 0:
				return finding("a dead row has a key", row.key)
			case row.w.Dead, row.owner.fenced: // its tenant is being erased as a whole
				continue
			case !row.owner.live, len(row.w.KekId) != len(id16{}):
				return finding("a key whose owner does not live or does not name it", row.key)
			}
			if row.old, err = cache.get(ctx, row.owner.tenant, id16(row.w.KekId), epoch); err != nil {
				fenced := false
				viewErr := k.store.View(ctx, func(r Reader) (err error) {
					fenced, err = isFenced(r, row.owner.tenant)
					return err
				})
				if viewErr != nil || !fenced {
					return errors.Join(err, viewErr)
				}
				row.old = nil // and so has gone the tenant's KEK
			}
		}
		eachRow(rows, func(row *wrappedRow) {
			if row.old == nil {
				return
			}
			secret, err := row.old.Unwrap(row.w.Ciphertext, row.owner.identity(row.key, id16(row.w.KekId)))
			row.damage = err
			clear(secret)
		})
		for _, row := range rows {
			if row.damage != nil {
				return finding("a key does not open", row.key)
			}
		}
	}
}

// verifyCarried checks that every live row of an epoch has its successor.
func (k *Keys) verifyCarried(ctx context.Context, from, to uint32) error {
	for _, kind := range carriedKinds {
		err := k.scanAll(ctx, wrappedKey(from, kind, 0), nil, func(r Reader, key, value []byte) error {
			var w, next storev1.Wrapped
			if err := decode(value, &w); err != nil {
				return finding("a row does not parse", key)
			}
			if w.Dead {
				return nil
			}
			o, err := ownerOf(r, key)
			if err != nil {
				return err
			}
			if o.fenced {
				return nil
			}
			if !o.live {
				if fenced, err := isFenced(r, o.tenant); err != nil || fenced {
					return err
				}
				return finding("a key whose owner does not live or does not name it", key)
			}
			switch err := getRow(r, rekey(key, to), &next); {
			case errors.Is(err, ErrNotFound), err == nil && next.Dead:
				if fenced, err := isFenced(r, o.tenant); err != nil || fenced {
					return err
				}
				return finding("a live key was not carried over", key)
			case err != nil:
				return err
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// isFenced says that a tenant as a whole is erased.
func isFenced(r Reader, tenant id16) (bool, error) {
	var t storev1.Tenant
	err := getRow(r, tenantKey(tenant), &t)
	return err == nil && t.State == storev1.TenantState_TENANT_STATE_FENCED, err
}

// verifyOwners checks that every key that is live has its row under one of the
// epochs.
func (k *Keys) verifyOwners(ctx context.Context, under ...uint32) error {
	has := func(r Reader, key func(epoch uint32) []byte) (bool, error) {
		for _, epoch := range under {
			var w storev1.Wrapped
			switch err := getRow(r, key(epoch), &w); {
			case err == nil:
				return !w.Dead, nil
			case !errors.Is(err, ErrNotFound):
				return false, err
			}
		}
		return false, nil
	}
	for _, name := range []id16{ledgerKeyName, requestKeyName} {
		err := k.store.View(ctx, func(r Reader) error {
			key := func(e uint32) []byte { return wrappedSecretKey(e, name) }
			if ok, err := has(r, key); err != nil || !ok {
				return errors.Join(err, finding("a secret of keyd's own is missing", key(0)))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	erased := make(map[id16]bool) // tenants
	err := k.scanAll(ctx, []byte{'T'}, nil, func(r Reader, key, value []byte) error {
		var t storev1.Tenant
		if err := decode(value, &t); err != nil {
			return err
		}
		id := id16(key[1:])
		if t.State != storev1.TenantState_TENANT_STATE_ACTIVE {
			erased[id] = true
			return nil
		}
		found := false
		for _, epoch := range under {
			kekID, ok := kekFor(&t, epoch)
			if !ok {
				continue
			}
			_, err := r.Get(wrappedKEKKey(epoch, id, kekID))
			if err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
			found = found || err == nil
		}
		if !found {
			return finding("a tenant has no KEK", key)
		}
		if id == systemTenant {
			return nil
		}
		ok, err := has(r, func(e uint32) []byte { return wrappedPseudonymKey(e, id) })
		if err == nil && !ok {
			err = finding("a tenant has no pseudonym key", key)
		}
		return err
	})
	if err != nil {
		return err
	}
	err = k.scanAll(ctx, []byte{'B'}, nil, func(r Reader, key, value []byte) error {
		if erased[id16(key[1:])] {
			return nil
		}
		o := owned{value: value}
		if err := o.judge(append([]byte("w____B"), key[1:]...)); err != nil || !o.live {
			return err
		}
		ok, err := has(r, func(e uint32) []byte { return append(wrappedKey(e, 'B', 26), key[1:]...) })
		if err == nil && !ok {
			err = finding("a live bucket has no key", key)
		}
		return err
	})
	if err != nil {
		return err
	}
	return k.scanAll(ctx, []byte{'S'}, nil, func(r Reader, key, value []byte) error {
		tenant, handle := id16(key[1:]), id16(key[17:])
		if erased[tenant] {
			return nil
		}
		var s storev1.Subject
		if err := decode(value, &s); err != nil {
			return err
		}
		for _, sc := range s.Classes {
			if len(sc.KeyId) == 0 {
				continue
			}
			row := wrappedDEKKey(0, tenant, handle, sc.KeyId)
			o := owned{value: value}
			if err := o.judge(row); err != nil {
				return err
			}
			if !o.live {
				return finding("a subject that is destroyed has a live key", key)
			}
			ok, err := has(r, func(e uint32) []byte { return rekey(row, e) })
			if err == nil && !ok {
				err = finding("a live key has no row", key)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}
