package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
)

// lockDirectory takes the lock that Badger itself would take (flock on the
// directory), so that its tools respect it.
func lockDirectory(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("store directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s", keys.ErrLocked, path)
		}
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return f, nil
}

// Lock takes the lock of the store in a directory, which holds one or anything
// else, without opening it: while it is held no process can open the store. It
// fails with keys.ErrLocked while one has it open.
func Lock(dir string) (unlock func(), err error) {
	f, err := lockDirectory(dir)
	if err != nil {
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

// makeDirectory makes path durably.
func makeDirectory(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	return syncFile(filepath.Dir(path))
}

// syncFile syncs a file or a directory.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// dirSync remembers the state of the directory that was last synced.
type dirSync struct {
	mtime time.Time
	at    time.Time
}

// mtimeGrain is more than the grain of a file system's timestamps: a change so
// soon after another may leave the same one.
const mtimeGrain = time.Second

// syncIfChanged syncs the directory if a file has come or gone since. Badger
// syncs the log that a commit is in, but not the entry of a new log's name.
func (d *directory) syncIfChanged() error {
	fi, err := d.lock.Stat()
	if err != nil {
		return err
	}
	if fi.ModTime().Equal(d.sync.mtime) && d.sync.at.Sub(fi.ModTime()) > mtimeGrain {
		return nil
	}
	return d.settle()
}

// settle closes the files to others, adds up the tables, syncs the directory and
// notes the newest log.
func (d *directory) settle() error {
	fi, err := d.lock.Stat()
	if err != nil {
		return err
	}
	now := time.Now()
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return err
	}
	var tables, newest uint64
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // compacted away
		}
		if id, ok := logID(e.Name()); ok && err == nil && info.Size() > 0 { // else it could not be made
			newest = max(newest, id)
		}
		if err == nil && filepath.Ext(e.Name()) == ".sst" {
			tables += uint64(info.Size())
		}
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			err = os.Chmod(filepath.Join(d.path, e.Name()), info.Mode().Perm()&^0o077)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := d.lock.Sync(); err != nil {
		return err
	}
	d.sync = dirSync{fi.ModTime(), now}
	d.tableBytes.Store(tables)
	return d.noteNewestLog(newest)
}
