package keys

import (
	"context"
	"crypto/hmac"
	"encoding/binary"
	"errors"
	"fmt"
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
// and a KEK outlives its root by no more. A root that its KMS describes as
// disabled, pending destruction or destroyed takes its KEKs with it at once;
// that it was refused, or cannot be reached, never does.
type keyring struct {
	store Store
	kms   KMS
	clock func() time.Time
	lease time.Duration

	mu      sync.Mutex
	tenants map[string]*tenantKeys
	flights map[string]*flight[*tenantKeys]
	keks    map[id16]*flight[*kek]
	lastErr error // of the newest call to the KMS
	// KEKs of epochs below floor are never kept again.
	floor uint32
	// drops counts the calls of drop, and dropped is its value after the last
	// of an epoch: what was fetched across one is not kept.
	drops   uint64
	dropped map[uint32]uint64
}

// flight is one load that several callers wait for.
type flight[T any] struct {
	done  chan struct{}
	drops uint64 // of the ring, when it began
	value T
	err   error
}

// takeOff begins a load. k.mu is held.
func takeOff[T any](k *keyring) *flight[T] {
	return &flight[T]{done: make(chan struct{}), drops: k.drops}
}

func (f *flight[T]) wait(ctx context.Context) (T, error) {
	select {
	case <-f.done:
		return f.value, f.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// kek is a KEK and its epoch.
type kek struct {
	*wrap.Wrapper
	epoch uint32
}

// tenantKeys is immutable but for keks, which changes under mu, and renewAt,
// which changes under the ring's.
type tenantKeys struct {
	name      string
	id        id16
	pseudonym []byte
	basis     uint32 // the epoch of the KEK that opened the pseudonym key
	renewAt   time.Time
	expires   time.Time

	mu   sync.Mutex
	keks map[id16]*kek
}

func newKeyring(store Store, kms KMS, clock func() time.Time, lease time.Duration) *keyring {
	return &keyring{
		store: store, kms: kms, clock: clock, lease: lease,
		tenants: make(map[string]*tenantKeys),
		flights: make(map[string]*flight[*tenantKeys]),
		keks:    make(map[id16]*flight[*kek]),
		dropped: make(map[uint32]uint64),
	}
}

// loadTimeout bounds one load, which outlives the caller that began it.
const loadTimeout = 15 * time.Second

var (
	// errRootGone: the root is described as one that cannot be used.
	errRootGone = errors.New("the root is not enabled")
	// errDropped: KEKs were dropped while this one was fetched.
	errDropped = unavailable("KEKs were dropped meanwhile", nil)
)

// get returns a tenant's keys. The empty name is keyd's own.
func (k *keyring) get(ctx context.Context, tenant string) (*tenantKeys, error) {
	now := k.clock()
	k.mu.Lock()
	held := k.tenants[tenant]
	if held != nil && !now.Before(held.expires) {
		delete(k.tenants, tenant)
		held.wipe(func(*kek) bool { return true })
		held = nil
	}
	if held != nil && now.Before(held.renewAt) {
		k.mu.Unlock()
		return held, nil
	}
	f := k.flights[tenant]
	if f == nil {
		f = takeOff[*tenantKeys](k)
		k.flights[tenant] = f
		go k.load(context.WithoutCancel(ctx), tenant, f)
	}
	k.mu.Unlock()
	if held != nil {
		return held, nil // being renewed
	}
	return f.wait(ctx)
}

func (k *keyring) load(ctx context.Context, tenant string, f *flight[*tenantKeys]) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	// An epoch may turn under a fetch, which then looks where nothing is any more.
	for range 3 {
		var es, now epochs
		f.value, es, f.err = k.fetch(ctx, tenant)
		if f.err == nil {
			break
		}
		err := k.store.View(ctx, func(r Reader) (err error) {
			now, err = readEpochs(r)
			return err
		})
		if err != nil || now == es {
			break
		}
	}
	k.mu.Lock()
	delete(k.flights, tenant)
	switch {
	case f.err != nil:
		f.value = nil
		if held := k.tenants[tenant]; held != nil {
			held.renewAt = k.clock().Add(k.lease / 32) // not with every call
		}
	case k.dropped[f.value.basis] > f.drops:
		f.value.wipe(func(*kek) bool { return true })
		f.value, f.err = nil, errDropped
	default:
		f.value.wipe(func(w *kek) bool { return !k.mayKeep(w, f.drops) })
		k.tenants[tenant] = f.value
	}
	k.mu.Unlock()
	close(f.done)
}

// mayKeep says whether a KEK may be kept whose fetching began after that many
// drops. k.mu is held.
func (k *keyring) mayKeep(w *kek, drops uint64) bool {
	return w.epoch >= k.floor && k.dropped[w.epoch] <= drops
}

func (k *keyring) fetch(ctx context.Context, tenant string) (_ *tenantKeys, es epochs, _ error) {
	// The time counts from before the KMS is asked.
	now := k.clock()
	var row storev1.Tenant
	id := systemTenant
	if tenant != "" {
		id = tenantID(tenant)
	}
	var pseudonymRow storev1.Wrapped
	var rowKey []byte
	err := k.store.View(ctx, func(r Reader) (err error) {
		if es, err = readEpochs(r); err != nil {
			return err
		}
		err = getRow(r, tenantKey(id), &row)
		switch {
		case errors.Is(err, ErrNotFound):
			return unknown("the tenant")
		case err != nil || tenant == "":
			return err
		case row.State == storev1.TenantState_TENANT_STATE_FENCED:
			return erased("the tenant", row.DestroyedAt)
		case row.State == storev1.TenantState_TENANT_STATE_LOST:
			return lost()
		}
		rowKey, err = getWrapped(r, es, func(e uint32) []byte { return wrappedPseudonymKey(e, id) }, &pseudonymRow)
		return err
	})
	if err != nil {
		return nil, es, err
	}
	if row.Name != tenant {
		return nil, es, damaged("a tenant's row has another name", nil)
	}
	t := &tenantKeys{
		name: tenant, id: id, keks: make(map[id16]*kek), basis: es.open,
		renewAt: now.Add(k.lease / 2), expires: now.Add(k.lease),
	}
	// All KEKs that are, or will soon be, in use, so that an epoch's turn finds
	// the next one here.
	for _, epoch := range []uint32{es.open, es.draining, es.preparing} {
		kekID, ok := kekFor(&row, epoch)
		if epoch == 0 || !ok {
			continue
		}
		_, err := k.kek(ctx, t, kekID, epoch)
		switch {
		case err == nil, epoch == es.preparing:
		case epoch == es.draining && errors.Is(err, errRootGone):
			// What was carried over already is served.
		default:
			return nil, es, err
		}
	}
	if tenant == "" {
		return t, es, nil
	}
	t.basis = epochOf(rowKey)
	w, err := k.kek(ctx, t, id16(pseudonymRow.KekId), t.basis)
	if err != nil {
		return nil, es, err
	}
	t.pseudonym, err = w.Unwrap(pseudonymRow.Ciphertext, rowIdentity(rowKey, id16(pseudonymRow.KekId)))
	if err != nil {
		return nil, es, damaged("a pseudonym key does not open", err)
	}
	if !hmac.Equal(pseudonymCheck(t.pseudonym, tenant), row.PseudonymCheck) {
		return nil, es, damaged("a pseudonym key is not the tenant's", nil)
	}
	return t, es, nil
}

// kek returns a KEK of t, from the KMS if it is not held. Those who ask for
// the same one at the same time wait for one call.
func (k *keyring) kek(ctx context.Context, t *tenantKeys, id id16, epoch uint32) (*kek, error) {
	if w := t.wrapper(id); w != nil {
		return w, nil
	}
	k.mu.Lock()
	if w := t.wrapper(id); w != nil { // it has come meanwhile
		k.mu.Unlock()
		return w, nil
	}
	f := k.keks[id]
	if f == nil {
		f = takeOff[*kek](k)
		k.keks[id] = f
		go func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadTimeout)
			defer cancel()
			f.value, f.err = loadKEK(ctx, k.store, k.unwrap, t.name, t.id, id, epoch)
			k.mu.Lock()
			delete(k.keks, id)
			if f.err == nil && k.mayKeep(f.value, f.drops) {
				// Before anybody can find that nobody asks for it any more.
				t.put(id, f.value)
			}
			k.mu.Unlock()
			close(f.done)
		}()
	}
	k.mu.Unlock()
	w, err := f.wait(ctx)
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.mayKeep(w, f.drops) {
		return nil, errDropped
	}
	t.put(id, w) // it may have been asked for on behalf of another entry
	return w, nil
}

