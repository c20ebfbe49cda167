package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// syncDelay is for how long every sync is held back. It shows an
// acknowledgement that does not wait for its sync: it comes meanwhile.
const syncDelay = 15 * time.Millisecond

// tracer runs a process under ptrace, and keeps in disk what a loss of power
// would leave of the files below root at each instant.
type tracer struct {
	disk   disk
	onSync func() // called in between syncs, with disk.mu held

	dsync   map[int]bool // descriptors opened with O_DSYNC or O_SYNC
	process *os.Process
	exited  chan struct{}
	err     error // of tracing; read after exited is closed
}

// start starts the process. It fails with unix.EPERM where tracing is not
// allowed. The directory of the disk stays as earlier processes left it.
func (t *tracer) start(stderr *os.File, argv ...string) error {
	t.exited, t.dsync = make(chan struct{}), make(map[int]bool)
	started := make(chan error)
	go func() {
		// The thread that starts the process is its tracer.
		runtime.LockOSThread()
		defer close(t.exited)
		p, err := os.StartProcess(argv[0], argv, &os.ProcAttr{
			Files: []*os.File{nil, nil, stderr},
			Env:   os.Environ(),
			Sys:   &syscall.SysProcAttr{Ptrace: true, Setpgid: true},
		})
		t.process = p
		started <- err
		if err == nil {
			t.err = t.trace(p.Pid)
		}
	}()
	return <-started
}

// kill kills the process and waits for its end.
func (t *tracer) kill() {
	if t.process != nil {
		unix.Kill(t.process.Pid, unix.SIGKILL)
		<-t.exited
	}
}

// call is a system call that a thread is in.
type call struct {
	nr      uint64
	fd      int
	flags   int    // of an open
	pending func() // makes durable what is being synced
}

// held is a thread that waits to go on into its sync.
type held struct {
	tid   int
	until time.Time
}

func (t *tracer) trace(pid int) error {
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil {
		return err
	}
	err := unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL)
	if err != nil {
		return err
	}
	calls := make(map[int]*call)
	known := map[int]bool{pid: true}
	var waiting []held
	if err := unix.PtraceSyscall(pid, 0); err != nil {
		return err
	}
	for {
		for len(waiting) > 0 && !time.Now().Before(waiting[0].until) {
			resume(waiting[0].tid, 0)
			waiting = waiting[1:]
		}
		tid, err := unix.Wait4(-pid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case tid == 0:
			time.Sleep(50 * time.Microsecond)
			continue
		case status.Exited() || status.Signaled():
			delete(calls, tid)
			if tid == pid {
				return nil
			}
			continue
		case !status.Stopped():
			continue
		}
		sig := status.StopSignal()
		switch {
		case sig == unix.SIGTRAP|0x80:
			if t.stopped(pid, tid, calls) {
				waiting = append(waiting, held{tid, time.Now().Add(syncDelay)})
				continue
			}
			resume(tid, 0)
		case sig == unix.SIGTRAP:
			resume(tid, 0) // a new thread, or exec
		case sig == unix.SIGSTOP && !known[tid]:
			known[tid] = true
			resume(tid, 0)
		default:
			resume(tid, int(sig))
		}
	}
}

// resume lets a thread go on to its next stop; one that was killed meanwhile
// has gone.
func resume(tid, sig int) { _ = unix.PtraceSyscall(tid, sig) }

// syscallInfo is the kernel's struct ptrace_syscall_info.
type syscallInfo struct {
	op   uint8
	_    [3]uint8
	arch uint32
	ip   uint64
	sp   uint64
	data [8]uint64
}

const (
	infoEntry = 1
	infoExit  = 2
)

// stopped handles the entry to or exit from a system call, and reports whether
// the thread is to be held.
func (t *tracer) stopped(pid, tid int, calls map[int]*call) (hold bool) {
	var info syscallInfo
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(tid),
		unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0)
	if errno != 0 {
		return false
	}
	switch info.op {
	case infoEntry:
		c := &call{nr: info.data[0], fd: int(info.data[1])}
		switch c.nr {
		case unix.SYS_OPENAT:
			c.flags = int(info.data[3])
		case unix.SYS_CLOSE:
			delete(t.dsync, c.fd)
		case unix.SYS_FSYNC, unix.SYS_FDATASYNC:
			c.pending = t.disk.syncing(descriptor(pid, c.fd))
		case unix.SYS_MSYNC:
			if path := mapped(pid, info.data[1]); path != "" && info.data[3]&unix.MS_SYNC != 0 {
				c.pending = t.disk.syncing(path)
			}
		}
		calls[tid] = c
		return c.pending != nil
	case infoExit:
		c := calls[tid]
		delete(calls, tid)
		if c == nil || int64(info.data[0]) < 0 {
			return false
		}
		switch c.nr {
		case unix.SYS_OPENAT:
			if c.flags&unix.O_DSYNC != 0 {
				t.dsync[int(info.data[0])] = true
			}
		case unix.SYS_WRITE, unix.SYS_WRITEV, unix.SYS_PWRITE64:
			if t.dsync[c.fd] { // a write that is its own sync
				c.pending = t.disk.syncing(descriptor(pid, c.fd))
			}
		}
		if c.pending == nil {
			return false
		}
		t.disk.mu.Lock()
		defer t.disk.mu.Unlock()
		c.pending()
		if t.onSync != nil {
			t.onSync()
		}
	}
	return false
}

