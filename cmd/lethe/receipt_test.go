package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"lethe/sdk/receipt"
	"lethe/sdk/sdktest"
)

func TestReceiptVerify(t *testing.T) {
	c := newCLI(t)
	c.seal("content")
	c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--receipt", c.path("receipt"))
	verifier := strings.TrimSpace(c.ok("", "ledger", "key"))
	receipt := c.read("receipt")
	key := c.write("key", "# pinned in May\n\n  "+verifier+"\r\n"+newVerifierKey(t, "lethe/other")+"\n")
	other := newVerifierKey(t, "lethe/other")

	c.keyd.Stop() // it needs nobody
	verify := []string{"receipt", "verify", c.path("receipt")}
	out := c.ok("", append(verify, "--key-file", key)...)
	for _, want := range []string{
		"valid\n", "destroyed, stated at", "drained:     by", "sanitised:   not stated", "final:       not stated", "operator-asserted",
		"now:         not drained, not sanitised, not final yet",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
	c.ok("", append(verify, "--key", verifier)...)
	c.ok("", append(verify, "--key", other, "--key", verifier)...)
	c.ok(verifier, append(verify, "--key-file", "-")...)
	c.ok(receipt, "receipt", "verify", "-", "--key", verifier)

	// Time passes; nobody states anything new.
	c.app = func(a *app) { a.now = func() time.Time { return time.Now().Add(24 * time.Hour) } }
	v := c.object("", append(verify, "--key", verifier)...)
	stages := v["stages"].(map[string]any)
	if got := fmt.Sprint(stages["not_yet"]); got != "[sanitised final]" || v["valid"] != true {
		t.Errorf("a day later: %v", v)
	}
	c.app = nil

	c.fails(2, "", verify...) // there is no key to trust but a pinned one
	c.fails(2, "", append(verify, "--key", "nonsense")...)
	c.fails(2, "", append(verify, "--key-file", c.write("empty", "# none\n"))...)
	c.fails(2, verifier, "receipt", "verify", "-", "--key-file", "-")
	c.fails(1, "", "receipt", "verify", c.path("nothing"), "--key", verifier)
	c.fails(30, "", append(verify, "--key", other)...)
	c.fails(30, strings.Repeat("x", 2<<20), "receipt", "verify", "-", "--key", verifier)
	c.fails(30, receipt+strings.Repeat(" ", 1<<20), "receipt", "verify", "-", "--key", verifier)
	c.fails(2, strings.Repeat("#", 2<<20), append(verify, "--key-file", "-")...)
	if r := c.run("", append(verify, "--key", other, "--json")...); r.out != "" || c.decode(r.err)["error"].(map[string]any)["outcome"] != "INVALID_EVIDENCE" {
		t.Errorf("another key: %q, %q", r.out, r.err)
	}
}

// A receipt of somebody else, or of another life, is valid, and not the one that
// was asked for.
func TestReceiptVerifyExpects(t *testing.T) {
	c := newCLI(t)
	handles := map[string]string{}
	for _, subject := range []string{"alice", "bob"} {
		c.ok("", "destroy", "--tenant", "acme", "--subject", subject, "--reason", "r", "--yes", "--receipt", c.path(subject))
		handles[subject] = c.object("", "subject", "status", "--tenant", "acme", "--subject", subject)["handle"].(string)
	}
	c.ok("", "tenant", "create", "other")
	c.ok("", "tenant", "destroy", "other", "--reason", "r", "--yes-erase", "other", "--receipt", c.path("tenant"))
	verify := []string{"receipt", "verify", "--key", strings.TrimSpace(c.ok("", "ledger", "key"))}
	for _, x := range []struct {
		code int
		args []string
	}{
		{0, []string{c.path("alice"), "--tenant", "acme", "--handle", handles["alice"], "--generation", "1"}},
		{0, []string{c.path("alice"), "--handle", strings.ToUpper(handles["alice"])}},
		{32, []string{c.path("alice"), "--handle", handles["bob"]}},
		{32, []string{c.path("alice"), "--tenant", "other", "--handle", handles["alice"]}},
		{32, []string{c.path("alice"), "--generation", "2"}},
		{0, []string{c.path("tenant"), "--tenant", "other"}},
		{32, []string{c.path("tenant"), "--tenant", "other", "--handle", handles["alice"]}},
		{2, []string{c.path("alice"), "--handle", handles["alice"][:30]}},
		{2, []string{c.path("alice"), "--handle", "alice"}},
		{2, []string{c.path("alice"), "--tenant", "Acme"}},
	} {
		if r := c.run("", append(verify, x.args...)...); r.code != x.code || (r.out == "") != (x.code != 0) {
			t.Errorf("%v: exit code %d, want %d: %q, %q", x.args, r.code, x.code, r.out, r.err)
		}
	}
}

// A receipt that does not say that a stage is reached, now or then, is not the
// one that was asked for.
func TestReceiptVerifyStage(t *testing.T) {
	c := newCLI(t)
	destroy := []string{"destroy", "--tenant", "acme", "--reason", "r", "--yes"}
	c.ok("", append(destroy, "--subject", "alice", "--receipt", c.path("done"))...)
	c.ok("", append(destroy, "--subject", "bob", "--receipt", c.path("due"), "--not-before", time.Now().Add(time.Hour).UTC().Format(time.RFC3339))...)
	c.ok("", "hold", "place", "h", "--tenant", "acme", "--subject", "bob", "--reason", "r", "--receipt", c.path("hold"))
	verify := []string{"receipt", "verify", "--key", strings.TrimSpace(c.ok("", "ledger", "key"))}
	later, before := time.Now().Add(24*time.Hour).UTC().Format(time.RFC3339), time.Now().Add(-24*time.Hour).UTC().Format(time.RFC3339)
	for _, x := range []struct {
		code int
		args []string
	}{
		{0, []string{"done", "--stage", "denied"}},
		{0, []string{"done", "--stage", "destroyed"}},
		{32, []string{"done", "--stage", "destroyed", "--at", before}},
		{32, []string{"done", "--stage", "drained"}},
		{0, []string{"done", "--stage", "drained", "--at", later}},
		{32, []string{"done", "--stage", "sanitised"}},
		{32, []string{"done", "--stage", "final", "--at", later}},
		{0, []string{"due", "--stage", "denied"}},
		{32, []string{"due", "--stage", "destroyed", "--at", later}},
		{32, []string{"due", "--stage", "drained", "--at", later}},
		{32, []string{"hold", "--stage", "denied"}},
		{2, []string{"done", "--stage", "erased"}},
		{2, []string{"done", "--at", later}},
		{2, []string{"done", "--stage", "final", "--at", "tomorrow"}},
	} {
		args := append(append([]string{}, verify...), c.path(x.args[0]))
		if r := c.run("", append(args, x.args[1:]...)...); r.code != x.code || (r.out == "") != (x.code != 0) {
			t.Errorf("%v: exit code %d, want %d: %q, %q", x.args, r.code, x.code, r.out, r.err)
		}
	}
}

// Who waits is told for what, and how long at most.
func TestReceiptGetWaits(t *testing.T) {
	c := newCLI(t, sdktest.WithEpochs(time.Hour, time.Hour))
	c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--request-id", "r1")
	get := []string{"receipt", "get", "--tenant", "acme", "--request-id", "r1"}
	said := c.fails(16, "", append(get, "--wait", "final", "--wait-at-most", "1ms", "-o", c.path("receipt"))...)
	for _, want := range []string{"waiting until the receipt says that it is final, which is planned by 20", "'lethe epoch turn'", "does not say final yet"} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not say %q: %s", want, said)
		}
	}
	c.onlyFiles()
	c.fails(2, "", append(get, "--wait-at-most", "1s")...)
	c.fails(2, "", append(get, "--wait", "final", "--wait-at-most", "soon")...)
	c.fails(2, "", append(get, "--wait", "final", "--wait-at-most", "0s")...)

	// What is sanitised is not final.
	c.ok("", "epoch", "turn", "--wait", "sanitised")
	c.ok("", append(get, "--wait", "sanitised", "-o", c.path("receipt"))...)
	said = c.fails(16, "", append(get, "--wait", "final", "--wait-at-most", "1ms")...)
	if !strings.Contains(said, "does not say final yet") {
		t.Errorf("of a receipt that is sanitised: %s", said)
	}
}

