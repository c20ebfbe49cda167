package sdk

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

const (
	// watchLimit is how many tenants one stream can watch.
	watchLimit = 256
	// watchSilence is how long a stream may be silent before it counts as
	// broken: three of keyd's heartbeats.
	watchSilence = 30 * time.Second
	// A broken stream is opened again after watchBackoff, doubled each time
	// up to watchBackoffMax, less up to half of it by chance.
	watchBackoff    = 100 * time.Millisecond
	watchBackoffMax = 10 * time.Second
)

// watcher listens to the revocations of some tenants.
type watcher struct {
	// Guarded by Client.mu.
	tenants []string // never changed in place
	rewind  uint64   // if not zero, the cursor from which to listen again

	// again holds a value when the stream is to be opened again, for more
	// tenants or from an earlier cursor.
	again chan struct{}

	// Of the goroutine alone.
	cursor uint64
	opened bool // a stream was opened before
}

// watched is a tenant whose revocations are listened to.
type watched struct {
	by *watcher
	// since is the size of the ledger from which on nothing is missed.
	since uint64
}

// watchTenant begins to listen to the revocations of the tenant of a lease
// that was issued when the anchor covered the ledger up to this size. A cursor is
// such a size, so the stream can begin no later than the lease did, and misses
// nothing in between. Client.mu is held.
func (c *Client) watchTenant(tenant string, size uint64) {
	if !c.watches {
		return
	}
	t, known := c.watched[tenant]
	if known && size >= t.since {
		return
	}
	if !known {
		if n := len(c.watchers); n > 0 && len(c.watchers[n-1].tenants) < watchLimit {
			t.by = c.watchers[n-1]
			t.by.tenants = append(t.by.tenants, tenant)
		} else {
			t.by = &watcher{tenants: []string{tenant}, again: make(chan struct{}, 1)}
			c.watchers = append(c.watchers, t.by)
			defer c.work.Go(func() { c.watch(t.by) })
		}
	}
	t.since = size
	c.watched[tenant] = t
	if size != 0 && (t.by.rewind == 0 || size < t.by.rewind) {
		t.by.rewind = size
	}
	select {
	case t.by.again <- struct{}{}:
	default:
	}
}

// watch keeps a stream open until Close.
func (c *Client) watch(w *watcher) {
	delay := watchBackoff
	for c.ctx.Err() == nil {
		heard, err := c.watchOnce(w)
		if heard {
			delay = watchBackoff
		}
		if err == nil || c.ctx.Err() != nil {
			continue // to open it again, or to end
		}
		if e := (*Error)(nil); errors.As(err, &e) && e.Outcome == keydv1.Outcome_OUTCOME_DENIED {
			c.unwatch(w, e.Metadata["tenant"])
		}
		if delay == watchBackoff {
			c.log.Warn("revocation stream broke; until it is back, leases bound the use of destroyed keys",
				"outcome", words(OutcomeOf(err)))
		}
		if !sleep(c.ctx, c.clock, delay-rand.N(delay/2)) {
			return
		}
		delay = min(2*delay, watchBackoffMax)
	}
}

// unwatch gives up a tenant whose revocations this client may not hear, so that
// it goes on to hear the others'. The tenant's next lease, if there is one,
// begins anew.
func (c *Client) unwatch(w *watcher, tenant string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(w.tenants, tenant); i >= 0 {
		w.tenants = slices.Concat(w.tenants[:i], w.tenants[i+1:])
		delete(c.watched, tenant)
	}
}

