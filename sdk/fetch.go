package sdk

import (
	"context"
	"sync/atomic"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

const (
	// fetchTimeout bounds one call for keys that several callers may wait for.
	fetchTimeout = 10 * time.Second
	// maxAttempts is how often keyd is asked again because its answer was
	// overtaken by a revocation, or was over when it came.
	maxAttempts = 3
)

// flight is one call to keyd that everybody waits for who needs the same key.
type flight struct {
	done  chan struct{}
	lease *lease
	err   error
	taken atomic.Bool // of a lease for one operation
}

// obtain returns a lease of k, from the table or from keyd. The lease was good
// a moment ago; its checks say whether it still is.
func (c *Client) obtain(ctx context.Context, k *leaseKey) (*lease, error) {
	if ctx.Err() != nil {
		return nil, gaveUp(ctx)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	if l := c.table.get(k); l != nil {
		if l.checkSeal() == nil {
			c.mu.Unlock()
			return l, nil
		}
		if next := c.succeed(l); next != nil {
			c.mu.Unlock()
			return next, nil
		}
		c.registry.unmap(l)
	}
	f := c.flights[*k]
	if f == nil {
		own := k.owned()
		f = &flight{done: make(chan struct{})}
		c.flights[own] = f
		c.work.Go(func() { c.fly(ctx, f, &own) })
	}
	c.mu.Unlock()

	select {
	case <-f.done:
	case <-ctx.Done():
		return nil, gaveUp(ctx)
	}
	if f.err != nil {
		return nil, f.err
	}
	if f.lease.once && !f.taken.CompareAndSwap(false, true) {
		// The lease was for one operation, and another has it.
		own := k.owned()
		return c.fetch(ctx, &own)
	}
	return f.lease, nil
}

// ask makes one call for keys.
func (c *Client) ask(ctx context.Context, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	limited, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	resp, err := c.keys.GetBlobKeys(limited, req)
	switch {
	case c.ctx.Err() != nil:
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, gaveUp(ctx)
	case err != nil && limited.Err() != nil:
		return nil, unavailable("keyd did not answer in time")
	case err != nil:
		return nil, err
	case len(resp.GetResults()) != len(req.GetQueries()):
		return nil, malformed("not one result a query")
	}
	return resp, nil
}

// fly fetches for a flight. The call outlives the caller that began it, whose
// ctx it takes the values of.
func (c *Client) fly(ctx context.Context, f *flight, k *leaseKey) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	f.lease, f.err = c.fetch(ctx, k)
	c.mu.Lock()
	delete(c.flights, *k)
	c.mu.Unlock()
	close(f.done)
}

// fetch asks keyd for a lease of k, and admits it to the table.
func (c *Client) fetch(ctx context.Context, k *leaseKey) (*lease, error) {
	for range maxAttempts {
		c.mu.Lock()
		began := c.dead.seq
		c.mu.Unlock()
		wall, boot := c.clock.Now()
		resp, err := c.ask(ctx, k.request())
		if err != nil {
			return nil, err
		}
		l, err := c.granted(k, resp, wall, boot)
		if err == errSplit {
			continue
		}
		if err != nil {
			return nil, err
		}
		again, err := c.admit(l, began)
		if err != nil {
			return nil, err
		}
		if !again {
			return l, nil
		}
	}
	return nil, unavailable("keys were revoked faster than they could be leased")
}

// granted makes a lease of keyd's whole answer to the request for k.
func (c *Client) granted(k *leaseKey, resp *keydv1.GetBlobKeysResponse, wall time.Time, boot time.Duration) (*lease, error) {
	if k.policy == 0 {
		return c.grant(k, resp.GetResults()[0], wall, boot)
	}
	return c.grantSet(k, resp, wall, boot)
}

// request asks for k.
func (k *leaseKey) request() *keydv1.GetBlobKeysRequest {
	if k.policy == 0 {
		return &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{k.query()}}
	}
	return k.setRequest()
}

// query asks for k, which is of one subject.
func (k *leaseKey) query() *keydv1.BlobKeyQuery {
	q := &keydv1.BlobKeyQuery{
		Tenant:    k.tenant,
		SubjectId: []byte(k.subject),
		Class:     k.class,
		Purpose:   k.purpose,
	}
	if k.purpose == keydv1.Purpose_PURPOSE_OPEN {
		q.KeyId, q.ClassNumber, q.Bucket = k.id[:], uint32(k.classNumber), k.bucket
	}
	return q
}

