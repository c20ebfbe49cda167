// Package rpc serves the gRPC services of keyd.v1. Handlers only translate;
// who may call is package policy's, what a call does is package keys'.
package rpc

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/policy"
	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
)

// MaxMessage is the size in bytes of the largest request that is read.
const MaxMessage = 1 << 20

// streamWorkers is how many goroutines are kept for calls; more calls than
// these at a time get one of their own each.
const streamWorkers = 64

// Options are the server options that put the gate before every handler.
func Options(k *keys.Keys, p *policy.Policy, log *slog.Logger) []grpc.ServerOption {
	g := &gate{keys: k, policy: p, log: log}
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(g.unary),
		grpc.StreamInterceptor(g.stream),
		grpc.MaxRecvMsgSize(MaxMessage),
		// A call on a goroutine that served others finds a stack that has grown.
		grpc.NumStreamWorkers(streamWorkers),
		// Clients look every 20 s whether a quiet connection lives.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	}
}

// Info is what keyd says of itself.
type Info struct {
	Version     string
	Development bool
	// Components are those of which keys does not know.
	Components []func() *keydv1.ComponentStatus
	// Heartbeat is how often a revocation stream shows that it lives.
	Heartbeat time.Duration
}

// Register registers all services. done ends the streams.
func Register(s grpc.ServiceRegistrar, k *keys.Keys, info Info, done <-chan struct{}) {
	keydv1.RegisterKeyServiceServer(s, &keyService{keys: k, heartbeat: info.Heartbeat, done: done})
	keydv1.RegisterErasureServiceServer(s, &erasureService{keys: k})
	keydv1.RegisterHoldServiceServer(s, &holdService{keys: k})
	keydv1.RegisterLedgerServiceServer(s, &ledgerService{keys: k})
	keydv1.RegisterAdminServiceServer(s, &adminService{keys: k, info: info})
}

func isTenant(s string) bool { return ident.Tenant(s) == nil }

type keyService struct {
	keydv1.UnimplementedKeyServiceServer
	keys      *keys.Keys
	heartbeat time.Duration
	done      <-chan struct{}
}

func (s *keyService) GetBlobKeys(ctx context.Context, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	refused := refusedOf(ctx)
	results, err := s.keys.BlobKeysAmong(ctx, req.Queries, req.Recipients, refused)
	if err != nil {
		return nil, err
	}
	res := &keydv1.GetBlobKeysResponse{Results: make([]*keydv1.BlobKeyResult, len(results))}
	named := 0
	for i, r := range results {
		res.Results[i] = &keydv1.BlobKeyResult{KeyId: r.Recipient}
		if r.Recipient != nil || len(req.Queries[i].KeyId) != 0 && knows(r.Err) {
			named++
		}
		if r.Err != nil {
			res.Results[i].Result = &keydv1.BlobKeyResult_Failure{Failure: failure(r.Err)}
			continue
		}
		res.Results[i].Result = &keydv1.BlobKeyResult_Key{Key: r.Key}
	}
	if len(req.Recipients) != 0 && named == len(results) && refused == nil {
		if res.Recipients, err = s.keys.Recipients(ctx, req.Queries[0].GetTenant(), req.Recipients); err != nil {
			return nil, err
		}
	}
	return res, nil
}

// knows says whether the answer to a query with a key id shows that the caller
// named its subject.
func knows(err error) bool {
	if err == nil {
		return true
	}
	switch failure(err).Outcome {
	case keydv1.Outcome_OUTCOME_ERASED, keydv1.Outcome_OUTCOME_PENDING_ERASURE, keydv1.Outcome_OUTCOME_EXPIRED:
		return true
	}
	return false
}

