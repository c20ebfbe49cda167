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
// written without a name or, where the system has no such files, under another
// name in the same directory, and takes its own name once it is complete and on
// the disk.
type outputFile struct {
	set     *outputs
	f       *os.File
	path    string // as named by the user
	target  string // path, with its links followed
	replace bool
	// temporary is the name that the file has meanwhile, if it has one.
	temporary string
	unnamed   bool
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
	dir := filepath.Dir(o.target)
	o.temporary = filepath.Join(dir, ".lethe-"+rand.Text()+".part")
	if o.f, err = openUnnamed(dir, perm); err == nil {
		o.unnamed = true
	} else if o.f, err = os.OpenFile(o.temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm); err != nil {
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
	switch {
	case err != nil:
	case o.unnamed:
		if err = o.name(); err == nil {
			_ = o.f.Close() // what is in it is on the disk
		}
	default:
		if err = o.f.Close(); err == nil {
			err = o.rename()
		}
	}
	if err != nil {
		o.remove()
		return err
	}
	delete(o.set.begun, o)
	return syncDirectory(filepath.Dir(o.target))
}

// name gives the file that has none its name.
func (o *outputFile) name() error {
	if !o.replace {
		err := nameFile(o.f, o.target)
		if errors.Is(err, fs.ErrExist) {
			err = fmt.Errorf("%s: %w", o.path, fs.ErrExist)
		}
		return err
	}
	// No file can be named over another one.
	if err := nameFile(o.f, o.temporary); err != nil {
		return err
	}
	o.unnamed = false
	return os.Rename(o.temporary, o.target)
}

// rename gives the file that has another name its own.
func (o *outputFile) rename() error {
	if o.replace {
		return os.Rename(o.temporary, o.target)
	}
	// A link fails if meanwhile somebody made a file of that name.
	err := os.Link(o.temporary, o.target)
	switch {
	case err == nil:
		return os.Remove(o.temporary)
	case errors.Is(err, fs.ErrExist):
		return fmt.Errorf("%s: %w", o.path, fs.ErrExist)
	}
	// A file system without links: the moment between look and rename is open.
	if _, err := os.Lstat(o.target); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", o.path, fs.ErrExist)
	}
	return os.Rename(o.temporary, o.target)
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
		if !o.unnamed {
			_ = os.Remove(o.temporary)
		}
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
