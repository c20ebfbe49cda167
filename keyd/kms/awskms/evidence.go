package awskms

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Evidence remembers which roots AWS described as pending deletion, and until
// when: without it nobody can tell, later, a deleted key from one that never
// was. Losing it is safe, since a root is then unknown and not destroyed; whoever can
// write it can help a key that is not found to pass for destroyed. It
// is safe for concurrent use. Several keyds may share one, or each have its own.
type Evidence interface {
	// Saw records that the root is pending deletion at the instant, in place
	// of what was recorded before. It returns nil only once that is durable.
	Saw(ctx context.Context, rootID string, at time.Time) error
	// Seen returns what Saw recorded, to the millisecond.
	Seen(ctx context.Context, rootID string) (at time.Time, ok bool, err error)
	// Forget removes the record of a root: its deletion was cancelled.
	Forget(ctx context.Context, rootID string) error
}

// saw records the date unless it is recorded already.
func (k *KMS) saw(ctx context.Context, rootID string, at time.Time) error {
	k.mu.Lock()
	known, ok := k.recorded[rootID]
	k.mu.Unlock()
	if ok && known.Equal(at) {
		return nil
	}
	if err := k.evidence.Saw(ctx, rootID, at); err != nil {
		return unavailable("evidence", err)
	}
	k.mu.Lock()
	k.recorded[rootID] = at
	k.mu.Unlock()
	return nil
}

func (k *KMS) forget(ctx context.Context, rootID string) error {
	_, ok, err := k.evidence.Seen(ctx, rootID)
	if err == nil && ok {
		k.mu.Lock()
		delete(k.recorded, rootID)
		k.mu.Unlock()
		err = k.evidence.Forget(ctx, rootID)
	}
	if err != nil {
		return unavailable("evidence", err)
	}
	return nil
}

// memory is Evidence that ends with the process.
type memory struct {
	mu sync.Mutex
	at map[string]time.Time
}

func (m *memory) Saw(_ context.Context, rootID string, at time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at[rootID] = at
	return nil
}

func (m *memory) Seen(_ context.Context, rootID string) (time.Time, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	at, ok := m.at[rootID]
	return at, ok, nil
}

func (m *memory) Forget(_ context.Context, rootID string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.at, rootID)
	return nil
}

// ErrEvidenceDamaged is returned by OpenEvidence for a file that it did not write.
var ErrEvidenceDamaged = errors.New("evidence file is damaged")

// FileEvidence is Evidence in a file that one process writes: a first line
// that names the format, a line with ARN and date for each root in order of
// their ARNs, and a last line with their number.
type FileEvidence struct {
	path string
	mu   sync.Mutex
	at   map[string]time.Time
}

const (
	evidenceFirst = "lethe-awskms-evidence-v1"
	evidenceLast  = "end "
	maxEvidence   = 16 << 20
)

// OpenEvidence reads the file, which is made by the first Saw if it is missing.
func OpenEvidence(path string) (*FileEvidence, error) {
	e := &FileEvidence{path: path, at: map[string]time.Time{}}
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return e, nil
	}
	if err != nil {
		return nil, fmt.Errorf("AWS KMS: evidence: %w", err)
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxEvidence {
		return nil, fmt.Errorf("AWS KMS: %w: %s", ErrEvidenceDamaged, path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("AWS KMS: evidence: %w", err)
	}
	if e.at, err = parseEvidence(string(data)); err != nil {
		return nil, fmt.Errorf("AWS KMS: %w: %s", err, path)
	}
	return e, nil
}

func encodeEvidence(at map[string]time.Time) string {
	var b strings.Builder
	fmt.Fprintln(&b, evidenceFirst)
	for _, id := range slices.Sorted(maps.Keys(at)) {
		fmt.Fprintf(&b, "%s %d\n", id, at[id].UnixMilli())
	}
	fmt.Fprintf(&b, "%s%d\n", evidenceLast, len(at))
	return b.String()
}

// parseEvidence accepts only what encodeEvidence writes.
func parseEvidence(data string) (map[string]time.Time, error) {
	at := map[string]time.Time{}
	for line := range strings.Lines(data) {
		id, ms, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		n, err := strconv.ParseInt(ms, 10, 64)
		if keyARN.MatchString(id) && ok && err == nil {
			at[id] = time.UnixMilli(n).UTC()
		}
	}
	if encodeEvidence(at) != data {
		return nil, ErrEvidenceDamaged
	}
	return at, nil
}

// Saw implements Evidence.
func (e *FileEvidence) Saw(_ context.Context, rootID string, at time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.write(func(m map[string]time.Time) { m[rootID] = at.Truncate(time.Millisecond).UTC() })
}

// Seen implements Evidence.
func (e *FileEvidence) Seen(_ context.Context, rootID string) (time.Time, bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	at, ok := e.at[rootID]
	return at, ok, nil
}

// Forget implements Evidence.
func (e *FileEvidence) Forget(_ context.Context, rootID string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.write(func(m map[string]time.Time) { delete(m, rootID) })
}

// write replaces the file by one with the change. The caller holds mu.
func (e *FileEvidence) write(change func(map[string]time.Time)) error {
	next := maps.Clone(e.at)
	change(next)
	temp := e.path + ".new"
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(encodeEvidence(next))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp, e.path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(e.path))
	if err != nil {
		return err
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return err
	}
	e.at = next
	return nil
}