func (s *keyService) WatchRevocations(req *keydv1.WatchRevocationsRequest, stream grpc.ServerStreamingServer[keydv1.WatchRevocationsResponse]) error {
	if n := len(req.Tenants); n == 0 || n > 256 {
		return &keys.Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: "tenants: 1 to 256"}
	}
	for _, t := range req.Tenants {
		if err := ident.Tenant(t); err != nil {
			return &keys.Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: err.Error()}
		}
	}
	ctx := stream.Context()
	cursor := req.Cursor
	beat := time.NewTicker(s.heartbeat)
	defer beat.Stop()
	first := true
	for {
		changed := s.keys.Changed()
		revoked, next, reset, more, err := s.keys.Revocations(ctx, req.Tenants, cursor)
		if err != nil {
			return err
		}
		// The first message always goes out: it says where the stream begins.
		if first || reset || len(revoked) != 0 || next != cursor {
			err := stream.Send(&keydv1.WatchRevocationsResponse{
				Cursor: next, Revocations: revoked, Reset_: reset, Time: timestamppb.Now(),
			})
			if err != nil {
				return err
			}
		}
		first, cursor = false, next
		if more {
			continue
		}
		select {
		case <-changed:
		case <-beat.C:
			if err := stream.Send(&keydv1.WatchRevocationsResponse{Cursor: cursor, Time: timestamppb.Now()}); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-s.done:
			return errors.New("keyd is shutting down")
		}
	}
}

type erasureService struct {
	keydv1.UnimplementedErasureServiceServer
	keys *keys.Keys
}

func (s *erasureService) DestroyKey(ctx context.Context, req *keydv1.DestroyKeyRequest) (*keydv1.DestroyKeyResponse, error) {
	rec, err := s.keys.DestroyKey(ctx, req)
	if err != nil {
		return nil, err
	}
	res := &keydv1.DestroyKeyResponse{
		Receipt: rec.Receipt, LedgerIndex: rec.Index, AlreadyDestroyed: rec.Repeated,
		DrainedBy: timestamppb.New(rec.DrainedBy), LivingGeneration: rec.Living,
	}
	if !rec.Due.IsZero() {
		res.Due = timestamppb.New(rec.Due)
	}
	return res, nil
}

func (s *erasureService) CancelDestruction(ctx context.Context, req *keydv1.CancelDestructionRequest) (*keydv1.CancelDestructionResponse, error) {
	rec, err := s.keys.CancelDestruction(ctx, req)
	if err != nil {
		return nil, err
	}
	return &keydv1.CancelDestructionResponse{Receipt: rec.Receipt, LedgerIndex: rec.Index, Repeat: rec.Again, State: rec.State}, nil
}

func (s *erasureService) DestroyTenant(ctx context.Context, req *keydv1.DestroyTenantRequest) (*keydv1.DestroyTenantResponse, error) {
	rec, err := s.keys.DestroyTenant(ctx, req)
	if err != nil {
		return nil, err
	}
	return &keydv1.DestroyTenantResponse{
		Receipt: rec.Receipt, LedgerIndex: rec.Index, AlreadyDestroyed: rec.Repeated,
		DrainedBy: timestamppb.New(rec.DrainedBy),
	}, nil
}

func (s *erasureService) Reinstate(ctx context.Context, req *keydv1.ReinstateRequest) (*keydv1.ReinstateResponse, error) {
	rec, err := s.keys.Reinstate(ctx, req)
	if err != nil {
		return nil, err
	}
	return &keydv1.ReinstateResponse{
		Receipt: rec.Receipt, LedgerIndex: rec.Index, Generation: rec.Generation,
		Repeat: rec.Again, State: rec.State, LivingGeneration: rec.Living,
	}, nil
}

func (s *erasureService) DescribeSubject(ctx context.Context, req *keydv1.DescribeSubjectRequest) (*keydv1.DescribeSubjectResponse, error) {
	return s.keys.DescribeSubject(ctx, req.Tenant, req.SubjectId)
}

type holdService struct {
	keydv1.UnimplementedHoldServiceServer
	keys *keys.Keys
}

