package ledger_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"reflect"
	"testing"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/ledger"
)

func TestObjectEncoding(t *testing.T) {
	h := anchortest.NewHistory(t, 1)
	h.Grow(2)
	h.Grow(5)
	o := h.Object(1, 6)
	b, err := o.Encode()
	must(t, "Encode", err)
	got, err := ledger.DecodeObject(bytes.Clone(b))
	must(t, "Decode", err)
	if !reflect.DeepEqual(got, o) {
		t.Fatalf("got %+v, want %+v", got, o)
	}
	for i := range b {
		if _, err := ledger.DecodeObject(b[:i]); !errors.Is(err, ledger.ErrAnchorDamaged) {
			t.Fatalf("cut at %d: %v", i, err)
		}
		for bit := range 8 {
			b[i] ^= 1 << bit
			if _, err := ledger.DecodeObject(b); !errors.Is(err, ledger.ErrAnchorDamaged) {
				t.Fatalf("byte %d, bit %d: %v", i, bit, err)
			}
			b[i] ^= 1 << bit
		}
	}
}

func TestSameHistory(t *testing.T) {
	h, fork := anchortest.NewHistory(t, 1), anchortest.NewHistory(t, 1)
	h.Grow(5)
	fork.Grow(5)
	if !ledger.SameHistory(h.Object(0, 5), h.Object(3, 5)) {
		t.Error("a history is not the same cut elsewhere")
	}
	if ledger.SameHistory(h.Object(0, 5), h.Object(0, 4)) || ledger.SameHistory(h.Object(0, 5), fork.Object(0, 5)) ||
		ledger.SameHistory(ledger.Object{}, ledger.Object{}) {
		t.Error("different histories are the same")
	}
}

func FuzzDecodeObject(f *testing.F) {
	h := anchortest.NewHistory(f, 1)
	h.GrowKnown(5)
	for _, c := range [][2]uint64{{0, 1}, {0, 5}, {3, 5}} {
		b, err := h.Object(c[0], c[1]).Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, true)
		f.Add(b[:len(b)-32], false)
	}
	f.Fuzz(func(t *testing.T, b []byte, whole bool) {
		if !whole { // with a good checksum, so that the parser is reached
			b = withChecksum(b)
		}
		o, err := ledger.DecodeObject(bytes.Clone(b))
		if err != nil {
			if !errors.Is(err, ledger.ErrAnchorDamaged) {
				t.Fatalf("untyped: %v", err)
			}
			return
		}
		again, err := o.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%q became %q, %v", b, again, err)
		}
	})
}

// withChecksum ends b as an object ends.
func withChecksum(b []byte) []byte {
	sum := sha256.Sum256(b)
	return append(bytes.Clone(b), sum[:]...)
}
