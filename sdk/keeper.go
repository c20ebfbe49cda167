package sdk

import (
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

const (
	// suspendCheck is how often the keeper looks at least while there are
	// keys: timers stand still while the machine is suspended, leases do not.
	suspendCheck = 10 * time.Second
	// lookGap is the least time between two looks, and lookGapPerLease what
	// each lease adds to it, so that looking costs little.
	lookGap         = 20 * time.Millisecond
	lookGapPerLease = 5 * time.Microsecond
	// renewBatch is how many renewals share a call.
	renewBatch = 64
)

// keep wipes keys whose leases are over, and renews those in use, until Close.
func (c *Client) keep() {
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return
		}
		due, ahead, until, idle := c.look()
		c.mu.Unlock()
		for _, batch := range batches(due) {
			c.work.Go(func() { c.renew(batch) })
		}
		for _, batch := range batches(ahead) {
			c.work.Go(func() { c.askAhead(batch) })
		}
		if idle {
			select {
			case <-c.wake:
			case <-c.ctx.Done():
				return
			}
			continue
		}
		timer := make(chan struct{})
		_, boot := c.clock.Now()
		stop := c.clock.AfterFunc(until-boot, func() { close(timer) })
		if _, now := c.clock.Now(); now >= until || now-boot >= lookGap {
			// Time went by before the timer was set, which is now late.
			stop()
			continue
		}
		select {
		case <-timer:
		case <-c.wake:
			stop()
		case <-c.ctx.Done():
			stop()
			return
		}
	}
}

// batches groups leases so that each group shares a call. A call is for one
// tenant: what one tenant is refused must not keep another's keys from being
// renewed. A lease of several keys has a call of its own.
func batches(due []*lease) (all [][]*lease) {
	slices.SortFunc(due, func(a, b *lease) int { return strings.Compare(a.key.tenant, b.key.tenant) })
	for len(due) > 0 {
		n := 1
		for n < len(due) && n < renewBatch && due[n].key.tenant == due[0].key.tenant &&
			due[n].key.policy == 0 && due[0].key.policy == 0 {
			n++
		}
		all = append(all, due[:n])
		due = due[n:]
	}
	return all
}

// look drops what is over and returns what is due for renewal, and whose next
// bucket is to be asked for, and the boot time of the next look. Client.mu is
// held.
func (c *Client) look() (due, ahead []*lease, until time.Duration, idle bool) {
	t, boot := c.clock.Now()
	wall := t.UnixNano()
	next, n := time.Duration(never), 0
	c.registry.each(func(l *lease) {
		n++
		if l.over(wall, int64(boot)) {
			c.registry.drop(l, errLapsed)
			return
		}
		if wall >= l.sealEnd && l.mapped {
			if c.succeed(l) == nil {
				c.registry.unmap(l)
			}
			if l.streams == 0 {
				c.registry.drop(l, errLapsed)
				return
			}
		}
		if l.place >= 0 && boot >= l.renewAt && !l.renewing {
			if l.hot() {
				l.renewing = true
				l.found.Store(false)
				due = append(due, l)
			}
			// For one that is cold now, or whose renewal fails.
			l.renewAt = boot + max((time.Duration(l.bootEnd.Load())-boot)/2, lookGap)
		}
		if l.mapped && boot >= l.nextAt && l.next == nil && !l.asking {
			if l.hot() {
				l.asking = true
				l.nextAt = never
				ahead = append(ahead, l)
			} else {
				l.nextAt = boot + max(time.Duration(l.sealEnd-wall)/2, lookGap)
			}
		}
		next = min(next, l.deadline(wall, boot))
	})
	if n == 0 {
		c.nextLook = never
		return due, ahead, 0, true
	}
	c.nextLook = boot + max(min(next-boot, suspendCheck), lookGap+time.Duration(n)*lookGapPerLease)
	return due, ahead, c.nextLook, false
}

// deadline returns the boot time at which the keeper must look at l again.
func (l *lease) deadline(wall int64, boot time.Duration) time.Duration {
	at := time.Duration(l.bootEnd.Load())
	if l.place >= 0 && !l.renewing {
		at = min(at, l.renewAt)
	}
	if l.mapped && l.next == nil && !l.asking {
		at = min(at, l.nextAt)
	}
	if l.mapped && l.sealEnd != never {
		// The wall clock's distance from the boot clock may change; then the
		// look comes late, and checkSeal is what keeps the boundary.
		at = min(at, boot+time.Duration(l.sealEnd-wall))
	}
	return at
}

