//go:build unix

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// hangAnchor has the calls of an anchor in a directory not return, as when its
// file system hangs: where they look for objects they find a pipe that nobody
// writes to. answer has them return, with an error.
func hangAnchor(t *testing.T, dir string) (answer func()) {
	t.Helper()
	pipe := filepath.Join(dir, "objects", "x000", "x000", "x000", "x001")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		aside := dir + ".pipe"
		if err := os.Rename(pipe, aside); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(aside, os.O_RDWR, 0) // also where nobody reads
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
}

// says waits until a keyd has said something.
func (d *daemon) says(t *testing.T, what string) {
	t.Helper()
	for !strings.Contains(d.said(), what) {
		select {
		case <-d.done:
			t.Fatalf("keyd ended: %v; it said:\n%s", d.err, d.said())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestHangingAnchor: while the anchor's file system does not answer, nothing is
// acknowledged and keyd says so; it is well again by itself, and stops.
func TestHangingAnchor(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	data := dataDir(t)
	d, client := start(t, data, nil, "--anchor-timeout", "1s")
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(ctx, &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	destroy := func(client *sdk.Client, subject string) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_, err := client.DestroyKey(ctx, sdk.DestroyRequest{Tenant: "acme", Subject: subject, RequestID: "of " + subject, Reason: "gdpr-17"})
		return err
	}
	await := func(healthy bool) {
		t.Helper()
		for component(t, client, "anchor").Healthy != healthy {
			if ctx.Err() != nil {
				t.Fatalf("the anchor is not told as healthy: %v", healthy)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	answer := hangAnchor(t, filepath.Join(data, "anchor"))
	if err := destroy(client, "alice"); err == nil {
		t.Error("it is acknowledged")
	}
	await(false)
	if c := component(t, client, "anchor"); !strings.Contains(c.Detail, "does not answer since") || !strings.Contains(c.Detail, filepath.Join(data, "anchor")) {
		t.Errorf("the anchor's status: %v", c)
	}
	d.says(t, "waiting for the anchor, which does not answer")
	answer()
	await(true)
	if err := destroy(client, "alice"); err != nil {
		t.Errorf("once it answers: %v", err)
	}

	answer = hangAnchor(t, filepath.Join(data, "anchor"))
	if err := destroy(client, "bob"); err == nil {
		t.Error("it is acknowledged")
	}
	client.Close()
	d.stop(t)
	if said := d.said(); !strings.Contains(said, "stopping without the anchor") || !strings.Contains(said, "msg=stopped") {
		t.Errorf("it said:\n%s", said)
	}
	answer()
	_, client = start(t, data, nil)
	if err := destroy(client, "bob"); err != nil {
		t.Errorf("after a new start: %v", err)
	}
}

// TestStoppedWhileTheAnchorHangs: a start says what it waits for, and ends when
// it is told to.
func TestStoppedWhileTheAnchorHangs(t *testing.T) {
	t.Parallel()
	data := dataDir(t)
	d, client := start(t, data, nil)
	client.Close()
	d.stop(t)
	answer := hangAnchor(t, filepath.Join(data, "anchor"))
	d = launch(t, data, nil)
	d.says(t, "waiting for")
	if said := d.said(); !strings.Contains(said, filepath.Join(data, "anchor")) {
		t.Errorf("it said:\n%s", said)
	}
	d.stop(t)
	if said := d.said(); !strings.Contains(said, "stopped while waiting") {
		t.Errorf("it said:\n%s", said)
	}
	answer()
	start(t, data, nil)
}

// TestKeeperOfAHangingAnchorStops: a keyd that keeps another's anchor stops
// while that one's calls hang.
func TestKeeperOfAHangingAnchorStops(t *testing.T) {
	t.Parallel()
	data, others := dataDir(t), dataDir(t)
	shelf := filepath.Join(others, "shelf")
	if err := os.Mkdir(shelf, 0o700); err != nil {
		t.Fatal(err)
	}
	keeper, _ := start(t, others, nil, "--serve-anchors", shelf)
	_, client := start(t, data, nil, "--anchor", "keyd:unix:"+filepath.Join(others, "keyd.sock")+"/first")
	hangAnchor(t, filepath.Join(shelf, "first"))
	go func() { // it is not answered
		_, _ = keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "acme"})
	}()
	keeper.says(t, "waiting for the anchor, which does not answer")
	keeper.stop(t)
}
