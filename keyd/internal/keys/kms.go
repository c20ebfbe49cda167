package keys

import (
	"context"
	"errors"
	"time"
)

// KMS holds roots and uses them. A key never leaves it. Implementations retry
// what is worth retrying within ctx, and are safe for concurrent use.
type KMS interface {
	// Wrap encrypts a key of at most 64 bytes under the root, bound to ec.
	Wrap(ctx context.Context, rootID string, key []byte, ec EncryptionContext) ([]byte, error)
	// Unwrap undoes Wrap. It fails with ErrKMSDenied when ec, the root or the
	// bytes are not those of the Wrap.
	Unwrap(ctx context.Context, rootID string, wrapped []byte, ec EncryptionContext) ([]byte, error)
	// Kind names the adapter ("local", "awskms"); it is recorded in the ledger.
	Kind() string
	// FinalBasis is a code of at most 64 bytes of [a-z0-9._-] for how far the
	// destruction of a root reaches; receipts state it.
	FinalBasis() string
	RootKeeper
}

// RootKeeper makes roots and ends them.
type RootKeeper interface {
	// Create makes a root for an epoch and returns its id: what every other
	// call names it by, at most 256 bytes of printable ASCII. Repeated with the
	// same epoch and request, because its answer was lost or whoever asked has
	// died, it returns the same root, in whatever state that is.
	Create(ctx context.Context, epoch uint32, request RootRequest) (rootID string, err error)
	// Disable stops the use of a root until it is destroyed or enabled again
	// by Cancel. Disabling a disabled root is no error.
	Disable(ctx context.Context, rootID string) error
	// ScheduleDestruction starts the waiting period; the root cannot be used
	// from now on. It returns the instant after which the root is destroyed.
	// Repeating it returns the same instant.
	ScheduleDestruction(ctx context.Context, rootID string) (time.Time, error)
	// Cancel undoes ScheduleDestruction and Disable while the root is not
	// destroyed. Afterwards the root is enabled.
	Cancel(ctx context.Context, rootID string) error
	// Describe tells a root's state, with authority: an answer of RootDestroyed
	// is positive evidence. Denied and unavailable are errors, never a state.
	Describe(ctx context.Context, rootID string) (Root, error)
	// Waiting returns the waiting period that ScheduleDestruction will use.
	Waiting() time.Duration
}

// RootRequest is the random id of the wish for a root. Whoever asks for one has
// written it down before.
type RootRequest [16]byte

// EncryptionContext is what a wrapped key is bound to in the KMS. An adapter
// passes it to the KMS as its own encryption context or associated data.
type EncryptionContext struct {
	Tenant string // empty: the system KEK
	Epoch  uint32
}

// Root is a root as its KMS describes it.
type Root struct {
	ID    string
	State RootState
	// DestroyAt is set in RootPending: when the waiting period ends.
	DestroyAt time.Time
}

// RootState is the state of a root.
type RootState int

// States of a root.
const (
	RootEnabled RootState = iota + 1
	RootDisabled
	RootPending
	RootDestroyed
)

// Errors of a KMS. Adapters wrap them.
var (
	// ErrKMSUnavailable: no answer, throttled, or a passing fault. Retry.
	ErrKMSUnavailable = errors.New("KMS is unavailable")
	// ErrKMSDenied: the KMS refused: access, context or ciphertext.
	ErrKMSDenied = errors.New("KMS refused")
	// ErrRootNotUsable: the root is disabled, pending destruction or destroyed.
	ErrRootNotUsable = errors.New("root cannot be used")
	// ErrRootUnknown: the KMS has no such root. Never a proof of destruction.
	ErrRootUnknown = errors.New("KMS knows no such root")
)
