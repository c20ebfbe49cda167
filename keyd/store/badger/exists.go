package badger

import (
	"errors"
	"io/fs"
)

// Exists reports whether dir holds a store, or what is left of one. A directory
// in which a first Open was cut short holds none yet; what lies in it then, Open
// with Create accepts.
func Exists(dir string) (bool, error) {
	f, err := (&directory{path: dir}).list()
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && (f.manifest || len(f.tables) != 0 || len(f.logs) != 0), err
}
