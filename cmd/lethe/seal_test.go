package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"lethe/sdk/envelope"
)

// whose are the flags that most tests seal and open with.
var whose = []string{"--tenant", "acme", "--subject", "alice", "--class", "trace"}

func (c *cli) seal(content string, more ...string) string {
	c.t.Helper()
	return c.ok(content, append(append([]string{"seal"}, whose...), more...)...)
}

func (c *cli) open(blob string, more ...string) string {
	c.t.Helper()
	return c.ok(blob, append(append([]string{"open"}, whose...), more...)...)
}

func TestSealAndOpen(t *testing.T) {
	c := newCLI(t)
	for _, n := range []int{0, 1, 1000, streamFrom - 1, streamFrom, streamFrom + 1, 3 << 20} {
		for _, bound := range [][]string{nil, {"--context", "row=7", "--context", "thread=a=b"}} {
			content := pattern(n)
			blob := c.seal(content, bound...)
			h, _, err := envelope.ParseHeader([]byte(blob))
			if err != nil {
				t.Fatal(err)
			}
			want := envelope.OneShot
			if n >= streamFrom {
				want = envelope.Stream
			}
			if h.Form != want || h.Bound != (bound != nil) {
				t.Errorf("%d bytes: %v, bound %v", n, h.Form, h.Bound)
			}
			if c.open(blob, bound...) != content {
				t.Errorf("%d bytes: something else was opened", n)
			}

			// The same through files.
			os.Remove(c.path("sealed"))
			os.Remove(c.path("opened"))
			c.seal("", append(bound, "-o", c.path("sealed"), c.write("plain", content))...)
			c.open("", append(bound, "-o", c.path("opened"), c.path("sealed"))...)
			if c.read("opened") != content {
				t.Errorf("%d bytes: something else was opened from a file", n)
			}
			if fi, err := os.Stat(c.path("opened")); err != nil || fi.Mode() != 0o600 {
				t.Errorf("the plaintext's file has mode %v, %v", fi.Mode(), err)
			}
			c.onlyFiles("plain", "sealed", "opened")
		}
	}
}

func TestSealAndOpenInPlace(t *testing.T) {
	c := newCLI(t)
	file := c.write("file", "content")
	c.seal("", "--force", "-o", file, file)
	if !envelope.IsSealed([]byte(c.read("file"))) {
		t.Error("it is not sealed")
	}
	c.open("", "--force", "-o", file, file)
	if c.read("file") != "content" {
		t.Errorf("it is %q", c.read("file"))
	}
	c.onlyFiles("file")
}

// A subject's id in a file is taken byte for byte, but for one line feed at
// the end.
func TestSubjectFile(t *testing.T) {
	c := newCLI(t)
	for content, id := range map[string]string{
		"alice":                          "alice",
		"alice\n":                        "alice",
		"alice\n\n":                      "alice\n",
		"alice\r\n":                      "alice\r",
		" alice ":                        " alice ",
		"a\nb\n":                         "a\nb",
		"Zoë\n":                          "Zoë",
		"Zoe\u0308\n":                    "Zoe\u0308",
		strings.Repeat("x", 1024) + "\n": strings.Repeat("x", 1024),
	} {
		file := c.write("id", content)
		blob := c.ok("data", "seal", "--tenant", "acme", "--subject-file", file, "--class", "trace")
		if got := c.ok(blob, "open", "--tenant", "acme", "--subject", id, "--class", "trace"); got != "data" {
			t.Errorf("%q: opened %q", content, got)
		}
		if id != "alice" {
			c.fails(19, blob, "open", "--tenant", "acme", "--subject", "alice", "--class", "trace")
		}
		// From the standard input, with the data in a file.
		os.Remove(c.path("opened"))
		if got := c.ok(content, "open", "--tenant", "acme", "--subject-file", "-", "--class", "trace", c.write("blob", blob)); got != "data" {
			t.Errorf("%q from the standard input: opened %q", content, got)
		}
	}
	for _, content := range []string{"", "\n", "\x00", "a\x00\n", "\xff", strings.Repeat("x", 1025), strings.Repeat("x", 1<<20)} {
		r := c.run("data", "seal", "--tenant", "acme", "--subject-file", c.write("id", content), "--class", "trace")
		if r.code != 2 || r.out != "" {
			t.Errorf("an id of %d bytes: exit code %d", len(content), r.code)
		}
	}
	c.fails(2, "alice", "seal", "--tenant", "acme", "--subject-file", "-", "--class", "trace")
	c.fails(2, "alice", "seal", "--tenant", "acme", "--subject-file", "-", "--class", "trace", "-")
	c.fails(2, "x", "seal", "--tenant", "acme", "--subject", "a", "--subject-file", "b", "--class", "trace")
}

