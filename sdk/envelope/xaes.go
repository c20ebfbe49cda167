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

// newXAES returns AES-256-GCM under the key that XAES-256-GCM derives from key
// and a nonce's first 12 bytes. Its Seal draws the nonce's other 12 bytes at
// random and writes them before the ciphertext; its Open reads them there.
// That makes it the rest of an XAES-256-GCM message behind the prefix, and
// what FIPS 140-3 mode allows.
//
// The derivation is NIST SP 800-108r1 in counter mode with AES-CMAC, reduced
// to its two single-block messages.
func newXAES(key *secretKey, prefix *[xaesPrefixSize]byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, err
	}
	var derived secretKey
	deriveXAES(&derived, block, prefix)
	defer clear(derived[:])
	block, err = aes.NewCipher(derived[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

func deriveXAES(dst *secretKey, block cipher.Block, prefix *[xaesPrefixSize]byte) {
	// CMAC's subkey for full blocks: AES(0) doubled in GF(2^128).
	var k1 [aes.BlockSize]byte
	block.Encrypt(k1[:], k1[:])
	carry := k1[0] >> 7
	for i := range k1[:aes.BlockSize-1] {
		k1[i] = k1[i]<<1 | k1[i+1]>>7
	}
	k1[aes.BlockSize-1] = k1[aes.BlockSize-1]<<1 ^ carry*0x87

	for i := range 2 {
		// Counter, label "X", separator, context.
		m := [aes.BlockSize]byte{0, byte(i + 1), 'X', 0}
		copy(m[4:], prefix[:])
		subtle.XORBytes(m[:], m[:], k1[:])
		block.Encrypt(dst[i*aes.BlockSize:], m[:])
	}
	clear(k1[:])
}
