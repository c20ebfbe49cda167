//go:build pkcs11

package pkcs11

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
)

const kind = "pkcs11"

// How long Open and Close wait for the token.
const (
	openLimit  = 30 * time.Second
	closeLimit = 5 * time.Second
)

// Options says which token to use and how.
type Options struct {
	// Module is the path of the PKCS#11 library.
	Module string
	// Token is the label of the token. One token of the module has it.
	Token string
	// PINFile names a file, of mode 0600 or less, whose first line is the PIN
	// of the token's user. The PIN stays in memory, to log in again after an
	// outage.
	PINFile string
	// Waiting is the waiting period of ScheduleDestruction, in whole
	// milliseconds; zero is DefaultWaiting.
	Waiting time.Duration
	// Clock tells the time; nil is time.Now.
	Clock func() time.Time

	intercept func(call string) error // comes before every call of the library; for tests
}

// KMS is a login at a token. It is safe for concurrent use.
type KMS struct {
	module    *module
	label     string
	waiting   time.Duration
	clock     func() time.Time
	intercept func(call string) error
	slots     chan struct{} // one for every call under way
	closed    atomic.Bool

	mu         sync.Mutex
	pin        string
	serial     string // of the token, once it was seen
	pinRefused bool
	conn       *conn // nil: to be made
}

var _ keys.KMS = (*KMS)(nil)

