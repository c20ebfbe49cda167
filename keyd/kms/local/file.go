package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
)

// stamp tells one version of the file from the next.
type stamp struct {
	dev, ino       uint64
	size, modified int64
}

func stampOf(path string) (stamp, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return stamp{}, err
	}
	return newStamp(fi), nil
}

func newStamp(fi fs.FileInfo) stamp {
	st := fi.Sys().(*syscall.Stat_t) // what os gives on every Unix
	return stamp{dev: uint64(st.Dev), ino: uint64(st.Ino), size: fi.Size(), modified: fi.ModTime().UnixNano()}
}

// trusted tells whether a file belongs to this user or root.
func trusted(fi fs.FileInfo) bool {
	uid := fi.Sys().(*syscall.Stat_t).Uid
	return uid == 0 || int(uid) == os.Geteuid()
}

// safeDir returns path without symbolic links, having checked every directory
// on the way as sshd does for its key files: owned by this user or root, and
// writable by nobody else. Above the last one a sticky directory such as /tmp
// passes. Its error wraps ErrUnsafe or is the file system's.
func safeDir(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	cur := "/"
	rest := strings.Split(abs, "/")
	for links := 0; ; {
		fi, err := os.Lstat(cur)
		if err != nil {
			return "", err
		}
		for len(rest) > 0 && (rest[0] == "" || rest[0] == ".") {
			rest = rest[1:]
		}
		last := len(rest) == 0
		switch {
		case !fi.IsDir():
			return "", &fs.PathError{Op: "open", Path: cur, Err: unix.ENOTDIR}
		case !trusted(fi):
			return "", fmt.Errorf("%w: directory %s belongs to another user", ErrUnsafe, cur)
		case fi.Mode().Perm()&0o022 != 0 && (last || fi.Mode()&fs.ModeSticky == 0):
			return "", fmt.Errorf("%w: directory %s is writable by others", ErrUnsafe, cur)
		}
		if last {
			return cur, nil
		}
		name := rest[0]
		rest = rest[1:]
		if name == ".." {
			cur = filepath.Dir(cur)
			continue
		}
		next := filepath.Join(cur, name)
		if fi, err = os.Lstat(next); err != nil {
			return "", err
		}
		if fi.Mode().Type() != fs.ModeSymlink {
			cur = next
			continue
		}
		if links++; links > 40 {
			return "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
		}
		if !trusted(fi) {
			return "", fmt.Errorf("%w: link %s belongs to another user", ErrUnsafe, next)
		}
		target, err := os.Readlink(next)
		if err != nil {
			return "", err
		}
		if filepath.IsAbs(target) {
			cur = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
}

// openPrivate opens a regular file that only this user can read. It follows no
// link and does not wait for a pipe.
func openPrivate(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%w: %s is a symbolic link", ErrUnsafe, path)
	}
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil {
		switch {
		case !fi.Mode().IsRegular():
			err = fmt.Errorf("%w: %s is not a regular file", ErrUnsafe, path)
		case !trusted(fi):
			err = fmt.Errorf("%w: %s belongs to another user", ErrUnsafe, path)
		case fi.Mode().Perm()&0o077 != 0:
			err = fmt.Errorf("%w: %s is open to others: its mode is %#o, not 0600", ErrUnsafe, path, fi.Mode().Perm())
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// version is one version of the root file, and its bytes.
type version struct {
	file  *os.File
	stamp stamp
	data  []byte // encrypted; at least its checksum long once parseFile has passed it
}

// sum returns the checksum at the end of a file that parseFile has passed.
func (v version) sum() [sumSize]byte { return [sumSize]byte(v.data[len(v.data)-sumSize:]) }

// readRoots opens and reads the root file. Its error wraps ErrUnsafe,
// fs.ErrNotExist or keys.ErrKMSUnavailable.
func readRoots(path string) (version, error) {
	for {
		v, err := readVersion(path)
		if errors.Is(err, ErrUnsafe) || errors.Is(err, fs.ErrNotExist) {
			return version{}, err
		}
		if err != nil {
			return version{}, fmt.Errorf("%w: %w", keys.ErrKMSUnavailable, err)
		}
		// A file that was replaced while it was read may have been read as
		// the zeros that overwrite it.
		if now, err := stampOf(path); err == nil && now == v.stamp {
			return v, nil
		}
		v.file.Close()
	}
}

func readVersion(path string) (version, error) {
	f, err := openPrivate(path, os.O_RDONLY)
	if err != nil {
		return version{}, err
	}
	v := version{file: f}
	fi, err := f.Stat()
	if err == nil {
		v.stamp = newStamp(fi)
		v.data, err = readAll(f, maxFile)
	}
	if err != nil {
		f.Close()
		return version{}, err
	}
	return v, nil
}

// readAll reads at most limit bytes and one more, so that a longer file fails
// its checks.
func readAll(f *os.File, limit int64) ([]byte, error) {
	return io.ReadAll(io.LimitReader(f, limit+1))
}

func tempName(path string) string { return path + ".new" }

// replace puts data in the place of path: a reader sees the old file or the
// new one, whole, whatever happens. Then it overwrites the old one. The caller
// holds the lock and has called removeTemp.
func replace(path string, data []byte) (version, error) {
	old, err := openPrivate(path, os.O_RDWR)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return version{}, err
	}
	if err == nil {
		defer old.Close()
	}
	temp := tempName(path)
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return version{}, err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	var fi fs.FileInfo
	if err == nil {
		fi, err = f.Stat()
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		if os.Remove(temp) == nil {
			overwrite(f)
		}
		f.Close()
		return version{}, err
	}
	if err := syncDir(path); err != nil {
		f.Close()
		return version{}, err
	}
	if old != nil {
		overwrite(old)
	}
	return version{file: f, stamp: newStamp(fi), data: data}, nil
}

// removeTemp removes what a crash left of a replace.
func removeTemp(path string) error {
	temp := tempName(path)
	f, err := os.OpenFile(temp, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		defer f.Close()
	}
	if err := os.Remove(temp); err != nil {
		return err
	}
	if f != nil {
		overwrite(f)
	}
	return nil
}

// overwrite fills a file that has no name left with zeros, as well as it can.
// A file that has another name is somebody's copy and stays as it is.
//
// It must come after the new file is durable.
func overwrite(f *os.File) {
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() || fi.Sys().(*syscall.Stat_t).Nlink != 0 {
		return
	}
	if _, err := f.WriteAt(make([]byte, min(fi.Size(), maxFile)), 0); err == nil {
		_ = f.Sync()
	}
}

// syncDir makes the names in path's directory durable.
func syncDir(path string) error {
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// lockFile takes the lock beside path, which one process at a time can hold,
// and lets go of it when its holder dies.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := openPrivate(path+".lock", os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, unavailable(err)
	}
	pause := time.Millisecond
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			f.Close()
			return nil, unavailable(&fs.PathError{Op: "flock", Path: f.Name(), Err: err})
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, unavailable(fmt.Errorf("another process holds %s: %w", f.Name(), ctx.Err()))
		case <-time.After(pause):
			pause = min(2*pause, 50*time.Millisecond)
		}
	}
}
