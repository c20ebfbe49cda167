package file

import (
	"errors"
	"path/filepath"
	"testing"
)

// Two copies of one store on one anchor would each issue what the other destroyed.
func TestExclusive(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "anchor")
	first, err := Open(Options{Dir: dir, Create: true, Exclusive: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir, Exclusive: true}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second one: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Open(Options{Dir: dir, Exclusive: true})
	if err != nil {
		t.Fatalf("after the first is closed: %v", err)
	}
	second.Close()
}
