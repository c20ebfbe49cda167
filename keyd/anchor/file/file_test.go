package file_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/anchor/file"
	"lethe/keyd/internal/ledger"
)

// place is a directory.
type place string

func newPlace(t testing.TB) place { return place(filepath.Join(t.TempDir(), "anchor")) }

func (p place) Open(t *testing.T) ledger.Anchor {
	t.Helper()
	return p.open(t)
}

func (p place) open(t testing.TB) *file.Anchor {
	t.Helper()
	a, err := file.Open(file.Options{Dir: string(p), Create: true})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// object is the path of an object, spelled out by hand.
func (p place) object(size uint64) string {
	d := fmt.Sprintf("%015d", size)
	return filepath.Join(string(p), "objects", "x"+d[:3], "x"+d[3:6], "x"+d[6:9], "x"+d[9:12], d[12:])
}

func (p place) Edit(t *testing.T, size uint64, edit func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(p.object(size))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if b = edit(b); b == nil {
		err = os.Remove(p.object(size))
	} else {
		err = os.WriteFile(p.object(size), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	anchortest.Run(t, func(t *testing.T) anchortest.Place { return newPlace(t) })
}

func wantErr(t *testing.T, what string, err error, want ...error) {
	t.Helper()
	for _, w := range want {
		if !errors.Is(err, w) {
			t.Fatalf("%s: got %v, want %v", what, err, w)
		}
	}
}

func TestMissingDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "anchor")
	_, err := file.Open(file.Options{Dir: dir})
	wantErr(t, "Open of a missing directory", err, ledger.ErrAnchorUnavailable, fs.ErrNotExist)
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("Open made it: %v", err)
	}
	_, err = file.Open(file.Options{Dir: filepath.Join(dir, "below"), Create: true})
	wantErr(t, "Create below a missing directory", err, ledger.ErrAnchorUnavailable, fs.ErrNotExist)
	_, err = file.Open(file.Options{})
	wantErr(t, "Open of nothing", err, ledger.ErrAnchorUnavailable)

	a, err := file.Open(file.Options{Dir: dir, Create: true})
	if err != nil {
		t.Fatal(err)
	}
	// It vanishes while it is in use: a disk was unmounted.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	_, err = a.Newest(t.Context())
	wantErr(t, "Newest without a directory", err, ledger.ErrAnchorUnavailable)
	_, err = a.Get(t.Context(), 0)
	wantErr(t, "Get without a directory", err, ledger.ErrAnchorUnavailable)
	h := anchortest.NewHistory(t, 1)
	h.Grow(1)
	wantErr(t, "Put without a directory", a.Put(t.Context(), h.Object(0, 1)), ledger.ErrAnchorUnavailable)
}

