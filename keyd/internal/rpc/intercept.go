package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/policy"
	keydv1 "lethe/proto/keyd/v1"
)

// gate stands before every handler: it lets the policy decide, refuses while
// keyd must not serve, turns panics and errors into outcomes, and has the
// outcome audited.
type gate struct {
	keys   *keys.Keys
	policy *policy.Policy
	log    *slog.Logger
}

// tenantsOf returns the tenants that a request is about.
func tenantsOf(req any) []string {
	switch r := req.(type) {
	case *keydv1.GetBlobKeysRequest:
		var tenants []string
		for _, q := range r.Queries {
			if !slices.Contains(tenants, q.GetTenant()) {
				tenants = append(tenants, q.GetTenant())
			}
		}
		return tenants
	case *keydv1.WatchRevocationsRequest:
		return slices.Clone(r.Tenants)
	case interface{ GetTenant() string }:
		return []string{r.GetTenant()}
	}
	return nil
}

func (g *gate) begin(ctx context.Context, method string, req any) (*policy.Call, error) {
	tenants := tenantsOf(req)
	for i, t := range tenants {
		// What is not a tenant's name may be anything, a subject's id by
		// mistake, and has no place in an audit line.
		if !isTenant(t) {
			tenants[i] = "(invalid)"
		}
	}
	call, err := g.policy.Begin(ctx, method, tenants)
	if err != nil || strings.HasPrefix(method, anchorMethods) {
		// Other keyds' anchors are there whether or not this one's store may serve.
		return call, err
	}
	return call, g.keys.Serving()
}

func (g *gate) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (res any, err error) {
	call, err := g.begin(ctx, info.FullMethod, req)
	defer func() {
		if p := recover(); p != nil {
			err = g.panicked(info.FullMethod, p)
		}
		outcome := keydv1.Outcome_OUTCOME_UNSPECIFIED
		var queries map[keydv1.Outcome]int
		if err != nil {
			outcome = failure(err).Outcome
			res, err = nil, toStatus(err)
		} else if batch, ok := res.(*keydv1.GetBlobKeysResponse); ok {
			outcome, queries = batchOutcome(batch.Results)
		}
		call.End(outcome, queries)
	}()
	if err != nil {
		return nil, err
	}
	if batch, ok := req.(*keydv1.GetBlobKeysRequest); ok {
		ctx = withRefused(ctx, call, batch.Queries)
	} else if principal := call.Principal(); principal != "" {
		ctx = keys.WithPrincipal(ctx, principal)
	}
	res, err = handler(ctx, req)
	err = g.keys.Told(ctx, err)
	if strings.HasPrefix(info.FullMethod, healthMethods) && status.Code(err) == codes.NotFound {
		// As the health protocol has it for a service that there is not.
		err = &keys.Error{Outcome: keydv1.Outcome_OUTCOME_UNKNOWN, Message: "no such service"}
	}
	return res, err
}

type refusedKey struct{}

// withRefused tells GetBlobKeys which of its queries are not allowed, if any is
// not: one error a query.
func withRefused(ctx context.Context, call *policy.Call, queries []*keydv1.BlobKeyQuery) context.Context {
	var refused []error
	for i, q := range queries {
		if err := call.Query(q.GetTenant(), q.GetPurpose()); err != nil {
			if refused == nil {
				refused = make([]error, len(queries))
			}
			refused[i] = err
		}
	}
	if refused == nil {
		return ctx
	}
	return context.WithValue(ctx, refusedKey{}, refused)
}

// refusedOf is what withRefused told; nil if all queries are allowed.
func refusedOf(ctx context.Context) []error {
	refused, _ := ctx.Value(refusedKey{}).([]error)
	return refused
}

const healthMethods = "/grpc.health.v1.Health/"

// batchOutcome returns the outcome of all queries of an answered batch or, where
// they ended differently, how many ended how.
func batchOutcome(results []*keydv1.BlobKeyResult) (outcome keydv1.Outcome, queries map[keydv1.Outcome]int) {
	for i, r := range results {
		o := r.GetFailure().GetOutcome()
		switch {
		case i == 0:
			outcome = o
		case queries == nil && o != outcome:
			queries = map[keydv1.Outcome]int{outcome: i}
		}
		if queries != nil {
			queries[o]++
		}
	}
	return outcome, queries
}

// stream gates a streaming call at the message that opens it, where the
// tenants are known.
func (g *gate) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	gated := &gatedStream{ServerStream: ss, gate: g, method: info.FullMethod}
	defer func() {
		if p := recover(); p != nil {
			err = g.panicked(info.FullMethod, p)
		}
		outcome := keydv1.Outcome_OUTCOME_UNSPECIFIED
		if err != nil && ss.Context().Err() == nil {
			outcome = failure(err).Outcome
		}
		if err != nil {
			err = toStatus(err)
		}
		if gated.call != nil {
			gated.call.End(outcome, nil)
		}
	}()
	return handler(srv, gated)
}

type gatedStream struct {
	grpc.ServerStream
	gate   *gate
	method string
	call   *policy.Call
}

func (s *gatedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	call, err := s.gate.begin(s.Context(), s.method, m)
	s.call = call
	return err
}

// SendMsg sends nothing to a caller that has lost its right meanwhile.
func (s *gatedStream) SendMsg(m any) error {
	if s.call != nil {
		if err := s.call.Check(); err != nil {
			return err
		}
	}
	return s.ServerStream.SendMsg(m)
}

// panicked reports a bug. The value of a panic may hold anything, so only its
// type and the place are told.
func (g *gate) panicked(method string, p any) error {
	g.log.Error("panic in a call", "method", method, "type", fmt.Sprintf("%T", p), "stack", string(debug.Stack()))
	return fmt.Errorf("a fault inside keyd")
}