// Not one bit of a receipt could be another.
func TestReceiptVerifyRefusesAnyFlippedBit(t *testing.T) {
	c := newCLI(t)
	c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--receipt", c.path("receipt"))
	verifier := strings.TrimSpace(c.ok("", "ledger", "key"))
	receipt := c.read("receipt")
	for i := range receipt {
		b := []byte(receipt)
		b[i] ^= 1 << (i % 8)
		if r := c.run(string(b), "receipt", "verify", "-", "--key", verifier); r.code != 30 || r.out != "" {
			t.Fatalf("bit %d of byte %d: exit code %d, %q", i%8, i, r.code, r.out)
		}
	}
	for _, cut := range []string{"", receipt[:len(receipt)-1], receipt + "\n", receipt + receipt} {
		c.fails(30, cut, "receipt", "verify", "-", "--key", verifier)
	}
}

func TestReceiptGet(t *testing.T) {
	c := newCLI(t)
	done := c.object("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--request-id", "case 17/ä")
	receipt, index := done["receipt"].(string), done["ledger_index"].(string)
	get := []string{"receipt", "get", "--tenant", "acme"}
	for _, by := range [][]string{{"--request-id", "case 17/ä"}, {"--index", index}, {"--subject", "alice"}, {"--subject-file", c.write("id", "alice\n")}} {
		if got := c.ok("", append(get, by...)...); got != receipt {
			t.Errorf("%v: %q", by, got)
		}
	}
	v := c.object("", append(get, "--index", index)...)
	if v["receipt"] != receipt || v["ledger_index"] != index || v["receipt_file"] != nil {
		t.Errorf("in JSON: %v", v)
	}
	if out := c.ok("", append(get, "--index", index, "-o", c.path("receipt"))...); out != "" || c.read("receipt") != receipt {
		t.Errorf("into a file: %q", out)
	}
	c.fails(1, "", append(get, "--index", index, "-o", c.path("receipt"))...)
	c.ok("", append(get, "--index", index, "--force", "-o", c.path("receipt"))...)

	c.fails(2, "", get...)
	c.fails(2, "", append(get, "--index", "-1")...)
	c.fails(2, "", append(get, "--index", index, "--request-id", "case-17")...)
	c.fails(14, "", append(get, "--index", "0")...) // the genesis is no tenant's
	c.fails(14, "", append(get, "--index", "18446744073709551615")...)
	c.fails(14, "", append(get, "--subject", "bob")...)
	c.ok("", "tenant", "create", "other")
	c.fails(14, "", "receipt", "get", "--tenant", "other", "--index", index)
	c.onlyFiles("id", "receipt")
}

