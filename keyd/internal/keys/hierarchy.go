package keys

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"

	"lethe/keyd/internal/wrap"
	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/envelope"
)

// keySize is the size in bytes of every key of the hierarchy.
const keySize = 32

func newKey() []byte {
	k := make([]byte, keySize)
	rand.Read(k) // never fails
	return k
}

func newID() (id id16) {
	rand.Read(id[:])
	return id
}

// nameHash names something with a name of any length by 16 bytes. Collisions
// would need 2^64 work, and would be noticed: rows hold the name too.
func nameHash(label, name string) id16 {
	sum := sha256.Sum256(envelope.Info(label, []byte(name)))
	return id16(sum[:16])
}

func tenantID(name string) id16 { return nameHash("lethe/v1/tenant", name) }

func classHash(name string) id16 { return nameHash("lethe/v1/class", name) }

// handleOf is the subject's pseudonym.
func handleOf(pseudonymKey []byte, tenant string, subject []byte) id16 {
	mac := hmac.New(sha256.New, pseudonymKey)
	mac.Write(envelope.Info("lethe/v1/handle", []byte(tenant), subject))
	return id16(mac.Sum(nil)[:16])
}

// pseudonymCheck proves that a pseudonym key is the one that a tenant was
// created with, and tells nothing else of it.
func pseudonymCheck(pseudonymKey []byte, tenant string) []byte {
	mac := hmac.New(sha256.New, pseudonymKey)
	mac.Write(envelope.Info("lethe/v1/pseudonym-check", []byte(tenant)))
	return mac.Sum(nil)[:16]
}

// requestMAC names a request without keeping the caller's id.
func requestMAC(requestKey []byte, tenant, requestID string) []byte {
	mac := hmac.New(sha256.New, requestKey)
	mac.Write(envelope.Info("lethe/v1/request", []byte(tenant), []byte(requestID)))
	return mac.Sum(nil)
}

// derivation encodes what the share and the blob key are derived for: SPEC.md,
// Part I section 3.
func derivation(label, tenant string, class uint32, bucket uint64, keyID []byte) string {
	return string(envelope.Info(label, []byte(tenant),
		binary.BigEndian.AppendUint16(nil, uint16(class)), binary.BigEndian.AppendUint64(nil, bucket), keyID))
}

// shareOf derives a bucket key's part in the blob keys of one DEK. Without the
// DEK it is nothing.
func shareOf(bucketKey []byte, tenant string, class uint32, bucket uint64, keyID []byte) ([]byte, error) {
	secret, err := sharesSecret(bucketKey)
	if err != nil {
		return nil, err
	}
	defer clear(secret)
	return shareFrom(secret, tenant, class, bucket, keyID)
}

// sharesSecret is the half of shareOf that is the same for all DEKs.
func sharesSecret(bucketKey []byte) ([]byte, error) { return hkdf.Extract(sha256.New, bucketKey, nil) }

// shareFrom is the other half.
func shareFrom(secret []byte, tenant string, class uint32, bucket uint64, keyID []byte) ([]byte, error) {
	return hkdf.Expand(sha256.New, secret, derivation(envelope.LabelShare, tenant, class, bucket, keyID), keySize)
}

// blobKey derives the key that a client gets from a DEK and its share of a bucket.
func blobKey(dek, share []byte, tenant string, class uint32, bucket uint64, keyID []byte) ([]byte, error) {
	both := append(append(make([]byte, 0, 2*keySize), dek...), share...)
	defer clear(both)
	return hkdf.Key(sha256.New, both, nil, derivation(envelope.LabelBlob, tenant, class, bucket, keyID), keySize)
}

// Identities: what a wrapped key is bound to. The row's own key says epoch,
// kind and owner; the rest is what the row's key leaves out.

func dekIdentity(rowKey []byte, kek id16, class, generation uint32) []byte {
	var n [8]byte
	binary.BigEndian.PutUint32(n[:4], class)
	binary.BigEndian.PutUint32(n[4:], generation)
	return envelope.Info("lethe/v1/wrap/dek", rowKey, kek[:], n[:])
}

func rowIdentity(rowKey []byte, kek id16) []byte {
	return envelope.Info("lethe/v1/wrap/row", rowKey, kek[:])
}

// wrapRow wraps key for a row and encodes the row.
func wrapRow(w *wrap.Wrapper, kek id16, key, identity []byte) (*storev1.Wrapped, error) {
	c, err := w.Wrap(key, identity)
	if err != nil {
		return nil, err
	}
	return &storev1.Wrapped{KekId: bytes.Clone(kek[:]), Ciphertext: c}, nil
}

// A KEK's wrapping under the root carries its id inside, because a KMS binds
// the tenant and the epoch only.

func packKEK(id id16, kek []byte) []byte { return append(bytes.Clone(id[:]), kek...) }

func unpackKEK(id id16, packed []byte) ([]byte, error) {
	if len(packed) != len(id)+keySize || !bytes.Equal(packed[:len(id)], id[:]) {
		return nil, damaged("a KEK is not the one its row names", nil)
	}
	return packed[len(id):], nil
}