// keep adds a KEK to a tenant's entry, if there is one.
func (k *keyring) keep(tenant string, f *freshKEK) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if t := k.tenants[tenant]; t != nil {
		t.put(f.id, &kek{f.w, f.epoch})
	}
}

// unwrapper is KMS.Unwrap for the root of an epoch.
type unwrapper func(ctx context.Context, epoch *storev1.Epoch, wrapped []byte, ec EncryptionContext) ([]byte, error)

// loadKEK reads a KEK's row and has the KMS unwrap it.
func loadKEK(ctx context.Context, store Store, unwrap unwrapper, tenant string, tenantID, id id16, epoch uint32) (*kek, error) {
	var row storev1.Wrapped
	var e *storev1.Epoch
	err := store.View(ctx, func(r Reader) (err error) {
		if err := getRow(r, wrappedKEKKey(epoch, tenantID, id), &row); err != nil {
			return err
		}
		e, err = readEpoch(r, epoch)
		return err
	})
	if err != nil {
		return nil, damaged("a KEK's row cannot be read", err)
	}
	packed, err := unwrap(ctx, e, row.Ciphertext, EncryptionContext{Tenant: tenant, Epoch: epoch})
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
	return &kek{w, epoch}, nil
}

// unwrap asks the KMS. When it is refused it asks for the root's state, and
// drops the KEKs of a root that is described as one that cannot be used.
func (k *keyring) unwrap(ctx context.Context, e *storev1.Epoch, wrapped []byte, ec EncryptionContext) ([]byte, error) {
	key, err := k.kms.Unwrap(ctx, e.RootId, wrapped, ec)
	if errors.Is(err, ErrRootNotUsable) || errors.Is(err, ErrKMSDenied) || errors.Is(err, ErrRootUnknown) {
		switch root, describeErr := k.kms.Describe(ctx, e.RootId); {
		case describeErr != nil:
		case root.State == RootDisabled, root.State == RootPending, root.State == RootDestroyed:
			k.drop(e.Number)
			err = fmt.Errorf("%w: %w", errRootGone, err)
		}
	}
	k.mu.Lock()
	k.lastErr = err
	k.mu.Unlock()
	return key, err
}

