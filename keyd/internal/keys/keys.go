package keys

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
)

// FormatLevel is the newest format of rows that this version reads and writes.
const FormatLevel = 1

// Config is what Keys stand on.
type Config struct {
	Store  Store
	KMS    KMS
	Anchor ledger.Anchor
	// Clock is the wall clock. Nil: time.Now.
	Clock func() time.Time
	// Uptime is a clock that nobody sets, counting from any instant. Nil: that of
	// the machine or, with a Clock, the Clock itself.
	Uptime func() time.Duration
	Log    *slog.Logger
	// Initialise allows an empty store to be made into a new key store. It
	// has no effect on one that is initialised.
	Initialise bool
	// EpochLength is how long an epoch is planned to last, DrainBudget how long
	// its keys may take to be carried over, and Soak how long its root stays
	// disabled before its destruction is scheduled: KEKLease at the least.
	EpochLength, DrainBudget, Soak time.Duration
	// RewrapRate bounds how many keys are carried over per second; zero: no bound.
	RewrapRate int
	// DutyInterval is how often keyd looks for background work. Negative: only
	// when told, for tests.
	DutyInterval time.Duration
	// KEKLease is how long keyd keeps a KEK without the KMS's consent.
	KEKLease time.Duration
	// TakeOver is how long Open waits for a keyd that may still serve a copy of
	// the store: the constant, or zero not to wait.
	TakeOver time.Duration
	// AnchorTimeout is how long a call that needs the anchor waits for it.
	AnchorTimeout time.Duration
	// GatherLimit bounds how long an operation that writes to the ledger waits for
	// others to share its transaction with, which it does while the anchor does
	// not cover the ones before. Zero: 20 ms.
	GatherLimit time.Duration
	// Grace is how long a bucket whose retention has ended is only refused
	// before its key is destroyed.
	Grace time.Duration
	// SkewAllowance is added to drained_by for clocks that differ.
	SkewAllowance time.Duration
}

