package receipt_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lethe/sdk/receipt"
)

func TestNextKey(t *testing.T) {
	if k := newTestKey(t, testOrigin, 2); k.vkey != nextKey {
		t.Fatalf("the next key is %s", k.vkey)
	}
}

// normal is what Parse returns for s: lists in order.
func normal(s receipt.Statement) *receipt.Statement {
	s.Classes, s.DeadKeys = slices.Clone(s.Classes), slices.Clone(s.DeadKeys)
	slices.SortFunc(s.Classes, func(a, b receipt.Class) int { return int(a.Number) - int(b.Number) })
	slices.SortFunc(s.DeadKeys, func(a, b receipt.DeadKey) int { return int(a.ClassNumber) - int(b.ClassNumber) })
	return &s
}

func TestStatementRoundTrip(t *testing.T) {
	seen := make(map[receipt.Kind]bool)
	for _, s := range examples() {
		seen[s.Kind] = true
		b, err := s.Encode()
		if err != nil {
			t.Fatalf("%s: %v", s.Kind, err)
		}
		got, err := receipt.ParseStatement(b)
		if err != nil {
			t.Fatalf("%s: %v\n%s", s.Kind, err, b)
		}
		if want := normal(s); !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n got %+v\nwant %+v", s.Kind, got, want)
		}
		// encoding/json sorts the keys of a map, which in ASCII is the order
		// of RFC 8785: an independent opinion on what is canonical.
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		var again bytes.Buffer
		enc := json.NewEncoder(&again)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(m); err != nil {
			t.Fatal(err)
		}
		if again.String() != string(b)+"\n" {
			t.Errorf("%s: not canonical:\n%s%s", s.Kind, again.String(), b)
		}
	}
	if len(seen) != 17 {
		t.Errorf("examples of %d kinds", len(seen))
	}
}

func TestStatementBytes(t *testing.T) {
	s := destroyed()
	b, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	want := `{"anchor":"file","classes":[{"name":"trace","number":"1"},{"name":"memory","number":"3"}],` +
		`"dead_keys":[{"class_number":"1","generation":"1","key_id":"101112131415161718191a1b1c1d1e1f"},` +
		`{"class_number":"3","generation":"2","key_id":"404142434445464748494a4b4c4d4e4f"}],` +
		`"drained_by":"2026-03-01T12:01:05.250Z","epoch":"4","existed":"yes","final_basis":"local-root-file",` +
		`"final_by":"2026-03-15T12:00:00.250Z","generation":"2","handle":"a00102030405060708090a0b0c0d0e0f",` +
		`"kind":"destroyed","reason":"gdpr-art17","request":"` + strings.Repeat("07", 32) + `","scope":"person",` +
		`"tenant":"acme","time":"2026-03-01T12:00:00.250Z","type":"lethe.statement/v1"}`
	if string(b) != want {
		t.Fatalf("got  %s\nwant %s", b, want)
	}
}

// statementVector is one case of proto/vectors/receipts/statements.json.
type statementVector struct {
	Name      string `json:"name"`
	Statement string `json:"statement"`
	Result    string `json:"result"`
}

