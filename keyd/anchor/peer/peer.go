// Package peer is an anchor that another keyd keeps, in a directory of its own:
// in another failure domain where that keyd is on another machine.
//
// A keyd that serves development has no TLS, and its address must be one of this
// machine. Who can answer in that keyd's place can roll the anchor back, though
// not forge what is in it.
//
// The other keyd must serve before this one starts. Two that anchor at each
// other cannot both be started again after both have stopped.
package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"lethe/keyd/internal/ledger"
	keydv1 "lethe/proto/keyd/v1"
)

// Options of an anchor.
type Options struct {
	// Address is where the other keyd listens: unix:PATH or HOST:PORT, without
	// TLS a loopback one.
	Address string
	// TLS verifies the other keyd, and has the certificate to show to it, whose
	// principal needs the role anchor there. Nil: it serves development.
	TLS *tls.Config
	// Name is the anchor's among those that the other keyd keeps: 1 to 64 bytes
	// of [a-z0-9._-], the first of which is no dot.
	Name string
	// Timeout bounds a call, besides its context; zero is 30 s.
	Timeout time.Duration
}

// Anchor is a ledger.Anchor at another keyd.
type Anchor struct {
	o      Options
	conn   *grpc.ClientConn
	client keydv1.AnchorServiceClient

	mu     sync.Mutex
	closed bool
}

var _ ledger.Anchor = (*Anchor)(nil)

// retries are for calls that did not come through. All of the service's can be
// repeated.
const retries = `{"methodConfig": [{"name": [{"service": "keyd.v1.AnchorService"}], "retryPolicy": {
	"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 3,
	"retryableStatusCodes": ["UNAVAILABLE"]}}]}`

// Open returns an anchor. It does not call the other keyd.
func Open(o Options) (*Anchor, error) {
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	target, err := target(o.Address, o.TLS != nil)
	if err != nil {
		return nil, err
	}
	if o.Name == "" {
		return nil, errors.New("no name of the anchor is given")
	}
	creds := insecure.NewCredentials()
	if o.TLS != nil {
		creds = credentials.NewTLS(o.TLS)
	}
	conn, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(),
		grpc.WithDefaultServiceConfig(retries),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(ledger.MaxObject+1<<10)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
	)
	if err != nil {
		return nil, err
	}
	return &Anchor{o: o, conn: conn, client: keydv1.NewAnchorServiceClient(conn)}, nil
}

func target(address string, secured bool) (string, error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		if path = strings.TrimPrefix(path, "//"); path == "" {
			return "", errors.New("no socket's path is given")
		}
		return "unix:" + path, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil || port == "" {
		return "", errors.New("the other keyd's address is unix:PATH or HOST:PORT")
	}
	if ip, err := netip.ParseAddr(host); !secured && host != "localhost" && (err != nil || !ip.IsLoopback()) {
		return "", errors.New("without TLS the other keyd's address must be one of this machine's")
	}
	return "passthrough:///" + address, nil
}

// Domain implements ledger.Anchor.
func (a *Anchor) Domain() (code, description string) {
	return "keyd", "keyd at " + a.o.Address + ", name " + a.o.Name
}

// Close implements ledger.Anchor.
func (a *Anchor) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	a.closed = true
	return a.conn.Close()
}

// Newest implements ledger.Anchor.
func (a *Anchor) Newest(ctx context.Context) (ledger.Object, error) {
	var b []byte
	err := a.call(ctx, func(ctx context.Context) error {
		res, err := a.client.GetNewest(ctx, &keydv1.GetNewestRequest{Name: a.o.Name})
		b = res.GetObject()
		return err
	})
	if err != nil {
		return ledger.Object{}, err
	}
	return ledger.DecodeObject(b)
}

// Get implements ledger.Anchor.
func (a *Anchor) Get(ctx context.Context, size uint64) (ledger.Object, error) {
	var b []byte
	err := a.call(ctx, func(ctx context.Context) error {
		res, err := a.client.GetNext(ctx, &keydv1.GetNextRequest{Name: a.o.Name, Size: size})
		b = res.GetObject()
		return err
	})
	if err != nil {
		return ledger.Object{}, err
	}
	o, err := ledger.DecodeObject(b)
	if err == nil && o.Size <= size {
		return ledger.Object{}, fmt.Errorf("%w: object of size %d where a greater one was asked for", ledger.ErrAnchorDamaged, o.Size)
	}
	return o, err
}

// Put implements ledger.Anchor.
func (a *Anchor) Put(ctx context.Context, o ledger.Object) error {
	b, err := o.Encode()
	if err != nil {
		return err
	}
	return a.call(ctx, func(ctx context.Context) error {
		_, err := a.client.PutObject(ctx, &keydv1.PutObjectRequest{Name: a.o.Name, Object: b})
		return err
	})
}

// Enter implements ledger.Anchor.
func (a *Anchor) Enter(ctx context.Context, t ledger.Term) (ledger.Term, error) {
	var res *keydv1.EnterTermResponse
	err := a.call(ctx, func(ctx context.Context) (err error) {
		res, err = a.client.EnterTerm(ctx, &keydv1.EnterTermRequest{Name: a.o.Name, Number: t.Number, Holder: t.Holder})
		return err
	})
	if errors.Is(err, ledger.ErrNoObject) {
		return ledger.Term{}, nil
	}
	return ledger.Term{Number: res.GetNumber(), Holder: res.GetHolder()}, err
}

// call runs fn in time, and turns its status into an anchor's error.
func (a *Anchor) call(ctx context.Context, fn func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	timed, cancel := context.WithTimeout(ctx, a.o.Timeout)
	defer cancel()
	err := fn(timed)
	if err == nil {
		return nil
	}
	// Only what the other keyd itself says of the anchor tells anything of it:
	// least of all does another one's NOT_FOUND say that it is empty.
	s := status.Convert(err)
	for _, d := range s.Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		if !ok || info.Domain != "lethe" {
			continue
		}
		switch info.Metadata["anchor"] {
		case "none":
			return ledger.ErrNoObject
		case "forked":
			return fmt.Errorf("%w: the other keyd: %s", ledger.ErrForked, s.Message())
		case "damaged":
			return fmt.Errorf("%w: the other keyd: %s", ledger.ErrAnchorDamaged, s.Message())
		}
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ledger.ErrAnchorUnavailable, ctx.Err())
	}
	return fmt.Errorf("%w: the other keyd: %w", ledger.ErrAnchorUnavailable, err)
}
