//go:build pkcs11

package pkcs11

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
)

const (
	wrapVersion = 1
	ivSize      = 12
	tagSize     = 16
	overhead    = 1 + ivSize + tagSize
	maxKey      = 64
)

// wrapAD is the associated data of a wrapped key. Every part has its length
// before it, so that no two contexts have the same.
func wrapAD(rootID string, ec keys.EncryptionContext) []byte {
	const label = "lethe/v1/pkcs11/wrap"
	b := make([]byte, 0, 3*4+len(label)+len(rootID)+len(ec.Tenant)+4)
	for _, s := range []string{label, rootID, ec.Tenant} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return binary.BigEndian.AppendUint32(b, ec.Epoch)
}

// encrypt returns the IV that was used, the ciphertext and the tag.
func (s *session) encrypt(key p11.ObjectHandle, plain, ad []byte) ([]byte, error) {
	iv := make([]byte, ivSize)
	rand.Read(iv)
	params := p11.NewGCMParams(iv, ad, 8*tagSize)
	defer params.Free()
	err := s.call("C_EncryptInit", func(c *p11.Ctx) error {
		return c.EncryptInit(s.handle, []*p11.Mechanism{p11.NewMechanism(p11.CKM_AES_GCM, params)}, key)
	})
	if err != nil {
		return nil, err
	}
	var sealed []byte
	err = s.call("C_Encrypt", func(c *p11.Ctx) (err error) {
		sealed, err = c.Encrypt(s.handle, plain)
		return err
	})
	if err != nil {
		return nil, err
	}
	iv = params.IV()
	if len(iv) != ivSize || len(sealed) != len(plain)+tagSize {
		return nil, unavailable(fmt.Errorf("%w: AES-GCM gives %d bytes for %d, with an IV of %d", ErrUnsupported, len(sealed), len(plain), len(iv)))
	}
	return append(iv, sealed...), nil
}

// decrypt undoes encrypt. It fails with keys.ErrKMSDenied when the token
// refuses the ciphertext and is well.
func (s *session) decrypt(key p11.ObjectHandle, sealed, ad []byte) ([]byte, error) {
	plain, err := s.open(key, sealed, ad)
	if err == nil || errors.Is(err, keys.ErrKMSDenied) || code(err) == p11.CKR_OK {
		return plain, err
	}
	// Not every token has a word for a ciphertext that does not verify. One
	// that is well opens what it has just sealed, in another session.
	other, e := s.k.openSession(s.ctx, s.conn.slot)
	if e != nil {
		return nil, e
	}
	defer s.k.closeSessions(s.conn, other)
	fresh := &session{k: s.k, ctx: s.ctx, conn: s.conn, handle: other}
	sealed, e = fresh.encrypt(key, make([]byte, tagSize), nil)
	if e == nil {
		_, e = fresh.open(key, sealed, nil)
	}
	if e != nil {
		return nil, e
	}
	return nil, fmt.Errorf("PKCS#11: %w: the ciphertext, with %s", keys.ErrKMSDenied, code(err).Error())
}

func (s *session) open(key p11.ObjectHandle, sealed, ad []byte) ([]byte, error) {
	params := p11.NewGCMParams(sealed[:ivSize], ad, 8*tagSize)
	defer params.Free()
	err := s.call("C_DecryptInit", func(c *p11.Ctx) error {
		return c.DecryptInit(s.handle, []*p11.Mechanism{p11.NewMechanism(p11.CKM_AES_GCM, params)}, key)
	})
	if err != nil {
		return nil, err
	}
	var plain []byte
	err = s.call("C_Decrypt", func(c *p11.Ctx) (err error) {
		plain, err = c.Decrypt(s.handle, sealed[ivSize:])
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(plain) != len(sealed)-ivSize-tagSize {
		clear(plain)
		return nil, unavailable(fmt.Errorf("%w: AES-GCM gives %d bytes for %d", ErrUnsupported, len(plain), len(sealed)))
	}
	return plain, nil
}
