package anchortest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

// History is a ledger in memory, to make objects from.
type History struct {
	t      testing.TB
	signer *ledger.Signer
	rows   rows
}

type rows map[string][]byte

var errNoRow = errors.New("no such row")

func (r rows) Get(key []byte) ([]byte, error) {
	v, ok := r[string(key)]
	if !ok {
		return nil, errNoRow
	}
	return bytes.Clone(v), nil
}

func (r rows) Put(key, value []byte) error {
	r[string(key)] = bytes.Clone(value)
	return nil
}

// NewHistory returns an empty ledger of the given incarnation, signed by a key
// of its own. Two of one incarnation are forks as soon as they have entries.
func NewHistory(t testing.TB, incarnation byte) *History {
	t.Helper()
	s, err := ledger.NewSigner(bytes.Repeat([]byte{incarnation}, 32), ledger.Origin([16]byte{incarnation}))
	if err != nil {
		t.Fatal(err)
	}
	h := &History{t: t, signer: s, rows: make(rows)}
	if err := ledger.Create(h.rows); err != nil {
		t.Fatal(err)
	}
	return h
}

// Fork returns another History, of the same ledger and with the same entries.
func (h *History) Fork(t testing.TB) *History {
	return &History{t: t, signer: h.signer, rows: maps.Clone(h.rows)}
}

// Grow appends n entries as one group and returns the size then.
func (h *History) Grow(n int) uint64 {
	h.t.Helper()
	g, err := ledger.Append(h.rows, stated, slices.Repeat([]*receipt.Statement{&statement}, n))
	if err != nil {
		h.t.Fatal(err)
	}
	return g.Head.Size
}

// GrowKnown is Grow with salts that are the same in every History, so that two
// processes can have the same one.
func (h *History) GrowKnown(n int) uint64 {
	h.t.Helper()
	head, err := ledger.ReadHead(h.rows)
	if err != nil {
		h.t.Fatal(err)
	}
	encoded, err := statement.Encode()
	if err != nil {
		h.t.Fatal(err)
	}
	entries := make([]ledger.Entry, n)
	for i := range entries {
		salt := make([]byte, receipt.SaltSize)
		binary.BigEndian.PutUint64(salt, head.Size+uint64(i))
		entries[i] = ledger.Entry{Salt: salt, Statement: encoded, TreeSize: head.Size + uint64(n)}
	}
	if head, err = ledger.Replay(h.rows, entries); err != nil {
		h.t.Fatal(err)
	}
	return head.Size
}

var stated = time.UnixMilli(1_700_000_000_000)

var statement = receipt.Statement{
	Kind: receipt.HoldReleased, Time: stated, Tenant: "acme", Scope: receipt.ScopeTenant, Hold: "case-7",
}

// Object returns the object of the entries [from, size).
func (h *History) Object(from, size uint64) ledger.Object {
	h.t.Helper()
	o := ledger.Object{From: from, Size: size}
	for i := from; i < size; i++ {
		e, err := ledger.ReadEntry(h.rows, i)
		if err != nil {
			h.t.Fatal(err)
		}
		o.Entries = append(o.Entries, e)
	}
	root, err := ledger.RootAt(h.rows, size)
	if err != nil {
		h.t.Fatal(err)
	}
	if o.Checkpoint, err = h.signer.Checkpoint(size, root); err != nil {
		h.t.Fatal(err)
	}
	return o
}
