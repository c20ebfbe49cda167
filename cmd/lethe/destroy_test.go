package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestDestroy(t *testing.T) {
	c := newCLI(t)
	blob := c.seal("content")
	key := c.write("key", c.ok("", "ledger", "key"))
	destroy := []string{"destroy", "--tenant", "acme", "--subject", "alice", "--reason", "gdpr-art17", "--yes", "--receipt", c.path("receipt")}
	r := c.run("", destroy...)
	if r.code != 0 {
		t.Fatalf("exit code %d: %s", r.code, r.err)
	}
	// The id is told on the standard error, and makes the request repeatable.
	told := regexp.MustCompile(`^request id: (cli-[a-z0-9]{26})\n$`).FindStringSubmatch(r.err)
	if told == nil {
		t.Fatalf("the request's id is told so: %q", r.err)
	}
	for _, want := range []string{
		"destroyed\n", told[1], "scope:     the whole person", "1 destroyed", "denied:      since", "drained:     by",
		"sanitised:   not stated", "not drained, not sanitised, not final yet", "Checked with the key that keyd itself names",
	} {
		if !strings.Contains(r.out, want) {
			t.Errorf("it does not say %q:\n%s", want, r.out)
		}
	}
	c.fails(10, blob, append([]string{"open"}, whose...)...)
	c.ok("", "receipt", "verify", c.path("receipt"), "--key-file", key)
	first := c.read("receipt")

	// A repeat brings the same receipt, but replaces no file unasked.
	repeat := append(slices.Clone(destroy), "--request-id", told[1])
	c.fails(1, "", repeat...)
	if r := c.run("", append(repeat, "--replace-receipt")...); r.code != 0 || r.err != "" {
		t.Errorf("the repeat: exit code %d, %q", r.code, r.err)
	}
	if c.read("receipt") != first {
		t.Error("the repeat brought another receipt")
	}
	v := c.object("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "gdpr-art17", "--yes", "--request-id", "new")
	if v["already_destroyed"] != true || v["receipt"] != first || v["request_id"] != "new" || v["receipt_file"] != nil {
		t.Errorf("a new request for the same: %v", v)
	}
	c.onlyFiles("receipt", "key")
}

func TestDestroyOfClasses(t *testing.T) {
	c := newCLI(t)
	trace := c.seal("content")
	memory := c.ok("memory", "seal", "--tenant", "acme", "--subject", "alice", "--class", "memory")
	v := c.object("", "destroy", "--tenant", "acme", "--subject", "alice", "--class", "memory", "--class", "backup", "--reason", "r", "--yes", "--request-id", "q")
	statement := v["statement"].(map[string]any)
	if statement["scope"] != "classes" || len(statement["classes"].([]any)) != 2 || v["checked"] != true {
		t.Errorf("destroyed: %v", v)
	}
	stages := v["stages"].(map[string]any)
	if stages["destroyed"] == nil || stages["final"] != nil || stages["drained_by"] != v["drained_by"] {
		t.Errorf("stages: %v", stages)
	}
	if c.open(trace) != "content" {
		t.Error("another class does not open any more")
	}
	c.fails(10, memory, "open", "--tenant", "acme", "--subject", "alice", "--class", "memory")
	c.fails(10, "x", "seal", "--tenant", "acme", "--subject", "alice", "--class", "backup")
	c.fails(14, "", "destroy", "--tenant", "acme", "--subject", "alice", "--class", "nothing", "--reason", "r", "--yes")
	// A list in one flag is one name, which no class has.
	c.fails(2, "", "destroy", "--tenant", "acme", "--subject", "alice", "--class", "trace,memory", "--reason", "r", "--yes")
}

// No id is told for a request that cannot be sent.
func TestDestroyTellsNoIDForNothing(t *testing.T) {
	c := newCLI(t)
	for _, wrong := range [][]string{
		{"--subject", "alice", "--reason", "Prose."},
		{"--subject", "alice", "--reason", "r", "--class", ""},
		{"--subject", "", "--reason", "r"},
		{"--subject", "alice", "--reason", "r", "--request-id", ""},
		{"--subject", "alice", "--reason", "r", "--generation", "0"},
		{"--subject", "alice", "--reason", "r", "--receipt", c.dir},
	} {
		for _, command := range [][]string{{"destroy", "--yes"}, {"subject", "reinstate", "--generation", "1"}, {"hold", "place", "h"}} {
			if command[0] == "hold" && slices.Contains(wrong, "--class") || command[0] != "destroy" && slices.Contains(wrong, "--generation") {
				continue
			}
			r := c.run("", append(append(append(command, "--tenant", "acme"), wrong...), "--json")...)
			if r.code == 0 || strings.HasPrefix(r.err, `{"request_id"`) || c.decode(r.err)["error"] == nil {
				t.Errorf("%v %v: exit code %d, %s", command, wrong, r.code, r.err)
			}
		}
	}
}

// What could keep the receipt from being saved is found out before anything is
// destroyed.
func TestDestroyFindsOutFirstWhereTheReceiptGoes(t *testing.T) {
	c := newCLI(t)
	blob := c.seal("content")
	for _, file := range []string{c.write("exists", ""), c.path("no/such/directory"), c.dir} {
		c.fails(1, "", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--receipt", file)
	}
	c.fails(1, "", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--replace-receipt", "--receipt", c.dir)
	if c.open(blob) != "content" {
		t.Error("it was destroyed all the same")
	}
}

func TestDestroyAsksOnATerminal(t *testing.T) {
	c := newCLI(t)
	blob := c.seal("content")
	handle, _ := c.object("", "subject", "status", "--tenant", "acme", "--subject", "alice")["handle"].(string)
	destroy := []string{"destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r"}

	// No terminal, or the standard input is taken: nobody can be asked.
	c.fails(2, "destroy\n", destroy...)
	c.app = onTerminal
	c.fails(2, "alice", "destroy", "--tenant", "acme", "--subject-file", "-", "--reason", "r")

	for _, answer := range []string{"", "\n", "y\n", "yes\n", "Destroy\n", "destroy it\n", "alice\n", handle[:8] + "\n", "nodestroy\n"} {
		text := c.fails(1, answer, destroy...)
		if !strings.Contains(text, handle) || !strings.Contains(text, "trace") || !strings.Contains(text, "the whole person") {
			t.Errorf("the question does not say whose keys: %s", text)
		}
		if strings.Contains(text, "request id") || strings.Contains(text, "alice") {
			t.Errorf("it says %q", text)
		}
	}
	if c.open(blob, "-") != "content" {
		t.Fatal("it was destroyed all the same")
	}
	text := c.fails(1, "no\n", append(destroy, "--class", "memory", "--class", "trace")...)
	if !strings.Contains(text, "only memory, trace") {
		t.Errorf("the question does not say which classes: %s", text)
	}

	c.ok("  destroy \r\n", append(destroy, "--class", "memory")...)
	c.ok(handle+"\n", destroy...)
	c.app = nil
	c.fails(10, blob, append([]string{"open"}, whose...)...)
}

func TestDestroyOfANeverSeenSubject(t *testing.T) {
	c := newCLI(t)
	out := c.ok("", "destroy", "--tenant", "acme", "--subject", "nobody", "--reason", "r", "--yes")
	if !strings.HasPrefix(out, "fenced: no key existed, nothing was destroyed\n") || !strings.Contains(out, "none existed") {
		t.Errorf("it does not say that no key existed:\n%s", out)
	}
	c.fails(10, "late", "seal", "--tenant", "acme", "--subject", "nobody", "--class", "trace")
	v := c.object("", "destroy", "--tenant", "acme", "--subject", "nobody", "--reason", "r", "--yes", "--request-id", "again")
	if v["existed"] != "no" || v["already_destroyed"] != true {
		t.Errorf("again: %v", v)
	}
}

// The headline of what was destroyed before, class by class.
func TestDestroyOfWhatWasDead(t *testing.T) {
	c := newCLI(t)
	c.seal("content")
	alice := []string{"destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes"}
	if out := c.ok("", append(alice, "--class", "trace")...); !strings.HasPrefix(out, "destroyed\n") {
		t.Errorf("one class:\n%s", out)
	}
	out := c.ok("", alice...)
	if !strings.HasPrefix(out, "destroyed: every key of it was destroyed before; the receipt names all of it\n") || strings.Contains(out, "none existed") {
		t.Errorf("the person:\n%s", out)
	}
}

// An id from a file is taken byte for byte, and what may not be meant is told.
func TestSubjectFileWarns(t *testing.T) {
	c := newCLI(t)
	for content, warned := range map[string]bool{
		"alice": false, "alice\n": false, " alice": false, "al ice": false,
		"alice\r\n": true, "alice\n\n": true, "alice ": true, "alice\u00a0": true, "\ufeffalice": true,
	} {
		status := []string{"subject", "status", "--tenant", "acme", "--subject-file", c.write("id", content)}
		r := c.run("", status...)
		if r.code != 0 || strings.HasPrefix(r.err, "warning: ") != warned || strings.Contains(r.err, "alice") {
			t.Errorf("%q: exit code %d, %q", content, r.code, r.err)
		}
		r = c.run("", append(status, "--json")...)
		if !warned && r.err != "" || warned && c.decode(r.err)["warning"] == nil {
			t.Errorf("%q as JSON: %q", content, r.err)
		}
	}
}

// What is scheduled, and what it waits for, is in the subject's status.
func TestStatusOfWhatIsScheduled(t *testing.T) {
	c := newCLI(t)
	c.seal("content")
	alice := []string{"--tenant", "acme", "--subject", "alice", "--reason", "r"}
	c.ok("", append([]string{"hold", "place", "case"}, alice...)...)
	c.ok("", append([]string{"destroy", "--yes", "--wait-for-holds", "--class", "trace"}, alice...)...)
	due := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	c.ok("", append([]string{"destroy", "--yes", "--wait-for-holds", "--not-before", due}, alice...)...)
	status := []string{"subject", "status", "--tenant", "acme", "--subject", "alice"}
	all := c.object("", status...)["scheduled"].([]any)
	if len(all) != 2 {
		t.Fatalf("scheduled: %v", all)
	}
	first, second := all[0].(map[string]any), all[1].(map[string]any)
	if first["classes"].([]any)[0] != "trace" || first["waiting_for"].([]any)[0] != "case" || first["ledger_index"] == "" {
		t.Errorf("what waits: %v", first)
	}
	if second["classes"] != nil || len(second["waiting_for"].([]any)) != 0 || second["due"] != due {
		t.Errorf("what is to come: %v", second)
	}
	out := c.ok("", status...)
	for _, want := range []string{"WAITING FOR", "trace", "case", "the whole person", due} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
}

func TestReinstate(t *testing.T) {
	c := newCLI(t)
	old := c.seal("old")
	alice := []string{"--tenant", "acme", "--subject", "alice", "--reason", "r"}
	run := func(args ...string) []string { return append(args, alice...) }
	c.fails(18, "", run("subject", "reinstate", "--generation", "1")...) // it lives
	first := c.object("", run("destroy", "--yes", "--request-id", "first")...)
	c.fails(2, "", run("subject", "reinstate")...) // which generation?
	c.fails(2, "", run("subject", "reinstate", "--generation", "0")...)
	c.fails(18, "", run("subject", "reinstate", "--generation", "2")...)
	c.fails(14, "", "subject", "reinstate", "--generation", "1", "--tenant", "acme", "--subject", "nobody", "--reason", "r")

	v := c.object("", run("subject", "reinstate", "--generation", "1", "--receipt", c.path("receipt"), "--request-id", "again")...)
	if v["generation"] != float64(2) || v["receipt"] != c.read("receipt") {
		t.Errorf("reinstated: %v", v)
	}
	key := c.write("key", c.ok("", "ledger", "key"))
	out := c.ok("", "receipt", "verify", c.path("receipt"), "--key-file", key)
	if strings.Contains(out, "\nnow:") {
		t.Errorf("a reinstatement has no stages:\n%s", out)
	}
	c.fails(10, old, append([]string{"open"}, whose...)...)
	blob := c.seal("new")
	if c.open(blob) != "new" {
		t.Error("the new life does not open")
	}
	// The first request, repeated, has its receipt, and does not look as if the
	// one who lives was destroyed.
	out = c.ok("", run("destroy", "--yes", "--request-id", "first")...)
	if !strings.HasPrefix(out, "destroyed then, in generation 1; reinstated since, and living in generation 2: nothing was destroyed now\n") {
		t.Errorf("the first request again:\n%s", out)
	}
	again := c.object("", run("destroy", "--yes", "--request-id", "first")...)
	if again["receipt"] != first["receipt"] || again["living_generation"] != float64(2) || first["living_generation"] != nil {
		t.Errorf("the first request again: %v", again)
	}
	// A late request for the first life does not kill the second.
	c.fails(18, "", run("destroy", "--yes")...)
	if c.open(blob) != "new" {
		t.Error("the new life does not open any more")
	}
	c.fails(2, "", run("destroy", "--yes", "--generation", "0")...)
	c.ok("", run("destroy", "--yes", "--generation", "2")...)
	c.fails(10, blob, append([]string{"open"}, whose...)...)
}

func TestSubjectStatus(t *testing.T) {
	c := newCLI(t)
	status := func() map[string]any {
		return c.object("", "subject", "status", "--tenant", "acme", "--subject", "alice")
	}
	v := status()
	if v["state"] != "absent" || len(v["classes"].([]any)) != 0 || len(v["ledger_indexes"].([]any)) != 0 || len(v["holds"].([]any)) != 0 {
		t.Errorf("never seen: %v", v)
	}
	if out := c.ok("", "subject", "status", "--tenant", "acme", "--subject", "alice"); !strings.Contains(out, "absent: never had a key") {
		t.Errorf("never seen: %s", out)
	}
	handle := v["handle"].(string)
	if !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(handle) {
		t.Errorf("the handle is %q", handle)
	}

	c.seal("content")
	c.ok("", "hold", "place", "case-1", "--tenant", "acme", "--subject", "alice", "--reason", "r")
	v = status()
	class := v["classes"].([]any)[0].(map[string]any)
	if v["state"] != "active" || v["handle"] != handle || class["class"] != "trace" || class["state"] != "active" || class["key_id"] == nil || v["holds"].([]any)[0] != "case-1" {
		t.Errorf("active: %v", v)
	}
	id := class["key_id"]

	c.ok("", "hold", "release", "case-1", "--tenant", "acme", "--subject", "alice", "--reason", "r")
	c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes")
	v = status()
	class = v["classes"].([]any)[0].(map[string]any)
	if v["state"] != "destroyed" || class["state"] != "destroyed" || class["key_id"] != nil || class["dead_key_ids"].([]any)[0] != id {
		t.Errorf("destroyed: %v", v)
	}
	out := c.ok("", "subject", "status", "--tenant", "acme", "--subject", "alice")
	for _, want := range []string{"destroyed", handle, id.(string), "DEAD KEYS"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
}

func TestHolds(t *testing.T) {
	c := newCLI(t)
	blob := c.seal("content")
	alice := []string{"--tenant", "acme", "--subject", "alice"}
	destroy := append([]string{"destroy", "--reason", "r", "--yes"}, alice...)
	list := func(args ...string) []any {
		t.Helper()
		return c.object("", append([]string{"hold", "list"}, args...)...)["holds"].([]any)
	}

	v := c.object("", append([]string{"hold", "place", "case-1", "--reason", "litigation", "--request-id", "q", "--receipt", c.path("receipt")}, alice...)...)
	if v["hold"] != "case-1" || v["receipt"] != c.read("receipt") || v["ledger_index"] == "" {
		t.Errorf("placed: %v", v)
	}
	if text := c.fails(13, "", destroy...); !strings.Contains(text, "hold: case-1") {
		t.Errorf("held: %q", text)
	}
	h := list(alice...)
	if len(h) != 1 || h[0].(map[string]any)["reason"] != "litigation" || h[0].(map[string]any)["end"] != nil || h[0].(map[string]any)["binds"] != true {
		t.Errorf("holds: %v", h)
	}
	if h := list("--tenant", "acme", "--whole-tenant"); len(h) != 0 {
		t.Errorf("holds on the tenant: %v", h)
	}
	c.fails(18, "", append([]string{"hold", "place", "case-1", "--reason", "r"}, alice...)...)
	c.ok("", append([]string{"hold", "release", "case-1", "--reason", "closed"}, alice...)...)
	if h := list(alice...); len(h) != 0 {
		t.Errorf("holds: %v", h)
	}

	// A whole tenant is held only when that is said.
	for _, args := range [][]string{
		{"--tenant", "acme"},
		{"--tenant", "acme", "--subject", ""},
		{"--tenant", "acme", "--whole-tenant=false"},
		{"--tenant", "acme", "--subject", "alice", "--whole-tenant"},
	} {
		c.fails(2, "", append([]string{"hold", "place", "audit", "--reason", "r"}, args...)...)
		c.fails(2, "", append([]string{"hold", "list"}, args...)...)
	}
	c.fails(2, "", "hold", "place", "audit", "--reason", "r", "--tenant", "acme", "--whole-tenant", "--until", "tomorrow")
	c.fails(2, "", "hold", "place", "audit", "--reason", "r", "--tenant", "acme", "--whole-tenant", "--until", "2001-01-01T00:00:00Z")
	end := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	c.ok("", "hold", "place", "audit", "--reason", "r", "--tenant", "acme", "--whole-tenant", "--until", end.Format(time.RFC3339))
	c.fails(13, "", destroy...)
	h = list("--tenant", "acme", "--whole-tenant")
	if len(h) != 1 || h[0].(map[string]any)["end"] != end.Format(time.RFC3339) {
		t.Errorf("holds on the tenant: %v", h)
	}
	c.app = func(a *app) { a.now = func() time.Time { return end } }
	if h := list("--tenant", "acme", "--whole-tenant"); h[0].(map[string]any)["binds"] != false {
		t.Errorf("a hold binds at its end: %v", h)
	}
	c.app = nil
	if c.open(blob) != "content" {
		t.Error("it was destroyed all the same")
	}
	c.ok("", "hold", "release", "audit", "--reason", "r", "--tenant", "acme", "--whole-tenant")
	c.ok("", destroy...)
}

// A receipt that cannot be saved any more does not hide that it is done.
func TestDestroyWhoseReceiptIsLost(t *testing.T) {
	c := newCLI(t)
	file := c.path("receipt")
	// As soon as the request's id is told, somebody takes the file's name.
	c.app = func(a *app) {
		a.err = writerFunc(func(p []byte) (int, error) { return len(p), os.WriteFile(file, []byte("other"), 0o600) })
	}
	r := c.run("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--receipt", file)
	if r.code != 1 || !strings.Contains(r.out, "destroyed\n") || c.read("receipt") != "other" {
		t.Errorf("exit code %d, output %s", r.code, r.out)
	}
	c.app = nil
	c.fails(10, "late", append([]string{"seal"}, whose...)...)
	c.onlyFiles("receipt")
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A repeated request whose effect was undone since says so, and does not end as
// if it held.
func TestRepeatsOfWhatWasUndone(t *testing.T) {
	c := newCLI(t)
	alice := []string{"--tenant", "acme", "--subject", "alice", "--reason", "r"}
	run := func(id string, args ...string) []string { return append(append(args, "--request-id", id), alice...) }
	scheduled := func(id string) []string {
		return run(id, "destroy", "--yes", "--not-before", time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	}
	holds := func(args []string, repeat, binds bool) string {
		t.Helper()
		v := c.object("", args...)
		if v["repeat"] != repeat || v["binds"] != binds {
			t.Errorf("%v: %v", args, v)
		}
		return v["receipt"].(string)
	}
	undone := func(args []string, what string) {
		t.Helper()
		r := c.run("", args...)
		if r.code != 18 || !strings.Contains(r.out, what) || !strings.Contains(r.err, what) {
			t.Errorf("%v: exit code %d, %s%s", args, r.code, r.out, r.err)
		}
	}
	c.seal("content")
	place, release := run("p", "hold", "place", "case"), run("r", "hold", "release", "case")
	first := holds(place, false, true)
	if holds(place, true, true) != first {
		t.Error("the repeated hold has another receipt")
	}
	holds(release, false, false)
	holds(release, true, false)
	undone(place, "the hold was placed then; it was released or has ended since: it does not bind")
	if v := c.decode(c.run("", append(place, "--json")...).out); v["receipt"] != first || v["repeat"] != true || v["binds"] != false {
		t.Errorf("as JSON: %v", v)
	}
	c.ok("", run("p2", "hold", "place", "case")...)
	undone(release, "the hold was released then; one with its id was placed since, and binds")
	c.ok("", run("r2", "hold", "release", "case")...)

	c.ok("", scheduled("d1")...)
	cancel := run("c", "cancel")
	c.ok("", cancel...)
	if v := c.object("", cancel...); v["repeat"] != true || v["state"] != "active" {
		t.Errorf("cancelled, and so it is: %v", v)
	}
	c.ok("", scheduled("d2")...)
	undone(cancel, "cancelled then; it was scheduled again since, and is pending")
	c.ok("", run("d3", "destroy", "--yes")...)
	undone(cancel, "cancelled then; it was destroyed since")

	reinstate := run("i", "subject", "reinstate", "--generation", "1")
	c.ok("", reinstate...)
	if v := c.object("", reinstate...); v["repeat"] != true || v["living_generation"] != float64(2) {
		t.Errorf("reinstated, and living: %v", v)
	}
	c.ok("", run("d4", "destroy", "--yes", "--generation", "2", "--wait-for-holds")...)
	undone(reinstate, "reinstated then: generation 2 began; it, or a class of it, was destroyed since")
	c.ok("", run("i2", "subject", "reinstate", "--generation", "2")...)
	undone(reinstate, "reinstated then: generation 2 began; it lives in generation 3 now")
}

// A request id may hold what a terminal would obey.
func TestRequestIDIsQuoted(t *testing.T) {
	c := newCLI(t)
	id := "case\x1b[2J\n17"
	out := c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--request-id", id)
	if strings.Contains(out, id) || !strings.Contains(out, `"case\x1b[2J\n17"`) {
		t.Errorf("it prints %q", out)
	}
	if v := c.object("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--request-id", id); v["request_id"] != id {
		t.Errorf("in JSON: %v", v["request_id"])
	}
}
