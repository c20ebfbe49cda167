package keys_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/local"
	keydv1 "lethe/proto/keyd/v1"
)

// An old roots file that is put back while keyd is stopped brings the root of a
// closed epoch back. keyd says so for as long as it is there; what the KMS does
// not tell changes nothing.
func TestRootOfAClosedEpochExistsAgain(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	f := newRefusals(kms.KMS)
	kms.KMS = f
	p := r.populate(2)
	p.destroy("person-0")
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	file := filepath.Join(r.dir, "roots")
	old := readFile(t, file)
	r.closeEpoch(1)
	health := func(k *keys.Keys) *keydv1.ComponentStatus {
		t.Helper()
		for _, c := range k.Status(t.Context()).Components {
			if c.Name == "kms" {
				return c
			}
		}
		t.Fatal("no component kms")
		return nil
	}
	look := func(when string, alive bool) {
		t.Helper()
		r.advance(11 * time.Minute)
		if _, err := r.StepDuties(t.Context()); err != nil {
			t.Fatal(err)
		}
		c := health(r.Keys)
		if c.Healthy == alive || strings.Contains(c.Detail, "the root of closed epoch 1 exists again") != alive {
			t.Errorf("%s: %v, %q", when, c.Healthy, c.Detail)
		}
	}
	look("closed", false)
	newest := readFile(t, file)
	putBack := func(b []byte) {
		t.Helper()
		r.Keys.Close()
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		roots, err := local.Open(local.Options{Path: file, Keyfile: filepath.Join(r.dir, "keyfile"), Clock: r.clock.Now})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { roots.Close() })
		f.KMS = roots
		r.Keys = r.another()
	}

	putBack(old)
	look("an old file", true)
	f.set("describe", keys.ErrRootUnknown)
	look("no word about it", true)
	f.clear()
	root := r.epoch(1).RootId
	if _, err := f.ScheduleDestruction(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	look("about to be destroyed", true)
	r.advance(2 * time.Hour)
	look("destroyed", false)

	putBack(old)
	look("an old file, again", true)
	putBack(newest)
	f.set("describe", keys.ErrRootUnknown)
	look("unknown is not alive", false)
	f.clear()
	look("the newest file", false)
	p.check()
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
