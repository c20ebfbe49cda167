package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"lethe/sdk/receipt"
)

// ErrBehind: the store holds fewer entries than the anchor: it was rolled back
// or restored, and destructions may be missing. It is returned as a *BehindError.
var ErrBehind = errors.New("store is behind the anchor")

// ErrAnchorMissing: the anchor is empty, and the store's ledger is not new.
var ErrAnchorMissing = errors.New("anchor is empty but the ledger is not new")

// BehindError says how far the store is behind. It is ErrBehind.
type BehindError struct {
	// Store and Anchor are the sizes of the two.
	Store, Anchor uint64
}

func (e *BehindError) Error() string {
	return fmt.Sprintf("%v: it has %d of %d entries, %d missing", ErrBehind, e.Store, e.Anchor, e.Missing())
}

// Missing is the number of entries that the store lacks.
func (e *BehindError) Missing() uint64 { return e.Anchor - e.Store }

// Is makes errors.Is(e, ErrBehind) true.
func (e *BehindError) Is(target error) bool { return target == ErrBehind }

// View runs fn on a snapshot of the store that holds every commit acknowledged
// before View was called. It returns fn's error as it is.
type View func(ctx context.Context, fn func(Reader) error) error

// KeeperOptions are a Keeper's parts. View, Anchor and Signer are needed.
type KeeperOptions struct {
	View   View
	Anchor Anchor
	Signer *Signer
	// PastKeys are verifier keys that signed checkpoints before Signer's.
	PastKeys []string
	// Follows returns why nothing is written to the anchor after a term that
	// another Keeper entered, or nil; ErrBehind: the store is not the one that
	// was served in it. It is asked as long as no term is entered. Nil: no reason.
	Follows func(ctx context.Context, newest Term) error
	// Logger; nil: slog.Default.
	Logger *slog.Logger
	// CheckEvery is how often Run compares store and anchor when nothing else
	// makes it; zero: a minute.
	CheckEvery time.Duration
}

// Keeper keeps the anchor up to the store, and compares the two. At any time at
// most one of its callers talks to the anchor; it is safe for concurrent use.
//
// Of two keepers with different histories upon one anchor, at most one has its
// entries covered: each looks, after it wrote, at all that is there.
type Keeper struct {
	view       View
	anchor     *Interruptible
	signer     *Signer
	keys       *receipt.Keys
	follows    func(context.Context, Term) error
	log        *slog.Logger
	checkEvery time.Duration

	turn chan struct{} // holds a token while nobody talks to the anchor
	kick chan struct{} // holds a token when Run has something to do

	mu       sync.Mutex
	checked  bool          // store and anchor were compared by this Keeper
	anchored uint64        // the anchor covers that many entries
	verdict  error         // forbids serving
	last     error         // of the last attempt
	changed  chan struct{} // closed and replaced when one of the above changes
	term     Term          // that was entered; its number is zero before
	underWay bool          // what was put last may still come to be there
}

