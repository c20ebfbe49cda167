package rpc

import (
	"context"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/internal/policy"
	keydv1 "lethe/proto/keyd/v1"
)

// Domain is the domain of the ErrorInfo in every status that keyd returns.
const Domain = "lethe"

// wireCodes is the one table from outcomes to gRPC codes.
var wireCodes = map[keydv1.Outcome]codes.Code{
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

// failure says how an error looks on the wire. What no one foresaw is
// unavailable: it proves nothing, and least of all an erasure.
func failure(err error) *keydv1.Failure {
	var e *keys.Error
	if errors.As(err, &e) {
		return &keydv1.Failure{Outcome: e.Outcome, Message: e.Error(), Metadata: e.Metadata}
	}
	unavailable := func(message string) *keydv1.Failure {
		return &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE, Message: message}
	}
	var denied *policy.DeniedError
	if errors.As(err, &denied) {
		f := &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_DENIED, Message: denied.Error()}
		if denied.Tenant != "" {
			f.Metadata = map[string]string{"tenant": denied.Tenant}
		}
		return f
	}
	switch {
	case errors.Is(err, keys.ErrFull):
		return unavailable("the store's disk is nearly full, or keyd has too many files and connections open; writes are refused until there is room. What is short, keyd's status says")
	case errors.Is(err, keys.ErrConflict):
		return &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_CONFLICT, Message: "too many concurrent changes"}
	case errors.Is(err, keys.ErrTooLarge):
		return &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_EXHAUSTED, Message: "the change is larger than a transaction may be"}
	case errors.Is(err, ledger.ErrSize):
		return &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: "beyond the ledger"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return unavailable("no answer in time; whether it happened is not known")
	}
	return unavailable("keyd cannot answer: " + err.Error())
}

// toStatus is failure as a gRPC error.
func toStatus(err error) error {
	f := failure(err)
	s, detailErr := status.New(wireCodes[f.Outcome], f.Message).WithDetails(&errdetails.ErrorInfo{
		Reason: policy.Reason(f.Outcome), Domain: Domain, Metadata: f.Metadata,
	})
	if detailErr != nil {
		return status.Error(codes.Unavailable, "an error could not be encoded")
	}
	return s.Err()
}
