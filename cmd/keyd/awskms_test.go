package main

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
)

const (
	awsRegion  = "eu-central-1"
	awsAccount = "111122223333"
)

// startEmulator runs local-kms, which other people wrote, from the tools
// module, and returns its URL.
func startEmulator(t *testing.T) string {
	t.Helper()
	tool := exec.Command("go", "tool", "-n", "local-kms")
	tool.Dir = filepath.Join("..", "..", "tools")
	tool.Stderr = os.Stderr
	exe, err := tool.Output()
	if err != nil {
		t.Fatalf("building local-kms from the tools module: %v", err)
	}
	data := t.TempDir()
	for range 5 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		l.Close()
		cmd := exec.Command(strings.TrimSpace(string(exe)))
		cmd.Env = []string{
			"PORT=" + port, "KMS_REGION=" + awsRegion, "KMS_ACCOUNT_ID=" + awsAccount,
			"KMS_DATA_PATH=" + data, "KMS_SEED_PATH=" + filepath.Join(data, "none.yaml"),
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { cmd.Wait(); close(ended) }()
		t.Cleanup(func() { cmd.Process.Kill(); <-ended })
		for alive := true; alive; {
			if res, err := http.Get("http://127.0.0.1:" + port); err == nil {
				res.Body.Close()
				return "http://127.0.0.1:" + port
			}
			select {
			case <-ended: // somebody else took the port
				alive = false
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	t.Fatal("local-kms does not start")
	return ""
}

// TestAWSKMS runs keyd on the emulator of AWS KMS: until the first epoch's root
// is pending deletion there, and remembered as such.
func TestAWSKMS(t *testing.T) {
	if testing.Short() {
		t.Skip("building the emulator takes a minute the first time")
	}
	t.Parallel()
	data := dataDir(t)
	env := []string{
		"AWS_ACCESS_KEY_ID=AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY=secret", "AWS_SESSION_TOKEN=",
		"AWS_CONFIG_FILE=" + os.DevNull, "AWS_SHARED_CREDENTIALS_FILE=" + os.DevNull,
	}
	flags := []string{
		"--kms", "awskms", "--aws-region", awsRegion, "--aws-endpoint", startEmulator(t),
		"--kek-lease", "1s", "--soak", "1s",
	}
	d, client := live(t, data, env, flags...)
	if c := component(t, client, "kms"); !c.Healthy || !strings.Contains(c.Detail, "awskms") {
		t.Errorf("the KMS's status: %v", c)
	}
	first := awaitEpoch(t, client, 1, keydv1.EpochState_EPOCH_STATE_RETIRING)
	if first.KmsKind != "awskms" || !strings.HasPrefix(first.RootId, "arn:aws:kms:"+awsRegion+":"+awsAccount+":key/") {
		t.Errorf("the first epoch's root: %v", first)
	}
	if wait := time.Until(first.Due.AsTime()); wait < 6*24*time.Hour || wait > 8*24*time.Hour {
		t.Errorf("the root is due in %v", wait)
	}
	evidence, err := os.ReadFile(filepath.Join(data, "kms", "aws-evidence"))
	if err != nil || !bytes.Contains(evidence, []byte(first.RootId)) {
		t.Errorf("the evidence is %q, %v", evidence, err)
	}
	d.stop(t)

	// It is read when keyd starts, and a damaged one is not passed over.
	if err := os.WriteFile(filepath.Join(data, "kms", "aws-evidence"), evidence[:len(evidence)-2], 0o600); err != nil {
		t.Fatal(err)
	}
	if said := fails(t, data, env, flags...); !strings.Contains(said, "evidence file is damaged") {
		t.Errorf("with damaged evidence: %s", said)
	}
	if said := fails(t, data, nil); !strings.Contains(said, "the KMS in "+filepath.Join(data, "kms", "roots")) {
		t.Errorf("a store whose KMS is another, with --kms local: %s", said)
	}
}
