package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"lethe/sdk"
)

// keydProcess is a keyd daemon as a process of its own.
type keydProcess struct {
	address string // what sdk.Dial takes
	cmd     *exec.Cmd
	stderr  string        // file that its standard error is appended to
	exited  chan struct{} // closed once it has exited
	err     error         // of Wait; read after exited is closed
}

// launchKeyd starts a daemon whose data lie in data, without waiting for it.
// Later flags override those that this function sets.
func launchKeyd(bin, data string, flags ...string) (*keydProcess, error) {
	k := &keydProcess{
		address: "unix://" + filepath.Join(data, "keyd.sock"),
		stderr:  filepath.Clean(data) + ".stderr",
		exited:  make(chan struct{}),
	}
	stderr, err := os.OpenFile(k.stderr, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer stderr.Close()
	k.cmd = exec.Command(bin, append([]string{"--dev", "--data", data}, flags...)...)
	k.cmd.Stderr = stderr
	// A group of its own, so that an interrupt at the terminal reaches only us.
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := k.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		k.err = k.cmd.Wait()
		close(k.exited)
	}()
	return k, nil
}

// startKeyd starts a daemon and returns once it serves.
func startKeyd(ctx context.Context, bin, data string, flags ...string) (*keydProcess, error) {
	k, err := launchKeyd(bin, data, flags...)
	if err != nil {
		return nil, err
	}
	if err := k.waitServing(ctx); err != nil {
		k.kill()
		return nil, err
	}
	return k, nil
}

// target is what sdk.Dial takes.
func (k *keydProcess) target() string { return k.address }

// waitServing waits until the daemon says that it serves.
func (k *keydProcess) waitServing(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	go func() {
		select {
		case <-k.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	client, err := sdk.Dial(ctx, k.target())
	if err != nil {
		return err
	}
	defer client.Close()
	health := healthpb.NewHealthClient(client.Conn())
	for {
		res, err := health.Check(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
		if err == nil && res.Status == healthpb.HealthCheckResponse_SERVING {
			return nil
		}
		select {
		case <-k.exited:
			return fmt.Errorf("keyd did not start: %w; it said:\n%s", k.err, k.said())
		case <-ctx.Done():
			return fmt.Errorf("keyd does not serve: %w; it said:\n%s", errors.Join(err, ctx.Err()), k.said())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// said returns the end of what the daemon wrote to its standard error.
func (k *keydProcess) said() string {
	b, err := os.ReadFile(k.stderr)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-4096):]))
}

// alive reports whether the process runs.
func (k *keydProcess) alive() bool {
	select {
	case <-k.exited:
		return false
	default:
		return true
	}
}

// kill kills the daemon, as kill -9 does, and waits for its end.
func (k *keydProcess) kill() {
	if k.alive() {
		k.cmd.Process.Kill()
	}
	<-k.exited
}

// stop asks the daemon to stop, and fails unless it does so cleanly.
func (k *keydProcess) stop() error {
	if err := k.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("keyd had gone already: %w; it said:\n%s", err, k.said())
	}
	select {
	case <-k.exited:
	case <-time.After(30 * time.Second):
		k.kill()
		return fmt.Errorf("keyd did not stop within 30 s of SIGTERM; it said:\n%s", k.said())
	}
	if k.err != nil {
		return fmt.Errorf("keyd stopped with an error: %w; it said:\n%s", k.err, k.said())
	}
	return nil
}