// watchOnce opens a stream and applies what it says until it breaks, or, with
// a nil error, until it is to be opened again. heard reports whether it said
// anything.
func (c *Client) watchOnce(w *watcher) (heard bool, err error) {
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	c.mu.Lock()
	select {
	case <-w.again:
	default:
	}
	tenants := w.tenants[:len(w.tenants):len(w.tenants)]
	if w.rewind != 0 && (w.cursor == 0 || w.rewind < w.cursor) {
		w.cursor = w.rewind
	}
	w.rewind = 0
	c.mu.Unlock()
	if len(tenants) == 0 {
		select {
		case <-w.again:
		case <-c.ctx.Done():
		}
		return false, nil
	}

	var silent atomic.Bool
	listen := func() (stop func() bool) {
		return c.clock.AfterFunc(watchSilence, func() { silent.Store(true); cancel() })
	}
	stop := listen()
	defer func() { stop() }()
	// A stream that begins anew, because no earlier one has told a cursor,
	// misses what was revoked in between.
	missed := w.opened && w.cursor == 0
	w.opened = true
	s, err := c.keys.WatchRevocations(ctx, &keydv1.WatchRevocationsRequest{Tenants: tenants, Cursor: w.cursor})
	if err != nil {
		return false, err
	}
	// Only once the stream has answered is it ended to be opened again, or a
	// client that meets tenant after tenant would never hear anything.
	var again atomic.Bool
	for {
		m, err := s.Recv()
		if err != nil {
			if again.Load() {
				return heard, nil
			}
			if silent.Load() {
				err = unavailable("the revocation stream fell silent")
			}
			return heard, err
		}
		stop()
		stop = listen()
		c.apply(w, tenants, m, missed)
		if !heard {
			heard, missed = true, false
			c.work.Go(func() {
				select {
				case <-w.again:
					again.Store(true)
					cancel()
				case <-ctx.Done():
				}
			})
		}
	}
}

// apply drops what m revokes, or every key of tenants if that cannot be known.
func (c *Client) apply(w *watcher, tenants []string, m *keydv1.WatchRevocationsResponse, missed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.GetReset_() {
		w.cursor = m.GetCursor()
	}
	w.cursor = max(w.cursor, m.GetCursor())
	if m.GetReset_() || missed {
		c.dead.overtake()
		among := make(map[string]struct{}, len(tenants))
		for _, t := range tenants {
			among[t] = struct{}{}
		}
		c.registry.each(func(l *lease) {
			if _, ok := among[l.key.tenant]; ok {
				c.registry.drop(l, errDropped)
			}
		})
	}
	for _, r := range m.GetRevocations() {
		c.revoke(r)
	}
}

// revoke drops the keys that r names. Client.mu is held.
func (c *Client) revoke(r *keydv1.Revocation) {
	why := &Error{Outcome: r.GetOutcome(), Message: "the key was revoked"}
	if _, known := outcomeCodes[why.Outcome]; !known {
		why.Outcome = keydv1.Outcome_OUTCOME_UNSPECIFIED
	}
	k := deadKey{tenant: r.GetTenant()}
	switch len(r.GetKeyId()) {
	case envelope.KeyIDSize:
		k.id = envelope.KeyID(r.GetKeyId())
		c.registry.eachOf(idKey{k.tenant, k.id}, func(l *lease) { c.lose(l, k.id, why) })
	case 0:
		if r.GetClassNumber() == 0 { // the whole tenant
			c.dead.overtake()
			c.registry.each(func(l *lease) {
				if l.key.tenant == k.tenant {
					c.registry.drop(l, why)
				}
			})
			return
		}
		k.class, k.bucket = r.GetClassNumber(), r.GetBucket()
		c.registry.each(func(l *lease) {
			if l.key.tenant == k.tenant && uint32(l.classNumber) == k.class && l.bucket == k.bucket {
				c.registry.drop(l, why)
			}
		})
	default:
		// It names something this version does not know: better too much.
		c.dead.overtake()
		c.registry.each(func(l *lease) {
			if l.key.tenant == k.tenant {
				c.registry.drop(l, errDropped)
			}
		})
		return
	}
	c.dead.add(k, why.Outcome)
}

// forget drops the keys of a subject, and lets no call under way bring them
// back.
func (c *Client) forget(tenant, subject string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead.add(deadKey{tenant: tenant, subject: subject}, keydv1.Outcome_OUTCOME_UNSPECIFIED)
	c.registry.each(func(l *lease) {
		if l.key.tenant != tenant {
			return
		}
		if l.key.policy == 0 {
			if l.key.subject == subject {
				c.registry.drop(l, errDropped)
			}
			return
		}
		if place := slices.Index(l.key.subjects(), subject); place >= 0 {
			c.loseSubject(l, place)
		}
	})
}
