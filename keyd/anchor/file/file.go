// Package file is an anchor in a directory: on another disk, or another
// machine's file system mounted here. It protects against what happens to the
// store's disk alone; on the store's own disk it protects against a restore of
// the store, and no more.
//
// The directory holds
//
//	origin                          the ledger that it belongs to
//	objects/x000/x000/x001/x234/067 the object of size 1234067
//	terms/000000012                 who entered term 12
//	tmp/                            files being written
//
// Files are written under tmp, synced, and linked to their name, which fails if
// the name exists: an object is there whole or not at all, and never changes.
// The file system must have hard links and honour fsync.
package file

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"lethe/keyd/internal/ledger"
)

const (
	originName  = "origin"
	objectsName = "objects"
	tmpName     = "tmp"
	termsName   = "terms"

	originMagic = "lethe-anchor/v1"

	// levels of the tree below objects, three digits each: ledger.MaxSize has
	// five times three.
	levels = 5

	// staleAfter is how old a file in tmp must be to be taken for a leftover.
	staleAfter = time.Hour
)

// Options of an anchor.
type Options struct {
	// Dir is the anchor's directory.
	Dir string
	// Create makes Dir where it is missing; its parent must exist, so that a
	// disk that is not mounted is not mistaken for a new anchor. Without it a
	// missing directory is an error.
	Create bool
	// Exclusive keeps every other process that asks for it out until Close:
	// for a store that one keyd serves, two keyds on one anchor are two copies
	// of the store.
	Exclusive bool
}

// ErrInUse: another process has the anchor for itself.
var ErrInUse = errors.New("the anchor is locked by another keyd")

// Anchor is a ledger.Anchor in a directory. Any number of processes may use
// one directory at once.
type Anchor struct {
	dir  string
	lock *os.File // of Exclusive

	putting sync.Mutex // nothing is put between a look and what it was for
	origin  string     // of the directory, once it is known; putting guards it

	mu     sync.Mutex // never held while the file system is asked
	closed bool
	calls  int    // under way
	synced string // the directory of objects whose parents were synced last
}

var _ ledger.Anchor = (*Anchor)(nil)

// Open opens the anchor in a directory that no other user can read or write.
// Its errors wrap ledger.ErrAnchorUnavailable (fs.ErrNotExist too, where the
// directory is missing) or ledger.ErrAnchorDamaged.
func Open(o Options) (*Anchor, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil || o.Dir == "" {
		return nil, fmt.Errorf("%w: no directory is given", ledger.ErrAnchorUnavailable)
	}
	if o.Create {
		if err := makeDir(dir); err != nil {
			return nil, unavailable(err)
		}
	}
	if err := private(dir); err != nil {
		return nil, err
	}
	a := &Anchor{dir: dir}
	if o.Exclusive {
		if a.lock, err = lockDir(dir); err != nil {
			return nil, err
		}
	}
	opened := false
	defer func() {
		if !opened && a.lock != nil {
			a.lock.Close()
		}
	}()
	// The objects first: an origin is written before any of them.
	_, objects, err := a.last()
	if err != nil {
		return nil, err
	}
	a.origin, err = a.readOrigin()
	if missing := errors.Is(err, fs.ErrNotExist); missing && objects {
		return nil, fmt.Errorf("%w: %s is missing", ledger.ErrAnchorDamaged, filepath.Join(dir, originName))
	} else if err != nil && !missing {
		return nil, err
	}
	a.clean()
	opened = true
	return a, nil
}

// private verifies that dir is a directory that no other user can read or write.
func private(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return unavailable(err)
	}
	if !info.IsDir() {
		return fmt.Errorf("%w: %s is not a directory", ledger.ErrAnchorUnavailable, dir)
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return fmt.Errorf("%w: %s is open to others (mode %#o): make it 0700", ledger.ErrAnchorUnavailable, dir, perm)
	}
	return nil
}

// Domain implements ledger.Anchor.
func (a *Anchor) Domain() (code, description string) { return "file", "directory " + a.dir }

// Close implements ledger.Anchor. It waits for no call that is under way, which
// may hang with the file system: the directory stays locked until it returns, so
// that nobody else has the anchor when it still writes.
func (a *Anchor) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lock != nil && !a.closed && a.calls == 0 {
		a.lock.Close()
	}
	a.closed = true
	return nil
}

// begin begins a call, which end ends.
func (a *Anchor) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return fmt.Errorf("%w: it is closed", ledger.ErrAnchorUnavailable)
	}
	a.calls++
	return nil
}