func (s *holdService) PlaceHold(ctx context.Context, req *keydv1.PlaceHoldRequest) (*keydv1.PlaceHoldResponse, error) {
	rec, err := s.keys.PlaceHold(ctx, req)
	if err != nil {
		return nil, err
	}
	return &keydv1.PlaceHoldResponse{Receipt: rec.Receipt, LedgerIndex: rec.Index, Repeat: rec.Again, Binds: rec.Binds}, nil
}

func (s *holdService) ReleaseHold(ctx context.Context, req *keydv1.ReleaseHoldRequest) (*keydv1.ReleaseHoldResponse, error) {
	rec, err := s.keys.ReleaseHold(ctx, req)
	if err != nil {
		return nil, err
	}
	return &keydv1.ReleaseHoldResponse{Receipt: rec.Receipt, LedgerIndex: rec.Index, Repeat: rec.Again, Binds: rec.Binds}, nil
}

func (s *holdService) ListHolds(ctx context.Context, req *keydv1.ListHoldsRequest) (*keydv1.ListHoldsResponse, error) {
	holds, err := s.keys.Holds(ctx, req.Tenant, req.SubjectId)
	if err != nil {
		return nil, err
	}
	res := new(keydv1.ListHoldsResponse)
	for _, h := range holds {
		out := &keydv1.Hold{
			HoldId: h.Id, Reason: h.Reason, LedgerIndex: h.LedgerIndex, Principal: h.Principal,
			Placed: timestamppb.New(time.UnixMilli(h.PlacedMs)),
		}
		if h.EndMs != 0 {
			out.End = timestamppb.New(time.UnixMilli(h.EndMs))
		}
		res.Holds = append(res.Holds, out)
	}
	return res, nil
}

type ledgerService struct {
	keydv1.UnimplementedLedgerServiceServer
	keys *keys.Keys
}

func (s *ledgerService) GetLedgerKey(context.Context, *keydv1.GetLedgerKeyRequest) (*keydv1.GetLedgerKeyResponse, error) {
	return &keydv1.GetLedgerKeyResponse{VerifierKeys: s.keys.VerifierKeys()}, nil
}

func (s *ledgerService) GetCheckpoint(ctx context.Context, _ *keydv1.GetCheckpointRequest) (*keydv1.GetCheckpointResponse, error) {
	c, err := s.keys.Checkpoint(ctx)
	if err != nil {
		return nil, err
	}
	return &keydv1.GetCheckpointResponse{Checkpoint: c}, nil
}

func (s *ledgerService) GetConsistencyProof(ctx context.Context, req *keydv1.GetConsistencyProofRequest) (*keydv1.GetConsistencyProofResponse, error) {
	hashes, err := s.keys.Consistency(ctx, req.OldSize, req.NewSize)
	if err != nil {
		return nil, err
	}
	return &keydv1.GetConsistencyProofResponse{Hashes: hashes}, nil
}

func (s *ledgerService) GetReceipt(ctx context.Context, req *keydv1.GetReceiptRequest) (*keydv1.GetReceiptResponse, error) {
	rec, err := s.keys.GetReceipt(ctx, req)
	if err != nil {
		return nil, err
	}
	return &keydv1.GetReceiptResponse{Receipt: rec.Receipt, LedgerIndex: rec.Index}, nil
}

// pageSize applies the default and the bound of a list.
func pageSize(n uint32) int {
	if n == 0 {
		return 100
	}
	return int(min(n, 1000))
}

func (s *ledgerService) ListReceipts(ctx context.Context, req *keydv1.ListReceiptsRequest) (*keydv1.ListReceiptsResponse, error) {
	var from uint64
	if req.PageToken != "" {
		n, err := strconv.ParseUint(req.PageToken, 10, 64)
		if err != nil {
			return nil, &keys.Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: "page_token: not one of ours"}
		}
		from = n
	}
	entries, next, err := s.keys.ListReceipts(ctx, req.Tenant, req.SubjectId, from, pageSize(req.PageSize))
	if err != nil {
		return nil, err
	}
	res := &keydv1.ListReceiptsResponse{Entries: entries}
	if next != 0 {
		res.NextPageToken = strconv.FormatUint(next, 10)
	}
	return res, nil
}

