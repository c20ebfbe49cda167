package keys

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
)

// Duties are the background work that one keyd does for all: it turns epochs
// and ends them, and does what falls due for subjects and tenants. The two go
// side by side, since carrying over the keys of an epoch may take hours, and so
// may the keeping of shares. Who holds the duties stands in one row with a term, which every
// transaction of a duty reads: a holder that was taken for gone, and was not,
// writes nothing any more. What it may still do in the KMS is repeated without
// harm, or is checked for just before.
//
// Nothing is kept in memory that a step needs: each looks at what is stored,
// and does what comes next. So a keyd that dies at any point is resumed by the
// same code.
type duties struct {
	k     *Keys
	peers peers
	term  atomic.Uint64
	entry sync.Mutex // held while the duties are taken and the clock is looked at

	ofEpochs, ofSubjects duty

	// Only the work on epochs uses these.
	described map[uint32]time.Time // when the KMS was asked about an epoch's root
	failures  map[uint32]failure   // of a verification
	revivedAt time.Time            // when it was asked about closed epochs' roots

	// Only the work on subjects uses these.
	floors   map[string][]byte // by class: the last of its dead buckets
	sharesAt time.Time         // when it was last looked for shares to drop

	mu      sync.Mutex
	waiting map[uint32]string // what an epoch waits for
	revived []uint32          // closed epochs whose roots exist, ascending
}

// duty is one of the two kinds of work.
type duty struct {
	name string
	wake chan struct{}
	// retry: an operator wants what failed to be tried again at once.
	retry atomic.Bool
	// do does one piece of work, and says whether there may be more at once.
	// clockErr says why what the clock triggers must not be done, if it must not.
	do func(ctx context.Context, retry bool, clockErr error) (again bool, err error)

	mu      sync.Mutex
	problem error // of the newest piece
}

func newDuties(k *Keys) *duties {
	d := &duties{
		k: k, described: make(map[uint32]time.Time), failures: make(map[uint32]failure),
		floors: make(map[string][]byte), waiting: make(map[uint32]string),
	}
	d.ofEpochs.name, d.ofEpochs.do, d.ofEpochs.wake = "epochs", d.epochs, make(chan struct{}, 1)
	d.ofSubjects.name, d.ofSubjects.do, d.ofSubjects.wake = "subjects", d.subjects, make(chan struct{}, 1)
	return d
}

var (
	// errNotHolder: another keyd holds the duties.
	errNotHolder = errors.New("another keyd has the duties")
	// ErrClock: what the clock would trigger waits for an operator.
	ErrClock = errors.New("the clock is not believed")
)

// clockBound is how far the clock may be from the newest one that was
// believed, and how far it may be set in all while a keyd runs, however small
// the steps. A keyd that was stopped for longer asks, too: nothing tells it that
// this was not a jump.
const clockBound = 24 * time.Hour

// failure is what a verification found wrong, and when. It is not done again
// at once: it reads everything.
type failure struct {
	at  time.Time
	err error
}

// retryAfter is how long keyd waits before it looks again at what is damaged.
const retryAfter = 10 * time.Minute

// failed notes what a verification found, and returns it.
func (d *duties) failed(number uint32, err error) error {
	d.failures[number] = failure{d.k.clock(), err}
	return err
}

// recent returns what a verification of an epoch found wrong, while it is too
// early to look again.
func (d *duties) recent(number uint32) error {
	f, ok := d.failures[number]
	if ok && d.k.clock().Sub(f.at) < retryAfter {
		return f.err
	}
	return nil
}

// kick makes the loops look at once, and try again what failed.
func (d *duties) kick() {
	for _, w := range []*duty{&d.ofEpochs, &d.ofSubjects} {
		w.retry.Store(true)
		w.rouse()
	}
}

// rouse makes the loop look at once.
func (w *duty) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run does the duties until ctx ends.
func (d *duties) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { d.loop(ctx, &d.ofEpochs) })
	wg.Go(func() { d.loop(ctx, &d.ofSubjects) })
	wg.Wait()
}

