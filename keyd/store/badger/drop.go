package badger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dgraph-io/badger/v4"

	"lethe/keyd/internal/keys"
)

// sliceRows is how many row versions a drop takes at a time. Reads and writes
// of the whole store stand still while it does.
const sliceRows = 32 << 10

// settleLimit is how long a slice waits for compaction, which may never catch
// up where more is written than it can take.
const (
	settleLimit = 5 * time.Second
	settlePoll  = 20 * time.Millisecond
)

// DropRange implements keys.Store. It rewrites the tables that hold the range
// without it, slice by slice, and updates go on between the slices. It returns
// when no file of the store holds a version of the rows any more, for which it
// waits for the views and backups that began before its end. If it fails, some
// rows under prefix may have gone and others have an empty value; repeat it.
//
// An empty prefix is refused. What the disk holds in blocks that no file uses
// is beyond it.
func (s *Store) DropRange(ctx context.Context, prefix []byte) error {
	if len(prefix) == 0 {
		return errors.New("store: refusing to drop all rows")
	}
	s.dropMu.Lock()
	defer s.dropMu.Unlock()
	depth := 0
	for {
		if err := s.mayDrop(ctx); err != nil {
			return err
		}
		var parts [][]byte
		var err error
		if parts, depth, err = s.nextParts(ctx, badgerKey(string(prefix)), depth); err != nil {
			return err
		}
		if len(parts) == 0 {
			break
		}
		if err := s.settle(ctx); err != nil {
			return err
		}
		if err := s.dropParts(parts); err != nil {
			return err
		}
	}
	if err := s.snaps.outlive(ctx); err != nil {
		return ended(err)
	}
	return nil
}

func (s *Store) mayDrop(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if err := s.failed(); err != nil {
		return err
	}
	if s.queue.isClosed() {
		return errClosed
	}
	// Rewriting takes room before it makes room; half of what is kept free.
	if err := s.freeFor(s.least() / 2); err != nil {
		return err
	}
	return s.limits()
}

// nextParts returns prefixes of Badger keys that cover the first rows under
// prefix, dead versions included, and no more than sliceRows unless rows share
// a whole key. They are depth bytes longer than prefix; the depth of the part
// before is where to start looking for it. No parts: there are no rows.
func (s *Store) nextParts(ctx context.Context, prefix []byte, depth int) (parts [][]byte, next int, err error) {
	snap, err := s.begin(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer s.snaps.end(snap)
	txn := s.db.NewTransactionAt(snap.ts, false)
	defer discard(txn)
	defer (&reader{store: s}).recoverDamage(&err)
	it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix, AllVersions: true})
	defer it.Close()

	it.Seek(prefix)
	if !it.Valid() {
		return nil, 0, nil
	}
	first := it.Item().KeyCopy(nil)
	// count returns how many versions begin with part, at most one more than
	// limit, and leaves it behind them.
	count := func(part []byte, limit int) (n int) {
		for ; n <= limit && it.ValidForPrefix(part); it.Next() {
			n++
		}
		return n
	}
	var n int
	for depth = max(0, depth-1); ; depth++ {
		it.Seek(first)
		n = count(cutTo(first, len(prefix)+depth), sliceRows)
		if n <= sliceRows || len(prefix)+depth >= len(first) {
			break
		}
	}
	parts = [][]byte{cutTo(first, len(prefix)+depth)}
	for it.Valid() && n < sliceRows {
		part := cutTo(it.Item().KeyCopy(nil), len(prefix)+depth)
		if n += count(part, sliceRows-n); n > sliceRows {
			break
		}
		parts = append(parts, part)
	}
	return parts, depth, nil
}

// settle waits until compaction has caught up, for settleLimit at most. For a
// drop Badger waits for the compactions under way and merges all of the upper
// levels, with everybody waiting: that much longer than they are large.
func (s *Store) settle(ctx context.Context) error {
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	poll := time.NewTicker(settlePoll)
	defer poll.Stop()
	for !s.settled() && !s.queue.isClosed() {
		select {
		case <-poll.C:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return ended(ctx.Err())
		}
	}
	return nil
}

// settled says whether no level but the last waits to be compacted, or is being
// compacted.
func (s *Store) settled() bool {
	levels := s.db.Levels()
	for _, l := range levels[:len(levels)-1] {
		if l.Level == 0 && l.NumTables >= levelZeroTables || l.Level > 0 && l.Size >= l.TargetSize {
			return false
		}
	}
	return true
}

func cutTo(key []byte, n int) []byte { return key[:min(n, len(key))] }

// dropParts drops the rows of parts and all their versions.
func (s *Store) dropParts(parts [][]byte) error {
	s.commitMu.Lock()
	defer s.commitMu.Unlock()
	if err := s.dropPrefixes(parts); err != nil {
		return err
	}
	left := s.versionsLeft(parts)
	if len(left) == 0 {
		return nil
	}
	// Badger passes over a prefix without live rows, whose deleted rows' bytes
	// are still there. A live row makes it look.
	var marks overlay
	for _, p := range left {
		marks.put(string(p[1:]), write{})
	}
	if err := s.commit(&marks); err != nil {
		return err
	}
	if err := s.dropPrefixes(left); err != nil {
		return err
	}
	if left = s.versionsLeft(left); len(left) > 0 {
		return fmt.Errorf("%w: a range was not dropped", keys.ErrUnavailable)
	}
	return nil
}

// dropPrefixes runs Badger's drop. On an error Badger is left between two
// states, so the store stops.
func (s *Store) dropPrefixes(parts [][]byte) error {
	if err := s.failed(); err != nil {
		return err
	}
	if err := s.dir.forgetNewestLog(); err != nil { // for a moment there may be none
		return s.fail("dropping a range", err)
	}
	if err := s.db.DropPrefix(parts...); err != nil {
		return s.fail("dropping a range", err)
	}
	s.snaps.dropped()
	if err := s.dir.settle(); err != nil {
		return s.fail("dropping a range", err)
	}
	return nil
}

// versionsLeft returns the parts under which there is any version of a row.
func (s *Store) versionsLeft(parts [][]byte) (left [][]byte) {
	txn := s.db.NewTransactionAt(s.snaps.newest().ts, false)
	defer txn.Discard()
	for _, p := range parts {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: p, AllVersions: true})
		if it.Seek(p); it.Valid() {
			left = append(left, p)
		}
		it.Close()
	}
	return left
}