func TestReceiptList(t *testing.T) {
	c := newCLI(t)
	for i := range 5 {
		c.ok("", "destroy", "--tenant", "acme", "--subject", fmt.Sprint("s", i), "--reason", fmt.Sprint("r", i), "--yes")
	}
	list := []string{"receipt", "list", "--tenant", "acme"}
	reasons := func(v map[string]any) (all []string) {
		for _, e := range v["receipts"].([]any) {
			if r, ok := e.(map[string]any)["statement"].(map[string]any)["reason"].(string); ok {
				all = append(all, r)
			}
		}
		return all
	}
	v := c.object("", list...)
	if got := fmt.Sprint(reasons(v)); got != "[r0 r1 r2 r3 r4]" || v["next_page_token"] != "" {
		t.Errorf("all: %v", v)
	}
	total := len(v["receipts"].([]any))

	// Page by page it is the same.
	var paged []any
	token := ""
	for pages := 0; ; pages++ {
		v := c.object("", append(list, "--limit", "2", "--page-token", token)...)
		if n := len(v["receipts"].([]any)); n > 2 || pages > total {
			t.Fatalf("page %d has %d entries", pages, n)
		}
		paged = append(paged, v["receipts"].([]any)...)
		if token = v["next_page_token"].(string); token == "" {
			break
		}
	}
	if fmt.Sprint(paged) != fmt.Sprint(v["receipts"]) {
		t.Errorf("page by page: %v", paged)
	}
	if r := c.run("", append(list, "--limit", "3")...); !strings.Contains(r.err, "--page-token ") || strings.Count(r.out, "\n") != 4 {
		t.Errorf("three of them: %q, %q", r.out, r.err)
	}
	if v := c.object("", append(list, "--subject", "s3")...); fmt.Sprint(reasons(v)) != "[r3]" {
		t.Errorf("of one subject: %v", v)
	}
	if v := c.object("", append(list, "--subject", "nobody")...); len(v["receipts"].([]any)) != 0 {
		t.Errorf("of nobody: %v", v)
	}
	c.fails(2, "", append(list, "--subject", "")...)
	c.fails(2, "", append(list, "--limit", "0")...)
	c.fails(2, "", append(list, "--page-token", "x")...)
	out := c.ok("", list...)
	for _, want := range []string{"INDEX", "tenant-created", "class-set", "checkpoint", "destroyed", "person", "r4"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
}

func TestLedgerConsistency(t *testing.T) {
	c := newCLI(t)
	key := c.write("key", c.ok("", "ledger", "key"))
	old := c.write("old", c.ok("", "ledger", "checkpoint"))
	for i := range 3 {
		c.ok("", "destroy", "--tenant", "acme", "--subject", fmt.Sprint("s", i), "--reason", "r", "--yes")
	}
	c.ok("", "ledger", "checkpoint", "-o", c.path("new"))
	c.fails(1, "", "ledger", "checkpoint", "-o", c.path("new"))
	head := c.object("", "ledger", "checkpoint")
	if head["checkpoint"] != c.read("new") || head["size"] != "9" {
		t.Errorf("the newest: %v", head)
	}

	consistency := func(args ...string) []string {
		return append([]string{"ledger", "consistency", "--key-file", key}, args...)
	}
	v := c.object("", consistency(old, c.path("new"))...)
	if v["consistent"] != true || v["old_size"] != "6" || v["new_size"] != "9" {
		t.Errorf("old and new: %v", v)
	}
	c.ok("", consistency(old, old)...)
	c.ok("", consistency(old)...)
	c.ok(c.read("old"), consistency("-", c.path("new"))...)

	c.fails(2, "", consistency()...)
	c.fails(2, "", consistency("-", "-")...)
	c.fails(2, "", "ledger", "consistency", old)
	c.fails(30, "", consistency(c.path("new"), old)...)
	c.fails(30, "", "ledger", "consistency", old, "--key", newVerifierKey(t, "lethe/other"))
	c.fails(30, "", consistency(c.write("edited", strings.Replace(c.read("new"), "\n9\n", "\n8\n", 1)))...)
	c.fails(30, "", consistency(old, c.write("empty", ""))...)

	// The ledger of another deployment extends nothing here.
	other := newCLI(t)
	other.dir = c.dir
	foreign := c.write("foreign", other.ok("", "ledger", "checkpoint"))
	both := c.write("both", c.read("key")+other.ok("", "ledger", "key"))
	c.fails(30, "", "ledger", "consistency", old, foreign, "--key-file", both)

	// Without keyd there is no proof, except of what needs none.
	c.keyd.Stop()
	c.fails(16, "", consistency(old, c.path("new"))...)
	c.fails(16, "", consistency(old)...)
}

// No clock drains what is only scheduled: it may have been cancelled since.
func TestScheduledIsNotDrainedByTheClock(t *testing.T) {
	c := newCLI(t)
	c.seal("content")
	due := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	c.ok("", "destroy", "--tenant", "acme", "--subject", "alice", "--reason", "r", "--yes", "--not-before", due, "--receipt", c.path("receipt"))
	keys, err := receipt.PinKeys(strings.TrimSpace(c.ok("", "ledger", "key")))
	if err != nil {
		t.Fatal(err)
	}
	v, err := receipt.Verify([]byte(c.read("receipt")), keys)
	if err != nil {
		t.Fatal(err)
	}
	if r := newStagesResult(v, time.Now().Add(48*time.Hour)); !slices.Contains(r.NotYet, "drained") || r.DrainedBy == nil {
		t.Errorf("two days on: %+v", r)
	}
}
