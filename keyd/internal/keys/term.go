package keys

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
)

// A store that one process at a time can have is served in terms of the anchor,
// one a start. Whoever else would have the anchor has a copy of the store, and
// would issue the keys that this one destroys, or lack those that were first
// used here: of that no ledger tells. So a start enters a term, which ends the
// one before; and the store remembers it, so that one is told apart that is not
// the store that was served last.
//
// It remembers a term before it enters it. A crash in between leaves the anchor
// with the term before, or with the one that is remembered; a copy leaves it
// with one that the store never heard of.
//
// A replay enters a term too, before it writes anything to the anchor: what it
// adds to the ledger would else get between what is added by a keyd that still
// runs.

// ErrCopyServed: a copy of the store has served since this one did, or the
// anchor is older than the store, and cannot tell. It is ledger.ErrBehind,
// although no entry need be missing.
var ErrCopyServed = fmt.Errorf("%w: a copy of it has served since it did, with keys that it may lack, or the anchor is an older one; it must be replayed before it serves", ledger.ErrBehind)

// ErrOvertaken: the store holds entries that the anchor does not, and so were
// never acknowledged, of a time when another keyd took over. They took effect in
// the store: what they destroyed is gone from it, so they cannot be taken out. It
// is ledger.ErrForked.
var ErrOvertaken = fmt.Errorf("%w: another keyd has taken over since this store was served, and this one has logged what was never acknowledged; the anchor is right, and the store that was served last", ledger.ErrDiverged)

// anchorCheckInterval is how often a running keyd compares store and anchor,
// and looks whether another one has taken over.
const anchorCheckInterval = 10 * time.Second

// TakeOver is how long a keyd waits, before it serves, for one of which it does
// not know whether it has ended: until that one has seen, where it reaches the
// anchor, that it was taken over from.
const TakeOver = anchorCheckInterval + 5*time.Second

// maxKnownTerms bounds how many attempts at a term a store remembers.
const maxKnownTerms = 32

// term is what a start knows of the term that it enters.
type term struct {
	adopts   bool                // it is a replay's: the store goes on after whichever is the newest
	waits    func(time.Duration) // is told for how long takeOver waits; nil: nobody is
	entering *storev1.Term       // the newest that was remembered
	wanted   bool                // none was entered, because the store was full
	settled  bool                // the store remembers that it was entered
}

// exclusive says whether no other process can have the store.
func (k *Keys) exclusive() bool {
	s, ok := k.store.(interface{ Exclusive() bool })
	return ok && s.Exclusive()
}

// takeOver makes this keyd the one that has the anchor for the store, if no
// other process can have that store. The later one goes on.
//
// It ends with a Check: what the one before had covered by then is in the
// anchor, and nothing that comes later is.
func (k *Keys) takeOver(ctx context.Context) error {
	if !k.exclusive() {
		return nil
	}
	left, err := k.enterTerm(ctx)
	if errors.Is(err, ErrFull) && !k.term.adopts {
		// It serves what it holds, and enters once it can make new keys.
		k.log.Warn("the anchor is not taken over before the store has room", "error", err)
		k.term.wanted = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("taking over the anchor: %w", err)
	}
	if !left && k.cfg.TakeOver > 0 && !k.anchor.Exclusive() {
		k.log.Info("the keyd that served last did not say that it ended; waiting until it has seen that this one takes over", "for", k.cfg.TakeOver)
		if k.term.waits != nil {
			k.term.waits(k.cfg.TakeOver)
		}
		if err := pause(ctx, k.cfg.TakeOver); err != nil {
			return err
		}
	}
	return k.keeper.Check(ctx)
}

// enterTerm enters a term that the store remembers. It reports whether the one
// before has ended.
func (k *Keys) enterTerm(ctx context.Context) (left bool, err error) {
	replays := k.term.adopts
	left, err = k.keeper.Enter(ctx, hex.EncodeToString(k.pulse.id[:]), replays, func(newest, next ledger.Term) error {
		entering := &storev1.Term{Number: next.Number, Holder: next.Holder}
		err := k.changeMeta(ctx, func(tx Tx, meta *storev1.Meta) error {
			if replays {
				// From here on only a replay that comes to its end makes it serve.
				meta.Terms = nil
				if err := beginReplay(tx, meta); err != nil {
					return err
				}
			}
			if err := followsTerm(meta.Terms, newest); err != nil {
				return err
			}
			if meta.Terms == nil {
				meta.Terms = knownTerm(newest)
			}
			meta.Terms.Known = append(meta.Terms.Known, entering)
			if len(meta.Terms.Known) > maxKnownTerms {
				meta.Terms.Known = slices.Delete(meta.Terms.Known, 1, 2) // the first may be what is there
			}
			return nil
		})
		if err == nil {
			k.term.entering = entering
		}
		return err
	})
	if err != nil {
		return left, err
	}
	err = k.changeMeta(ctx, func(_ Tx, meta *storev1.Meta) error {
		meta.Terms = &storev1.Terms{Served: k.term.entering}
		return nil
	})
	k.term.settled = err == nil
	if errors.Is(err, ErrFull) {
		err = nil // as after a crash at this point
	}
	return left, err
}

// enterWanted enters the term that could not be remembered before.
func (k *Keys) enterWanted(ctx context.Context) {
	switch _, err := k.enterTerm(ctx); {
	case err == nil:
		k.term.wanted = false
	case ctx.Err() == nil:
		k.log.Warn("the anchor is not taken over", "error", err)
	}
}

// endTerm says at the anchor that this keyd serves no more, so that the next one
// need not wait. Where the store does not know the term for entered, it would
// not know its end either.
func (k *Keys) endTerm() {
	if !k.term.settled {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), beatTimeout)
	defer cancel()
	if err := k.keeper.Leave(ctx); err != nil {
		k.log.Info("the anchor was not told that this keyd ends; the next one waits", "error", err)
	}
}

// follows says why the store does not go on after the anchor's newest term.
func (k *Keys) follows(ctx context.Context, newest ledger.Term) error {
	if k.term.adopts || !k.exclusive() {
		return nil
	}
	meta, err := k.readMeta(ctx)
	if err != nil {
		return err
	}
	return followsTerm(meta.Terms, newest)
}

func followsTerm(terms *storev1.Terms, newest ledger.Term) error {
	is := func(t *storev1.Term) bool { return t.Number == newest.Number && t.Holder == newest.Holder }
	if terms == nil || slices.ContainsFunc(terms.Known, is) {
		return nil // it was never served in a term, or this is one of those
	}
	if s := terms.Served; s != nil && (is(s) || is(&storev1.Term{Number: s.Number + 1})) {
		return nil
	}
	return ErrCopyServed
}

// knownTerm is what a store remembers that goes on after t.
func knownTerm(t ledger.Term) *storev1.Terms {
	return &storev1.Terms{Known: []*storev1.Term{{Number: t.Number, Holder: t.Holder}}}
}

func (k *Keys) changeMeta(ctx context.Context, change func(Tx, *storev1.Meta) error) error {
	return k.update(ctx, func(tx Tx) error {
		var meta storev1.Meta
		if err := getRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		if err := change(tx, &meta); err != nil {
			return err
		}
		return putRow(tx, metaKey(), &meta)
	})
}
