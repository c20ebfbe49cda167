package main

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lethe/cmd/internal/parts"
	"lethe/keyd/store/badger"
	"lethe/sdk/sdktest"
)

// flags are the parts of the CLI's keyd, as restore's flags name them; the
// store is elsewhere.
func (c *cli) parts(store string) []string {
	d := c.keyd.Dir()
	return []string{
		"--store", store, "--kms-file", filepath.Join(d, "roots"), "--kms-keyfile", filepath.Join(d, "keyfile"),
		"--anchor", filepath.Join(d, "anchor"),
	}
}

func TestBackup(t *testing.T) {
	c := newCLI(t)
	file := filepath.Join(c.dir, "keys.backup")
	v := c.object("", "backup", "-o", file)
	if v["output"] != file || v["epoch"] != 1.0 || v["store"] != "badger" {
		t.Errorf("backup: %v", v)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	// On the standard output there is the file, and nothing else.
	b := []byte(c.ok("", "backup"))
	if err := os.WriteFile(filepath.Join(c.dir, "piped"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, filepath.Join(c.dir, "piped")} {
		if got := c.object("", "backup", "verify", name); got["incarnation"] != v["incarnation"] {
			t.Errorf("verify: %v", got)
		}
	}
	c.ok(string(b), "backup", "verify", "-")
	c.fails(exitOther, "", "backup", "-o", file) // it is there
	c.fails(exitInvalid, "", "backup", "somewhere")

	// What was cut, edited or never was one.
	for what, bad := range map[string][]byte{
		"cut": b[:len(b)-1], "edited": append(bytes.Clone(b[:200]), append([]byte{b[200] ^ 1}, b[201:]...)...),
		"continued": append(bytes.Clone(b), 0), "empty": nil, "something else": []byte("pg_dump"),
	} {
		name := c.write("bad", string(bad))
		if said := c.fails(exitOther, "", "backup", "verify", name); !strings.Contains(said, "backup") {
			t.Errorf("%s: %s", what, said)
		}
		store := filepath.Join(c.dir, "of bad")
		c.fails(exitOther, "", append([]string{"restore", "--backup", name}, c.parts(store)...)...)
		if names, _ := filepath.Glob(store + "*"); len(names) != 0 {
			t.Errorf("%s: it left %q", what, names)
		}
	}
	c.keyd.Stop()
	gone := filepath.Join(c.dir, "gone.backup")
	c.fails(exitUnavailable, "", "--timeout", "2s", "backup", "-o", gone)
	if names, _ := os.ReadDir(c.dir); len(names) != 3 {
		t.Errorf("a backup that failed left something: %v", names)
	}
}

// TestFullDisk: a backup that does not fit leaves no file.
func TestBackupDiskFull(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Fatal("needs /dev/full")
	}
	c := newCLI(t)
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	c.app = func(a *app) { a.out = full }
	if said := c.fails(exitOther, "", "backup"); !strings.Contains(said, "no space left") {
		t.Errorf("a full disk: %s", said)
	}
}

// Through a link, the directory that it leads to is restored, and the link stays.
func TestRestoreThroughALink(t *testing.T) {
	c := newCLI(t)
	file := c.path("keys.backup")
	c.ok("", "backup", "-o", file)
	link, target := c.path("link"), c.path("target")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"restore", "--backup", file}, c.parts(link)...)
	if said := c.fails(exitOther, "", args...); !strings.Contains(said, "link") {
		t.Errorf("a link that leads nowhere: %s", said)
	}
	if err := os.Mkdir(target, 0o700); err != nil {
		t.Fatal(err)
	}
	c.ok("", args...)
	v := c.object("", append(args, "--force")...)
	if aside, _ := v["moved_aside"].(string); !strings.HasPrefix(aside, target) {
		t.Errorf("moved aside: %q", aside)
	}
	if to, err := os.Readlink(link); err != nil || to != target {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	if there, err := badger.Exists(target); err != nil || !there {
		t.Errorf("a store where the link leads: %v, %v", there, err)
	}
}

// overtaken is a file at whose end somebody else has been faster.
type overtaken struct {
	io.Reader
	by func() error
}

func (o *overtaken) Read(p []byte) (int, error) {
	n, err := o.Reader.Read(p)
	if err == io.EOF {
		if failed := o.by(); failed != nil {
			err = failed
		}
	}
	return n, err
}