func TestBlobsAndTerminals(t *testing.T) {
	c := newCLI(t)
	blob := c.seal("content")
	c.app = onTerminal
	if text := c.fails(2, "content", append([]string{"seal"}, whose...)...); !strings.Contains(text, "terminal") {
		t.Errorf("the error is %q", text)
	}
	c.seal("content", "-o", c.path("sealed"))
	// Nobody types a blob.
	c.fails(2, "", append([]string{"open"}, whose...)...)
	c.fails(2, "", "inspect")
	if c.open("", c.path("sealed")) != "content" {
		t.Error("a file does not open on a terminal")
	}
	// A blob on what is no terminal, while errors go to one.
	c.app = func(a *app) { a.isTerminal = func(s any) bool { return s == a.err } }
	if !envelope.IsSealed([]byte(c.seal("content"))) || c.open(blob) != "content" {
		t.Error("it is taken for a terminal")
	}
}

// A stream that is damaged late gives what is authentic before, and no more, to
// the standard output, and nothing to a file.
func TestOpenOfADamagedStream(t *testing.T) {
	c := newCLI(t)
	content := pattern(5 << 20)
	blob := c.seal(content)
	head := headerSize(t, blob)
	for name, x := range map[string]struct {
		blob string
		code int
	}{
		"changed":      {blob[:4<<20] + string(blob[4<<20]^1) + blob[4<<20+1:], 21},
		"cut":          {blob[:head+60*segmentSize], 22},
		"extended":     {blob + "x", 21},
		"without head": {blob[:head+10], 22},
	} {
		r := c.run(x.blob, append([]string{"open"}, whose...)...)
		if r.code != x.code {
			t.Errorf("%s: exit code %d, want %d: %s", name, r.code, x.code, r.err)
		}
		if !strings.HasPrefix(content, r.out) || len(r.out) == len(content) {
			t.Errorf("%s: %d bytes came out that are no proper beginning", name, len(r.out))
		}
		if wrote := fmt.Sprintf("%d bytes", len(r.out)); len(r.out) > 0 && !strings.Contains(r.err, wrote) {
			t.Errorf("%s: the error does not tell of %s: %s", name, wrote, r.err)
		}

		old := c.write("old", "old")
		c.fails(x.code, x.blob, append(append([]string{"open"}, whose...), "-o", c.path("new"))...)
		c.fails(x.code, x.blob, append(append([]string{"open"}, whose...), "--force", "-o", old)...)
		c.fails(1, blob, append(append([]string{"open"}, whose...), "-o", old)...)
		if c.read("old") != "old" {
			t.Errorf("%s: an existing file was touched", name)
		}
		c.onlyFiles("old")
	}
}

// Once the subject is destroyed, a failing open leaves every file as it was.
func TestOpenAfterDestroy(t *testing.T) {
	c := newCLI(t)
	small, stream := c.seal("content"), c.seal(pattern(2<<20))
	others := c.ok("other", "seal", "--tenant", "acme", "--subject", "bob", "--class", "trace")
	c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "gdpr-art17", "--yes")
	old := c.write("old", "old")
	for _, blob := range []string{small, stream} {
		if r := c.run(blob, append([]string{"open"}, whose...)...); r.code != 10 || r.out != "" {
			t.Errorf("exit code %d, output %q", r.code, r.out)
		}
		c.fails(10, blob, append(append([]string{"open"}, whose...), "-o", c.path("new"))...)
		c.fails(10, blob, append(append([]string{"open"}, whose...), "-o", old, "--force")...)
	}
	c.fails(10, "late", append(append([]string{"seal"}, whose...), "-o", c.path("sealed"))...)
	if got := c.ok(others, "open", "--tenant", "acme", "--subject", "bob", "--class", "trace"); got != "other" {
		t.Errorf("somebody else's opens to %q", got)
	}
	if c.read("old") != "old" {
		t.Error("an existing file was touched")
	}
	c.onlyFiles("old")
}

