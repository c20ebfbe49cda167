package sdk

import (
	"context"
	"encoding/binary"
	"errors"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// Seal seals plaintext for t and returns the blob. ctx bounds the wait for
// keyd; with a lease in hand there is none.
func (c *Client) Seal(ctx context.Context, t Target, plaintext []byte) ([]byte, error) {
	return c.AppendSeal(ctx, nil, t, plaintext)
}

// Open opens a blob that Seal made for t and returns the plaintext. A blob of
// somebody else is ErrWrongSubject, whatever has become of its key; one that
// was sealed with another context is ErrWrongContext.
func (c *Client) Open(ctx context.Context, t Target, blob []byte) ([]byte, error) {
	return c.AppendOpen(ctx, nil, t, blob)
}

// AppendSeal appends the blob to dst. With a lease in hand, and room in dst,
// it does not allocate. plaintext must not overlap dst's unused capacity. On
// failure it returns dst as it was.
func (c *Client) AppendSeal(ctx context.Context, dst []byte, t Target, plaintext []byte) ([]byte, error) {
	k := leaseKey{tenant: t.Tenant, subject: t.Subject, class: t.Class, purpose: keydv1.Purpose_PURPOSE_SEAL}
	if l := c.table.get(&k); l != nil && l.checkSeal() == nil {
		l.markFound()
		if blob, err := l.sealer.AppendChecked(dst, plaintext, t.Context); err == nil {
			return blob, nil
		}
	}
	return c.appendSealed(ctx, dst, t, k, plaintext)
}

// appendSealed is AppendSeal for when no lease is in hand, or its use failed.
func (c *Client) appendSealed(ctx context.Context, dst []byte, t Target, k leaseKey, plaintext []byte) ([]byte, error) {
	if err := t.validate(); err != nil {
		return dst, err
	}
	if len(plaintext) > envelope.MaxPlaintext {
		return dst, tooLarge()
	}
	for range maxAttempts {
		l, err := c.obtain(ctx, &k)
		if err != nil {
			return dst, err
		}
		blob, err := l.sealer.Append(dst, plaintext, t.Context)
		over := err != nil && l.isOver(err)
		c.finish(l)
		if !over {
			return blob, err
		}
	}
	return dst, errTooShort()
}

// AppendOpen appends the plaintext to dst. With a lease in hand, and room in
// dst, it does not allocate, except for the first blobs of each sealer. blob
// must not overlap dst's unused capacity. On failure it returns dst as it was.
func (c *Client) AppendOpen(ctx context.Context, dst []byte, t Target, blob []byte) ([]byte, error) {
	if k, ok := glance(blob); ok {
		k.tenant, k.subject, k.class = t.Tenant, t.Subject, t.Class
		if l := c.table.get(&k); l != nil {
			l.markFound()
			if plaintext, err := l.opener.Append(dst, blob, t.Context); err == nil {
				return plaintext, nil
			}
		}
	}
	return c.appendOpened(ctx, dst, t, blob)
}

// appendOpened is AppendOpen for when no lease is in hand, or its use failed.
func (c *Client) appendOpened(ctx context.Context, dst []byte, t Target, blob []byte) ([]byte, error) {
	if err := t.validate(); err != nil {
		return dst, err
	}
	h, _, err := envelope.ParseHeader(blob)
	if err != nil {
		return dst, err
	}
	k, err := openKey(&t, h, envelope.OneShot)
	if err != nil {
		return dst, err
	}
	for range maxAttempts {
		l, err := c.obtain(ctx, &k)
		if err != nil {
			return dst, err
		}
		plaintext, err := l.opener.Append(dst, blob, t.Context)
		over := err != nil && l.isOver(err)
		c.finish(l)
		if !over {
			return plaintext, err
		}
	}
	return dst, errTooShort()
}

// openKey returns what to ask keyd for to open a blob of this header for t.
func openKey(t *Target, h *envelope.Header, form envelope.Form) (leaseKey, error) {
	if h.Form != form {
		return leaseKey{}, wrongForm(form)
	}
	if h.Policy != envelope.Single {
		return leaseKey{}, invalid("blob", "the blob is sealed for several subjects; open it for a Group")
	}
	return leaseKey{
		tenant: t.Tenant, subject: t.Subject, class: t.Class,
		purpose:     keydv1.Purpose_PURPOSE_OPEN,
		id:          h.Recipients[0],
		classNumber: h.Class,
		bucket:      h.Bucket,
	}, nil
}

// glance reads from where a header has them what a lease is found by, without
// parsing. It may be wrong: the opener that is found refuses a blob that is
// not its own, and the blob is then parsed.
func glance(blob []byte) (k leaseKey, ok bool) {
	const class, bucket, id, end = 6, 8, 17, 17 + envelope.KeyIDSize
	if len(blob) < end {
		return k, false
	}
	k.purpose = keydv1.Purpose_PURPOSE_OPEN
	k.classNumber = binary.BigEndian.Uint16(blob[class:])
	k.bucket = binary.BigEndian.Uint64(blob[bucket:])
	k.id = envelope.KeyID(blob[id:end])
	return k, true
}

// isOver reports whether err came because the lease ended during its use, so
// that keyd is to be asked again.
func (l *lease) isOver(err error) bool {
	return err == errLapsed || l.ended.Load() != nil || errors.Is(err, envelope.ErrWiped)
}

// finish ends a lease that was for one operation.
func (c *Client) finish(l *lease) {
	if !l.once {
		return
	}
	c.mu.Lock()
	c.discard(l)
	c.mu.Unlock()
}

func tooLarge() error {
	return &Error{
		Outcome: keydv1.Outcome_OUTCOME_EXHAUSTED,
		Message: "too large to be sealed in one piece; seal it as a stream",
		cause:   envelope.ErrTooLarge,
	}
}

func errTooShort() error { return unavailable("leases end before they can be used") }
