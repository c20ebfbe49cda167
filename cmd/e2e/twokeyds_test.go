package main

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lethe/sdk"
)

// TestTwoKeydsOnOneDirectory starts two keyds at once on one directory, one that
// is empty and one that is not: one of them serves, and the other ends and says
// why. Nothing that is started beside the one that serves takes anything from it,
// and when it was killed the next one starts at once.
func TestTwoKeydsOnOneDirectory(t *testing.T) {
	data := filepath.Join(tempDir(t), "keyd")
	var blob []byte
	backup := filepath.Join(tempDir(t), "keys.backup")
	for round := range 4 {
		var both [2]*keydProcess
		for i, socket := range []string{"one.sock", "two.sock"} {
			k, err := launchKeyd(filepath.Join(bin, "keyd"), data, "--listen", "unix:"+filepath.Join(data, socket))
			if err != nil {
				t.Fatal(err)
			}
			k.address = "unix://" + filepath.Join(data, socket)
			t.Cleanup(k.kill)
			both[i] = k
		}
		serves, ended := both[0], both[1]
		select {
		case <-both[1].exited:
		case <-both[0].exited:
			serves, ended = both[1], both[0]
		case <-time.After(30 * time.Second):
			t.Fatal("both run")
		}
		var exit *exec.ExitError
		if !errors.As(ended.err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("round %d: it ended with %v; want exit code 1", round, ended.err)
		}
		if said := ended.said(); !strings.Contains(said, "is locked by another") {
			t.Errorf("round %d: it does not say why:\n%s", round, said)
		}
		if err := serves.waitServing(t.Context()); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		d := &deployment{t: t, data: data, keyd: serves}
		if round == 0 {
			d.tenant("acme", time.Minute)
			var err error
			if blob, err = d.client().Seal(t.Context(), of("acme", "somebody"), []byte("something")); err != nil {
				t.Fatal(err)
			}
			if _, said, code := d.lethe("", "backup", "-o", backup); code != 0 {
				t.Fatalf("backup: %s", said)
			}
		}
		for _, args := range [][]string{
			{"restore", "--data", data, "--replay"},
			{"restore", "--data", data, "--backup", backup, "--force"},
			{"audit", "residue", "--store", filepath.Join(data, "store")},
		} {
			if _, said, code := d.lethe("", args...); code == 0 || !strings.Contains(said, "locked") {
				t.Errorf("round %d: lethe %v beside a keyd: %d, %s", round, args, code, said)
			}
		}
		c := d.client(sdk.WithRevocations(false))
		if plain, err := c.Open(t.Context(), of("acme", "somebody"), blob); err != nil || string(plain) != "something" {
			t.Errorf("round %d: the one that serves: %v", round, err)
		}
		if _, err := c.DestroyKey(t.Context(), destroyRequest("acme", "somebody else", "request")); err != nil {
			t.Errorf("round %d: the one that serves: %v", round, err)
		}
		serves.kill()
	}
}
