package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/emptypb"
)

// The limit of a call: an empty message for an empty message, on gRPC's
// defaults, in a process of its own, through a Unix socket as keyd's.
const emptyMethod = "/lethe.bench.Empty/Call"

var emptyService = grpc.ServiceDesc{
	ServiceName: "lethe.bench.Empty",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{
		MethodName: "Call",
		Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			return new(emptypb.Empty), decode(new(emptypb.Empty))
		},
	}},
}

// serveEmpty serves it on the socket that args name.
func serveEmpty(args []string) error {
	lis, err := net.Listen("unix", args[0])
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	s.RegisterService(&emptyService, nil)
	healthpb.RegisterHealthServer(s, health.NewServer())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, s.Stop)
	return s.Serve(lis)
}

func (b *bench) startEmpty() (*daemon, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(b.dir, "empty.sock")
	os.Remove(socket)
	return startDaemon(exec.Command(self, "serve-empty", socket), socket)
}

func callEmpty(ctx context.Context, conn grpc.ClientConnInterface) error {
	return conn.Invoke(ctx, emptyMethod, new(emptypb.Empty), new(emptypb.Empty))
}