// blobKey returns the key in keyd's result for k, if it is well-formed and the
// one that was asked for.
func (k *leaseKey) blobKey(result *keydv1.BlobKeyResult) (*keydv1.BlobKey, error) {
	if f := result.GetFailure(); f != nil {
		return nil, fromFailure(f)
	}
	b := result.GetKey()
	switch {
	case b == nil:
		return nil, malformed("a result that is neither key nor failure")
	case len(b.GetKeyId()) != envelope.KeyIDSize, len(b.GetKey()) != envelope.KeySize, b.GetClassNumber() > 0xffff:
		return nil, malformed("a field of a wrong size")
	}
	if k.purpose == keydv1.Purpose_PURPOSE_OPEN &&
		(envelope.KeyID(b.GetKeyId()) != k.id || uint16(b.GetClassNumber()) != k.classNumber || b.GetBucket() != k.bucket) {
		return nil, malformed("another key than was asked for")
	}
	return b, nil
}

// term returns for how long b is lent, and whether for one operation only.
func term(b *keydv1.BlobKey) (d time.Duration, once bool) {
	if d = min(b.GetLease().AsDuration(), maxLease); d <= 0 {
		return onceAllowance, true
	}
	return d, false
}

// newLease makes a lease with what b says, but for the key and the term.
func (c *Client) newLease(k *leaseKey, b *keydv1.BlobKey, once bool, wall time.Time) *lease {
	l := &lease{
		key:         *k,
		id:          envelope.KeyID(b.GetKeyId()),
		classNumber: uint16(b.GetClassNumber()),
		bucket:      b.GetBucket(),
		ledgerSize:  b.GetLedgerSize(),
		once:        once,
		sealEnd:     never,
		nextAt:      never,
		clock:       c.clock,
		place:       -1,
	}
	if k.purpose == keydv1.Purpose_PURPOSE_SEAL {
		if end := time.Unix(int64(min(b.GetBucketEnd(), never/uint64(time.Second))), 0); end.After(wall) {
			l.sealEnd = end.UnixNano()
		} else {
			// keyd's clock is behind: it has just said that the bucket runs.
			l.once = true
		}
	}
	return l
}

// grant makes a lease of keyd's result for k, which was asked for at wall and
// boot. It wipes the key in the result.
func (c *Client) grant(k *leaseKey, result *keydv1.BlobKeyResult, wall time.Time, boot time.Duration) (*lease, error) {
	b, err := k.blobKey(result)
	if err != nil {
		return nil, err
	}
	defer clear(b.GetKey())
	d, once := term(b)
	l := c.newLease(k, b, once, wall)
	l.extend(wall, boot, d)
	l.lastUse.Store(int64(boot))
	l.renewAt = renewalTime(boot, d)
	l.planNext(wall.UnixNano(), boot, d)

	key := envelope.Key{ID: l.id, Class: l.classNumber, Bucket: l.bucket, Secret: [envelope.KeySize]byte(b.GetKey())}
	defer key.Wipe()
	if k.purpose == keydv1.Purpose_PURPOSE_SEAL {
		l.sealer, err = envelope.NewSealer(&key, envelope.Options{Check: l.check})
	} else {
		l.opener, err = envelope.NewOpener(&key, envelope.Options{Check: l.check})
	}
	return l, err
}

// admit caches l unless a revocation has overtaken the call that brought it,
// which began when the dead set stood at began; again then says to repeat it.
func (c *Client) admit(l *lease, began uint64) (again bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		l.end(ErrClosed)
		return false, ErrClosed
	}
	c.watchTenant(l.key.tenant, l.ledgerSize)
	if outcome, refused := c.dead.judge(l, began); refused {
		l.end(errDropped)
		if final(outcome) {
			return false, c.dead.sentence(l, &Error{Outcome: outcome, Message: "the key was revoked"})
		}
		return true, nil
	}
	if l.once {
		c.registry.watch(l)
	} else {
		c.registry.admit(l)
	}
	c.watchOver(l)
	return false, nil
}

// acquire keeps l, which obtain returned, for a stream: it is renewed for as
// long as the stream is open, and not given up for room. It fails when l has
// ended meanwhile.
func (c *Client) acquire(l *lease) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := l.check(); err != nil {
		return err
	}
	l.streams++
	c.registry.hold(l)
	c.watchOver(l)
	return nil
}

// release undoes acquire, and ends the one operation of a lease for one.
func (c *Client) release(l *lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.streams--; l.streams > 0 || l.mapped {
		return
	}
	c.registry.release(l)
	if l.once {
		c.discard(l)
	}
}

// discard wipes a lease for one operation. Client.mu is held.
func (c *Client) discard(l *lease) {
	l.end(errDropped)
	for _, id := range l.keyIDs() {
		c.registry.eachOf(idKey{l.key.tenant, id}, func(*lease) {})
	}
}
