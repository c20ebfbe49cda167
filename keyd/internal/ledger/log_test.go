package ledger_test

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

// TestAgainstTlog appends groups of many sizes and compares every root, every
// receipt and every consistency proof with what package tlog makes of the same
// leaves kept in a slice.
func TestAgainstTlog(t *testing.T) {
	s, sign := newStore(t), signer(t, 1)
	keys := pinned(t, sign)
	var hashes []tlog.Hash
	reader := tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		out := make([]tlog.Hash, len(indexes))
		for i, x := range indexes {
			out[i] = hashes[x]
		}
		return out, nil
	})
	var size uint64
	var sizes []uint64
	for _, n := range []int{1, 1, 2, 3, 1, 8, 5, 16, 1, 7, 20} {
		g, err := ledger.Append(s.r, at(len(s.r)), statements(n))
		must(t, "Append", err)
		h := g.Head
		for i := g.First; i < h.Size; i++ {
			got, err := g.Receipt(sign, i)
			must(t, "a group's Receipt", err)
			want, err := ledger.Receipt(s.r, sign, i)
			must(t, "Receipt", err)
			if !bytes.Equal(got, want) {
				t.Fatalf("entry %d: the group's receipt is another than the store's", i)
			}
		}
		for _, i := range []uint64{g.First - 1, h.Size} {
			_, err := g.Receipt(sign, i)
			wantErr(t, "Receipt of an entry that is not of the group", err, ledger.ErrSize)
		}
		for i := size; i < h.Size; i++ {
			e, err := ledger.ReadEntry(s.r, i)
			must(t, "ReadEntry", err)
			if e.TreeSize != h.Size {
				t.Fatalf("entry %d: tree size %d, want %d", i, e.TreeSize, h.Size)
			}
			stored, err := tlog.StoredHashesForRecordHash(int64(i), receipt.LeafHash(e.Salt, e.Statement), reader)
			must(t, "StoredHashes", err)
			hashes = append(hashes, stored...)
		}
		size = h.Size
		sizes = append(sizes, size)
		want, err := tlog.TreeHash(int64(size), reader)
		must(t, "TreeHash", err)
		if h.Root != want {
			t.Fatalf("root of size %d differs", size)
		}
	}
	for n := uint64(0); n <= size; n++ {
		want, err := tlog.TreeHash(int64(n), reader)
		must(t, "TreeHash", err)
		got, err := ledger.RootAt(s.r, n)
		must(t, "RootAt", err)
		if got != want {
			t.Fatalf("RootAt(%d) differs", n)
		}
	}
	for i := range size {
		b, err := ledger.Receipt(s.r, sign, i)
		must(t, "Receipt", err)
		v, err := receipt.Verify(b, keys)
		must(t, "Verify", err)
		if v.Entries[0].Index != i || !slices.Contains(sizes, v.Entries[0].Checkpoint.Size) {
			t.Fatalf("receipt of %d is of %d in a tree of %d", i, v.Entries[0].Index, v.Entries[0].Checkpoint.Size)
		}
		again, err := ledger.Receipt(s.r, sign, i)
		must(t, "Receipt", err)
		if !bytes.Equal(again, b) {
			t.Fatalf("receipt of %d came out otherwise the second time", i)
		}
		_, err = receipt.Verify(b, pinned(t, signer(t, 2)))
		wantErr(t, "Verify with another key", err, receipt.ErrSignature)
		forged, err := ledger.Receipt(s.r, signer(t, 2), i)
		must(t, "Receipt", err)
		_, err = receipt.Verify(forged, keys)
		wantErr(t, "Verify of a receipt signed with another key", err, receipt.ErrSignature)
	}
	checkpoint := func(n uint64) []byte {
		root, err := ledger.RootAt(s.r, n)
		must(t, "RootAt", err)
		c, err := sign.Checkpoint(n, root)
		must(t, "Checkpoint", err)
		return c
	}
	for n := uint64(0); n <= size; n++ {
		for m := range n + 1 {
			p, err := ledger.Consistency(s.r, m, n)
			must(t, "Consistency", err)
			must(t, name("from %d to %d", m, n), receipt.VerifyConsistency(keys, checkpoint(m), checkpoint(n), p))
		}
	}
}

