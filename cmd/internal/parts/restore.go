package parts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd"
	"lethe/keyd/backup"
	"lethe/keyd/store/badger"
)

// ErrOccupied: where the store is to be, there is something already.
var ErrOccupied = errors.New("the directory is not empty")

// PutBack makes the key store in o.Store of what a backup file holds. The
// directory may be missing or empty; with force, one that holds something is
// moved aside, to the name that is returned, and never deleted. Where o.Store is
// a link, that is what it leads to. The store is
// there whole or not at all. Until it was replayed, it does not serve.
func (o Options) PutBack(ctx context.Context, file io.Reader, force bool, log *slog.Logger) (h backup.Header, aside string, err error) {
	in, err := backup.NewReader(file)
	if err != nil {
		return h, "", err
	}
	h = in.Header()
	if err := keyd.CheckBackup(h, badger.Kind); err != nil {
		return h, "", err
	}
	if err := errors.Join(o.apart(), o.checkMinFree()); err != nil {
		return h, "", err
	}
	dir, err := resolve(o.Store)
	if err != nil {
		return h, "", err
	}
	occupied, err := isOccupied(dir)
	if err != nil {
		return h, "", err
	}
	if occupied {
		if !force {
			return h, "", fmt.Errorf("%s: %w", dir, ErrOccupied)
		}
		unlock, err := badger.Lock(dir)
		if err != nil {
			return h, "", err
		}
		defer unlock()
	}
	if err := makeDirs(filepath.Dir(dir)); err != nil {
		return h, "", err
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".incoming-")
	if err != nil {
		return h, "", err
	}
	defer os.RemoveAll(temp)
	store := filepath.Join(temp, "store")
	if err := badger.Restore(ctx, store, in); err != nil {
		return h, "", err
	}
	s, err := badger.Open(badger.Options{Dir: store, MinFree: o.MinFree, Logger: log})
	if err != nil {
		return h, "", err
	}
	if err := errors.Join(keyd.MarkRestored(ctx, s, h.Created), s.Close()); err != nil {
		return h, "", err
	}
	if occupied {
		if aside, err = moveAside(dir); err != nil {
			return h, "", err
		}
	}
	// os.Rename would not replace an empty directory.
	if err := unix.Rename(store, dir); errors.Is(err, fs.ErrExist) {
		return h, aside, fmt.Errorf("%s: something else was put there meanwhile, by another restore perhaps; it stays, and nothing was restored", dir)
	} else if err != nil {
		return h, aside, fmt.Errorf("naming %s: %w", dir, err)
	}
	return h, aside, syncDir(filepath.Dir(dir))
}

// resolve returns the absolute path of a directory, which need not be there,
// without links.
func resolve(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	path, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(dir); err == nil {
			return "", fmt.Errorf("%s is a link to what is not there", dir)
		}
		return dir, nil
	}
	return path, err
}

// TakeBack undoes a PutBack that moved a store aside: that store is in its
// place again, and what had been put there is gone.
func (o Options) TakeBack(aside string) error {
	dir, err := resolve(o.Store)
	if err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".outgoing-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	unlock, err := badger.Lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.Rename(dir, filepath.Join(temp, "store")); err != nil {
		return err
	}
	if err := os.Rename(aside, dir); err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

// isOccupied says whether dir holds anything.
func isOccupied(dir string) (bool, error) {
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return len(names) != 0, err
}

// moveAside gives dir another name beside it.
func moveAside(dir string) (string, error) {
	name := dir + ".before-restore-" + time.Now().UTC().Format("20060102T150405Z")
	for i := 2; ; i++ {
		if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			break
		}
		name = fmt.Sprintf("%s.before-restore-%s-%d", dir, time.Now().UTC().Format("20060102T150405Z"), i)
	}
	if err := os.Rename(dir, name); err != nil {
		return "", err
	}
	return name, syncDir(filepath.Dir(dir))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
