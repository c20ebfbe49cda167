package envelope

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
)

// Labels of derived keys, one a use. Those of the shares and blob keys are
// keyd's, which derives the same way; that of tokens is reserved.
const (
	LabelShare = "lethe/v1/share"
	LabelBlob  = "lethe/v1/blob"
	LabelToken = "lethe/v1/token"

	labelAll     = "lethe/v1/all"
	labelWrap    = "lethe/v1/wrap"
	labelCommit  = "lethe/v1/commit"
	labelOneShot = "lethe/v1/oneshot"
	labelStream  = "lethe/v1/stream"
	labelContext = "lethe/v1/context"
)

// Info encodes a label and parts as the info input of HKDF (RFC 5869): each
// preceded by its length as 4 bytes, big-endian. Different inputs never give
// the same info.
func Info(label string, parts ...[]byte) []byte {
	n := 4 + len(label)
	for _, p := range parts {
		n += 4 + len(p)
	}
	b := make([]byte, 0, n)
	b = binary.BigEndian.AppendUint32(b, uint32(len(label)))
	b = append(b, label...)
	for _, p := range parts {
		b = binary.BigEndian.AppendUint32(b, uint32(len(p)))
		b = append(b, p...)
	}
	return b
}

// contentKeys is everything derived from one content key. All but commit is
// secret.
type contentKeys struct {
	commit  [CommitmentSize]byte
	payload [3]secretKey // by Form
	context [3]secretKey // by Form
}

type secretKey [KeySize]byte

func (k *contentKeys) wipe() {
	clear(k.payload[:])
	clear(k.context[:])
}

// derive sets k from a content key. HKDF fails only where FIPS mode forbids it.
func (k *contentKeys) derive(content []byte) error {
	prk, err := hkdf.Extract(sha256.New, content, nil)
	if err != nil {
		return err
	}
	defer clear(prk)
	for _, out := range []struct {
		dst  []byte
		info []byte
	}{
		{k.commit[:], Info(labelCommit)},
		{k.payload[OneShot][:], Info(labelOneShot)},
		{k.payload[Stream][:], Info(labelStream)},
		{k.context[OneShot][:], Info(labelContext, []byte{byte(OneShot)})},
		{k.context[Stream][:], Info(labelContext, []byte{byte(Stream)})},
	} {
		key, err := hkdf.Expand(sha256.New, prk, string(out.info), len(out.dst))
		if err != nil {
			return err
		}
		copy(out.dst, key)
		clear(key)
	}
	return nil
}

// deriveKey sets dst to HKDF(secret; info), without salt.
func deriveKey(dst *secretKey, secret, info []byte) error {
	key, err := hkdf.Key(sha256.New, secret, nil, string(info), KeySize)
	if err != nil {
		return err
	}
	copy(dst[:], key)
	clear(key)
	return nil
}

// contentOfAll sets dst to the content key of an ALL blob; keys are in the
// order of the header.
func contentOfAll(dst *secretKey, keys []*Key) error {
	secrets := make([]byte, 0, len(keys)*KeySize)
	defer func() { clear(secrets) }()
	parts := [][]byte{
		{byte(len(keys))},
		binary.BigEndian.AppendUint16(nil, keys[0].Class),
		binary.BigEndian.AppendUint64(nil, keys[0].Bucket),
	}
	for _, k := range keys {
		secrets = append(secrets, k.Secret[:]...)
		parts = append(parts, k.ID[:])
	}
	return deriveKey(dst, secrets, Info(labelAll, parts...))
}
