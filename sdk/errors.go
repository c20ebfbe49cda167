package sdk

import (
	"context"
	"errors"
	"io"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// Outcomes of a call to keyd, for errors.Is. What each means to the caller is
// told in the package documentation.
var (
	ErrErased          error = sentinel(keydv1.Outcome_OUTCOME_ERASED)
	ErrPendingErasure  error = sentinel(keydv1.Outcome_OUTCOME_PENDING_ERASURE)
	ErrExpired         error = sentinel(keydv1.Outcome_OUTCOME_EXPIRED)
	ErrHeld            error = sentinel(keydv1.Outcome_OUTCOME_HELD)
	ErrUnknown         error = sentinel(keydv1.Outcome_OUTCOME_UNKNOWN)
	ErrInvalidArgument error = sentinel(keydv1.Outcome_OUTCOME_INVALID_ARGUMENT)
	ErrDenied          error = sentinel(keydv1.Outcome_OUTCOME_DENIED)
	ErrUnavailable     error = sentinel(keydv1.Outcome_OUTCOME_UNAVAILABLE)
	ErrExhausted       error = sentinel(keydv1.Outcome_OUTCOME_EXHAUSTED)
	ErrConflict        error = sentinel(keydv1.Outcome_OUTCOME_CONFLICT)
	ErrWrongSubject    error = sentinel(keydv1.Outcome_OUTCOME_WRONG_SUBJECT)
)

// Outcomes that arise without keyd, from the blob itself.
var (
	ErrNotSealed          = envelope.ErrNotSealed
	ErrCorrupt            = envelope.ErrCorrupt
	ErrTruncated          = envelope.ErrTruncated
	ErrWrongContext       = envelope.ErrWrongContext
	ErrUnsupportedVersion = envelope.ErrUnsupportedVersion
)

// ErrClosed is returned by the methods of a closed Client, and by operations
// and streams that were under way when it was closed.
var ErrClosed = errors.New("client is closed")

// Error is an outcome that keyd told, or that this package arrived at for it.
// errors.Is matches it with the sentinel of its outcome and no other.
type Error struct {
	// Outcome is OUTCOME_UNSPECIFIED for an error that could not be
	// classified; such an error matches no sentinel, and above all never
	// ErrErased.
	Outcome keydv1.Outcome
	// Message is for a person to read. It holds no id of a subject.
	Message string
	// Metadata is what keyd added: "hold", "field", "generation".
	Metadata map[string]string

	cause error
	told  bool // by keyd itself, not by gRPC in its place
}

func (e *Error) Error() string {
	switch {
	case e.Outcome == keydv1.Outcome_OUTCOME_UNSPECIFIED:
		return "unclassified error: " + e.Message
	case e.Message == "":
		return words(e.Outcome)
	}
	return words(e.Outcome) + ": " + e.Message
}

// Is reports whether target is the sentinel of e's outcome.
func (e *Error) Is(target error) bool {
	s, ok := target.(sentinel)
	return ok && keydv1.Outcome(s) == e.Outcome
}

// Unwrap returns the error below: that of the context which ended the wait,
// that of package ident or envelope, or gRPC's own.
func (e *Error) Unwrap() error { return e.cause }

// OutcomeOf tells err's outcome, whether it comes from this package, from
// sdk/envelope, from proto/ident or straight from gRPC. It is
// OUTCOME_UNSPECIFIED for nil and for an error of no known outcome.
func OutcomeOf(err error) keydv1.Outcome {
	var e *Error
	var s sentinel
	switch {
	case err == nil:
		return keydv1.Outcome_OUTCOME_UNSPECIFIED
	case errors.As(err, &e):
		return e.Outcome
	case errors.As(err, &s):
		return keydv1.Outcome(s)
	case errors.Is(err, ErrNotSealed):
		return keydv1.Outcome_OUTCOME_NOT_SEALED
	case errors.Is(err, ErrTruncated):
		return keydv1.Outcome_OUTCOME_TRUNCATED
	case errors.Is(err, ErrWrongContext):
		return keydv1.Outcome_OUTCOME_WRONG_CONTEXT
	case errors.Is(err, ErrUnsupportedVersion):
		return keydv1.Outcome_OUTCOME_UNSUPPORTED_VERSION
	case errors.Is(err, ErrCorrupt):
		return keydv1.Outcome_OUTCOME_CORRUPT
	case errors.Is(err, envelope.ErrTooLarge):
		return keydv1.Outcome_OUTCOME_EXHAUSTED
	case errors.Is(err, ident.ErrInvalid), errors.Is(err, envelope.ErrWrongForm), errors.Is(err, envelope.ErrInvalidContext):
		return keydv1.Outcome_OUTCOME_INVALID_ARGUMENT
	}
	if st, ok := status.FromError(err); ok {
		return decode(st).Outcome
	}
	return keydv1.Outcome_OUTCOME_UNSPECIFIED
}

// sentinel is an outcome as an error.
type sentinel keydv1.Outcome

func (s sentinel) Error() string { return words(keydv1.Outcome(s)) }

// words turns OUTCOME_PENDING_ERASURE into "pending erasure".
func words(o keydv1.Outcome) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(o.String(), outcomePrefix), "_", " "))
}

