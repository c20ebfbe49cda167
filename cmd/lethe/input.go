package main

import (
	"fmt"
	"io"
	"os"
	"sync/atomic"
)

// input is a file that is read, or the standard input.
type input struct {
	r io.Reader
	// size is how many bytes there are to read; -1 if that is not known.
	size int64
	// read counts those that were.
	read  atomic.Int64
	close func() error
}

func (i *input) Read(p []byte) (int, error) {
	n, err := i.r.Read(p)
	i.read.Add(int64(n))
	return n, err
}

// Close closes a file; the standard input stays open.
func (i *input) Close() error { return i.close() }

// openInput opens the one file that args name; none, or "-", is the standard input.
func (a *app) openInput(args []string) (*input, error) {
	if len(args) == 0 || args[0] == "-" {
		i := &input{r: a.in, size: -1, close: func() error { return nil }}
		if f, ok := a.in.(*os.File); ok {
			i.size = remaining(f)
		}
		return i, nil
	}
	f, err := os.Open(args[0])
	if err != nil {
		return nil, err
	}
	if fi, err := f.Stat(); err == nil && fi.IsDir() {
		f.Close()
		return nil, fmt.Errorf("%s is a directory", args[0])
	}
	return &input{r: f, size: remaining(f), close: f.Close}, nil
}

// openSealed is openInput for a blob, which nobody types.
func (a *app) openSealed(args []string) (*input, error) {
	if len(args) == 0 && a.isTerminal(a.in) {
		return nil, usagef("name a FILE, or pipe a blob in")
	}
	return a.openInput(args)
}

// remaining is how much of a regular file is left to read, and otherwise -1.
func remaining(f *os.File) int64 {
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() {
		return -1
	}
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return -1
	}
	return max(fi.Size()-at, 0)
}

// readSmall reads a small file, or the standard input. It reads no more than
// one byte beyond limit, by which whoever is given it sees that it is too long.
func (a *app) readSmall(name string, limit int64) ([]byte, error) {
	in, err := a.openInput([]string{name})
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(io.LimitReader(in, limit+1))
}
