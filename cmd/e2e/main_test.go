package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
)

// bin is the directory of the binaries under test.
var bin string

// TestMain builds the binaries once. LETHE_E2E_RACE=1 builds keyd with the
// race detector; LETHE_E2E_BIN names a directory where all of them are built.
func TestMain(m *testing.M) {
	os.Exit(func() int {
		if bin = os.Getenv("LETHE_E2E_BIN"); bin != "" {
			return m.Run()
		}
		dir, err := os.MkdirTemp("", "lethe-e2e-bin-")
		if err == nil {
			defer os.RemoveAll(dir)
			bin = dir
			err = build(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

func build(dir string) error {
	keyd := []string{"build", "-o", dir, "lethe/cmd/keyd"}
	if os.Getenv("LETHE_E2E_RACE") == "1" {
		keyd = []string{"build", "-race", "-o", dir, "lethe/cmd/keyd"}
	}
	for _, args := range [][]string{keyd, {"build", "-o", dir, "lethe/cmd/lethe", "lethe/cmd/e2e"}} {
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// tempDir is a directory with a path short enough for a socket in it.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lethe-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// deployment is a keyd that a test starts, stops and starts again.
type deployment struct {
	t     testing.TB
	dir   string // everything
	data  string // keyd's --data
	flags []string
	keyd  *keydProcess
}

// deploy starts a keyd on a fresh directory; it is killed when the test ends.
func deploy(t testing.TB, flags ...string) *deployment {
	t.Helper()
	dir := tempDir(t)
	d := &deployment{t: t, dir: dir, data: filepath.Join(dir, "keyd"), flags: flags}
	t.Cleanup(func() {
		if d.keyd == nil {
			return
		}
		d.keyd.kill()
		stderr, err := os.ReadFile(d.keyd.stderr)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		for _, word := range []string{"DATA RACE", "panic", "goroutine "} {
			if at := bytes.Index(stderr, []byte(word)); at >= 0 {
				t.Errorf("keyd said:\n%.4000s", stderr[at:])
			}
		}
		if t.Failed() {
			t.Logf("keyd said:\n%s", d.keyd.said())
		}
	})
	d.start()
	return d
}

// start starts keyd on the data as they are.
func (d *deployment) start() {
	d.t.Helper()
	k, err := startKeyd(d.t.Context(), filepath.Join(bin, "keyd"), d.data, d.flags...)
	if err != nil {
		d.t.Fatal(err)
	}
	d.keyd = k
}

// startAt starts a keyd that listens elsewhere than on its socket.
func (d *deployment) startAt(target string) {
	d.t.Helper()
	k, err := launchKeyd(filepath.Join(bin, "keyd"), d.data, d.flags...)
	if err != nil {
		d.t.Fatal(err)
	}
	d.keyd = k
	k.address = target
	if err := k.waitServing(d.t.Context()); err != nil {
		d.t.Fatal(err)
	}
}

func (d *deployment) stop() {
	d.t.Helper()
	if err := d.keyd.stop(); err != nil {
		d.t.Fatal(err)
	}
}

// restart kills keyd and starts it again.
func (d *deployment) restart() {
	d.t.Helper()
	d.keyd.kill()
	d.start()
}

// client makes a client with connections and leases of its own.
func (d *deployment) client(opts ...sdk.Option) *sdk.Client {
	d.t.Helper()
	c, err := sdk.Dial(d.t.Context(), d.keyd.target(), opts...)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { c.Close() })
	return c
}

// conn makes a bare gRPC connection.
func (d *deployment) conn() *grpc.ClientConn {
	d.t.Helper()
	cc, err := grpc.NewClient(d.keyd.target(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { cc.Close() })
	return cc
}

// tenant makes a tenant with one class, "memory".
func (d *deployment) tenant(name string, lease time.Duration) {
	d.t.Helper()
	admin := keydv1.NewAdminServiceClient(d.client().Conn())
	// The anchor may take longer than this keyd waits for it.
	err := eventually(d.t, func(ctx context.Context) error {
		_, err := admin.CreateTenant(ctx, &keydv1.CreateTenantRequest{
			Tenant: name, RequestId: "create " + name,
			Classes: []*keydv1.Class{{
				Name: "memory", BucketWidth: durationpb.New(24 * time.Hour), Lease: durationpb.New(lease),
			}},
		})
		return err
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

// pinned fetches the ledger's verifier keys, to pin them.
func (d *deployment) pinned() *receipt.Keys {
	d.t.Helper()
	res, err := keydv1.NewLedgerServiceClient(d.client().Conn()).GetLedgerKey(d.t.Context(), &keydv1.GetLedgerKeyRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	keys, err := receipt.PinKeys(res.VerifierKeys...)
	if err != nil {
		d.t.Fatal(err)
	}
	return keys
}

// lethe runs the command line and returns what it printed and its exit code.
func (d *deployment) lethe(stdin string, args ...string) (stdout, stderr string, code int) {
	d.t.Helper()
	cmd := exec.CommandContext(d.t.Context(), filepath.Join(bin, "lethe"), args...)
	cmd.Env = append(os.Environ(), "LETHE_KEYD="+d.keyd.target())
	cmd.Stdin = strings.NewReader(stdin)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		d.t.Fatal(err)
	}
	return out.String(), said.String(), cmd.ProcessState.ExitCode()
}

func of(tenant, subject string) sdk.Target {
	return sdk.Target{Tenant: tenant, Subject: subject, Class: "memory"}
}

// fill makes keys of so many times 256 subjects of whom nothing more is wanted,
// so that a turn has something to do.
func (d *deployment) fill(batches int) {
	d.t.Helper()
	keys := keydv1.NewKeyServiceClient(d.conn())
	for batch := range batches {
		req := &keydv1.GetBlobKeysRequest{}
		for i := range 256 {
			req.Queries = append(req.Queries, &keydv1.BlobKeyQuery{
				Tenant: "acme", SubjectId: fmt.Appendf(nil, "filler %d %d", batch, i), Class: "memory", Purpose: keydv1.Purpose_PURPOSE_SEAL,
			})
		}
		if _, err := keys.GetBlobKeys(d.t.Context(), req); err != nil {
			d.t.Fatal(err)
		}
	}
}

// final fails unless the receipt of somebody's destruction says that it is
// sanitised and final.
func (d *deployment) final(l *life, pinned *receipt.Keys) {
	d.t.Helper()
	res, err := keydv1.NewLedgerServiceClient(d.conn()).GetReceipt(d.t.Context(), &keydv1.GetReceiptRequest{
		Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: l.request().RequestID},
	})
	if err != nil {
		d.t.Fatal(err)
	}
	v, err := receipt.Verify(res.Receipt, pinned)
	if err != nil {
		d.t.Fatal(err)
	}
	if st := v.Stages(); st.Sanitised.IsZero() || st.Final.IsZero() {
		d.t.Errorf("stages %+v", st)
	}
}

// bounded is a context that ends before a test hangs.
func bounded(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// lacking reports what the machine lacks: a failure where CI=true, where
// nothing may be lacking, and a skip that says so elsewhere.
func lacking(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("lacking: %s", what)
	}
	t.Skipf("not tested here, lacking: %s", what)
}

func destroyRequest(tenant, subject, requestID string) sdk.DestroyRequest {
	return sdk.DestroyRequest{Tenant: tenant, Subject: subject, RequestID: requestID, Reason: "gdpr-art17"}
}
