package main

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A second deployment that names the first one's socket by mistake is refused,
// before it makes a store of its own; the first one is served on.
func TestSocketInUse(t *testing.T) {
	data, other := dataDir(t), dataDir(t)
	first, client := start(t, data, nil)
	said := fails(t, other, nil, "--listen", "unix:"+filepath.Join(data, "keyd.sock"))
	if !strings.Contains(said, "somebody answers on the socket") {
		t.Errorf("it says %s", said)
	}
	component(t, client, "store")
	first.stop(t)
	if _, err := os.Lstat(filepath.Join(data, "keyd.sock")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket of a keyd that was stopped: %v", err)
	}
	start(t, other, nil) // nothing stands in the way of the right one
}

// A process that stands still has its socket yet.
func TestSocketOfOneThatStandsStill(t *testing.T) {
	data := dataDir(t)
	first, _ := start(t, data, nil)
	first.freeze(t)
	if err := freeSocket(t.Context(), "unix:"+filepath.Join(data, "keyd.sock")); err == nil {
		t.Error("the socket of a keyd that stands still is free")
	}
}

func TestSocketFromACrashIsReplaced(t *testing.T) {
	path := filepath.Join(dataDir(t), "s")
	left, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	left.(*net.UnixListener).SetUnlinkOnClose(false)
	left.Close()
	lis, err := listen(t.Context(), "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	if _, err := listen(t.Context(), "unix:"+path); err == nil {
		t.Error("a socket in use was taken over")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := freeSocket(ctx, "unix:"+path); err == nil {
		t.Error("a socket is free that was not asked")
	}
}

// Somebody else's socket, or file, in the place of one's own stays.
func TestOnlyTheOwnSocketIsRemoved(t *testing.T) {
	path := filepath.Join(dataDir(t), "s")
	lis, err := listen(t.Context(), "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := listen(t.Context(), "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	lis.Close()
	lis.Close() // as the server does, again
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the other one's socket: %v", err)
	}
	conn.Close()
	other.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the own socket at its end: %v", err)
	}
}
