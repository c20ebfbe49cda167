// Package ident says which identifiers Lethe accepts. The client and keyd
// both ask it, so that what one refuses the other refuses too.
//
// Identifiers are compared byte for byte: nothing here folds case, trims or
// normalises. The subjects "12", "012", "12 " and the NFC and NFD spellings of
// one name are therefore different subjects.
package ident

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Longest identifiers, in bytes.
const (
	MaxTenant    = 128
	MaxSubject   = 1024
	MaxClass     = 64
	MaxRequestID = 128
	MaxReason    = 64
	MaxHoldID    = 64
)

// ErrInvalid is what every error of this package is, for errors.Is.
var ErrInvalid = errors.New("invalid identifier")

// Error says which field is wrong and what is asked of it. It never holds the
// value: a subject id must not reach a log through an error.
type Error struct {
	// Field is the name of the request's field: "tenant", "subject_id",
	// "class", "request_id", "reason" or "hold_id".
	Field string
	// Rule is what the field must be, for a person to read.
	Rule string
}

func (e *Error) Error() string { return "invalid " + e.Field + ": must be " + e.Rule }

// Is reports whether target is ErrInvalid.
func (e *Error) Is(target error) bool { return target == ErrInvalid }

// Tenant accepts 1 to 128 bytes of [a-z0-9._-].
func Tenant(s string) error { return name("tenant", s, MaxTenant) }

// Class accepts 1 to 64 bytes of [a-z0-9._-].
func Class(s string) error { return name("class", s, MaxClass) }

// Reason accepts a code of 1 to 64 bytes of [a-z0-9._-], such as "gdpr-art17".
func Reason(s string) error { return name("reason", s, MaxReason) }

// HoldID accepts 1 to 64 bytes of [a-z0-9._-].
func HoldID(s string) error { return name("hold_id", s, MaxHoldID) }

// Subject accepts 1 to 1024 bytes of valid UTF-8 without NUL.
func Subject[T ~string | ~[]byte](id T) error { return text("subject_id", id, MaxSubject) }

// RequestID accepts 1 to 128 bytes of valid UTF-8 without NUL.
func RequestID(s string) error { return text("request_id", s, MaxRequestID) }

func name(field, s string, longest int) error {
	ok := len(s) >= 1 && len(s) <= longest
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-'
	}
	if ok {
		return nil
	}
	return &Error{Field: field, Rule: fmt.Sprintf("1 to %d bytes of [a-z0-9._-]", longest)}
}

func text[T ~string | ~[]byte](field string, v T, longest int) error {
	ok := len(v) >= 1 && len(v) <= longest
	if ok {
		switch v := any(v).(type) {
		case string:
			ok = utf8.ValidString(v) && strings.IndexByte(v, 0) < 0
		case []byte:
			ok = utf8.Valid(v) && bytes.IndexByte(v, 0) < 0
		default:
			// A named string or byte slice; the conversion copies.
			s := string(v.(T))
			ok = utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
		}
	}
	if ok {
		return nil
	}
	return &Error{Field: field, Rule: fmt.Sprintf("1 to %d bytes of valid UTF-8 without NUL", longest)}
}
