//go:build pkcs11

package pkcs11

import (
	"context"
	"errors"
	"fmt"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
)

// maxSessions is how many calls may be inside the library for one KMS.
const maxSessions = 4

// conn is a login at the token. It ends when its first session does.
type conn struct {
	gen   int // of the module
	slot  uint
	login p11.SessionHandle
	idle  []p11.SessionHandle
}

// session is one PKCS#11 session, for one call of KMS.
type session struct {
	k      *KMS
	ctx    context.Context
	conn   *conn
	handle p11.SessionHandle
}

// call calls the library once, unless the context has ended: an operation whose
// caller has gone makes no further change.
func (k *KMS) call(ctx context.Context, name string, fn func(*p11.Ctx) error) error {
	if err := ctx.Err(); err != nil {
		return unavailable(err)
	}
	if k.intercept != nil {
		if err := k.intercept(name); err != nil {
			return answered(name, err)
		}
	}
	switch name {
	case "C_CreateObject", "C_GenerateKey", "C_DestroyObject":
		k.module.writes.Lock()
		defer k.module.writes.Unlock()
	default:
		k.module.writes.RLock()
		defer k.module.writes.RUnlock()
	}
	if err := fn(k.module.ctx); err != nil {
		return answered(name, err)
	}
	return nil
}

func (s *session) call(name string, fn func(*p11.Ctx) error) error { return s.k.call(s.ctx, name, fn) }

// in runs fn with a session and returns what it returns, or, once ctx ends,
// keys.ErrKMSUnavailable; fn then runs on until its next call of the library.
// An fn that fails because the session or the token was lost is run again, once.
func in[T any](ctx context.Context, k *KMS, fn func(*session) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	if err := ctx.Err(); err != nil {
		return none, unavailable(err)
	}
	select {
	case k.slots <- struct{}{}:
	case <-ctx.Done():
		return none, unavailable(ctx.Err())
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-k.slots }()
		var r result
		r.err = k.run(ctx, func(s *session) (err error) {
			r.value, err = fn(s)
			return err
		})
		done <- r
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return none, r.err
		}
		return r.value, nil
	case <-ctx.Done():
		return none, unavailable(ctx.Err())
	}
}

