package ledger

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Anchor keeps the ledger's newest checkpoint and the mirror of its entries
// outside the store, in another failure domain where there is one. It is
// append-only: an object, once written under a size, never changes. Several
// writers may cut the same history at different sizes, so that objects overlap;
// as each begins where an object that was there ended, a walk has no gaps. An
// Anchor checks what it can without keys: the form of objects, and that all are
// of one origin. Signatures and hashes are for its reader. It is safe for
// concurrent use, by several processes too.
type Anchor interface {
	// Newest returns the object of the greatest size, or ErrNoObject when the
	// anchor holds none.
	Newest(ctx context.Context) (Object, error)
	// Put writes o under o.Size. It returns nil only once o is durable, and from
	// then on every Newest and Get sees it. When an object of that size exists,
	// Put writes nothing and returns nil if the text of its checkpoint (origin,
	// size and root) is the same: it is the same history, whoever signed it and
	// wherever it was cut; otherwise ErrForked, as for another origin, and where
	// an object that is there has another entry at an index of o's. (Of two that
	// are written at the same moment, both may come to be there.) It returns ErrAnchorDamaged when o.From is neither zero nor the size of an
	// object: what o builds on is gone. After another error the object may be
	// there or not; the Put is repeated.
	Put(ctx context.Context, o Object) error
	// Get returns the first object whose size is greater than size, or
	// ErrNoObject: so a reader walks the mirror from zero. It holds the entry of
	// index size.
	Get(ctx context.Context, size uint64) (Object, error)
	// Enter writes t, durably, unless its number is taken; a zero number writes
	// nothing. It returns the term of the greatest number, zero where there is
	// none: if that is t, t has been entered. It fails with ErrAnchorDamaged
	// where t does not follow the one before. After another error t may have
	// been entered or not.
	Enter(ctx context.Context, t Term) (Term, error)
	// Domain tells where the anchor is, in a word for receipts ("file") and in
	// words for operators.
	Domain() (code, description string)
	// Close releases it.
	Close() error
}

// Object is what one Put adds: the entries [From, Size), at least one, and the
// checkpoint of the tree of Size entries.
type Object struct {
	From, Size uint64
	// Checkpoint is a signed note, in the form of C2SP tlog-checkpoint.
	Checkpoint []byte
	// Entries has Size - From entries.
	Entries []Entry
}

// Term is a time for which one keyd has the anchor for a store that it has for
// itself. It ends when the next one begins.
type Term struct {
	Number uint64
	// Holder is a name that no other keyd's start has, of at most MaxHolder bytes
	// of [a-z0-9-]. Empty: the one before has left, and nobody holds it.
	Holder string
}

// Bounds of a Term.
const (
	MaxTerm   = 999_999_999
	MaxHolder = 64
)

// Check says why t cannot be entered, or returns nil.
func (t Term) Check() error {
	if t.Number > MaxTerm || len(t.Holder) > MaxHolder || strings.Trim(t.Holder, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return errors.New("ledger: no such term")
	}
	return nil
}

const termMagic = "lethe-term/v1"

// Encode returns the form in which anchors keep a term.
func (t Term) Encode() []byte {
	text := fmt.Sprintf("%s\n%d\n%s\n", termMagic, t.Number, t.Holder)
	sum := sha256.Sum256([]byte(text))
	return []byte(text + hex.EncodeToString(sum[:]) + "\n")
}

// DecodeTerm reads what Encode wrote. Its errors are ErrAnchorDamaged.
func DecodeTerm(b []byte) (Term, error) {
	lines := strings.Split(string(b), "\n")
	if len(lines) > 2 {
		number, err := strconv.ParseUint(lines[1], 10, 64)
		t := Term{Number: number, Holder: lines[2]}
		if err == nil && t.Check() == nil && bytes.Equal(t.Encode(), b) {
			return t, nil
		}
	}
	return Term{}, fmt.Errorf("%w: a term does not parse", ErrAnchorDamaged)
}

// Entry is a statement and the salt that hides it in its leaf.
type Entry struct {
	Salt      []byte
	Statement []byte
	// TreeSize is the size of the tree that the entry's append made: the tree
	// that its receipt leads to. Nothing but the object's checksum covers it.
	TreeSize uint64
}

// Errors of an Anchor. Adapters wrap them.
var (
	ErrNoObject = errors.New("anchor holds no such object")
	// ErrForked: the anchor holds something else under that size, or is another
	// ledger's.
	ErrForked = errors.New("anchor holds another history")
	// ErrDiverged: that is so of an object of this ledger: neither it nor the
	// store is a prefix of the other. It is ErrForked.
	ErrDiverged = fmt.Errorf("%w than the store", ErrForked)
	// ErrSuperseded: another keyd has entered a later term.
	ErrSuperseded = errors.New("another keyd has taken over the anchor, with a copy of this store")
	// ErrAnchorDamaged: an object is missing, truncated or edited.
	ErrAnchorDamaged = errors.New("anchor is damaged")
	// ErrAnchorUnavailable: the anchor cannot be read or written now.
	ErrAnchorUnavailable = errors.New("anchor is unavailable")
)
