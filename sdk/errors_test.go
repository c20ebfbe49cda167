package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// sentinels are the outcomes of calls with their codes, as the protocol has
// them.
var sentinels = []struct {
	outcome keydv1.Outcome
	code    codes.Code
	err     error
}{
	{keydv1.Outcome_OUTCOME_ERASED, codes.FailedPrecondition, sdk.ErrErased},
	{keydv1.Outcome_OUTCOME_PENDING_ERASURE, codes.FailedPrecondition, sdk.ErrPendingErasure},
	{keydv1.Outcome_OUTCOME_EXPIRED, codes.FailedPrecondition, sdk.ErrExpired},
	{keydv1.Outcome_OUTCOME_HELD, codes.FailedPrecondition, sdk.ErrHeld},
	{keydv1.Outcome_OUTCOME_UNKNOWN, codes.NotFound, sdk.ErrUnknown},
	{keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, codes.InvalidArgument, sdk.ErrInvalidArgument},
	{keydv1.Outcome_OUTCOME_DENIED, codes.PermissionDenied, sdk.ErrDenied},
	{keydv1.Outcome_OUTCOME_UNAVAILABLE, codes.Unavailable, sdk.ErrUnavailable},
	{keydv1.Outcome_OUTCOME_EXHAUSTED, codes.ResourceExhausted, sdk.ErrExhausted},
	{keydv1.Outcome_OUTCOME_CONFLICT, codes.Aborted, sdk.ErrConflict},
	{keydv1.Outcome_OUTCOME_WRONG_SUBJECT, codes.PermissionDenied, sdk.ErrWrongSubject},
}

// is returns the sentinels that err is.
func is(err error) (all []error) {
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			all = append(all, s.err)
		}
	}
	return all
}

func info(domain, reason string) *errdetails.ErrorInfo {
	return &errdetails.ErrorInfo{Domain: domain, Reason: reason, Metadata: map[string]string{"hold": "case-1"}}
}

func wire(t *testing.T, code codes.Code, details ...proto.Message) error {
	st := status.New(code, "message")
	for _, d := range details {
		var err error
		if st, err = st.WithDetails(protoadapt.MessageV1Of(d)); err != nil {
			t.Fatal(err)
		}
	}
	return st.Err()
}

// Each outcome is its own error and no other, for a call and inside a batch.
func TestOutcomes(t *testing.T) {
	for _, s := range sentinels {
		reason := strings.TrimPrefix(s.outcome.String(), "OUTCOME_")
		raw := wire(t, s.code, info("lethe", reason))
		err := sdk.FromRPC(t.Context(), raw)
		if got := is(err); len(got) != 1 || got[0] != s.err {
			t.Errorf("%v: is %v", s.outcome, got)
		}
		var e *sdk.Error
		if !errors.As(err, &e) || e.Outcome != s.outcome || e.Message != "message" || e.Metadata["hold"] != "case-1" {
			t.Errorf("%v: %+v", s.outcome, e)
		}
		if status.Code(err) != s.code {
			t.Errorf("%v: code %v", s.outcome, status.Code(err))
		}
		for _, err := range []error{err, raw, s.err, fmt.Errorf("wrapped: %w", err), fmt.Errorf("wrapped: %w", s.err)} {
			if got := sdk.OutcomeOf(err); got != s.outcome {
				t.Errorf("%v: OutcomeOf(%v) = %v", s.outcome, err, got)
			}
		}
	}
	// Every outcome of the protocol is covered.
	for n, name := range keydv1.Outcome_name {
		if n == 0 {
			continue
		}
		found := 0
		for _, s := range sentinels {
			if int32(s.outcome) == n {
				found++
			}
		}
		for _, err := range []error{sdk.ErrNotSealed, sdk.ErrCorrupt, sdk.ErrTruncated, sdk.ErrWrongContext, sdk.ErrUnsupportedVersion} {
			if int32(sdk.OutcomeOf(fmt.Errorf("wrapped: %w", err))) == n {
				found++
			}
		}
		if found != 1 {
			t.Errorf("%s has %d errors", name, found)
		}
	}
}

