package envelope

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/subtle"
)

// Sizes of XAES-256-GCM (C2SP, c2sp.org/XAES-256-GCM) in bytes: a nonce is the
// 12 bytes that a key is derived from, and 12 bytes of GCM nonce.
const (
	xaesPrefixSize = 12
	xaesNonceSize  = xaesPrefixSize + gcmNonceSize
	gcmNonceSize   = 12
	tagSize        = 16
)

// xaes derives the keys of XAES-256-GCM under one key: NIST SP 800-108r1 in
// counter mode with AES-CMAC, reduced to its two single-block messages. It is
// for one goroutine at a time.
type xaes struct {
	block  cipher.Block
	subkey [aes.BlockSize]byte // CMAC's for full blocks
	// What is derived, and from what: here so that it is not allocated anew
	// for each prefix.
	message [aes.BlockSize]byte
	derived secretKey
}

func newXAES(key *secretKey) (*xaes, error) {
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, err
	}
	x := &xaes{block: block}
	// AES(0) doubled in GF(2^128).
	k := x.subkey[:]
	block.Encrypt(k, k)
	carry := k[0] >> 7
	for i := range k[:len(k)-1] {
		k[i] = k[i]<<1 | k[i+1]>>7
	}
	k[len(k)-1] = k[len(k)-1]<<1 ^ carry*0x87
	return x, nil
}

// derive sets x.derived to the key of a nonce's first 12 bytes.
func (x *xaes) derive(prefix *[xaesPrefixSize]byte) {
	for i := range 2 {
		// Counter, label "X", separator, context.
		x.message = [aes.BlockSize]byte{0, byte(i + 1), 'X', 0}
		copy(x.message[4:], prefix[:])
		subtle.XORBytes(x.message[:], x.message[:], x.subkey[:])
		x.block.Encrypt(x.derived[i*aes.BlockSize:], x.message[:])
	}
}

// aead returns AES-256-GCM under the key derived from a nonce's first 12 bytes.
// Its Seal draws the nonce's other 12 bytes at random and writes them before
// the ciphertext; its Open reads them there. That makes it the rest of an
// XAES-256-GCM message behind the prefix, and what FIPS 140-3 mode allows.
func (x *xaes) aead(prefix *[xaesPrefixSize]byte) (cipher.AEAD, error) {
	x.derive(prefix)
	defer clear(x.derived[:])
	block, err := aes.NewCipher(x.derived[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// wipe zeroes what can be; the block's key schedule is left to the collector.
func (x *xaes) wipe() { *x = xaes{} }

// xaesOnce is aead for a key that derives no other.
func xaesOnce(key *secretKey, prefix *[xaesPrefixSize]byte) (cipher.AEAD, error) {
	x, err := newXAES(key)
	if err != nil {
		return nil, err
	}
	defer x.wipe()
	return x.aead(prefix)
}