// failAfter passes n bytes on and then fails.
type failAfter struct {
	n   int
	err error
}

func (f *failAfter) Write(p []byte) (int, error) {
	if len(p) <= f.n {
		f.n -= len(p)
		return len(p), nil
	}
	n := f.n
	f.n = 0
	return n, f.err
}

func (f *failAfter) Read(p []byte) (int, error) {
	if f.n == 0 {
		return 0, f.err
	}
	n := copy(p, pattern(min(len(p), f.n)))
	f.n -= n
	return n, nil
}

func TestFailingInputsAndOutputs(t *testing.T) {
	c := newCLI(t)
	small, stream := c.seal("content"), c.seal(pattern(3<<20))
	full := errors.New("no space left")
	for _, n := range []int{0, 5, 2 << 20} {
		for _, x := range []struct {
			stdin string
			args  []string
		}{
			{pattern(3 << 20), append([]string{"seal"}, whose...)},
			{stream, append([]string{"open"}, whose...)},
			{pattern(1000), append([]string{"seal"}, whose...)},
			{small, append([]string{"open"}, whose...)},
		} {
			if n > len(x.stdin) {
				continue
			}
			c.app = func(a *app) { a.out = &failAfter{n, full} }
			c.fails(1, x.stdin, x.args...)
			c.app = func(a *app) { a.out = &failAfter{n, fmt.Errorf("write: %w", syscall.EPIPE)} }
			if r := c.run(x.stdin, x.args...); r.code != 141 || r.err != "" {
				t.Errorf("lethe %s, output closed: exit code %d, %q", x.args[0], r.code, r.err)
			}
			c.app = func(a *app) { a.in = io.MultiReader(strings.NewReader(x.stdin[:n]), &failAfter{0, full}) }
			if r := c.run("", append(x.args, "-o", c.path("out"))...); r.code == 0 || !strings.Contains(r.err, full.Error()) {
				t.Errorf("lethe %s, input fails after %d: exit code %d, %q", x.args[0], n, r.code, r.err)
			}
			c.onlyFiles()
		}
	}
}

// A keyd that takes the connection and says nothing.
func TestTimeout(t *testing.T) {
	c := offlineCLI(t)
	lis, err := net.Listen("unix", c.path("silent"))
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	for _, args := range [][]string{
		append([]string{"seal"}, whose...),
		{"status"},
		{"subject", "status", "--tenant", "acme", "--subject", "alice"},
		{"destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes"},
	} {
		c.fails(16, pattern(10), append(args, "--timeout", "50ms", "--keyd", "unix://"+c.path("silent"))...)
		c.fails(16, pattern(streamFrom), append(args, "--timeout", "50ms", "--keyd", "unix://"+c.path("silent"))...)
	}
}

func TestDataResults(t *testing.T) {
	c := newCLI(t)
	content := pattern(2 << 20)
	file := c.write("plain", content)
	sealed := c.object("", append(append([]string{"seal"}, whose...), "-o", c.path("sealed"), file)...)
	size := fmt.Sprint(len(c.read("sealed")))
	if sealed["form"] != "stream" || sealed["plaintext_bytes"] != fmt.Sprint(len(content)) || sealed["blob_bytes"] != size || sealed["output"] != c.path("sealed") {
		t.Errorf("sealed: %v", sealed)
	}
	opened := c.object("", append(append([]string{"open"}, whose...), "-o", c.path("opened"), c.path("sealed"))...)
	for _, k := range []string{"form", "key_id", "class_number", "bucket", "plaintext_bytes", "blob_bytes", "class", "tenant"} {
		if opened[k] != sealed[k] {
			t.Errorf("%s: sealed %v, opened %v", k, sealed[k], opened[k])
		}
	}
	// With the data on the standard output, the result stands beside it.
	r := c.run(content, append([]string{"--json", "seal"}, whose...)...)
	if !envelope.IsSealed([]byte(r.out)) || c.decode(r.err)["output"] != "-" {
		t.Errorf("the result is %q", r.err)
	}
	r = c.run(r.out, append([]string{"--json", "open"}, whose...)...)
	if r.out != content || c.decode(r.err)["output"] != "-" {
		t.Errorf("the result is %q", r.err)
	}
}