func descriptor(pid, fd int) string { return fmt.Sprintf("/proc/%d/fd/%d", pid, fd) }

// mapped returns the file that is mapped at an address.
func mapped(pid int, addr uint64) string {
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(list)) {
		span, _, _ := strings.Cut(line, " ")
		from, to, _ := strings.Cut(span, "-")
		lo, err1 := strconv.ParseUint(from, 16, 64)
		hi, err2 := strconv.ParseUint(to, 16, 64)
		if err1 == nil && err2 == nil && lo <= addr && addr < hi {
			if at := strings.IndexByte(line, '/'); at >= 0 {
				return strings.TrimSpace(line[at:])
			}
		}
	}
	return ""
}

// disk is what is durable of the files below root. Of a file, that is what it
// held when it was last synced; of a directory, the names that it held when it
// was last synced. POSIX promises no more. Linux's file systems do in one thing,
// on which Badger relies: the first sync of a new file also keeps its name.
type disk struct {
	root string

	mu sync.Mutex
	durable
}

// durable is the state of a disk. What its maps hold is never changed.
type durable struct {
	files map[inode]*content
	dirs  map[inode]map[string]entry
}

// inode is a file for as long as it lives: a number is given again once its
// file is gone, at another time.
type inode struct {
	dev, ino uint64
	born     unix.StatxTimestamp
}

type entry struct {
	inode
	dir bool
}

// content is a file's bytes: the pages that are not zero.
type content struct {
	size  int64
	pages map[int64][]byte
}

const pageSize = 64 << 10

// inodeOf looks at a path below an open directory, at unix.AT_FDCWD, or, if it
// is empty, at the open file itself.
func inodeOf(at int, path string) (inode, error) {
	var x unix.Statx_t
	err := unix.Statx(at, path, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_BTIME, &x)
	return inode{unix.Mkdev(x.Dev_major, x.Dev_minor), x.Ino, x.Btime}, err
}

// newDisk is a disk whose root is durable, and empty.
func newDisk(root string) (disk, error) {
	id, err := inodeOf(unix.AT_FDCWD, root)
	return disk{root: root, durable: durable{
		files: make(map[inode]*content),
		dirs:  map[inode]map[string]entry{id: {}},
	}}, err
}

// syncing reads what is at path, and returns what makes it durable; nil for
// what is not below the root.
func (d *disk) syncing(path string) func() {
	real, err := filepath.EvalSymlinks(path)
	if err != nil || real != d.root && !strings.HasPrefix(real, d.root+"/") {
		// Deleted files have no path either; nothing of theirs is left.
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil
	}
	id, err := inodeOf(int(f.Fd()), "")
	if err != nil {
		return nil
	}
	if !fi.IsDir() {
		c, err := readContent(f, fi.Size())
		if err != nil {
			return nil
		}
		parent, err := inodeOf(unix.AT_FDCWD, filepath.Dir(real))
		if err != nil {
			return nil
		}
		return func() {
			if d.files[id] == nil {
				names := maps.Clone(d.dirs[parent])
				if names == nil {
					names = make(map[string]entry)
				}
				names[filepath.Base(real)] = entry{inode: id}
				d.dirs[parent] = names
			}
			d.files[id] = c
		}
	}
	names := make(map[string]entry)
	list, err := f.ReadDir(-1)
	if err != nil {
		return nil
	}
	for _, e := range list {
		if id, err := inodeOf(int(f.Fd()), e.Name()); err == nil {
			names[e.Name()] = entry{id, e.IsDir()}
		}
	}
	return func() { d.dirs[id] = names }
}

func readContent(f *os.File, size int64) (*content, error) {
	c := &content{size: size, pages: make(map[int64][]byte)}
	page := make([]byte, pageSize)
	for at := int64(0); at < size; {
		// Where there is nothing but a hole, there is nothing to read.
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		} else if err == nil && data > at {
			at = data - data%pageSize
		}
		n, err := f.ReadAt(page, at)
		if err != nil && err != io.EOF {
			return nil, err
		}
		for _, b := range page[:n] {
			if b != 0 {
				c.pages[at] = append([]byte(nil), page[:n]...)
				break
			}
		}
		at += pageSize
	}
	return c, nil
}

// clone returns the state as it is now. disk.mu is held.
func (d *durable) clone() durable {
	return durable{files: maps.Clone(d.files), dirs: maps.Clone(d.dirs)}
}

// restore writes the state of the directory dir into an empty directory.
func (d *durable) restore(dir inode, to string) error {
	for name, e := range d.dirs[dir] {
		path := filepath.Join(to, name)
		if e.dir {
			if err := os.Mkdir(path, 0o700); err != nil {
				return err
			}
			if err := d.restore(e.inode, path); err != nil {
				return err
			}
			continue
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		if c := d.files[e.inode]; c != nil {
			if err := f.Truncate(c.size); err != nil {
				return err
			}
			for at, page := range c.pages {
				if _, err := f.WriteAt(page, at); err != nil {
					return err
				}
			}
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return nil
}
