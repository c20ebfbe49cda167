// Package keyd is the key daemon as a library: a Server over a store, a KMS
// and an anchor that its caller chose.
//
// # Life of a blob
//
// An agent service calls sdk.Seal. The SDK asks KeyService.GetBlobKeys for the
// blob key of (tenant, subject, class) in the bucket that runs now. keyd finds
// the subject's row under its handle; at the subject's first use of a class it
// makes a DEK, create-if-absent, wrapped under the tenant's KEK, and does the
// same for the bucket at its first use. It unwraps both from one snapshot of
// the store and derives the blob key, which opens that subject, class and
// bucket, and no more. The SDK seals with it for as long as the lease lasts.
// Opening goes the same way, with the key id that the blob's header names.
//
// # Life of a destroy
//
// The erasure pipeline calls ErasureService.DestroyKey. In one transaction
// keyd checks the holds and the generation, turns the subject's row into a
// tombstone, overwrites its wrapped keys, and appends a statement to the
// ledger. The commit is synced; revocations go out to the clients that watch;
// the anchor takes the statement and the ledger's new checkpoint; only then is
// the call answered, with a receipt that verifies offline.
package keyd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/internal/policy"
	"lethe/keyd/internal/rpc"
)

// The interfaces that adapters implement; see the packages below keyd/store,
// keyd/kms and keyd/anchor.
type (
	Store  = keys.Store
	KMS    = keys.KMS
	Anchor = ledger.Anchor
	// Anchors are the anchors that a keyd keeps for others; see anchor/file.
	Anchors = rpc.Anchors
)

// AccessFiles are the files that say who may call: certificates, and a policy.
type AccessFiles = policy.Files

// Policy says who has which roles for which tenants: its grants.
type (
	Policy = policy.File
	Grant  = policy.Grant
)

// ReadPolicy reads a policy file, as keyd does.
func ReadPolicy(name string) (*Policy, error) { return policy.Read(name) }

// Errors of Open, to be told apart by whoever starts keyd.
var (
	ErrNotInitialised = keys.ErrNotInitialised
	ErrFormat         = keys.ErrFormat
	ErrOtherAnchor    = keys.ErrOtherAnchor
	ErrBehind         = ledger.ErrBehind
	ErrForked         = ledger.ErrForked
	ErrAnchorMissing  = ledger.ErrAnchorMissing
	ErrAnchorDamaged  = ledger.ErrAnchorDamaged
	ErrReplayPending  = keys.ErrReplayPending
	ErrRootDestroyed  = keys.ErrRootDestroyed
	ErrRootRetiring   = keys.ErrRootRetiring
	ErrLocked         = keys.ErrLocked
	ErrReplay         = keys.ErrReplay
)

// ErrNoObject is the error of an Anchor's Newest while it holds nothing.
var ErrNoObject = ledger.ErrNoObject

// Config is what a Server stands on, and how it behaves. Zero durations mean
// the defaults.
type Config struct {
	Store  Store
	KMS    KMS
	Anchor Anchor
	// Anchors, if set, are kept for other keyds. They stay the caller's to
	// close, as the others do.
	Anchors Anchors

	// Access are the files by which callers are admitted, with TLS and
	// certificates of their own, and told apart.
	Access *AccessFiles
	// ConnectionAge is after what time callers with certificates are told to make
	// a new connection, on which they show their newest: 5 minutes by default.
	// Calls under way end where they began.
	ConnectionAge time.Duration
	// Development serves every caller instead, on loopback and Unix sockets
	// only, without TLS.
	Development bool
	// Initialise allows an empty store to become a new key store.
	Initialise bool

	// EpochLength is for how long an epoch is planned: 7 days by default.
	EpochLength time.Duration
	// DrainBudget is how long keys may take to be carried over to the next
	// epoch, as final_by counts: 24 hours by default.
	DrainBudget time.Duration
	// Soak is how long the root of a drained epoch stays disabled before its
	// destruction is scheduled: 24 hours by default, KEKLease at the least.
	Soak time.Duration
	// RewrapRate bounds how many keys are carried over per second; zero: no bound.
	RewrapRate int
	// DutyInterval is how often keyd looks for background work: 1 s by default.
	DutyInterval time.Duration
	// KEKLease is for how long keyd serves without the KMS: 15 minutes by default.
	KEKLease time.Duration
	// AnchorTimeout is how long a call waits for the anchor: 10 s by default.
	AnchorTimeout time.Duration
	// Grace is how long a bucket whose retention has ended is only refused,
	// before its key is destroyed: 24 h by default.
	Grace time.Duration
	// SkewAllowance is added to drained_by: 5 s by default.
	SkewAllowance time.Duration
	// Heartbeat is how often a silent revocation stream shows that it lives:
	// 10 s by default.
	Heartbeat time.Duration

	Version string
	// Clock is the wall clock; nil: time.Now.
	Clock func() time.Time
	// Log is for operators; nil: slog.Default().
	Log *slog.Logger
	// Audit takes one line of JSON a call; nil: none are kept.
	Audit io.Writer
	// Metrics takes the metrics; nil: none are kept.
	Metrics prometheus.Registerer
}

