package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// disk is a file on a disk on which room bytes are free.
type disk struct {
	bytes.Buffer
	room int
}

func (d *disk) Write(p []byte) (int, error) {
	if len(p) > d.room {
		n, _ := d.Buffer.Write(p[:d.room])
		d.room = 0
		return n, &os.PathError{Op: "write", Path: "audit", Err: syscall.ENOSPC}
	}
	d.room -= len(p)
	return d.Buffer.Write(p)
}

func (d *disk) Close() error { return nil }

// Half a line spoils no other: not when the disk is full in its middle, nor when
// there is room for no more than the end of the half line.
func TestAuditLineAfterHalfOfOne(t *testing.T) {
	d := &disk{}
	a := &auditLog{file: d}
	for _, w := range []struct {
		room  int
		line  string
		fails bool
	}{
		{100, "first\n", false}, {3, "second\n", true}, {0, "third\n", true},
		{1, "fourth\n", true}, {100, "fifth\n", false}, {100, "sixth\n", false},
		{5, "seventh\n", true}, {4, "eighth\n", true}, {100, "ninth\n", false},
	} {
		d.room = w.room
		if _, err := a.Write([]byte(w.line)); (err != nil) != w.fails {
			t.Errorf("%q: %v", w.line, err)
		}
	}
	if got, want := d.String(), "first\nsec\nfifth\nsixth\nseven\neig\nninth\n"; got != want {
		t.Errorf("the file holds %q, want %q", got, want)
	}
}

// A half line that the keyd before left is no different.
func TestAuditLogOfAKeydThatWasCutOff(t *testing.T) {
	for before, want := range map[string]string{
		"": "next\n", "whole\n": "whole\nnext\n", "whole\nhal": "whole\nhal\nnext\n",
	} {
		name := filepath.Join(t.TempDir(), "audit")
		if err := os.WriteFile(name, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := openAuditLog(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Write([]byte("next\n")); err != nil {
			t.Error(err)
		}
		a.Close()
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("after %q the file holds %q, %v", before, got, err)
		}
	}
}

// On a full disk keyd starts, and erases, and says that audit lines are lost.
func TestAuditLogOnAFullDisk(t *testing.T) {
	const full = "/dev/full"
	switch _, err := os.Stat(full); {
	case err == nil:
	case os.Getenv("CI") == "true":
		t.Fatalf("no device that is always full: %v", err)
	default:
		t.Skipf("no device that is always full: %v", err)
	}
	d, client := start(t, dataDir(t), nil, "--audit-log", full) // which asks its health: a call
	if c := component(t, client, "audit"); c.Healthy || !strings.Contains(c.Detail, "no space left") {
		t.Errorf("the audit log is %v", c)
	}
	if c := component(t, client, "store"); !c.Healthy {
		t.Errorf("the store is %v", c)
	}
	d.stop(t)
	for _, want := range []string{"audit lines are being lost", "audit lines were lost until the end", "no space left"} {
		if n := strings.Count(d.said(), want); n == 0 || n > 2 {
			t.Errorf("it said %q %d times:\n%s", want, n, d.said())
		}
	}
}
