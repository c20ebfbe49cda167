package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startDemo starts the demo with binaries from binDir, with a directory for
// temporary files of its own.
func startDemo(t *testing.T, binDir string) (cmd *exec.Cmd, out *bytes.Buffer, temp string) {
	t.Helper()
	return startActs(t, "demo", binDir)
}

// startActs starts the demo or the drill.
func startActs(t *testing.T, which, binDir string) (cmd *exec.Cmd, out *bytes.Buffer, temp string) {
	t.Helper()
	temp, out = tempDir(t), new(bytes.Buffer)
	cmd = exec.CommandContext(t.Context(), filepath.Join(bin, "e2e"), which, "--bin", binDir)
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out, temp
}

// leavesNothing fails the test if the demo left files, or processes that use
// its directory.
func leavesNothing(t *testing.T, temp string) {
	t.Helper()
	left, err := os.ReadDir(temp)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		t.Errorf("the demo left %s", e.Name())
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte(temp)) {
			t.Errorf("the demo left a process: %q", b)
		}
	}
}

// TestDemo runs the demo as make does.
func TestDemo(t *testing.T) {
	cmd, out, temp := startDemo(t, bin)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i := range acts {
		if !strings.Contains(out.String(), fmt.Sprintf("\n%d. %s\n", i+1, acts[i].title)) {
			t.Errorf("act %d was not played", i+1)
		}
	}
	leavesNothing(t, temp)
}

// TestDrill runs the restore drill, and then with a lethe that lies.
func TestDrill(t *testing.T) {
	cmd, out, temp := startActs(t, "drill", bin)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i := range drillActs {
		if !strings.Contains(out.String(), fmt.Sprintf("\n%d. %s\n", i+1, drillActs[i].title)) {
			t.Errorf("act %d was not played", i+1)
		}
	}
	leavesNothing(t, temp)
	for script, act := range map[string]int{
		`[ "$1 $2" = "restore --replay" ] && exit 0`: 3,
		`[ "$1" = backup ] && exit 0`:                3,
	} {
		cmd, out, temp := startActs(t, "drill", lyingLethe(t, script))
		if err := cmd.Wait(); err == nil || !strings.Contains(out.String(), fmt.Sprintf("e2e: act %d: ", act)) {
			t.Errorf("with %q: %v\n%s", script, err, out)
		}
		leavesNothing(t, temp)
	}
}

// lyingLethe is a directory with the true keyd, and a lethe that runs a script
// first.
func lyingLethe(t *testing.T, script string) (dir string) {
	t.Helper()
	dir = tempDir(t)
	if err := os.Symlink(filepath.Join(bin, "keyd"), filepath.Join(dir, "keyd")); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("#!/bin/sh\n%s\nexec %s \"$@\"\n", script, filepath.Join(bin, "lethe"))
	if err := os.WriteFile(filepath.Join(dir, "lethe"), []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestDemoInterrupted interrupts the demo at several points.
func TestDemoInterrupted(t *testing.T) {
	for _, title := range []string{acts[0].title, acts[1].title, acts[6].title} {
		cmd, out, temp := startDemo(t, bin)
		_ = out
		waitFor(t, func() bool { return len(entries(t, temp)) > 0 })
		switch title {
		case acts[1].title:
			waitFor(t, func() bool { return glob(temp, "*/ledger.key") })
		case acts[6].title:
			waitFor(t, func() bool { return glob(temp, "*/receipt.json") })
		}
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Errorf("interrupted in %q, it succeeds", title)
		}
		leavesNothing(t, temp)
	}
}

// TestDemoChecksItsClaims gives the demo a lethe that lies: it must not
// believe it.
func TestDemoChecksItsClaims(t *testing.T) {
	for what, lie := range map[string]struct {
		script string
		act    int // in which it is found out
	}{
		"verifies every receipt": {`[ "$1 $2" = "receipt verify" ] && exit 0`, 12},
		"destroys nothing":       {`[ "$1" = destroy ] && exit 0`, 5},
		"seals nothing":          {`[ "$1" = seal ] && for a; do f=$prev; prev=$a; done && cp "$prev" "$f" && exit 0`, 2},
		"releases nothing":       {`[ "$1 $2" = "hold release" ] && exit 0`, 11},
		"replays nothing":        {`[ "$1 $2" = "restore --replay" ] && exit 0`, 13},
		"finds nothing":          {`[ "$1 $2" = "audit residue" ] && exit 0`, 15},
		"opens nothing":          {`[ "$1" = open ] && exit 10`, 3},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			cmd, out, temp := startDemo(t, lyingLethe(t, lie.script))
			if err := cmd.Wait(); err == nil || !strings.Contains(out.String(), fmt.Sprintf("e2e: act %d: ", lie.act)) {
				t.Errorf("with a lethe that %s: %v\n%s", what, err, out)
			}
			leavesNothing(t, temp)
		})
	}
}

func entries(t *testing.T, dir string) []os.DirEntry {
	t.Helper()
	e, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func glob(dir, pattern string) bool {
	m, err := filepath.Glob(filepath.Join(dir, pattern))
	return err == nil && len(m) > 0
}

func waitFor(t *testing.T, what func() bool) {
	t.Helper()
	for range 3000 {
		if what() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("it does not come about")
}