func TestReceiptOfLaterStages(t *testing.T) {
	s, sign := newStore(t), signer(t, 1)
	s.add(5)
	later := func(epoch uint32) uint64 {
		sanitised := receipt.Statement{Kind: receipt.Sanitised, Time: at(100), Epoch: epoch}
		g, err := ledger.Append(s.r, at(100), []*receipt.Statement{&sanitised})
		must(t, "Append", err)
		return g.First
	}
	n, other := later(1), later(2)
	r, err := ledger.Receipt(s.r, sign, 3, n)
	must(t, "Receipt", err)
	v, err := receipt.Verify(r, pinned(t, sign))
	must(t, "Verify", err)
	if st := v.Stages(); !st.Sanitised.Equal(at(100)) || !st.Final.IsZero() {
		t.Fatalf("stages %+v", st)
	}
	r, err = ledger.Receipt(s.r, sign, 3, other)
	must(t, "Receipt", err)
	_, err = receipt.Verify(r, pinned(t, sign))
	wantErr(t, "Verify of stages that do not belong together", err, receipt.ErrMismatch)
}

// Two entries with one statement have different salts, so different leaves.
func TestSaltsDiffer(t *testing.T) {
	s := newStore(t)
	st := statements(1)[0]
	_, err := ledger.Append(s.r, at(0), []*receipt.Statement{st, st})
	must(t, "Append", err)
	a, err := ledger.ReadEntry(s.r, 0)
	must(t, "ReadEntry", err)
	b, err := ledger.ReadEntry(s.r, 1)
	must(t, "ReadEntry", err)
	if bytes.Equal(a.Salt, b.Salt) || len(a.Salt) != receipt.SaltSize {
		t.Fatal("salts are not drawn")
	}
}

func TestHeadTimeNeverGoesBack(t *testing.T) {
	s := newStore(t)
	if h := s.head(); !h.Time.IsZero() || h.Size != 0 {
		t.Fatalf("head of nothing: %+v", h)
	}
	for _, c := range []struct{ now, want int }{{100, 100}, {50, 100}, {100, 100}, {101, 101}} {
		g, err := ledger.Append(s.r, at(c.now), statements(1))
		must(t, "Append", err)
		if !g.Head.Time.Equal(at(c.want)) || s.head() != g.Head {
			t.Fatalf("at %d: head %+v, read %+v", c.now, g.Head, s.head())
		}
	}
}

func TestAppendRefuses(t *testing.T) {
	s := newStore(t)
	s.add(3)
	before := s.backup()
	good := statements(1)[0]
	for what, list := range map[string][]*receipt.Statement{
		"nothing":              nil,
		"an empty statement":   {{}},
		"the second malformed": {good, {Kind: receipt.Destroyed, Time: at(1)}},
	} {
		if _, err := ledger.Append(s.r, at(1), list); err == nil {
			t.Errorf("%s: appended", what)
		}
		if !maps.EqualFunc(s.r, before, bytes.Equal) {
			t.Fatalf("%s: something was written", what)
		}
	}
	if _, err := ledger.Append(make(rows), at(1), []*receipt.Statement{good}); !errors.Is(err, errNoRow) {
		t.Errorf("without a head: %v", err)
	}
}

func TestBeyond(t *testing.T) {
	s := newStore(t)
	s.add(5)
	_, err := ledger.ReadEntry(s.r, 5)
	wantErr(t, "ReadEntry", err, errNoRow)
	_, err = ledger.Receipt(s.r, signer(t, 1), 5)
	wantErr(t, "Receipt", err, errNoRow)
	_, err = ledger.RootAt(s.r, 6)
	wantErr(t, "RootAt", err, ledger.ErrSize)
	_, err = ledger.Consistency(s.r, 2, 6)
	wantErr(t, "Consistency", err, ledger.ErrSize)
	_, err = ledger.Consistency(s.r, 5, 4)
	wantErr(t, "Consistency backwards", err, ledger.ErrSize)
}

// No key is a prefix of another, all begin with Prefix, and no row is bigger
// than it must be.
func TestRows(t *testing.T) {
	s := newStore(t)
	s.add(300)
	keys := slices.Sorted(maps.Keys(s.r))
	for i, k := range keys {
		if k[0] != ledger.Prefix {
			t.Fatalf("key %q", k)
		}
		if i > 0 && strings.HasPrefix(k, keys[i-1]) {
			t.Fatalf("key %q is a prefix of %q", keys[i-1], k)
		}
	}
	want := 1 + 300 + int(tlog.StoredHashCount(300))
	if len(keys) != want {
		t.Fatalf("%d rows, want %d", len(keys), want)
	}
}