func (a *Anchor) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls--; a.lock != nil && a.closed && a.calls == 0 {
		a.lock.Close()
	}
}

// Newest implements ledger.Anchor.
func (a *Anchor) Newest(ctx context.Context) (ledger.Object, error) {
	if err := a.begin(ctx); err != nil {
		return ledger.Object{}, err
	}
	defer a.end()
	size, ok, err := a.last()
	if err != nil {
		return ledger.Object{}, err
	}
	if !ok {
		return ledger.Object{}, a.none()
	}
	return a.read(size)
}

// Get implements ledger.Anchor.
func (a *Anchor) Get(ctx context.Context, size uint64) (ledger.Object, error) {
	if err := a.begin(ctx); err != nil {
		return ledger.Object{}, err
	}
	defer a.end()
	next, ok, err := a.after(size)
	if err != nil {
		return ledger.Object{}, err
	}
	if !ok {
		return ledger.Object{}, a.none()
	}
	return a.read(next)
}

// none returns ErrNoObject once it is sure that the directory itself is there:
// an unmounted disk is not an empty anchor.
func (a *Anchor) none() error {
	if _, err := os.Stat(a.dir); err != nil {
		return unavailable(err)
	}
	return ledger.ErrNoObject
}

// Put implements ledger.Anchor.
func (a *Anchor) Put(ctx context.Context, o ledger.Object) error {
	if err := a.begin(ctx); err != nil {
		return err
	}
	defer a.end()
	c, err := o.Check()
	if err != nil {
		return err
	}
	b, err := o.Encode()
	if err != nil {
		return err
	}
	a.putting.Lock()
	defer a.putting.Unlock()
	if err := a.claim(c.Origin); err != nil {
		return err
	}
	name := a.name(o.Size)
	switch _, err := os.Lstat(name); {
	case err == nil:
		return a.compare(o)
	case !errors.Is(err, fs.ErrNotExist):
		return unavailable(err)
	}
	if o.From > 0 {
		switch _, err := os.Lstat(a.name(o.From)); {
		case errors.Is(err, fs.ErrNotExist):
			if _, err := os.Stat(a.dir); err != nil {
				return unavailable(err) // nothing is there, so nothing is missing
			}
			return fmt.Errorf("%w: there is no object of size %d", ledger.ErrAnchorDamaged, o.From)
		case err != nil:
			return unavailable(err)
		}
	}
	if err := a.follows(o); err != nil {
		return err
	}
	if err := a.makeDirs(filepath.Dir(name)); err != nil {
		return unavailable(err)
	}
	switch err := a.publish(name, b); {
	case errors.Is(err, fs.ErrExist):
		return a.compare(o)
	case err != nil:
		return unavailable(err)
	}
	return a.syncDirs(filepath.Dir(name))
}

// follows verifies that no object that is there contradicts o.
func (a *Anchor) follows(o ledger.Object) error {
	for at := o.From; at < o.Size; {
		next, ok, err := a.after(at)
		if err != nil || !ok {
			return err
		}
		there, err := a.read(next)
		if err != nil {
			return err
		}
		if ledger.Contradicts(there, o) {
			return fmt.Errorf("%w: object of size %d", ledger.ErrForked, next)
		}
		at = next
	}
	return nil
}

// Enter implements ledger.Anchor.
func (a *Anchor) Enter(ctx context.Context, t ledger.Term) (ledger.Term, error) {
	if err := t.Check(); err != nil {
		return ledger.Term{}, err
	}
	if err := a.begin(ctx); err != nil {
		return ledger.Term{}, err
	}
	defer a.end()
	dir := filepath.Join(a.dir, termsName)
	newest, err := a.newestTerm(dir)
	if err != nil || t.Number <= newest.Number {
		return newest, err
	}
	if t.Number > newest.Number+1 {
		return ledger.Term{}, fmt.Errorf("%w: there is no term %d", ledger.ErrAnchorDamaged, t.Number-1)
	}
	if err := makeDir(dir); err != nil {
		return ledger.Term{}, unavailable(err)
	}
	err = a.publish(filepath.Join(dir, termName(t.Number)), t.Encode())
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return ledger.Term{}, unavailable(err)
	}
	if err := syncDir(dir); err != nil {
		return ledger.Term{}, unavailable(err)
	}
	return a.newestTerm(dir)
}

func termName(number uint64) string { return fmt.Sprintf("%09d", number) }

