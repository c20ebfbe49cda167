// Package wrap encrypts keys under keys: Tink's X-AES-GCM with a 192-bit nonce
// (XAES-256-GCM of C2SP: 12 bytes of salt, 12 of nonce, no prefix), so that the
// number of keys one key may wrap needs no counting.
package wrap

import (
	"errors"
	"fmt"

	"github.com/tink-crypto/tink-go/v2/aead"
	"github.com/tink-crypto/tink-go/v2/aead/xaesgcm"
	"github.com/tink-crypto/tink-go/v2/insecuresecretdataaccess"
	"github.com/tink-crypto/tink-go/v2/keyset"
	"github.com/tink-crypto/tink-go/v2/secretdata"
	"github.com/tink-crypto/tink-go/v2/tink"
)

// KeySize is the size of a wrapping key in bytes; Overhead is what wrapping
// adds to a key.
const (
	KeySize  = 32
	Overhead = 24 + 16
)

// ErrUnwrap is returned for every wrapped key that does not open: another key,
// another identity, or changed bytes.
var ErrUnwrap = errors.New("wrapped key does not open")

// Wrapper wraps keys under one key. It is safe for concurrent use.
type Wrapper struct{ aead tink.AEAD }

// New makes a Wrapper of a key of KeySize bytes, which is copied.
func New(key []byte) (*Wrapper, error) {
	if len(key) != KeySize {
		return nil, fmt.Errorf("wrapping key has %d bytes, not %d", len(key), KeySize)
	}
	params, err := xaesgcm.NewParameters(xaesgcm.VariantNoPrefix, 12)
	if err != nil {
		return nil, err
	}
	k, err := xaesgcm.NewKey(secretdata.NewBytesFromData(key, insecuresecretdataaccess.Token{}), 0, params)
	if err != nil {
		return nil, err
	}
	m := keyset.NewManager()
	id, err := m.AddKey(k)
	if err != nil {
		return nil, err
	}
	if err := m.SetPrimary(id); err != nil {
		return nil, err
	}
	h, err := m.Handle()
	if err != nil {
		return nil, err
	}
	a, err := aead.New(h)
	if err != nil {
		return nil, err
	}
	return &Wrapper{aead: a}, nil
}

// Wrap encrypts key bound to identity, and proves that the result opens before
// it returns it.
func (w *Wrapper) Wrap(key, identity []byte) ([]byte, error) {
	wrapped, err := w.WrapUnproven(key, identity)
	if err != nil {
		return nil, err
	}
	again, err := w.Unwrap(wrapped, identity)
	if err != nil || string(again) != string(key) {
		return nil, errors.New("a fresh wrapped key does not open")
	}
	clear(again)
	return wrapped, nil
}

// WrapUnproven is Wrap without the proof: for a key that has another wrapping
// until somebody has seen that this one opens.
func (w *Wrapper) WrapUnproven(key, identity []byte) ([]byte, error) {
	return w.aead.Encrypt(key, identity)
}

// Unwrap undoes Wrap, or fails with ErrUnwrap.
func (w *Wrapper) Unwrap(wrapped, identity []byte) ([]byte, error) {
	key, err := w.aead.Decrypt(wrapped, identity)
	if err != nil {
		return nil, ErrUnwrap
	}
	return key, nil
}
