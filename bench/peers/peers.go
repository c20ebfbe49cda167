// Package peers holds what Lethe is measured beside: the limit, which is Go's
// own AES-256-GCM, and other libraries, each behind the same two shapes. What a
// peer does for its users differs, and is said in its Note: speed is compared,
// not worth.
package peers

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"io"
)

// OneShot seals messages whole. Seal and Open append to dst where the library
// can, and otherwise return memory of their own.
type OneShot struct {
	Name string
	// Note says what an operation includes.
	Note string
	Seal func(dst, plaintext []byte) ([]byte, error)
	Open func(dst, sealed []byte) ([]byte, error)
	// Close, if not nil, gives up what the library holds.
	Close func()
}

// Stream seals and opens streams.
type Stream struct {
	Name string
	Note string
	// Seal returns a writer of plaintext over a writer of ciphertext.
	Seal func(io.Writer) (io.WriteCloser, error)
	// Open returns a reader of plaintext over a reader of ciphertext.
	Open func(io.Reader) (io.Reader, error)
}

// GCM returns Go's AES-256-GCM under a fresh key: the limit.
func GCM() cipher.AEAD { return fresh(NewGCM) }

// NewGCM returns Go's AES-256-GCM under a key of 32 bytes.
func NewGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

func newRandomNonceGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

func fresh(mode func(key []byte) (cipher.AEAD, error)) cipher.AEAD {
	key := make([]byte, 32)
	rand.Read(key) // never fails
	aead, err := mode(key)
	if err != nil {
		panic(err) // the key's size is right
	}
	return aead
}

// Limit is raw AES-256-GCM with a nonce that is never drawn: no real use may
// reuse one, so that nothing can be faster.
func Limit() OneShot {
	aead := GCM()
	nonce := make([]byte, aead.NonceSize())
	return OneShot{
		Name: "AES-256-GCM (the limit)",
		Note: "Go's crypto/cipher into a buffer that is there; the nonce is constant, the key schedule kept",
		Seal: func(dst, plaintext []byte) ([]byte, error) { return aead.Seal(dst, nonce, plaintext, nil), nil },
		Open: func(dst, sealed []byte) ([]byte, error) { return aead.Open(dst, nonce, sealed, nil) },
	}
}

// RandomNonce is the limit with a nonce drawn for each message, as Go's own
// AEAD draws it.
func RandomNonce() OneShot {
	aead := fresh(newRandomNonceGCM)
	return OneShot{
		Name: "AES-256-GCM, random nonce",
		Seal: func(dst, plaintext []byte) ([]byte, error) { return aead.Seal(dst, nil, plaintext, nil), nil },
		Open: func(dst, sealed []byte) ([]byte, error) { return aead.Open(dst, nil, sealed, nil) },
	}
}
