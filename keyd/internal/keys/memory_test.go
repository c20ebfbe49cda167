package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lethe/keyd/internal/keys"
)

// memory is a store in memory whose transactions run side by side and conflict
// on what they have read, as in a store that several keyds share. It knows how
// to fail.
type memory struct {
	// fault, if set, decides about each call: "update" just before its commit,
	// "drop" before it. It is called without locks held and may block.
	fault func(op string) fault
	// failure is what lost and persisted calls fail with; nil: ErrUnavailable.
	failure error
	// large, if set, is how many rows a transaction may write.
	large int

	mu       sync.RWMutex
	rows     map[string][]byte
	versions map[string]uint64
	version  uint64
}

// fault is what happens to a call.
type fault int

const (
	none      fault = iota
	lost            // it fails and has done nothing
	persisted       // it fails after it has done its work
)

var errInjected = errors.New("injected")

// unreadable is a row that the store itself finds damaged when it is read.
const unreadable = "unreadable"

func newMemory() *memory {
	return &memory{rows: make(map[string][]byte), versions: make(map[string]uint64)}
}

// copyRows is what a backup taken now holds.
func (m *memory) copyRows() map[string][]byte {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return maps.Clone(m.rows)
}

type memoryReader struct {
	m    *memory
	own  map[string][]byte // nil value: deleted
	read map[string]uint64 // nil in a view
}

func (r *memoryReader) Get(key []byte) ([]byte, error) {
	if v, ok := r.own[string(key)]; ok {
		if v == nil {
			return nil, keys.ErrNotFound
		}
		return bytes.Clone(v), nil
	}
	if r.read != nil {
		r.m.mu.RLock()
		defer r.m.mu.RUnlock()
		if _, ok := r.read[string(key)]; !ok {
			r.read[string(key)] = r.m.versions[string(key)]
		}
	}
	v, ok := r.m.rows[string(key)]
	switch {
	case !ok:
		return nil, keys.ErrNotFound
	case string(v) == unreadable:
		return nil, fmt.Errorf("%w: a row fails its checksum", keys.ErrDamaged)
	}
	return append([]byte{}, v...), nil
}

func (r *memoryReader) Scan(prefix, after []byte, fn func(key, value []byte) bool) error {
	if r.read != nil {
		r.m.mu.RLock()
		defer r.m.mu.RUnlock()
	}
	var found []string
	for k := range r.m.rows {
		if v, ok := r.own[k]; strings.HasPrefix(k, string(prefix)) && (after == nil || k > string(after)) && (!ok || v != nil) {
			found = append(found, k)
		}
	}
	for k, v := range r.own {
		if _, ok := r.m.rows[k]; !ok && v != nil && strings.HasPrefix(k, string(prefix)) && (after == nil || k > string(after)) {
			found = append(found, k)
		}
	}
	slices.Sort(found)
	for _, k := range found {
		v, ok := r.own[k]
		if !ok {
			v = r.m.rows[k]
		}
		if !fn([]byte(k), append([]byte{}, v...)) {
			return nil
		}
	}
	return nil
}

func (r *memoryReader) Put(key, value []byte) error {
	r.own[string(key)] = append([]byte{}, value...)
	if r.m.large > 0 && len(r.own) > r.m.large {
		return fmt.Errorf("%w: %d rows", keys.ErrTooLarge, len(r.own))
	}
	return nil
}

func (r *memoryReader) Delete(key []byte) error {
	r.own[string(key)] = nil
	return nil
}