// Open loads the module, finds the token, logs in and checks that the token
// has what roots need. It fails with ErrModule, ErrNoToken, ErrAmbiguous,
// ErrUnsupported, ErrPIN, ErrUnsafe, keys.ErrKMSUnavailable, or an error that
// wraps none of them when the options are wrong.
func Open(ctx context.Context, o Options) (*KMS, error) {
	switch {
	case o.Module == "" || o.Token == "" || o.PINFile == "":
		return nil, errors.New("PKCS#11: give the module's path, the token's label and the PIN file")
	case o.Waiting < 0 || o.Waiting%time.Millisecond != 0:
		return nil, errors.New("PKCS#11: the waiting period is not a positive number of milliseconds")
	}
	if o.Waiting == 0 {
		o.Waiting = DefaultWaiting
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	pin, err := readPIN(o.PINFile)
	if err != nil {
		return nil, err
	}
	m, err := loadModule(o.Module)
	if err != nil {
		return nil, err
	}
	k := &KMS{
		module: m, label: o.Token, pin: pin, waiting: o.Waiting, clock: o.Clock, intercept: o.intercept,
		slots: make(chan struct{}, maxSessions),
	}
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	if _, err := in(ctx, k, (*session).checkMechanisms); err != nil {
		_ = k.Close() // that Open failed is what matters
		return nil, err
	}
	return k, nil
}

func (s *session) checkMechanisms() (struct{}, error) {
	for mechanism, flags := range map[uint]uint{
		p11.CKM_AES_KEY_GEN: p11.CKF_GENERATE,
		p11.CKM_AES_GCM:     p11.CKF_ENCRYPT | p11.CKF_DECRYPT,
	} {
		var info p11.MechanismInfo
		err := s.call("C_GetMechanismInfo", func(c *p11.Ctx) (err error) {
			info, err = c.GetMechanismInfo(s.conn.slot, []*p11.Mechanism{p11.NewMechanism(mechanism, nil)})
			return err
		})
		if err == nil && info.Flags&flags != flags || code(err) == p11.CKR_MECHANISM_INVALID {
			return struct{}{}, fmt.Errorf("PKCS#11: %w: mechanism %#x", ErrUnsupported, mechanism)
		}
		if err != nil {
			return struct{}{}, err
		}
	}
	return struct{}{}, nil
}

// Close closes the sessions and finalises the module, unless another KMS uses
// it or a call is inside it. It waits for no call, and for a token that does
// not answer only a moment.
func (k *KMS) Close() error {
	if k.closed.Swap(true) {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		k.mu.Lock()
		k.pin = ""
		k.module.calls.RLock()
		k.disconnect()
		k.module.calls.RUnlock()
		k.mu.Unlock()
		done <- k.module.unload()
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(closeLimit):
		return unavailable(errors.New("the token does not answer; its sessions were left open"))
	}
}

// Kind returns "pkcs11".
func (k *KMS) Kind() string { return kind }

// FinalBasis returns the constant of that name.
func (k *KMS) FinalBasis() string { return FinalBasis }

// Waiting returns the waiting period of Options.
func (k *KMS) Waiting() time.Duration { return k.waiting }

// Wrap encrypts a key of 1 to 64 bytes. The result is 29 bytes longer.
func (k *KMS) Wrap(ctx context.Context, rootID string, key []byte, ec keys.EncryptionContext) ([]byte, error) {
	if len(key) < 1 || len(key) > maxKey {
		return nil, fmt.Errorf("PKCS#11: a key to wrap has 1 to %d bytes", maxKey)
	}
	id, err := ckaID(rootID)
	if err != nil {
		return nil, err
	}
	// The caller may wipe its own before an abandoned call comes to it.
	own := bytes.Clone(key)
	return in(ctx, k, func(s *session) ([]byte, error) {
		object, err := s.usable(rootID, id)
		if err != nil {
			return nil, err
		}
		sealed, err := s.encrypt(object, own, wrapAD(rootID, ec))
		if err != nil {
			return nil, err
		}
		clear(own)
		return append([]byte{wrapVersion}, sealed...), nil
	})
}

// Unwrap undoes Wrap.
func (k *KMS) Unwrap(ctx context.Context, rootID string, wrapped []byte, ec keys.EncryptionContext) ([]byte, error) {
	id, err := ckaID(rootID)
	if err != nil {
		return nil, err
	}
	if len(wrapped) > overhead+maxKey {
		wrapped = nil // as impossible as that
	}
	own := bytes.Clone(wrapped)
	return in(ctx, k, func(s *session) ([]byte, error) {
		object, err := s.usable(rootID, id)
		if err != nil {
			return nil, err
		}
		if len(own) <= overhead || own[0] != wrapVersion {
			return nil, rootError(rootID, fmt.Errorf("%w: not a wrapped key", keys.ErrKMSDenied))
		}
		key, err := s.decrypt(object, own[1:], wrapAD(rootID, ec))
		if err == nil && ctx.Err() != nil {
			clear(key)
			return nil, unavailable(ctx.Err())
		}
		return key, err
	})
}

// usable returns the key of an enabled root.
func (s *session) usable(rootID string, ckaID []byte) (p11.ObjectHandle, error) {
	r, err := s.record(rootID)
	if err != nil {
		return 0, err
	}
	if r.state != keys.RootEnabled {
		return 0, rootError(rootID, keys.ErrRootNotUsable)
	}
	return s.key(rootID, ckaID)
}

// Create makes a key on the token, tries it, and gives it a record; or finds the
// one that it made for this request. A key that was left without a record, by a
// crash or a lost session, is used by nobody, and is given one by the repeat.
func (k *KMS) Create(ctx context.Context, epoch uint32, request keys.RootRequest) (string, error) {
	return in(ctx, k, func(s *session) (string, error) {
		if err := s.witness(); err != nil {
			return "", err
		}
		rootID, id := requested(epoch, request)
		if all, err := s.records(rootID); err != nil {
			return "", err
		} else if len(all) != 0 {
			return rootID, nil
		}
		key, err := s.made(rootID, id)
		if err != nil {
			return "", err
		}
		if err := s.try(rootID, key); err != nil {
			return "", err
		}
		if err := s.put(record{rootID: rootID, seq: 1, state: keys.RootEnabled}); err != nil {
			return "", err
		}
		return rootID, nil
	})
}

// made returns the key of a root that has no record: the one that was left by a
// crash, or a new one.
func (s *session) made(rootID string, ckaID []byte) (p11.ObjectHandle, error) {
	found, err := s.find(keyTemplate(ckaID), maxRecords)
	if err != nil {
		return 0, err
	}
	if len(found) == 1 {
		return found[0], nil
	}
	for _, left := range found { // by two processes at once
		if err := s.destroy(left); err != nil {
			return 0, err
		}
	}
	key, err := s.generate(rootID, ckaID)
	if err != nil {
		return 0, err
	}
	found, err = s.find(keyTemplate(ckaID), 2)
	if err == nil && len(found) != 1 {
		if err = s.destroy(key); err == nil {
			err = unavailable(fmt.Errorf("another process is making %s", rootID))
		}
	}
	return key, err
}

// try proves that a new key is what was asked for, and that the token does
// with it what this package expects.
func (s *session) try(rootID string, key p11.ObjectHandle) error {
	if err := s.checkOrigin(rootID, key); err != nil {
		return err
	}
	probe := make([]byte, maxKey)
	ad := wrapAD(rootID, keys.EncryptionContext{})
	sealed, err := s.encrypt(key, probe, ad)
	if err != nil {
		return err
	}
	opened, err := s.open(key, sealed, ad)
	if err != nil {
		return err
	}
	if !bytes.Equal(opened, probe) || bytes.Contains(sealed, probe[:tagSize]) {
		return unavailable(fmt.Errorf("%w: AES-GCM does not return what it took", ErrUnsupported))
	}
	return nil
}

// Disable stops the use of a root by every keyd. A root that is pending stays so.
func (k *KMS) Disable(ctx context.Context, rootID string) error {
	_, err := k.change(ctx, rootID, func(r *record, _ time.Time) (bool, error) {
		switch r.state {
		case keys.RootDestroyed:
			return false, keys.ErrRootNotUsable
		case keys.RootEnabled:
			r.state = keys.RootDisabled
			return true, nil
		}
		return false, nil
	})
	return err
}

// ScheduleDestruction starts the waiting period. For a root that is pending or
// destroyed it returns the instant it returned before.
func (k *KMS) ScheduleDestruction(ctx context.Context, rootID string) (time.Time, error) {
	d, err := k.change(ctx, rootID, func(r *record, now time.Time) (bool, error) {
		if r.state != keys.RootEnabled && r.state != keys.RootDisabled {
			return false, nil
		}
		// A whole millisecond, and not before the period is over.
		r.state, r.at = keys.RootPending, now.Add(k.waiting+time.Millisecond-1).UnixMilli()
		return true, nil
	})
	return d.DestroyAt, err
}

// Cancel enables a root again. It fails with keys.ErrRootNotUsable once the
// waiting period has ended.
func (k *KMS) Cancel(ctx context.Context, rootID string) error {
	_, err := k.change(ctx, rootID, func(r *record, _ time.Time) (bool, error) {
		switch r.state {
		case keys.RootDestroyed:
			return false, keys.ErrRootNotUsable
		case keys.RootEnabled:
			return false, nil
		}
		r.state, r.at = keys.RootEnabled, 0
		return true, nil
	})
	return err
}

// Describe tells a root's state, and destroys the root if that is due; see the
// package's comment for what it takes to call it destroyed. DestroyAt stays set
// then.
func (k *KMS) Describe(ctx context.Context, rootID string) (keys.Root, error) {
	return k.change(ctx, rootID, func(*record, time.Time) (bool, error) { return false, nil })
}

// change lets fn change a root's record, after the root was destroyed if it is
// due, and writes the record if fn changed it.
func (k *KMS) change(ctx context.Context, rootID string, fn func(*record, time.Time) (bool, error)) (keys.Root, error) {
	id, err := ckaID(rootID)
	if err != nil {
		return keys.Root{}, err
	}
	return in(ctx, k, func(s *session) (keys.Root, error) {
		select {
		case k.module.changing <- struct{}{}:
			defer func() { <-k.module.changing }()
		case <-ctx.Done():
			return keys.Root{}, unavailable(ctx.Err())
		}
		r, err := s.record(rootID)
		if err != nil {
			return keys.Root{}, err
		}
		now := k.clock()
		if r.state == keys.RootDestroyed || r.due(now) {
			r, err = s.destroyed(r, id)
		} else {
			_, err = s.key(rootID, id)
		}
		if err != nil {
			return keys.Root{}, err
		}
		changed, err := fn(&r, now)
		if err != nil {
			return keys.Root{}, rootError(rootID, err)
		}
		if changed {
			r.seq++
			if err := s.put(r); err != nil {
				return keys.Root{}, err
			}
		}
		return r.describe(), nil
	})
}

// destroyed destroys the key of a root whose date has passed, and returns the
// record that says so once the token shows no key and shows the record.
func (s *session) destroyed(r record, ckaID []byte) (record, error) {
	const limit = 64
	found, err := s.find(keyTemplate(ckaID), limit)
	if err != nil {
		return record{}, err
	}
	for _, key := range found {
		if err := s.destroy(key); err != nil {
			return record{}, err
		}
	}
	if len(found) > 0 {
		if found, err = s.find(keyTemplate(ckaID), limit); err != nil {
			return record{}, err
		}
		if len(found) > 0 {
			return record{}, unavailable(fmt.Errorf("the token still shows the key of %s", r.rootID))
		}
	}
	// The same session sees the private objects: nothing was hidden from the
	// search.
	again, err := s.record(r.rootID)
	if err != nil {
		return record{}, err
	}
	if again.nonce != r.nonce {
		return record{}, unavailable(fmt.Errorf("another process is changing %s", r.rootID))
	}
	if r.state != keys.RootDestroyed {
		r.state = keys.RootDestroyed
		r.seq++
		if err := s.put(r); err != nil {
			return record{}, err
		}
	}
	return r, nil
}
