// Package badger keeps keyd's rows in a directory, in a Badger database of one
// process. It implements keys.Store.
//
// All writes go through one goroutine, the committer. It runs the functions of
// the updates that wait, one after another, each on a buffer of its own over
// the buffers of those before it, and commits the lot in one Badger transaction
// with one sync. Order of execution is order of commit, so transactions are
// strictly serializable and never conflict.
//
// Timestamps are ours (Badger's managed mode): a commit becomes visible to
// readers when the committer publishes its timestamp, which it does after the
// sync and before it answers. Readers never see what a loss of power could
// undo, and never wait for a sync that goes well.
package badger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"

	"lethe/keyd/internal/keys"
)

// Options says where a store is and how it behaves.
type Options struct {
	// Dir is the directory of the store. It belongs to the store alone.
	Dir string
	// Create lets Open make the directory, or fill an empty one. Without it a
	// store that is not there is an error: an empty store at a mistyped path
	// would look as if everybody had been erased.
	Create bool
	// MinFree is how many bytes must stay free on the file system: with less,
	// updates that write fail with keys.ErrFull. Zero means DefaultMinFree;
	// less than LeastMinFree is raised to it.
	MinFree uint64
	// Logger receives what Badger warns of. Nil means slog.Default().
	Logger *slog.Logger
}

// Limits of a row, in bytes.
const (
	MaxKey   = 256
	MaxValue = 1<<20 - 1<<10
)

const (
	memTableSize = 16 << 20
	// tableSize weighs file descriptors (one a table) against how long a drop,
	// which rewrites the tables that a slice touches, holds everybody up.
	tableSize = 8 << 20
	// levelZeroTables is how many tables level 0 has when it is compacted, and
	// baseLevelSize how large the level may grow into which it is. A drop merges
	// both with everybody waiting; small ones cost a sixth more compaction.
	levelZeroTables = 1
	baseLevelSize   = 2 << 20
	// maxStale bounds how long a reader goes on with the snapshot before a
	// commit under way. Leases are issued from reads, and a destruction states
	// when the last of them ends, counting from its own run: however long the
	// disk takes, no read may begin much later than that and miss it.
	maxStale = 100 * time.Millisecond
)

// Store is an open store. Close it to release its directory.
type Store struct {
	db      *badger.DB
	dir     *directory
	minFree uint64
	log     *slog.Logger
	stat    func(dir string) (free uint64, err error)

	fds       descriptors
	fileLimit func() uint64

	maxBytes, maxRows int64 // of one Badger transaction, as charge counts

	snaps snapshots
	queue queue

	// commitMu is held while something is written: by the committer for a
	// group, by DropRange for a slice.
	commitMu sync.Mutex
	dropMu   sync.Mutex // one DropRange at a time
	inflight inflight
	failure  atomic.Pointer[error]

	stopped   chan struct{} // the committer has ended
	closeOnce sync.Once
	closeErr  error
}

// Open opens the store in o.Dir. Only one process can have it open; another
// gets keys.ErrLocked. It fails with fs.ErrNotExist when there is no store and
// o.Create is not set, with keys.ErrDamaged when a file fails its checks, and
// with keys.ErrNewerVersion.
func Open(o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	dir, err := openDirectory(o.Dir, o.Create)
	if err != nil {
		return nil, err
	}
	s, err := open(o, dir)
	if err != nil {
		_ = dir.close()
		return nil, err
	}
	return s, nil
}

// openNeed is the room that opening needs: Badger maps the logs that it makes,
// and dies where the disk cannot back them.
const openNeed = 64 << 20

func open(o Options, dir *directory) (*Store, error) {
	switch free, err := freeBytes(dir.path); {
	case errors.Is(err, keys.ErrFull):
		return nil, err
	case err == nil && free < openNeed:
		return nil, fmt.Errorf("%w: %d MiB are free in %s, and opening needs %d", keys.ErrFull, free>>20, dir.path, openNeed>>20)
	}
	if err := fileSizes(fileSizeLimit()); err != nil {
		return nil, err
	}
	if err := dir.forgetNewestLog(); err != nil {
		return nil, fmt.Errorf("opening the store: %w", err)
	}
	db, err := openBadger(dir.path, bridge{o.Logger})
	if err != nil {
		return nil, err
	}
	s := &Store{
		db:        db,
		dir:       dir,
		minFree:   minFree(o.MinFree),
		log:       o.Logger,
		stat:      freeBytes,
		fds:       descriptors{counts: countDescriptors},
		fileLimit: fileSizeLimit,
		maxBytes:  db.MaxBatchSize() - txnOverhead,
		maxRows:   db.MaxBatchCount() - 3,
		stopped:   make(chan struct{}),
	}
	s.snaps.init(db.MaxVersion())
	s.queue.init()
	db.SetDiscardTs(s.snaps.newest().ts)
	if err := dir.settle(); err != nil {
		_ = db.Close()
		return nil, err
	}
	go s.commitLoop()
	return s, nil
}

