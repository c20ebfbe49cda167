package ledger_test

import (
	"context"
	"testing"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

// An entry that was damaged in the store does not get to the anchor, which a
// restore would replay it from.
func TestDamagedEntryIsNotPut(t *testing.T) {
	for what, push := range map[string]func(*ledger.Keeper, context.Context) error{
		"Check": (*ledger.Keeper).Check, "Advance": (*ledger.Keeper).Advance, "Rebuild": (*ledger.Keeper).Rebuild,
	} {
		s, m, k := initialised(t)
		s.add(3)
		if what == "Rebuild" {
			m = anchortest.NewMemory()
			k = newKeeper(t, s, m)
		}
		before := m.Puts()
		other := newStore(t)
		other.add(5)
		key := "Ls\x00\x00\x00\x00\x00\x00\x00\x03"
		s.r[key] = other.r[key]
		wantErr(t, what, push(k, t.Context()), ledger.ErrDamaged)
		wantErr(t, "Err after "+what, k.Err(), ledger.ErrDamaged)
		if m.Puts() != before {
			t.Errorf("%s put something", what)
		}
	}
}

// Nothing is covered for a store that lost what was just put, as one that failed
// over to a copy that lagged, or has something else there.
func TestStoreReplacedDuringPut(t *testing.T) {
	for what, c := range map[string]struct {
		add  int
		want error
	}{"behind": {0, ledger.ErrBehind}, "another": {3, ledger.ErrForked}} {
		s, m, k := initialised(t)
		old := s.backup()
		s.add(3)
		m.Inject = func(_ context.Context, op string) anchortest.Fault {
			if op == "put" {
				s.restore(old)
				if c.add > 0 {
					s.add(c.add)
				}
			}
			return anchortest.None
		}
		wantErr(t, what, k.Advance(t.Context()), c.want)
		wantErr(t, "Err, "+what, k.Err(), c.want)
		if n := k.Anchored(); n != 2 {
			t.Errorf("%s: %d entries are covered", what, n)
		}
	}
}

// What reads back is verified, unless it is what was put.
func TestPutReadsBackEdited(t *testing.T) {
	for what, c := range map[string]struct {
		edit func(o *ledger.Object)
		want error
	}{
		"another signature": {func(o *ledger.Object) {
			k, err := receipt.ParseCheckpoint(o.Checkpoint)
			must(t, "ParseCheckpoint", err)
			o.Checkpoint, err = signer(t, 9).Checkpoint(k.Size, k.Root)
			must(t, "Checkpoint", err)
		}, ledger.ErrForked},
		"another root": {func(o *ledger.Object) {
			var err error
			o.Checkpoint, err = signer(t, 1).Checkpoint(o.Size, [32]byte{1})
			must(t, "Checkpoint", err)
		}, ledger.ErrForked},
		"another statement": {func(o *ledger.Object) { o.Entries[0].Statement = statement(t, 8) }, ledger.ErrAnchorDamaged},
		"another salt":      {func(o *ledger.Object) { o.Entries[2].Salt = make([]byte, receipt.SaltSize) }, ledger.ErrAnchorDamaged},
	} {
		s, m, k := initialised(t)
		s.add(3)
		m.Inject = func(_ context.Context, op string) anchortest.Fault {
			if op == "get" {
				m.Edit(5, func(b []byte) []byte {
					o, err := ledger.DecodeObject(b)
					must(t, "Decode", err)
					c.edit(&o)
					b, err = o.Encode()
					must(t, "Encode", err)
					return b
				})
			}
			return anchortest.None
		}
		wantErr(t, what, k.Advance(t.Context()), c.want)
		if n := k.Anchored(); n != 2 {
			t.Errorf("%s: %d entries are covered", what, n)
		}
	}
}
