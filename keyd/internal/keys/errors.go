package keys

import (
	"context"
	"errors"
	"fmt"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

// Error is an outcome other than success. No message or metadata holds a
// subject id, a plaintext or a key.
type Error struct {
	Outcome  keydv1.Outcome
	Message  string
	Metadata map[string]string
	cause    error
	// entries is the size of the ledger that the anchor must cover before a
	// caller is told; see Told.
	entries uint64
}

func (e *Error) Error() string {
	if e.cause != nil {
		return e.Message + ": " + e.cause.Error()
	}
	return e.Message
}

func (e *Error) Unwrap() error { return e.cause }

func fail(o keydv1.Outcome, format string, args ...any) *Error {
	return &Error{Outcome: o, Message: fmt.Sprintf(format, args...)}
}

// with adds one metadata entry.
func (e *Error) with(key, value string) *Error {
	if e.Metadata == nil {
		e.Metadata = make(map[string]string, 1)
	}
	e.Metadata[key] = value
	return e
}

func (e *Error) because(cause error) *Error {
	e.cause = cause
	return e
}

func invalid(field string, cause error) *Error {
	return fail(keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, "%s", field).because(cause).with("field", field)
}

func unavailable(what string, cause error) *Error {
	return fail(keydv1.Outcome_OUTCOME_UNAVAILABLE, "%s", what).because(cause)
}

func unknown(what string) *Error {
	return fail(keydv1.Outcome_OUTCOME_UNKNOWN, "%s is not known", what)
}

// erased reports what a destruction ended, whose ledger index is entries less one.
func erased(what string, entries uint64) *Error {
	e := fail(keydv1.Outcome_OUTCOME_ERASED, "%s was erased", what)
	e.entries = entries
	return e
}

// tellLimit bounds how long those whose keys live wait in one call with those of
// whom Told does not know yet.
const tellLimit = 2 * time.Second

// Told returns err as a caller may be told it. Erased is final, and so is not
// said while the store alone knows it, which may be lost, and the destruction with
// it: until the anchor covers its entry, which Told waits for as a destroy does, it
// is unavailable.
func (k *Keys) Told(ctx context.Context, err error) error {
	var e *Error
	if errors.As(err, &e) {
		if uncovered := k.tell(ctx, e.entries); uncovered != nil {
			return uncovered
		}
	}
	return err
}

// tell returns when the anchor covers so many entries.
func (k *Keys) tell(ctx context.Context, entries uint64) error {
	if entries <= k.keeper.Anchored() {
		return nil
	}
	return k.waitAnchored(ctx, entries)
}

// newest is the size of the ledger with the newest entry about a subject.
func newest(s *storev1.Subject) uint64 {
	if n := len(s.LedgerIndexes); n != 0 {
		return s.LedgerIndexes[n-1] + 1
	}
	return 0
}

// lost reports a tenant whose keys were lost in a restore. It is unavailable:
// nobody erased it, and a newer backup may have its keys.
func lost() *Error {
	return unavailable("the tenant's keys were lost in a restore, and are not erased", nil).with("lost", "tenant")
}

// damaged reports a row that contradicts another or does not open. It is
// unavailable to callers, never erased.
func damaged(what string, cause error) *Error {
	return unavailable("the store is inconsistent: "+what, errors.Join(ErrDamaged, cause))
}

// damage is the first that work on many met. What is damaged holds up nothing
// else, and is told at the end.
type damage struct{ first error }

// pass returns err, or nil if it is damage, which is noted.
func (d *damage) pass(err error) error {
	if !errors.Is(err, ErrDamaged) {
		return err
	}
	if d.first == nil {
		d.first = err
	}
	return nil
}

// Errors of Open.
var (
	// ErrNotInitialised: the store is empty and Config.Initialise is not set.
	// A store that is opened at a wrong path must not look like one in which
	// everybody was erased.
	ErrNotInitialised = errors.New("the key store was never initialised")
	// ErrFormat: the store was written at a format level that this version
	// does not know.
	ErrFormat = errors.New("the key store's format is newer than this version")
	// ErrOtherAnchor: the anchor belongs to another store, or holds the ledger
	// of one that is gone.
	ErrOtherAnchor = errors.New("the anchor belongs to another key store")
)
