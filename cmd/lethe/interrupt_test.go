//go:build unix

package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

// begin starts a process that opens the stream blob into output and has come as
// far as it can get with the first 3 MiB: a pipe holds far less, so once they
// are written it has begun its output.
func (c *cli) begin(blob string, args ...string) (cmd *exec.Cmd, rest io.WriteCloser, stderr *bytes.Buffer) {
	c.t.Helper()
	cmd = c.process(append(append([]string{"open"}, whose...), args...)...)
	stderr = new(bytes.Buffer)
	cmd.Stderr = stderr
	rest, err := cmd.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = cmd.Process.Kill(); rest.Close() })
	if _, err := io.WriteString(rest, blob[:3<<20]); err != nil {
		c.t.Fatalf("%v: %s", err, stderr)
	}
	return cmd, rest, stderr
}

// heed has the processes of the test not ignore a signal that is ignored here,
// as under nohup, and which they would otherwise ignore as well.
func heed(t *testing.T, s os.Signal) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, s)
	t.Cleanup(func() { signal.Stop(got) })
}

func TestInterruptedOpenLeavesNothing(t *testing.T) {
	c := newCLI(t)
	blob := c.seal(pattern(8 << 20))
	for _, x := range []struct {
		signal syscall.Signal
		code   int
	}{{syscall.SIGINT, 130}, {syscall.SIGTERM, 143}, {syscall.SIGHUP, 129}, {syscall.SIGQUIT, 131}} {
		heed(t, x.signal)
		old := c.write("old", "old")
		for _, args := range [][]string{{"-o", c.path("new")}, {"--force", "-o", old}} {
			cmd, _, stderr := c.begin(blob, args...)
			if err := cmd.Process.Signal(x.signal); err != nil {
				t.Fatal(err)
			}
			if code := exitCode(t, cmd.Wait()); code != x.code {
				t.Errorf("%v: exit code %d, want %d: %s", x.signal, code, x.code, stderr)
			}
			if !strings.Contains(stderr.String(), exitWithCode(x.code).means) {
				t.Errorf("%v: it says %q", x.signal, stderr)
			}
			if c.read("old") != "old" {
				t.Errorf("%v: an existing file was touched", x.signal)
			}
			c.onlyFiles("old")
		}
	}
}

// Nothing can be cleaned up after SIGKILL, but no name is given to half a file,
// and where a file needs no name while it is written, nothing is left of it.
func TestKilledOpenTouchesNoFile(t *testing.T) {
	c := newCLI(t)
	blob := c.seal(pattern(8 << 20))
	old := c.write("old", "old")
	for _, args := range [][]string{{"-o", c.path("new")}, {"--force", "-o", old}} {
		cmd, _, _ := c.begin(blob, args...)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if code := exitCode(t, cmd.Wait()); code != -1 {
			t.Errorf("exit code %d", code)
		}
	}
	if f, err := openUnnamed(c.dir, 0o600); err == nil {
		f.Close()
		c.onlyFiles("old")
	}
	if c.read("old") != "old" {
		t.Error("an existing file was touched")
	}
	if _, err := os.Lstat(c.path("new")); err == nil {
		t.Error("half a file has the name of the whole")
	}
}

// The same process, let alone, completes; on a pipe as into a file.
func TestOpenFromASlowPipe(t *testing.T) {
	c := newCLI(t)
	content := pattern(8 << 20)
	blob := c.seal(content)
	cmd, rest, stderr := c.begin(blob, "-o", c.path("new"))
	if _, err := io.WriteString(rest, blob[3<<20:]); err != nil {
		t.Fatal(err)
	}
	rest.Close()
	if code := exitCode(t, cmd.Wait()); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if c.read("new") != content {
		t.Error("something else was opened")
	}
	c.onlyFiles("new")
}

// A stream whose source stops early is truncated, and what was written to a
// pipe before is authentic.
func TestOpenOfAPipeThatBreaksOff(t *testing.T) {
	c := newCLI(t)
	content := pattern(8 << 20)
	blob := c.seal(content)
	cmd := c.process(append([]string{"open"}, whose...)...)
	cmd.Stdin = strings.NewReader(blob[:headerSize(t, blob)+100*segmentSize])
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if code := exitCode(t, cmd.Run()); code != 22 {
		t.Errorf("exit code %d, want 22: %s", code, &stderr)
	}
	if !strings.HasPrefix(content, out.String()) {
		t.Error("what came out is not the beginning of what was sealed")
	}
}

// A reader of the output that goes away ends the command without a word.
func TestOutputClosedEarly(t *testing.T) {
	c := newCLI(t)
	blob := c.seal(pattern(8 << 20))
	cmd := c.process(append([]string{"open"}, whose...)...)
	cmd.Stdin = strings.NewReader(blob)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	out.Close()
	if code := exitCode(t, cmd.Wait()); code != 141 || stderr.Len() != 0 {
		t.Errorf("exit code %d, %q", code, &stderr)
	}
}

func TestInterruptInJSON(t *testing.T) {
	heed(t, os.Interrupt)
	c := newCLI(t)
	cmd, _, stderr := c.begin(c.seal(pattern(8<<20)), "--json", "-o", c.path("new"))
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	e := c.decode(stderr.String())["error"].(map[string]any)
	if e["outcome"] != "INTERRUPTED" || e["exit_code"] != float64(130) {
		t.Errorf("the error is %v", e)
	}
}

// An id given through a file descriptor, as the shell's <(…) does.
func TestSubjectThroughAFileDescriptor(t *testing.T) {
	c := newCLI(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	io.WriteString(w, "alice\n")
	w.Close()
	cmd := c.process("open", "--tenant", "acme", "--subject-file", "/dev/fd/3", "--class", "trace")
	cmd.Stdin = strings.NewReader(c.seal("content"))
	cmd.ExtraFiles = []*os.File{r}
	out, err := cmd.Output()
	if err != nil || string(out) != "content" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestNoCoreDumps(t *testing.T) {
	var before, after syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &before); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_CORE, &before)
	forbidCoreDumps()
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &after); err != nil || after.Cur != 0 {
		t.Errorf("a core of %d bytes may be dumped, %v", after.Cur, err)
	}
}
