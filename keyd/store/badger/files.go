package badger

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dgraph-io/badger/v4/table"

	"lethe/keyd/internal/keys"
)

// Files are the files of a store that no process has open. They are read as
// they are: nothing in the directory is changed, and the store need not be
// sound.
type Files struct {
	dir  *directory
	list []string
}

// OpenFiles locks the store's directory and lists the files in it. It fails
// with keys.ErrLocked when a process has the store open, and with
// fs.ErrNotExist when there is no store in dir.
func OpenFiles(dir string) (*Files, error) {
	path, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	exists, err := Exists(path)
	if err != nil {
		return nil, err
	}
	if !exists {
		return nil, fmt.Errorf("no store in %s: %w", path, fs.ErrNotExist)
	}
	lock, err := lockDirectory(path)
	if err != nil {
		return nil, err
	}
	f := &Files{dir: &directory{path: path, lock: lock}}
	err = filepath.WalkDir(path, func(name string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(path, name)
		f.list = append(f.list, rel)
		return err
	})
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Close releases the directory.
func (f *Files) Close() error { return f.dir.close() }

// Check returns the damage for which Open would refuse the store, nil if there
// is none.
func (f *Files) Check() error {
	all, err := f.dir.list()
	if err != nil {
		return err
	}
	_, err = f.dir.check(all)
	return err
}

// Names returns the names of all regular files below the directory, in
// ascending order.
func (f *Files) Names() []string { return f.list }

// Bytes returns what a file holds.
func (f *Files) Bytes(name string) ([]byte, error) { return os.ReadFile(f.dir.file(name)) }

// Rows calls fn for every copy of every row in the tables and in the whole
// commits of the logs, in no order: also for copies that newer ones hide, and
// for those in tables that the store does not list any more. A deleted row's
// mark has no value. key and value are valid until fn returns. unread are the
// tables that fail their checks, whose rows it cannot tell.
func (f *Files) Rows(fn func(key, value []byte)) (unread []string, err error) {
	each := func(key, stored []byte) {
		if len(key) < 1+1+timestampLen || key[0] != rowPrefix {
			return
		}
		fn(key[1:len(key)-timestampLen], stored[min(len(stored), sumLen):])
	}
	for _, name := range f.list {
		path := f.dir.file(name)
		switch filepath.Ext(name) {
		case ".sst":
			err := checkTable(path)
			if err == nil {
				err = withTable(path, func(t *table.Table) {
					it := t.NewIterator(table.NOCACHE)
					defer it.Close()
					for it.Rewind(); it.Valid(); it.Next() {
						each(it.Key(), it.Value().Value)
					}
				})
			}
			if err != nil {
				unread = append(unread, name)
			}
		case ".mem", ".vlog":
			b, err := os.ReadFile(path)
			if err != nil {
				return unread, err
			}
			if len(b) < logHeader {
				continue // a crash left it empty
			}
			var last uint64
			readLog(b, &last, each)
		}
	}
	return unread, nil
}

var _ keys.Files = (*Files)(nil)
