package ledger

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Bounds of an Interruptible.
const (
	// answerLimit is after what time an anchor that does not answer is told of.
	answerLimit = 5 * time.Second
	// tellLimit is how long it is not told of again, at most.
	tellLimit = 10 * time.Minute
	// returnLimit is how long a call may take to return once its context is over.
	returnLimit = 100 * time.Millisecond
)

// Interruptible is an Anchor whose calls return when their context is over, also
// where those of the anchor below do not, as in a directory of a file system
// that hangs. Such a call is left to itself; until it has returned no other
// begins, so that nothing is written beside it. What hangs is logged.
type Interruptible struct {
	anchor Anchor
	log    *slog.Logger

	mu    sync.Mutex
	calls map[*anchorCall]struct{} // that have not returned
}

// anchorCall is a call that has begun.
type anchorCall struct {
	what  string
	began time.Time
	left  bool          // nobody waits for it any more
	told  bool          // it was logged
	late  *time.Timer   // logs it
	back  chan struct{} // closed when it has returned
}

// Interrupt returns a, as an Interruptible.
func Interrupt(a Anchor, log *slog.Logger) *Interruptible {
	if i, ok := a.(*Interruptible); ok {
		return i
	}
	return &Interruptible{anchor: a, log: log, calls: make(map[*anchorCall]struct{})}
}

// Newest implements Anchor.
func (i *Interruptible) Newest(ctx context.Context) (Object, error) {
	return ask(ctx, i, "newest", func() (Object, error) { return i.anchor.Newest(ctx) })
}

// Put implements Anchor.
func (i *Interruptible) Put(ctx context.Context, o Object) error {
	_, err := ask(ctx, i, "put", func() (struct{}, error) { return struct{}{}, i.anchor.Put(ctx, o) })
	return err
}

// Get implements Anchor.
func (i *Interruptible) Get(ctx context.Context, size uint64) (Object, error) {
	return ask(ctx, i, "get", func() (Object, error) { return i.anchor.Get(ctx, size) })
}

// Enter implements Anchor.
func (i *Interruptible) Enter(ctx context.Context, t Term) (Term, error) {
	return ask(ctx, i, "enter", func() (Term, error) { return i.anchor.Enter(ctx, t) })
}

// Domain implements Anchor.
func (i *Interruptible) Domain() (code, description string) { return i.anchor.Domain() }

// Exclusive says whether no other process can have the anchor.
func (i *Interruptible) Exclusive() bool {
	own, ok := i.anchor.(interface{ Exclusive() bool })
	return ok && own.Exclusive()
}

// Close implements Anchor.
func (i *Interruptible) Close() error { return i.anchor.Close() }

// Overdue says since when the anchor does not answer, as an
// ErrAnchorUnavailable, or returns nil: when no call was left to itself that has
// not returned, and none takes its time.
func (i *Interruptible) Overdue() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	var oldest *anchorCall
	for c := range i.calls {
		if (c.left || time.Since(c.began) >= answerLimit) && (oldest == nil || c.began.Before(oldest.began)) {
			oldest = c
		}
	}
	if oldest == nil {
		return nil
	}
	return i.unanswered(oldest)
}

func (i *Interruptible) unanswered(c *anchorCall) error {
	_, where := i.anchor.Domain()
	return fmt.Errorf("%w: it does not answer since %s (%s)", ErrAnchorUnavailable, c.began.UTC().Format(time.RFC3339), where)
}

// ask runs fn, or leaves it to itself when ctx is over.
func ask[T any](ctx context.Context, i *Interruptible, what string, fn func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	c, err := i.begin(ctx, what)
	if err != nil {
		return none, err
	}
	answers := make(chan answer, 1)
	go func() {
		value, err := fn()
		answers <- answer{value, err}
		i.end(c)
	}()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
	}
	// Most return now, and know better what was wrong.
	limit := time.NewTimer(returnLimit)
	defer limit.Stop()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-limit.C:
	}
	i.mu.Lock()
	c.left = true
	i.mu.Unlock()
	return none, fmt.Errorf("%w: %w", i.unanswered(c), ctx.Err())
}

// begin returns a call that may begin.
func (i *Interruptible) begin(ctx context.Context, what string) (*anchorCall, error) {
	for {
		i.mu.Lock()
		hangs := i.leftCall()
		if hangs == nil {
			c := &anchorCall{what: what, began: time.Now(), back: make(chan struct{})}
			c.late = time.AfterFunc(answerLimit, func() { i.tell(c, answerLimit) })
			i.calls[c] = struct{}{}
			i.mu.Unlock()
			return c, nil
		}
		i.mu.Unlock()
		select {
		case <-hangs.back:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", i.unanswered(hangs), ctx.Err())
		}
	}
}

// leftCall returns a call that nobody waits for. i.mu is held.
func (i *Interruptible) leftCall() *anchorCall {
	for c := range i.calls {
		if c.left {
			return c
		}
	}
	return nil
}

// end is the end of a call.
func (i *Interruptible) end(c *anchorCall) {
	i.mu.Lock()
	delete(i.calls, c)
	c.late.Stop()
	told := c.told
	i.mu.Unlock()
	close(c.back)
	if told {
		_, where := i.anchor.Domain()
		i.log.Info("the anchor has answered", "anchor", where, "call", c.what, "after", time.Since(c.began).Round(time.Millisecond))
	}
}

// tell logs a call that has not returned, and does so again ever more seldom.
func (i *Interruptible) tell(c *anchorCall, after time.Duration) {
	i.mu.Lock()
	_, underWay := i.calls[c]
	if underWay {
		c.told = true
		after = min(2*after, tellLimit)
		c.late = time.AfterFunc(after, func() { i.tell(c, after) })
	}
	i.mu.Unlock()
	if underWay {
		_, where := i.anchor.Domain()
		i.log.Warn("waiting for the anchor, which does not answer", "anchor", where, "call", c.what, "since", c.began.UTC().Format(time.RFC3339))
	}
}
