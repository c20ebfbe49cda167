package envelope

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"runtime"
	"slices"
)

// Opener opens the blobs of the keys that it was made for, and refuses those
// of other keys, classes, buckets and policies. It is safe for concurrent use.
//
// An Opener that is dropped without Wipe finishes what it is doing, and its
// secrets are zeroed by the runtime some time afterwards: evicting one from a
// cache breaks nothing.
type Opener struct {
	keyset
	cache prefixCache // Single and All
}

// NewOpener makes an opener of blobs sealed under one key with NewSealer. The
// key is not used after the call returns, and can be wiped.
func NewOpener(key *Key, opts Options) (*Opener, error) {
	return newOpener(Single, []*Key{key}, 1, opts)
}

// NewMultiOpener makes an opener of blobs sealed with NewMultiSealer: for All,
// those sealed under exactly these keys; for Any, those sealed under at least
// one of these keys. The keys are of one class and bucket, their order is of
// no matter, and they can be wiped once the call has returned. It fails with
// ErrInvalidRecipients.
func NewMultiOpener(policy Policy, keys []*Key, opts Options) (*Opener, error) {
	switch policy {
	case All:
		return newOpener(All, keys, 2, opts)
	case Any:
		return newOpener(Any, keys, 1, opts)
	}
	return nil, ErrInvalidRecipients
}

func newOpener(policy Policy, keys []*Key, lo int, opts Options) (*Opener, error) {
	ks, err := newKeyset(policy, keys, lo, opts)
	if err != nil {
		return nil, err
	}
	o := &Opener{keyset: ks}
	runtime.AddCleanup(o, (*material).wipe, o.m)
	return o, nil
}

// Wipe zeroes the opener's secrets. What is opened afterwards fails with
// ErrWiped; so does an open under way that has not released its plaintext, and
// a running stream at its next segment. Go's own AES and HMAC states cannot be
// zeroed: they are left to the garbage collector.
func (o *Opener) Wipe() {
	o.m.wipe()
	o.cache.drop()
}

// Forget zeroes the key of one recipient of an opener for the policy Any, which
// then opens what the keys that are left can open. Streams that it has begun to
// open go on. For other policies it does nothing; see Wipe.
func (o *Opener) Forget(id KeyID) { o.m.forget(id) }

// Append opens a one-shot blob and appends its plaintext to dst. It does not
// allocate when dst has room for the plaintext, except for blobs of the policy
// Any and for prefixes not seen twice lately. blob must not overlap dst's unused
// capacity, whose contents are overwritten.
//
// It fails with one of the errors of this package, or that of Options.Check;
// dst is then returned as it was, and no plaintext is left behind it.
func (o *Opener) Append(dst, blob []byte, bound Context) ([]byte, error) {
	if o.policy == Any {
		dst, _, err := o.appendAny(dst, blob, bound)
		return dst, err
	}
	return o.appendKnown(dst, blob, bound)
}

// AppendBy is Append, and tells which key opened the blob: for Any the first
// of the header's recipients that the opener has a key for, for All the first
// recipient.
func (o *Opener) AppendBy(dst, blob []byte, bound Context) ([]byte, KeyID, error) {
	if o.policy == Any {
		return o.appendAny(dst, blob, bound)
	}
	out, err := o.appendKnown(dst, blob, bound)
	if err != nil {
		return dst, KeyID{}, err
	}
	return out, o.header.Recipients[0], nil
}

// appendKnown is Append for Single and All, of whose blobs all of the header
// is known beforehand.
func (o *Opener) appendKnown(dst, blob []byte, bound Context) ([]byte, error) {
	defer runtime.KeepAlive(o)
	h := o.encoded[OneShot][0]
	hasContext := false
	if !bytes.HasPrefix(blob, h.raw) {
		h = o.encoded[OneShot][1]
		hasContext = true
		if !bytes.HasPrefix(blob, h.raw) {
			return dst, o.refuse(blob)
		}
	}
	tag, sealed, err := cutPayload(blob[len(h.raw):], hasContext)
	if err != nil {
		return dst, err
	}
	if err := o.admit(); err != nil {
		return dst, err
	}
	prefix := (*[xaesPrefixSize]byte)(sealed)
	aead := o.cache.get(prefix)
	known := aead != nil
	if !known {
		if aead, err = o.m.oneShotAEAD(prefix); err != nil {
			return dst, err
		}
	}
	out, err := aead.Open(dst, nil, sealed[xaesPrefixSize:], h.hash[:])
	if err != nil {
		return dst, ErrCorrupt
	}
	if !known {
		o.cache.put(prefix, aead)
	}
	if hasContext || !bound.IsZero() {
		err = o.compareTag(tag, sealed[:xaesNonceSize], bound)
	}
	return o.release(dst, out, err)
}

