package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"lethe/sdk/envelope"
	"lethe/sdk/sdktest"
)

// asMain makes the test binary be lethe itself, for what needs a process.
const asMain = "LETHE_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
		return
	}
	for _, name := range []string{"LETHE_KEYD", "LETHE_TLS_CA", "LETHE_TLS_CERT", "LETHE_TLS_KEY"} {
		os.Unsetenv(name)
	}
	os.Exit(m.Run())
}

// cli runs command lines against one keyd.
type cli struct {
	t    *testing.T
	keyd *sdktest.Keyd // nil: there is none
	dir  string
	app  func(*app) // changes how the next command lines run
}

func newCLI(t *testing.T, opts ...sdktest.Option) *cli {
	t.Helper()
	c := offlineCLI(t)
	c.keyd = sdktest.Start(t, opts...)
	c.ok("", "tenant", "create", "acme")
	return c
}

func offlineCLI(t *testing.T) *cli { return &cli{t: t, dir: t.TempDir()} }

// args adds to a command line where keyd is.
func (c *cli) args(args []string) []string {
	target := "unix://" + filepath.Join(c.dir, "nobody-listens.sock")
	if c.keyd != nil {
		target = c.keyd.Target()
	}
	return append([]string{"--keyd", target}, args...)
}

type result struct {
	code     int
	out, err string
}

// run runs a command line in this process.
func (c *cli) run(stdin string, args ...string) result {
	c.t.Helper()
	var out, err bytes.Buffer
	a := newApp(strings.NewReader(stdin), &out, &err)
	if c.app != nil {
		c.app(a)
	}
	code := a.run(c.t.Context(), c.args(args))
	if n := len(a.files.begun); n != 0 {
		c.t.Errorf("lethe %s: %d outputs are neither complete nor given up", strings.Join(args, " "), n)
	}
	return result{code, out.String(), err.String()}
}

// ok runs a command line that must succeed, and returns its output.
func (c *cli) ok(stdin string, args ...string) string {
	c.t.Helper()
	r := c.run(stdin, args...)
	if r.code != 0 {
		c.t.Fatalf("lethe %s: exit code %d: %s", strings.Join(args, " "), r.code, r.err)
	}
	return r.out
}

// fails runs a command line that must end with this code, and returns its error.
func (c *cli) fails(code int, stdin string, args ...string) string {
	c.t.Helper()
	r := c.run(stdin, args...)
	if r.code != code {
		c.t.Fatalf("lethe %s: exit code %d, want %d: %s", strings.Join(args, " "), r.code, code, r.err)
	}
	if r.err == "" {
		c.t.Errorf("lethe %s: exit code %d without a word", strings.Join(args, " "), r.code)
	}
	return r.err
}

// object runs a command line with --json that must succeed, and decodes its output.
func (c *cli) object(stdin string, args ...string) map[string]any {
	c.t.Helper()
	return c.decode(c.ok(stdin, append([]string{"--json"}, args...)...))
}

// decode reads the one JSON object on one line that text must be.
func (c *cli) decode(text string) map[string]any {
	c.t.Helper()
	if strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, "\n") {
		c.t.Fatalf("not one line: %q", text)
	}
	var v map[string]any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		c.t.Fatalf("not a JSON object: %v: %q", err, text)
	}
	return v
}

// process prepares a command line to run as a process of its own.
func (c *cli) process(args ...string) *exec.Cmd {
	c.t.Helper()
	self, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(self, c.args(args)...)
	cmd.Env = append(os.Environ(), asMain+"=1")
	return cmd
}

// exitCode is what a process ended with; a signal's is -1.
func exitCode(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	t.Fatal(err)
	return 0
}

// path is a file's name in the test's directory.
func (c *cli) path(name string) string { return filepath.Join(c.dir, name) }

// write makes a file and returns its path.
func (c *cli) write(name, content string) string {
	c.t.Helper()
	if err := os.WriteFile(c.path(name), []byte(content), 0o644); err != nil {
		c.t.Fatal(err)
	}
	return c.path(name)
}

func (c *cli) read(name string) string {
	c.t.Helper()
	b, err := os.ReadFile(c.path(name))
	if err != nil {
		c.t.Fatal(err)
	}
	return string(b)
}

// onlyFiles checks which files the test's directory holds: no more, and no less.
func (c *cli) onlyFiles(want ...string) {
	c.t.Helper()
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		c.t.Fatal(err)
	}
	have := map[string]bool{}
	for _, e := range entries {
		have[e.Name()] = true
	}
	for _, w := range want {
		if !have[w] {
			c.t.Errorf("%s is missing", w)
		}
		delete(have, w)
	}
	for name := range have {
		c.t.Errorf("%s was left behind", name)
	}
}

// pattern is n bytes that do not repeat in any way that a stream has.
func pattern(n int) string {
	b := make([]byte, n)
	x := uint32(1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return string(b)
}

// onTerminal makes every standard stream a terminal.
func onTerminal(a *app) { a.isTerminal = func(any) bool { return true } }

// headerSize is the size of a blob's header.
func headerSize(t *testing.T, blob string) int {
	t.Helper()
	_, n, err := envelope.ParseHeader([]byte(blob))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// newVerifierKey makes a key that signs nothing.
func newVerifierKey(t *testing.T, name string) string {
	t.Helper()
	_, verifier, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		t.Fatal(err)
	}
	return verifier
}
