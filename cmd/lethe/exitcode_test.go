package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
	"lethe/sdk/receipt"
)

func TestEveryOutcomeHasItsOwnExitCode(t *testing.T) {
	codes := map[int]bool{}
	outcomes := map[keydv1.Outcome]exit{}
	for _, e := range exits {
		if codes[e.code] {
			t.Errorf("exit code %d stands twice", e.code)
		}
		codes[e.code] = true
		if e.outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
			outcomes[e.outcome] = e
		}
	}
	for number, name := range keydv1.Outcome_name {
		if number == 0 {
			continue
		}
		e, ok := outcomes[keydv1.Outcome(number)]
		if !ok {
			t.Errorf("%s has no exit code", name)
		} else if "OUTCOME_"+e.name != name {
			t.Errorf("%s is called %s", name, e.name)
		}
	}
}

func TestExitOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, 0},
		{errors.New("something"), 1},
		{fs.ErrNotExist, 1},
		{context.Canceled, 1},
		{usagef("no"), 2},
		{sdk.ErrInvalidArgument, 2},
		{ident.Tenant("No"), 2},
		{sdk.ErrErased, 10},
		{sdk.ErrPendingErasure, 11},
		{sdk.ErrExpired, 12},
		{sdk.ErrHeld, 13},
		{sdk.ErrUnknown, 14},
		{sdk.ErrDenied, 15},
		{sdk.ErrUnavailable, 16},
		{sdk.ErrExhausted, 17},
		{envelope.ErrTooLarge, 17},
		{sdk.ErrConflict, 18},
		{sdk.ErrWrongSubject, 19},
		{sdk.ErrNotSealed, 20},
		{sdk.ErrCorrupt, 21},
		{sdk.ErrTruncated, 22},
		{sdk.ErrWrongContext, 23},
		{sdk.ErrUnsupportedVersion, 24},
		{&evidenceError{receipt.ErrProof}, 30},
		{receipt.ErrProof, 1}, // only where evidence was asked for
		{syscall.EPIPE, 141},
	} {
		if got := exitOf(c.err).code; got != c.code {
			t.Errorf("%v: exit code %d, want %d", c.err, got, c.code)
		}
		if c.err == nil {
			continue
		}
		if got := exitOf(with(fmt.Errorf("a wrapped %w", c.err), "key", "value")).code; got != c.code {
			t.Errorf("%v, wrapped: exit code %d, want %d", c.err, got, c.code)
		}
	}
}

func TestHelpListsEveryExitCode(t *testing.T) {
	out := offlineCLI(t).ok("", "help", "exit-codes")
	for _, e := range exits {
		line := regexp.MustCompile(`(?m)^  ` + strconv.Itoa(e.code) + ` +` + e.name + ` +` + regexp.QuoteMeta(e.means) + `$`)
		if !line.MatchString(out) {
			t.Errorf("no line for %d %s in:\n%s", e.code, e.name, out)
		}
	}
}

