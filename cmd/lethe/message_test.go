package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// What a message says about going on.
func TestMessages(t *testing.T) {
	c := newCLI(t)
	says := func(code int, want string, args ...string) {
		t.Helper()
		if said := c.fails(code, "", args...); !strings.Contains(said, want) {
			t.Errorf("lethe %s: it does not say %q: %s", strings.Join(args, " "), want, said)
		}
	}
	destroy := []string{"destroy", "--tenant", "acme", "--reason", "r", "--yes", "--subject"}
	c.ok("", append(destroy, "alice", "--receipt", c.path("receipt"), "--request-id", "r1")...)
	says(1, "--replace-receipt replaces it", append(destroy, "alice", "--receipt", c.path("receipt"), "--request-id", "r1")...)
	c.ok("", append(destroy, "alice", "--receipt", c.path("receipt"), "--request-id", "r1", "--replace-receipt")...)
	if out := c.ok("", append(destroy, "alice", "--request-id", "r1")...); !strings.Contains(out, "receipt get --tenant acme --request-id r1\n") {
		t.Errorf("not saved: %s", out)
	}
	if out := c.ok("", append(destroy, "ann", "--request-id", "r'2")...); !strings.Contains(out, "receipt get --tenant acme --index ") {
		t.Errorf("not saved, and its id is not for a shell: %s", out)
	}
	says(2, "--not-before: want a time such as 2027-01-31T00:00:00Z", append(destroy, "bob", "--not-before", "tomorrow")...)
	says(2, "--generation: want a whole number", append(destroy, "bob", "--generation", "x")...)
	says(14, "nothing is scheduled for this subject", "cancel", "--tenant", "acme", "--subject", "bob", "--reason", "r")
	says(2, "--approved-by", "class", "put", "memory", "--tenant", "acme", "--retention", "14d")
	says(2, "See 'lethe --help'", "help", "no-such")
	says(2, "See 'lethe receipt --help'", "receipt", "no-such")
	c.ok("", "hold", "place", "h1", "--tenant", "acme", "--subject", "bob", "--reason", "r")
	says(13, "with --wait-for-holds", append(destroy, "bob")...)
	says(13, "'lethe hold release'", append(destroy, "bob")...)
	says(1, "stop keyd, or run it on a copy", "audit", "residue", "--store", filepath.Join(c.keyd.Dir(), "store"))

	c.keyd.Stop()
	says(16, "no keyd answers at "+c.keyd.Target()+" (no such file or directory); is it running?", "status")
	says(16, "no keyd answers at ", append(destroy, "bob", "--timeout", "300ms", "--request-id", "r3")...)
	says(16, "repeat with --request-id r3", append(destroy, "bob", "--timeout", "300ms", "--request-id", "r3")...)
}
