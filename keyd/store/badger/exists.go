package badger

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Exists reports whether dir holds a store. A directory in which a first Open
// was cut short holds none yet; what lies in it then, Open with Create accepts.
func Exists(dir string) (bool, error) {
	switch _, err := os.Stat(filepath.Join(dir, manifestName)); {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	default:
		return false, err
	}
}