// compareTag fails with ErrWrongContext unless tag, nil for none, is that of
// bound.
func (o *Opener) compareTag(tag, nonce []byte, bound Context) error {
	if tag == nil || bound.IsZero() {
		return ErrWrongContext
	}
	var want [contextTagSize]byte
	if err := o.m.tag(&want, OneShot, nonce, bound); err != nil {
		return err
	}
	if !hmac.Equal(want[:], tag) {
		return ErrWrongContext
	}
	return nil
}

// release returns what was opened, or wipes it because of err or because the
// keys may no longer be used.
func (o *Opener) release(dst, out []byte, err error) ([]byte, error) {
	if err == nil {
		err = o.admit()
	}
	if err != nil {
		clear(out[len(dst):])
		if o.m.dead.Load() {
			o.cache.drop()
		}
		return dst, err
	}
	return out, nil
}

// cutPayload cuts a one-shot blob behind its header into the context tag, if it
// has one, and what XAES made: the nonce, the ciphertext and its tag.
func cutPayload(b []byte, hasContext bool) (tag, sealed []byte, err error) {
	if hasContext {
		if len(b) < contextTagSize {
			return nil, nil, ErrTruncated
		}
		tag, b = b[:contextTagSize], b[contextTagSize:]
	}
	if len(b) < xaesNonceSize+tagSize {
		return nil, nil, ErrTruncated
	}
	if len(b)-xaesNonceSize-tagSize > MaxPlaintext {
		return nil, nil, ErrTooLarge
	}
	return tag, b, nil
}

// refuse tells why a one-shot blob does not begin with the header that o expects.
func (o *Opener) refuse(blob []byte) error {
	h, _, err := ParseHeader(blob)
	if err != nil {
		return err
	}
	if _, err := o.accept(h, OneShot); err != nil {
		return err
	}
	return ErrCorrupt // the commitment is to another key
}

// accept reports whether h names what o was made for, and the position of the
// recipient whose key is to be used.
func (o *Opener) accept(h *Header, f Form) (int, error) {
	if h.Form != f {
		return 0, ErrWrongForm
	}
	if h.Policy != o.policy || h.Class != o.header.Class || h.Bucket != o.header.Bucket {
		return 0, ErrWrongRecipient
	}
	var missing []KeyID
	first := -1
	for i, id := range h.Recipients {
		if slices.Contains(o.header.Recipients, id) {
			if first < 0 && (o.policy != Any || o.m.holds(id)) {
				first = i
			}
		} else {
			missing = append(missing, id)
		}
	}
	switch {
	case first < 0:
		return 0, ErrWrongRecipient
	case h.Policy == Any:
		return first, nil
	case len(h.Recipients)-len(missing) < len(o.header.Recipients):
		return 0, ErrWrongRecipient // o holds keys that the blob does not name
	case len(missing) > 0:
		return 0, &MissingKeysError{IDs: missing}
	}
	return 0, nil
}

func (o *Opener) appendAny(dst, blob []byte, bound Context) ([]byte, KeyID, error) {
	defer runtime.KeepAlive(o)
	h, n, err := ParseHeader(blob)
	if err != nil {
		return dst, KeyID{}, err
	}
	if _, err := o.accept(h, OneShot); err != nil {
		return dst, KeyID{}, err
	}
	if err := o.admit(); err != nil {
		return dst, KeyID{}, err
	}
	var keys contentKeys
	defer keys.wipe()
	i, err := o.unwrapFirst(&keys, h)
	if err != nil {
		return dst, KeyID{}, err
	}
	tag, sealed, err := cutPayload(blob[n:], h.Bound)
	if err != nil {
		return dst, KeyID{}, err
	}
	aead, err := xaesOnce(&keys.payload[OneShot], (*[xaesPrefixSize]byte)(sealed))
	if err != nil {
		return dst, KeyID{}, err
	}
	hash := sha256.Sum256(blob[:n])
	out, err := aead.Open(dst, nil, sealed[xaesPrefixSize:], hash[:])
	if err != nil {
		return dst, KeyID{}, ErrCorrupt
	}
	if h.Bound != !bound.IsZero() {
		err = ErrWrongContext
	} else if h.Bound {
		var want [contextTagSize]byte
		newContextMAC(&keys.context[OneShot]).tag(&want, sealed[:xaesNonceSize], bound)
		if !hmac.Equal(want[:], tag) {
			err = ErrWrongContext
		}
	}
	if out, err = o.release(dst, out, err); err != nil {
		return dst, KeyID{}, err
	}
	return out, h.Recipients[i], nil
}