// statementVectors has an example of every kind, and edits of a good statement.
func statementVectors(t *testing.T) []statementVector {
	var out []statementVector
	for _, s := range examples() {
		b, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, statementVector{Name: string(s.Kind), Statement: string(b), Result: "parsed"})
	}
	for _, principal := range []string{"agent.example.org", "spiffe://example.org/" + strings.Repeat("a", 2027)} {
		s := destroyed()
		s.Principal = principal
		b, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, statementVector{Name: "destroyed by a principal of " + strconv.Itoa(len(principal)), Statement: string(b), Result: "parsed"})
	}
	s := destroyed()
	good, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, old, new string }{
		{"unknown field", `"epoch":"4",`, `"epoch":"4","epochs":"4",`},
		{"unknown kind", `"kind":"destroyed"`, `"kind":"destroyed2"`},
		{"another kind with these fields", `"kind":"destroyed"`, `"kind":"scheduled"`},
		{"unknown type", `statement/v1`, `statement/v2`},
		{"no type", `,"type":"lethe.statement/v1"`, ``},
		{"no kind", `"kind":"destroyed",`, ``},
		{"no time", `"time":"2026-03-01T12:00:00.250Z",`, ``},
		{"no tenant", `"tenant":"acme",`, ``},
		{"no handle", `"handle":"a00102030405060708090a0b0c0d0e0f",`, ``},
		{"no generation", `"generation":"2",`, ``},
		{"no drained_by", `"drained_by":"2026-03-01T12:01:05.250Z",`, ``},
		{"final_by without its basis", `"final_basis":"local-root-file",`, ``},
		{"a field of another kind", `"handle":`, `"hold":"case","handle":`},
		{"duplicate field", `"epoch":"4",`, `"epoch":"4","epoch":"4",`},
		{"fields out of order", `"anchor":"file","classes":`, `"classes":`},
		{"case of a name", `"epoch"`, `"Epoch"`},
		{"a space", `"epoch":"4"`, `"epoch": "4"`},
		{"a trailing newline", `v1"}`, "v1\"}\n"},
		{"trailing bytes", `v1"}`, `v1"}{}`},
		{"an escape", `"acme"`, `"\u0061cme"`},
		{"an escaped slash", `statement/v1`, `statement\/v1`},
		{"a number", `"epoch":"4"`, `"epoch":4`},
		{"a float", `"epoch":"4"`, `"epoch":4.0`},
		{"a null", `"epoch":"4"`, `"epoch":null`},
		{"an object", `"epoch":"4"`, `"epoch":{}`},
		{"an array for a string", `"tenant":"acme"`, `"tenant":["acme"]`},
		{"an empty string", `"anchor":"file"`, `"anchor":""`},
		{"leading zero", `"epoch":"4"`, `"epoch":"04"`},
		{"a sign", `"epoch":"4"`, `"epoch":"+4"`},
		{"out of range", `"epoch":"4"`, `"epoch":"4294967296"`},
		{"negative", `"epoch":"4"`, `"epoch":"-4"`},
		{"upper-case hex", `a00102030405060708090a0b0c0d0e0f`, `A00102030405060708090a0b0c0d0e0f`},
		{"short handle", `a00102030405060708090a0b0c0d0e0f`, `a00102030405060708090a0b0c0d0e`},
		{"odd hex", `a00102030405060708090a0b0c0d0e0f`, `a00102030405060708090a0b0c0d0e0`},
		{"two decimals", `12:00:00.250Z`, `12:00:00.25Z`},
		{"six decimals", `12:00:00.250Z`, `12:00:00.250000Z`},
		{"a comma", `12:00:00.250Z`, `12:00:00,250Z`},
		{"an offset", `12:00:00.250Z`, `12:00:00.250+00:00`},
		{"a leap second", `12:00:00.250Z`, `12:00:60.250Z`},
		{"drained before it was stated", `"drained_by":"2026-03-01T12:01:05.250Z"`, `"drained_by":"2026-03-01T11:01:05.250Z"`},
		{"upper-case tenant", `"acme"`, `"Acme"`},
		{"a tenant beyond ASCII", `"acme"`, `"acmé"`},
		{"an empty principal", `"reason":`, `"principal":"","reason":`},
		{"a principal beyond ASCII", `"reason":`, `"principal":"é","reason":`},
		{"a long principal", `"reason":`, `"principal":"` + strings.Repeat("a", 2049) + `","reason":`},
		{"a principal out of order", `"reason":"gdpr-art17",`, `"reason":"gdpr-art17","principal":"a",`},
		{"a reason of prose", `"gdpr-art17"`, `"asked nicely"`},
		{"a long reason", `"gdpr-art17"`, `"` + strings.Repeat("a", 65) + `"`},
		{"unknown scope", `"person"`, `"persons"`},
		{"scope of a tenant with a handle", `"scope":"person"`, `"scope":"tenant"`},
		{"neither yes nor no", `"existed":"yes"`, `"existed":"true"`},
		{"dead keys that did not exist", `"existed":"yes"`, `"existed":"no"`},
		{"classes out of order", `{"name":"trace","number":"1"},{"name":"memory","number":"3"}`, `{"name":"memory","number":"3"},{"name":"trace","number":"1"}`},
		{"a class twice", `{"name":"memory","number":"3"}`, `{"name":"memory","number":"1"}`},
		{"class zero", `"name":"trace","number":"1"`, `"name":"trace","number":"0"`},
		{"class 65536", `"name":"memory","number":"3"`, `"name":"memory","number":"65536"`},
		{"a class with more", `"number":"3"}`, `"number":"3","x":"y"}`},
		{"a class with less", `"name":"memory",`, ``},
		{"empty classes", `[{"name":"trace","number":"1"},{"name":"memory","number":"3"}]`, `[]`},
		{"a dead key twice", `{"class_number":"3","generation":"2","key_id":"404142434445464748494a4b4c4d4e4f"}`, `{"class_number":"1","generation":"1","key_id":"101112131415161718191a1b1c1d1e1f"}`},
		{"a short key id", `404142434445464748494a4b4c4d4e4f`, `404142434445464748494a4b4c4d4e`},
	} {
		if strings.Count(string(good), c.old) == 0 {
			t.Fatalf("%s: nothing to edit", c.name)
		}
		out = append(out, statementVector{c.name, strings.Replace(string(good), c.old, c.new, 1), "malformed"})
	}
	for _, b := range []string{"", "null", "{}", "[]", `""`, "{"} {
		out = append(out, statementVector{"only " + b, b, "malformed"})
	}
	return append(out, statementVector{"cut off", string(good[:len(good)-1]), "malformed"})
}

