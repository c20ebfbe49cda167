package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"syscall"

	"github.com/dgraph-io/badger/v4"

	"lethe/keyd/internal/keys"
)

func openBadger(dir string, l badger.Logger) (db *badger.DB, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: opening %s: Badger panicked", keys.ErrDamaged, dir)
		}
	}()
	db, err = badger.OpenManaged(badgerOptions(dir, l))
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", dir, err)
	}
	return db, nil
}

// readError turns an error of a read into one of keys.
func readError(err error) error {
	switch {
	case errors.Is(err, badger.ErrKeyNotFound), errors.Is(err, badger.ErrEmptyKey):
		return keys.ErrNotFound
	case errors.Is(err, keys.ErrDamaged):
		return err
	}
	return fmt.Errorf("%w: a read failed: %w", keys.ErrUnavailable, redact(err))
}

// recoverDamage turns a panic of Badger's over what it reads into an error. A
// write that fails leaves Badger without a memtable, on which it panics too, for
// a moment before the store has stopped: a reader beside the committer waits for
// what that says.
func (r *reader) recoverDamage(err *error) {
	if recover() == nil {
		return
	}
	if r.under == nil {
		r.store.commitMu.Lock()
		defer r.store.commitMu.Unlock()
	}
	if *err = r.store.failed(); *err == nil {
		*err = fmt.Errorf("%w: a table cannot be read", keys.ErrDamaged)
	}
}

// redact keeps of an error of Badger's what cannot hold a row: the messages of
// its sentinels and the operating system's part. Badger puts keys into some.
func redact(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	for _, known := range []error{
		badger.ErrBlockedWrites, badger.ErrTxnTooBig, badger.ErrDBClosed, badger.ErrInvalidKey,
		badger.ErrTruncateNeeded, badger.ErrValueLogSize, badger.ErrDiscardedTxn,
	} {
		if errors.Is(err, known) {
			return known
		}
	}
	text := err.Error() // which is often all that Badger keeps of the cause
	for _, errno := range []syscall.Errno{
		syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, syscall.EIO, syscall.EROFS, syscall.ENOMEM,
		syscall.EMFILE, syscall.ENFILE, syscall.EACCES, syscall.EPERM, syscall.ENOENT, syscall.ESTALE,
	} {
		if strings.Contains(text, errno.Error()) {
			return errno
		}
	}
	return fmt.Errorf("an error of Badger's (%T)", err)
}

// bridge passes Badger's warnings on without their arguments that could hold
// a key: of those only numbers and redacted errors are kept.
type bridge struct{ log *slog.Logger }

func (b bridge) Errorf(format string, args ...any)   { b.warn(format, args) }
func (b bridge) Warningf(format string, args ...any) { b.warn(format, args) }
func (b bridge) Infof(string, ...any)                {}
func (b bridge) Debugf(string, ...any)               {}

func (b bridge) warn(format string, args []any) {
	safe := make([]any, len(args))
	for i, a := range args {
		switch a := a.(type) {
		case int, int32, int64, uint32, uint64, float64:
			safe[i] = a
		case error:
			safe[i] = redact(a).Error()
		default:
			safe[i] = "…"
		}
	}
	b.log.Warn("badger", "message", strings.TrimSpace(format), "args", safe)
}
