package envelope

import (
	"errors"
	"strconv"
)

// What is wrong with a blob. Compare with errors.Is. A failing open releases
// no plaintext of the part that failed.
var (
	// ErrNotSealed: the bytes do not begin as a blob does.
	ErrNotSealed = errors.New("envelope: not sealed")
	// ErrUnsupportedVersion: a blob of a version that this package does not know.
	ErrUnsupportedVersion = errors.New("envelope: blob version is not supported")
	// ErrTruncated: the blob ends before it can be complete. A one-shot blob
	// cut within its ciphertext cannot be told from a changed one: ErrCorrupt.
	ErrTruncated = errors.New("envelope: blob is truncated")
	// ErrCorrupt: the blob is malformed, was changed, or was sealed under
	// another key than its header names.
	ErrCorrupt = errors.New("envelope: blob is corrupt")
	// ErrWrongContext: the blob is authentic, but its bound context is not the
	// one given; or it has one and none was given, or the other way round.
	ErrWrongContext = errors.New("envelope: bound context differs")
	// ErrWrongForm: a stream where a one-shot blob was expected, or the other
	// way round.
	ErrWrongForm = errors.New("envelope: blob is of the other form, one-shot or stream")
	// ErrWrongRecipient: the blob names other key ids, another class, bucket
	// or policy than the opener was made for.
	ErrWrongRecipient = errors.New("envelope: blob is for other recipients")
	// ErrMissingKeys: the opener holds some of the keys that an ALL blob
	// needs, not all. The error is a *MissingKeysError.
	ErrMissingKeys = errors.New("envelope: keys of some recipients are missing")
)

// What is wrong with a call.
var (
	// ErrWiped: the sealer or opener was wiped.
	ErrWiped = errors.New("envelope: key was wiped")
	// ErrTooLarge: more than MaxPlaintext bytes in one piece, or more segments
	// than a stream can have.
	ErrTooLarge = errors.New("envelope: too large")
	// ErrInvalidContext: a bound context with too many pairs, a name given
	// twice, or a name or value of a size that is not allowed.
	ErrInvalidContext = errors.New("envelope: invalid bound context")
	// ErrInvalidRecipients: too few or too many keys, an id given twice, or
	// keys of different classes or buckets.
	ErrInvalidRecipients = errors.New("envelope: invalid recipients")
	// ErrClosed: use of a writer or reader after Close or Abort.
	ErrClosed = errors.New("envelope: stream is closed")
)

// MissingKeysError tells which keys an ALL blob needs beside those held.
type MissingKeysError struct {
	IDs []KeyID
}

func (e *MissingKeysError) Error() string {
	return "envelope: keys of " + strconv.Itoa(len(e.IDs)) + " recipients are missing"
}

// Unwrap returns ErrMissingKeys.
func (e *MissingKeysError) Unwrap() error { return ErrMissingKeys }
