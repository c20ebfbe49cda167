//go:build pkcs11

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	keydv1 "lethe/proto/keyd/v1"
)

// softHSM makes a SoftHSM token and returns the environment that finds it and
// the flags that name it.
func softHSM(t *testing.T) (env, flags []string) {
	t.Helper()
	var module string
	for _, path := range []string{
		os.Getenv("SOFTHSM2_MODULE"),
		"/usr/lib/softhsm/libsofthsm2.so",
		"/usr/lib64/softhsm/libsofthsm2.so", "/usr/lib64/libsofthsm2.so",
		"/usr/local/lib/softhsm/libsofthsm2.so", "/opt/homebrew/lib/softhsm/libsofthsm2.so",
	} {
		if _, err := os.Stat(path); path != "" && err == nil {
			module = path
			break
		}
	}
	if module == "" {
		t.Fatal("SoftHSM is missing: install the package softhsm2, or name the module in SOFTHSM2_MODULE")
	}
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tokens := filepath.Join(dir, "tokens")
	if err := os.Mkdir(tokens, 0o700); err != nil {
		t.Fatal(err)
	}
	env = []string{"SOFTHSM2_CONF=" + write("softhsm2.conf", fmt.Sprintf("directories.tokendir = %s\nobjectstore.backend = file\nlog.level = ERROR\n", tokens))}
	pin := write("pin", "4711-user\n")
	init := exec.Command("softhsm2-util", "--init-token", "--free", "--label", "lethe", "--so-pin", "0815-officer", "--pin", "4711-user", "--module", module)
	init.Env = append(os.Environ(), env...)
	if out, err := init.CombinedOutput(); err != nil {
		t.Fatalf("softhsm2-util: %v\n%s", err, out)
	}
	return env, []string{"--kms", "pkcs11", "--pkcs11-module", module, "--pkcs11-token", "lethe", "--pkcs11-pin-file", pin}
}

// TestPKCS11 runs keyd on a SoftHSM token, until the first epoch's root is
// destroyed there and the epoch is closed.
func TestPKCS11(t *testing.T) {
	t.Parallel()
	data := dataDir(t)
	env, flags := softHSM(t)
	running := append(flags, "--kek-lease", "1s", "--soak", "1s", "--root-waiting", "1s")
	d, client := live(t, data, env, running...)
	if c := component(t, client, "kms"); !c.Healthy || !strings.Contains(c.Detail, "pkcs11") {
		t.Errorf("the KMS's status: %v", c)
	}
	first := awaitEpoch(t, client, 1, keydv1.EpochState_EPOCH_STATE_CLOSED)
	if first.KmsKind != "pkcs11" || !strings.HasPrefix(first.RootId, "pkcs11-1-") {
		t.Errorf("the first epoch's root: %v", first)
	}
	d.stop(t)

	wrong := filepath.Join(t.TempDir(), "pin")
	if err := os.WriteFile(wrong, []byte("no-such-pin\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		flags []string
		want  string
	}{
		{append(flags[:len(flags):len(flags)], "--pkcs11-token", "another"), "no such token"},
		{append(flags[:len(flags):len(flags)], "--pkcs11-module", wrong), "cannot be loaded"},
		{append(flags[:len(flags):len(flags)], "--pkcs11-pin-file", wrong), "the PIN is refused"},
		{append(flags[:len(flags):len(flags)], "--pkcs11-pin-file", filepath.Join(data, "store", "pin")), "inside the key store's directory"},
	} {
		said := fails(t, data, env, test.flags...)
		if !strings.Contains(said, test.want) || strings.Contains(said, "no-such-pin") {
			t.Errorf("%v: %s", test.flags[6:], said)
		}
	}
	d, _ = start(t, data, env, flags...)
	d.stop(t)
}
