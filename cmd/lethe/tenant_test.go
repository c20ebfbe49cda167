package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestTenantsAndClasses(t *testing.T) {
	c := newCLI(t)
	v := c.object("", "tenant", "create", "beta", "--class", "memory:12h:10s", "--class", "trace", "--class", "log::0s")
	for _, class := range v["classes"].([]any) {
		delete(class.(map[string]any), "ledger_index")
	}
	want := "[map[bucket_width_s:43200 lease_ms:10000 name:memory number:1 retention_s:<nil>] " +
		"map[bucket_width_s:2.592e+06 lease_ms:60000 name:trace number:2 retention_s:<nil>] " +
		"map[bucket_width_s:2.592e+06 lease_ms:0 name:log number:3 retention_s:<nil>]]"
	if got := fmt.Sprint(v["classes"]); got != want || v["tenant"] != "beta" {
		t.Errorf("created: %v", v)
	}
	if out := c.ok("", "tenant", "list"); out != "acme\nbeta\n" {
		t.Errorf("the tenants are %q", out)
	}
	if v := c.object("", "tenant", "list"); fmt.Sprint(v["tenants"]) != "[acme beta]" {
		t.Errorf("the tenants are %v", v)
	}

	// What is not named stays, or for a new class is the default.
	policy := func(args ...string) string {
		t.Helper()
		class := c.object("", append([]string{"class", "put", "--tenant", "beta"}, args...)...)["class"].(map[string]any)
		return fmt.Sprint(class["bucket_width_s"], " ", class["lease_ms"])
	}
	for _, x := range [][]string{
		{"43200 5000", "memory", "--lease", "5s"},
		{"86400 5000", "memory", "--width", "1d"},
		{"3600 0", "memory", "--width", "1h", "--lease", "0s"},
		{"3600 0", "memory"},
		{"2.592e+06 60000", "fresh"},
		{"3600 60000", "other", "--width", "1h"},
	} {
		if got := policy(x[1:]...); got != x[0] {
			t.Errorf("class put %s: %s, want %s", strings.Join(x[1:], " "), got, x[0])
		}
	}
	out := c.ok("", "class", "list", "--tenant", "beta")
	for _, line := range []string{"CLASS   NUMBER  BUCKET  LEASE  RETENTION", "memory  1       1h      0s     for ever", "trace   2       30d     1m     for ever"} {
		if !strings.Contains(out, line+"\n") {
			t.Errorf("no line %q in:\n%s", line, out)
		}
	}
	for _, spec := range []string{"", "Memory", "a:b", "a:1d:x", "a:-1h", "a:1h:1m:1s", "a:1m", "a:400d", "a:1d:2h"} {
		c.fails(2, "", "tenant", "create", "gamma", "--class", spec)
	}
	c.fails(2, "", "tenant", "create", "gamma", "--class", "a", "--class", "a")
	c.fails(2, "", "tenant", "create")
	c.fails(2, "", "tenant", "create", "Gamma")
	c.fails(14, "", "class", "list", "--tenant", "gamma")
}

func TestManyTenants(t *testing.T) {
	c := newCLI(t)
	for i := range 12 {
		c.ok("", "tenant", "create", fmt.Sprintf("t%02d", i), "--class", "a")
	}
	if got := strings.Fields(c.ok("", "tenant", "list")); len(got) != 13 || got[0] != "acme" || got[12] != "t11" {
		t.Errorf("the tenants are %v", got)
	}
}

