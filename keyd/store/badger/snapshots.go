package badger

import (
	"context"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// snapshots hands out the newest published timestamp to readers and knows the
// oldest that is still read, below which Badger may drop superseded versions.
type snapshots struct {
	mu     sync.Mutex
	ended  sync.Cond // a reader has ended
	next   snapshot
	open   []openSnapshot // ascending
	closed bool
}

// snapshot is what a reader reads.
type snapshot struct {
	ts uint64
	// era counts the drops of rows, slices of a range, that ended before the
	// reader began: one of an earlier era may keep dropped bytes alive.
	era uint64
	// rows are of this snapshot, and are seen by its readers alone.
	rows *rowCache
}

type openSnapshot struct {
	snapshot
	readers int
}

func (s *snapshots) init(ts uint64) {
	s.next = snapshot{ts: ts, rows: new(rowCache)}
	s.ended.L = &s.mu
}

// newest returns the newest published snapshot.
func (s *snapshots) newest() snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next
}

// begin opens the newest snapshot; it reports false after drain began.
func (s *snapshots) begin() (snapshot, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return snapshot{}, false
	}
	if n := len(s.open); n > 0 && s.open[n-1].snapshot == s.next {
		s.open[n-1].readers++
	} else {
		s.open = append(s.open, openSnapshot{s.next, 1})
	}
	return s.next, true
}

func (s *snapshots) end(snap snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := sort.Search(len(s.open), func(i int) bool {
		o := s.open[i]
		return o.ts > snap.ts || o.ts == snap.ts && o.era >= snap.era
	})
	if s.open[i].readers--; s.open[i].readers == 0 {
		s.open = append(s.open[:i], s.open[i+1:]...)
		s.ended.Broadcast()
	}
}

// publish makes ts the newest, with a cache of its rows, and returns the oldest
// still read.
func (s *snapshots) publish(ts uint64, rows *rowCache) (oldest uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next.ts, s.next.rows = ts, rows
	if len(s.open) > 0 {
		return s.open[0].ts
	}
	return ts
}

// dropped begins another era: rows are gone that were part of the newest
// snapshot.
func (s *snapshots) dropped() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next.era, s.next.rows = s.next.era+1, new(rowCache)
}

// drain refuses new readers and waits for the last one.
func (s *snapshots) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for len(s.open) > 0 {
		s.ended.Wait()
	}
}

// outlive waits until every reader that began before the last drop has ended.
func (s *snapshots) outlive(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	era := s.next.era
	for len(s.open) > 0 && s.open[0].era < era {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.ended.Wait()
	}
	return nil
}

// inflight is the commit under way, for readers that must not overtake it by
// more than maxStale.
type inflight struct {
	current atomic.Pointer[underway]
}

type underway struct {
	since time.Time
	done  chan struct{}
}

func (f *inflight) begin() { f.current.Store(&underway{time.Now(), make(chan struct{})}) }

func (f *inflight) end() { close(f.current.Swap(nil).done) }

func (f *inflight) wait(ctx context.Context) error {
	c := f.current.Load()
	if c == nil || time.Since(c.since) < maxStale {
		return nil
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
