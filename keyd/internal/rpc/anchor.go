package rpc

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/tap"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/internal/policy"
	keydv1 "lethe/proto/keyd/v1"
)

// Anchors are the anchors of other keyds, kept by this one.
type Anchors interface {
	// Anchor returns the anchor of that name, which Check accepted; the caller
	// does not close it. Its error is ledger.ErrNoObject where there is none
	// yet, unless create makes it.
	Anchor(name string, create bool) (ledger.Anchor, error)
	// Check says why a name cannot be one, or returns nil.
	Check(name string) error
}

// anchorMethods begins the names of AnchorService's methods.
const anchorMethods = "/keyd.v1.AnchorService/"

// AnchorOptions let requests be as large as an anchor's objects. A call
// that the policy denies whatever it says is refused before its message is read.
func AnchorOptions(p *policy.Policy) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(ledger.MaxObject + 1<<10),
		grpc.InTapHandle(func(ctx context.Context, call *tap.Info) (context.Context, error) {
			if err := p.Screen(ctx, call.FullMethodName); err != nil {
				return ctx, toStatus(err)
			}
			return ctx, nil
		}),
	}
}

// RegisterAnchors registers AnchorService.
func RegisterAnchors(s grpc.ServiceRegistrar, a Anchors) {
	keydv1.RegisterAnchorServiceServer(s, &anchorService{anchors: a})
}

type anchorService struct {
	keydv1.UnimplementedAnchorServiceServer
	anchors Anchors
}

func (s *anchorService) GetNewest(ctx context.Context, req *keydv1.GetNewestRequest) (*keydv1.GetNewestResponse, error) {
	b, err := s.read(req.Name, func(a ledger.Anchor) (ledger.Object, error) { return a.Newest(ctx) })
	if err != nil {
		return nil, err
	}
	return &keydv1.GetNewestResponse{Object: b}, nil
}

func (s *anchorService) GetNext(ctx context.Context, req *keydv1.GetNextRequest) (*keydv1.GetNextResponse, error) {
	b, err := s.read(req.Name, func(a ledger.Anchor) (ledger.Object, error) { return a.Get(ctx, req.Size) })
	if err != nil {
		return nil, err
	}
	return &keydv1.GetNextResponse{Object: b}, nil
}

func (s *anchorService) read(name string, get func(ledger.Anchor) (ledger.Object, error)) ([]byte, error) {
	a, err := s.open(name, false)
	if err != nil {
		return nil, err
	}
	o, err := get(a)
	if err != nil {
		return nil, anchorFailure(err)
	}
	b, err := o.Encode()
	if err != nil {
		return nil, anchorFailure(err)
	}
	return b, nil
}

func (s *anchorService) PutObject(ctx context.Context, req *keydv1.PutObjectRequest) (*keydv1.PutObjectResponse, error) {
	o, err := ledger.DecodeObject(req.Object)
	if err != nil {
		return nil, invalidField("object", err)
	}
	a, err := s.open(req.Name, true)
	if err != nil {
		return nil, err
	}
	if err := a.Put(ctx, o); err != nil {
		return nil, anchorFailure(err)
	}
	return &keydv1.PutObjectResponse{}, nil
}

func (s *anchorService) EnterTerm(ctx context.Context, req *keydv1.EnterTermRequest) (*keydv1.EnterTermResponse, error) {
	t := ledger.Term{Number: req.Number, Holder: req.Holder}
	if err := t.Check(); err != nil {
		return nil, invalidField("holder", err)
	}
	a, err := s.open(req.Name, t.Number > 0)
	if err != nil {
		return nil, err
	}
	if t, err = a.Enter(ctx, t); err != nil {
		return nil, anchorFailure(err)
	}
	return &keydv1.EnterTermResponse{Number: t.Number, Holder: t.Holder}, nil
}

func (s *anchorService) open(name string, create bool) (ledger.Anchor, error) {
	if err := s.anchors.Check(name); err != nil {
		return nil, invalidField("name", err)
	}
	a, err := s.anchors.Anchor(name, create)
	if err != nil {
		return nil, anchorFailure(err)
	}
	return a, nil
}

func invalidField(field string, err error) error {
	return &keys.Error{
		Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: field + ": " + err.Error(),
		Metadata: map[string]string{"field": field},
	}
}

// anchorFailure is how an anchor's error looks on the wire, and is told apart
// by the one who asked: see AnchorService.
func anchorFailure(err error) error {
	outcome, what := keydv1.Outcome_OUTCOME_CONFLICT, ""
	switch {
	case errors.Is(err, ledger.ErrNoObject):
		outcome, what = keydv1.Outcome_OUTCOME_UNKNOWN, "none"
	case errors.Is(err, ledger.ErrForked):
		what = "forked"
	case errors.Is(err, ledger.ErrAnchorDamaged):
		what = "damaged"
	default:
		return err
	}
	return &keys.Error{Outcome: outcome, Message: err.Error(), Metadata: map[string]string{"anchor": what}}
}
