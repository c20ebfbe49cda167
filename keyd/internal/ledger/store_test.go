package ledger_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

var errNoRow = errors.New("no such row")

type rows map[string][]byte

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

// store is a store of the ledger's rows with serial transactions.
type store struct {
	t  testing.TB
	mu sync.RWMutex
	r  rows
}

func newStore(t testing.TB) *store {
	s := &store{t: t, r: make(rows)}
	if err := ledger.Create(s.r); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *store) View(ctx context.Context, fn func(ledger.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return fn(s.r)
}

func (s *store) backup() rows {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.r)
}

func (s *store) restore(r rows) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r = maps.Clone(r)
}

func (s *store) clone() *store { return &store{t: s.t, r: s.backup()} }

// add appends n statements as one group.
func (s *store) add(n int) ledger.Head {
	s.mu.Lock()
	defer s.mu.Unlock()
	g, err := ledger.Append(s.r, at(len(s.r)), statements(n))
	if err != nil {
		s.t.Fatal(err)
	}
	return g.Head
}

func (s *store) head() ledger.Head {
	s.mu.RLock()
	defer s.mu.RUnlock()
	h, err := ledger.ReadHead(s.r)
	if err != nil {
		s.t.Fatal(err)
	}
	return h
}

func at(seconds int) time.Time {
	return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).Add(time.Duration(seconds) * time.Second)
}

func statements(n int) []*receipt.Statement {
	out := make([]*receipt.Statement, n)
	for i := range out {
		out[i] = &receipt.Statement{
			Kind: receipt.Destroyed, Time: at(i), Tenant: "acme", Handle: bytes.Repeat([]byte{byte(i)}, 16),
			Scope: receipt.ScopePerson, Generation: 1, Existed: receipt.ExistedYes, Reason: "gdpr-art17",
			DeadKeys:  []receipt.DeadKey{{ClassNumber: 1, Generation: 1, KeyID: [16]byte{byte(i)}}},
			DrainedBy: at(i + 60), Epoch: 1, Anchor: "memory",
		}
	}
	return out
}

// statement is the encoding of the nth of them.
func statement(t testing.TB, n int) []byte {
	t.Helper()
	b, err := statements(n + 1)[n].Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func signer(t testing.TB, seed byte) *ledger.Signer {
	t.Helper()
	s, err := ledger.NewSigner(bytes.Repeat([]byte{seed}, 32), ledger.Origin([16]byte{0xab}))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func pinned(t testing.TB, s *ledger.Signer) *receipt.Keys {
	t.Helper()
	k, err := receipt.PinKeys(s.VerifierKey())
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: got %v, want %v", what, err, want)
	}
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func name(format string, args ...any) string { return fmt.Sprintf(format, args...) }
