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
	"testing"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"lethe/cmd/internal/parts"
	"lethe/internal/logtest"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// asKeyd makes the test's own binary be keyd, so that a test starts, stops and
// kills a real one.
const asKeyd = "LETHE_TEST_IS_KEYD"

func TestMain(m *testing.M) {
	if os.Getenv(asKeyd) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// daemon is a keyd in a process of its own.
type daemon struct {
	data string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of Wait, once done is closed

	stderr logtest.Buffer
}

func (d *daemon) said() string { return d.stderr.String() }

// dataDir returns a directory whose path leaves room for a socket's name.
func dataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "keyd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func launch(t *testing.T, data string, env []string, flags ...string) *daemon {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{data: data, done: make(chan struct{})}
	d.cmd = exec.Command(self, append([]string{"--dev", "--data", data}, flags...)...)
	d.cmd.Env = append(append(os.Environ(), asKeyd+"=1"), env...)
	d.cmd.Stderr = &d.stderr
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		d.err = d.cmd.Wait()
		close(d.done)
	}()
	t.Cleanup(func() {
		d.cmd.Process.Kill()
		<-d.done
	})
	return d
}

// start starts a keyd and returns it, with a client, once it serves.
func start(t *testing.T, data string, env []string, flags ...string) (*daemon, *sdk.Client) {
	t.Helper()
	d := launch(t, data, env, flags...)
	client, err := sdk.Dial(t.Context(), "unix://"+filepath.Join(data, "keyd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	health := healthpb.NewHealthClient(client.Conn())
	for {
		res, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{}, grpc.WaitForReady(false))
		if err == nil && res.Status == healthpb.HealthCheckResponse_SERVING {
			return d, client
		}
		select {
		case <-d.done:
			t.Fatalf("keyd ended: %v; it said:\n%s", d.err, d.said())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (d *daemon) stop(t *testing.T) {
	t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if <-d.done; d.err != nil {
		t.Fatalf("keyd ended: %v; it said:\n%s", d.err, d.said())
	}
}

// freeze has it stand still, each of its threads.
func (d *daemon) freeze(t *testing.T) {
	t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for running := true; running; time.Sleep(time.Millisecond) {
		out, err := exec.Command("ps", "-L", "-o", "state=", "-p", fmt.Sprint(d.cmd.Process.Pid)).Output()
		if err != nil {
			t.Fatal(err)
		}
		running = strings.Trim(string(out), "T\n ") != ""
	}
}

// fails starts a keyd that must refuse, and returns what it says.
func fails(t *testing.T, data string, env []string, flags ...string) string {
	t.Helper()
	d := launch(t, data, env, flags...)
	if <-d.done; d.err == nil {
		t.Fatalf("it ended well; it said:\n%s", d.said())
	}
	return d.said()
}

func target(subject string) sdk.Target {
	return sdk.Target{Tenant: "acme", Subject: subject, Class: "memory"}
}

// live takes a keyd through its job: somebody is sealed for and erased, keyd
// is killed and started again, and knows both him and the others. Then the epoch is
// turned. It returns the running keyd.
func live(t *testing.T, data string, env []string, flags ...string) (*daemon, *sdk.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, client := start(t, data, env, flags...)
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(ctx, &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{}
	for _, subject := range []string{"stays", "goes"} {
		var err error
		if blobs[subject], err = client.Seal(ctx, target(subject), []byte("of "+subject)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.DestroyKey(ctx, sdk.DestroyRequest{Tenant: "acme", Subject: "goes", RequestID: "r1", Reason: "gdpr-17"}); err != nil {
		t.Fatal(err)
	}
	check := func(client *sdk.Client) {
		t.Helper()
		if plain, err := client.Open(ctx, target("stays"), blobs["stays"]); err != nil || string(plain) != "of stays" {
			t.Fatalf("the one who stays: %q, %v; keyd said:\n%s", plain, err, d.said())
		}
		if _, err := client.Open(ctx, target("goes"), blobs["goes"]); !errors.Is(err, sdk.ErrErased) {
			t.Fatalf("the one who was erased: %v", err)
		}
	}
	check(client)
	client.Close()
	d.cmd.Process.Kill()
	<-d.done
	d, client = start(t, data, env, flags...)
	check(client)
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).TurnEpoch(ctx, &keydv1.TurnEpochRequest{Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	awaitEpoch(t, client, 2, keydv1.EpochState_EPOCH_STATE_OPEN)
	check(client)
	return d, client
}

// awaitEpoch waits until an epoch is in a state, and returns it.
func awaitEpoch(t *testing.T, client *sdk.Client, number uint32, state keydv1.EpochState) *keydv1.Epoch {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	last := "nothing"
	for {
		res, err := keydv1.NewAdminServiceClient(client.Conn()).GetEpochs(ctx, &keydv1.GetEpochsRequest{})
		if err == nil {
			for _, e := range res.Epochs {
				if e.Number == number && e.State == state {
					return e
				}
			}
			last = fmt.Sprint(res)
		}
		select {
		case <-ctx.Done():
			t.Fatalf("epoch %d is not %v: %v; %s", number, state, err, last)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func component(t *testing.T, client *sdk.Client, name string) *keydv1.ComponentStatus {
	t.Helper()
	res, err := keydv1.NewAdminServiceClient(client.Conn()).GetStatus(t.Context(), &keydv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range res.Components {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no component %s in %v", name, res)
	return nil
}

func TestKMSFlags(t *testing.T) {
	complete := []string{"--kms", "pkcs11", "--pkcs11-module", "m", "--pkcs11-token", "t", "--pkcs11-pin-file", "p"}
	tests := []struct {
		args []string
		want string // of the error; empty: none
	}{
		{[]string{}, ""}, // nil would be the test's own
		{[]string{"--kms", "local", "--kms-file", "x", "--root-waiting", "2h"}, ""},
		{[]string{"--kms", "awskms", "--aws-region", "eu-central-1", "--aws-waiting-days", "30", "--aws-evidence", "x", "--aws-endpoint", "https://kms.example"}, ""},
		{[]string{"--kms", "vault"}, "no such KMS"},
		{[]string{"--kms", ""}, "--kms is given an empty value"},
		{[]string{"--store", ""}, "--store is given an empty value"},
		{[]string{"--metrics", "", "--serve-anchors", ""}, ""},
		{[]string{"--aws-region", "eu-central-1"}, "--aws-region: not for --kms local"},
		{[]string{"--aws-waiting-days", "0"}, "--aws-waiting-days: not for --kms local"},
		{[]string{"--kms", "awskms", "--kms-file", "x", "--kms-keyfile", "y"}, "--kms-file, --kms-keyfile: not for --kms awskms"},
		{[]string{"--kms", "awskms", "--root-waiting", "1h"}, "--root-waiting: not for --kms awskms"},
		{[]string{"--kms", "awskms", "--pkcs11-token", "x"}, "--pkcs11-token: not for --kms awskms"},
		{[]string{"--pkcs11-pin-file", "x"}, "--pkcs11-pin-file: not for --kms local"},
		{append(complete, "--kms-passphrase-file", "x"), "--kms-passphrase-file: not for --kms pkcs11"},
	}
	if parts.PKCS11Built {
		tests = append(tests, []struct {
			args []string
			want string
		}{
			{complete, ""},
			{append(complete, "--root-waiting", "24h"), ""},
			{complete[:6], "needs --pkcs11-module"},
			{[]string{"--kms", "pkcs11"}, "needs --pkcs11-module"},
		}...)
	} else {
		tests = append(tests, struct {
			args []string
			want string
		}{complete, "built without PKCS#11"})
	}
	for _, test := range tests {
		// Without --dev nothing is opened, and that is said last.
		c := command()
		c.SetArgs(test.args)
		err := c.Execute()
		if test.want == "" {
			test.want = "or --dev, for development"
		}
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("keyd %s: %v; want %q", strings.Join(test.args, " "), err, test.want)
		}
	}
}

// The flags of epochs are what final_by is made of, and the schedule.
func TestEpochFlags(t *testing.T) {
	t.Parallel()
	data := dataDir(t)
	if said := fails(t, data, nil, "--rewrap-rate", "-1"); !strings.Contains(said, "rate of wrapping anew is negative") {
		t.Errorf("a negative rate: %s", said)
	}
	d, client := start(t, dataDir(t), nil, "--epoch-length", "2h", "--drain-budget", "3h", "--soak", "5h", "--root-waiting", "11h")
	e := awaitEpoch(t, client, 1, keydv1.EpochState_EPOCH_STATE_OPEN)
	if length := e.PlannedEnd.AsTime().Sub(e.Opened.AsTime()); length != 2*time.Hour {
		t.Errorf("an epoch lasts %v", length)
	}
	if wait := e.FinalBy.AsTime().Sub(e.PlannedEnd.AsTime()); wait != (3+5+11)*time.Hour {
		t.Errorf("from its end to final_by there are %v", wait)
	}
	d.stop(t)
}

// Who may call is said in full, or not at all.
func TestAccessFlags(t *testing.T) {
	all := []string{"--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a", "--policy", "p"}
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{}, "say who may call"},
		{all[:6], "say who may call"},
		{all[2:], "say who may call"},
		{[]string{"--dev", "--policy", "p"}, "--dev serves everybody"},
		{append([]string{"--dev"}, all...), "--dev serves everybody"},
		{[]string{"--dev", "--policy", ""}, "--policy is given an empty value"},
		{append([]string{"--anchor-tls-ca", "x"}, all...), "for an anchor at another keyd"},
	} {
		c := command()
		c.SetArgs(test.args)
		if err := c.Execute(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("keyd %s: %v; want %q", strings.Join(test.args, " "), err, test.want)
		}
	}
	data := dataDir(t)
	said := fails(t, data, nil, "--listen", "0.0.0.0:0")
	if made, err := filepath.Glob(filepath.Join(data, "*")); err != nil || len(made) != 0 {
		t.Errorf("before it was refused it made %q, %v", made, err)
	}
	if !strings.Contains(said, "loopback or a Unix socket") {
		t.Errorf("--dev for everybody: %s", said)
	}
}

// What belongs to the KMS is not in the store's directory, with which it would
// be copied and lost; and no file is made for a KMS that is not used.
func TestKMSFilesApart(t *testing.T) {
	data := dataDir(t)
	store := filepath.Join(data, "store")
	for _, flags := range [][]string{
		{"--kms-file", filepath.Join(store, "roots")},
		{"--kms-passphrase-file", filepath.Join(store, "passphrase")},
		{"--kms", "awskms", "--aws-region", "eu-central-1", "--aws-evidence", filepath.Join(store, "evidence")},
	} {
		if said := fails(t, data, nil, flags...); !strings.Contains(said, "lies inside the key store's directory") {
			t.Errorf("keyd %s: %s", strings.Join(flags, " "), said)
		}
	}
	data = dataDir(t)
	said := fails(t, data, []string{"AWS_REGION=", "AWS_DEFAULT_REGION=", "AWS_CONFIG_FILE=" + os.DevNull}, "--kms", "awskms")
	if !strings.Contains(said, "no region") {
		t.Errorf("without a region: %s", said)
	}
	if _, err := os.Stat(filepath.Join(data, "kms", "keyfile")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a keyfile beside AWS KMS: %v", err)
	}
}

// A start that was refused before anything was stored leaves nothing that a
// later one would take for a store, wherever that has its parts.
func TestRefusedFirstStart(t *testing.T) {
	data := dataDir(t)
	for range 2 {
		if said := fails(t, data, nil, "--min-free", fmt.Sprint(1<<60)); !strings.Contains(said, "store is full") {
			t.Fatalf("it says %s", said)
		}
	}
	elsewhere := dataDir(t)
	_, client := start(t, data, nil, "--anchor", filepath.Join(elsewhere, "anchor"),
		"--kms-file", filepath.Join(elsewhere, "roots"), "--kms-keyfile", filepath.Join(elsewhere, "keyfile"))
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
}

func TestMinFreeIsWhatItSays(t *testing.T) {
	for _, n := range []string{"0", "1000"} {
		if said := fails(t, dataDir(t), nil, "--min-free", n); !strings.Contains(said, "--min-free: at least") {
			t.Errorf("--min-free %s: %s", n, said)
		}
	}
}

// Who keeps everything on one disk is told what that costs.
func TestPartsOnOneFileSystem(t *testing.T) {
	d, client := start(t, dataDir(t), nil)
	if c := component(t, client, "anchor"); !c.Healthy || !strings.Contains(c.Detail, "on the store's file system: the roots and the anchor") {
		t.Errorf("the anchor is %v", c)
	}
	d.stop(t) // by its end, all that it said has come
	if said := d.said(); !strings.Contains(said, "one backup or snapshot of the store's file system") {
		t.Errorf("it says %s", said)
	}
}

// A keyd that is stopped while it waits for the one before it ends well.
func TestStoppedWhileWaiting(t *testing.T) {
	where, env, _ := bucket(t)
	data := dataDir(t)
	first, _ := start(t, data, env, "--anchor", where)
	first.cmd.Process.Kill() // so that it says nothing of its end
	<-first.done
	d := launch(t, data, env, "--anchor", where)
	for !strings.Contains(d.said(), "waiting until it has seen") {
		select {
		case <-d.done:
			t.Fatalf("keyd ended: %v; it said:\n%s", d.err, d.said())
		case <-time.After(10 * time.Millisecond):
		}
	}
	d.stop(t)
	if said := d.said(); !strings.Contains(said, "stopped while waiting") || strings.Contains(said, "canceled") {
		t.Errorf("it said:\n%s", said)
	}
}
