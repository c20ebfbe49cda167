package anchortest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"lethe/keyd/internal/ledger"
)

// Fault is what Memory does to one call.
type Fault int

// Faults.
const (
	// None: the call goes through.
	None Fault = iota
	// Lost: the call fails and has done nothing.
	Lost
	// Persisted: the call fails after it has done its work.
	Persisted
)

// Memory is an anchor in memory, for tests of what uses one. Its copies made by
// Clone show what a backup of it would hold.
type Memory struct {
	// Inject, if set, decides about each call: op is "newest", "put", "get" or
	// "enter".
	// It is called without locks held and may block.
	Inject func(ctx context.Context, op string) Fault

	mu      sync.Mutex
	origin  string
	objects map[uint64][]byte
	terms   []ledger.Term
	puts    int
}

// NewMemory returns an empty anchor.
func NewMemory() *Memory { return &Memory{objects: make(map[uint64][]byte)} }

// Clone returns a copy with what is in it now, without the faults.
func (m *Memory) Clone() *Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &Memory{origin: m.origin, objects: maps.Clone(m.objects), terms: slices.Clone(m.terms)}
}

// Puts returns how many calls of Put came through.
func (m *Memory) Puts() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.puts
}

// Edit changes the stored bytes of an object; nil removes it.
func (m *Memory) Edit(size uint64, edit func([]byte) []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := edit(bytes.Clone(m.objects[size])); b != nil {
		m.objects[size] = b
	} else {
		delete(m.objects, size)
	}
}

func (m *Memory) call(ctx context.Context, op string, fn func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	f := None
	if m.Inject != nil {
		f = m.Inject(ctx, op)
	}
	if f == Lost {
		return fmt.Errorf("%w: %s: injected, lost", ledger.ErrAnchorUnavailable, op)
	}
	m.mu.Lock()
	err := fn()
	m.mu.Unlock()
	if f == Persisted {
		return fmt.Errorf("%w: %s: injected, persisted", ledger.ErrAnchorUnavailable, op)
	}
	return err
}

// Newest implements ledger.Anchor.
func (m *Memory) Newest(ctx context.Context) (o ledger.Object, err error) {
	err = m.call(ctx, "newest", func() error {
		if len(m.objects) == 0 {
			return ledger.ErrNoObject
		}
		o, err = m.read(slices.Max(slices.Collect(maps.Keys(m.objects))))
		return err
	})
	return o, err
}

// Get implements ledger.Anchor.
func (m *Memory) Get(ctx context.Context, size uint64) (o ledger.Object, err error) {
	err = m.call(ctx, "get", func() error {
		for _, n := range slices.Sorted(maps.Keys(m.objects)) {
			if n > size {
				o, err = m.read(n)
				return err
			}
		}
		return ledger.ErrNoObject
	})
	return o, err
}

// Put implements ledger.Anchor.
func (m *Memory) Put(ctx context.Context, o ledger.Object) error {
	b, err := o.Encode()
	if err != nil {
		return err
	}
	c, err := o.Check()
	if err != nil {
		return err
	}
	return m.call(ctx, "put", func() error {
		m.puts++
		if m.origin == "" {
			m.origin = c.Origin
		}
		if m.origin != c.Origin {
			return ledger.ErrForked
		}
		if m.objects[o.Size] != nil {
			there, err := m.read(o.Size)
			if err == nil && !ledger.SameHistory(there, o) {
				err = ledger.ErrForked
			}
			return err
		}
		if o.From > 0 && m.objects[o.From] == nil {
			return fmt.Errorf("%w: no object of size %d", ledger.ErrAnchorDamaged, o.From)
		}
		for size := range m.objects {
			if size <= o.From {
				continue
			}
			if there, err := m.read(size); err == nil && ledger.Contradicts(there, o) {
				return ledger.ErrForked
			}
		}
		m.objects[o.Size] = b
		return nil
	})
}

// Enter implements ledger.Anchor.
func (m *Memory) Enter(ctx context.Context, t ledger.Term) (newest ledger.Term, err error) {
	if err := t.Check(); err != nil {
		return ledger.Term{}, err
	}
	err = m.call(ctx, "enter", func() error {
		switch n := uint64(len(m.terms)); {
		case t.Number > n+1:
			return fmt.Errorf("%w: no term %d", ledger.ErrAnchorDamaged, t.Number-1)
		case t.Number == n+1:
			m.terms = append(m.terms, t)
		}
		if len(m.terms) > 0 {
			newest = m.terms[len(m.terms)-1]
		}
		return nil
	})
	return newest, err
}

func (m *Memory) read(size uint64) (ledger.Object, error) {
	o, err := ledger.DecodeObject(bytes.Clone(m.objects[size]))
	if err == nil && o.Size != size {
		err = fmt.Errorf("%w: object of size %d says it is of size %d", ledger.ErrAnchorDamaged, size, o.Size)
	}
	return o, err
}

// Domain implements ledger.Anchor.
func (m *Memory) Domain() (code, description string) {
	return "memory", "this process's memory: for tests"
}

// Close implements ledger.Anchor. The objects stay.
func (m *Memory) Close() error { return nil }
