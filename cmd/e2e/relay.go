package main

import (
	"context"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	keydv1 "lethe/proto/keyd/v1"
)

// relay stands between a client and keyd. It passes on calls for keys, and
// what keyd pushes until that is cut: then the stream stays up, and silent
// but for its signs of life, as behind a faulty middlebox.
type relay struct {
	keydv1.UnimplementedKeyServiceServer
	upstream *grpc.ClientConn
	keys     keydv1.KeyServiceClient
	server   *grpc.Server
	socket   string

	cut       atomic.Bool
	swallowed atomic.Int64 // revocations that did not reach the client
	passed    atomic.Int64 // those that did

	// pushFirst has the client that asks for a key learn of a refusal only after
	// a revocation has passed.
	pushFirst atomic.Bool
	pushed    chan struct{} // closed once one has
	once      sync.Once
}

// startRelay listens on the Unix socket and relays to target.
func startRelay(socket, target string) (*relay, error) {
	upstream, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	lis, err := net.Listen("unix", socket)
	if err != nil {
		upstream.Close()
		return nil, err
	}
	r := &relay{
		upstream: upstream, keys: keydv1.NewKeyServiceClient(upstream),
		server: grpc.NewServer(), socket: socket, pushed: make(chan struct{}),
	}
	keydv1.RegisterKeyServiceServer(r.server, r)
	go r.server.Serve(lis)
	return r, nil
}

// awaitSwallowed waits until revocations have come that did not reach the client,
// who may have been refused a key before, and reports whether any have.
func (r *relay) awaitSwallowed() bool {
	for give := time.Now().Add(15 * time.Second); r.swallowed.Load() == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(give) {
			return false
		}
	}
	return true
}

func (r *relay) target() string { return "unix://" + r.socket }

func (r *relay) close() {
	r.server.Stop()
	r.upstream.Close()
}

func (r *relay) GetBlobKeys(ctx context.Context, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	res, err := r.keys.GetBlobKeys(ctx, req)
	refused := slices.ContainsFunc(res.GetResults(), func(k *keydv1.BlobKeyResult) bool { return k.GetFailure() != nil })
	if refused && r.pushFirst.Load() {
		select {
		case <-r.pushed:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	return res, err
}

func (r *relay) WatchRevocations(req *keydv1.WatchRevocationsRequest, down grpc.ServerStreamingServer[keydv1.WatchRevocationsResponse]) error {
	up, err := r.keys.WatchRevocations(down.Context(), req)
	if err != nil {
		return err
	}
	cursor := req.Cursor
	for {
		m, err := up.Recv()
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if r.cut.Load() {
			r.swallowed.Add(int64(len(m.Revocations)))
			m = &keydv1.WatchRevocationsResponse{Cursor: cursor, Time: m.Time}
		}
		cursor = m.Cursor
		r.passed.Add(int64(len(m.Revocations)))
		if err := down.Send(m); err != nil {
			return err
		}
		if len(m.Revocations) != 0 {
			r.once.Do(func() { close(r.pushed) })
		}
	}
}
