package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	keydv1 "lethe/proto/keyd/v1"
)

func TestEveryOutcomeOfTheWireHasACode(t *testing.T) {
	for number := range keydv1.Outcome_name {
		o := keydv1.Outcome(number)
		_, has := wireCodes[o]
		if want := number != 0 && number < 32; has != want {
			t.Errorf("%v: has a code: %v, want %v", o, has, want)
		}
	}
}

func TestToStatus(t *testing.T) {
	held := &keys.Error{Outcome: keydv1.Outcome_OUTCOME_HELD, Message: "held", Metadata: map[string]string{"hold": "h1"}}
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason string
	}{
		{held, codes.FailedPrecondition, "HELD"},
		{fmt.Errorf("wrapped: %w", held), codes.FailedPrecondition, "HELD"},
		{&keys.Error{Outcome: keydv1.Outcome_OUTCOME_ERASED}, codes.FailedPrecondition, "ERASED"},
		{keys.ErrFull, codes.Unavailable, "UNAVAILABLE"},
		{keys.ErrUnavailable, codes.Unavailable, "UNAVAILABLE"},
		{keys.ErrDamaged, codes.Unavailable, "UNAVAILABLE"},
		{keys.ErrNotFound, codes.Unavailable, "UNAVAILABLE"}, // a row that is missing is no answer
		{keys.ErrConflict, codes.Aborted, "CONFLICT"},
		{keys.ErrTooLarge, codes.ResourceExhausted, "EXHAUSTED"},
		{ledger.ErrForked, codes.Unavailable, "UNAVAILABLE"},
		{ledger.ErrSize, codes.InvalidArgument, "INVALID_ARGUMENT"},
		{context.DeadlineExceeded, codes.Unavailable, "UNAVAILABLE"},
		{errors.New("anything"), codes.Unavailable, "UNAVAILABLE"},
	} {
		s := status.Convert(toStatus(c.err))
		var info *errdetails.ErrorInfo
		for _, d := range s.Details() {
			info, _ = d.(*errdetails.ErrorInfo)
		}
		if s.Code() != c.code || info.GetReason() != c.reason || info.GetDomain() != Domain {
			t.Errorf("%v: %v %v, want %v %v", c.err, s.Code(), info, c.code, c.reason)
		}
	}
	info := status.Convert(toStatus(held)).Details()[0].(*errdetails.ErrorInfo)
	if info.Metadata["hold"] != "h1" {
		t.Errorf("metadata %v", info.Metadata)
	}
}

// A panic's value may hold anything; neither the caller nor the log sees it.
func TestPanicTellsNothing(t *testing.T) {
	var log strings.Builder
	g := &gate{log: slog.New(slog.NewTextHandler(&log, nil))}
	err := toStatus(g.panicked("/x", "the secret"))
	if status.Code(err) != codes.Unavailable || strings.Contains(err.Error()+log.String(), "the secret") {
		t.Errorf("%v, %s", err, log.String())
	}
	if !strings.Contains(log.String(), "type=string") {
		t.Errorf("the log does not tell the type: %s", log.String())
	}
}

func TestTenantsOf(t *testing.T) {
	batch := &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{{Tenant: "a"}, {Tenant: "b"}, {Tenant: "a"}, nil}}
	if got := tenantsOf(batch); len(got) != 3 {
		t.Errorf("of a batch: %q", got)
	}
	watch := &keydv1.WatchRevocationsRequest{Tenants: []string{"a", "b"}}
	tenantsOf(watch)[0] = "changed"
	if watch.Tenants[0] != "a" {
		t.Error("the request itself was changed")
	}
	if got := tenantsOf(&keydv1.DestroyKeyRequest{Tenant: "a"}); len(got) != 1 || got[0] != "a" {
		t.Errorf("of a destroy: %q", got)
	}
	if got := tenantsOf(&keydv1.GetStatusRequest{}); got != nil {
		t.Errorf("of a status: %q", got)
	}
}

var _ grpc.UnaryServerInterceptor = (*gate)(nil).unary
