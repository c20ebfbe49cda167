package main

import (
	"bytes"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"
)

// search is a search for secrets in whatever form they might have been written.
type search struct {
	needles []needle
	// Totals, to show that something was searched.
	places int
	bytes  int64
}

type needle struct {
	of, form string
	bytes    []byte
}

// add looks for secret, which what names. It is longer than what stands
// anywhere by chance in any form.
func (s *search) add(what string, secret []byte) {
	for form, b := range forms(secret) {
		s.needles = append(s.needles, needle{what, form, b})
	}
}

// forms are the ways in which bytes are written by mistake.
func forms(b []byte) map[string][]byte {
	f := map[string][]byte{
		"raw":             b,
		"hex":             []byte(hex.EncodeToString(b)),
		"HEX":             bytes.ToUpper([]byte(hex.EncodeToString(b))),
		"reversed":        reversed(b),
		"percent, all":    percent(b, false),
		"PERCENT, all":    percent(b, true),
		"base32, aligned": []byte(strings.TrimRight(base32.StdEncoding.EncodeToString(b[:len(b)/5*5]), "=")),
		"decimal list":    decimals(b, ","),
		"decimals of Go":  decimals(b, " "),
		"hex with colons": colons(b),
		"SHA-256":         sum(sha256.Sum256(b)),
		"SHA-256 in hex":  []byte(fmt.Sprintf("%x", sha256.Sum256(b))),
		"SHA-1":           sum(sha1.Sum(b)),
		"SHA-1 in hex":    []byte(fmt.Sprintf("%x", sha1.Sum(b))),
		"MD5 in hex":      []byte(fmt.Sprintf("%x", md5.Sum(b))),
	}
	for offset := range 3 {
		// Encoded after offset other bytes; what depends on the neighbours is
		// cut away.
		padded := append(make([]byte, offset), b...)
		for name, e := range map[string]*base64.Encoding{"base64": base64.RawStdEncoding, "base64url": base64.RawURLEncoding} {
			text := e.EncodeToString(padded)
			from, to := 0, len(text)
			if offset > 0 {
				from = offset + 1
			}
			if len(padded)%3 != 0 {
				to--
			}
			f[fmt.Sprintf("%s at %d", name, offset)] = []byte(text[from:to])
		}
	}
	if utf8.Valid(b) {
		text := string(b)
		f["percent, path"] = []byte(url.PathEscape(text))
		f["percent, query"] = []byte(url.QueryEscape(text))
		f["UTF-16LE"], f["UTF-16BE"] = utf16Bytes(text)
		if quoted, err := json.Marshal(text); err == nil {
			f["JSON"] = quoted[1 : len(quoted)-1]
		}
		ascii := strconv.QuoteToASCII(text)
		f["quoted"] = []byte(ascii[1 : len(ascii)-1])
		f["upper case"] = []byte(strings.ToUpper(text))
		f["lower case"] = []byte(strings.ToLower(text))
	}
	return f
}

func sum[T [16]byte | [20]byte | [32]byte](s T) []byte {
	switch s := any(s).(type) {
	case [16]byte:
		return s[:]
	case [20]byte:
		return s[:]
	case [32]byte:
		return s[:]
	}
	return nil
}

func reversed(b []byte) []byte {
	r := make([]byte, len(b))
	for i, c := range b {
		r[len(b)-1-i] = c
	}
	return r
}

func percent(b []byte, upper bool) []byte {
	format := "%%%02x"
	if upper {
		format = "%%%02X"
	}
	var out []byte
	for _, c := range b {
		out = fmt.Appendf(out, format, c)
	}
	return out
}

func decimals(b []byte, separator string) []byte {
	words := make([]string, len(b))
	for i, c := range b {
		words[i] = strconv.Itoa(int(c))
	}
	return []byte(strings.Join(words, separator))
}

func colons(b []byte) []byte {
	words := make([]string, len(b))
	for i, c := range b {
		words[i] = hex.EncodeToString([]byte{c})
	}
	return []byte(strings.Join(words, ":"))
}

func utf16Bytes(text string) (le, be []byte) {
	for _, u := range utf16.Encode([]rune(text)) {
		le = append(le, byte(u), byte(u>>8))
		be = append(be, byte(u>>8), byte(u))
	}
	return le, be
}

// in returns what is found in b.
func (s *search) in(b []byte) (found []string) {
	s.places++
	s.bytes += int64(len(b))
	for _, n := range s.needles {
		if bytes.Contains(b, n.bytes) {
			found = append(found, n.of+" ("+n.form+")")
		}
	}
	return found
}

// below searches every file below dir, its name too, and calls report for each
// in which something is found.
func (s *search) below(t testing.TB, dir string, report func(place string, found []string)) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, dir)
		if found := s.in([]byte(name)); found != nil {
			report("the name "+name, found)
		}
		if !e.Type().IsRegular() {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		// Sized for what is to come, with nothing but zeros at the end, of
		// which UTF-16 may need one.
		if written := len(bytes.TrimRight(b, "\x00")); written < len(b) {
			b = b[:written+1]
		}
		if found := s.in(b); found != nil {
			report(name, found)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestTheSearchFinds plants a secret in every form, with all sorts of
// neighbours, in a file among others.
func TestTheSearchFinds(t *testing.T) {
	for _, secret := range []string{"mara.lind@example.org", "Íñigo D'Arcy-Mbeki 高橋", "one more / two % three"} {
		var s search
		s.add("secret", []byte(secret))
		for offset := range 7 {
			before := random(offset)
			written := forms([]byte(secret))
			for _, e := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
				whole := append(append(bytes.Clone(before), secret...), random(5)...)
				written[fmt.Sprint("base64 in the middle ", e == base64.StdEncoding)] = []byte(e.EncodeToString(whole))
			}
			for form, b := range written {
				dir := tempDir(t)
				if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				planted := append(append(random(1000+offset), b...), make([]byte, 5000)...)
				if err := os.WriteFile(filepath.Join(dir, "planted"), planted, 0o600); err != nil {
					t.Fatal(err)
				}
				n := 0
				s.below(t, dir, func(place string, _ []string) {
					if place == "/planted" {
						n++
					}
				})
				if n != 1 {
					t.Errorf("%q is not found as %s after %d bytes", secret, form, offset)
				}
			}
		}
		if found := s.in(random(1 << 20)); found != nil {
			t.Errorf("%q is found in random bytes: %v", secret, found)
		}
	}
}