// The outcomes that this version of keyd and the formats can bring about, each
// from a real command.
func TestExitCodes(t *testing.T) {
	c := newCLI(t)
	whose := []string{"--tenant", "acme", "--subject", "alice", "--class", "trace"}
	open := append([]string{"open"}, whose...)
	small := c.ok("plain", append([]string{"seal"}, whose...)...)
	bound := c.ok("plain", append([]string{"seal", "--context", "row=1"}, whose...)...)
	stream := c.ok(pattern(streamFrom), append([]string{"seal"}, whose...)...)
	changed := func(s string, at int) string {
		b := []byte(s)
		b[at] ^= 1
		return string(b)
	}
	c.ok("", "destroy", "--tenant", "acme", "--subject", "gone", "--reason", "r", "--request-id", "one", "--yes")
	c.ok("", "hold", "place", "case-1", "--tenant", "acme", "--subject", "held", "--reason", "r")
	classes := []string{"tenant", "create", "full"}
	for i := range 64 {
		classes = append(classes, "--class", "c"+strconv.Itoa(i))
	}
	c.ok("", classes...)
	key := c.write("key", c.ok("", "ledger", "key"))
	otherKey := c.write("other-key", newVerifierKey(t, "lethe/other"))
	signed := c.write("receipt", c.ok("", "receipt", "get", "--tenant", "acme", "--request-id", "one"))

	for _, x := range []struct {
		name  string
		code  int
		stdin string
		args  []string
	}{
		{"no such file", 1, "", append(open, c.path("nothing"))},
		{"a directory", 1, "", append(open, c.dir)},
		{"no such command", 2, "", []string{"unseal"}},
		{"no command of a group", 2, "", []string{"receipt"}},
		{"no such flag", 2, "", []string{"status", "--loud"}},
		{"a flag without its value", 2, "", []string{"status", "--timeout"}},
		{"a flag with a wrong value", 2, "", []string{"status", "--timeout", "soon"}},
		{"a flag with an empty value", 2, "", []string{"class", "put", "trace", "--tenant", "acme", "--width", ""}},
		{"no receipt wanted, in an odd way", 2, "", []string{"destroy", "--tenant", "acme", "--subject", "x", "--reason", "r", "--yes", "--receipt", ""}},
		{"no output wanted, in an odd way", 2, small, append(open, "-o", "")},
		{"an empty value among several", 2, "", []string{"receipt", "verify", signed, "--key-file", key, "--key", ""}},
		{"a negative timeout", 2, "", []string{"status", "--timeout", "-1s"}},
		{"help about nothing", 2, "", []string{"help", "nope"}},
		{"help about nothing below something", 2, "", []string{"help", "receipt", "nope"}},
		{"a required flag is missing", 2, small, []string{"open", "--tenant", "acme", "--subject", "alice"}},
		{"no subject", 2, small, []string{"open", "--tenant", "acme", "--class", "trace"}},
		{"an empty subject", 2, small, []string{"open", "--tenant", "acme", "--subject", "", "--class", "trace"}},
		{"a tenant that cannot be", 2, small, []string{"open", "--tenant", "ACME", "--subject", "alice", "--class", "trace"}},
		{"a class that cannot be", 2, small, []string{"open", "--tenant", "acme", "--subject", "alice", "--class", "a/b"}},
		{"an empty class is not everything", 2, "", []string{"destroy", "--tenant", "acme", "--subject", "x", "--class", "", "--reason", "r", "--yes"}},
		{"a reason that is prose", 2, "", []string{"destroy", "--tenant", "acme", "--subject", "x", "--reason", "She asked.", "--yes"}},
		{"destroy without --yes", 2, "", []string{"destroy", "--tenant", "acme", "--subject", "x", "--reason", "r"}},
		{"a bad context", 2, small, append(open, "--context", "row")},
		{"a context name twice", 2, small, append(open, "--context", "row=1", "--context", "row=2")},
		{"an address that needs TLS", 2, "", []string{"status", "--keyd", "example.org:443"}},
		{"a width that cannot be", 2, "", []string{"class", "put", "c", "--tenant", "acme", "--width", "1s"}},
		{"erased", 10, "", []string{"seal", "--tenant", "acme", "--subject", "gone", "--class", "trace"}},
		{"held", 13, "", []string{"destroy", "--tenant", "acme", "--subject", "held", "--reason", "r", "--yes"}},
		{"unknown tenant", 14, small, []string{"open", "--tenant", "nobody", "--subject", "alice", "--class", "trace"}},
		{"unknown class", 14, "x", []string{"seal", "--tenant", "acme", "--subject", "alice", "--class", "nothing"}},
		{"unknown request", 14, "", []string{"receipt", "get", "--tenant", "acme", "--request-id", "two"}},
		{"unknown hold", 14, "", []string{"hold", "release", "case-2", "--tenant", "acme", "--subject", "held", "--reason", "r"}},
		{"exhausted", 17, "", []string{"class", "put", "one-more", "--tenant", "full"}},
		{"a tenant twice", 18, "", []string{"tenant", "create", "acme"}},
		{"a request id for something else", 18, "", []string{"destroy", "--tenant", "acme", "--subject", "other", "--reason", "r", "--request-id", "one", "--yes"}},
		{"another generation", 18, "", []string{"destroy", "--tenant", "acme", "--subject", "gone", "--generation", "2", "--reason", "r", "--yes"}},
		{"wrong subject", 19, small, []string{"open", "--tenant", "acme", "--subject", "bob", "--class", "trace"}},
		{"not sealed", 20, "plain", open},
		{"not sealed: nothing", 20, "", open},
		{"not sealed: inspect", 20, "plain", []string{"inspect"}},
		{"corrupt", 21, changed(small, len(small)-1), open},
		{"corrupt stream", 21, changed(stream, len(stream)-1), open},
		{"truncated header", 22, small[:20], open},
		{"truncated stream", 22, stream[:headerSize(t, stream)+10*segmentSize], open},
		{"truncated: inspect", 22, small[:20], []string{"inspect"}},
		{"wrong context", 23, bound, append(open, "--context", "row=2")},
		{"no context", 23, bound, open},
		{"a context too many", 23, small, append(open, "--context", "row=1")},
		{"unsupported version", 24, small[:4] + "\x09" + small[5:], open},
		{"a receipt of another key", 30, "", []string{"receipt", "verify", signed, "--key-file", otherKey}},
		{"a receipt of another tenant", 32, "", []string{"receipt", "verify", signed, "--key-file", key, "--tenant", "other"}},
		{"a receipt that is none", 30, "{}", []string{"receipt", "verify", "-", "--key-file", key}},
		{"a checkpoint that is none", 30, "x", []string{"ledger", "consistency", "-", "--key-file", key}},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := *c
			c.t = t
			text := c.fails(x.code, x.stdin, x.args...)
			if !strings.HasPrefix(text, "lethe: ") && !strings.HasPrefix(text, "request id: ") {
				t.Errorf("the error is %q", text)
			}
			r := c.run(x.stdin, append([]string{"--json"}, x.args...)...)
			if r.code != x.code {
				t.Errorf("with --json: exit code %d, want %d", r.code, x.code)
			}
			// A request's id may stand on a line before.
			lines := strings.SplitAfter(strings.TrimSuffix(r.err, "\n"), "\n")
			e, _ := c.decode(lines[len(lines)-1] + "\n")["error"].(map[string]any)
			if e["outcome"] != exitWithCode(x.code).name || e["exit_code"] != float64(x.code) || e["message"] == "" {
				t.Errorf("the error in JSON is %s", r.err)
			}
			if _, ok := e["metadata"].(map[string]any); !ok {
				t.Errorf("the error in JSON has no metadata: %s", r.err)
			}
		})
	}

	t.Run("unavailable", func(t *testing.T) {
		c := *c
		c.t = t
		c.keyd.Stop()
		for _, args := range [][]string{
			open,
			append([]string{"seal"}, whose...),
			{"status"},
			{"tenant", "list"},
			{"subject", "status", "--tenant", "acme", "--subject", "alice"},
			{"--timeout", "300ms", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes"},
			{"hold", "list", "--tenant", "acme", "--whole-tenant"},
			{"receipt", "get", "--tenant", "acme", "--index", "1"},
			{"receipt", "list", "--tenant", "acme"},
			{"ledger", "key"},
			{"ledger", "checkpoint"},
		} {
			c.fails(16, small, args...)
		}
		// Nothing here needs keyd.
		c.ok(small, "inspect")
		c.ok("", "receipt", "verify", signed, "--key-file", key)
		c.ok("", "version")
		c.keyd.Restart(t)
		c.ok(small, open...)
	})
}

