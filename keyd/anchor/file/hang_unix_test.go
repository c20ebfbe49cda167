//go:build unix

package file

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/ledger"
)

// TestCloseWhileACallHangs: an anchor is closed at once while the file system
// does not answer, and nobody else has the directory before it does. Opening a
// pipe that nobody writes to does not return either.
func TestCloseWhileACallHangs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "anchor")
	a, err := Open(Options{Dir: dir, Create: true, Exclusive: true})
	if err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(dir, objectsName)
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		_, err := a.Get(t.Context(), 0)
		got <- err
	}()
	for underWay := false; !underWay; runtime.Gosched() {
		a.mu.Lock()
		underWay = a.calls == 1
		a.mu.Unlock()
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Newest(t.Context()); !errors.Is(err, ledger.ErrAnchorUnavailable) {
		t.Errorf("a call of one that is closed: %v", err)
	}
	if err := os.Rename(pipe, pipe+".away"); err != nil { // so that to open the anchor does not hang
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir, Exclusive: true}); !errors.Is(err, ErrInUse) {
		t.Errorf("another one, while the call hangs: %v", err)
	}
	w, err := os.OpenFile(pipe+".away", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := <-got; !errors.Is(err, ledger.ErrAnchorUnavailable) {
		t.Errorf("the call: %v", err)
	}
	b, err := Open(Options{Dir: dir, Exclusive: true})
	if err != nil {
		t.Fatalf("another one, once it has returned: %v", err)
	}
	b.Close()
}
