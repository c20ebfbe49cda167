package file

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"lethe/keyd/internal/ledger"
)

// Shelf is a directory of anchors, a directory each, which a keyd keeps for
// others, and which no other process uses meanwhile. It is safe for concurrent
// use.
type Shelf struct {
	dir string

	mu      sync.Mutex
	closed  bool
	anchors map[string]*Anchor
}

// ErrName is the error of a name that no anchor can have.
var ErrName = errors.New("must be 1 to 64 bytes of [a-z0-9._-], the first of which is no dot")

// OpenShelf opens a directory that exists, so that a disk that is not mounted is
// not mistaken for an empty one, and that no other user can read or write. Its
// errors wrap ledger.ErrAnchorUnavailable.
func OpenShelf(dir string) (*Shelf, error) {
	if dir == "" {
		return nil, fmt.Errorf("%w: no directory is given", ledger.ErrAnchorUnavailable)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, unavailable(err)
	}
	if err := private(dir); err != nil {
		return nil, err
	}
	return &Shelf{dir: dir, anchors: make(map[string]*Anchor)}, nil
}

// CheckName returns ErrName for a name that no anchor on a shelf can have.
func CheckName(name string) error {
	const allowed = "abcdefghijklmnopqrstuvwxyz0123456789._-"
	if name == "" || len(name) > 64 || name[0] == '.' || strings.Trim(name, allowed) != "" {
		return ErrName
	}
	return nil
}

// Check is CheckName.
func (s *Shelf) Check(name string) error { return CheckName(name) }

// Anchor returns the anchor of that name, which the shelf closes. Where there is
// none, create makes it; without it the error is ledger.ErrNoObject. Other
// errors are ErrName and Open's.
func (s *Shelf) Anchor(name string, create bool) (ledger.Anchor, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("%w: it is closed", ledger.ErrAnchorUnavailable)
	}
	if a := s.anchors[name]; a != nil {
		return a, nil
	}
	a, err := Open(Options{Dir: filepath.Join(s.dir, name), Create: create, Exclusive: true})
	if !create && errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(s.dir); err != nil {
			return nil, unavailable(err)
		}
		return nil, ledger.ErrNoObject
	}
	if err != nil {
		return nil, err
	}
	s.anchors[name] = a
	return a, nil
}

// Close closes the anchors.
func (s *Shelf) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	var errs []error
	for _, a := range s.anchors {
		errs = append(errs, a.Close())
	}
	return errors.Join(errs...)
}
