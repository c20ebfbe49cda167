package wrap

import (
	"bytes"
	"errors"
	"testing"
)

func TestWrap(t *testing.T) {
	w, err := New(bytes.Repeat([]byte{7}, KeySize))
	if err != nil {
		t.Fatal(err)
	}
	key, identity := bytes.Repeat([]byte{9}, 32), []byte("identity")
	wrapped, err := w.Wrap(key, identity)
	if err != nil {
		t.Fatal(err)
	}
	if len(wrapped) != len(key)+Overhead {
		t.Errorf("wrapped key has %d bytes, want %d", len(wrapped), len(key)+Overhead)
	}
	if got, err := w.Unwrap(wrapped, identity); err != nil || !bytes.Equal(got, key) {
		t.Errorf("Unwrap = %x, %v", got, err)
	}
	if _, err := w.Unwrap(wrapped, []byte("another")); !errors.Is(err, ErrUnwrap) {
		t.Errorf("another identity: %v", err)
	}
	other, err := New(bytes.Repeat([]byte{8}, KeySize))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Unwrap(wrapped, identity); !errors.Is(err, ErrUnwrap) {
		t.Errorf("another key: %v", err)
	}
	for i := range wrapped {
		bent := bytes.Clone(wrapped)
		bent[i] ^= 1
		if _, err := w.Unwrap(bent, identity); !errors.Is(err, ErrUnwrap) {
			t.Errorf("byte %d changed: %v", i, err)
		}
	}
}

func TestNewRefusesOtherSizes(t *testing.T) {
	for _, n := range []int{0, 16, 31, 33} {
		if _, err := New(make([]byte, n)); err == nil {
			t.Errorf("a key of %d bytes was taken", n)
		}
	}
}

func BenchmarkUnwrap(b *testing.B) {
	w, err := New(make([]byte, KeySize))
	if err != nil {
		b.Fatal(err)
	}
	wrapped, err := w.Wrap(make([]byte, 32), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.Unwrap(wrapped, nil); err != nil {
			b.Fatal(err)
		}
	}
}
