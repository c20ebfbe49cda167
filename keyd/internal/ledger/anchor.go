package ledger

import (
	"context"
	"errors"
)

// Anchor keeps the ledger's newest checkpoint and the mirror of its entries
// outside the store, in another failure domain where there is one. It is
// append-only: an object, once written under a size, never changes. An Anchor
// is safe for concurrent use.
type Anchor interface {
	// Newest returns the object of the greatest size, or ErrNoObject when the
	// anchor holds none.
	Newest(ctx context.Context) (Object, error)
	// Put writes o under o.Size. It returns nil only once o is durable. When
	// an object of that size exists, Put returns nil if it is the same, byte
	// for byte, and ErrForked if it is not.
	Put(ctx context.Context, o Object) error
	// Get returns the first object whose size is greater than size, or
	// ErrNoObject: so a reader walks the mirror from zero.
	Get(ctx context.Context, size uint64) (Object, error)
	// Domain tells where the anchor is, in a word for receipts ("file") and in
	// words for operators.
	Domain() (code, description string)
	// Close releases it.
	Close() error
}

// Object is what one Put adds: the entries [From, Size) and the checkpoint of
// the tree of Size entries.
type Object struct {
	From, Size uint64
	// Checkpoint is a signed note, in the form of C2SP tlog-checkpoint.
	Checkpoint []byte
	// Entries has Size - From entries.
	Entries []Entry
}

// Entry is a statement and the salt that hides it in its leaf.
type Entry struct {
	Salt      []byte
	Statement []byte
}

// Errors of an Anchor. Adapters wrap them.
var (
	ErrNoObject = errors.New("anchor holds no such object")
	// ErrForked: the anchor holds something else under that size.
	ErrForked = errors.New("anchor holds another history")
	// ErrAnchorDamaged: an object is missing, truncated or edited.
	ErrAnchorDamaged = errors.New("anchor is damaged")
	// ErrAnchorUnavailable: the anchor cannot be read or written now.
	ErrAnchorUnavailable = errors.New("anchor is unavailable")
)