// run runs fn, again with a new login if the one at hand was lost, and again
// with the module started anew if there is no new login to be had.
func (k *KMS) run(ctx context.Context, fn func(*session) error) error {
	var again, restarted bool
	for {
		gen, connected, err := k.attempt(ctx, fn)
		if !lost(err) || ctx.Err() != nil {
			return err
		}
		switch {
		case connected && !again:
			again = true
		case !connected && !restarted:
			restarted = true
			if err := k.module.reinitialise(gen); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// lost tells whether an error may be that of a session or a token that has gone.
func lost(err error) bool {
	return errors.Is(err, keys.ErrKMSUnavailable) &&
		(code(err) != p11.CKR_OK || errors.Is(err, ErrNoToken) || errors.Is(err, ErrNoWitness))
}

func (k *KMS) attempt(ctx context.Context, fn func(*session) error) (gen int, connected bool, err error) {
	k.module.calls.RLock()
	defer k.module.calls.RUnlock()
	s, err := k.session(ctx)
	if err != nil {
		return k.module.gen, false, err
	}
	err = fn(s)
	k.release(s, err)
	return k.module.gen, true, err
}

// session returns an idle session or a new one. The caller holds the module's
// calls.
func (k *KMS) session(ctx context.Context) (*session, error) {
	s, err := k.connected(ctx)
	if err != nil || s.handle != 0 {
		return s, err
	}
	if s.handle, err = k.openSession(ctx, s.conn.slot); err != nil {
		if lost(err) {
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.conn == s.conn {
				k.disconnect()
			}
		}
		return nil, err
	}
	return s, nil
}

// connected returns a session at the token whose handle is 0, which PKCS#11
// never gives, if there is no idle one.
func (k *KMS) connected(ctx context.Context) (*session, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed.Load() {
		return nil, unavailable(ErrClosed)
	}
	if k.conn != nil && k.conn.gen != k.module.gen {
		k.conn = nil // its sessions ended with the module
	}
	if k.conn == nil {
		c, err := k.connect(ctx)
		if err != nil {
			return nil, err
		}
		k.conn = c
	}
	s := &session{k: k, ctx: ctx, conn: k.conn}
	if n := len(k.conn.idle); n > 0 {
		s.handle, k.conn.idle = k.conn.idle[n-1], k.conn.idle[:n-1]
	}
	return s, nil
}

// release takes a session back. One whose call failed may be in the middle of
// an operation, and is closed.
func (k *KMS) release(s *session, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == s.conn && lost(err) {
		k.disconnect()
	}
	if k.conn == s.conn && err == nil && !k.closed.Load() {
		k.conn.idle = append(k.conn.idle, s.handle)
		return
	}
	k.closeSessions(s.conn, s.handle)
}

// disconnect gives up the login. The caller holds mu.
func (k *KMS) disconnect() {
	if k.conn == nil {
		return
	}
	k.closeSessions(k.conn, append(k.conn.idle, k.conn.login)...)
	k.conn = nil
}

// closeSessions closes sessions of c. Those of a module that was started anew
// have gone, and their handles may be others' now.
func (k *KMS) closeSessions(c *conn, handles ...p11.SessionHandle) {
	if c.gen != k.module.gen {
		return
	}
	for _, h := range handles {
		_ = k.module.ctx.CloseSession(h) // it is given up, whatever comes back
	}
}

func (k *KMS) openSession(ctx context.Context, slot uint) (h p11.SessionHandle, err error) {
	err = k.call(ctx, "C_OpenSession", func(c *p11.Ctx) (err error) {
		h, err = c.OpenSession(slot, p11.CKF_SERIAL_SESSION|p11.CKF_RW_SESSION)
		return err
	})
	return h, err
}

// connect finds the token and logs in. The caller holds mu.
func (k *KMS) connect(ctx context.Context) (*conn, error) {
	if k.pinRefused {
		return nil, fmt.Errorf("PKCS#11: %w: %w", keys.ErrKMSDenied, ErrPIN)
	}
	slot, info, err := k.token(ctx)
	if err != nil {
		return nil, err
	}
	if lastTry(info.Flags) {
		return nil, fmt.Errorf("PKCS#11: %w: %w: it is locked, or one more wrong one locks it", keys.ErrKMSDenied, ErrPIN)
	}
	c := &conn{gen: k.module.gen, slot: slot}
	if c.login, err = k.openSession(ctx, slot); err != nil {
		return nil, err
	}
	err = k.call(ctx, "C_Login", func(x *p11.Ctx) error { return x.Login(c.login, p11.CKU_USER, k.pin) })
	if err != nil && code(err) != p11.CKR_USER_ALREADY_LOGGED_IN {
		k.closeSessions(c, c.login)
		if errors.Is(err, keys.ErrKMSDenied) {
			// Once: a token locks itself after a few wrong ones.
			k.pinRefused = true
			err = fmt.Errorf("%w: %w", err, ErrPIN)
		}
		return nil, err
	}
	k.serial = info.SerialNumber
	return c, nil
}

// lastTry tells, by a token's flags, whether a wrong PIN locks it or has done so.
func lastTry(flags uint) bool {
	return flags&(p11.CKF_USER_PIN_FINAL_TRY|p11.CKF_USER_PIN_LOCKED) != 0
}

// token finds the slot of the token: by its label, and after the first time by
// its serial number too.
func (k *KMS) token(ctx context.Context) (slot uint, info p11.TokenInfo, err error) {
	var slots []uint
	err = k.call(ctx, "C_GetSlotList", func(c *p11.Ctx) (err error) {
		slots, err = c.GetSlotList(true)
		return err
	})
	if err != nil {
		return 0, info, err
	}
	found, others := 0, 0
	var failed error
	for _, candidate := range slots {
		var t p11.TokenInfo
		err := k.call(ctx, "C_GetTokenInfo", func(c *p11.Ctx) (err error) {
			t, err = c.GetTokenInfo(candidate)
			return err
		})
		switch {
		case err != nil:
			failed = err
		case t.Label != k.label || t.Flags&p11.CKF_TOKEN_INITIALIZED == 0:
		case k.serial != "" && t.SerialNumber != k.serial:
			others++
		default:
			found++
			slot, info = candidate, t
		}
	}
	switch {
	case found == 1:
		return slot, info, nil
	case found > 1:
		return 0, info, unavailable(fmt.Errorf("%w: %q", ErrAmbiguous, k.label))
	case failed != nil:
		return 0, info, failed
	case others > 0:
		return 0, info, unavailable(fmt.Errorf("%w: another token now has the label %q", ErrNoToken, k.label))
	}
	return 0, info, unavailable(fmt.Errorf("%w: none has the label %q", ErrNoToken, k.label))
}

// find returns at most limit objects.
func (s *session) find(template []*p11.Attribute, limit int) ([]p11.ObjectHandle, error) {
	err := s.call("C_FindObjectsInit", func(c *p11.Ctx) error { return c.FindObjectsInit(s.handle, template) })
	if err != nil {
		return nil, err
	}
	var all []p11.ObjectHandle
	for len(all) < limit {
		var some []p11.ObjectHandle
		err := s.call("C_FindObjects", func(c *p11.Ctx) (err error) {
			some, _, err = c.FindObjects(s.handle, limit-len(all))
			return err
		})
		if err != nil {
			return nil, err
		}
		if len(some) == 0 {
			break
		}
		all = append(all, some...)
	}
	err = s.call("C_FindObjectsFinal", func(c *p11.Ctx) error { return c.FindObjectsFinal(s.handle) })
	return all, err
}

// attributes returns the values of attributes, in their order.
func (s *session) attributes(o p11.ObjectHandle, types ...uint) ([][]byte, error) {
	ask := make([]*p11.Attribute, len(types))
	for i, t := range types {
		ask[i] = p11.NewAttribute(t, nil)
	}
	var got []*p11.Attribute
	err := s.call("C_GetAttributeValue", func(c *p11.Ctx) (err error) {
		got, err = c.GetAttributeValue(s.handle, o, ask)
		return err
	})
	if err != nil {
		return nil, err
	}
	values := make([][]byte, len(types))
	for i := range got {
		values[i] = got[i].Value
	}
	return values, nil
}

func (s *session) destroy(o p11.ObjectHandle) error {
	return s.call("C_DestroyObject", func(c *p11.Ctx) error { return c.DestroyObject(s.handle, o) })
}

// keyTemplate finds the key of a root, and anything that poses as it.
func keyTemplate(ckaID []byte) []*p11.Attribute {
	return []*p11.Attribute{
		p11.NewAttribute(p11.CKA_CLASS, p11.CKO_SECRET_KEY),
		p11.NewAttribute(p11.CKA_ID, ckaID),
	}
}

// generate makes the key of a root on the token.
func (s *session) generate(rootID string, ckaID []byte) (key p11.ObjectHandle, err error) {
	template := []*p11.Attribute{
		p11.NewAttribute(p11.CKA_CLASS, p11.CKO_SECRET_KEY),
		p11.NewAttribute(p11.CKA_KEY_TYPE, p11.CKK_AES),
		p11.NewAttribute(p11.CKA_VALUE_LEN, 32),
		p11.NewAttribute(p11.CKA_LABEL, rootID),
		p11.NewAttribute(p11.CKA_ID, ckaID),
		p11.NewAttribute(p11.CKA_TOKEN, true),
		p11.NewAttribute(p11.CKA_PRIVATE, true),
		p11.NewAttribute(p11.CKA_SENSITIVE, true),
		p11.NewAttribute(p11.CKA_EXTRACTABLE, false),
		p11.NewAttribute(p11.CKA_MODIFIABLE, false),
		p11.NewAttribute(p11.CKA_ENCRYPT, true),
		p11.NewAttribute(p11.CKA_DECRYPT, true),
		p11.NewAttribute(p11.CKA_WRAP, false),
		p11.NewAttribute(p11.CKA_UNWRAP, false),
		p11.NewAttribute(p11.CKA_SIGN, false),
		p11.NewAttribute(p11.CKA_VERIFY, false),
		p11.NewAttribute(p11.CKA_DERIVE, false),
	}
	generate := func(template []*p11.Attribute) error {
		return s.call("C_GenerateKey", func(c *p11.Ctx) (err error) {
			key, err = c.GenerateKey(s.handle, []*p11.Mechanism{p11.NewMechanism(p11.CKM_AES_KEY_GEN, nil)}, template)
			return err
		})
	}
	err = generate(append(template[:len(template):len(template)], p11.NewAttribute(p11.CKA_COPYABLE, false)))
	if c := code(err); c == p11.CKR_ATTRIBUTE_TYPE_INVALID || c == p11.CKR_TEMPLATE_INCONSISTENT {
		err = generate(template) // the attribute came with PKCS#11 2.40
	}
	return key, err
}

// key returns the key of a root that may be used.
func (s *session) key(rootID string, ckaID []byte) (p11.ObjectHandle, error) {
	found, err := s.find(keyTemplate(ckaID), 2)
	switch {
	case err != nil:
		return 0, err
	case len(found) == 0:
		return 0, s.gone(rootID, "the token has a record of it, and no key")
	case len(found) > 1:
		return 0, rootError(rootID, fmt.Errorf("%w: there are several with its id", ErrOrigin))
	}
	if err := s.checkOrigin(rootID, found[0]); err != nil {
		return 0, err
	}
	return found[0], nil
}

func (s *session) checkOrigin(rootID string, key p11.ObjectHandle) error {
	got, err := s.attributes(key, p11.CKA_LOCAL, p11.CKA_ALWAYS_SENSITIVE, p11.CKA_NEVER_EXTRACTABLE, p11.CKA_MODIFIABLE)
	if err != nil {
		return err
	}
	for i, want := range []byte{1, 1, 1, 0} {
		if len(got[i]) != 1 || got[i][0] != want {
			return rootError(rootID, ErrOrigin)
		}
	}
	return nil
}
