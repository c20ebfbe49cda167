package ledger

import (
	"context"
	"errors"
	"fmt"
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
	return fmt.Sprintf("%v: %d of %d entries, %d missing", ErrBehind, e.Store, e.Anchor, e.Missing())
}

// Missing is the number of entries that the store lacks.
func (e *BehindError) Missing() uint64 { return e.Anchor - e.Store }

// Is makes errors.Is(e, ErrBehind) true.
func (e *BehindError) Is(target error) bool { return target == ErrBehind }

// View runs fn on a snapshot of the store that holds every commit acknowledged
// before.
type View func(ctx context.Context, fn func(Reader) error) error