// Server is a running keyd.
type Server struct {
	keys    *keys.Keys
	access  *policy.Access // nil for development
	callers *policy.Policy
	grpc    *grpc.Server
	health  *health.Server
	log     *slog.Logger
	done    chan struct{}
	once    sync.Once
}

// Open checks the store against the anchor and prepares to serve. The store,
// the KMS and the anchor stay the caller's to close, after Stop.
func Open(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	var access *policy.Access
	if cfg.Access != nil {
		var err error
		if access, err = policy.Load(*cfg.Access, cfg.Clock, cfg.Log); err != nil {
			return nil, fmt.Errorf("keyd: %w", err)
		}
	}
	k, err := keys.Open(ctx, cfg.keys())
	if err != nil {
		return nil, fmt.Errorf("keyd: %w", err)
	}
	callers := policy.New(access, cfg.Audit, cfg.Log, cfg.Metrics)
	s := &Server{keys: k, access: access, callers: callers, log: cfg.Log, done: make(chan struct{}), health: health.NewServer()}
	registerGauges(cfg.Metrics, k)
	opts := rpc.Options(k, callers, cfg.Log)
	info := rpc.Info{Version: cfg.Version, Development: cfg.Development, Heartbeat: cfg.Heartbeat}
	if audit, lost := callers.Audit(); audit != nil {
		registerComponent(cfg.Metrics, audit().Name, func() bool { return audit().Healthy })
		cfg.Metrics.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "lethe_audit_lines_lost_total", Help: "Calls whose audit line could not be written.",
		}, func() float64 { return float64(lost()) }))
		info.Components = append(info.Components, audit)
	}
	if access != nil {
		registerAccess(cfg.Metrics, access)
		info.Components = append(info.Components, access.Status)
		opts = append(opts, grpc.Creds(access), grpc.ConnectionTimeout(handshakeTimeout),
			grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: cfg.ConnectionAge}))
	}
	if cfg.Anchors != nil {
		opts = append(opts, rpc.AnchorOptions(callers)...)
	}
	s.grpc = grpc.NewServer(opts...)
	if cfg.Anchors != nil {
		rpc.RegisterAnchors(s.grpc, interruptible(cfg.Anchors, cfg.Log))
	}
	rpc.Register(s.grpc, k, info, s.done)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	go s.watchHealth()
	return s, nil
}

// handshakeTimeout is how long a caller may take to show its certificate.
const handshakeTimeout = 10 * time.Second

// Reload reads the files of Config.Access again. What they say holds from the
// next call on, on connections that are open too; with an error all stays as it
// was, and is told as unhealthy.
func (s *Server) Reload() error {
	if s.access == nil {
		return nil
	}
	return s.access.Reload()
}

func (c *Config) setDefaults() {
	setDefault(&c.EpochLength, 7*24*time.Hour)
	setDefault(&c.DrainBudget, 24*time.Hour)
	setDefault(&c.Soak, 24*time.Hour)
	setDefault(&c.DutyInterval, time.Second)
	setDefault(&c.KEKLease, 15*time.Minute)
	setDefault(&c.AnchorTimeout, 10*time.Second)
	setDefault(&c.SkewAllowance, 5*time.Second)
	setDefault(&c.Grace, 24*time.Hour)
	setDefault(&c.Heartbeat, 10*time.Second)
	setDefault(&c.ConnectionAge, 5*time.Minute)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
}

// keys is the part that package keys needs.
func (c *Config) keys() keys.Config {
	return keys.Config{
		Store: c.Store, KMS: c.KMS, Anchor: c.Anchor, Clock: c.Clock, Log: c.Log,
		Initialise: c.Initialise, EpochLength: c.EpochLength, KEKLease: c.KEKLease,
		AnchorTimeout: c.AnchorTimeout, TakeOver: keys.TakeOver, SkewAllowance: c.SkewAllowance, Grace: c.Grace,
		DrainBudget: c.DrainBudget, Soak: c.Soak, RewrapRate: c.RewrapRate, DutyInterval: c.DutyInterval,
	}
}

// check refuses what no deployment can mean.
func (c *Config) check() error {
	if c.Development == (c.Access != nil) {
		return errors.New("keyd: it needs the files that say who may call, or serves development, and not both")
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"the length of an epoch", c.EpochLength}, {"the drain budget", c.DrainBudget}, {"the soak", c.Soak},
		{"the KEKs' lease", c.KEKLease}, {"the anchor's timeout", c.AnchorTimeout}, {"the grace", c.Grace},
		{"the allowance for skew", c.SkewAllowance}, {"the heartbeat", c.Heartbeat}, {"the age of a connection", c.ConnectionAge},
	} {
		if d.value < 0 {
			return fmt.Errorf("keyd: %s is negative", d.name)
		}
	}
	if c.EpochLength != 0 && c.EpochLength < time.Second {
		return errors.New("keyd: an epoch lasts a second at least")
	}
	if c.RewrapRate < 0 {
		return errors.New("keyd: the rate of wrapping anew is negative")
	}
	return nil
}

