package main

import (
	"os"
	"strings"
	"testing"

	"lethe/internal/certtest"
)

func TestPolicyCheck(t *testing.T) {
	c := offlineCLI(t)
	name := c.write("policy", "[principals.\"spiffe://example.org/erasure\"]\n\"*\" = [\"eraser\"]\nacme = [\"auditor\", \"holder\"]\n")
	out := c.ok("", "policy", "check", name)
	for i, want := range []string{"PRINCIPAL TENANT ROLES", "spiffe://example.org/erasure * eraser", "spiffe://example.org/erasure acme holder auditor"} {
		if got := strings.Join(strings.Fields(strings.Split(out, "\n")[i]), " "); got != want {
			t.Errorf("line %d is %q", i+1, got)
		}
	}
	both := c.write("both", "[principals.\"a.example.org\"]\n\"*\" = [\"releaser\"]\nacme = [\"holder\"]\n")
	if r := c.run("", "policy", "check", both); r.code != 0 || !strings.Contains(r.err, "a.example.org can both place and release") {
		t.Errorf("a principal with both of a pair that is apart: %d, %q", r.code, r.err)
	}
	if r := c.run("", "policy", "check", name); r.err != "" {
		t.Errorf("it notes %q", r.err)
	}
	bad := c.write("bad", "[principals.\"a.example.org\"]\nacme = [\"owner\"]\n")
	if text := c.fails(2, "", "policy", "check", bad); !strings.Contains(text, `"owner" is no role`) || !strings.Contains(text, "a.example.org") {
		t.Errorf("a bad policy: %q", text)
	}
	c.fails(1, "", "policy", "check", name+".gone")
	if err := os.Chmod(name, 0o666); err != nil {
		t.Fatal(err)
	}
	if text := c.fails(2, "", "policy", "check", name); !strings.Contains(text, "its mode") {
		t.Errorf("a policy that every user may write: %q", text)
	}
}

// The three files come together, and are looked at before keyd is called.
func TestTLSFlags(t *testing.T) {
	c := offlineCLI(t)
	ca := certtest.New(t)
	cert, key := ca.Issue(t, certtest.DNS("a.example.org"))
	names := map[string]string{
		"--tls-ca": certtest.Write(t, c.dir, "ca", ca.PEM), "--tls-cert": certtest.Write(t, c.dir, "cert", cert), "--tls-key": certtest.Write(t, c.dir, "key", key),
	}
	status := func(replace, with string) []string {
		args := []string{"status"}
		for flag, name := range names {
			if flag == replace {
				name = with
			}
			if name != "" {
				args = append(args, flag, name)
			}
		}
		return args
	}
	if text := c.fails(16, "", status("", "")...); !strings.Contains(text, "no keyd answers") {
		t.Errorf("with all three: %q", text)
	}
	for flag := range names {
		if text := c.fails(2, "", status(flag, "")...); !strings.Contains(text, "together") {
			t.Errorf("without %s: %q", flag, text)
		}
		c.fails(2, "", status(flag, c.write("junk", "junk"))...)
	}
	open := certtest.Write(t, c.dir, "open", key)
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	if text := c.fails(2, "", status("--tls-key", open)...); !strings.Contains(text, "0644") {
		t.Errorf("a key that everybody reads: %q", text)
	}
	t.Setenv("LETHE_TLS_CA", names["--tls-ca"])
	if text := c.fails(2, "", "status"); !strings.Contains(text, "together") {
		t.Errorf("from the environment: %q", text)
	}
}