func TestStatementVectors(t *testing.T) {
	made := statementVectors(t)
	if *update {
		writeVectors(t, "statements.json", made)
	}
	var kept []statementVector
	readVectors(t, "statements.json", &kept)
	if !reflect.DeepEqual(kept, made) {
		t.Error("statements.json is not what the test makes")
	}
	for _, c := range kept {
		_, err := receipt.ParseStatement([]byte(c.Statement))
		if errors.Is(err, receipt.ErrMalformed) != (c.Result == "malformed") || (err == nil) != (c.Result == "parsed") {
			t.Errorf("%s: got %v, want %s", c.Name, err, c.Result)
		}
	}
	// What JSON vectors cannot hold.
	s := destroyed()
	good, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []string{
		strings.Replace(string(good), `"acme"`, "\"acm\xff\"", 1),
		strings.Repeat("[", 50_000),
		string(good) + strings.Repeat(" ", receipt.MaxStatement),
	} {
		if _, err := receipt.ParseStatement([]byte(b)); !errors.Is(err, receipt.ErrMalformed) {
			t.Errorf("%.20q: got %v", b, err)
		}
	}
}

func TestEncodeRefusals(t *testing.T) {
	for name, spoil := range map[string]func(*receipt.Statement){
		"no kind":                func(s *receipt.Statement) { s.Kind = "" },
		"no time":                func(s *receipt.Statement) { s.Time = time.Time{} },
		"microseconds":           func(s *receipt.Statement) { s.Time = s.Time.Add(time.Microsecond) },
		"year 10000":             func(s *receipt.Statement) { s.FinalBy = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
		"short handle":           func(s *receipt.Statement) { s.Handle = s.Handle[:15] },
		"a subject id as handle": func(s *receipt.Statement) { s.Handle = []byte("alice@example.org") },
		"odd request":            func(s *receipt.Statement) { s.Request = s.Request[:20] },
		"a field of another":     func(s *receipt.Statement) { s.Hold = "case-7" },
		"too many dead keys":     func(s *receipt.Statement) { s.DeadKeys = make([]receipt.DeadKey, receipt.MaxListed+1) },
		"too many classes":       func(s *receipt.Statement) { s.Classes = make([]receipt.Class, receipt.MaxListed+1) },
		"index too great":        func(s *receipt.Statement) { s.Of = index(1 << 60) },
	} {
		s := destroyed()
		spoil(&s)
		_, err := s.Encode()
		if !errors.Is(err, receipt.ErrMalformed) {
			t.Errorf("%s: got %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "alice") {
			t.Errorf("%s: the error repeats what it was given", name)
		}
	}
}

func TestLargestStatement(t *testing.T) {
	s := destroyed()
	s.Tenant, s.Classes, s.DeadKeys = strings.Repeat("t", 128), nil, nil
	for i := range receipt.MaxListed {
		s.Classes = append(s.Classes, receipt.Class{Name: strings.Repeat("c", 64), Number: uint32(65_535 - i)})
		s.DeadKeys = append(s.DeadKeys, receipt.DeadKey{ClassNumber: uint32(65_535 - i), Generation: 1<<32 - 1, KeyID: keyID(byte(i))})
	}
	b, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := receipt.ParseStatement(b); err != nil {
		t.Fatal(err)
	}
}

// TestEncodeDoesNotReorder holds that Encode leaves its receiver alone.
func TestEncodeDoesNotReorder(t *testing.T) {
	s := destroyed()
	if _, err := s.Encode(); err != nil {
		t.Fatal(err)
	}
	if want := destroyed(); !reflect.DeepEqual(s, want) {
		t.Fatal("Encode changed the statement")
	}
}

// Any mixture of fields of the examples either is refused or comes back.
func TestStatementProperty(t *testing.T) {
	all := examples()
	rapid.Check(t, func(t *rapid.T) {
		base := rapid.SampledFrom(all).Draw(t, "base")
		v := reflect.ValueOf(&base).Elem()
		for range rapid.IntRange(0, 4).Draw(t, "edits") {
			other := reflect.ValueOf(rapid.SampledFrom(all).Draw(t, "other"))
			i := rapid.IntRange(0, v.NumField()-1).Draw(t, "field")
			v.Field(i).Set(other.Field(i))
		}
		b, err := base.Encode()
		if err != nil {
			if !errors.Is(err, receipt.ErrMalformed) {
				t.Fatalf("Encode: %v", err)
			}
			return
		}
		got, err := receipt.ParseStatement(b)
		if err != nil {
			t.Fatalf("%v: %s", err, b)
		}
		if want := normal(base); !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, want %+v", got, want)
		}
	})
}

func FuzzParseStatement(f *testing.F) {
	for _, s := range examples() {
		b, err := s.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := receipt.ParseStatement(b)
		if err != nil {
			if !errors.Is(err, receipt.ErrMalformed) {
				t.Fatalf("untyped: %v", err)
			}
			return
		}
		again, err := s.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%q became %q, %v", b, again, err)
		}
	})
}

// The handle in an example is not that of anybody; no statement has room for a name.
func TestNoRoomForNames(t *testing.T) {
	for _, s := range examples() {
		s.Tenant = "alice@example.org"
		if _, err := s.Encode(); !errors.Is(err, receipt.ErrMalformed) {
			t.Errorf("%s: an e-mail address passed", s.Kind)
		}
	}
}

func readVectors(t *testing.T, name string, into any) {
	t.Helper()
	b, err := os.ReadFile("../../proto/vectors/receipts/" + name)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}