func setDefault(d *time.Duration, to time.Duration) {
	if *d == 0 {
		*d = to
	}
}

// registerGauges exports what an operator watches. The ledger's two sizes
// differ for long only when the anchor does not follow.
func registerGauges(reg prometheus.Registerer, k *keys.Keys) {
	gauge := func(name, help string, value func() float64) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("lethe_ledger_entries", "Entries in the ledger.", func() float64 { return float64(k.LedgerSize()) })
	gauge("lethe_ledger_anchored_entries", "Entries that the anchor covers.", func() float64 { return float64(k.AnchoredSize()) })
	epochs := func(value func(keys.EpochGauges) float64) func() float64 {
		return func() float64 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			g, err := k.EpochGauges(ctx)
			if err != nil {
				return -1
			}
			return value(g)
		}
	}
	gauge("lethe_epoch", "Number of the open epoch; -1 while the store does not answer, as below.",
		epochs(func(g keys.EpochGauges) float64 { return float64(g.Open) }))
	gauge("lethe_epochs_unclosed", "Past epochs whose root is not destroyed yet.",
		epochs(func(g keys.EpochGauges) float64 { return float64(g.Unclosed) }))
	gauge("lethe_epochs_late", "Epochs that are not closed although the final_by of their receipts has passed.",
		epochs(func(g keys.EpochGauges) float64 { return float64(g.Late) }))
	gauge("lethe_rewrap_rows", "Wrapped keys of the epoch that drains.",
		epochs(func(g keys.EpochGauges) float64 { return float64(g.Rows) }))
	gauge("lethe_rewrap_rows_done", "Those that were dealt with.",
		epochs(func(g keys.EpochGauges) float64 { return float64(g.RowsDone) }))
	for _, component := range []string{"store", "kms", "anchor", "epochs"} {
		registerComponent(reg, component, func() bool {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			for _, c := range k.Status(ctx).Components {
				if c.Name == component {
					return c.Healthy
				}
			}
			return false
		})
	}
}

func registerComponent(reg prometheus.Registerer, name string, healthy func() bool) {
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lethe_component_healthy", Help: "1 while the component works.",
		ConstLabels: prometheus.Labels{"component": name},
	}, func() float64 {
		if healthy() {
			return 1
		}
		return 0
	}))
}

// registerAccess exports what an operator watches of the admission of callers.
func registerAccess(reg prometheus.Registerer, a *policy.Access) {
	registerComponent(reg, a.Status().Name, func() bool { return a.Status().Healthy })
	reg.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "lethe_certificate_end_seconds", Help: "When keyd's own certificate is over, in Unix seconds.",
		}, func() float64 { return float64(a.CertificateEnd().Unix()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "lethe_handshakes_refused_total", Help: "Connections that ended before they had shown a good certificate.",
		}, func() float64 { return float64(a.Refused()) }))
}

// watchHealth keeps the standard gRPC health service at what Serving says.
func (s *Server) watchHealth() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		state := healthpb.HealthCheckResponse_SERVING
		if s.keys.Serving() != nil {
			state = healthpb.HealthCheckResponse_NOT_SERVING
		}
		s.health.SetServingStatus("", state)
		select {
		case <-tick.C:
		case <-s.done:
			return
		}
	}
}

// Serve answers calls on lis until Stop. For development it refuses a listener
// that other machines reach.
func (s *Server) Serve(lis net.Listener) error {
	if s.access == nil {
		if err := MayListen(lis.Addr()); err != nil {
			lis.Close()
			return err
		}
	}
	return s.grpc.Serve(lis)
}

// MayListen says whether keyd serves on an address without TLS: only where no
// other machine reaches it.
func MayListen(addr net.Addr) error {
	switch a := addr.(type) {
	case *net.UnixAddr:
		return nil
	case *net.TCPAddr:
		if a.IP.IsLoopback() {
			return nil
		}
	}
	return fmt.Errorf("keyd: will not listen on %s without TLS: only on loopback or a Unix socket", addr)
}

// Stop ends the service: calls under way may finish until ctx is done.
func (s *Server) Stop(ctx context.Context) {
	s.once.Do(func() {
		close(s.done)
		s.health.Shutdown()
		stopped := make(chan struct{})
		go func() {
			s.grpc.GracefulStop()
			close(stopped)
		}()
		select {
		case <-stopped:
		case <-ctx.Done():
			s.grpc.Stop()
			<-stopped
		}
		s.keys.Close()
		s.callers.Close()
	})
}