func TestErrorsInJSONTellTheDetails(t *testing.T) {
	c := newCLI(t)
	c.ok("", "hold", "place", "case-1", "--tenant", "acme", "--subject", "held", "--reason", "r")
	metadata := func(args ...string) map[string]any {
		t.Helper()
		r := c.run("", append(args, "--json")...)
		if r.out != "" {
			t.Errorf("a failure printed %q", r.out)
		}
		e := c.decode(r.err)["error"].(map[string]any)
		return e["metadata"].(map[string]any)
	}
	got := metadata("destroy", "--tenant", "acme", "--subject", "held", "--reason", "r", "--request-id", "q-1", "--yes")
	if got["hold"] != "case-1" || got["request_id"] != "q-1" {
		t.Errorf("held: %v", got)
	}
	if got := metadata("subject", "status", "--tenant", "A", "--subject", "x"); got["field"] != "tenant" {
		t.Errorf("a wrong tenant: %v", got)
	}
	if got := metadata("class", "put", "c", "--tenant", "acme", "--lease", "2h"); got["field"] != "lease" {
		t.Errorf("a wrong lease: %v", got)
	}
}

// Whatever goes wrong, what was given as a subject's id comes back nowhere.
func TestErrorsHoldNoSubject(t *testing.T) {
	c := newCLI(t)
	const secret = "zoe.quill@example.org"
	small := c.ok("plain", "seal", "--tenant", "acme", "--subject", secret, "--class", "trace")
	c.ok("", "hold", "place", "h", "--tenant", "acme", "--subject", secret, "--reason", "r")
	file := c.write("id", secret+"\x00")
	for _, args := range [][]string{
		{secret},
		{"subject", secret},
		{"subject", "status", secret},
		{"subject", "status", "--tenant", "acme", secret},
		{"subject", "status", "--tenant", "acme", "-s" + secret},
		{"subject", "status", "--tenant", "acme", "--generation=" + secret, "--subject", secret},
		{"destroy", "--generation=" + secret},
		{"tenant", "create", secret},
		{"tenant", "create", "t", secret},
		{"hold", "place", secret, "--tenant", "acme", "--subject", secret, "--reason", "r"},
		{"inspect", "a", secret},
		{"open", "--tenant", "acme", "--subject", secret + "\xff", "--class", "trace"},
		{"open", "--tenant", "acme", "--subject", strings.Repeat(secret, 100), "--class", "trace"},
		{"open", "--tenant", "acme", "--subject-file", file, "--class", "trace"},
		{"open", "--tenant", "acme", "--subject", secret, "--class", secret},
		{"open", "--tenant", secret, "--subject", secret, "--class", "trace"},
		{"open", "--tenant", "acme", "--subject", secret + "x", "--class", "trace"},
		{"open", "--tenant", "acme", "--subject", secret, "--class", "trace", "--context", secret},
		{"open", "--tenant", "acme", "--subject", secret, "--class", "trace", "--context", "a=1"},
		{"destroy", "--tenant", "acme", "--subject", secret, "--reason", "r", "--yes"},
		{"destroy", "--tenant", "acme", "--subject", secret, "--reason", secret, "--yes"},
		{"--timeout", secret, "status"},
	} {
		for _, args := range [][]string{args, append([]string{"--json"}, args...)} {
			r := c.run(small, args...)
			if r.code == 0 {
				t.Errorf("lethe %s: no failure", strings.Join(args, " "))
			}
			if strings.Contains(r.err+r.out, "zoe.quill") {
				t.Errorf("lethe %s: it is told: %s", strings.Join(args, " "), r.err)
			}
		}
	}
}