// View holds the store still while fn runs.
func (m *memory) View(ctx context.Context, fn func(keys.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	return fn(&memoryReader{m: m})
}

func (m *memory) Update(ctx context.Context, fn func(keys.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	tx := &memoryReader{m: m, own: make(map[string][]byte), read: make(map[string]uint64)}
	if err := fn(tx); err != nil {
		return err
	}
	f := none
	if m.fault != nil {
		f = m.fault("update")
	}
	if f == lost {
		if m.failure != nil {
			return m.failure
		}
		return fmt.Errorf("%w: %w", keys.ErrUnavailable, errInjected)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, v := range tx.read {
		if m.versions[k] != v {
			return keys.ErrConflict
		}
	}
	m.version++
	for k, v := range tx.own {
		m.versions[k] = m.version
		if v == nil {
			delete(m.rows, k)
		} else {
			m.rows[k] = v
		}
	}
	if f == persisted {
		return fmt.Errorf("%w: %w", keys.ErrUnavailable, errInjected)
	}
	return nil
}

func (m *memory) DropRange(ctx context.Context, prefix []byte) error {
	f := none
	if m.fault != nil {
		f = m.fault("drop")
	}
	if f == lost {
		if m.failure != nil {
			return m.failure
		}
		return fmt.Errorf("%w: %w", keys.ErrUnavailable, errInjected)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, k := range slices.Sorted(maps.Keys(m.rows)) {
		if strings.HasPrefix(k, string(prefix)) {
			// One that fails half way has dropped the first half.
			if n++; f == persisted && n%2 == 0 {
				continue
			}
			m.version++
			m.versions[k] = m.version
			delete(m.rows, k)
		}
	}
	if f == persisted {
		return fmt.Errorf("%w: %w", keys.ErrUnavailable, errInjected)
	}
	return nil
}

func (m *memory) Backup(context.Context, io.Writer) error { return errors.ErrUnsupported }
func (m *memory) Check(context.Context) error             { return nil }
func (m *memory) Close() error                            { return nil }

// faultyKMS asks fault before every call.
type faultyKMS struct {
	keys.KMS
	fault func(op string) fault
	// err is what a failed call returns; nil: ErrKMSUnavailable.
	err error
}

func (f *faultyKMS) call(op string, fn func() error) error {
	switch f.fault(op) {
	case lost:
		return f.failure()
	case persisted:
		if err := fn(); err != nil {
			return err
		}
		return f.failure()
	}
	return fn()
}

func (f *faultyKMS) failure() error {
	if f.err != nil {
		return f.err
	}
	return fmt.Errorf("%w: %w", keys.ErrKMSUnavailable, errInjected)
}

func (f *faultyKMS) Wrap(ctx context.Context, root string, key []byte, ec keys.EncryptionContext) (out []byte, err error) {
	err = f.call("wrap", func() (err error) { out, err = f.KMS.Wrap(ctx, root, key, ec); return err })
	return out, err
}

func (f *faultyKMS) Unwrap(ctx context.Context, root string, b []byte, ec keys.EncryptionContext) (out []byte, err error) {
	err = f.call("unwrap", func() (err error) { out, err = f.KMS.Unwrap(ctx, root, b, ec); return err })
	return out, err
}

func (f *faultyKMS) Create(ctx context.Context, epoch uint32, request keys.RootRequest) (id string, err error) {
	err = f.call("create", func() (err error) { id, err = f.KMS.Create(ctx, epoch, request); return err })
	return id, err
}

func (f *faultyKMS) Disable(ctx context.Context, root string) error {
	return f.call("disable", func() error { return f.KMS.Disable(ctx, root) })
}

func (f *faultyKMS) ScheduleDestruction(ctx context.Context, root string) (at time.Time, err error) {
	err = f.call("schedule", func() (err error) { at, err = f.KMS.ScheduleDestruction(ctx, root); return err })
	return at, err
}

func (f *faultyKMS) Cancel(ctx context.Context, root string) error {
	return f.call("cancel", func() error { return f.KMS.Cancel(ctx, root) })
}

func (f *faultyKMS) Describe(ctx context.Context, root string) (d keys.Root, err error) {
	err = f.call("describe", func() (err error) { d, err = f.KMS.Describe(ctx, root); return err })
	return d, err
}
