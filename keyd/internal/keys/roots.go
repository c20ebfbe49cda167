package keys

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
)

// checkRoots finds out whether the store's keys can be opened, before anything
// is changed.
func (p *replay) checkRoots(ctx context.Context) error {
	k := p.k
	needed, err := p.neededEpochs(ctx)
	if err != nil {
		return err
	}
	var off []*storev1.Epoch
	for _, e := range needed {
		root, err := k.describe(ctx, e)
		if err != nil {
			return err
		}
		switch root.State {
		case RootEnabled:
		case RootDestroyed:
			return rootDestroyed(e)
		case RootPending:
			if !p.o.CallOff {
				return fmt.Errorf("%w: the root of epoch %d is destroyed at %s unless that is called off", ErrRootRetiring, e.Number, root.DestroyAt.UTC().Format(time.RFC3339))
			}
			off = append(off, e)
		case RootDisabled:
			if !p.o.CallOff {
				return fmt.Errorf("%w: the root of epoch %d is disabled", ErrRootRetiring, e.Number)
			}
			off = append(off, e)
		default:
			return unavailable("the KMS describes a root in a state that is not known", nil)
		}
	}
	// What the ledger says counts too: a root that it calls destroyed and that
	// is there was put back, and what it opened is promised to stay closed.
	// That needs the ledger's key, and so the root; see run.
	for _, e := range off {
		if err := p.callOff(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// callOff has the KMS keep a root, after noting that it is this that calls its
// destruction off, and not an operator who wants to keep it.
func (p *replay) callOff(ctx context.Context, e *storev1.Epoch) error {
	k := p.k
	err := k.update(ctx, func(tx Tx) error {
		meta, err := p.begin(tx)
		if err != nil || slices.Contains(meta.Restore.CalledOff, e.Number) {
			return err
		}
		meta.Restore.CalledOff = append(meta.Restore.CalledOff, e.Number)
		return putRow(tx, metaKey(), meta)
	})
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	if err := k.kms.Cancel(call, e.RootId); err != nil {
		return unavailable("the KMS did not call off the root's destruction", err)
	}
	p.done.CalledOff = append(p.done.CalledOff, e.Number)
	return nil
}

func (k *Keys) describe(ctx context.Context, e *storev1.Epoch) (Root, error) {
	ctx, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	root, err := k.kms.Describe(ctx, e.RootId)
	if errors.Is(err, ErrRootUnknown) {
		return root, fmt.Errorf("%w: it is not the KMS of this key store, or has lost the root of epoch %d", err, e.Number)
	}
	return root, err
}

func rootDestroyed(e *storev1.Epoch) error {
	return fmt.Errorf("%w: they are of epoch %d, which is closed, and nothing can open them; a backup that was taken after its end is needed", ErrRootDestroyed, e.Number)
}

// ErrOtherKMS: the key store's roots are in a KMS of another kind than the one
// that was given.
var ErrOtherKMS = errors.New("the key store's roots are in another kind of KMS")

// checkKMS refuses a KMS of another kind than that of the roots that are not
// destroyed, before it is asked for one of them: what it says of a root that it
// does not know must not be taken for news.
func (k *Keys) checkKMS(ctx context.Context) error {
	var rows []*storev1.Epoch
	err := k.store.View(ctx, func(r Reader) (err error) {
		rows, err = allEpochs(r)
		return err
	})
	if err != nil {
		return err
	}
	for _, e := range rows {
		past := e.State == storev1.EpochState_EPOCH_STATE_CLOSED || e.State == storev1.EpochState_EPOCH_STATE_ABANDONED
		if !past && e.KmsKind != k.kms.Kind() {
			return fmt.Errorf("%w: that of epoch %d is in %s, and %s was given", ErrOtherKMS, e.Number, e.KmsKind, k.kms.Kind())
		}
	}
	return nil
}

// explainRoot says of a failure to open keyd's own secrets whether it is for
// ever.
func (k *Keys) explainRoot(ctx context.Context, cause error) error {
	if !errors.Is(cause, ErrRootNotUsable) && !errors.Is(cause, errRootGone) {
		return cause
	}
	p := &replay{k: k, done: new(Replayed)}
	if err := p.checkRoots(ctx); errors.Is(err, ErrRootDestroyed) || errors.Is(err, ErrRootRetiring) {
		return err
	}
	return cause
}

// neededEpochs returns the rows of the epochs under which the store has live
// keys, the newest first.
func (p *replay) neededEpochs(ctx context.Context) ([]*storev1.Epoch, error) {
	var es epochs
	var needed []*storev1.Epoch
	err := p.k.store.View(ctx, func(r Reader) (err error) {
		if es, err = readEpochs(r); err != nil {
			return err
		}
		for _, n := range es.read() {
			e, err := readEpoch(r, n)
			if err != nil {
				return err
			}
			needed = append(needed, e)
		}
		return nil
	})
	if err != nil || es.draining == 0 {
		return needed, err
	}
	left, err := p.uncarried(ctx, es.draining, es.open)
	if !left {
		needed = needed[:1]
	}
	return needed, err
}

var errFound = errors.New("found")

// uncarried says whether there is a live key under one epoch and not under
// another.
func (p *replay) uncarried(ctx context.Context, from, to uint32) (bool, error) {
	for _, kind := range carriedKinds {
		err := p.k.scanAll(ctx, wrappedKey(from, kind, 0), nil, func(r Reader, key, value []byte) error {
			var w storev1.Wrapped
			if err := decode(value, &w); err != nil {
				return err
			}
			if w.Dead {
				return nil
			}
			switch _, err := r.Get(rekey(key, to)); {
			case errors.Is(err, ErrNotFound):
				return errFound
			default:
				return err
			}
		})
		if errors.Is(err, errFound) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

// checkClosed refuses a store whose root the ledger calls destroyed.
func (p *replay) checkClosed(ctx context.Context, m *missing) error {
	needed, err := p.neededEpochs(ctx)
	if err != nil {
		return err
	}
	for _, e := range needed {
		if slices.Contains(m.closed, e.Number) {
			return rootDestroyed(e)
		}
	}
	return nil
}
