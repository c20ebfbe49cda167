package envelope

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
)

// Under the policy Any every blob has a random content key, which its header
// carries once a recipient, each time wrapped with XAES-256-GCM under a key
// derived from the recipient's blob key. The associated data of a wrapping is
// the SHA-256 of the header without its wrapped keys, and the position.

// wrapData is the associated data of wrapped content keys.
type wrapData [sha256.Size + 1]byte

func newWrapData(h *Header) (d wrapData) {
	core := sha256.Sum256(h.appendCore(nil))
	copy(d[:], core[:])
	return d
}

func (d *wrapData) at(i int) []byte {
	d[sha256.Size] = byte(i)
	return d[:]
}

// draw makes a content key of its own for a blob or stream, sets keys to what
// is derived from it, and returns the header.
func (s *Sealer) draw(keys *contentKeys, f Form, bound Context) (*encodedHeader, error) {
	var content secretKey
	rand.Read(content[:]) // never fails
	defer clear(content[:])
	if err := keys.derive(content[:]); err != nil {
		return nil, err
	}
	h := s.header
	h.Form, h.Bound, h.Commitment = f, !bound.IsZero(), keys.commit
	data := newWrapData(&h)
	h.Wrapped = make([][WrappedKeySize]byte, len(h.Recipients))
	err := s.m.use(func() error {
		for i := range h.Wrapped {
			pre := (*[xaesPrefixSize]byte)(h.Wrapped[i][:])
			rand.Read(pre[:])
			aead, err := xaesOnce(&s.m.wrap[i].key, pre)
			if err != nil {
				return err
			}
			aead.Seal(h.Wrapped[i][:xaesPrefixSize], nil, content[:], data.at(i))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return encode(&h), nil
}

func (s *Sealer) appendAny(dst, plaintext []byte, bound Context) ([]byte, error) {
	var keys contentKeys
	defer keys.wipe()
	h, err := s.draw(&keys, OneShot, bound)
	if err != nil {
		return dst, err
	}
	var pre [xaesPrefixSize]byte
	rand.Read(pre[:])
	aead, err := xaesOnce(&keys.payload[OneShot], &pre)
	if err != nil {
		return dst, err
	}
	if bound.IsZero() {
		return sealOneShot(dst, plaintext, h, 0, &pre, aead), nil
	}
	blob := sealOneShot(dst, plaintext, h, contextTagSize, &pre, aead)
	tag, nonce := tagAndNonce(blob[len(dst)+len(h.raw):])
	newContextMAC(&keys.context[OneShot]).tag(tag, nonce, bound)
	return blob, nil
}

// errForgotten: the key was there a moment ago.
var errForgotten = errors.New("envelope: key was forgotten")

// unwrapFirst unwraps for the first recipient that o has a key for, whose
// position it returns.
func (o *Opener) unwrapFirst(keys *contentKeys, h *Header) (int, error) {
	for {
		i, err := o.accept(h, h.Form)
		if err != nil {
			return 0, err
		}
		if err = o.unwrap(keys, h, i); err != errForgotten {
			return i, err
		}
	}
}

// unwrap sets keys to what is derived from the content key of an ANY blob,
// using the first recipient in the order of the header that o has a key for,
// whose position is i.
func (o *Opener) unwrap(keys *contentKeys, h *Header, i int) error {
	pre := (*[xaesPrefixSize]byte)(h.Wrapped[i][:])
	data := newWrapData(h)
	var content []byte
	defer func() { clear(content) }()
	err := o.m.use(func() error {
		for j := range o.m.wrap {
			if o.m.wrap[j].id != h.Recipients[i] || o.m.wrap[j].gone {
				continue
			}
			aead, err := xaesOnce(&o.m.wrap[j].key, pre)
			if err != nil {
				return err
			}
			content, err = aead.Open(nil, nil, h.Wrapped[i][xaesPrefixSize:], data.at(i))
			if err != nil {
				return ErrCorrupt
			}
			return nil
		}
		return errForgotten
	})
	if err != nil {
		return err
	}
	if err := keys.derive(content); err != nil {
		return err
	}
	if keys.commit != h.Commitment {
		return ErrCorrupt
	}
	return nil
}
