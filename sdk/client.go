package sdk

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	keydv1 "lethe/proto/keyd/v1"
)

// Client seals and opens with keys that it leases from keyd. It is safe for
// concurrent use. Close it when it is no longer needed.
type Client struct {
	cc      *grpc.ClientConn
	conn    conn
	keys    keydv1.KeyServiceClient
	erasure keydv1.ErasureServiceClient
	clock   Clock
	log     *slog.Logger
	watches bool

	// table is registry.table, for those who only look.
	table *table

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wake   chan struct{} // the keeper's

	mu       sync.Mutex
	closed   bool
	work     sync.WaitGroup // goroutines; added to only while not closed
	registry *registry
	dead     *deadSet
	flights  map[leaseKey]*flight
	watched  map[string]watched // by tenant
	watchers []*watcher
	nextLook time.Duration // boot time at which the keeper looks next; never: not at all
}

// Option sets up a Client.
type Option func(*options)

type options struct {
	tls         *tls.Config
	clock       Clock
	log         *slog.Logger
	entries     int
	bytes       int64
	revocations bool
	dial        []grpc.DialOption
}

// Limits of the cache unless WithCacheLimits says otherwise.
const (
	DefaultCacheEntries = 10_000
	DefaultCacheBytes   = 128 << 20
)

// WithTLS connects by TLS with this configuration, which usually holds the
// client's certificate. One that is replaced while the client lives is best given
// by its GetClientCertificate, which is asked for every new connection: keyd has
// clients make one every few minutes. Without WithTLS only a Unix socket or a
// loopback address can be dialled.
func WithTLS(config *tls.Config) Option {
	return func(o *options) { o.tls = config.Clone() }
}

// WithClock takes the time from clock instead of SystemClock.
func WithClock(clock Clock) Option {
	return func(o *options) { o.clock = clock }
}

// WithLogger logs what no call returns: that the revocation stream broke, or
// that a renewal failed. Without it nothing is logged. No record holds an id.
func WithLogger(log *slog.Logger) Option {
	return func(o *options) { o.log = log }
}

// WithCacheLimits bounds the keys that are kept, by count and by estimated
// memory; one key is kept whatever the limits. A key with all that is derived
// from it is counted as 4 KiB where it seals and 16 KiB where it opens.
func WithCacheLimits(entries int, bytes int64) Option {
	return func(o *options) { o.entries, o.bytes = entries, bytes }
}

// WithRevocations says whether to listen to revocations, as is the default.
// Without them a key that was destroyed stays in use until its lease is over.
func WithRevocations(on bool) Option {
	return func(o *options) { o.revocations = on }
}

// WithDialOptions adds options of gRPC's own, such as a dialer or a statistics
// handler.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, opts...) }
}

// Dial makes a client of the keyd at target: "unix:///run/keyd.sock",
// "dns:///host:port" or "host:port". Anything but a Unix socket or a loopback
// address needs WithTLS. Dial does not wait for the connection: while keyd is
// away, calls fail with ErrUnavailable. It fails with ErrInvalidArgument, or
// because ctx has ended.
func Dial(ctx context.Context, target string, opts ...Option) (*Client, error) {
	if ctx.Err() != nil {
		return nil, gaveUp(ctx)
	}
	o := options{
		clock:       SystemClock(),
		log:         slog.New(slog.DiscardHandler),
		entries:     DefaultCacheEntries,
		bytes:       DefaultCacheBytes,
		revocations: true,
	}
	for _, opt := range opts {
		opt(&o)
	}
	if o.entries < 1 || o.bytes < 1 {
		return nil, invalid("cache_limits", "the limits of the cache must be positive")
	}
	var creds credentials.TransportCredentials
	switch {
	case o.tls != nil:
		creds = credentials.NewTLS(o.tls)
	case isLocal(target):
		creds = insecure.NewCredentials()
	default:
		return nil, invalid("target", "only a Unix socket or a loopback address can be dialled without TLS")
	}
	cc, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		// Finds a peer that is gone without a word. The heartbeats of the
		// revocation stream keep a healthy connection from being asked.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDisableServiceConfig(),
	}, o.dial...)...)
	if err != nil {
		return nil, &Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: err.Error(), Metadata: map[string]string{"field": "target"}, cause: err}
	}
	return newClient(cc, &o), nil
}

func newClient(cc *grpc.ClientConn, o *options) *Client {
	c := &Client{
		cc:       cc,
		conn:     conn{cc},
		clock:    o.clock,
		log:      o.log,
		watches:  o.revocations,
		wake:     make(chan struct{}, 1),
		registry: newRegistry(o.entries, o.bytes),
		dead:     newDeadSet(8192),
		flights:  make(map[leaseKey]*flight),
		watched:  make(map[string]watched),
		nextLook: never,
	}
	c.keys = keydv1.NewKeyServiceClient(c.conn)
	c.erasure = keydv1.NewErasureServiceClient(c.conn)
	c.table = c.registry.table
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.work.Go(c.keep)
	return c
}

// isLocal reports whether target cannot leave the machine.
func isLocal(target string) bool {
	if strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "unix-abstract:") {
		return true
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(target, "dns:///"))
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Conn is the connection to keyd, for calls of its other services. Its errors
// are *Error. It is closed by Close.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn }

// Close stops all background work, wipes every key, and closes the connection.
// Operations and streams under way fail with ErrClosed. Closing again waits
// for the first Close, and does nothing.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.work.Wait()
		return nil
	}
	c.closed = true
	c.cancel()
	c.registry.each(func(l *lease) { c.registry.drop(l, ErrClosed) })
	c.mu.Unlock()
	c.work.Wait()
	return c.cc.Close()
}