func TestPermissions(t *testing.T) {
	p := newPlace(t)
	a := p.open(t)
	h := anchortest.NewHistory(t, 1)
	h.Grow(1)
	if err := a.Put(t.Context(), h.Object(0, 1)); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(string(p), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []fs.FileMode{0o701, 0o710, 0o755, 0o777} {
		if err := os.Chmod(string(p), mode); err != nil {
			t.Fatal(err)
		}
		_, err := file.Open(file.Options{Dir: string(p)})
		wantErr(t, fmt.Sprintf("Open of a directory of mode %o", mode), err, ledger.ErrAnchorUnavailable)
	}
}

func TestNotADirectory(t *testing.T) {
	name := filepath.Join(t.TempDir(), "anchor")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, create := range []bool{false, true} {
		_, err := file.Open(file.Options{Dir: name, Create: create})
		wantErr(t, "Open of a file", err, ledger.ErrAnchorUnavailable)
	}
}

func TestClosed(t *testing.T) {
	a := newPlace(t).open(t)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := a.Newest(t.Context())
	wantErr(t, "Newest after Close", err, ledger.ErrAnchorUnavailable)
}

// A place that cannot be written to answers unavailable, and goes on once it can.
func TestCannotWrite(t *testing.T) {
	p := newPlace(t)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(2)
	if err := a.Put(t.Context(), h.Object(0, 1)); err != nil {
		t.Fatal(err)
	}
	tmp := filepath.Join(string(p), "tmp")
	if err := os.Remove(tmp); err != nil { // also: it is empty after a Put
		t.Fatal(err)
	}
	if err := os.WriteFile(tmp, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "Put without room", a.Put(t.Context(), h.Object(1, 2)), ledger.ErrAnchorUnavailable)
	if o, err := a.Newest(t.Context()); err != nil || o.Size != 1 {
		t.Fatalf("Newest: size %d, %v", o.Size, err)
	}
	if err := os.Remove(tmp); err != nil {
		t.Fatal(err)
	}
	if err := a.Put(t.Context(), h.Object(1, 2)); err != nil {
		t.Fatal(err)
	}
}

func TestOriginFile(t *testing.T) {
	p := newPlace(t)
	h := anchortest.NewHistory(t, 1)
	h.Grow(1)
	if err := p.open(t).Put(t.Context(), h.Object(0, 1)); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(string(p), "origin")
	original, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	open := func(what string) {
		t.Helper()
		_, err := file.Open(file.Options{Dir: string(p)})
		wantErr(t, what, err, ledger.ErrAnchorDamaged)
	}
	for i := range original {
		for _, b := range [][]byte{original[:i], append(append(bytes.Clone(original[:i]), original[i]^1), original[i+1:]...)} {
			if err := os.WriteFile(name, b, 0o600); err != nil {
				t.Fatal(err)
			}
			open(fmt.Sprintf("Open with the origin damaged at %d", i))
		}
	}
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	open("Open of objects without their origin")
	if err := os.WriteFile(name, original, 0o600); err != nil {
		t.Fatal(err)
	}
	p.open(t)
}

// The origin binds the directory before the first object is there.
func TestOriginComesFirst(t *testing.T) {
	p := newPlace(t)
	h, other := anchortest.NewHistory(t, 1), anchortest.NewHistory(t, 2)
	h.Grow(2)
	other.Grow(2)
	a := p.open(t)
	if err := a.Put(t.Context(), h.Object(0, 2)); err != nil {
		t.Fatal(err)
	}
	p.Edit(t, 2, func([]byte) []byte { return nil })
	b := p.open(t)
	wantErr(t, "Put of another ledger", b.Put(t.Context(), other.Object(0, 2)), ledger.ErrForked)
	if err := b.Put(t.Context(), h.Object(0, 2)); err != nil {
		t.Fatal(err)
	}
}

func TestStrangersAndLeftovers(t *testing.T) {
	p := newPlace(t)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(3)
	if err := a.Put(t.Context(), h.Object(0, 2)); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(p.object(2))
	for _, name := range []string{"004x", "0004", "04", ".nfs0001", "x009", "004.tmp", "-04", "+04"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("stray"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// As a crash leaves them between the making of directories and the link.
	for _, d := range []string{"x000/x000/x000/x007", "x999/x000/x000", "x001", "lost+found"} {
		if err := os.MkdirAll(filepath.Join(string(p), "objects", d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	tmp := filepath.Join(string(p), "tmp")
	old, fresh := filepath.Join(tmp, "new-old"), filepath.Join(tmp, "new-fresh")
	for _, name := range []string{old, fresh} {
		if err := os.WriteFile(name, []byte("half an obj"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	past := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(old, past, past); err != nil {
		t.Fatal(err)
	}
	b := p.open(t)
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a leftover is still there: %v", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Errorf("what another process may be writing was taken away: %v", err)
	}
	if o, err := b.Newest(t.Context()); err != nil || o.Size != 2 {
		t.Fatalf("Newest: size %d, %v", o.Size, err)
	}
	if _, err := b.Get(t.Context(), 2); !errors.Is(err, ledger.ErrNoObject) {
		t.Fatalf("Get(2): %v", err)
	}
	if err := b.Put(t.Context(), h.Object(2, 3)); err != nil {
		t.Fatal(err)
	}
	if o, err := a.Get(t.Context(), 2); err != nil || o.Size != 3 {
		t.Fatalf("Get(2): size %d, %v", o.Size, err)
	}
	// A directory where an object should be.
	if err := os.Mkdir(p.object(9), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := a.Newest(t.Context())
	wantErr(t, "Newest with a directory for an object", err, ledger.ErrAnchorDamaged)
}

// childEnv names the directory that the child of TestKill writes to.
const childEnv = "LETHE_TEST_ANCHOR_DIR"

// runAhead is how many acknowledgements the child may be ahead of who reads them.
const runAhead = 20

// TestKill kills a writer at odd moments: whatever it acknowledged is there, the
// walk has no gap, and the next writer goes on.
func TestKill(t *testing.T) {
	const limit = 1500
	if dir := os.Getenv(childEnv); dir != "" {
		killedWriter(t, dir, limit)
		return
	}
	h := sameHistory(t, limit)
	p := newPlace(t)
	var acknowledged uint64
	for cycle := range 10 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), childEnv+"="+string(p))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		heard, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			_, _ = heard.Write([]byte{0})
			word, ok := strings.CutPrefix(lines.Text(), "ack ")
			if !ok {
				t.Fatalf("child: %s", lines.Text())
			}
			if acknowledged, err = strconv.ParseUint(word, 10, 64); err != nil {
				t.Fatal(err)
			}
			if n == 3+7*cycle%23 {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait() // it was killed
		a := p.open(t)
		newest, err := a.Newest(t.Context())
		if err != nil {
			t.Fatalf("cycle %d: %v", cycle, err)
		}
		if newest.Size < acknowledged {
			t.Fatalf("cycle %d: the newest is %d, but %d was acknowledged", cycle, newest.Size, acknowledged)
		}
		var at uint64
		for at < newest.Size {
			o, err := a.Get(t.Context(), at)
			if err != nil || o.From > at || o.Size <= at {
				t.Fatalf("cycle %d: Get(%d): [%d, %d), %v", cycle, at, o.From, o.Size, err)
			}
			if want := h.Object(o.From, o.Size); !ledger.SameHistory(o, want) {
				t.Fatalf("cycle %d: object of size %d is another", cycle, o.Size)
			}
			at = o.Size
		}
	}
	if acknowledged == 0 || acknowledged == limit {
		t.Fatalf("%d entries acknowledged: the test did not kill in the middle", acknowledged)
	}
}

func sameHistory(t *testing.T, size int) *anchortest.History {
	h := anchortest.NewHistory(t, 1)
	h.GrowKnown(size)
	return h
}

func killedWriter(t *testing.T, dir string, limit uint64) {
	h := sameHistory(t, int(limit))
	a := place(dir).open(t)
	for n := 0; ; n++ {
		if n >= runAhead {
			if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
				fmt.Println("error", err)
				return
			}
		}
		var from uint64
		o, err := a.Newest(t.Context())
		if err == nil {
			from = o.Size
		} else if !errors.Is(err, ledger.ErrNoObject) {
			fmt.Println("error", err)
			return
		}
		if from == limit {
			return
		}
		size := min(limit, from+1+from%3)
		if err := a.Put(t.Context(), h.Object(from, size)); err != nil {
			fmt.Println("error", err)
			return
		}
		fmt.Println("ack", size)
	}
}
