package sdk

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// conn turns the errors of a connection into *Error.
type conn struct{ cc grpc.ClientConnInterface }

func (c conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return fromRPC(ctx, c.cc.Invoke(ctx, method, args, reply, opts...))
}

func (c conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := c.cc.NewStream(ctx, desc, method, opts...)
	if err != nil {
		return nil, fromRPC(ctx, err)
	}
	return stream{s}, nil
}

type stream struct{ grpc.ClientStream }

func (s stream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	return md, fromRPC(s.Context(), err)
}

func (s stream) CloseSend() error { return fromRPC(s.Context(), s.ClientStream.CloseSend()) }

func (s stream) SendMsg(m any) error { return fromRPC(s.Context(), s.ClientStream.SendMsg(m)) }

func (s stream) RecvMsg(m any) error { return fromRPC(s.Context(), s.ClientStream.RecvMsg(m)) }
