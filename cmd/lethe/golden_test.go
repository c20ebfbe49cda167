package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/json.golden anew")

// What differs from run to run, or is others' to word, and what stands for it
// in the golden file.
var volatile = []struct {
	from *regexp.Regexp
	to   string
}{
	{regexp.MustCompile(`"message":"[^"]+"`), `"message":"MESSAGE"`},
	{regexp.MustCompile(`\{"name":"[a-z]+","healthy":true,"detail":"[^"]+"\}(,?)`), `COMPONENT$1`},
	{regexp.MustCompile(`COMPONENT(,COMPONENT)+`), `COMPONENTS`},
	{regexp.MustCompile(`"statement":\{.*?"type":"lethe.statement/v1"\}`), `"statement":STATEMENT`},
	{regexp.MustCompile(`"receipt":"\{.*?\}\\n"`), `"receipt":"RECEIPT"`},
	{regexp.MustCompile(`"checkpoint":"[^"]*"`), `"checkpoint":"CHECKPOINT"`},
	{regexp.MustCompile(`"root":"[A-Za-z0-9+/]{43}="`), `"root":"ROOT"`},
	{regexp.MustCompile(`lethe/[0-9a-f]{32}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}`), `VERIFIER-KEY`},
	{regexp.MustCompile(`lethe/[0-9a-f]{32}\+[0-9a-f]{8}`), `SIGNER`},
	{regexp.MustCompile(`lethe/[0-9a-f]{32}`), `ORIGIN`},
	{regexp.MustCompile(`\b[0-9a-f]{64}\b`), `HEX-64`},
	{regexp.MustCompile(`\b[0-9a-f]{32}\b`), `HEX-32`},
	{regexp.MustCompile(`\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`), `INSTANT`},
	{regexp.MustCompile(`"bucket_unix":"\d+"`), `"bucket_unix":"SECONDS"`},
	{regexp.MustCompile(`"go":"[^"]*","platform":"[^"]*"`), `"go":"GO","platform":"PLATFORM"`},
}

// The JSON of every command. Programs rely on it: names are never changed, and
// fields only added.
func TestJSON(t *testing.T) {
	c := newCLI(t)
	var got bytes.Buffer
	id, bob := c.write("id", "alice\n"), c.write("bob", "bob\n")
	run := func(stdin, line string) {
		t.Helper()
		args := strings.Fields(strings.NewReplacer("ID", id, "BOB", bob, "DIR", c.dir).Replace(line))
		r := c.run(stdin, append(args, "--json")...)
		text := strings.ReplaceAll(r.out+r.err, c.dir, "DIR")
		for _, v := range volatile {
			text = v.from.ReplaceAllString(text, v.to)
		}
		fmt.Fprintf(&got, "$ lethe %s\n%s", line, text)
		if r.code != 0 {
			fmt.Fprintf(&got, "exit code %d\n", r.code)
		}
		got.WriteString("\n")
	}
	c.write("key", c.ok("", "ledger", "key"))
	c.write("checkpoint", c.ok("", "ledger", "checkpoint"))

	run("", "version")
	run("", "status")
	run("", "epoch status")
	run("", "epoch confirm-clock")
	run("", "epoch cancel 1")
	run("", "tenant create beta --class memory:30d:1m --class trace:1d:0s --request-id q0")
	run("", "tenant list")
	run("", "class put note --tenant beta --width 1h --lease 10s")
	run("", "class list --tenant beta")
	run("content", "seal --tenant acme --subject-file ID --class trace --context row=7 -o DIR/sealed")
	run("", "inspect DIR/sealed")
	run("", "open --tenant acme --subject-file ID --class trace --context row=7 -o DIR/opened DIR/sealed")
	run("", "open --tenant acme --subject-file ID --class trace DIR/sealed")
	run("", "open --tenant acme --subject bob --class trace --context row=7 DIR/sealed")
	run("content", "seal --tenant acme --subject-file ID --subject-file BOB --any --class memory -o DIR/blended")
	run("content", "seal --tenant acme --subject alice --subject bob --class memory -o DIR/nothing")
	run("", "inspect DIR/blended")
	run("", "open --tenant acme --subject-file ID --subject-file BOB --class memory -o DIR/mixed DIR/blended")
	run("", "subject status --tenant acme --subject-file ID")
	run("", "subject status --tenant acme --subject nobody")
	run("", "hold place case-1 --tenant acme --subject-file ID --reason litigation --request-id q1")
	run("", "hold list --tenant acme --subject-file ID")
	run("", "destroy --tenant acme --subject-file ID --reason gdpr-art17 --yes --request-id q2")
	run("", "hold release case-1 --tenant acme --subject-file ID --reason closed --request-id q3")
	run("", "hold list --tenant acme --subject-file ID")
	run("", "destroy --tenant acme --subject-file ID --reason gdpr-art17 --yes --request-id q2 --receipt DIR/receipt")
	run("", "subject status --tenant acme --subject-file ID")
	run("", "open --tenant acme --subject-file ID --class trace --context row=7 DIR/sealed")
	run("", "open --tenant acme --subject-file ID --subject-file BOB --class memory -o DIR/mixed --force DIR/blended")
	run("", "open --tenant acme --subject-file BOB --class memory -o DIR/mixed --force DIR/blended")
	run("", "receipt verify DIR/receipt --key-file DIR/key")
	run("", "receipt verify DIR/sealed --key-file DIR/key")
	run("", "receipt get --tenant acme --request-id q2")
	run("", "receipt list --tenant acme --subject-file ID")
	run("", "subject reinstate --tenant acme --subject-file ID --generation 1 --reason mistake --request-id q4")
	run("", "ledger key")
	run("", "ledger checkpoint")
	run("", "ledger consistency DIR/checkpoint --key-file DIR/key")
	c.write("policy", "[principals.\"agent.example.org\"]\nacme = [\"sealer\", \"opener\"]\n")
	run("", "policy check DIR/policy")
	run("", "status --loud")

	const golden = "testdata/json.golden"
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		wantLines, gotLines := strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")
		for i := range max(len(wantLines), len(gotLines)) {
			var w, g string
			if i < len(wantLines) {
				w = wantLines[i]
			}
			if i < len(gotLines) {
				g = gotLines[i]
			}
			if w != g {
				t.Errorf("line %d is\n%s\nwant\n%s", i+1, g, w)
			}
		}
	}
}