// A status that does not say so in keyd's own words is never an outcome that a
// caller may act on, and least of all erased.
func TestUnclassified(t *testing.T) {
	for name, err := range map[string]error{
		"no details":              wire(t, codes.FailedPrecondition),
		"not found by a proxy":    wire(t, codes.NotFound),
		"denied by a proxy":       wire(t, codes.PermissionDenied),
		"unimplemented":           wire(t, codes.Unimplemented),
		"internal":                wire(t, codes.Internal),
		"another domain":          wire(t, codes.FailedPrecondition, info("example.com", "ERASED")),
		"lower case":              wire(t, codes.FailedPrecondition, info("lethe", "erased")),
		"with prefix":             wire(t, codes.FailedPrecondition, info("lethe", "OUTCOME_ERASED")),
		"unknown reason":          wire(t, codes.FailedPrecondition, info("lethe", "VANISHED")),
		"unspecified":             wire(t, codes.FailedPrecondition, info("lethe", "UNSPECIFIED")),
		"a blob's outcome":        wire(t, codes.FailedPrecondition, info("lethe", "CORRUPT")),
		"code contradicts":        wire(t, codes.Internal, info("lethe", "ERASED")),
		"code is ok's neighbour":  wire(t, codes.NotFound, info("lethe", "ERASED")),
		"two reasons":             wire(t, codes.FailedPrecondition, info("lethe", "ERASED"), info("lethe", "EXPIRED")),
		"the same reason twice":   wire(t, codes.FailedPrecondition, info("lethe", "ERASED"), info("lethe", "ERASED")),
		"two, one of them absurd": wire(t, codes.FailedPrecondition, info("lethe", "ERASED"), info("lethe", "VANISHED")),
		"no gRPC at all":          errors.New("plain"),
	} {
		got := sdk.FromRPC(t.Context(), err)
		if all := is(got); len(all) != 0 {
			t.Errorf("%s: is %v", name, all)
		}
		if o := sdk.OutcomeOf(got); o != keydv1.Outcome_OUTCOME_UNSPECIFIED {
			t.Errorf("%s: outcome %v", name, o)
		}
		if got == nil || got.Error() == "" {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, code := range []codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.Canceled} {
		for _, err := range []error{wire(t, code), wire(t, code, info("lethe", "ERASED")), wire(t, code, info("lethe", "VANISHED"))} {
			got := sdk.FromRPC(context.Background(), err)
			if all := is(got); len(all) != 1 || all[0] != sdk.ErrUnavailable {
				t.Errorf("%v: is %v", code, all)
			}
			if errors.Is(got, context.Canceled) || errors.Is(got, context.DeadlineExceeded) {
				t.Errorf("%v: is an error of a context that never ended", code)
			}
		}
	}
	if err := sdk.FromRPC(t.Context(), nil); err != nil {
		t.Errorf("nil became %v", err)
	}
	if err := sdk.FromRPC(t.Context(), io.EOF); err != io.EOF {
		t.Errorf("io.EOF became %v", err)
	}
	if o := sdk.OutcomeOf(nil); o != keydv1.Outcome_OUTCOME_UNSPECIFIED {
		t.Errorf("nil has outcome %v", o)
	}
}

func FuzzStatus(f *testing.F) {
	for _, s := range sentinels {
		f.Add(uint32(s.code), "lethe", s.outcome.String()[8:])
	}
	f.Add(uint32(5), "", "ERASED")
	f.Fuzz(func(t *testing.T, code uint32, domain, reason string) {
		st, err := status.New(codes.Code(code), "m").WithDetails(&errdetails.ErrorInfo{Domain: domain, Reason: reason})
		if err != nil {
			return // the code OK, or not UTF-8
		}
		got := sdk.FromRPC(context.Background(), st.Err())
		said := domain == "lethe" && reason == "ERASED" && codes.Code(code) == codes.FailedPrecondition
		if errors.Is(got, sdk.ErrErased) != said {
			t.Fatalf("code %d, domain %q, reason %q: %v", code, domain, reason, got)
		}
	})
}

func TestContextErrors(t *testing.T) {
	c, f, _ := start(t)
	gate := make(chan struct{})
	defer close(gate)
	f.with(func() { f.answer = held(gate) })
	check := func(err error, want error) {
		t.Helper()
		if !errors.Is(err, want) || !errors.Is(err, sdk.ErrUnavailable) || errors.Is(err, sdk.ErrErased) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.Seal(ended, alice, nil)
	check(err, context.Canceled)
	if f.calls.Load() != 0 {
		t.Error("keyd was asked for a caller that is gone")
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = c.Seal(short, alice, nil)
	check(err, context.DeadlineExceeded)
	_, err = c.Describe(ended, "acme", "alice")
	check(err, context.Canceled)
	_, err = c.DestroyKey(ended, sdk.DestroyRequest{Tenant: "acme", Subject: "alice", RequestID: "r", Reason: "test"})
	check(err, context.Canceled)
	if _, err := sdk.Dial(ended, f.addr); !errors.Is(err, context.Canceled) {
		t.Errorf("Dial: %v", err)
	}
}

// Errors of calls through Conn are the same.
func TestConn(t *testing.T) {
	c, f, _ := start(t)
	erasure := keydv1.NewErasureServiceClient(c.Conn())
	_, err := erasure.DescribeSubject(t.Context(), &keydv1.DescribeSubjectRequest{Tenant: "acme", SubjectId: []byte("nobody")})
	if !errors.Is(err, sdk.ErrUnknown) {
		t.Errorf("unary: %v", err)
	}
	_, err = keydv1.NewAdminServiceClient(c.Conn()).GetStatus(t.Context(), &keydv1.GetStatusRequest{})
	if len(is(err)) != 0 || sdk.OutcomeOf(err) != keydv1.Outcome_OUTCOME_UNSPECIFIED || err == nil {
		t.Errorf("a service that is not there: %v", err)
	}
	s, err := keydv1.NewKeyServiceClient(c.Conn()).WatchRevocations(t.Context(), &keydv1.WatchRevocationsRequest{Tenants: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Header(); err != nil {
		t.Errorf("header: %v", err)
	}
	if _, err := s.Recv(); err != nil {
		t.Errorf("first message: %v", err)
	}
	f.cutStreams()
	if _, err := s.Recv(); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("stream: %v", err)
	}
}

// No error and no log record may hold a subject's id or a plaintext (G6).
func TestErrorsAndLogsNameNobody(t *testing.T) {
	const marker, secret = "zq9-SUBJECT", "zq9-PLAINTEXT"
	var log bytes.Buffer
	c, f, clock := start(t, sdk.WithLogger(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))))
	target := sdk.Target{Tenant: "acme", Subject: marker, Class: "trace"}
	blob := mustSeal(t, c, target, secret)
	mustOpen(t, c, target, blob, secret)
	mustOpen(t, c, target, blob, secret)
	eventually(t, "the stream is open", func() bool { return f.isWatching("acme") })
	var errs []error
	collect := func() {
		_, err := c.Seal(t.Context(), target, []byte(secret))
		errs = append(errs, err)
		_, err = c.Open(t.Context(), target, blob)
		errs = append(errs, err)
		bad := bytes.Clone(blob)
		bad[len(bad)-1] ^= 1
		_, err = c.Open(t.Context(), target, bad)
		errs = append(errs, err)
	}
	f.setDown(true)
	f.cutStreams()
	eventually(t, "the stream is down", func() bool { return !f.isWatching("acme") })
	pass(t, c, clock, 70*time.Second, time.Second)
	collect()
	f.setDown(false)
	for _, s := range sentinels {
		f.kill(marker, s.outcome, false)
		collect()
	}
	for _, subject := range []string{marker + "\x00", marker + "\xff", marker + strings.Repeat("x", 1024)} {
		_, err := c.Seal(t.Context(), sdk.Target{Tenant: "acme", Subject: subject, Class: "trace"}, []byte(secret))
		errs = append(errs, err)
		_, err = c.Seal(t.Context(), sdk.Target{Tenant: subject, Subject: "s", Class: "trace"}, []byte(secret))
		errs = append(errs, err)
		_, err = c.DestroyKey(t.Context(), sdk.DestroyRequest{Tenant: "acme", Subject: subject, RequestID: "r", Reason: "r"})
		errs = append(errs, err)
		_, err = c.Describe(t.Context(), "acme", subject)
		errs = append(errs, err)
	}
	c.Close()
	collect()
	failed := 0
	for _, err := range errs {
		if err != nil {
			failed++
			for e := err; e != nil; e = errors.Unwrap(e) {
				if s := fmt.Sprintf("%v %+v %#v", e, e, e); strings.Contains(s, marker) || strings.Contains(s, secret) {
					t.Errorf("an error says %s", s)
				}
			}
		}
	}
	if failed < 40 {
		t.Errorf("only %d errors were seen", failed)
	}
	if log.Len() == 0 {
		t.Error("nothing was logged")
	}
	if s := log.String(); strings.Contains(s, marker) || strings.Contains(s, secret) || strings.Contains(s, "acme") {
		t.Errorf("the log says %s", s)
	}
}

func TestIdentErrors(t *testing.T) {
	if o := sdk.OutcomeOf(ident.Subject("")); o != keydv1.Outcome_OUTCOME_INVALID_ARGUMENT {
		t.Errorf("%v", o)
	}
	_, err := envelope.NewContext(make([]envelope.Pair, 17)...)
	if o := sdk.OutcomeOf(err); o != keydv1.Outcome_OUTCOME_INVALID_ARGUMENT {
		t.Errorf("%v", o)
	}
}
