package badger

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
)

// Free space, in bytes. Badger writes through memory maps of sparse files, and
// a full disk ends the process (SIGBUS), so updates stop well before. What must
// stay free is MinFree, for the log and the memtables being flushed, and besides
// what compactions write before they remove their inputs: as much as the tables
// hold, up to compactionRoom (174 MiB were seen under the heaviest load).
const (
	DefaultMinFree = 256 << 20
	LeastMinFree   = 8 * memTableSize
	compactionRoom = 512 << 20
)

func minFree(asked uint64) uint64 {
	if asked == 0 {
		return DefaultMinFree
	}
	return max(asked, LeastMinFree)
}

// least returns what must stay free.
func (s *Store) least() uint64 {
	return s.minFree + min(s.dir.tableBytes.Load(), compactionRoom)
}

// Free returns the bytes free on the store's file system and the bound below
// which updates that write fail with keys.ErrFull. A caller that wants to keep
// room for some kinds of update stops the others earlier.
func (s *Store) Free() (free, least uint64) {
	free, err := s.stat(s.dir.path)
	if err != nil {
		return 0, s.least()
	}
	return free, s.least()
}

// room fails if writing n bytes would leave too little.
func (s *Store) room(n int64) error {
	if err := s.freeFor(s.least() + uint64(n)); err != nil {
		return err
	}
	return s.limits()
}

// limits fails if the process's own limits are too near for Badger.
func (s *Store) limits() error {
	if err := fileSizes(s.fileLimit()); err != nil {
		return err
	}
	return s.fds.room()
}

// leastFileSize is more than the largest file that Badger makes, a log of twice
// the memtable's size. A file that cannot be made stops the store, or is a table
// that a compaction loses (see descriptors), so it is refused before.
const leastFileSize = 4 * memTableSize

func fileSizes(limit uint64) error {
	if limit < leastFileSize {
		return fmt.Errorf("%w: a file may be %d MiB large (RLIMIT_FSIZE), %d are needed", keys.ErrFull, limit>>20, leastFileSize>>20)
	}
	return nil
}

func fileSizeLimit() uint64 {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &l); err != nil {
		return math.MaxUint64
	}
	return l.Cur
}

func (s *Store) freeFor(need uint64) error {
	free, err := s.stat(s.dir.path)
	if errors.Is(err, keys.ErrFull) {
		return err
	}
	if err != nil {
		return fmt.Errorf("%w: free space is not known: %w", keys.ErrUnavailable, err)
	}
	if free < need {
		return fmt.Errorf("%w: %d MiB free, %d needed", keys.ErrFull, free>>20, need>>20)
	}
	return nil
}

// leastInodes is how many files a flush and the compactions beside it may make.
const leastInodes = 64

// freeBytes returns what an unprivileged process may still write. A file system
// that is out of inodes has no room: that is keys.ErrFull.
func freeBytes(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	if st.Files > 0 && st.Ffree < leastInodes {
		return 0, fmt.Errorf("%w: %d inodes free in %s, %d needed", keys.ErrFull, st.Ffree, dir, leastInodes)
	}
	if st.Bsize <= 0 || st.Bavail > math.MaxUint64/uint64(st.Bsize) {
		return math.MaxUint64, nil
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// descriptors guards the process's file descriptors. A compaction of Badger
// 4.9.6 that cannot create one of its tables drops that table's rows and goes
// on, so they must never run out. Whatever else the process opens (connections,
// mostly) has to be capped below its limit; this is the second line.
type descriptors struct {
	mu     sync.Mutex
	at     time.Time
	err    error
	counts func() (open, limit uint64)
}

const (
	// leastDescriptors is what a compaction and the flushes beside it may open.
	leastDescriptors = 256
	descriptorsEvery = 100 * time.Millisecond
)

func (d *descriptors) room() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now := time.Now(); now.Sub(d.at) >= descriptorsEvery {
		d.at, d.err = now, nil
		open, limit := d.counts()
		if least := min(leastDescriptors, limit/2); open+least > limit {
			d.err = fmt.Errorf("%w: %d of %d file descriptors are in use, %d must stay free",
				keys.ErrFull, open, limit, least)
		}
	}
	return d.err
}

// countDescriptors returns how many descriptors the process has open and may
// have open. Where neither is known it returns zeros.
func countDescriptors() (open, limit uint64) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, 0
	}
	limit = l.Cur
	fi, err := os.Stat("/proc/self/fd")
	if err != nil {
		return 0, 0
	}
	if n := fi.Size(); n > 0 { // since Linux 6.2
		return uint64(n), limit
	}
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return limit, limit // none left to look with
	}
	return uint64(len(names)), limit
}