// NewKeeper returns a Keeper. It does nothing by itself: Check it, then Run it.
func NewKeeper(o KeeperOptions) (*Keeper, error) {
	if o.View == nil || o.Anchor == nil || o.Signer == nil {
		return nil, errors.New("ledger: a keeper needs a view, an anchor and a signer")
	}
	keys, err := receipt.PinKeys(append([]string{o.Signer.VerifierKey()}, o.PastKeys...)...)
	if err != nil {
		return nil, err
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	k := &Keeper{
		view: o.View, anchor: Interrupt(o.Anchor, o.Logger), signer: o.Signer, keys: keys, follows: o.Follows, log: o.Logger, checkEvery: o.CheckEvery,
		turn: make(chan struct{}, 1), kick: make(chan struct{}, 1), changed: make(chan struct{}),
	}
	if k.checkEvery <= 0 {
		k.checkEvery = time.Minute
	}
	k.turn <- struct{}{}
	return k, nil
}

// Check compares the store with the anchor, then brings the anchor up to the
// store. It fails with
//
//   - ErrBehind (a *BehindError): the store lacks entries; or what Follows
//     says;
//   - ErrForked: one is not a prefix of the other, or the anchor is another
//     ledger's. From then on every call fails with it;
//   - ErrAnchorMissing: the anchor is empty and the ledger is not;
//   - ErrAnchorDamaged: the anchor's newest objects are not what was written;
//   - ErrDamaged: the store's own head, hashes and new entries contradict each other;
//   - ErrSuperseded: another keyd has entered a later term than this Keeper's.
//     From then on every call fails with it;
//   - other errors, ErrAnchorUnavailable among them, after which nothing is
//     known and it is repeated.
//
// After the first six keyd must not serve; Err says so until a Check succeeds.
func (k *Keeper) Check(ctx context.Context) error {
	return k.attempt(ctx, func(ctx context.Context) error {
		return k.compareAndPush(ctx, k.Anchored(), func(Reader, Head) error { return ErrAnchorMissing })
	})
}

// Initialise is Check for a new ledger: it may write the first object of an
// empty anchor, as long as the ledger holds one group of entries, that of its
// making. It can be repeated until it succeeds, and nothing should be appended
// before. Only the explicit making of a store calls it: an empty anchor at any
// other time means that an anchor is lost, or the wrong one.
func (k *Keeper) Initialise(ctx context.Context) error {
	return k.attempt(ctx, func(ctx context.Context) error {
		return k.compareAndPush(ctx, k.Anchored(), func(r Reader, h Head) error {
			e, err := ReadEntry(r, 0)
			if err != nil {
				return err
			}
			if e.TreeSize != h.Size {
				return ErrAnchorMissing
			}
			return nil
		})
	})
}

// Rebuild is Check with leave to fill an empty anchor from the store, when the
// anchor is lost. By calling it the operator asserts that the store was not
// rolled back: nothing can check that any more.
func (k *Keeper) Rebuild(ctx context.Context) error {
	return k.attempt(ctx, func(ctx context.Context) error {
		return k.compareAndPush(ctx, 0, func(Reader, Head) error { return nil })
	})
}

// Enter begins a term of this keyd, which no other Keeper may be named like. A
// Keeper of an earlier term fails with ErrSuperseded from its next Check on, and
// has none of its entries covered any more. Enter reports whether the term
// before was left, or there was none: otherwise its keyd may serve until it
// checks. What that one had covered by now, the next Check sees, which must come
// before anything else. A Check must have succeeded: a store that is behind
// drives nobody out, unless it is about to be replayed. About each term that it
// is about to enter it asks first, with the newest one that is there; an error
// of before ends it.
func (k *Keeper) Enter(ctx context.Context, holder string, replays bool, before func(newest, next Term) error) (left bool, err error) {
	err = k.attempt(ctx, func(ctx context.Context) error {
		k.mu.Lock()
		ready := k.checked && k.verdict == nil || replays && errors.Is(k.verdict, ErrBehind)
		k.mu.Unlock()
		if !ready {
			return errors.New("ledger: a term is entered after a check")
		}
		last, err := k.anchor.Enter(ctx, Term{})
		for err == nil && last.Holder != holder {
			left = last.Holder == ""
			next := Term{last.Number + 1, holder}
			if err = before(last, next); err == nil {
				last, err = k.anchor.Enter(ctx, next)
			}
		}
		if err == nil {
			k.mu.Lock()
			k.term = last
			k.mu.Unlock()
		}
		return err
	})
	return left, err
}

// Leave ends the term that this keyd has entered, if it has and no other has
// begun, so that the next one need not wait. It must not serve any more. Where
// something that it put may be under way, the next one has to wait.
func (k *Keeper) Leave(ctx context.Context) error {
	k.mu.Lock()
	t, underWay := k.term, k.underWay
	k.mu.Unlock()
	switch {
	case t.Number == 0:
		return nil
	case underWay:
		return fmt.Errorf("%w: it did not answer to what was put last", ErrAnchorUnavailable)
	}
	if err := k.anchor.Overdue(); err != nil {
		return err
	}
	_, err := k.anchor.Enter(ctx, Term{Number: t.Number + 1})
	return err
}

// hold verifies that the term that was entered, if any, is still the newest.
func (k *Keeper) hold(ctx context.Context) error {
	k.mu.Lock()
	t := k.term
	k.mu.Unlock()
	if t.Number == 0 {
		return nil
	}
	switch newest, err := k.anchor.Enter(ctx, Term{}); {
	case err != nil:
		return err
	case newest.Number < t.Number:
		return fmt.Errorf("%w: term %d is gone", ErrAnchorDamaged, t.Number)
	case newest != t:
		return ErrSuperseded
	}
	return nil
}

// mayWrite verifies that nobody has entered a later term: than the one that was
// entered or, before that, than the one that the store follows.
func (k *Keeper) mayWrite(ctx context.Context) error {
	if err := k.hold(ctx); err != nil {
		return err
	}
	return k.mayFollow(ctx)
}

// Advance brings the anchor up to the store. Where they were not compared yet,
// or did not agree, it is Check.
func (k *Keeper) Advance(ctx context.Context) error {
	k.mu.Lock()
	compared := k.checked && k.verdict == nil
	k.mu.Unlock()
	if !compared {
		return k.Check(ctx)
	}
	return k.attempt(ctx, k.push)
}

// WaitFor returns once the anchor covers the first size entries, which are
// committed already. It needs Run. It fails with what Err returns, or when ctx
// ends, with ctx's error and that of the last attempt, if it failed.
func (k *Keeper) WaitFor(ctx context.Context, size uint64) error {
	for first := true; ; first = false {
		k.mu.Lock()
		verdict, changed := k.verdict, k.changed
		covered := k.checked && k.anchored >= size
		k.mu.Unlock()
		switch {
		case verdict != nil:
			return verdict
		case covered:
			return nil
		case first:
			k.Notify()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if last := k.Last(); last != nil {
				return fmt.Errorf("waiting for the anchor: %w (%w)", ctx.Err(), last)
			}
			return fmt.Errorf("waiting for the anchor: %w", ctx.Err())
		}
	}
}

// Covers reports whether the anchor covers the first size entries, and returns a
// channel that is closed when that may have changed.
func (k *Keeper) Covers(size uint64) (covered bool, changed <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.checked && k.anchored >= size, k.changed
}

// Notify tells Run that the store has new entries.
func (k *Keeper) Notify() {
	select {
	case k.kick <- struct{}{}:
	default: // Run will look after it took the one that is there
	}
}

// Anchored returns how many entries the anchor covers, as far as this Keeper
// has seen.
func (k *Keeper) Anchored() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.anchored
}

