// Package local is a KMS in one file, for a keyd that has no KMS beside it.
//
// The file holds the roots, encrypted and authenticated as a whole under a
// keyfile or a passphrase, and belongs outside the store's directory, so that
// a backup of the store does not carry it along. Several processes on one host
// may have the file open; a lock beside it lets one at a time change it, and
// the others see the change in their next call.
//
// # What it promises
//
// A root that was created, disabled, scheduled or cancelled stays so after
// kill -9 and the loss of power: the answer is given once the file is
// replaced and synced. When the waiting period of a root has ended, the next
// call that is not a Wrap or an Unwrap, or the next Open, writes a file without
// its key and keeps its id as a tombstone; only then is it called destroyed.
// Nothing undoes that, a clock set back included. A file that is missing,
// damaged, replaced by another or by an older version of itself while it is
// open makes every call fail with keys.ErrKMSUnavailable.
//
// # What it does not promise
//
// A destroyed root is gone from the file, not from copies of the file. Whoever
// has an older copy and the keyfile or passphrase has the root: the file's
// backups, its snapshots, and an older version put back while nobody has it
// open (nothing in the file can tell). Receipts say so with [FinalBasis].
// The replaced file is overwritten with zeros before it is released. That
// reaches the old bytes on a file system that writes in place; it does not on
// copy-on-write file systems, in snapshots, in a journal that holds data, or in
// the spare blocks of an SSD, and a crash can come between. Keeping the
// keyfile on another medium, and destroying it, is what makes all copies
// worthless.
//
// The waiting period is counted by the clock of the host. A clock that is set
// forward ends it early.
package local

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"lethe/keyd/internal/keys"
)

const (
	// FinalBasis is the word by which receipts say how far the destruction of
	// a local root reaches: as far as the copies of its file.
	FinalBasis = "local-root-file"

	// DefaultWaiting is the waiting period when Options names none.
	DefaultWaiting = time.Hour

	kind      = "local"
	maxKey    = 64
	lockLimit = 10 * time.Second
)

// Errors of this package. Those of a running KMS wrap one of keys.ErrKMS…
// besides.
var (
	// ErrMissing is returned by Open when there is no file and Options.Create
	// was not set. Nothing follows from it about any root.
	ErrMissing = errors.New("no root file")
	// ErrWrongSecret: the keyfile or passphrase is not the one of this file.
	ErrWrongSecret = errors.New("wrong keyfile or passphrase")
	// ErrDamaged: the file fails its checks: truncated, edited, or not a root file.
	ErrDamaged = errors.New("root file is damaged")
	// ErrNewerVersion: a newer version wrote the file.
	ErrNewerVersion = errors.New("root file was written by a newer version")
	// ErrUnsafe: others could read or replace the file, the keyfile, or a
	// directory above them.
	ErrUnsafe = errors.New("unsafe permissions")
	// ErrBadKeyfile: what the keyfile holds was not written by GenerateKeyfile.
	ErrBadKeyfile = errors.New("not a keyfile")
	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("closed")
)

// Options says which file to open and how.
type Options struct {
	// Path names the root file. Its directory must exist, be writable by this
	// user alone, and lie under directories that nobody else can rename.
	Path string
	// Keyfile names a file made by GenerateKeyfile. Either it or Passphrase.
	Keyfile string
	// Passphrase is taken byte for byte. Open does not keep it; wiping it is
	// the caller's.
	Passphrase []byte
	// Create lets Open make the file when it is missing. An existing file is
	// opened as it is.
	Create bool
	// Clock tells the time; nil is time.Now.
	Clock func() time.Time
	// Waiting is the waiting period of ScheduleDestruction, in whole
	// milliseconds; zero is DefaultWaiting.
	Waiting time.Duration
}