// newestTerm returns the term of the greatest number in dir.
func (a *Anchor) newestTerm(dir string) (ledger.Term, error) {
	names, err := os.ReadDir(dir) // sorted
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(a.dir); err != nil {
			return ledger.Term{}, unavailable(err)
		}
		return ledger.Term{}, nil
	}
	if err != nil {
		return ledger.Term{}, unavailable(err)
	}
	for _, n := range slices.Backward(names) {
		number, err := strconv.ParseUint(n.Name(), 10, 64)
		if err != nil || termName(number) != n.Name() {
			continue // none of ours
		}
		b, err := readFile(filepath.Join(dir, n.Name()), 1<<10)
		if err != nil && !errors.Is(err, errNotAFile) {
			return ledger.Term{}, unavailable(err)
		}
		t, err := ledger.DecodeTerm(b)
		if err != nil || t.Number != number {
			return ledger.Term{}, fmt.Errorf("%w: %s", ledger.ErrAnchorDamaged, filepath.Join(dir, n.Name()))
		}
		return t, nil
	}
	return ledger.Term{}, nil
}

// Exclusive says whether no other process can have the anchor.
func (a *Anchor) Exclusive() bool { return a.lock != nil }

// compare is Put where an object of that size exists.
func (a *Anchor) compare(o ledger.Object) error {
	there, err := a.read(o.Size)
	if err != nil {
		return err
	}
	if !ledger.SameHistory(there, o) {
		return fmt.Errorf("%w: object of size %d", ledger.ErrForked, o.Size)
	}
	// Its writer may not have come to syncing its directory yet.
	return a.syncDirs(filepath.Dir(a.name(o.Size)))
}

func (a *Anchor) read(size uint64) (ledger.Object, error) {
	name := a.name(size)
	b, err := readFile(name, ledger.MaxObject)
	if errors.Is(err, errNotAFile) {
		return ledger.Object{}, fmt.Errorf("%w: %s: %w", ledger.ErrAnchorDamaged, name, err)
	}
	if err != nil {
		return ledger.Object{}, unavailable(err)
	}
	o, err := ledger.DecodeObject(b)
	if err != nil {
		return ledger.Object{}, fmt.Errorf("%s: %w", name, err)
	}
	if o.Size != size {
		return ledger.Object{}, fmt.Errorf("%w: %s: object of size %d under another name", ledger.ErrAnchorDamaged, name, o.Size)
	}
	return o, nil
}

// name returns the path of the object of size.
func (a *Anchor) name(size uint64) string {
	digits := fmt.Sprintf("%0*d", 3*levels, size)
	path := filepath.Join(a.dir, objectsName)
	for len(digits) > 3 {
		path = filepath.Join(path, "x"+digits[:3])
		digits = digits[3:]
	}
	return filepath.Join(path, digits)
}

// last returns the greatest size that has an object.
func (a *Anchor) last() (uint64, bool, error) {
	return find(filepath.Join(a.dir, objectsName), levels-1, 0, 0, true)
}

// after returns the least size beyond size that has an object.
func (a *Anchor) after(size uint64) (uint64, bool, error) {
	if size >= ledger.MaxSize {
		return 0, false, nil
	}
	return find(filepath.Join(a.dir, objectsName), levels-1, 0, size+1, false)
}

// find returns the least size, or the greatest, of the objects below dir that
// are at least min. dir holds the sizes from base on, in a thousand parts; the
// parts are objects at level zero. Names that are none of ours are passed over,
// and so are directories that are empty, as a crash may leave them.
func find(dir string, level int, base, min uint64, greatest bool) (uint64, bool, error) {
	names, err := readNames(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, unavailable(err)
	}
	unit := uint64(1)
	for range level {
		unit *= 1000
	}
	var parts []uint64
	for _, name := range names {
		if n, ok := part(name, level); ok && base+n*unit+unit-1 >= min {
			parts = append(parts, n)
		}
	}
	slices.Sort(parts)
	if greatest {
		slices.Reverse(parts)
	}
	for _, n := range parts {
		low := base + n*unit
		if level == 0 {
			return low, true, nil
		}
		size, ok, err := find(filepath.Join(dir, fmt.Sprintf("x%03d", n)), level-1, low, min, greatest)
		if ok || err != nil {
			return size, ok, err
		}
	}
	return 0, false, nil
}