// Keys serves one key store. It is safe for concurrent use.
type Keys struct {
	store  Store
	kms    KMS
	clock  func() time.Time
	uptime func() time.Duration
	log    *slog.Logger
	cfg    Config
	ring   *keyring
	anchor *ledger.Interruptible
	keeper *ledger.Keeper
	signer *ledger.Signer

	meta       *storev1.Meta // as read by Open; only its identity is used
	requestKey []byte

	pulse  pulse
	term   term
	duties *duties

	closing    closingSet
	mirrorErr  atomic.Pointer[error] // what an audit of the anchor found
	lastStated atomic.Int64          // Unix milliseconds of the ledger's newest entry
	believed   atomic.Int64          // the newest wall clock that was believed, likewise
	confirmed  atomic.Pointer[clockReading]
	reckoned   atomic.Pointer[reckoning]
	ledgerSize atomic.Uint64 // of the newest commit that this process made or saw

	ops     chan *op
	stopped chan struct{} // the loop that takes ops has ended
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

// Close stops the background work. Calls under way fail as unavailable. The
// store, the KMS and the anchor are the caller's to close. A call of the anchor
// that hangs is left to itself.
func (k *Keys) Close() {
	k.cancel()
	k.wg.Wait()
	k.leave()
	k.endTerm()
	if err := k.anchor.Overdue(); err != nil {
		k.log.Warn("stopping without the anchor; what it does not cover was not acknowledged",
			"error", err, "entries", k.LedgerSize(), "anchored", k.AnchoredSize())
	}
	k.ring.close()
	clear(k.requestKey)
}

// now is the wall clock in whole milliseconds, which is what statements hold.
func (k *Keys) now() time.Time { return k.clock().Truncate(time.Millisecond) }

// stated is the time that a statement holds: now or, where the clock was set
// back, the newest time that was stated or believed. A statement that promises
// something by a time must not promise it too early.
func (k *Keys) stated() time.Time {
	return latest(k.now(), time.UnixMilli(max(k.lastStated.Load(), k.believed.Load())))
}

// clockDoubted says whether the wall clock is too far from what was believed
// last to be taken for the time, or was set too far in all.
func (k *Keys) clockDoubted(now time.Time) bool {
	believed := k.believed.Load()
	return believed != 0 && now.Sub(time.UnixMilli(believed)).Abs() > clockBound || k.clockSet(now).Abs() > clockBound
}

// clockReading is a wall clock that was believed, and the uptime at that moment.
type clockReading struct {
	wall          time.Time
	up            time.Duration
	confirmations uint64 // of the operator, that were known
}

// clockSet is by how much the wall clock was set, all in all, since this process
// first believed it or an operator confirmed it.
func (k *Keys) clockSet(now time.Time) time.Duration {
	r := k.confirmed.Load()
	if r == nil {
		return 0
	}
	return now.Sub(r.wall) - (k.uptime() - r.up)
}

// reckoning is what the time is reckoned from beside the wall clock: what it
// was at an uptime if it had been set forward by then, and if it had been set
// back.
type reckoning struct {
	early, late time.Time
	up, began   time.Duration // began: when this process did
}

// reckon begins to reckon, from the newest time that was noted before.
func (k *Keys) reckon(noted time.Time) {
	now, up := k.now(), k.uptime()
	k.reckoned.Store(&reckoning{now, latest(now, noted), up, up})
}

// at is r as of an uptime.
func (r reckoning) at(up time.Duration) reckoning {
	return reckoning{r.early.Add(up - r.up), r.late.Add(up - r.up), up, r.began}
}

// reckonOn goes on from a clock that is believed, if it is later: it may be
// right now, and set back after that.
func (k *Keys) reckonOn(now time.Time, up time.Duration) {
	if r := k.reckoned.Load().at(up); now.After(r.late) {
		r.late = now
		k.reckoned.Store(&r)
	}
}

// reckonAnew is reckon for when an operator has said that now was the time.
// That an hour has passed since something is not believed sooner for that.
func (k *Keys) reckonAnew(now time.Time, up time.Duration) {
	r := k.reckoned.Load().at(up)
	r.early, r.late = earliest(now, r.early), now
	k.reckoned.Store(&r)
}

// reckonedMs is the latest that it may be now by a clock that was believed.
func (k *Keys) reckonedMs() int64 {
	return k.reckoned.Load().at(k.uptime()).late.UnixMilli()
}

// bounds are the times between which it is, whether the wall clock was set or
// is right. A client counts its lease in time that passes, and so ends none of
// them sooner because keyd's clock was set. How much time passed before this
// process began cannot be told, so for as long as a lease may last from is early
// by all that a clock may be set unnoticed.
func (k *Keys) bounds(now time.Time) (from, to time.Time) {
	r := k.reckoned.Load().at(k.uptime())
	from, to = earliest(now, r.early), latest(now, r.late)
	if r.up-r.began <= MaxLease {
		from = from.Add(-clockBound)
	}
	return from, to
}

// drainedBy is when all leases of a length are over that were issued until now,
// and those of keys that were lost in a restore.
func (k *Keys) drainedBy(es epochs, now time.Time, lease time.Duration) time.Time {
	_, to := k.bounds(now)
	by := to.Add(lease + k.cfg.SkewAllowance + time.Millisecond - 1).Truncate(time.Millisecond)
	if es.restoredMs == 0 {
		return by
	}
	return latest(by, time.UnixMilli(es.restoredMs).Add(MaxLease+k.cfg.SkewAllowance))
}

// longestLease is the longest for which a client may still have a key of a
// class now.
func (k *Keys) longestLease(c *storev1.Class, now time.Time) time.Duration {
	from, _ := k.bounds(now)
	return longestLease(c, from)
}

// holdTime is the time by which holds end, for what nobody can undo: a clock
// that is doubted ends none.
func (k *Keys) holdTime(now time.Time) time.Time {
	if believed := time.UnixMilli(k.believed.Load()); k.clockDoubted(now) && believed.Before(now) {
		return believed
	}
	return now
}

// update runs fn in a transaction, again while it conflicts with others.
func (k *Keys) update(ctx context.Context, fn func(Tx) error) error {
	for attempt := 0; ; attempt++ {
		err := k.store.Update(ctx, fn)
		if !errors.Is(err, ErrConflict) || attempt == 20 {
			return err
		}
		select {
		case <-time.After(time.Duration(attempt) * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// activeTenant reads a tenant's row, and refuses one that is fenced.
func activeTenant(r Reader, name string) (*storev1.Tenant, error) {
	t, err := sharedTenant(r, name)
	return proto.CloneOf(t), err
}

// sharedTenant is activeTenant for those who do not change what they get.
func sharedTenant(r Reader, name string) (*storev1.Tenant, error) {
	switch t, err := getShared(&sharedTenants, r, tenantKey(tenantID(name))); {
	case errors.Is(err, ErrNotFound):
		return nil, unknown("the tenant")
	case err != nil:
		return nil, err
	case t.Name != name:
		return nil, damaged("a tenant's row has another name", nil)
	case t.State == storev1.TenantState_TENANT_STATE_LOST:
		return nil, lost()
	case t.State != storev1.TenantState_TENANT_STATE_ACTIVE:
		return nil, erased("the tenant", t.DestroyedAt)
	default:
		return t, nil
	}
}

// sharedClass reads a class by its name. It is not to be changed.
func sharedClass(r Reader, tenant id16, name string) (*storev1.Class, error) {
	switch c, err := getShared(&sharedClasses, r, classKey(tenant, classHash(name))); {
	case errors.Is(err, ErrNotFound):
		return nil, unknown("the class").with("field", "class")
	case err != nil:
		return nil, err
	case c.Name != name:
		return nil, damaged("a class's row has another name", nil)
	default:
		return c, nil
	}
}

// classByNumber reads a class by its number in blobs.
func classByNumber(r Reader, tenant id16, number uint32) (*storev1.Class, error) {
	h, err := r.Get(classNumberKey(tenant, number))
	if err != nil || len(h) != len(id16{}) {
		return nil, damaged("a class number has no class", err)
	}
	var c storev1.Class
	if err := getRow(r, classKey(tenant, id16(h)), &c); err != nil {
		return nil, damaged("a class number has no class", err)
	}
	return &c, nil
}

func classOf(s *storev1.Subject, number uint32) *storev1.SubjectClass {
	for _, sc := range s.Classes {
		if sc.ClassNumber == number {
			return sc
		}
	}
	return nil
}

// closingSet holds the rows of the subjects and tenants whose destruction is
// being committed.
type closingSet struct {
	n  atomic.Int64
	mu sync.Mutex
	m  map[string]chan struct{}
}

// mark adds rows, none of which may be in the set, until the returned function
// is called.
func (c *closingSet) mark(rows []string) (unmark func()) {
	if len(rows) == 0 {
		return func() {}
	}
	done := make(chan struct{})
	c.mu.Lock()
	if c.m == nil {
		c.m = make(map[string]chan struct{})
	}
	for _, r := range rows {
		c.m[r] = done
	}
	c.n.Store(int64(len(c.m)))
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		for _, r := range rows {
			delete(c.m, r)
		}
		c.n.Store(int64(len(c.m)))
		c.mu.Unlock()
		close(done)
	}
}

// wait returns when what the rows are of is not being destroyed.
func (c *closingSet) wait(ctx context.Context, rows ...[]byte) error {
	if c.n.Load() == 0 {
		return nil
	}
	for _, r := range rows {
		c.mu.Lock()
		done := c.m[string(r)]
		c.mu.Unlock()
		if done == nil {
			continue
		}
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
