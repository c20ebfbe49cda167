package badger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"lethe/keyd/internal/keys"
)

// TestGroupsAreSplit: updates that wait together need not fit one transaction
// of Badger's together.
func TestGroupsAreSplit(t *testing.T) {
	s := openTest(t, t.TempDir())
	release := hold(t, s)
	value := make([]byte, 600<<10) // three to a transaction
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			err := s.Update(t.Context(), func(tx keys.Tx) error {
				return tx.Put(fmt.Appendf(nil, "%02d", i), value)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	waitQueued(t, s, 20)
	release()
	wg.Wait()
	err := s.View(t.Context(), func(r keys.Reader) error {
		for i := range 20 {
			if v, err := r.Get(fmt.Appendf(nil, "%02d", i)); err != nil || len(v) != len(value) {
				t.Errorf("row %d: %d bytes, %v", i, len(v), err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestGroupTransactionFillsBadger: the most that is accepted is what Badger
// takes, in rows and in bytes.
func TestGroupTransactionFillsBadger(t *testing.T) {
	s := openTest(t, t.TempDir())
	for name, value := range map[string][]byte{"rows": nil, "bytes": make([]byte, 1000)} {
		rows := 0
		fill := func(tx keys.Tx, limit int) error {
			for rows = 0; rows < limit; rows++ {
				if err := tx.Put(fmt.Appendf(nil, "%s%08d", name, rows), value); err != nil {
					return err
				}
			}
			return nil
		}
		err := s.Update(t.Context(), func(tx keys.Tx) error { return fill(tx, 1<<20) })
		if !errors.Is(err, keys.ErrTooLarge) {
			t.Fatalf("%s: %v, want ErrTooLarge", name, err)
		}
		most := rows
		if err := s.Update(t.Context(), func(tx keys.Tx) error { return fill(tx, most) }); err != nil {
			t.Errorf("%s: %d rows: %v", name, most, err)
		}
		if most < 2000 {
			t.Errorf("%s: only %d rows fit", name, most)
		}
	}
}

// hold keeps the committer in an update of its own until release.
func hold(t *testing.T, s *Store) (release func()) {
	t.Helper()
	running, finish, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		err := s.Update(context.Background(), func(keys.Tx) error {
			close(running)
			<-finish
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}()
	<-running
	release = sync.OnceFunc(func() { close(finish); <-done })
	t.Cleanup(release)
	return release
}

// waitQueued waits until n updates wait for the committer.
func waitQueued(t *testing.T, s *Store, n int) {
	t.Helper()
	for range 10_000 {
		s.queue.mu.Lock()
		waiting := len(s.queue.waits)
		s.queue.mu.Unlock()
		if waiting == n {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the updates did not come")
}

// TestFailedCommitStopsTheStore: what was committed is not known, so nothing is
// read or written any more.
func TestFailedCommitStopsTheStore(t *testing.T) {
	s := openTest(t, t.TempDir())
	commitRows(t, s, "logged", 0, 1)
	release := hold(t, s)
	boom := errors.New("boom")
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			err := s.Update(t.Context(), func(tx keys.Tx) error {
				if i%2 == 0 {
					return boom // may come of what another in the group wrote
				}
				return tx.Put([]byte("row"), []byte("x"))
			})
			if !errors.Is(err, keys.ErrUnavailable) {
				t.Errorf("Update: %v, want ErrUnavailable", err)
			}
		})
	}
	waitQueued(t, s, 10)
	if err := s.db.Close(); err != nil { // Badger now refuses to commit
		t.Fatal(err)
	}
	release()
	wg.Wait()
	ctx := t.Context()
	for name, err := range map[string]error{
		"View":      s.View(ctx, func(keys.Reader) error { return nil }),
		"Update":    s.Update(ctx, func(keys.Tx) error { return nil }),
		"DropRange": s.DropRange(ctx, []byte("x")),
		"Check":     s.Check(ctx),
		"Verify":    s.Verify(ctx),
	} {
		if !errors.Is(err, keys.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", name, err)
		}
	}
}

// TestSlowCommitHoldsReaders: readers go on with the snapshot before a commit
// for maxStale and no longer, and then see the commit.
func TestSlowCommitHoldsReaders(t *testing.T) {
	s := openTest(t, t.TempDir())
	running, finish := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		err := s.Update(context.Background(), func(tx keys.Tx) error {
			close(running)
			<-finish
			return tx.Put([]byte("row"), []byte("x"))
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-running
	c := s.inflight.current.Load()
	old := *c
	old.since = old.since.Add(time.Hour)
	s.inflight.current.Store(&old) // it has just begun
	if err := s.View(t.Context(), func(keys.Reader) error { return nil }); err != nil {
		t.Errorf("View beside a new commit: %v", err)
	}
	old2 := *c
	old2.since = old2.since.Add(-maxStale)
	s.inflight.current.Store(&old2) // it has been slow
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.inflight.wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("waiting for a slow commit: %v", err)
	}
	seen := make(chan error)
	go func() {
		seen <- s.View(t.Context(), func(r keys.Reader) error { _, err := r.Get([]byte("row")); return err })
	}()
	close(finish)
	if err := <-seen; err != nil {
		t.Errorf("View after a slow commit: %v", err)
	}
	wg.Wait()
}

// TestDropInSlices drops a range of several slices, of rows that share long
// prefixes, some deleted, and counts them.
func TestDropInSlices(t *testing.T) {
	s := openTest(t, t.TempDir())
	put := func(prefix string, from, to int) {
		for ; from < to; from += 2000 {
			err := s.Update(t.Context(), func(tx keys.Tx) error {
				for i := from; i < from+2000; i++ {
					if err := tx.Put(fmt.Appendf(nil, "%s/%08d", prefix, i), []byte("x")); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	const rows = 3 * sliceRows
	put("w/1/common", 0, rows)
	put("w/1/commoner", 0, 4000)
	put("w/10", 0, 2000)
	put("w/0", 0, 2000)
	for from := 0; from < 4000; from += 2000 {
		err := s.Update(t.Context(), func(tx keys.Tx) error {
			for i := from; i < from+2000; i++ {
				if err := tx.Delete(fmt.Appendf(nil, "w/1/commoner/%08d", i)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	parts, depth, err := s.nextParts(t.Context(), badgerKey("w/1/"), 0)
	if err != nil || len(parts) == 0 || depth == 0 {
		t.Fatalf("parts %q, depth %d, %v", parts, depth, err)
	}
	if err := s.DropRange(t.Context(), []byte("w/1/")); err != nil {
		t.Fatal(err)
	}
	if left := s.versionsLeft([][]byte{badgerKey("w/1/")}); len(left) > 0 {
		t.Error("versions are left")
	}
	err = s.View(t.Context(), func(r keys.Reader) error {
		n := 0
		err := r.Scan([]byte("w/"), nil, func(_, _ []byte) bool { n++; return true })
		if n != 4000 {
			t.Errorf("%d rows around the range, want 4000", n)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	// One that is stopped goes on when it is repeated.
	put("w/2", 0, rows)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.DropRange(ctx, []byte("w/2")); !errors.Is(err, context.Canceled) {
		t.Errorf("DropRange with an ended context: %v", err)
	}
	if err := s.DropRange(t.Context(), []byte("w/2")); err != nil {
		t.Error(err)
	}
}

// TestDropWaitsForReaders: an open iterator keeps tables alive.
func TestDropWaitsForReaders(t *testing.T) {
	s := openTest(t, t.TempDir())
	commitRows(t, s, "logged", 0, 10)
	dropped := make(chan error, 1)
	err := s.View(t.Context(), func(r keys.Reader) error {
		ctx, cancel := context.WithCancel(t.Context())
		go func() { dropped <- s.DropRange(ctx, []byte("logged")) }()
		for i := 0; s.snaps.eraNow() == 0; i++ {
			if i == 10_000 {
				t.Error("the drop does not wait")
				break
			}
			time.Sleep(time.Millisecond)
		}
		select {
		case err := <-dropped:
			t.Errorf("the drop ended before its reader: %v", err)
			dropped <- nil
		default:
		}
		cancel()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-dropped; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	// Without readers it does not wait, whatever began after it.
	if err := s.DropRange(t.Context(), []byte("logged")); err != nil {
		t.Error(err)
	}
}

func (s *snapshots) eraNow() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next.era
}

// TestCompactionKeepsWhatIsRead: superseded versions live as long as a view
// reads them, and go afterwards.
func TestCompactionKeepsWhatIsRead(t *testing.T) {
	s := openTest(t, t.TempDir())
	const rows = 2000
	put := func(value string) {
		err := s.Update(t.Context(), func(tx keys.Tx) error {
			for i := range rows {
				if err := tx.Put(fmt.Appendf(nil, "%08d", i), []byte(value)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	versions := func() (n int) {
		txn := s.db.NewTransactionAt(s.snaps.newest().ts, false)
		defer txn.Discard()
		it := txn.NewIterator(badger.IteratorOptions{AllVersions: true})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			n++
		}
		return n
	}
	put("old")
	reading, read := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		err := s.View(t.Context(), func(r keys.Reader) error {
			close(reading)
			<-read
			for i := range rows {
				if v, err := r.Get(fmt.Appendf(nil, "%08d", i)); err != nil || string(v) != "old" {
					return fmt.Errorf("row %d: %q, %w", i, v, err)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-reading
	for range 4 {
		put("new")
		flush(t, s)
	}
	compactNow(t, s)
	close(read)
	wg.Wait()
	put("newest")
	flush(t, s)
	compactNow(t, s)
	if n := versions(); n > rows+100 {
		t.Errorf("%d versions of %d rows are left", n, rows)
	}
}

// flush moves the memtable to a table of its own.
func flush(t *testing.T, s *Store) {
	t.Helper()
	s.commitMu.Lock()
	defer s.commitMu.Unlock()
	var mark overlay
	mark.put("zzz", write{})
	if err := s.commit(&mark); err != nil {
		t.Fatal(err)
	}
	if err := s.db.DropPrefix(badgerKey("zzz")); err != nil {
		t.Fatal(err)
	}
}

func compactNow(t *testing.T, s *Store) {
	t.Helper()
	if err := s.db.Flatten(1); err != nil {
		t.Fatal(err)
	}
}

// TestVerify finds what has rotten under an open store, and stops it.
func TestVerify(t *testing.T) {
	_, dir := built(t)
	s, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	merged(t, s, dir) // or the table that rots might be removed
	if err := s.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	rot(t, newest(t, dir, "*.sst"), 1000)
	if err := s.Verify(t.Context()); !errors.Is(err, keys.ErrDamaged) {
		t.Errorf("Verify: %v, want ErrDamaged", err)
	}
	if err := s.View(t.Context(), func(keys.Reader) error { return nil }); !errors.Is(err, keys.ErrDamaged) || !errors.Is(err, keys.ErrUnavailable) {
		t.Errorf("View afterwards: %v", err)
	}
}

// TestRottenRowsAreNotServed: a row that changed under an open store is an
// error, and never another value.
func TestRottenRowsAreNotServed(t *testing.T) {
	_, dir := built(t)
	s, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	merged(t, s, dir)
	for at := 0; at < 20_000; at += 97 {
		rot(t, matching(t, dir, "*.sst")[0], at)
	}
	n, failed := missing(t, s)
	if failed == 0 {
		t.Errorf("no row's damage was seen (%d are missing)", n)
	}
	t.Logf("%d reads failed, %d rows were not found", failed, n)
}
