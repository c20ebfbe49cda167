package receipt

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestStrings compares the encoding of strings with that of encoding/json,
// which differs from RFC 8785 in U+2028 and U+2029 alone, and reads it back.
func TestStrings(t *testing.T) {
	check := func(t interface{ Fatalf(string, ...any) }, s string) {
		got := appendString(nil, s)
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(s); err != nil {
			t.Fatalf("%v", err)
		}
		want := strings.NewReplacer(`\u2028`, "\u2028", `\u2029`, "\u2029").Replace(strings.TrimSuffix(b.String(), "\n"))
		if string(got) != want && !strings.Contains(s, `\u202`) {
			t.Fatalf("%q: got %s, want %s", s, got, want)
		}
		c := &scanner{rest: append(got, "rest"...)}
		back := c.string()
		odd := strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 && !strings.ContainsRune("\b\t\n\f\r", r) })
		if c.failed != odd {
			t.Fatalf("%q: read back: failed %v", s, c.failed)
		}
		if !odd && (back != s || string(c.rest) != "rest") {
			t.Fatalf("%q: read back %q, and %q was left", s, back, c.rest)
		}
	}
	for r := range rune(0x80) {
		check(t, "a"+string(r)+"b")
		check(t, string(r))
	}
	rapid.Check(t, func(t *rapid.T) { check(t, rapid.String().Draw(t, "s")) })
	rapid.Check(t, func(t *rapid.T) {
		check(t, rapid.StringOf(rapid.SampledFrom([]rune(`a"\n—`+"\n\u2028"))).Draw(t, "s"))
	})
}

// TestScannerStops: whatever it is given, it neither panics nor loops.
func TestScannerStops(t *testing.T) {
	for _, s := range []string{``, `"`, `"\`, `"\"`, `"a\`, `"\u0001"`, "\"\n\"", `x`, `{`, `{{`, `}`, `{"`, `{"}`, `{"}"`, `{]`} {
		c := &scanner{rest: []byte(s)}
		if v := c.string(); !c.failed {
			t.Errorf("string of %q: %q", s, v)
		}
		c = &scanner{rest: []byte(s)}
		if v := c.object(); !c.failed {
			t.Errorf("object of %q: %q", s, v)
		}
	}
	c := &scanner{rest: []byte(`{"}":{"{":"\"}"}}rest`)}
	if v := c.object(); c.failed || string(v) != `{"}":{"{":"\"}"}}` || string(c.rest) != "rest" {
		t.Errorf("object %q, %q was left", v, c.rest)
	}
}