// badgerOptions keeps values in the LSM tree (a value log would keep dead ones
// beyond reach of a dropped range), syncs every commit, and trades read caches
// for memory: tables are mapped files.
func badgerOptions(dir string, l badger.Logger) badger.Options {
	o := badger.DefaultOptions(dir).
		WithSyncWrites(true).
		WithCompression(options.None).
		WithNumVersionsToKeep(1).
		WithDetectConflicts(false).
		WithMetricsEnabled(false).
		WithMemTableSize(memTableSize).
		WithNumMemtables(2).
		WithNumCompactors(2).
		WithBaseTableSize(tableSize).
		WithBaseLevelSize(baseLevelSize).
		WithNumLevelZeroTables(levelZeroTables).
		WithNumLevelZeroTablesStall(6).
		WithBlockCacheSize(0).
		WithIndexCacheSize(0).
		WithValueThreshold(1 << 20).
		WithValueLogFileSize(2 << 20).
		WithChecksumVerificationMode(options.NoVerification). // see rowValue
		WithLogger(l)
	o.TableSizeMultiplier = 1 // a compaction's need of room does not grow with the store
	o.BypassLockGuard = true  // directory holds the lock
	o.ExternalMagicVersion = layoutVersion
	return o
}

// View implements keys.Store.
func (s *Store) View(ctx context.Context, fn func(keys.Reader) error) error {
	snap, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer s.snaps.end(snap)
	r := &reader{store: s, ctx: ctx, txn: s.db.NewTransactionAt(snap.ts, false), rows: snap.rows}
	defer r.close()
	return fn(r)
}

// begin takes a snapshot, which snaps.end gives back.
func (s *Store) begin(ctx context.Context) (snapshot, error) {
	if err := ctx.Err(); err != nil {
		return snapshot{}, ended(err)
	}
	if err := s.failed(); err != nil {
		return snapshot{}, err
	}
	if err := s.inflight.wait(ctx); err != nil {
		return snapshot{}, ended(err)
	}
	if err := s.failed(); err != nil { // the commit that was waited for
		return snapshot{}, err
	}
	snap, ok := s.snaps.begin()
	if !ok {
		return snapshot{}, errClosed
	}
	return snap, nil
}

// Check implements keys.Store.
func (s *Store) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if err := s.failed(); err != nil {
		return err
	}
	if s.queue.isClosed() {
		return errClosed
	}
	return s.room(s.maxBytes)
}

// Close implements keys.Store: it waits for the updates, views, backups and
// drops under way. Closing again returns the same error.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		s.queue.close()
		<-s.stopped
		s.dropMu.Lock() // a drop ends after its slice
		defer s.dropMu.Unlock()
		s.snaps.drain()
		err := s.dir.forgetNewestLog()
		if closeErr := s.db.Close(); closeErr != nil {
			err = errors.Join(err, fmt.Errorf("closing the store: %w", redact(closeErr)))
		}
		s.closeErr = errors.Join(err, s.dir.settle(), s.dir.close())
	})
	return s.closeErr
}

var errClosed = fmt.Errorf("%w: it is closed", keys.ErrUnavailable)

// fail stops the store for good. After a write whose outcome is not known
// neither writes nor reads go on: the log is in doubt, and a read would go on
// issuing keys from before a destruction that a restart may find done.
func (s *Store) fail(what string, err error) error {
	return s.stop(what, fmt.Errorf("%w: what was acknowledged stands; restart keyd when the cause is mended", redact(err)))
}

func (s *Store) stop(what string, err error) error {
	stopped := fmt.Errorf("%w: the store has stopped: %s: %w", keys.ErrUnavailable, what, err)
	if s.failure.CompareAndSwap(nil, &stopped) {
		s.log.Error("store has stopped", "during", what, "error", err)
	}
	return s.failed()
}

func (s *Store) failed() error {
	if p := s.failure.Load(); p != nil {
		return *p
	}
	return nil
}

func ended(err error) error { return fmt.Errorf("store: %w", err) }

// directory is the locked directory of a store.
type directory struct {
	path string
	lock *os.File
	sync dirSync // the committer's, as is
	// noted is the log that the file of the newest one names; 0: there is none.
	noted uint64
	// tableBytes is the size of the tables when the directory last changed.
	tableBytes atomic.Uint64
}

func openDirectory(path string, create bool) (*directory, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("store directory: %w", err)
	}
	_, err = os.Stat(path)
	if create && errors.Is(err, fs.ErrNotExist) {
		err = makeDirectory(path)
	}
	if err != nil {
		return nil, fmt.Errorf("store directory: %w", err)
	}
	lock, err := lockDirectory(path)
	if err != nil {
		return nil, err
	}
	d := &directory{path: path, lock: lock}
	if fi, err := lock.Stat(); err == nil && fi.Mode().Perm()&0o077 != 0 {
		if err := lock.Chmod(0o700); err != nil {
			_ = d.close()
			return nil, fmt.Errorf("closing the store directory to others: %w", err)
		}
	}
	if err := d.inspect(create); err != nil {
		_ = d.close()
		return nil, err
	}
	return d, nil
}

func (d *directory) close() error { return d.lock.Close() }