// Err returns why keyd must not serve, or nil. Only ErrForked and ErrSuperseded
// are for ever; the others stand until a Check succeeds.
func (k *Keeper) Err() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.verdict
}

// Last returns the error of the last attempt to reach the anchor, for health;
// nil when it succeeded. An anchor that does not answer to the one under way has
// failed as well, and is ErrAnchorUnavailable.
func (k *Keeper) Last() error {
	if err := k.anchor.Overdue(); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.last
}

// Bounds of Run's pace.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 10 * time.Second
	// attemptLimit bounds one attempt of Run's.
	attemptLimit = time.Minute
)

// Run advances the anchor when notified, compares it with the store every
// CheckEvery, and tries again, ever more slowly, when that fails. It returns
// when ctx ends, with its error, or with ErrForked or ErrSuperseded.
func (k *Keeper) Run(ctx context.Context) error {
	check := time.NewTicker(k.checkEvery)
	defer check.Stop()
	var backoff time.Duration
	for {
		act := k.Advance
		if backoff > 0 {
			// Half of it at random, so that many keyds do not come back at once.
			wait := time.NewTimer(backoff/2 + rand.N(backoff/2))
			select {
			case <-ctx.Done():
				wait.Stop()
				return ctx.Err()
			case <-wait.C:
			}
		} else {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-k.kick:
			case <-check.C:
				act = k.Check
			}
		}
		attempt, cancel := context.WithTimeout(ctx, attemptLimit)
		err := act(attempt)
		cancel()
		switch {
		case isFinal(err):
			return err
		case err == nil:
			backoff = 0
		case ctx.Err() == nil:
			backoff = min(max(2*backoff, minBackoff), maxBackoff)
			k.log.WarnContext(ctx, "anchor not advanced", "error", err, "anchored", k.Anchored())
		}
	}
}

