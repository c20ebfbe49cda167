package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"lethe/sdk/sdktest"
)

// A whole turn by the command line: the receipt ends sanitised and final, and
// verifies.
func TestEpochTurn(t *testing.T) {
	c := newCLI(t, sdktest.WithEpochs(100*time.Millisecond, 100*time.Millisecond))
	blob := c.seal("content")
	c.ok("content", "seal", "--tenant", "acme", "--subject", "bob", "--class", "trace")
	c.ok("", "destroy", "--tenant", "acme", "--subject", "bob", "--reason", "test", "--yes", "--request-id", "q1")
	if got := c.ok("", "epoch", "status"); !strings.Contains(got, "open") {
		t.Errorf("status:\n%s", got)
	}
	v := c.object("", "epoch", "turn", "--wait", "sanitised", "--json")
	if v["epoch"] != 1.0 || v["sanitised"] == nil || v["keys_rewrapped"] == "0" {
		t.Errorf("turned: %v", v)
	}
	c.ok("", "receipt", "get", "--tenant", "acme", "--request-id", "q1", "--wait", "sanitised", "-o", c.path("sanitised"))
	if v := c.object("", "epoch", "turn", "--epoch", "1", "--wait", "closed", "--json"); v["state"] != "closed" || v["closed"] == nil {
		t.Errorf("closed: %v", v)
	}
	c.ok("", "receipt", "get", "--tenant", "acme", "--request-id", "q1", "--wait", "final", "-o", c.path("final"))
	c.write("key", c.ok("", "ledger", "key"))
	got := c.ok("", "receipt", "verify", c.path("final"), "--key-file", c.path("key"))
	for _, want := range []string{"sanitised:   at 20", "final:       at 20", "on the basis local-root-file", "now:         not drained yet"} {
		if !strings.Contains(got, want) {
			t.Errorf("the receipt does not say %q:\n%s", want, got)
		}
	}
	if _, err := os.Stat(c.path("sanitised")); err != nil {
		t.Error(err)
	}
	status := c.object("", "epoch", "status", "--json")
	if n := len(status["epochs"].([]any)); n != 2 || status["problem"] != "" {
		t.Errorf("status: %v", status)
	}
	if got := c.open(blob); got != "content" {
		t.Errorf("after the turn it opens as %q", got)
	}
	c.fails(18, "", "epoch", "cancel", "1")
	c.fails(18, "", "epoch", "resume", "2")
	c.fails(14, "", "epoch", "cancel", "9")
	c.fails(14, "", "epoch", "turn", "--epoch", "9")
}

func TestEpochUsage(t *testing.T) {
	c := newCLI(t)
	c.fails(exitInvalid, "", "epoch", "cancel", "x")
	c.fails(exitInvalid, "", "epoch", "resume", "0")
	c.fails(exitInvalid, "", "epoch", "turn", "--wait", "soon")
	c.fails(exitInvalid, "", "receipt", "get", "--tenant", "acme", "--index", "1", "--wait", "soon")
	// The making of the tenant has no stages to wait for.
	c.fails(exitInvalid, "", "receipt", "get", "--tenant", "acme", "--index", "1", "--wait", "final")
	if v := c.object("", "epoch", "confirm-clock", "--json"); v["time"] == nil {
		t.Errorf("confirmed: %v", v)
	}
}