// Of two restores into one place the second says that it came second.
func TestRestoreOvertaken(t *testing.T) {
	c := newCLI(t)
	file := []byte(c.ok("", "backup"))
	o := parts.Options{Data: c.keyd.Dir(), Store: c.path("store"), MinFree: badger.LeastMinFree}
	o.SetDefaults()
	log := slog.New(slog.DiscardHandler)
	second := &overtaken{bytes.NewReader(file), func() error {
		_, _, err := o.PutBack(t.Context(), bytes.NewReader(file), false, log)
		return err
	}}
	if _, _, err := o.PutBack(t.Context(), second, false, log); err == nil || !strings.Contains(err.Error(), "meanwhile") {
		t.Errorf("the second one: %v", err)
	}
	if there, err := badger.Exists(o.Store); err != nil || !there {
		t.Errorf("the first one's store: %v, %v", there, err)
	}
	if left, _ := filepath.Glob(o.Store + ".*"); len(left) != 0 {
		t.Errorf("they left %q", left)
	}
}

func TestRestore(t *testing.T) {
	c := newCLI(t)
	plain := c.write("plain", "her words")
	sealed := filepath.Join(c.dir, "sealed")
	c.ok("", "seal", "--tenant", "acme", "--subject", "alice", "--class", "memory", "-o", sealed, plain)
	file := filepath.Join(c.dir, "keys.backup")
	c.ok("", "backup", "-o", file)
	c.ok("", "destroy", "--yes", "--tenant", "acme", "--subject", "alice", "--reason", "test", "--request-id", "r1")
	c.keyd.Stop()

	store := filepath.Join(c.keyd.Dir(), "store")
	args := append([]string{"restore", "--backup", file}, c.parts(store)...)
	if said := c.fails(exitOther, "", args...); !strings.Contains(said, "--force") {
		t.Errorf("over an existing store: %s", said)
	}
	v := c.object("", append(args, "--force")...)
	aside, _ := v["moved_aside"].(string)
	if v["replayed"] != false || aside == "" {
		t.Fatalf("restore: %v", v)
	}
	if names, err := os.ReadDir(aside); err != nil || len(names) == 0 {
		t.Errorf("the old store was not kept: %v", err)
	}
	if err := c.keyd.TryRestart(); err == nil || !strings.Contains(err.Error(), "1 destruction") {
		t.Fatalf("a restored store that was not replayed: %v", err)
	}
	v = c.object("", append([]string{"restore", "--replay"}, c.parts(store)...)...)
	if v["replayed"] != true || v["ledger_to"] == v["ledger_from"] {
		t.Errorf("replay: %v", v)
	}
	if err := c.keyd.TryRestart(); err != nil {
		t.Fatal(err)
	}
	c.fails(10, "", "open", "--tenant", "acme", "--subject", "alice", "--class", "memory", sealed)

	// Both at once, elsewhere, while that keyd runs: it is not behind, and is
	// not the one that has the store.
	c.fails(exitInvalid, "", "restore")
	c.fails(exitInvalid, "", "restore", "--replay", "--force")
	c.fails(exitInvalid, "", "restore", "--backup", file, "--call-off-destruction")
	if said := c.fails(exitOther, "", append([]string{"restore", "--replay"}, c.parts(store)...)...); !strings.Contains(said, "locked") {
		t.Errorf("replaying a store in use: %s", said)
	}
	if said := c.fails(exitOther, "", append(args, "--force")...); !strings.Contains(said, "locked") {
		t.Errorf("restoring over a store in use: %s", said)
	}
}

// A backup that nothing opens any more does not take the place of a store that
// serves; what else goes wrong says where that store is.
func TestRestoreUnusableBackup(t *testing.T) {
	c := newCLI(t, sdktest.WithEpochs(100*time.Millisecond, 100*time.Millisecond))
	c.seal("content")
	file := c.path("keys.backup")
	c.ok("", "backup", "-o", file)
	c.ok("", "epoch", "turn", "--wait", "closed")
	blob := c.seal("newer")
	c.keyd.Stop()

	store := filepath.Join(c.keyd.Dir(), "store")
	args := append([]string{"restore", "--backup", file, "--force", "--replay"}, c.parts(store)...)
	if said := c.fails(exitOther, "", args...); !strings.Contains(said, "is destroyed") || !strings.Contains(said, "in its place again") {
		t.Errorf("the root is destroyed: %s", said)
	}
	if names, _ := filepath.Glob(store + "*"); len(names) != 1 {
		t.Errorf("it left %q", names)
	}
	if err := c.keyd.TryRestart(); err != nil {
		t.Fatal(err)
	}
	if got := c.open(blob); got != "newer" {
		t.Errorf("it opens as %q", got)
	}
	c.keyd.Stop()

	said := c.fails(exitOther, "", append(args, "--anchor", c.path("no-anchor"))...)
	_, rest, _ := strings.Cut(said, "what was there is now ")
	aside, _, _ := strings.Cut(rest, ")")
	if names, err := os.ReadDir(aside); err != nil || len(names) == 0 {
		t.Errorf("without its anchor: %s: %v", said, err)
	}
}
