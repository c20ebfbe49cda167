package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/store/badger"
	storev1 "lethe/proto/keyd/store/v1"
)

// newStore makes a store with one row: a subject's DEK under epoch 7, which
// another row of it calls dead if dead is set.
func newStore(c *cli, name string, dead bool) (dir string) {
	c.t.Helper()
	dir = c.path(name)
	s, err := badger.Open(badger.Options{Dir: dir, Create: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		c.t.Fatal(err)
	}
	owner, id := strings.Repeat("o", 32), strings.Repeat("k", 16)
	class := &storev1.SubjectClass{KeyId: []byte(id)}
	if dead {
		class = &storev1.SubjectClass{DeadKeyIds: [][]byte{[]byte(id)}}
	}
	rows := map[string]proto.Message{
		"w\x00\x00\x00\x07D" + owner + id: &storev1.Wrapped{KekId: make([]byte, 16), Ciphertext: make([]byte, 72)},
		"S" + owner:                       &storev1.Subject{Classes: []*storev1.SubjectClass{class}},
	}
	if err := putAll(c.t.Context(), s.Update, rows); err != nil {
		c.t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		c.t.Fatal(err)
	}
	return dir
}

// putAll puts rows in one transaction, of whatever type a store has for it.
func putAll[Tx interface{ Put(key, value []byte) error }](ctx context.Context, update func(context.Context, func(Tx) error) error, rows map[string]proto.Message) error {
	return update(ctx, func(tx Tx) error {
		for key, row := range rows {
			b, err := proto.Marshal(row)
			if err != nil {
				return err
			}
			if err := tx.Put([]byte(key), b); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestAuditResidue(t *testing.T) {
	c := offlineCLI(t)
	id := hex.EncodeToString([]byte(strings.Repeat("k", 16)))
	clean, dirty := newStore(c, "clean", false), newStore(c, "dirty", true)

	if out := c.ok("", "audit", "residue", "--store", clean); !strings.Contains(out, "no wrapped key") || !strings.Contains(out, "not seen:") {
		t.Errorf("of a clean store it prints\n%s", out)
	}
	v := c.object("", "audit", "residue", "--store", clean)
	if len(v["residue"].([]any)) != 0 || v["dead_key_ids"] != 0.0 {
		t.Errorf("of a clean store: %v", v)
	}
	r := c.run("", "audit", "residue", "--store", dirty)
	if r.code != exitResidue || !strings.Contains(r.out, id) || !strings.Contains(r.err, "residue: ") {
		t.Errorf("exit code %d\n%s\n%s", r.code, r.out, r.err)
	}
	r = c.run("", "audit", "residue", "--store", dirty, "--json")
	if r.code != exitResidue || !strings.Contains(r.err, `"RESIDUE"`) {
		t.Errorf("exit code %d, %s", r.code, r.err)
	}
	found := c.decode(r.out)["residue"].([]any)
	if len(found) == 0 {
		t.Fatal("nothing is found")
	}
	x := found[0].(map[string]any)
	if x["key_id"] != id || x["epoch"] != 7.0 || x["epoch_closed"] != false || x["what"] != "key" {
		t.Errorf("found %v", x)
	}
	if _, err := os.Stat(filepath.Join(dirty, x["file"].(string))); err != nil {
		t.Error(err)
	}
	if r := c.run("", "audit", "residue", "--store", clean, "--key-id", id); r.code != exitResidue {
		t.Errorf("a key id that is named: exit code %d, %s", r.code, r.err)
	}

	c.fails(exitInvalid, "", "audit", "residue")
	c.fails(exitInvalid, "", "audit", "residue", "--store", clean, "--key-id", "abc")
	c.fails(exitOther, "", "audit", "residue", "--store", c.path("nowhere"))
	s, err := badger.Open(badger.Options{Dir: clean, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	c.fails(exitOther, "", "audit", "residue", "--store", clean)
	s.Close()
}

// A store with a damaged table is not called clean.
func TestAuditResidueOfADamagedStore(t *testing.T) {
	c := offlineCLI(t)
	dir := newStore(c, "store", true)
	damaged := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".sst" {
			return err
		}
		damaged++
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		b[len(b)-40] ^= 1
		return os.WriteFile(path, b, 0o600)
	})
	if err != nil || damaged == 0 {
		t.Fatal(damaged, err)
	}
	if text := c.fails(exitOther, "", "audit", "residue", "--store", dir); !strings.Contains(text, "damaged") {
		t.Errorf("it says %q", text)
	}
	// Named, the key is found in the bytes all the same.
	if r := c.run("", "audit", "residue", "--store", dir, "--key-id", hex.EncodeToString([]byte(strings.Repeat("k", 16)))); r.code != exitResidue {
		t.Errorf("exit code %d: %s", r.code, r.err)
	}
}

// A store whose newest commits are missing is not called clean, and is left as
// it is.
func TestAuditResidueOfAStoreThatLostItsEnd(t *testing.T) {
	c := offlineCLI(t)
	dir := c.path("store")
	s, err := badger.Open(badger.Options{Dir: dir, Create: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := putAll(t.Context(), s.Update, map[string]proto.Message{"S": &storev1.Subject{}}); err != nil {
		t.Fatal(err)
	}
	log := func(dir string) string {
		t.Helper()
		logs, err := filepath.Glob(filepath.Join(dir, "*.mem"))
		if err != nil || len(logs) == 0 {
			t.Fatalf("the store has no log: %v", err)
		}
		return logs[len(logs)-1]
	}
	for what, damage := range map[string]func(dir string) error{
		"removed": func(dir string) error { return os.Remove(log(dir)) },
		"emptied": func(dir string) error { return os.Truncate(log(dir), 0) },
	} {
		killed := c.path(what)
		if err := os.CopyFS(killed, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		c.ok("", "audit", "residue", "--store", killed)
		if err := damage(killed); err != nil {
			t.Fatal(err)
		}
		before := contents(t, killed)
		if text := c.fails(exitOther, "", "audit", "residue", "--store", killed); !strings.Contains(text, "with the newest commits") {
			t.Errorf("%s: it says %q", what, text)
		}
		if r := c.run("", "audit", "residue", "--store", killed, "--json"); r.code != exitOther || c.decode(r.out)["damage"] == "" {
			t.Errorf("%s: exit code %d, %s", what, r.code, r.out)
		}
		if !maps.Equal(contents(t, killed), before) {
			t.Errorf("%s: the files were changed", what)
		}
	}
}

// contents returns the checksums of the files below dir.
func contents(t *testing.T, dir string) map[string][sha256.Size]byte {
	t.Helper()
	sums := make(map[string][sha256.Size]byte)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		sums[path] = sha256.Sum256(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sums
}

// A table keeps only the part of a key in which it differs from another: a key
// id of which it keeps a byte is found all the same.
func TestAuditResidueOfAKeyThatIsCut(t *testing.T) {
	c := offlineCLI(t)
	dir := newStore(c, "store", false)
	s, err := badger.Open(badger.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("k", 15) + "l"
	err = putAll(t.Context(), s.Update, map[string]proto.Message{
		"w\x00\x00\x00\x07D" + strings.Repeat("o", 32) + id: &storev1.Wrapped{KekId: make([]byte, 16), Ciphertext: bytes.Repeat([]byte{1}, 72)},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r := c.run("", "audit", "residue", "--store", dir, "--key-id", hex.EncodeToString([]byte(id)))
	if r.code != exitResidue || strings.Count(r.out, hex.EncodeToString([]byte(id))) == 0 {
		t.Errorf("exit code %d\n%s\n%s", r.code, r.out, r.err)
	}
}
