package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	keydv1 "lethe/proto/keyd/v1"
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

// The status tells how far a turn is, what is left of it, and that a final_by was
// missed.
func TestEpochProgress(t *testing.T) {
	e := &keydv1.Epoch{
		Number: 7, State: keydv1.EpochState_EPOCH_STATE_DRAINING, RowsTotal: 400, RowsRewrapped: 115, RowsDead: 3, RowsDamaged: 2,
		Eta: durationpb.New(210 * time.Second), FinalBy: timestamppb.New(time.Date(2026, 3, 9, 12, 0, 0, 0, time.UTC)), Late: true,
		WaitingFor: "its keys to be carried over",
	}
	row := strings.Join(newEpochResult(e).row(), "|")
	for _, want := range []string{"7|draining|", "|120 of 400, 2 DAMAGED, 3m30s left|", "|by 2026-03-09", " LATE|", "|its keys to be carried over|"} {
		if !strings.Contains(row, want) {
			t.Errorf("%q does not say %q", row, want)
		}
	}
	b, err := json.Marshal(newEpochResult(e))
	if err != nil || !strings.Contains(string(b), `"eta_seconds":210,`) || !strings.Contains(string(b), `"late":true`) {
		t.Errorf("%s, %v", b, err)
	}
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
