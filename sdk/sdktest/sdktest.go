// Package sdktest runs a real keyd inside a test's process: the daemon's own
// code over a real store, a real local KMS and a real anchor, in a temporary
// directory, behind a Unix socket. It is for the tests of those who import sdk.
//
// It is the one package below sdk that imports keyd, and with it a database;
// keep it to tests.
package sdktest

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/keyd"
	"lethe/keyd/anchor/file"
	"lethe/keyd/kms/local"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
)

// Keyd is a running keyd. It ends with its test.
type Keyd struct {
	dir string
	cfg keyd.Config
	// waiting is the waiting period of the KMS.
	waiting time.Duration
	mu      sync.Mutex
	server  *keyd.Server
	closes  []func() error
	conn    *grpc.ClientConn
}

// Option changes how a Keyd is made.
type Option func(*Keyd)

// WithClock gives keyd a wall clock of the test's own.
func WithClock(clock func() time.Time) Option {
	return func(k *Keyd) { k.cfg.Clock = clock }
}

// WithLog sends keyd's log, and its audit lines, to w instead of nowhere.
func WithLog(w io.Writer) Option {
	return func(k *Keyd) {
		k.cfg.Log, k.cfg.Audit = slog.New(slog.NewTextHandler(w, nil)), w
	}
}

// WithEpochs makes the end of an epoch come soon: keyd serves for that long
// without its KMS, the root of a drained epoch stays disabled for as long, and
// is destroyed after the waiting period.
func WithEpochs(kekLease, waiting time.Duration) Option {
	return func(k *Keyd) { k.cfg.KEKLease, k.cfg.Soak, k.waiting = kekLease, kekLease, waiting }
}

// WithHeartbeat sets how often a silent revocation stream shows that it lives.
func WithHeartbeat(d time.Duration) Option {
	return func(k *Keyd) { k.cfg.Heartbeat = d }
}

// Start makes and starts a keyd with no tenants.
func Start(t testing.TB, opts ...Option) *Keyd {
	t.Helper()
	// Not t.TempDir: its path may be longer than a socket's may be.
	dir, err := os.MkdirTemp("", "keyd")
	if err != nil {
		t.Fatal(err)
	}
	k := &Keyd{dir: dir, cfg: keyd.Config{
		Development: true, Initialise: true, Version: "sdktest", Log: slog.New(slog.DiscardHandler),
	}}
	for _, o := range opts {
		o(k)
	}
	t.Cleanup(func() {
		k.Stop()
		if k.conn != nil {
			k.conn.Close()
		}
		os.RemoveAll(dir)
	})
	if err := local.GenerateKeyfile(filepath.Join(dir, "keyfile")); err != nil {
		t.Fatal(err)
	}
	if err := k.start(true); err != nil {
		t.Fatal(err)
	}
	k.conn, err = grpc.NewClient(k.Target(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Target is the address to dial.
func (k *Keyd) Target() string { return "unix://" + filepath.Join(k.dir, "keyd.sock") }

// Dir is the directory in which keyd's files lie.
func (k *Keyd) Dir() string { return k.dir }

// Conn is a connection to keyd, for what sdk does not offer.
func (k *Keyd) Conn() *grpc.ClientConn { return k.conn }

func (k *Keyd) start(create bool) (err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	cfg := k.cfg
	var closes []func() error
	defer func() {
		if err != nil {
			closeAll(closes)
		}
	}()
	kms, err := local.Open(local.Options{
		Path: filepath.Join(k.dir, "roots"), Keyfile: filepath.Join(k.dir, "keyfile"), Create: create, Clock: cfg.Clock, Waiting: k.waiting,
	})
	if err != nil {
		return err
	}
	closes = append(closes, kms.Close)
	anchor, err := file.Open(file.Options{Dir: filepath.Join(k.dir, "anchor"), Create: create})
	if err != nil {
		return err
	}
	closes = append(closes, anchor.Close)
	store, err := badger.Open(badger.Options{Dir: filepath.Join(k.dir, "store"), Create: create, Logger: cfg.Log})
	if err != nil {
		return err
	}
	closes = append(closes, store.Close)
	cfg.KMS, cfg.Anchor, cfg.Store = kms, anchor, store
	server, err := keyd.Open(context.Background(), cfg)
	if err != nil {
		return err
	}
	sock := filepath.Join(k.dir, "keyd.sock")
	os.Remove(sock)
	lis, err := new(net.ListenConfig).Listen(context.Background(), "unix", sock)
	if err != nil {
		stop(server)
		return err
	}
	go func() { _ = server.Serve(lis) }()
	k.server, k.closes = server, closes
	return nil
}

// Stop stops keyd: clients find it gone. Stopping a stopped keyd does nothing.
func (k *Keyd) Stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server == nil {
		return
	}
	stop(k.server)
	closeAll(k.closes)
	k.server = nil
}

// TryRestart is Restart for a keyd that may refuse to start.
func (k *Keyd) TryRestart() error {
	k.Stop()
	return k.start(false)
}

// Restart starts a stopped keyd over the same files.
func (k *Keyd) Restart(t testing.TB) {
	t.Helper()
	if err := k.TryRestart(); err != nil {
		t.Fatal(err)
	}
}

// Tenant creates a tenant with the default classes, or with those given.
func (k *Keyd) Tenant(t testing.TB, name string, classes ...*keydv1.Class) {
	t.Helper()
	_, err := keydv1.NewAdminServiceClient(k.conn).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: name, Classes: classes})
	if err != nil {
		t.Fatal(err)
	}
}

// Class describes a class for Tenant.
func Class(name string, width, lease time.Duration) *keydv1.Class {
	return &keydv1.Class{Name: name, BucketWidth: durationpb.New(width), Lease: durationpb.New(lease)}
}

func stop(s *keyd.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	s.Stop(ctx)
}

func closeAll(closes []func() error) {
	for i := len(closes) - 1; i >= 0; i-- {
		_ = closes[i]()
	}
}

// Serve serves one more listener, until keyd stops or refuses it.
func (k *Keyd) Serve(lis net.Listener) error {
	k.mu.Lock()
	server := k.server
	k.mu.Unlock()
	return server.Serve(lis)
}