type adminService struct {
	keydv1.UnimplementedAdminServiceServer
	keys *keys.Keys
	info Info
}

func (s *adminService) CreateTenant(ctx context.Context, req *keydv1.CreateTenantRequest) (*keydv1.CreateTenantResponse, error) {
	classes, err := s.keys.RequestTenant(ctx, req.Tenant, req.Classes, req.RequestId)
	if err != nil {
		return nil, err
	}
	return &keydv1.CreateTenantResponse{Classes: classes}, nil
}

func (s *adminService) ListTenants(ctx context.Context, req *keydv1.ListTenantsRequest) (*keydv1.ListTenantsResponse, error) {
	size := pageSize(req.PageSize)
	names, err := s.keys.Tenants(ctx, req.PageToken, size)
	if err != nil {
		return nil, err
	}
	res := &keydv1.ListTenantsResponse{Tenants: names}
	if len(names) == size {
		res.NextPageToken = names[len(names)-1]
	}
	return res, nil
}

func (s *adminService) PutClass(ctx context.Context, req *keydv1.PutClassRequest) (*keydv1.PutClassResponse, error) {
	c, err := s.keys.PutClass(ctx, req.Tenant, req.Class)
	if err != nil {
		return nil, err
	}
	return &keydv1.PutClassResponse{Class: c}, nil
}

func (s *adminService) ListClasses(ctx context.Context, req *keydv1.ListClassesRequest) (*keydv1.ListClassesResponse, error) {
	classes, err := s.keys.Classes(ctx, req.Tenant)
	if err != nil {
		return nil, err
	}
	return &keydv1.ListClassesResponse{Classes: classes}, nil
}

func (s *adminService) GetEpochs(ctx context.Context, _ *keydv1.GetEpochsRequest) (*keydv1.GetEpochsResponse, error) {
	epochs, problem, err := s.keys.Epochs(ctx)
	if err != nil {
		return nil, err
	}
	return &keydv1.GetEpochsResponse{Epochs: epochs, Problem: problem}, nil
}

func (s *adminService) TurnEpoch(ctx context.Context, req *keydv1.TurnEpochRequest) (*keydv1.TurnEpochResponse, error) {
	number, err := s.keys.TurnEpoch(ctx, req.Epoch)
	if err != nil {
		return nil, err
	}
	return &keydv1.TurnEpochResponse{Epoch: number}, nil
}

func (s *adminService) CancelRetirement(ctx context.Context, req *keydv1.CancelRetirementRequest) (*keydv1.CancelRetirementResponse, error) {
	if err := s.keys.CancelRetirement(ctx, req.Epoch); err != nil {
		return nil, err
	}
	return &keydv1.CancelRetirementResponse{}, nil
}

func (s *adminService) ResumeRetirement(ctx context.Context, req *keydv1.ResumeRetirementRequest) (*keydv1.ResumeRetirementResponse, error) {
	if err := s.keys.ResumeRetirement(ctx, req.Epoch); err != nil {
		return nil, err
	}
	return &keydv1.ResumeRetirementResponse{}, nil
}

func (s *adminService) ConfirmClock(ctx context.Context, _ *keydv1.ConfirmClockRequest) (*keydv1.ConfirmClockResponse, error) {
	now, err := s.keys.ConfirmClock(ctx)
	if err != nil {
		return nil, err
	}
	return &keydv1.ConfirmClockResponse{Time: timestamppb.New(now)}, nil
}

func (s *adminService) GetStatus(ctx context.Context, _ *keydv1.GetStatusRequest) (*keydv1.GetStatusResponse, error) {
	res := s.keys.Status(ctx)
	res.Version, res.Development = s.info.Version, s.info.Development
	for _, status := range s.info.Components {
		res.Components = append(res.Components, status())
	}
	return res, nil
}