func TestStatus(t *testing.T) {
	c := newCLI(t)
	v := c.object("", "status")
	names := []string{}
	for _, component := range v["components"].([]any) {
		component := component.(map[string]any)
		names = append(names, component["name"].(string))
		if component["healthy"] != true {
			t.Errorf("not healthy: %v", component)
		}
	}
	if v["development"] != true || v["ledger_size"] != "6" || v["anchored_size"] != "6" || v["epoch"] != float64(1) || len(names) < 3 {
		t.Errorf("the status is %v", v)
	}
	out := c.ok("", "status")
	for _, want := range append(names, "COMPONENT", "healthy", "6 entries, 6 of them anchored", "development") {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
}

func TestDurations(t *testing.T) {
	for s, d := range map[string]time.Duration{
		"30d": 30 * day, "0s": 0, "1m": time.Minute, "12h": 12 * time.Hour, "1h30m": 90 * time.Minute,
		"90s": 90 * time.Second, "1ms": time.Millisecond, "0d": 0, "366d": 366 * day, "48h": 2 * day, "106751d": 106751 * day,
	} {
		got, err := parseDuration(s)
		if err != nil || got != d {
			t.Errorf("%s is %v, %v", s, got, err)
		}
		again, err := parseDuration(formatDuration(got))
		if err != nil || again != got {
			t.Errorf("%s is written as %s, which is %v, %v", s, formatDuration(got), again, err)
		}
	}
	for _, s := range []string{"", "d", "1", "-1d", "1.5d", "-1h", "1x", "99999999999d", "106752d", "4294967296d", "1d12h"} {
		if d, err := parseDuration(s); err == nil {
			t.Errorf("%q is %v", s, d)
		}
	}
	for d, s := range map[time.Duration]string{30 * day: "30d", time.Minute: "1m", time.Hour: "1h", 90 * time.Minute: "1h30m", 10 * time.Second: "10s", 0: "0s", 70 * time.Minute: "1h10m", 100 * time.Second: "1m40s"} {
		if got := formatDuration(d); got != s {
			t.Errorf("%v is written as %s", d, got)
		}
	}
}

func TestRetentionSchedule(t *testing.T) {
	c := newCLI(t)
	put := func(args ...string) map[string]any {
		t.Helper()
		return c.object("", append([]string{"class", "put", "--tenant", "acme"}, args...)...)["class"].(map[string]any)
	}
	if got := put("trace", "--retention", "14d", "--approved-by", "dpo-2026-04"); got["retention_s"] != 14*86400.0 || got["end_action"] != "destroy" {
		t.Errorf("put: %v", got)
	}
	// What is not given stays.
	if got := put("trace", "--lease", "5s", "--end-action", "deny"); got["retention_s"] != 14*86400.0 || got["approved_by"] != "dpo-2026-04" || got["end_action"] != "deny" {
		t.Errorf("put: %v", got)
	}
	if got := put("metadata", "--width", "1d", "--retention", "396d", "--approved-by", "dpo-2026-04"); got["end_action"] != "destroy" {
		t.Errorf("put: %v", got)
	}
	out := c.ok("", "class", "schedule", "--tenant", "acme")
	for _, want := range []string{"trace ", "14d", "opens refused, key kept", "396d", "opens refused, key destroyed 1d later", "dpo-2026-04", "for ever", " 1d + 1h ", "tenant acme, as of 20"} {
		if !strings.Contains(out, want) {
			t.Errorf("the schedule lacks %q:\n%s", want, out)
		}
	}
	v := c.object("", "class", "schedule", "--tenant", "acme")
	if classes := v["classes"].([]any); v["grace_s"] != 86400.0 || v["longest_lease_s"] != 3600.0 || classes[len(classes)-1].(map[string]any)["bucket_width_s"] == nil {
		t.Errorf("the schedule as JSON: %v", v)
	}
	out = c.ok("", "class", "schedule", "--tenant", "acme", "--markdown")
	if lines := strings.Split(out, "\n"); !strings.HasPrefix(lines[0], "# Retention schedule of tenant acme, as of 20") || lines[1] != "" ||
		!strings.HasPrefix(lines[2], "| CLASS |") || !strings.HasPrefix(lines[3], "|---|") || strings.Count(lines[4], "|") != strings.Count(lines[2], "|") {
		t.Errorf("not a table:\n%s", out)
	}
	// An approval is of one retention.
	c.fails(exitInvalid, "", "class", "put", "--tenant", "acme", "trace", "--retention", "15d")
	if got := put("trace", "--retention", "none"); got["retention_s"] != nil || got["end_action"] != nil {
		t.Errorf("put: %v", got)
	}
	c.fails(exitInvalid, "", "class", "put", "--tenant", "acme", "memory", "--retention", "14d")
	c.fails(exitInvalid, "", "class", "put", "--tenant", "acme", "memory", "--retention", "14d", "--approved-by", "dpo", "--end-action", "keep")
}

func TestScheduleAndCancel(t *testing.T) {
	c := newCLI(t)
	blob := c.ok("hello", "seal", "--tenant", "acme", "--subject", "ann", "--class", "memory")
	due := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	v := c.object("", "destroy", "--tenant", "acme", "--subject", "ann", "--reason", "test", "--yes", "--request-id", "r1", "--not-before", due)
	if v["due"] != due {
		t.Errorf("scheduled: %v", v)
	}
	c.fails(11, blob, "open", "--tenant", "acme", "--subject", "ann", "--class", "memory")
	if v := c.object("", "cancel", "--tenant", "acme", "--subject", "ann", "--reason", "test"); v["receipt"] == "" {
		t.Errorf("cancelled: %v", v)
	}
	if got := c.ok(blob, "open", "--tenant", "acme", "--subject", "ann", "--class", "memory"); got != "hello" {
		t.Errorf("opened %q", got)
	}
	c.fails(14, "", "cancel", "--tenant", "acme", "--subject", "ann", "--reason", "test")
}

func TestDestroyWaitsForHolds(t *testing.T) {
	c := newCLI(t)
	blob := c.ok("hello", "seal", "--tenant", "acme", "--subject", "ann", "--class", "memory")
	open := []string{"open", "--tenant", "acme", "--subject", "ann", "--class", "memory"}
	destroy := []string{"destroy", "--tenant", "acme", "--subject", "ann", "--reason", "gdpr-art17", "--yes", "--request-id", "r1"}
	c.ok("", "hold", "place", "h1", "--tenant", "acme", "--subject", "ann", "--reason", "litigation")
	c.fails(13, "", destroy...)
	destroy = append(destroy, "--wait-for-holds")
	if out := c.ok("", destroy...); !strings.HasPrefix(out, "waiting, not destroyed") || !strings.Contains(out, "not destroyed, not drained") {
		t.Errorf("waiting:\n%s", out)
	}
	v := c.object("", destroy...)
	if v["due"] == nil || v["already_destroyed"] != false || v["stages"].(map[string]any)["destroyed"] != nil {
		t.Errorf("waiting: %v", v)
	}
	c.fails(11, blob, open...)
	c.ok("", "hold", "release", "h1", "--tenant", "acme", "--subject", "ann", "--reason", "over")
	// keyd goes on by itself; how soon depends on the machine.
	for c.object("", destroy...)["due"] != nil {
		time.Sleep(10 * time.Millisecond)
	}
	c.fails(10, blob, open...)
	if out := c.ok("", destroy...); !strings.HasPrefix(out, "destroyed\n") {
		t.Errorf("destroyed:\n%s", out)
	}
}

func TestDestroyTenant(t *testing.T) {
	c := newCLI(t)
	blob := c.ok("hello", "seal", "--tenant", "acme", "--subject", "ann", "--class", "memory")
	c.fails(exitInvalid, "", "tenant", "destroy", "acme", "--reason", "test", "--yes-erase", "beta")
	if v := c.object("", "tenant", "destroy", "acme", "--reason", "test", "--yes-erase", "acme"); v["already_destroyed"] != false {
		t.Errorf("destroyed: %v", v)
	}
	c.fails(10, blob, "open", "--tenant", "acme", "--subject", "ann", "--class", "memory")
}

func TestTenantCreateAgain(t *testing.T) {
	c := newCLI(t)
	create := []string{"tenant", "create", "beta", "--class", "note:1h:5s"}
	first := c.object("", append(create, "--request-id", "r1")...)
	again := c.object("", append(create, "--request-id", "r1")...)
	if fmt.Sprint(first) != fmt.Sprint(again) || first["request_id"] != "r1" {
		t.Errorf("%v, and again %v", first, again)
	}
	c.fails(18, "", append(create, "--request-id", "r2")...)
	c.fails(18, "", create...)
	if r := c.run("", "tenant", "create", "gamma"); r.code != 0 || !strings.HasPrefix(r.err, "request id: cli-") {
		t.Errorf("exit code %d, %q", r.code, r.err)
	}
}
