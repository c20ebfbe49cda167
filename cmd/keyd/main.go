// Command keyd is Lethe's key daemon. It serves callers that show a certificate,
// as a policy file allows; or, for development, everybody who reaches it on
// loopback or a Unix socket.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/net/netutil"

	"lethe/cmd/internal/parts"
	"lethe/keyd"
	"lethe/keyd/anchor/file"
)

// version is set when a release is built.
var version = "0.1.0-dev"

type options struct {
	parts.Options
	dev           bool
	access        keyd.AccessFiles
	listen        string
	metrics       string
	auditLog      string
	serveAnchors  string
	logLevel      string
	kekLease      time.Duration
	anchorTimeout time.Duration
	epochLength   time.Duration
	drainBudget   time.Duration
	soak          time.Duration
	rewrapRate    int
}

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "keyd:", strings.TrimPrefix(err.Error(), "keyd: "))
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:   "keyd (--dev | --tls-cert F --tls-key F --tls-client-ca F --policy F) [flags]",
		Short: "Lethe's key daemon",
		Long: `keyd holds the keys of subjects, leases blob keys to those who seal and open,
and destroys keys for good.

With --tls-cert, --tls-key, --tls-client-ca and --policy it speaks TLS 1.3 with
callers that show a certificate of that CA, and lets each do what the policy
says. SIGHUP has it read these files again; 'lethe policy check' reads a policy
beforehand. With --dev instead it listens on loopback or a Unix socket only, and
whoever reaches the listener may do everything.`,
		Example: `  # For development, everything below ./lethe-dev, listening on its socket:
  keyd --dev

  # For callers with certificates:
  keyd --tls-cert keyd.pem --tls-key keyd.key --tls-client-ca clients.pem \
       --policy policy.toml --listen 0.0.0.0:7420 --data /var/lib/lethe

  # The parts apart, the anchor on another disk, metrics for Prometheus:
  keyd --dev --store /var/lib/lethe/store --kms-file /etc/lethe/roots \
       --kms-keyfile /etc/lethe/roots.key --anchor /mnt/other/anchor \
       --listen 127.0.0.1:7420 --metrics 127.0.0.1:7421

  # The anchor in an object store, or at another keyd that was started with
  # --serve-anchors:
  keyd --dev --anchor 's3://anchors/lethe?region=eu-central-1'
  keyd --dev --anchor keyd:other.example.org:7420/lethe --anchor-tls-ca ca.pem \
       --anchor-tls-cert keyd.pem --anchor-tls-key keyd.key

  # The roots in AWS KMS:
  keyd --dev --kms awskms --aws-region eu-central-1

  # The roots on a PKCS#11 token, such as a hardware security module:
  keyd --dev --kms pkcs11 --pkcs11-module /usr/lib/softhsm/libsofthsm2.so \
       --pkcs11-token lethe --pkcs11-pin-file /etc/lethe/pin`,
		Args:          cobra.NoArgs,
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := given(cmd.Flags()); err != nil {
				return err
			}
			if err := o.CheckKMS(cmd.Flags().Changed); err != nil {
				return err
			}
			if err := o.CheckAnchor(); err != nil {
				return err
			}
			if err := o.checkAccess(); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	f := c.Flags()
	f.BoolVar(&o.dev, "dev", false, "serve for development: no roles, no TLS")
	f.StringVar(&o.access.Certificate, "tls-cert", "", "keyd's certificate and those between it and its CA, in PEM")
	f.StringVar(&o.access.Key, "tls-key", "", "its key, in PEM")
	f.StringVar(&o.access.ClientCA, "tls-client-ca", "", "certificates of the CAs of callers, in PEM")
	f.StringVar(&o.access.Policy, "policy", "", "file that says which principal has which roles for which tenants")
	o.AddFlags(f)
	f.StringVar(&o.listen, "listen", "", "where to listen: unix:PATH or HOST:PORT, with --dev a loopback one (default unix:<data>/keyd.sock)")
	f.StringVar(&o.metrics, "metrics", "", "loopback HOST:PORT for Prometheus metrics; empty: none")
	f.StringVar(&o.auditLog, "audit-log", "", "file for one audit line a call (default <data>/audit.log)")
	f.StringVar(&o.serveAnchors, "serve-anchors", "", "directory, of mode 0700, in which to keep the anchors of other keyds; empty: none are kept")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.DurationVar(&o.kekLease, "kek-lease", 0, "for how long keyd serves without the KMS (default 15m)")
	f.DurationVar(&o.anchorTimeout, "anchor-timeout", 0, "how long a destroy waits for the anchor (default 10s)")
	f.DurationVar(&o.epochLength, "epoch-length", 0, "how long an epoch lasts before keys are wrapped anew (default 168h)")
	f.DurationVar(&o.drainBudget, "drain-budget", 0, "how long wrapping anew may take, as receipts count it in final_by (default 24h)")
	f.DurationVar(&o.soak, "soak", 0, "how long a root stays disabled before its destruction is scheduled, --kek-lease at the least (default 24h)")
	f.IntVar(&o.rewrapRate, "rewrap-rate", 0, "keys wrapped anew per second, at most; 0: as fast as it goes")
	return c
}

