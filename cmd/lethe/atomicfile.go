package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
)

// outputs are the files that this process has begun and not completed. The
// zero value is ready for use.
type outputs struct {
	mu    sync.Mutex
	begun map[*outputFile]struct{}
}

// outputFile is a file that comes into being whole or not at all: it is
// written under another name in the same directory, and takes its own name
// once it is complete and on the disk.
type outputFile struct {
	set     *outputs
	f       *os.File
	path    string // as named by the user
	target  string // path, with its links followed
	replace bool
}

// create begins the file path. A file that is there is refused, or with
// replace is replaced, keeping its permissions; perm, less the umask, is for a
// new file. Nothing but a regular file is ever replaced.
func (s *outputs) create(path string, perm fs.FileMode, replace bool) (*outputFile, error) {
	o := &outputFile{set: s, path: path, target: path, replace: replace}
	var old fs.FileInfo
	_, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case !replace:
		return nil, fmt.Errorf("%s: %w", path, fs.ErrExist)
	default:
		if o.target, err = filepath.EvalSymlinks(path); err != nil {
			return nil, err
		}
		if old, err = os.Stat(o.target); err != nil {
			return nil, err
		}
		if !old.Mode().IsRegular() {
			return nil, fmt.Errorf("%s is not a regular file", path)
		}
		perm = 0o600 // until it has the permissions of the old
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	temporary := filepath.Join(filepath.Dir(o.target), ".lethe-"+rand.Text()+".part")
	if o.f, err = os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm); err != nil {
		return nil, err
	}
	if s.begun == nil {
		s.begun = make(map[*outputFile]struct{})
	}
	s.begun[o] = struct{}{}
	if old != nil {
		if err := o.f.Chmod(old.Mode().Perm()); err != nil {
			o.remove()
			return nil, err
		}
	}
	return o, nil
}

func (o *outputFile) Write(p []byte) (int, error) { return o.f.Write(p) }

// commit completes the file: when it returns nil, the file has its name and
// both are on the disk. On failure nothing is left, and what was there before
// is untouched, unless only the last step failed, the sync of the directory.
func (o *outputFile) commit() error {
	err := o.f.Sync()
	o.set.mu.Lock()
	defer o.set.mu.Unlock()
	if err == nil {
		err = o.f.Close()
	}
	if err == nil {
		err = o.rename()
	}
	if err != nil {
		o.remove()
		return err
	}
	delete(o.set.begun, o)
	return syncDirectory(filepath.Dir(o.target))
}

// rename gives the file its name.
func (o *outputFile) rename() error {
	if o.replace {
		return os.Rename(o.f.Name(), o.target)
	}
	// A link fails if meanwhile somebody made a file of that name.
	err := os.Link(o.f.Name(), o.target)
	switch {
	case err == nil:
		return os.Remove(o.f.Name())
	case errors.Is(err, fs.ErrExist):
		return fmt.Errorf("%s: %w", o.path, fs.ErrExist)
	}
	// A file system without links: the moment between look and rename is open.
	if _, err := os.Lstat(o.target); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", o.path, fs.ErrExist)
	}
	return os.Rename(o.f.Name(), o.target)
}

// discard gives the file up. After commit it does nothing.
func (o *outputFile) discard() {
	o.set.mu.Lock()
	defer o.set.mu.Unlock()
	o.remove()
}

// remove is called with the lock held.
func (o *outputFile) remove() {
	if _, begun := o.set.begun[o]; begun {
		delete(o.set.begun, o)
		_ = o.f.Close()
		_ = os.Remove(o.f.Name())
	}
}

// abandon gives up every file that is not complete, for good: nothing can be
// begun or completed afterwards.
func (s *outputs) abandon() {
	s.mu.Lock() // and never unlocked: the process is about to end
	for o := range s.begun {
		o.remove()
	}
}

func syncDirectory(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // cannot be done there
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