const (
	errorDomain   = "lethe"
	outcomePrefix = "OUTCOME_"
)

// outcomeCodes is the gRPC code under which keyd sends each outcome. A reason
// under any other code was not written by keyd, and is not believed.
var outcomeCodes = map[keydv1.Outcome]codes.Code{
	keydv1.Outcome_OUTCOME_ERASED:           codes.FailedPrecondition,
	keydv1.Outcome_OUTCOME_PENDING_ERASURE:  codes.FailedPrecondition,
	keydv1.Outcome_OUTCOME_EXPIRED:          codes.FailedPrecondition,
	keydv1.Outcome_OUTCOME_HELD:             codes.FailedPrecondition,
	keydv1.Outcome_OUTCOME_UNKNOWN:          codes.NotFound,
	keydv1.Outcome_OUTCOME_INVALID_ARGUMENT: codes.InvalidArgument,
	keydv1.Outcome_OUTCOME_DENIED:           codes.PermissionDenied,
	keydv1.Outcome_OUTCOME_UNAVAILABLE:      codes.Unavailable,
	keydv1.Outcome_OUTCOME_EXHAUSTED:        codes.ResourceExhausted,
	keydv1.Outcome_OUTCOME_CONFLICT:         codes.Aborted,
	keydv1.Outcome_OUTCOME_WRONG_SUBJECT:    codes.PermissionDenied,
}

// fromRPC turns what a gRPC call on ctx returned into an *Error. It is the one
// place where wire errors are read.
func fromRPC(ctx context.Context, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	e = decode(st)
	if e.cause == nil {
		e.cause = err
	}
	if e.Outcome == keydv1.Outcome_OUTCOME_UNAVAILABLE {
		if ended := ctx.Err(); ended != nil {
			e.cause = ended
		} else if _, limited := ctx.Deadline(); limited && st.Code() == codes.DeadlineExceeded {
			// gRPC, or keyd, saw the deadline pass a moment before ctx did.
			e.cause = context.DeadlineExceeded
		}
	}
	return e
}

// decode classifies a status. A status that holds no ErrorInfo of keyd's, or
// one that contradicts its code, is never anything worse than unavailable.
func decode(st *status.Status) *Error {
	e := &Error{Message: st.Message()}
	found := 0
	for _, d := range st.Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		if !ok || info.GetDomain() != errorDomain {
			continue
		}
		found++
		o := keydv1.Outcome(keydv1.Outcome_value[outcomePrefix+info.GetReason()])
		if code, known := outcomeCodes[o]; known && code == st.Code() {
			e.Outcome, e.Metadata = o, info.GetMetadata()
		}
	}
	if found == 1 && e.Outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
		e.told = true
		return e
	}
	e.Outcome, e.Metadata = keydv1.Outcome_OUTCOME_UNSPECIFIED, nil
	switch st.Code() {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		e.Outcome = keydv1.Outcome_OUTCOME_UNAVAILABLE
	default:
		e.Message = st.Code().String() + ": " + e.Message
	}
	return e
}

// fromFailure is decode for one query's outcome inside a batch.
func fromFailure(f *keydv1.Failure) *Error {
	e := &Error{Outcome: f.GetOutcome(), Message: f.GetMessage(), Metadata: f.GetMetadata()}
	if _, known := outcomeCodes[e.Outcome]; !known {
		e.Outcome, e.Metadata = keydv1.Outcome_OUTCOME_UNSPECIFIED, nil
	}
	return e
}

// gaveUp is the error of a caller whose ctx ended while it waited for keyd.
func gaveUp(ctx context.Context) error {
	return &Error{Outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE, Message: "gave up waiting for keyd", cause: ctx.Err()}
}

func unavailable(message string) error {
	return &Error{Outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE, Message: message}
}

func malformed(what string) error {
	return &Error{Message: "keyd's answer is malformed: " + what}
}

// invalid is the error of a field that is refused before anything is sent.
func invalid(field, message string) error {
	return &Error{
		Outcome:  keydv1.Outcome_OUTCOME_INVALID_ARGUMENT,
		Message:  message,
		Metadata: map[string]string{"field": field},
	}
}

// wrongForm is the error of a blob that is not of the form wanted.
func wrongForm(want envelope.Form) error {
	e := &Error{
		Outcome:  keydv1.Outcome_OUTCOME_INVALID_ARGUMENT,
		Message:  "the blob is a stream; use OpenReader",
		Metadata: map[string]string{"field": "blob"},
		cause:    envelope.ErrWrongForm,
	}
	if want == envelope.Stream {
		e.Message = "the blob is no stream; use Open"
	}
	return e
}

// fromIdent turns an error of package ident into an *Error.
func fromIdent(err error) error {
	if err == nil {
		return nil
	}
	e := &Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: err.Error(), cause: err}
	if bad := (*ident.Error)(nil); errors.As(err, &bad) {
		e.Metadata = map[string]string{"field": bad.Field}
	}
	return e
}
