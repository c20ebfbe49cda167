package keys

import (
	"context"
	"crypto/hmac"
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"lethe/keyd/internal/wrap"
	storev1 "lethe/proto/keyd/store/v1"
)

// keyring holds, for a bounded time, what keyd needs to read wrapped rows: the
// tenants' KEKs and pseudonym keys. DEKs and bucket keys are never in it.
//
// An entry is renewed from the KMS once half of its time is over, and is gone
// when it is over: so keyd serves through an outage of the KMS for that long,
// and a KEK outlives its root by no more.
type keyring struct {
	store Store
	kms   KMS
	clock func() time.Time
	lease time.Duration

	mu      sync.Mutex
	tenants map[string]*tenantKeys
	flights map[string]*flight
	lastErr error // of the newest call to the KMS
}

// flight is one load that several callers wait for.
type flight struct {
	done chan struct{}
	keys *tenantKeys
	err  error
}

// tenantKeys is immutable but for keks, which grows under mu.
type tenantKeys struct {
	name      string
	id        id16
	pseudonym []byte
	renewAt   time.Time
	expires   time.Time

	mu   sync.Mutex
	keks map[id16]*wrap.Wrapper
}

func newKeyring(store Store, kms KMS, clock func() time.Time, lease time.Duration) *keyring {
	return &keyring{
		store: store, kms: kms, clock: clock, lease: lease,
		tenants: make(map[string]*tenantKeys),
		flights: make(map[string]*flight),
	}
}

// loadTimeout bounds one load, which outlives the caller that began it.
const loadTimeout = 15 * time.Second

// get returns a tenant's keys. The empty name is keyd's own.
func (k *keyring) get(ctx context.Context, tenant string) (*tenantKeys, error) {
	now := k.clock()
	k.mu.Lock()
	held := k.tenants[tenant]
	if held != nil && !now.Before(held.expires) {
		delete(k.tenants, tenant)
		held.wipe()
		held = nil
	}
	if held != nil && now.Before(held.renewAt) {
		k.mu.Unlock()
		return held, nil
	}
	f := k.flights[tenant]
	if f == nil {
		f = &flight{done: make(chan struct{})}
		k.flights[tenant] = f
		go k.load(context.WithoutCancel(ctx), tenant, f)
	}
	k.mu.Unlock()
	if held != nil {
		return held, nil // being renewed
	}
	select {
	case <-f.done:
		return f.keys, f.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (k *keyring) load(ctx context.Context, tenant string, f *flight) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	f.keys, f.err = k.fetch(ctx, tenant)
	k.mu.Lock()
	delete(k.flights, tenant)
	if f.err == nil {
		k.tenants[tenant] = f.keys
	}
	if f.err == nil || errors.Is(f.err, ErrKMSUnavailable) || errors.Is(f.err, ErrKMSDenied) || errors.Is(f.err, ErrRootNotUsable) {
		k.lastErr = f.err
	}
	k.mu.Unlock()
	close(f.done)
}

func (k *keyring) fetch(ctx context.Context, tenant string) (*tenantKeys, error) {
	// The time counts from before the KMS is asked.
	now := k.clock()
	var row storev1.Tenant
	id := systemTenant
	if tenant != "" {
		id = tenantID(tenant)
	}
	var pseudonymRow storev1.Wrapped
	var rowKey []byte
	err := k.store.View(ctx, func(r Reader) error {
		err := getRow(r, tenantKey(id), &row)
		if errors.Is(err, ErrNotFound) {
			return unknown("tenant")
		}
		if err != nil || tenant == "" {
			return err
		}
		rowKey, err = getWrapped(r, row.KekEpoch, func(e uint32) []byte { return wrappedPseudonymKey(e, id) }, &pseudonymRow)
		return err
	})
	if err != nil {
		return nil, err
	}
	if row.Name != tenant {
		return nil, damaged("a tenant's row has another name", nil)
	}
	t := &tenantKeys{
		name: tenant, id: id, keks: make(map[id16]*wrap.Wrapper),
		renewAt: now.Add(k.lease / 2), expires: now.Add(k.lease),
	}
	if tenant == "" {
		_, err := k.kek(ctx, t, id16(row.KekId), row.KekEpoch)
		return t, err
	}
	w, err := k.kek(ctx, t, id16(pseudonymRow.KekId), epochOf(rowKey))
	if err != nil {
		return nil, err
	}
	t.pseudonym, err = w.Unwrap(pseudonymRow.Ciphertext, rowIdentity(rowKey, id16(pseudonymRow.KekId)))
	if err != nil {
		return nil, damaged("a pseudonym key does not open", err)
	}
	if !hmac.Equal(pseudonymCheck(t.pseudonym, tenant), row.PseudonymCheck) {
		return nil, damaged("a pseudonym key is not the tenant's", nil)
	}
	return t, nil
}

// kek returns a KEK of t, from the KMS if it is not held.
func (k *keyring) kek(ctx context.Context, t *tenantKeys, id id16, epoch uint32) (*wrap.Wrapper, error) {
	if w := t.wrapper(id); w != nil {
		return w, nil
	}
	var row storev1.Wrapped
	var e storev1.Epoch
	err := k.store.View(ctx, func(r Reader) error {
		if err := getRow(r, wrappedKEKKey(epoch, t.id, id), &row); err != nil {
			return err
		}
		return getRow(r, epochKey(epoch), &e)
	})
	if err != nil {
		return nil, damaged("a KEK's row cannot be read", err)
	}
	packed, err := k.kms.Unwrap(ctx, e.RootId, row.Ciphertext, EncryptionContext{Tenant: t.name, Epoch: epoch})
	if err != nil {
		return nil, unavailable("a KEK cannot be unwrapped", err)
	}
	defer clear(packed)
	key, err := unpackKEK(id, packed)
	if err != nil {
		return nil, err
	}
	w, err := wrap.New(key)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	t.keks[id] = w
	t.mu.Unlock()
	return w, nil
}

// forget drops a tenant's keys: a later get loads them anew.
func (k *keyring) forget(tenant string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if t := k.tenants[tenant]; t != nil {
		delete(k.tenants, tenant)
		t.wipe()
	}
}

// close drops everything.
func (k *keyring) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, t := range k.tenants {
		delete(k.tenants, name)
		t.wipe()
	}
}

// health is the error of the newest call to the KMS, nil if it answered.
func (k *keyring) health() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lastErr
}

func (t *tenantKeys) wrapper(id id16) *wrap.Wrapper {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keks[id]
}

func (t *tenantKeys) handle(subject []byte) id16 {
	return handleOf(t.pseudonym, t.name, subject)
}

// wipe drops the KEKs. The pseudonym key may be in use by a call that got it a
// moment ago, and is left to the garbage collector: zeroing it here would give
// that call a wrong handle.
func (t *tenantKeys) wipe() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.keks)
}

// getWrapped reads a wrapped row that lies under the epoch of its tenant's
// newest KEK or, while an epoch drains, still under the one before; it returns
// the row's key.
func getWrapped(r Reader, epoch uint32, key func(epoch uint32) []byte, row *storev1.Wrapped) ([]byte, error) {
	k := key(epoch)
	err := getRow(r, k, row)
	if errors.Is(err, ErrNotFound) && epoch > 1 {
		k = key(epoch - 1)
		err = getRow(r, k, row)
	}
	return k, err
}

// epochOf reads the epoch out of a wrapped row's key.
func epochOf(wrappedRowKey []byte) uint32 {
	return binary.BigEndian.Uint32(wrappedRowKey[1:5])
}