// attempt runs fn when it is its turn, and records how it went.
func (k *Keeper) attempt(ctx context.Context, fn func(context.Context) error) error {
	select {
	case <-k.turn:
		defer func() { k.turn <- struct{}{} }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := k.Err(); isFinal(err) {
		return err
	}
	err := fn(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil && k.last == nil && k.checked && k.verdict == nil {
		return nil // as before; who waits for a size was woken when it was covered
	}
	k.last = err
	switch {
	case err == nil:
		k.checked, k.verdict = true, nil
	case isFinal(err), errors.Is(err, ErrBehind), errors.Is(err, ErrAnchorMissing),
		errors.Is(err, ErrAnchorDamaged), errors.Is(err, ErrDamaged):
		if k.verdict == nil {
			k.log.ErrorContext(ctx, "ledger and anchor disagree: refusing to serve", "error", err)
		}
		k.verdict = err
	}
	k.announce()
	return err
}

// isFinal says whether a verdict stands for ever.
func isFinal(err error) bool { return errors.Is(err, ErrForked) || errors.Is(err, ErrSuperseded) }

// announce wakes those who wait. k.mu is held.
func (k *Keeper) announce() {
	close(k.changed)
	k.changed = make(chan struct{})
}

func (k *Keeper) setAnchored(size uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.anchored = size
	k.announce()
}

// compareAndPush does what Check says; neither store nor anchor may hold fewer
// entries than seen; mayCreate decides about an empty anchor and a ledger with
// entries.
func (k *Keeper) compareAndPush(ctx context.Context, seen uint64, mayCreate func(Reader, Head) error) error {
	if err := k.hold(ctx); err != nil {
		return err
	}
	// The anchor first: whatever is in it was committed before, so a snapshot
	// taken afterwards must have it.
	newest, err := k.anchor.Newest(ctx)
	empty := errors.Is(err, ErrNoObject)
	if err != nil && !empty {
		return err
	}
	err = k.view(ctx, func(r Reader) error {
		h, err := ReadHead(r)
		if err != nil {
			return err
		}
		root, err := RootAt(r, h.Size)
		if err != nil {
			return err
		}
		if root != h.Root {
			return fmt.Errorf("%w: the head is not that of the hashes", ErrDamaged)
		}
		switch {
		case empty && seen > 0:
			return fmt.Errorf("%w: it held %d entries", ErrAnchorMissing, seen)
		case empty && h.Size > 0:
			return mayCreate(r, h)
		case h.Size < seen && newest.Size <= seen:
			return &BehindError{Store: h.Size, Anchor: seen}
		case newest.Size < seen:
			return fmt.Errorf("%w: it held %d entries and holds %d", ErrAnchorDamaged, seen, newest.Size)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if !empty {
		if err := k.match(ctx, newest); err != nil {
			return err
		}
	}
	if err := k.mayFollow(ctx); err != nil {
		return err
	}
	k.setAnchored(newest.Size)
	return k.push(ctx)
}

// mayFollow asks whether the store follows the anchor's newest term, before the
// Keeper has one of its own.
func (k *Keeper) mayFollow(ctx context.Context) error {
	k.mu.Lock()
	entered := k.term.Number != 0
	k.mu.Unlock()
	if entered || k.follows == nil {
		return nil
	}
	newest, err := k.anchor.Enter(ctx, Term{})
	if err != nil {
		return err
	}
	return k.follows(ctx, newest)
}

// open verifies an object's checkpoint and that it is of this ledger.
func (k *Keeper) open(o Object) (receipt.Checkpoint, error) {
	c, err := o.Check()
	if err != nil {
		return c, err
	}
	if c.Origin != k.signer.Origin() {
		return c, fmt.Errorf("%w: it is the anchor of another ledger", ErrForked)
	}
	switch _, err := k.keys.Open(o.Checkpoint); {
	case errors.Is(err, receipt.ErrSignature):
		return c, fmt.Errorf("%w: object of size %d: %w", ErrForked, o.Size, err)
	case err != nil:
		return c, fmt.Errorf("%w: object of size %d: %w", ErrAnchorDamaged, o.Size, err)
	}
	return c, nil
}

// match verifies that o is of the store's history, or that the store's is of
// o's: then it returns a *BehindError.
func (k *Keeper) match(ctx context.Context, o Object) error {
	c, err := k.open(o)
	if err != nil {
		return err
	}
	return k.compare(ctx, o, c)
}

// compare is match for an object with a checkpoint that is verified.
func (k *Keeper) compare(ctx context.Context, o Object, c receipt.Checkpoint) error {
	var h Head
	err := k.view(ctx, func(r Reader) (err error) {
		if h, err = ReadHead(r); err != nil {
			return err
		}
		if o.Size > h.Size {
			return nil
		}
		root, err := RootAt(r, o.Size)
		if err != nil {
			return err
		}
		if root != c.Root {
			return fmt.Errorf("%w: the store has another root of size %d", ErrDiverged, o.Size)
		}
		f, err := readFrontier(r, o.From)
		if err != nil {
			return err
		}
		if ok, err := f.extend(o, c); err != nil || !ok {
			return errors.Join(fmt.Errorf("%w: object of size %d: its entries are not those of its checkpoint", ErrAnchorDamaged, o.Size), err)
		}
		return nil
	})
	if err != nil || o.Size <= h.Size {
		return err
	}
	// The first object beyond the store tells whether the store is its prefix.
	next, err := k.anchor.Get(ctx, h.Size)
	if errors.Is(err, ErrNoObject) {
		return fmt.Errorf("%w: object of size %d cannot be found again", ErrAnchorDamaged, o.Size)
	}
	if err != nil {
		return err
	}
	if c, err = k.open(next); err != nil {
		return err
	}
	err = k.view(ctx, func(r Reader) error {
		f, err := readFrontier(r, h.Size)
		if err != nil {
			return err
		}
		ok, err := f.extend(next, c)
		if err == nil && !ok {
			err = fmt.Errorf("%w: the store's %d entries are not the anchor's", ErrDiverged, h.Size)
		}
		return err
	})
	if err != nil {
		return err
	}
	return &BehindError{Store: h.Size, Anchor: o.Size}
}

// Bounds of the objects that push cuts.
const (
	cutEntries = 1024
	cutBytes   = 1 << 20
)

// push writes objects until the anchor covers the store.
func (k *Keeper) push(ctx context.Context) error {
	for {
		from := k.Anchored()
		var o Object
		err := k.view(ctx, func(r Reader) error {
			h, err := ReadHead(r)
			if err != nil {
				return err
			}
			if h.Size < from {
				return &BehindError{Store: h.Size, Anchor: from}
			}
			o, err = k.cut(r, from, h.Size)
			return err
		})
		if err != nil {
			return err
		}
		if o.Size == from {
			return nil
		}
		if err := k.put(ctx, o); err != nil {
			return err
		}
		if err := k.confirm(ctx, o); err != nil {
			return err
		}
	}
}

// PutLimit bounds the time from the last look at the term to the end of a Put.
// Whoever enters a later term, and waits for longer before he looks at the
// anchor, finds there what was put in time; what comes later does not come.
const PutLimit = 10 * time.Second

// put writes o while this Keeper's term, or the one that its store follows, is
// the newest.
func (k *Keeper) put(ctx context.Context, o Object) error {
	ctx, cancel := context.WithTimeout(ctx, PutLimit)
	defer cancel()
	// What a later term's store does not have must not get there before it.
	if err := k.mayWrite(ctx); err != nil {
		return err
	}
	k.setUnderWay(true)
	err := k.anchor.Put(ctx, o)
	if err == nil || errors.Is(err, ErrForked) || errors.Is(err, ErrAnchorDamaged) {
		k.setUnderWay(false)
	}
	return err
}

func (k *Keeper) setUnderWay(is bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.underWay = is
}

// cut makes the object that begins at from; where nothing follows, an empty one.
func (k *Keeper) cut(r Reader, from, size uint64) (Object, error) {
	o := Object{From: from, Size: from}
	for n := 0; o.Size < size && len(o.Entries) < cutEntries && n < cutBytes; o.Size++ {
		e, err := ReadEntry(r, o.Size)
		if err != nil {
			return Object{}, err
		}
		n += len(e.Salt) + len(e.Statement)
		o.Entries = append(o.Entries, e)
	}
	if o.Size == from {
		return o, nil
	}
	root, err := RootAt(r, o.Size)
	if err != nil {
		return Object{}, err
	}
	// What is put stays: a restore would replay an entry that was damaged here.
	f, err := readFrontier(r, from)
	if err != nil {
		return Object{}, err
	}
	if ok, err := f.extend(o, receipt.Checkpoint{Root: root}); err != nil || !ok {
		return Object{}, errors.Join(fmt.Errorf("%w: its entries %d to %d are not those of its hashes", ErrDamaged, from, o.Size), err)
	}
	o.Checkpoint, err = k.signer.Checkpoint(o.Size, root)
	return o, err
}

// confirm looks at every object from put.From on, put among them: another
// writer's, of another history, may have come in between. Of two such writers
// the one that put last sees the other's, whatever their sizes.
func (k *Keeper) confirm(ctx context.Context, put Object) error {
	at, found := put.From, false
	for {
		o, err := k.anchor.Get(ctx, at)
		if errors.Is(err, ErrNoObject) {
			break
		}
		if err != nil {
			return err
		}
		if o.Size <= at {
			return fmt.Errorf("%w: object of size %d where a greater one was asked for", ErrAnchorDamaged, o.Size)
		}
		c, err := o.Check()
		if err == nil && !bytes.Equal(o.Checkpoint, put.Checkpoint) { // which this Keeper signed
			c, err = k.open(o)
		}
		if err != nil {
			return err
		}
		// The store may have been replaced meanwhile.
		if err := k.compare(ctx, o, c); err != nil {
			return err
		}
		found = found || o.Size == put.Size
		at = o.Size
	}
	if !found {
		return fmt.Errorf("%w: object of size %d was written and is not there", ErrAnchorDamaged, put.Size)
	}
	// Whoever enters a later term looks at the anchor afterwards: either it sees
	// what was put, or this sees the term.
	if err := k.mayWrite(ctx); err != nil {
		return err
	}
	k.setAnchored(at)
	return nil
}
