package keys

import (
	"cmp"
	"context"
	"errors"
	"time"

	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

// Operations that write to the ledger go through one loop, which runs those
// that wait together in one transaction: each is checked by reads alone, then
// the ledger's head is read, then all are written. An operation that fails its
// checks has written nothing. Operations that touch a common row never share a
// transaction, so that none acts on what another is about to change.

// op is one such operation.
type op struct {
	ctx context.Context
	// rows that it writes and other operations read or write.
	rows []string
	// closes is the row of the subject or tenant whose keys it destroys, if it does.
	closes string
	// alone keeps it from sharing its transaction: it changes a row that every
	// operation of its tenant reads.
	alone bool
	// check reads, and decides. It may run more than once.
	check func(r Reader, now time.Time) (*plan, error)

	plan *plan
	err  error
	done chan struct{}

	index uint64        // of its statement
	size  uint64        // of the tree that the anchor must cover
	group *ledger.Group // that its statements are in; nil: it has none
}

// plan is what a checked operation will write.
type plan struct {
	// statements to log, none for an operation that was done before, whose
	// entry is at index.
	statements []*receipt.Statement
	index      uint64
	// later is an entry that the one at index led to; the answer tells both.
	later *uint64
	// nothing: there is no entry, and nothing to answer with.
	nothing bool
	// write puts the rows. It gets the index of the first statement, or index.
	write func(tx Tx, index uint64) error
}

const maxGroup = 64

// gatherLimit is the usual Config.GatherLimit.
const gatherLimit = 20 * time.Millisecond

var errClosed = unavailable("keyd is shutting down", nil)

// record runs an operation, and returns when the anchor covers its entry.
func (k *Keys) record(ctx context.Context, o *op) error {
	o.ctx, o.done = ctx, make(chan struct{})
	select {
	case k.ops <- o:
	case <-k.stopped:
		return errClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-o.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if o.err != nil {
		return o.err
	}
	return k.waitAnchored(ctx, o.size)
}

// waitAnchored returns when the anchor covers a tree of size entries. It answers
// before ctx's deadline, after which nobody would hear what it was that was
// waited for.
func (k *Keys) waitAnchored(ctx context.Context, size uint64) error {
	patience := k.cfg.AnchorTimeout
	if at, limited := ctx.Deadline(); limited {
		left := time.Until(at)
		patience = min(patience, left-min(left/8, time.Second))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, ledger.ErrAnchorUnavailable)
	defer cancel()
	if err := k.keeper.WaitFor(ctx, size); err != nil {
		if cause := context.Cause(ctx); cause != nil && errors.Is(cause, ledger.ErrAnchorUnavailable) {
			err = cause
		}
		return unavailable("the anchor does not cover it yet; repeat the request", err)
	}
	return nil
}

// groupLoop answers every operation that it took, until ctx is done.
func (k *Keys) groupLoop(ctx context.Context) {
	defer close(k.stopped)
	var waiting []*op
	for {
		if len(waiting) == 0 {
			select {
			case o := <-k.ops:
				waiting = append(waiting, o)
			case <-ctx.Done():
				return
			}
		}
		waiting = k.gather(ctx, waiting)
		var group []*op
		group, waiting = nextGroup(waiting)
		k.runGroup(ctx, group)
	}
}

// gather adds to waiting the operations that wait too and, while the anchor is
// brought up to the group before, those that come, until they fill a group. A
// transaction, or an object of the anchor, takes about as long for many
// operations as for one, and none is answered before the anchor covers it.
func (k *Keys) gather(ctx context.Context, waiting []*op) []*op {
	limit := time.NewTimer(cmp.Or(k.cfg.GatherLimit, gatherLimit))
	defer limit.Stop()
	for len(waiting) < 4*maxGroup {
		select {
		case o := <-k.ops:
			waiting = append(waiting, o)
			continue
		default:
		}
		covered, changed := k.keeper.Covers(k.ledgerSize.Load())
		if covered || len(waiting) >= maxGroup {
			break
		}
		select {
		case o := <-k.ops:
			waiting = append(waiting, o)
		case <-changed:
		case <-limit.C:
			return waiting
		case <-ctx.Done():
			return waiting
		}
	}
	return waiting
}

// nextGroup takes the operations that may share a transaction, in order. What
// depends on an earlier operation, taken or not, stays behind it.
func nextGroup(waiting []*op) (group, rest []*op) {
	seen := make(map[string]bool)
	for i, o := range waiting {
		if o.ctx.Err() != nil {
			o.err = o.ctx.Err()
			close(o.done)
			continue
		}
		if o.alone {
			if len(group) == 0 && len(rest) == 0 {
				return []*op{o}, waiting[i+1:]
			}
			return group, append(rest, waiting[i:]...)
		}
		free := len(group) < maxGroup
		for _, r := range o.rows {
			free = free && !seen[r]
		}
		for _, r := range o.rows {
			seen[r] = true
		}
		if free {
			group = append(group, o)
		} else {
			rest = append(rest, o)
		}
	}
	return group, rest
}

func (k *Keys) runGroup(ctx context.Context, group []*op) {
	if len(group) == 0 {
		return
	}
	var closes []string
	for _, o := range group {
		if o.closes != "" {
			closes = append(closes, o.closes)
		}
	}
	// From here on no lease is issued for these until the outcome is
	// known; the statement's time is taken after this.
	// The transaction has no deadline of its own: while its outcome is not
	// known they stay marked, and the callers' deadlines bound their waiting.
	unmark := k.closing.mark(closes)
	var logged *ledger.Group
	err := k.update(ctx, func(tx Tx) error {
		now := k.stated()
		var statements []*receipt.Statement
		for _, o := range group {
			o.plan, o.err = o.check(tx, now)
			if o.err != nil {
				var outcome *Error
				if errors.As(o.err, &outcome) || errors.Is(o.err, ErrDamaged) {
					continue // what another operation needs may be whole
				}
				return o.err // the store failed, not the operation
			}
			statements = append(statements, o.plan.statements...)
		}
		logged = nil
		var next, size uint64
		if len(statements) != 0 {
			var err error
			if logged, err = ledger.Append(tx, now, statements); err != nil {
				return err
			}
			next, size = logged.First, logged.Head.Size
		}
		for _, o := range group {
			if o.err != nil {
				continue
			}
			o.index, o.size, o.group = o.plan.index, size, nil
			if len(o.plan.statements) != 0 {
				o.index, o.group = next, logged
			}
			if err := o.plan.write(tx, o.index); err != nil {
				return err
			}
			for _, s := range o.plan.statements {
				if s.Tenant == "" {
					next++
					continue
				}
				if err := tx.Put(receiptIndexKey(tenantID(s.Tenant), next), nil); err != nil {
					return err
				}
				next++
			}
			switch {
			case len(o.plan.statements) != 0:
			case o.plan.nothing:
				o.size = 0
			default:
				last := o.index
				if o.plan.later != nil {
					last = *o.plan.later
				}
				e, err := ledger.ReadEntry(tx, last)
				if err != nil {
					return err
				}
				o.size = e.TreeSize
			}
		}
		return nil
	})
	unmark()
	if errors.Is(err, ErrTooLarge) && len(group) > 1 {
		// Together they are more than a transaction holds.
		for _, o := range group {
			k.runGroup(ctx, []*op{o})
		}
		return
	}
	if err == nil && logged != nil {
		k.ledgerSize.Store(logged.Head.Size)
		k.lastStated.Store(logged.Head.Time.UnixMilli())
		k.keeper.Notify()
	}
	for _, o := range group {
		if err != nil && o.err == nil {
			o.err = err
		}
		close(o.done)
	}
}
