package badger

import (
	"bytes"
	"errors"
	"io/fs"
	"os"

	"lethe/keyd/internal/keys"
)

// Exists reports whether dir holds a store, or what is left of one. A directory
// in which a first Open was cut short, or where nothing was ever written, holds
// none yet; what lies in it then, Open with Create accepts.
func Exists(dir string) (bool, error) {
	d := &directory{path: dir}
	f, err := d.list()
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil || len(f.tables) != 0 || !f.manifest && len(f.logs) != 0 {
		return err == nil, err
	}
	if errors.Is(d.checkNewestLog(f.logs), keys.ErrDamaged) {
		return true, nil // Open says why
	}
	for _, id := range f.logs {
		b, err := os.ReadFile(d.log(id))
		if err != nil {
			return false, err
		}
		if len(b) > logHeader && len(bytes.Trim(b[logHeader:], "\x00")) != 0 {
			return true, nil
		}
	}
	return false, nil
}