func (d *duties) loop(ctx context.Context, w *duty) {
	const most = time.Minute
	pause := d.k.cfg.DutyInterval
	wait := pause
	for {
		again, err := d.piece(ctx, w)
		switch {
		case ctx.Err() != nil:
			return
		case again && err == nil:
			wait = 0
		case again:
			wait = pause // what failed does not hold up the rest
		case err != nil:
			wait = min(max(2*wait, pause), most)
		default:
			wait = pause
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-w.wake:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// step does one piece of each kind of work, for tests.
func (d *duties) step(ctx context.Context) (again bool, err error) {
	again, err = d.piece(ctx, &d.ofEpochs)
	if again || err != nil && !errors.Is(err, ErrClock) {
		return again, err
	}
	more, otherErr := d.piece(ctx, &d.ofSubjects)
	if errors.Is(otherErr, ErrClock) && err != nil {
		otherErr = nil // said already
	}
	return more, errors.Join(err, otherErr)
}

// piece does one piece of work. An error is for health; the next piece begins
// from what is stored.
func (d *duties) piece(ctx context.Context, w *duty) (again bool, err error) {
	err = d.k.Serving()
	var clockErr error
	if err == nil {
		clockErr, err = d.enter(ctx)
	}
	if err == nil {
		again, err = w.do(ctx, w.retry.Swap(false), clockErr)
	}
	if errors.Is(err, errNotHolder) {
		again, err = false, nil
	}
	w.mu.Lock()
	changed := (err == nil) != (w.problem == nil) || err != nil && err.Error() != w.problem.Error()
	w.problem = err
	w.mu.Unlock()
	if changed && ctx.Err() == nil {
		if err != nil {
			d.k.log.Warn("background work does not go on", "on", w.name, "error", err)
		} else {
			d.k.log.Info("background work goes on", "on", w.name)
		}
	}
	return again, err
}

// enter takes the duties, or sees that they are held, and looks at the clock.
func (d *duties) enter(ctx context.Context) (clockErr, err error) {
	d.entry.Lock()
	defer d.entry.Unlock()
	if err := d.take(ctx); err != nil {
		return nil, err
	}
	if err = d.watchClock(ctx); errors.Is(err, ErrClock) {
		return err, nil
	}
	return nil, err
}

// problems says why the background work does not go on, if it does not.
func (d *duties) problems() error {
	var errs []error
	for _, w := range []*duty{&d.ofEpochs, &d.ofSubjects} {
		w.mu.Lock()
		if err := w.problem; err != nil && !(errors.Is(err, ErrClock) && len(errs) != 0) {
			errs = append(errs, err)
		}
		w.mu.Unlock()
	}
	return errors.Join(errs...)
}

// epochs does what comes next for the epochs.
func (d *duties) epochs(ctx context.Context, retry bool, clockErr error) (again bool, err error) {
	if retry {
		clear(d.failures)
		clear(d.described)
		d.revivedAt = time.Time{}
	}
	var es epochs
	var rows []*storev1.Epoch
	err = d.k.store.View(ctx, func(r Reader) (err error) {
		if es, err = readEpochs(r); err != nil {
			return err
		}
		rows, err = allEpochs(r)
		return err
	})
	if err != nil {
		return false, err
	}
	d.mu.Lock()
	clear(d.waiting)
	d.mu.Unlock()
	d.lookForRevived(ctx, rows)
	errs := []error{clockErr}
	for _, e := range rows {
		more, err := d.advance(ctx, es, rows, e, clockErr == nil)
		if errors.Is(err, errNotHolder) || ctx.Err() != nil {
			return false, err
		}
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("epoch %d: %w", e.Number, err))
		case more:
			// What else there is to do may depend on it.
			return true, errors.Join(errs...)
		}
	}
	return false, errors.Join(errs...)
}

// sharesEvery is how often shares are looked for that no hold needs any more.
const sharesEvery = 10 * time.Minute

// subjects does what is due for subjects and tenants. One kind of work that
// fails does not keep the others from being done.
func (d *duties) subjects(ctx context.Context, retry bool, clockErr error) (again bool, err error) {
	if retry {
		d.sharesAt = time.Time{}
	}
	clockOK := clockErr == nil
	errs := []error{clockErr}
	do := func(what string, fn func() (bool, error)) {
		more, err := fn()
		again = again || more && err == nil
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	do("erased tenants", func() (bool, error) { return d.sweepTenants(ctx) })
	if clockOK {
		do("scheduled destructions", func() (bool, error) { return d.destroyDue(ctx) })
	}
	do("retention", func() (bool, error) { return d.expire(ctx, clockOK) })
	if now := d.k.clock(); now.Sub(d.sharesAt).Abs() >= sharesEvery {
		do("shares of held subjects", func() (bool, error) {
			err := d.dropShares(ctx)
			if err == nil {
				d.sharesAt = now
			}
			return false, err
		})
	}
	return again, errors.Join(errs...)
}

// advance does what comes next for one epoch. clockOK says that what a clock
// triggers may be done.
func (d *duties) advance(ctx context.Context, es epochs, all []*storev1.Epoch, e *storev1.Epoch, clockOK bool) (bool, error) {
	switch e.State {
	case storev1.EpochState_EPOCH_STATE_PREPARING:
		return d.prepare(ctx, es, e)
	case storev1.EpochState_EPOCH_STATE_OPEN:
		return d.openNext(ctx, es, all, e, clockOK)
	case storev1.EpochState_EPOCH_STATE_DRAINING:
		return d.drain(ctx, es, e)
	case storev1.EpochState_EPOCH_STATE_DRAINED:
		return d.retire(ctx, es, all, e, clockOK)
	case storev1.EpochState_EPOCH_STATE_RETIRING:
		return d.watchRoot(ctx, all, e, clockOK)
	case storev1.EpochState_EPOCH_STATE_ABANDONED:
		return d.dropAbandoned(ctx, e)
	case storev1.EpochState_EPOCH_STATE_CLOSED:
		return false, nil
	}
	return false, damaged("an epoch's row has no state", nil)
}

// waits notes what an epoch waits for, for those who look.
func (d *duties) waits(epoch uint32, format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting[epoch] = fmt.Sprintf(format, args...)
}

// take makes this keyd the holder of the duties, or returns errNotHolder.
func (d *duties) take(ctx context.Context) error {
	k := d.k
	if !k.pulse.fresh(k.clock()) {
		if err := k.beat(ctx); err != nil {
			return err
		}
	}
	var row storev1.Duty
	var others []peer
	err := k.store.View(ctx, func(r Reader) (err error) {
		if err := getRow(r, dutyKey(), &row); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		others, err = d.peers.look(r, k.pulse.id, k.clock())
		return err
	})
	if err != nil {
		return err
	}
	if string(row.Holder) == string(k.pulse.id[:]) {
		d.term.Store(row.Term)
		return nil
	}
	for _, p := range others {
		if string(row.Holder) == string(p.id[:]) && !p.lapsed {
			return errNotHolder
		}
	}
	err = k.update(ctx, func(tx Tx) error {
		var now storev1.Duty
		if err := getRow(tx, dutyKey(), &now); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		if now.Term != row.Term {
			return errNotHolder
		}
		now.Holder, now.Term = k.pulse.id[:], row.Term+1
		return putRow(tx, dutyKey(), &now)
	})
	if err == nil {
		d.term.Store(row.Term + 1)
	}
	return err
}

// fence fails with errNotHolder unless this keyd holds the duties.
func (d *duties) fence(r Reader) error {
	var row storev1.Duty
	if err := getRow(r, dutyKey(), &row); err != nil {
		return err
	}
	if row.Term != d.term.Load() || string(row.Holder) != string(d.k.pulse.id[:]) {
		return errNotHolder
	}
	return nil
}

// still is fence for what no transaction guards: a call of the KMS.
func (d *duties) still(ctx context.Context) error {
	if err := d.k.mayIssue(ctx); err != nil {
		return err
	}
	return d.k.store.View(ctx, d.fence)
}

// watchClock compares the wall clock with the newest that was believed, which
// it then moves on. It fails with ErrClock.
func (d *duties) watchClock(ctx context.Context) error {
	k := d.k
	now, up := k.now(), k.uptime()
	var row storev1.Duty
	var head ledger.Head
	err := k.store.View(ctx, func(r Reader) (err error) {
		if err := getRow(r, dutyKey(), &row); err != nil {
			return err
		}
		head, err = ledger.ReadHead(r)
		return err
	})
	if err != nil {
		return err
	}
	believed := time.UnixMilli(row.ClockMs)
	if row.ClockMs == 0 {
		believed = head.Time // the first holder ever
	}
	switch {
	case now.Sub(believed) > clockBound:
		return fmt.Errorf("%w: it is %v ahead of what was last seen; set it or, if it is right, say lethe epoch confirm-clock", ErrClock, now.Sub(believed).Round(time.Minute))
	case believed.Sub(now) > clockBound:
		return fmt.Errorf("%w: it is %v behind what was last seen; set it or, if it is right, say lethe epoch confirm-clock", ErrClock, believed.Sub(now).Round(time.Minute))
	}
	if r := k.confirmed.Load(); r == nil || r.confirmations != row.Confirmations {
		if r != nil {
			k.reckonAnew(now, up)
		}
		k.confirmed.Store(&clockReading{now, up, row.Confirmations})
	}
	if set := k.clockSet(now); set.Abs() > clockBound {
		return fmt.Errorf("%w: it was set by %v in all since keyd began to watch it; set it or, if it is right, say lethe epoch confirm-clock", ErrClock, set.Round(time.Minute))
	}
	k.reckonOn(now, up)
	if now.Sub(believed) < time.Minute && row.ClockMs != 0 {
		k.believed.Store(max(now.UnixMilli(), k.believed.Load()))
		return nil // a row a minute is enough
	}
	if err := k.update(ctx, func(tx Tx) error {
		if err := d.fence(tx); err != nil {
			return err
		}
		var row storev1.Duty
		if err := getRow(tx, dutyKey(), &row); err != nil {
			return err
		}
		row.ClockMs = now.UnixMilli()
		return putRow(tx, dutyKey(), &row)
	}); err != nil {
		return err
	}
	k.believed.Store(now.UnixMilli())
	return nil
}

// ConfirmClock says, for an operator, that the clock is right.
func (k *Keys) ConfirmClock(ctx context.Context) (time.Time, error) {
	now, up := k.now(), k.uptime()
	var row storev1.Duty
	err := k.update(ctx, func(tx Tx) error {
		row.Reset()
		if err := getRow(tx, dutyKey(), &row); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		row.ClockMs, row.ReckonedMs = now.UnixMilli(), 0
		row.Confirmations++
		return putRow(tx, dutyKey(), &row)
	})
	if err == nil {
		k.duties.entry.Lock() // it is not looked at with what was read before
		k.reckonAnew(now, up)
		k.believed.Store(now.UnixMilli())
		k.confirmed.Store(&clockReading{now, up, row.Confirmations})
		k.duties.entry.Unlock()
	}
	k.duties.kick()
	return now, err
}

// anchored returns when the anchor covers all that the ledger holds: before
// something is done that cannot be undone, what led to it is out of reach of a
// loss of the store.
func (k *Keys) anchored(ctx context.Context) error {
	var head ledger.Head
	err := k.store.View(ctx, func(r Reader) (err error) {
		head, err = ledger.ReadHead(r)
		return err
	})
	if err != nil {
		return err
	}
	return k.waitAnchored(ctx, head.Size)
}