// given refuses flags with an empty value where that is not said to mean
// something: a variable of a script that was not set is no wish for the default.
func given(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		if f.Value.String() == "" && f.Name != "metrics" && f.Name != "serve-anchors" {
			err = fmt.Errorf("--%s is given an empty value", f.Name)
		}
	})
	return err
}

// checkAccess refuses what is neither for development nor says who may call.
func (o *options) checkAccess() error {
	var missing []string
	flags := []struct{ name, value string }{
		{"--tls-cert", o.access.Certificate}, {"--tls-key", o.access.Key}, {"--tls-client-ca", o.access.ClientCA}, {"--policy", o.access.Policy},
	}
	for _, f := range flags {
		if f.value == "" {
			missing = append(missing, f.name)
		}
	}
	switch {
	case o.dev && len(missing) < len(flags):
		return errors.New("--dev serves everybody: --tls-cert, --tls-key, --tls-client-ca and --policy say nothing with it")
	case !o.dev && len(missing) == len(flags):
		return errors.New("say who may call, with --tls-cert, --tls-key, --tls-client-ca and --policy; or --dev, for development")
	case !o.dev && len(missing) > 0:
		return fmt.Errorf("say who may call: %s is not given", strings.Join(missing, ", "))
	}
	return nil
}

func (o *options) setDefaults() {
	o.SetDefaults()
	if o.auditLog == "" {
		o.auditLog = filepath.Join(o.Data, "audit.log")
	}
	o.Beside = []string{o.auditLog}
	if o.serveAnchors != "" {
		o.Beside = append(o.Beside, o.serveAnchors)
	}
	if o.listen == "" {
		o.listen = "unix:" + filepath.Join(o.Data, "keyd.sock")
	}
}