// drop forgets the KEKs of an epoch, and what was opened with them.
func (k *keyring) drop(epoch uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drops++
	k.dropped[epoch] = k.drops
	for name, t := range k.tenants {
		t.wipe(func(w *kek) bool { return w.epoch == epoch || t.basis == epoch })
		if t.basis == epoch {
			delete(k.tenants, name)
		}
	}
}

// dropBelow forgets the KEKs of all epochs older than this one, for good. What
// they opened is opened by newer ones too.
func (k *keyring) dropBelow(epoch uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if epoch <= k.floor {
		return
	}
	k.floor = epoch
	for _, t := range k.tenants {
		t.wipe(func(w *kek) bool { return w.epoch < epoch })
	}
}

// forget drops a tenant's keys.
func (k *keyring) forget(tenant string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if t := k.tenants[tenant]; t != nil {
		delete(k.tenants, tenant)
		t.wipe(func(*kek) bool { return true })
	}
}

// sweep forgets the entries whose time is over, which get would not: nobody
// asks for them.
func (k *keyring) sweep() {
	now := k.clock()
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, t := range k.tenants {
		if !now.Before(t.expires) {
			delete(k.tenants, name)
			t.wipe(func(*kek) bool { return true })
		}
	}
}

// close drops everything.
func (k *keyring) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, t := range k.tenants {
		delete(k.tenants, name)
		t.wipe(func(*kek) bool { return true })
	}
}

// health is the error of the newest call to the KMS, nil if it answered.
func (k *keyring) health() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lastErr
}

func (t *tenantKeys) wrapper(id id16) *kek {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keks[id]
}

func (t *tenantKeys) put(id id16, w *kek) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keks[id] = w
}

func (t *tenantKeys) handle(subject []byte) id16 {
	return handleOf(t.pseudonym, t.name, subject)
}

// wipe drops the KEKs that which names. The pseudonym key may be in use by a
// call that got it a moment ago, and is left to the garbage collector: zeroing
// it here would give that call a wrong handle.
func (t *tenantKeys) wipe(which func(*kek) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, w := range t.keks {
		if which(w) {
			delete(t.keks, id)
		}
	}
}

// epochOf reads the epoch out of a wrapped row's key.
func epochOf(wrappedRowKey []byte) uint32 {
	return binary.BigEndian.Uint32(wrappedRowKey[1:5])
}
