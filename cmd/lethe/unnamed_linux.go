package main

import (
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// openUnnamed opens a new file in dir that has no name, of which nothing is
// left when the process is killed. Not every file system has such files, and
// without /proc it could not be named.
func openUnnamed(dir string, perm fs.FileMode) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, uint32(perm.Perm()))
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), dir)
	if _, err := os.Stat(descriptor(f)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// nameFile names a file that has no name. It fails with fs.ErrExist where there
// is one of that name.
func nameFile(f *os.File, name string) error {
	if err := unix.Linkat(unix.AT_FDCWD, descriptor(f), unix.AT_FDCWD, name, unix.AT_SYMLINK_FOLLOW); err != nil {
		return &fs.PathError{Op: "link", Path: name, Err: err}
	}
	return nil
}

func descriptor(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
