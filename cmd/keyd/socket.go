package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
)

// listen makes a listener. A socket that a killed keyd left behind is replaced,
// one on which somebody answers is not.
func listen(ctx context.Context, where string) (net.Listener, error) {
	path, unix, err := socketPath(where)
	switch {
	case err != nil:
		return nil, err
	case !unix:
		return new(net.ListenConfig).Listen(ctx, "tcp", where)
	}
	if err := freeSocket(ctx, where); err != nil {
		return nil, err
	}
	if fi, err := os.Lstat(path); err == nil && fi.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	lis, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	s := &socket{UnixListener: lis.(*net.UnixListener), path: path}
	s.SetUnlinkOnClose(false)
	if s.own, err = os.Lstat(path); err != nil {
		s.UnixListener.Close()
		return nil, err
	}
	return s, nil
}

// socketPath returns the path of a Unix socket; unix is false of a TCP address.
func socketPath(where string) (path string, unix bool, err error) {
	path, unix = strings.CutPrefix(where, "unix:")
	path = strings.TrimPrefix(path, "//")
	if unix && (path == "" || path[0] == '@') {
		return "", true, errors.New("--listen: a Unix socket needs a path, which guards it")
	}
	return path, unix, nil
}

// freeSocket fails if a Unix socket is in use: its clients would reach another
// keyd without a word. Only a refusal says that nobody listens there; a process
// that stands still, or is too busy to answer, does listen.
func freeSocket(ctx context.Context, where string) error {
	path, unix, err := socketPath(where)
	if err != nil || !unix {
		return err
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		conn.Close()
		return fmt.Errorf("--listen: somebody answers on the socket %s, another keyd perhaps: stop that one, or name another path", path)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("--listen: whether the socket %s is in use is not known: %w", path, err)
}

// socket listens on a Unix socket and removes it at its end, unless somebody
// else's is in its place.
type socket struct {
	*net.UnixListener
	path   string
	own    fs.FileInfo
	remove sync.Once
}

// Close removes the socket while it is still open: its inode is not another's.
func (s *socket) Close() error {
	s.remove.Do(func() {
		if fi, err := os.Lstat(s.path); err == nil && os.SameFile(fi, s.own) {
			os.Remove(s.path)
		}
	})
	return s.UnixListener.Close()
}