// watchOver makes the keeper look at l in time. Client.mu is held.
func (c *Client) watchOver(l *lease) {
	wall, boot := c.clock.Now()
	if at := l.deadline(wall.UnixNano(), boot); at < c.nextLook {
		c.nextLook = at
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// renewalTime chooses when a lease of d that was asked for at boot is renewed:
// after half of it to three quarters, so that leases granted together do not
// come back together.
func renewalTime(boot, d time.Duration) time.Duration {
	return boot + d/2 + time.Duration(rand.Int64N(int64(d/4)+1))
}

// renewal returns what to ask for to renew l. A stream may go on sealing into
// the bucket that it began in, under the key that it began with, for as long as
// keyd still leases that key. Client.mu is held.
func (l *lease) renewal(wall int64) *leaseKey {
	k := l.key
	if k.purpose == keydv1.Purpose_PURPOSE_SEAL && (l.bucketOver || wall >= l.sealEnd) {
		k.purpose, k.id, k.classNumber, k.bucket = keydv1.Purpose_PURPOSE_OPEN, l.id, l.classNumber, l.bucket
	}
	return &k
}

// renew asks keyd for the leases in batch again.
func (c *Client) renew(batch []*lease) {
	if batch[0].key.policy != 0 {
		c.renewSet(batch[0])
		return
	}
	keys := make([]*leaseKey, len(batch))
	req := &keydv1.GetBlobKeysRequest{}
	wall, boot := c.clock.Now()
	c.mu.Lock()
	began := c.dead.seq
	for i, l := range batch {
		keys[i] = l.renewal(wall.UnixNano())
		req.Queries = append(req.Queries, keys[i].query())
	}
	c.mu.Unlock()
	resp, err := c.ask(c.ctx, req)
	if err == ErrClosed {
		return
	}
	results := resp.GetResults()
	if err != nil {
		c.log.Warn("renewing leases failed", "leases", len(batch), "outcome", words(OutcomeOf(err)))
		results = make([]*keydv1.BlobKeyResult, len(batch))
		if len(batch) > 1 {
			// It need not be every lease that was refused; each goes on to its
			// end, and whoever uses it then learns the answer.
			err = unavailable("a call for several leases failed")
		}
	}
	for i, l := range batch {
		c.renewed(l, keys[i], results[i], err, began, wall, boot)
	}
}

// renewed applies the answer to l's renewal, for which k was asked.
func (c *Client) renewed(l *lease, k *leaseKey, result *keydv1.BlobKeyResult, err error, began uint64, wall time.Time, boot time.Duration) {
	var b *keydv1.BlobKey
	if err == nil {
		b, err = k.blobKey(result)
	}
	c.mu.Lock()
	l.renewing = false
	defer c.mu.Unlock()
	defer c.watchOver(l)
	switch {
	case err != nil:
		// What only the asking to open was refused goes on to the end of its lease.
		if refusal(err) && !(k.purpose != l.key.purpose && OutcomeOf(err) == keydv1.Outcome_OUTCOME_DENIED) {
			c.registry.drop(l, err)
		}
	case envelope.KeyID(b.GetKeyId()) == l.id && uint16(b.GetClassNumber()) == l.classNumber && b.GetBucket() == l.bucket:
		// Where a revocation has overtaken the answer, l has ended, and a longer
		// term does not bring it back.
		clear(b.GetKey())
		if d, once := term(b); !once || l.once {
			l.extend(wall, boot, d)
			l.renewAt = renewalTime(boot, d)
			l.planNext(wall.UnixNano(), boot, d)
		}
	default:
		// The next bucket, or the next life of a subject that was erased.
		fresh, err := c.grant(k, result, wall, boot)
		if err != nil {
			return
		}
		if fresh.id == l.id {
			l.bucketOver = true
		} else {
			c.registry.drop(l, errDropped)
		}
		if _, refused := c.dead.judge(fresh, began); refused || c.closed || fresh.once || !l.mapped && fresh.id == l.id {
			fresh.end(errDropped)
			return
		}
		c.registry.admit(fresh)
		c.watchOver(fresh)
	}
}

// refusal reports whether keyd has said that the key may not be had, rather
// than failed to say.
func refusal(err error) bool {
	switch OutcomeOf(err) {
	case keydv1.Outcome_OUTCOME_ERASED, keydv1.Outcome_OUTCOME_PENDING_ERASURE, keydv1.Outcome_OUTCOME_EXPIRED,
		keydv1.Outcome_OUTCOME_UNKNOWN, keydv1.Outcome_OUTCOME_DENIED, keydv1.Outcome_OUTCOME_WRONG_SUBJECT,
		keydv1.Outcome_OUTCOME_INVALID_ARGUMENT:
		return true
	}
	return false
}
