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
	idle   sync.Cond
	ts     uint64
	open   []snapshot // ascending
	closed bool
}

type snapshot struct {
	ts      uint64
	readers int
}

func (s *snapshots) init(ts uint64) {
	s.ts = ts
	s.idle.L = &s.mu
}

func (s *snapshots) newest() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ts
}

// begin opens the newest snapshot; it reports false after drain began.
func (s *snapshots) begin() (uint64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, false
	}
	if n := len(s.open); n > 0 && s.open[n-1].ts == s.ts {
		s.open[n-1].readers++
	} else {
		s.open = append(s.open, snapshot{s.ts, 1})
	}
	return s.ts, true
}

func (s *snapshots) end(ts uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := sort.Search(len(s.open), func(i int) bool { return s.open[i].ts >= ts })
	if s.open[i].readers--; s.open[i].readers > 0 {
		return
	}
	s.open = append(s.open[:i], s.open[i+1:]...)
	if len(s.open) == 0 {
		s.idle.Broadcast()
	}
}

// publish makes ts the newest and returns the oldest still read.
func (s *snapshots) publish(ts uint64) (oldest uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ts = ts
	if len(s.open) > 0 {
		return s.open[0].ts
	}
	return ts
}

// drain refuses new readers and waits for the last one.
func (s *snapshots) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for len(s.open) > 0 {
		s.idle.Wait()
	}
}

// inflight is the commit under way, for readers that must not overtake it by
// more than maxStale.
type inflight struct {
	current atomic.Pointer[commit]
}

type commit struct {
	since time.Time
	done  chan struct{}
}

func (f *inflight) begin() { f.current.Store(&commit{time.Now(), make(chan struct{})}) }

func (f *inflight) end() {
	c := f.current.Load()
	f.current.Store(nil)
	close(c.done)
}

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
