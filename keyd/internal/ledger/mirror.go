package ledger

import (
	"context"
	"errors"
	"fmt"
)

// Missing calls fn, in order, with the entries that the anchor holds and the
// store lacks: each once its object was verified, by signature and by hash, to
// continue the store's history. They are what Replay takes. It returns fn's
// error as it is, and nil at the end.
func (k *Keeper) Missing(ctx context.Context, fn func(index uint64, e Entry) error) error {
	var f frontier
	err := k.view(ctx, func(r Reader) error {
		h, err := ReadHead(r)
		if err != nil {
			return err
		}
		f, err = readFrontier(r, h.Size)
		return err
	})
	if err != nil {
		return err
	}
	return k.walk(ctx, f, func(o Object, from uint64) error {
		for i := from; i < o.Size; i++ {
			if err := fn(i, o.Entries[i-o.From]); err != nil {
				return err
			}
		}
		return nil
	})
}

// Audit walks the whole mirror from its first entry and verifies every object:
// signature, hashes, no gap, and the same history as the store as far as the
// two go together. It reads all of the anchor and changes nothing. Its errors
// are those of Check.
func (k *Keeper) Audit(ctx context.Context) error {
	return k.walk(ctx, frontier{}, func(o Object, _ uint64) error {
		err := k.match(ctx, o)
		if errors.Is(err, ErrBehind) {
			return nil // Check's to say
		}
		return err
	})
}

// walk goes through the objects beyond f's tree and extends it. fn is called
// with each object, once verified, and the index of the first entry that is new.
func (k *Keeper) walk(ctx context.Context, f frontier, fn func(o Object, from uint64) error) error {
	// From nothing, or from an object that was verified, only edited entries do
	// not follow; from the store's tree, it may be the store that is another.
	verified := f.size == 0
	for {
		o, err := k.anchor.Get(ctx, f.size)
		if errors.Is(err, ErrNoObject) {
			return nil
		}
		if err != nil {
			return err
		}
		c, err := k.open(o)
		if err != nil {
			return err
		}
		from := f.size
		ok, err := f.extend(o, c)
		if err != nil {
			return err
		}
		if !ok {
			if verified {
				return fmt.Errorf("%w: object of size %d: its entries are not those of its checkpoint", ErrAnchorDamaged, o.Size)
			}
			return fmt.Errorf("%w: object of size %d does not follow from the store's %d entries", ErrForked, o.Size, from)
		}
		verified = true
		if err := fn(o, from); err != nil {
			return err
		}
	}
}
