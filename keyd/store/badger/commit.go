package badger

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"lethe/keyd/internal/keys"
)

// Update implements keys.Store. fn runs on the store's committer, one at a time
// for the whole store: it must be brief, and must not call the same store's
// methods, which may wait for it. A panic of fn continues in the caller of Update.
// After Update has returned, fn does not run.
//
// When ctx ends first the error wraps ctx.Err(); if fn has not run by then,
// nothing was written.
func (s *Store) Update(ctx context.Context, fn func(keys.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if err := s.failed(); err != nil {
		return err
	}
	r := &request{ctx: ctx, fn: fn, done: make(chan struct{})}
	if !s.queue.push(r) {
		return errClosed
	}
	if err := r.wait(); err != nil {
		return err
	}
	switch {
	case r.exited:
		runtime.Goexit() // as fn did
	case r.panicked != nil:
		panic(r.panicked)
	}
	return r.err
}

// request is one Update under way.
type request struct {
	ctx context.Context
	fn  func(keys.Tx) error

	// group is nil while the request waits, then the group in which fn runs,
	// or withdrawn.
	group atomic.Pointer[group]

	// Set before done is closed.
	err      error
	panicked *Panic
	exited   bool
	done     chan struct{}
}

var withdrawn = new(group)

// wait returns when the request is answered, or when its context has ended and
// fn is not running and will not run again.
func (r *request) wait() error {
	for {
		select {
		case <-r.done:
			return nil
		case <-r.ctx.Done():
		}
		if r.group.CompareAndSwap(nil, withdrawn) {
			return ended(r.ctx.Err())
		}
		g := r.group.Load()
		if g == nil {
			continue
		}
		select {
		case <-r.done:
			return nil
		case <-g.sealed:
		}
		if r.group.Load() == g {
			return ended(r.ctx.Err())
		}
	}
}

// Panic is what Update panics with when its fn did.
type Panic struct {
	Value any
	// Stack is the stack of fn.
	Stack []byte
}

func (p *Panic) Error() string { return fmt.Sprintf("panic in an update: %v\n\n%s", p.Value, p.Stack) }

// Unwrap returns Value if it is an error.
func (p *Panic) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}

// queue holds the requests that wait for the committer.
type queue struct {
	mu     sync.Mutex
	more   sync.Cond
	waits  []*request
	closed bool
}

func (q *queue) init() { q.more.L = &q.mu }

func (q *queue) push(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.waits = append(q.waits, r)
	q.more.Signal()
	return true
}

func (q *queue) pushFront(rs []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waits = append(rs, q.waits...)
}

// take waits for requests and returns all that wait; none once the queue is
// closed and empty.
func (q *queue) take() []*request {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waits) == 0 && !q.closed {
		q.more.Wait()
	}
	taken := q.waits
	q.waits = nil
	return taken
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.more.Signal()
}

func (q *queue) isClosed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

// group is what one commit writes, and whom it answers.
type group struct {
	overlay
	members []*request
	sealed  chan struct{} // closed when no fn of the group will run again
}

// commitLoop is the committer.
func (s *Store) commitLoop() {
	for {
		waiting := s.queue.take()
		if waiting == nil {
			close(s.stopped)
			return
		}
		for len(waiting) > 0 {
			waiting = s.commitSome(waiting)
		}
	}
}

// commitSome runs and commits as many of the requests, from the first, as one
// transaction holds, answers them, and returns the rest.
func (s *Store) commitSome(waiting []*request) (rest []*request) {
	s.commitMu.Lock()
	defer s.commitMu.Unlock()
	s.inflight.begin()
	defer s.inflight.end()

	g := &group{sealed: make(chan struct{})}
	ran := false
	defer func() {
		if !ran {
			s.restart(g, waiting)
		}
	}()
	rest = s.runFns(g, waiting)
	ran = true
	close(g.sealed)

	if err := s.commit(&g.overlay); err != nil {
		// Whoever read what an earlier member wrote knows something that did
		// not happen, so this is everybody's answer.
		for _, r := range g.members {
			r.err, r.panicked = err, nil
		}
	}
	for _, r := range g.members {
		close(r.done)
	}
	return rest
}

// restart goes on with a new committer when an fn of g has called
// runtime.Goexit, which cannot be stopped. Nothing of g is written; the others
// run again.
func (s *Store) restart(g *group, waiting []*request) {
	again := waiting[:0:0]
	for _, r := range waiting {
		if r.exited {
			close(r.done)
			continue
		}
		r.group.CompareAndSwap(g, nil)
		again = append(again, r)
	}
	close(g.sealed)
	s.queue.pushFront(again)
	go s.commitLoop()
}

// runFns runs the requests' functions and gathers in g what they wrote.
func (s *Store) runFns(g *group, waiting []*request) (rest []*request) {
	snap := s.snaps.newest()
	txn := s.db.NewTransactionAt(snap.ts, false)
	defer discard(txn)
	failed := s.failed()
	room := s.room(s.maxBytes)
	for i, r := range waiting {
		if !r.group.CompareAndSwap(nil, g) {
			continue
		}
		if failed != nil {
			r.err = failed
			g.members = append(g.members, r)
			continue
		}
		t := &tx{reader: reader{store: s, ctx: r.ctx, txn: txn, rows: snap.rows, under: &g.overlay}}
		t.reader.over = &t.own
		s.call(r, t)
		if r.err == nil && len(t.own.rows) > 0 && room != nil {
			r.err = room
		}
		if r.err == nil && r.panicked == nil {
			if !g.fits(&t.own, s.maxBytes, s.maxRows) {
				// It runs again, first in the next group.
				r.group.Store(nil)
				return waiting[i:]
			}
			g.add(&t.own)
		}
		g.members = append(g.members, r)
	}
	return nil
}

// call runs r's fn. If fn calls runtime.Goexit, r.exited stays set and call
// does not return.
func (s *Store) call(r *request, t *tx) {
	r.err, r.panicked, r.exited = nil, nil, true
	defer t.close()
	defer func() {
		if p := recover(); p != nil {
			r.panicked, r.exited = &Panic{p, debug.Stack()}, false
		}
	}()
	r.err = r.fn(t)
	if r.err == nil {
		r.err = t.refused // a Put that failed and was not heeded
	}
	r.exited = false
}

// commit makes the rows of o durable, then visible.
func (s *Store) commit(o *overlay) error {
	if len(o.rows) == 0 {
		return nil
	}
	ts := s.snaps.newest().ts + 1
	txn := s.db.NewTransactionAt(ts-1, true)
	defer txn.Discard()
	for k, row := range o.rows {
		key := badgerKey(k)
		var err error
		if row.deleted {
			err = txn.Delete(key)
		} else {
			err = txn.Set(key, badgerValue(key, row.value))
		}
		if err != nil {
			return s.fail("building a commit", err)
		}
	}
	if err := txn.CommitAt(ts, nil); err != nil {
		return s.fail("a commit", err)
	}
	if err := s.dir.syncIfChanged(); err != nil {
		return s.fail("syncing the directory", err)
	}
	s.db.SetDiscardTs(s.snaps.publish(ts, cacheOf(o.rows)))
	return nil
}
