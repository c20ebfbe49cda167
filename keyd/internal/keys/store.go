package keys

import (
	"context"
	"errors"
	"io"
)

// Store is a transactional key-value store. Transactions are strictly
// serializable with respect to point reads; scans do not conflict, so whatever
// a decision depends on lives in a row that the deciding transaction gets and
// every change puts. Keys are 1 to 256 bytes, values at most 1023 KiB. A Store
// is safe for concurrent use.
type Store interface {
	// View runs fn on a snapshot that holds every commit acknowledged before
	// View was called. It returns fn's error as it is.
	View(ctx context.Context, fn func(Reader) error) error

	// Update runs fn in a transaction and returns nil only once the commit is
	// durable: it survives kill -9 and the loss of power. Concurrent updates
	// may share one commit, but an fn that fails leaves nothing behind and
	// fails nobody else; its error is returned as it is. fn may run more than
	// once and must have no effect but through tx. An error of the store's own
	// wraps ErrConflict (nothing was written, retry), ErrTooLarge, ErrFull
	// (nothing was written) or ErrUnavailable (whether it was written is not
	// known). When ctx ends first, whether it was written is not known.
	Update(ctx context.Context, fn func(Tx) error) error

	// DropRange removes every row whose key begins with prefix, and the bytes
	// of all their versions, as far as the store can. It is meant for ranges
	// in which nothing is read or written any more. A failed or interrupted
	// drop is repeated.
	DropRange(ctx context.Context, prefix []byte) error

	// Backup writes a consistent copy of the store, as of some instant during
	// the call, to w: no deleted rows, and no values that were overwritten.
	Backup(ctx context.Context, w io.Writer) error

	// Check reports whether the store can take writes now; its error wraps
	// ErrFull or ErrUnavailable.
	Check(ctx context.Context) error

	// Close waits for updates under way, and releases the store.
	Close() error
}

// Reader reads one snapshot. It is valid until its function returns and for
// the goroutine that runs it. What it returns belongs to the caller.
type Reader interface {
	// Get returns the value of key, or ErrNotFound.
	Get(key []byte) ([]byte, error)
	// Scan calls fn for the rows whose keys begin with prefix and follow after
	// (nil: from the first), in ascending order of keys, until fn returns
	// false. In an Update it sees the transaction's own writes.
	Scan(prefix, after []byte, fn func(key, value []byte) bool) error
}

// Tx is the Reader and writer of an Update.
type Tx interface {
	Reader
	// Put sets a row. key and value must not be changed afterwards.
	Put(key, value []byte) error
	// Delete removes a row. Key-bearing rows are overwritten, never deleted.
	Delete(key []byte) error
}

// Errors of a Store. Adapters wrap them.
var (
	ErrNotFound    = errors.New("no such row")
	ErrConflict    = errors.New("transaction conflicts with another")
	ErrTooLarge    = errors.New("transaction is larger than the store allows")
	ErrFull        = errors.New("store is full")
	ErrUnavailable = errors.New("store is unavailable")
	// ErrLocked is returned by an adapter's Open when another process holds the store.
	ErrLocked = errors.New("store is locked by another process")
	// ErrDamaged is returned by an adapter's Open, and by reads, when what is
	// stored fails its checks. The message names the file.
	ErrDamaged = errors.New("store is damaged")
	// ErrNewerVersion is returned by an adapter's Open when a newer version wrote the store.
	ErrNewerVersion = errors.New("store was written by a newer version")
)
