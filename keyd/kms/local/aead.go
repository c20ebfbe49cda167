package local

import (
	"encoding/binary"

	"github.com/tink-crypto/tink-go/v2/aead"
	"github.com/tink-crypto/tink-go/v2/aead/xaesgcm"
	"github.com/tink-crypto/tink-go/v2/insecuresecretdataaccess"
	"github.com/tink-crypto/tink-go/v2/keyset"
	"github.com/tink-crypto/tink-go/v2/secretdata"
	"github.com/tink-crypto/tink-go/v2/tink"

	"lethe/keyd/internal/keys"
)

// aeadOverhead is what X-AES-GCM adds: salt and nonce, 24 bytes, and the tag.
const aeadOverhead = 24 + 16

// newAEAD returns Tink's X-AES-GCM (C2SP XAES-256-GCM) with a 12-byte salt and
// no output prefix under a 32-byte key.
func newAEAD(key []byte) (tink.AEAD, error) {
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
	return aead.New(h)
}

// wrapAD is the associated data of a wrapped key: a label, the root's id and
// the encryption context, each with its length.
func wrapAD(rootID string, ec keys.EncryptionContext) []byte {
	const label = "lethe/v1/local-kms/wrap"
	b := make([]byte, 0, 3*4+len(label)+len(rootID)+len(ec.Tenant)+4)
	for _, s := range []string{label, rootID, ec.Tenant} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return binary.BigEndian.AppendUint32(b, ec.Epoch)
}
