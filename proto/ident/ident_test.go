package ident_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"lethe/proto/ident"
)

type namedID string
type namedBytes []byte

func TestNames(t *testing.T) {
	for _, f := range []struct {
		field   string
		check   func(string) error
		longest int
	}{
		{"tenant", ident.Tenant, 128},
		{"class", ident.Class, 64},
		{"reason", ident.Reason, 64},
		{"hold_id", ident.HoldID, 64},
	} {
		for _, good := range []string{"a", "0", ".", "_", "-", "acme-corp_2.eu", strings.Repeat("z", f.longest)} {
			if err := f.check(good); err != nil {
				t.Errorf("%s %q: %v", f.field, good, err)
			}
		}
		bad := []string{"", strings.Repeat("z", f.longest+1), " a", "a ", "a\n", "a\x00", "é", "a/b", "a:b", "\xff", "a*"}
		for c := byte('A'); c <= 'Z'; c++ {
			bad = append(bad, string(c))
		}
		for _, s := range bad {
			err := f.check(s)
			var e *ident.Error
			if !errors.Is(err, ident.ErrInvalid) || !errors.As(err, &e) || e.Field != f.field {
				t.Errorf("%s %q: got %v", f.field, s, err)
			}
		}
	}
}

// Every byte is either in the documented alphabet or refused.
func TestNameAlphabet(t *testing.T) {
	for c := range 256 {
		want := strings.IndexByte("abcdefghijklmnopqrstuvwxyz0123456789._-", byte(c)) >= 0
		if got := ident.Tenant(string([]byte{byte(c)})) == nil; got != want {
			t.Errorf("byte %#02x: accepted %v, want %v", c, got, want)
		}
	}
}

func TestTexts(t *testing.T) {
	good := []string{"a", "12", "012", "12 ", " ", "Ünï", "e\u0301", "\u00e9", "a/b:c", "\n", "\U0001F600", "\ufffd", "\ufeffx"}
	bad := []string{"", "\x00", "a\x00b", "\xff", "a\xc3", "\xed\xa0\x80", "\xc0\x80"}
	for _, f := range []struct {
		field   string
		checks  []func(string) error
		longest int
	}{
		{"subject_id", []func(string) error{
			ident.Subject[string],
			func(s string) error { return ident.Subject([]byte(s)) },
			func(s string) error { return ident.Subject(namedID(s)) },
			func(s string) error { return ident.Subject(namedBytes(s)) },
		}, 1024},
		{"request_id", []func(string) error{ident.RequestID}, 128},
	} {
		for i, check := range f.checks {
			for _, s := range append(good, strings.Repeat("x", f.longest)) {
				if err := check(s); err != nil {
					t.Errorf("%s form %d: %q refused: %v", f.field, i, s, err)
				}
			}
			// The limit counts bytes, not characters.
			for _, s := range append(bad, strings.Repeat("x", f.longest+1), strings.Repeat("é", f.longest/2+1)) {
				err := check(s)
				var e *ident.Error
				if !errors.Is(err, ident.ErrInvalid) || !errors.As(err, &e) || e.Field != f.field {
					t.Errorf("%s form %d: %q: got %v", f.field, i, s, err)
				}
			}
		}
	}
}

// An error must not carry the value that was refused.
func TestErrorsHoldNoValue(t *testing.T) {
	const secret = "zq9-MARKER"
	for _, err := range []error{
		ident.Tenant(secret), ident.Class(secret), ident.Reason(secret), ident.HoldID(secret),
		ident.Subject(secret + "\x00"), ident.Subject([]byte(secret + "\xff")), ident.RequestID(secret + "\x00"),
	} {
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("error is %q", err)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	id := []byte("subject-1234")
	if n := testing.AllocsPerRun(100, func() {
		if ident.Tenant("acme") != nil || ident.Subject("subject-1234") != nil || ident.Subject(id) != nil || ident.Class("trace") != nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzSubject(f *testing.F) {
	f.Add([]byte("a"))
	f.Add([]byte("\x00"))
	f.Add([]byte("\xed\xa0\x80"))
	f.Fuzz(func(t *testing.T, b []byte) {
		want := len(b) > 0 && len(b) <= 1024 && utf8.Valid(b) && !strings.Contains(string(b), "\x00")
		if got := ident.Subject(b) == nil; got != want {
			t.Fatalf("bytes accepted %v, want %v", got, want)
		}
		if got := ident.Subject(string(b)) == nil; got != want {
			t.Fatalf("string accepted %v, want %v", got, want)
		}
	})
}