// readNames returns the names in dir, in no order: a directory is read with
// every object that is put, and os.ReadDir takes twice as long.
func readNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// part reads the three digits of a name at a level.
func part(name string, level int) (uint64, bool) {
	if level > 0 {
		var ok bool
		if name, ok = strings.CutPrefix(name, "x"); !ok {
			return 0, false
		}
	}
	if len(name) != 3 || strings.Trim(name, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseUint(name, 10, 16)
	return n, err == nil
}

// claim makes the directory the anchor of origin's ledger, or verifies that it
// is. a.putting is held.
func (a *Anchor) claim(origin string) error {
	if a.origin == "" {
		err := a.publish(filepath.Join(a.dir, originName), originFile(origin))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return unavailable(err)
		}
		if err := syncDir(a.dir); err != nil {
			return unavailable(err)
		}
		if a.origin, err = a.readOrigin(); err != nil {
			return err
		}
	}
	if a.origin != origin {
		return fmt.Errorf("%w: the directory is another ledger's anchor", ledger.ErrForked)
	}
	return nil
}

// originFile has the origin on its second line and, on its third, a checksum.
func originFile(origin string) []byte {
	text := originMagic + "\n" + origin + "\n"
	sum := sha256.Sum256([]byte(text))
	return []byte(text + hex.EncodeToString(sum[:]) + "\n")
}

// readOrigin returns fs.ErrNotExist, unwrapped by any error of an anchor, where
// the file is missing.
func (a *Anchor) readOrigin() (string, error) {
	name := filepath.Join(a.dir, originName)
	b, err := readFile(name, 1<<10)
	if errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err != nil && !errors.Is(err, errNotAFile) {
		return "", unavailable(err)
	}
	_, rest, _ := strings.Cut(string(b), "\n")
	origin, _, _ := strings.Cut(rest, "\n")
	if err != nil || origin == "" || !bytes.Equal(b, originFile(origin)) {
		return "", fmt.Errorf("%w: %s", ledger.ErrAnchorDamaged, name)
	}
	return origin, nil
}

// publish writes a file under its name, whole, synced, and only if the name is
// free; otherwise it returns fs.ErrExist. The name's directory is not synced yet.
func (a *Anchor) publish(name string, b []byte) error {
	tmp := filepath.Join(a.dir, tmpName)
	if err := makeDir(tmp); err != nil {
		return err
	}
	for try := 0; ; try++ {
		err := linkNew(tmp, name, b)
		var link *os.LinkError
		if try == 0 && errors.As(err, &link) && errors.Is(err, fs.ErrNotExist) {
			continue // another process took the file for a leftover
		}
		return err
	}
}

func linkNew(tmp, name string, b []byte) error {
	f, err := os.CreateTemp(tmp, "new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Link(f.Name(), name)
}

// clean removes leftovers of crashes from tmp. What it cannot remove does no harm.
func (a *Anchor) clean() {
	tmp := filepath.Join(a.dir, tmpName)
	names, err := os.ReadDir(tmp)
	if err != nil {
		return
	}
	for _, n := range names {
		info, err := n.Info()
		if err == nil && info.Mode().IsRegular() && strings.HasPrefix(n.Name(), "new-") && time.Since(info.ModTime()) > staleAfter {
			_ = os.Remove(filepath.Join(tmp, n.Name()))
		}
	}
}

// makeDirs makes the directories from objects down to dir.
func (a *Anchor) makeDirs(dir string) error {
	if a.isSynced(dir) {
		return nil
	}
	for _, d := range a.chain(dir)[1:] {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// syncDirs makes the names in dir durable, and those of dir and its parents
// unless this process did so before.
func (a *Anchor) syncDirs(dir string) error {
	chain := a.chain(dir)
	if a.isSynced(dir) {
		chain = chain[len(chain)-1:]
	}
	for _, d := range chain {
		if err := syncDir(d); err != nil {
			return unavailable(err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.synced = dir
	return nil
}

func (a *Anchor) isSynced(dir string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.synced == dir
}

// chain returns the directories from the anchor's own down to dir, which is the
// parent of an object.
func (a *Anchor) chain(dir string) []string {
	chain := make([]string, levels+1)
	for i := levels; i >= 0; i-- {
		chain[i] = dir
		dir = filepath.Dir(dir)
	}
	return chain
}

// makeDir makes one directory, durably, unless it is there.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

var errNotAFile = errors.New("not a regular file, or too large")

// readFile reads a regular file of at most limit bytes.
func readFile(name string, limit int64) ([]byte, error) {
	// Checked before it is opened: opening a pipe would wait.
	info, err := os.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errNotAFile
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, errNotAFile
	}
	return b, nil
}

func unavailable(err error) error {
	return fmt.Errorf("%w: %w", ledger.ErrAnchorUnavailable, err)
}