// A changed row is noticed rather than proven from.
func TestDamagedRows(t *testing.T) {
	s, sign := newStore(t), signer(t, 1)
	s.add(6)
	good := s.backup()
	for _, k := range slices.Sorted(maps.Keys(good)) {
		s.restore(good)
		v := bytes.Clone(good[k])
		v[len(v)/2] ^= 4
		s.r[k] = v
		wrong := false
		for i := range uint64(6) {
			b, err := ledger.Receipt(s.r, sign, i)
			if err != nil {
				wrong = true
				continue
			}
			// What comes out verifies under its own signature, and the root of
			// it is the one that was there before, or else Check would tell.
			if _, err := receipt.Verify(b, pinned(t, sign)); err != nil {
				t.Fatalf("row %q: a receipt that does not verify: %v", k, err)
			}
		}
		h, err := ledger.ReadHead(s.r)
		if err != nil {
			continue
		}
		root, err := ledger.RootAt(s.r, min(h.Size, 6))
		if wrong || err != nil || root != h.Root || h.Size != 6 {
			continue
		}
		// Inner hashes that this tree's root does not need, and the time.
		if k[1] != 'h' && k != "LH" {
			t.Errorf("row %q: nobody noticed", k)
		}
	}
}

func TestReplay(t *testing.T) {
	a := newStore(t)
	for _, n := range []int{3, 1, 4, 9} {
		a.add(n)
	}
	entries := func(from, to uint64) (out []ledger.Entry) {
		for i := from; i < to; i++ {
			e, err := ledger.ReadEntry(a.r, i)
			must(t, "ReadEntry", err)
			out = append(out, e)
		}
		return out
	}
	b := newStore(t)
	_, err := ledger.Replay(b.r, entries(0, 5))
	must(t, "Replay", err)
	h, err := ledger.Replay(b.r, entries(5, 17))
	must(t, "Replay", err)
	if h.Size != 17 || h.Root != a.head().Root {
		t.Fatal("another tree came out")
	}
	sign := signer(t, 1)
	for i := range uint64(17) {
		want, err := ledger.Receipt(a.r, sign, i)
		must(t, "Receipt", err)
		got, err := ledger.Receipt(b.r, sign, i)
		must(t, "Receipt of what was replayed", err)
		if !bytes.Equal(got, want) {
			t.Fatalf("another receipt of %d", i)
		}
	}
	for what, list := range map[string][]ledger.Entry{
		"a short salt":        {{Salt: make([]byte, 31), Statement: statement(t, 0), TreeSize: 18}},
		"no statement":        {{Salt: make([]byte, 32), TreeSize: 18}},
		"an impossible group": {{Salt: make([]byte, 32), Statement: statement(t, 0), TreeSize: 17}},
	} {
		before := b.backup()
		if _, err := ledger.Replay(b.r, list); err == nil || !maps.EqualFunc(b.r, before, bytes.Equal) {
			t.Errorf("%s: %v, or something was written", what, err)
		}
	}
}

func TestSigner(t *testing.T) {
	if _, err := ledger.NewSigner(make([]byte, 31), "lethe/x"); err == nil {
		t.Error("a short seed")
	}
	for _, origin := range []string{"", "a b", "a+b", "a\nb"} {
		if _, err := ledger.NewSigner(make([]byte, 32), origin); err == nil {
			t.Errorf("origin %q", origin)
		}
	}
	s := signer(t, 1)
	if want := "lethe/ab000000000000000000000000000000"; s.Origin() != want {
		t.Errorf("origin %q", s.Origin())
	}
	if !strings.HasPrefix(s.VerifierKey(), s.Origin()+"+") {
		t.Errorf("verifier key %q", s.VerifierKey())
	}
	c, err := s.Checkpoint(7, [32]byte{1})
	must(t, "Checkpoint", err)
	got, err := pinned(t, s).Open(c)
	must(t, "Open", err)
	if (got != receipt.Checkpoint{Origin: s.Origin(), Size: 7, Root: [32]byte{1}}) {
		t.Errorf("checkpoint %+v", got)
	}
}

// A checkpoint is of the tree that it was asked for, whichever was asked for
// before, and belongs to whoever asked.
func TestCheckpointsAreKeptApart(t *testing.T) {
	s := signer(t, 1)
	fresh := func(size uint64, root byte) string {
		c, err := signer(t, 1).Checkpoint(size, [32]byte{root})
		must(t, "Checkpoint", err)
		return string(c)
	}
	for _, x := range []struct {
		size uint64
		root byte
	}{{7, 1}, {7, 1}, {7, 2}, {8, 2}, {7, 1}} {
		c, err := s.Checkpoint(x.size, [32]byte{x.root})
		must(t, "Checkpoint", err)
		if want := fresh(x.size, x.root); string(c) != want {
			t.Errorf("of size %d, root %d:\n%s\nwant\n%s", x.size, x.root, c, want)
		}
		clear(c)
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, n := range []int{1, 64} {
		b.Run(name("group=%d", n), func(b *testing.B) {
			s := newStore(b)
			list := statements(n)
			for b.Loop() {
				if _, err := ledger.Append(s.r, at(0), list); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