func TestReceiptsAndBlobsTakeTheUmask(t *testing.T) {
	c := newCLI(t)
	c.seal("content", "-o", c.path("sealed"))
	want := fs.FileMode(0o666)
	probe, err := os.OpenFile(c.path("probe"), os.O_CREATE|os.O_WRONLY, want)
	if err != nil {
		t.Fatal(err)
	}
	probe.Close()
	fi, err := os.Stat(c.path("probe"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.Stat(c.path("sealed")); err != nil || got.Mode() != fi.Mode() {
		t.Errorf("mode %v, %v, want %v", got.Mode(), err, fi.Mode())
	}
}

func TestHeadWriter(t *testing.T) {
	var out bytes.Buffer
	w := &headWriter{w: &out}
	whole := pattern(3 * envelope.MaxHeaderSize)
	for i := 0; i < len(whole); i += 1000 {
		if _, err := io.WriteString(w, whole[i:min(i+1000, len(whole))]); err != nil {
			t.Fatal(err)
		}
	}
	if out.String() != whole || string(w.head) != whole[:envelope.MaxHeaderSize] || w.size != int64(len(whole)) {
		t.Errorf("%d bytes passed on, %d kept, %d counted", out.Len(), len(w.head), w.size)
	}
}

// Blobs for several people, of both forms, and what is told of whoever is gone.
func TestSeveralSubjects(t *testing.T) {
	c := newCLI(t)
	both := []string{"--tenant", "acme", "--class", "memory", "--subject", "alice", "--subject", "bob"}
	for _, n := range []int{10, streamFrom} {
		all := c.ok(pattern(n), append([]string{"seal", "--all"}, both...)...)
		either := c.ok(pattern(n), append([]string{"seal", "--any"}, both...)...)
		for _, blob := range []string{all, either} {
			r := c.run(blob, append([]string{"open"}, both...)...)
			if r.code != 0 || r.out != pattern(n) || r.err != "" {
				t.Fatalf("%d bytes: exit code %d: %s", n, r.code, r.err)
			}
			c.fails(19, blob, append([]string{"open", "--subject", "carl"}, both...)...)
			c.fails(19, blob, "open", "--tenant", "acme", "--class", "memory", "--subject", "carl")
		}
		c.fails(19, all, "open", "--tenant", "acme", "--class", "memory", "--subject", "alice")
		c.ok(either, "open", "--tenant", "acme", "--class", "memory", "--subject", "alice")
		c.fails(2, "x", append([]string{"seal"}, both...)...)
		c.fails(2, "x", append([]string{"seal", "--any", "--all"}, both...)...)

		who := fmt.Sprint("dora-", n)
		three := append([]string{"--subject", who}, both...)
		all = c.ok(pattern(n), append([]string{"seal", "--all"}, three...)...)
		either = c.ok(pattern(n), append([]string{"seal", "--any"}, three...)...)
		c.ok("", "destroy", "--tenant", "acme", "--subject", who, "--reason", "gdpr-art17", "--yes")
		if text := c.fails(10, all, append([]string{"open"}, three...)...); !strings.Contains(text, "subject 1 of those named") || strings.Contains(text, who) {
			t.Errorf("it is told so: %s", text)
		}
		r := c.run(either, append([]string{"open"}, three...)...)
		if r.code != 0 || r.out != pattern(n) || !strings.Contains(r.err, "subject 1 of those named: erased") || strings.Contains(r.err, who) {
			t.Errorf("exit code %d, and it is told so: %s", r.code, r.err)
		}
		if r := c.run(either, append([]string{"open"}, both...)...); r.code != 0 || !strings.Contains(r.err, "a subject not named: erased") {
			t.Errorf("exit code %d, and it is told so: %s", r.code, r.err)
		}
	}
}
