package main

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"lethe/sdk"
)

// TestKilledWhileItReplays restores one backup over and over, and kills the
// replay (-9) at another point of it each time. keyd never serves in between;
// a replay that is run again completes what the killed one began; and whoever
// was destroyed stays destroyed, with the receipt of then.
func TestKilledWhileItReplays(t *testing.T) {
	d := deploy(t)
	d.tenant("acme", time.Minute)
	const people = 420
	name := func(i int) string { return fmt.Sprintf("person-%d", i) }
	app := d.client()
	blobs := make([][]byte, people)
	together(t, people, func(i int) (err error) {
		blobs[i], err = app.Seal(t.Context(), of("acme", name(i)), []byte(name(i)))
		return err
	})
	backup := filepath.Join(d.dir, "keys.backup")
	if _, said, code := d.lethe("", "backup", "-o", backup); code != 0 {
		t.Fatalf("backup: %s", said)
	}
	// All but every tenth are destroyed, some of them never seen before.
	gone := func(i int) bool { return i%10 != 0 }
	receipts := make([][]byte, people)
	together(t, people, func(i int) error {
		if !gone(i) {
			return nil
		}
		if i%7 == 0 {
			if _, err := app.DestroyKey(t.Context(), destroyRequest("acme", "never seen "+name(i), fmt.Sprint("never ", i))); err != nil {
				return err
			}
		}
		r, err := app.DestroyKey(t.Context(), destroyRequest("acme", name(i), fmt.Sprint("request ", i)))
		if err == nil {
			receipts[i] = r.Receipt
		}
		return err
	})
	d.stop()

	restore := func(args ...string) {
		t.Helper()
		if _, said, code := d.lethe("", append([]string{"restore", "--data", d.data}, args...)...); code != 0 {
			t.Fatalf("restore %v: %s", args, said)
		}
	}
	// How long a whole one takes.
	restore("--backup", backup, "--force")
	begun := time.Now()
	restore("--replay")
	whole := time.Since(begun)

	const cycles = 8
	killed := 0
	for i := range cycles {
		restore("--backup", backup, "--force")
		cmd := exec.Command(filepath.Join(bin, "lethe"), "restore", "--replay", "--data", d.data)
		var said bytes.Buffer
		cmd.Stderr = &said
		begun := time.Now()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		kill := time.AfterFunc(whole*time.Duration(i+1)/(cycles+1), func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		kill.Stop()
		if err == nil { // faster than was thought
			whole = min(whole, time.Since(begun))
		} else {
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Exited() {
				t.Fatalf("the replay ended by itself: %v: %s", err, said.String())
			}
			killed++
			k, err := launchKeyd(filepath.Join(bin, "keyd"), d.data, d.flags...)
			if err != nil {
				t.Fatal(err)
			}
			select {
			case <-k.exited:
				if k.err == nil {
					t.Fatal("keyd ended without an error on a store that is not replayed")
				}
			case <-time.After(30 * time.Second):
				k.kill()
				// Only if the replay was done, but for its last word.
				if _, out, code := d.lethe("", "restore", "--replay", "--data", d.data); code != 0 {
					t.Fatalf("keyd serves a store that is not replayed: %s", out)
				}
			}
		}
		restore("--replay")
	}
	if killed == 0 {
		t.Error("no replay was killed")
	}
	t.Logf("%d of %d replays killed; a whole one takes %v", killed, cycles, whole)

	d.start()
	app = d.client()
	together(t, people, func(i int) error {
		got, err := app.Open(t.Context(), of("acme", name(i)), blobs[i])
		if !gone(i) {
			if err != nil || string(got) != name(i) {
				return fmt.Errorf("%s: %w", name(i), err)
			}
			return nil
		}
		if !errors.Is(err, sdk.ErrErased) {
			return fmt.Errorf("%s opens after it was destroyed: %w", name(i), err)
		}
		if i%7 == 0 {
			if _, err := app.Seal(t.Context(), of("acme", "never seen "+name(i)), nil); !errors.Is(err, sdk.ErrErased) {
				return fmt.Errorf("a fence before %s was forgotten: %w", name(i), err)
			}
		}
		again, err := app.DestroyKey(t.Context(), destroyRequest("acme", name(i), fmt.Sprint("request ", i)))
		if err != nil || !bytes.Equal(again.Receipt, receipts[i]) {
			return fmt.Errorf("%s: another receipt: %w", name(i), err)
		}
		return nil
	})
}
