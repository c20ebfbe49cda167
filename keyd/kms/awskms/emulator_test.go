package awskms

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/awskms/awstest"
	"lethe/keyd/kms/kmstest"
)

// The emulator is a second opinion on the protocol: local-kms, which other
// people wrote, built from the tools module. It differs from AWS: a cancelled
// key is enabled at once, and the first bytes of a ciphertext (the key's ARN
// and version) are not authenticated when the call names the key.
// Its waiting period cannot be passed.
type emulator struct {
	exe, data, port string
	cmd             *exec.Cmd
}

func buildEmulator(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("go", "tool", "-n", "local-kms")
	cmd.Dir = filepath.Join("..", "..", "..", "tools")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("building local-kms from the tools module: %v", err)
	}
	return strings.TrimSpace(string(out))
}

func (e *emulator) start(t *testing.T) {
	t.Helper()
	for range 5 {
		if e.port == "" {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			_, e.port, _ = net.SplitHostPort(l.Addr().String())
			l.Close()
		}
		e.cmd = exec.Command(e.exe)
		e.cmd.Env = []string{
			"PORT=" + e.port, "KMS_REGION=" + awstest.Region, "KMS_ACCOUNT_ID=" + awstest.Account,
			"KMS_DATA_PATH=" + e.data, "KMS_SEED_PATH=" + filepath.Join(e.data, "none.yaml"),
		}
		if err := e.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func(cmd *exec.Cmd) { cmd.Wait(); close(ended) }(e.cmd)
		for {
			resp, err := http.Get(e.url())
			if err == nil {
				resp.Body.Close()
				return
			}
			select {
			case <-ended: // somebody else took the port
				e.port = ""
			case <-time.After(10 * time.Millisecond):
				continue
			case <-t.Context().Done():
				t.Fatal("the test ended before local-kms began")
			}
			break
		}
	}
	t.Fatal("local-kms does not start")
}

func (e *emulator) stop() {
	if e.cmd != nil && e.cmd.Process != nil {
		e.cmd.Process.Kill()
		// Its port is free once nobody answers.
		for {
			c, err := net.Dial("tcp", "127.0.0.1:"+e.port)
			if err != nil {
				break
			}
			c.Close()
		}
		e.cmd = nil
	}
}

func (e *emulator) url() string { return "http://127.0.0.1:" + e.port }

func TestConformanceEmulator(t *testing.T) {
	if testing.Short() {
		t.Skip("building the emulator takes a minute the first time")
	}
	exe := buildEmulator(t)
	kmstest.Run(t, func(t *testing.T) kmstest.Fixture {
		e := &emulator{exe: exe, data: t.TempDir()}
		e.start(t)
		t.Cleanup(e.stop)
		o := Options{
			Region: awstest.Region, Endpoint: e.url(),
			Credentials: credentials.NewStaticCredentialsProvider("AKIDEXAMPLE", "secret", ""),
			MaxBackoff:  time.Millisecond,
		}
		return kmstest.Fixture{
			KMS:    mustNew(t, o),
			Reopen: func(t *testing.T) keys.KMS { return mustNew(t, o) },
			Break: func(t *testing.T) func() {
				e.stop()
				return func() { e.start(t) }
			},
			UnknownRoot: unknownRoot,
			Now:         time.Now,
			// The length of the ARN, the ARN, and four bytes of version.
			Unauthenticated: 1 + len(unknownRoot) + 4,
		}
	})
}
