package sdk

import (
	"math/rand/v2"
	"slices"
	"time"

	keydv1 "lethe/proto/keyd/v1"
)

// When a bucket ends, everybody who seals needs the key of the next one at the
// same instant. So a client asks for it ahead, for keys that are in use: some
// time before the end, each at another. What it gets is a lease like any other,
// which revocations reach, and which takes the place of the old one when its
// bucket begins.

// aheadSkew is how far keyd's clock and this machine's may differ for a key that
// was got ahead to be used as soon as its bucket begins by this machine's.
const aheadSkew = 5 * time.Second

// planNext chooses when to ask for the next bucket's key, for a lease of d that
// was asked for at boot: when half to a quarter of such a lease is left of the
// bucket, so that the key got then outlasts the end of it by as much; and where
// less is left already, somewhere in the first half of that.
func (l *lease) planNext(wall int64, boot, d time.Duration) {
	if l.sealEnd == never || l.once {
		return
	}
	left := time.Duration(l.sealEnd - wall)
	from := max(left-d/2, 0)
	to := max(left-d/4, left/2)
	l.nextAt = boot + from + time.Duration(rand.Int64N(int64(max(to-from, 0))+1))
}

// askAhead asks keyd for the keys of the next buckets of a batch. What is
// refused or cannot be had is asked for when it is needed.
func (c *Client) askAhead(batch []*lease) {
	req := new(keydv1.GetBlobKeysRequest)
	for _, l := range batch {
		for _, q := range l.key.request().GetQueries() {
			q.SealFrom = uint64(time.Duration(l.sealEnd) / time.Second)
			req.Queries = append(req.Queries, q)
		}
	}
	c.mu.Lock()
	began := c.dead.seq
	c.mu.Unlock()
	wall, boot := c.clock.Now()
	resp, err := c.ask(c.ctx, req)
	if err == ErrClosed {
		return
	}
	if err != nil {
		c.log.Warn("asking ahead for keys failed", "leases", len(batch), "outcome", words(OutcomeOf(err)))
	}
	for i, l := range batch {
		var next *lease
		if err == nil && l.key.policy != 0 {
			next, _ = c.grantSet(&l.key, resp, wall, boot) // alone in its batch
		} else if err == nil {
			next, _ = c.grant(&l.key, resp.GetResults()[i], wall, boot)
		}
		if next != nil {
			next.begins.wall = int64(next.bucket) * int64(time.Second)
			next.begins.boot = boot + resp.GetResults()[i].GetKey().GetStartsIn().AsDuration() - aheadSkew
		}
		c.follow(l, next, began)
	}
}

// follow keeps next, which may be nil, until its bucket begins. An answer that a
// revocation has overtaken is not kept, nor one that is of no use: of the same
// bucket, from a keyd that does not know about asking ahead, or of another life.
func (c *Client) follow(l, next *lease, began uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.asking = false
	defer c.watchOver(l)
	if next == nil {
		return
	}
	_, refused := c.dead.judge(next, began)
	if refused || c.closed || next.once || next.bucket == l.bucket || !slices.Equal(next.keyIDs(), l.keyIDs()) ||
		l.ended.Load() != nil || !c.registry.follow(l, next) {
		next.end(errDropped)
		return
	}
	c.watchTenant(next.key.tenant, next.ledgerSize)
	c.watchOver(next)
}

// succeed puts the lease of the next bucket in the place of l, once that bucket
// has begun, and returns it; nil if there is none, or it is too early or too
// late for it. Client.mu is held.
func (c *Client) succeed(l *lease) *lease {
	next := l.next
	if next == nil {
		return nil
	}
	wall, boot := c.clock.Now()
	if wall.UnixNano() < next.begins.wall || boot < next.begins.boot || next.check() != nil {
		return nil
	}
	c.registry.part(l)
	c.registry.install(next)
	c.watchOver(next)
	return next
}