func run(ctx context.Context, o options) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	slog.SetDefault(log)
	if err := hideMemory(); err != nil {
		log.Warn("this process's memory is not hidden from dumps and debuggers", "error", err)
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	reload := make(chan os.Signal, 1)
	if !o.dev {
		// Also before keyd serves, which the signal must not end.
		signal.Notify(reload, syscall.SIGHUP)
		defer signal.Stop(reload)
	}

	o.setDefaults()
	if err := o.mayListen(); err != nil { // before anything is made
		return err
	}
	p, err := parts.Open(ctx, o.Options, true, log)
	if stoppedBefore(ctx, err) {
		log.Info(stoppedWaiting)
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close(log)
	if p.Shared != "" {
		log.Warn("one backup or snapshot of the store's file system takes along what has to be apart: "+
			"restored together with the anchor, destroyed keys come back unnoticed; together with the roots, a backup opens by itself",
			"beside the store", p.Shared)
	}
	audit, err := openAuditLog(o.auditLog)
	if err != nil {
		return err
	}
	defer audit.Close()

	var anchors keyd.Anchors
	if o.serveAnchors != "" {
		shelf, err := file.OpenShelf(o.serveAnchors)
		if err != nil {
			return fmt.Errorf("--serve-anchors %s: %w", o.serveAnchors, err)
		}
		defer shelf.Close()
		anchors = shelf
	}

	// Before the store is opened for good, and after its lock was asked for, which
	// says more.
	if err := freeSocket(ctx, o.listen); err != nil {
		return err
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg := keyd.Config{
		Store: p.Store, KMS: p.KMS, Anchor: p.Anchor, Anchors: anchors,
		Development: o.dev, Initialise: true, Version: version,
		KEKLease: o.kekLease, AnchorTimeout: o.anchorTimeout,
		EpochLength: o.epochLength, DrainBudget: o.drainBudget, Soak: o.soak, RewrapRate: o.rewrapRate,
		Log: log, Audit: audit, Metrics: metrics,
	}
	if !o.dev {
		cfg.Access = &o.access
	}
	server, err := keyd.Open(ctx, cfg)
	if (errors.Is(err, keyd.ErrBehind) || errors.Is(err, keyd.ErrReplayPending)) && !errors.Is(err, keyd.ErrRootDestroyed) {
		err = fmt.Errorf("%w (lethe restore --replay does that)", err)
	}
	if stoppedBefore(ctx, err) {
		log.Info(stoppedWaiting)
		return nil
	}
	if err != nil {
		return err
	}
	lis, err := listen(ctx, o.listen)
	if err == nil && o.dev {
		err = keyd.MayListen(lis.Addr())
	}
	if err != nil {
		server.Stop(ctx)
		return err
	}
	failed := make(chan error, 2)
	if o.metrics != "" {
		stopMetrics, err := serveMetrics(ctx, o.metrics, metrics, failed)
		if err != nil {
			server.Stop(ctx)
			return err
		}
		defer stopMetrics()
	}
	if most := connections(); most > 0 {
		lis = netutil.LimitListener(lis, most)
	}
	go func() { failed <- server.Serve(lis) }()
	if o.dev {
		log.Warn("FOR DEVELOPMENT ONLY: no roles, no TLS; whoever reaches the listener may do everything")
	}
	log.Info("serving", "listen", lis.Addr().String(), "store", o.Store, "kms", o.KMS, "anchor", o.Anchor, "version", version)

	go func() { // apart: the files' disk may hang, and keyd can be stopped all the same
		for range reload {
			if err := server.Reload(); err != nil {
				log.Error("the policy and certificates were not read again; those before hold", "error", err)
				continue
			}
			log.Info("the policy and certificates were read again")
		}
	}()
	select {
	case <-ctx.Done():
		log.Info("stopping")
	case err = <-failed:
	}
	grace, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	server.Stop(grace)
	if err == nil {
		p.Close(log)
		log.Info("stopped") // the process may be kept by a call of the kernel's
	}
	return err
}

const stoppedWaiting = "stopped while waiting, before it served"

// stoppedBefore says whether err is that keyd was stopped before it served.
func stoppedBefore(ctx context.Context, err error) bool {
	return errors.Is(err, context.Canceled) && ctx.Err() != nil
}

// mayListen refuses an address that other machines reach, for development.
func (o *options) mayListen() error {
	if !o.dev || strings.HasPrefix(o.listen, "unix:") {
		return nil
	}
	addr, err := net.ResolveTCPAddr("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	return keyd.MayListen(addr)
}

func serveMetrics(ctx context.Context, where string, reg *prometheus.Registry, failed chan<- error) (stop func(), err error) {
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", where)
	if err != nil {
		return nil, err
	}
	if err := keyd.MayListen(lis.Addr()); err != nil {
		lis.Close()
		return nil, fmt.Errorf("--metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		if err := srv.Serve(lis); !errors.Is(err, http.ErrServerClosed) {
			failed <- err
		}
	}()
	return func() { srv.Close() }, nil
}