// KMS is an open root file. It is safe for concurrent use.
type KMS struct {
	path    string // resolved: no component is a symbolic link
	secret  secret
	clock   func() time.Time
	waiting time.Duration

	writer chan struct{} // held by the one call in this process that changes the file

	mu     sync.RWMutex
	closed bool
	head   header
	cur    *state   // replaced as a whole
	file   *os.File // the version that cur is from; open, so that its inode is not reused
	stamp  stamp
	sum    [sumSize]byte
}

var _ keys.KMS = (*KMS)(nil)

// Open opens the root file, and destroys the roots whose waiting period has
// ended. It fails with ErrMissing, ErrWrongSecret, ErrDamaged, ErrNewerVersion,
// ErrUnsafe, ErrBadKeyfile, keys.ErrKMSUnavailable when the file cannot be read
// or written, or an error that wraps none of them when the options are wrong.
func Open(o Options) (*KMS, error) { return open(o, defaultArgon2) }

func open(o Options, cost argon2Cost) (_ *KMS, err error) {
	switch {
	case o.Path == "":
		return nil, errors.New("local KMS: no path")
	case (o.Keyfile == "") == (len(o.Passphrase) == 0):
		return nil, errors.New("local KMS: give a keyfile or a passphrase, and not both")
	case o.Waiting < 0 || o.Waiting%time.Millisecond != 0:
		return nil, errors.New("local KMS: the waiting period is not a positive number of milliseconds")
	}
	if o.Waiting == 0 {
		o.Waiting = DefaultWaiting
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	dir, err := safeDir(filepath.Dir(o.Path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("local KMS: %w: %w", ErrMissing, err)
	}
	if err != nil {
		return nil, fmt.Errorf("local KMS: %w", err)
	}
	k := &KMS{
		path:    filepath.Join(dir, filepath.Base(o.Path)),
		clock:   o.Clock,
		waiting: o.Waiting,
		writer:  make(chan struct{}, 1),
	}
	defer func() {
		if err != nil {
			k.Close()
		}
	}()
	var raw rawSecret
	if o.Keyfile != "" {
		raw.key, err = readKeyfile(o.Keyfile)
		if err != nil {
			return nil, fmt.Errorf("local KMS: %w", err)
		}
		defer clear(raw.key)
	} else {
		raw.passphrase = o.Passphrase
	}

	ctx, cancel := context.WithTimeout(context.Background(), lockLimit)
	defer cancel()
	err = k.first(raw)
	if errors.Is(err, fs.ErrNotExist) {
		if !o.Create {
			return nil, fmt.Errorf("local KMS: %w at %s: check the path; a new one would open nothing that the old one wrapped", ErrMissing, o.Path)
		}
		err = k.create(ctx, raw, cost)
	}
	if err != nil {
		return nil, err
	}
	// Clears what a crash left, and destroys what fell due meanwhile.
	if err := k.update(ctx, func(*state, time.Time) (bool, error) { return false, nil }); err != nil {
		return nil, err
	}
	return k, nil
}

// first reads the file for the first time. Its error is fs.ErrNotExist when
// there is none.
func (k *KMS) first(raw rawSecret) error {
	v, err := readRoots(k.path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return fs.ErrNotExist
		}
		return fmt.Errorf("local KMS: %w", err)
	}
	head, body, err := parseFile(v.data)
	if err == nil {
		k.secret, err = raw.derive(head)
	}
	if err == nil && subtle.ConstantTimeCompare(k.secret.check[:], head.check[:]) != 1 {
		err = ErrWrongSecret
	}
	var cur *state
	if err == nil {
		cur, err = k.secret.open(head, body)
	}
	if err == nil {
		err = syncDir(k.path)
	}
	if err != nil {
		v.file.Close()
		return fmt.Errorf("local KMS: %s: %w", k.path, err)
	}
	k.head, k.cur, k.file, k.stamp, k.sum = head, cur, v.file, v.stamp, v.sum()
	return nil
}

// create makes an empty root file, or reads the one that another process made
// meanwhile.
func (k *KMS) create(ctx context.Context, raw rawSecret, cost argon2Cost) error {
	unlock, err := lockFile(ctx, k.path)
	if err != nil {
		return err
	}
	defer unlock()
	if err := k.first(raw); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := removeTemp(k.path); err != nil {
		return unavailable(err)
	}
	head := raw.newHeader(cost)
	k.secret, err = raw.derive(head)
	if err != nil {
		return fmt.Errorf("local KMS: %w", err)
	}
	head.check = k.secret.check
	k.head = head
	return k.write(&state{seq: 1})
}

// Kind returns "local".
func (k *KMS) Kind() string { return kind }

// FinalBasis returns the constant of that name.
func (k *KMS) FinalBasis() string { return FinalBasis }

// Waiting returns the waiting period of Options.
func (k *KMS) Waiting() time.Duration { return k.waiting }

// Wrap encrypts key, of 1 to 64 bytes, with X-AES-GCM under the root, with the
// root's id and ec as associated data. The result is 40 bytes longer.
func (k *KMS) Wrap(ctx context.Context, rootID string, key []byte, ec keys.EncryptionContext) ([]byte, error) {
	if len(key) < 1 || len(key) > maxKey {
		return nil, fmt.Errorf("local KMS: a key to wrap has 1 to %d bytes", maxKey)
	}
	var wrapped []byte
	err := k.use(ctx, rootID, func(r *root) (err error) {
		wrapped, err = r.aead.Encrypt(key, wrapAD(rootID, ec))
		return err
	})
	if err != nil {
		return nil, err
	}
	return wrapped, nil
}

// Unwrap undoes Wrap.
func (k *KMS) Unwrap(ctx context.Context, rootID string, wrapped []byte, ec keys.EncryptionContext) ([]byte, error) {
	var key []byte
	err := k.use(ctx, rootID, func(r *root) (err error) {
		if len(wrapped) <= aeadOverhead || len(wrapped) > aeadOverhead+maxKey {
			return keys.ErrKMSDenied
		}
		if key, err = r.aead.Decrypt(wrapped, wrapAD(rootID, ec)); err != nil {
			return keys.ErrKMSDenied
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return key, nil
}

// use calls fn with an enabled root. The root's key is not wiped meanwhile.
func (k *KMS) use(ctx context.Context, rootID string, fn func(*root) error) error {
	if err := k.refresh(ctx); err != nil {
		return err
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	r, err := k.find(k.cur, rootID)
	if err != nil {
		return err
	}
	if r.state != keys.RootEnabled {
		return rootError(rootID, keys.ErrRootNotUsable)
	}
	if err := fn(r); err != nil {
		return rootError(rootID, err)
	}
	return nil
}

// Create makes a root, or finds the one that it made for this request. When it
// fails with keys.ErrKMSUnavailable, whether a root was made is not known; the
// repeated request finds it.
func (k *KMS) Create(ctx context.Context, epoch uint32, request keys.RootRequest) (string, error) {
	id := fmt.Sprintf("local-%d-%s", epoch, hex.EncodeToString(request[:]))
	err := k.update(ctx, func(st *state, now time.Time) (bool, error) {
		if st.find(id) != nil {
			return false, nil
		}
		if len(st.roots) >= maxRoots {
			return false, fmt.Errorf("local KMS: the root file is full: it has %d roots", maxRoots)
		}
		r := &root{id: id, epoch: epoch, state: keys.RootEnabled, created: now.UnixMilli()}
		rand.Read(r.key[:])
		var err error
		if r.aead, err = newAEAD(r.key[:]); err != nil {
			return false, err
		}
		st.add(r)
		return true, nil
	})
	if err != nil {
		return "", err
	}
	return id, nil
}

// Disable stops the use of a root. A root that is pending destruction stays so.
func (k *KMS) Disable(ctx context.Context, rootID string) error {
	return k.change(ctx, rootID, func(r *root, _ time.Time) (bool, error) {
		switch r.state {
		case keys.RootDestroyed:
			return false, keys.ErrRootNotUsable
		case keys.RootEnabled:
			r.state = keys.RootDisabled
			return true, nil
		}
		return false, nil
	})
}

// ScheduleDestruction starts the waiting period. For a root that is pending or
// destroyed it returns the instant it returned before.
func (k *KMS) ScheduleDestruction(ctx context.Context, rootID string) (time.Time, error) {
	var at time.Time
	err := k.change(ctx, rootID, func(r *root, now time.Time) (bool, error) {
		scheduled := false
		if r.state == keys.RootEnabled || r.state == keys.RootDisabled {
			// A whole millisecond, and not before the period is over.
			due := now.Add(k.waiting + time.Millisecond - 1)
			r.state, r.destroyAt, scheduled = keys.RootPending, due.UnixMilli(), true
		}
		at = time.UnixMilli(r.destroyAt).UTC()
		return scheduled, nil
	})
	if err != nil {
		return time.Time{}, err
	}
	return at, nil
}

// Cancel enables a root again. It fails with keys.ErrRootNotUsable once the
// waiting period has ended.
func (k *KMS) Cancel(ctx context.Context, rootID string) error {
	return k.change(ctx, rootID, func(r *root, _ time.Time) (bool, error) {
		switch r.state {
		case keys.RootDestroyed:
			return false, keys.ErrRootNotUsable
		case keys.RootEnabled:
			return false, nil
		}
		r.state, r.destroyAt = keys.RootEnabled, 0
		return true, nil
	})
}

// Describe tells a root's state. It answers keys.RootDestroyed only once a
// file without the root's key is on the disk. DestroyAt stays set then.
func (k *KMS) Describe(ctx context.Context, rootID string) (keys.Root, error) {
	if err := k.refresh(ctx); err != nil {
		return keys.Root{}, err
	}
	desc, due, err := k.describe(rootID)
	if err == nil && due {
		if err := k.update(ctx, func(*state, time.Time) (bool, error) { return false, nil }); err != nil {
			return keys.Root{}, err
		}
		desc, _, err = k.describe(rootID)
	}
	return desc, err
}

func (k *KMS) describe(rootID string) (_ keys.Root, due bool, _ error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	r, err := k.find(k.cur, rootID)
	if err != nil {
		return keys.Root{}, false, err
	}
	d := keys.Root{ID: r.id, State: r.state}
	if r.destroyAt != 0 {
		d.DestroyAt = time.UnixMilli(r.destroyAt).UTC()
	}
	return d, r.due(k.clock()), nil
}

// Close wipes the roots from memory, as far as Go and Tink allow: copies that
// the AES key schedules hold are left to the garbage collector. It waits for
// no call; one that has begun may still end well.
func (k *KMS) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	k.closed = true
	if k.cur != nil {
		k.cur.wipe()
		k.cur = nil
	}
	k.secret = secret{}
	if k.file != nil {
		return k.file.Close()
	}
	return nil
}

// change is update for one root.
func (k *KMS) change(ctx context.Context, rootID string, fn func(*root, time.Time) (bool, error)) error {
	return k.update(ctx, func(st *state, now time.Time) (bool, error) {
		r, err := k.find(st, rootID)
		if err != nil {
			return false, err
		}
		changed, err := fn(r, now)
		if err != nil {
			return false, rootError(rootID, err)
		}
		return changed, nil
	})
}

// update lets fn change a copy of the newest state, after the roots that are
// due were destroyed in it, and writes the copy when either changed it. An fn
// that fails must leave the state as it was; its error is returned as it is.
func (k *KMS) update(ctx context.Context, fn func(st *state, now time.Time) (changed bool, err error)) error {
	if err := ctx.Err(); err != nil {
		return unavailable(err)
	}
	select {
	case k.writer <- struct{}{}:
		defer func() { <-k.writer }()
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	unlock, err := lockFile(ctx, k.path)
	if err != nil {
		return err
	}
	defer unlock()
	if err := removeTemp(k.path); err != nil {
		return unavailable(err)
	}
	if err := k.refresh(ctx); err != nil {
		return err
	}
	k.mu.RLock()
	if k.closed {
		k.mu.RUnlock()
		return unavailable(ErrClosed)
	}
	st := k.cur.clone()
	k.mu.RUnlock()

	now := k.clock()
	if now.UnixMilli() <= 0 {
		st.wipe()
		return unavailable(errors.New("the clock is before 1970"))
	}
	due := st.destroyDue(now)
	changed, ferr := fn(st, now)
	if !due && !changed {
		st.wipe()
		return ferr
	}
	st.seq++
	if err := k.write(st); err != nil {
		return err
	}
	return ferr
}

// write replaces the file by one that holds st, and makes st the current
// state. The caller holds the lock. When it fails, st is wiped, and the file
// may be the old or the new one: the next call reads it again.
func (k *KMS) write(st *state) error {
	k.mu.RLock()
	closed, sec := k.closed, k.secret
	k.mu.RUnlock()
	if closed {
		st.wipe()
		return unavailable(ErrClosed)
	}
	data, err := sec.seal(k.head, st)
	if err != nil {
		st.wipe()
		return unavailable(err)
	}
	v, err := replace(k.path, data)

	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil {
		st.wipe()
		k.stamp = stamp{}
		return unavailable(err)
	}
	if k.closed {
		st.wipe()
		v.file.Close()
		return nil
	}
	k.adopt(st, v)
	return nil
}

// adopt makes st, which v holds, the current state. The caller holds mu.
func (k *KMS) adopt(st *state, v version) {
	if k.cur != nil {
		k.cur.wipe()
		k.file.Close()
	}
	k.cur, k.file, k.stamp, k.sum = st, v.file, v.stamp, v.sum()
}

// refresh reads the file again if it is not the one that was read or written last.
func (k *KMS) refresh(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return unavailable(err)
	}
	now, err := stampOf(k.path)
	if err != nil {
		return unavailable(err)
	}
	k.mu.RLock()
	same, closed := now == k.stamp, k.closed
	k.mu.RUnlock()
	if closed {
		return unavailable(ErrClosed)
	}
	if same {
		return nil
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return unavailable(ErrClosed)
	}
	v, err := readRoots(k.path)
	if err != nil {
		return unavailable(err)
	}
	if v.stamp == k.stamp { // another call was faster
		return v.file.Close()
	}
	st, err := k.next(v)
	if err == nil {
		// The process that renamed it may not have synced the directory yet.
		if err = syncDir(k.path); err != nil {
			st.wipe()
		}
	}
	if err != nil {
		v.file.Close()
		return unavailable(fmt.Errorf("%s: %w", k.path, err))
	}
	k.adopt(st, v)
	return nil
}

// next parses a later version of the file that is open. The caller holds mu.
func (k *KMS) next(v version) (*state, error) {
	head, body, err := parseFile(v.data)
	if err != nil {
		return nil, err
	}
	if head != k.head {
		return nil, fmt.Errorf("%w: another root file was put in its place", ErrDamaged)
	}
	st, err := k.secret.open(head, body)
	if err != nil {
		return nil, err
	}
	if st.seq < k.cur.seq || st.seq == k.cur.seq && v.sum() != k.sum {
		st.wipe()
		return nil, fmt.Errorf("%w: an older version was put in its place", ErrDamaged)
	}
	return st, nil
}

// find returns a root of st. The caller holds mu, or owns st.
func (k *KMS) find(st *state, rootID string) (*root, error) {
	if st == nil {
		return nil, unavailable(ErrClosed)
	}
	if r := st.find(rootID); r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("local KMS: %w", keys.ErrRootUnknown)
}

func rootError(rootID string, err error) error {
	return fmt.Errorf("local KMS: root %s: %w", rootID, err)
}

func unavailable(err error) error {
	return fmt.Errorf("local KMS: %w: %w", keys.ErrKMSUnavailable, err)
}
