package envelope

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

func TestSizes(t *testing.T) {
	none, some := Context{}, bound(t, "a", "b")
	for _, c := range []struct {
		policy                    Policy
		n, header, plain, context int
	}{
		{Single, 1, 65, 105, 137},
		{All, 2, 81, 121, 153},
		{Any, 2, 225, 265, 297},
		{Any, MaxRecipients, MaxHeaderSize, MaxHeaderSize + 40, MaxHeaderSize + 72},
	} {
		s, _ := pair(t, c.policy, c.n)
		if got := sizeOf(c.policy, c.n); got != c.header || s.Overhead(none) != c.plain || s.Overhead(some) != c.context {
			t.Errorf("%s of %d: header %d, overhead %d and %d", c.policy, c.n, got, s.Overhead(none), s.Overhead(some))
		}
	}
	if MaxHeaderSize != 5681 {
		t.Error(MaxHeaderSize)
	}
}

// headers draws well-formed headers.
func headers() *rapid.Generator[*Header] {
	return rapid.Custom(func(t *rapid.T) *Header {
		h := &Header{
			Form:   rapid.SampledFrom([]Form{OneShot, Stream}).Draw(t, "form"),
			Policy: rapid.SampledFrom([]Policy{Single, All, Any}).Draw(t, "policy"),
			Bound:  rapid.Bool().Draw(t, "bound"),
			Class:  rapid.Uint16().Draw(t, "class"),
			Bucket: rapid.Uint64().Draw(t, "bucket"),
		}
		n := 1
		if h.Policy != Single {
			n = rapid.IntRange(2, MaxRecipients).Draw(t, "recipients")
		}
		id := rapid.SliceOfN(rapid.Byte(), KeyIDSize-1, KeyIDSize-1)
		for i := range n {
			h.Recipients = append(h.Recipients, KeyID(append([]byte{byte(i)}, id.Draw(t, "id")...)))
		}
		copy(h.Commitment[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "commitment"))
		if h.Policy == Any {
			h.Wrapped = make([][WrappedKeySize]byte, n)
			for i := range h.Wrapped {
				copy(h.Wrapped[i][:], rapid.SliceOfN(rapid.Byte(), 0, WrappedKeySize).Draw(t, "wrapped"))
			}
		}
		return h
	})
}

func TestHeaderRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := headers().Draw(t, "header")
		b, err := h.AppendBinary([]byte("x"))
		if err != nil || len(b) != 1+h.Size() {
			t.Fatal(err)
		}
		b = b[1:]
		tail := rapid.SliceOfN(rapid.Byte(), 0, 8).Draw(t, "tail")
		again, n, err := ParseHeader(append(bytes.Clone(b), tail...))
		if err != nil || n != len(b) || !reflect.DeepEqual(h, again) {
			t.Fatal(n, err)
		}
		r := bytes.NewReader(append(bytes.Clone(b), tail...))
		again, err = ReadHeader(iotest.OneByteReader(r))
		if err != nil || !reflect.DeepEqual(h, again) || r.Len() != len(tail) {
			t.Fatal("ReadHeader", r.Len(), err)
		}
		cut := rapid.IntRange(0, len(b)-1).Draw(t, "cut")
		want := ErrTruncated
		if cut == 0 {
			want = ErrNotSealed
		}
		if _, _, err := ParseHeader(b[:cut]); err != want {
			t.Fatalf("cut to %d: %v", cut, err)
		}
		if _, err := ReadHeader(bytes.NewReader(b[:cut])); err != want {
			t.Fatalf("cut to %d: ReadHeader: %v", cut, err)
		}
	})
}

func TestHeaderReadError(t *testing.T) {
	s, _ := pair(t, Any, 2)
	blob := must[[]byte](t)(s.Append(nil, nil, Context{}))
	for _, cut := range []int{0, 1, 16, 17, 100} {
		_, err := ReadHeader(io.MultiReader(bytes.NewReader(blob[:cut]), iotest.ErrReader(io.ErrUnexpectedEOF)))
		if err != io.ErrUnexpectedEOF {
			t.Errorf("%d bytes: %v", cut, err)
		}
	}
}

func TestHeaderRefusesToEncode(t *testing.T) {
	good := func() *Header {
		return &Header{Form: OneShot, Policy: Any, Recipients: []KeyID{{1}, {2}}, Wrapped: make([][WrappedKeySize]byte, 2)}
	}
	if _, err := good().AppendBinary(nil); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(h *Header){
		"form":          func(h *Header) { h.Form = 3 },
		"policy":        func(h *Header) { h.Policy = 0 },
		"order":         func(h *Header) { h.Recipients[0] = KeyID{3} },
		"twice":         func(h *Header) { h.Recipients[0] = KeyID{2} },
		"none":          func(h *Header) { h.Recipients, h.Wrapped = nil, nil },
		"one":           func(h *Header) { h.Recipients, h.Wrapped = h.Recipients[:1], h.Wrapped[:1] },
		"many":          func(h *Header) { h.Recipients = make([]KeyID, 65) },
		"wrapped keys":  func(h *Header) { h.Wrapped = h.Wrapped[:1] },
		"single of two": func(h *Header) { h.Policy, h.Wrapped = Single, nil },
		"wrapped, ALL":  func(h *Header) { h.Policy = All },
	} {
		h := good()
		spoil(h)
		if b, err := h.AppendBinary([]byte("x")); err != ErrCorrupt || string(b) != "x" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestIsSealed(t *testing.T) {
	s, _ := pair(t, Single, 1)
	blob := must[[]byte](t)(s.Append(nil, nil, Context{}))
	if !IsSealed(blob) || IsSealed(blob[:3]) || IsSealed(nil) || IsSealed([]byte(`{"a":1}`)) {
		t.Fatal("IsSealed")
	}
}

func TestRecipientsRefused(t *testing.T) {
	keys := randomKeys(65)
	other := *keys[1]
	otherClass, otherBucket, twice := other, other, *keys[0]
	otherClass.Class++
	otherBucket.Bucket++
	for name, c := range map[string]struct {
		policy Policy
		keys   []*Key
	}{
		"none":        {All, nil},
		"one":         {Any, keys[:1]},
		"65":          {All, keys},
		"twice":       {All, []*Key{keys[0], &twice}},
		"class":       {Any, []*Key{keys[0], &otherClass}},
		"bucket":      {All, []*Key{keys[0], &otherBucket}},
		"nil":         {All, []*Key{keys[0], nil}},
		"single":      {Single, keys[:2]},
		"no policy":   {0, keys[:2]},
		"policy four": {4, keys[:2]},
	} {
		if _, err := NewMultiSealer(c.policy, c.keys, Options{}); err != ErrInvalidRecipients {
			t.Errorf("sealer, %s: %v", name, err)
		}
		if name == "one" {
			continue // an opener may hold one key of an ANY blob
		}
		if _, err := NewMultiOpener(c.policy, c.keys, Options{}); err != ErrInvalidRecipients {
			t.Errorf("opener, %s: %v", name, err)
		}
	}
	if _, err := NewSealer(nil, Options{}); err != ErrInvalidRecipients {
		t.Error(err)
	}
	if _, err := NewOpener(nil, Options{}); err != ErrInvalidRecipients {
		t.Error(err)
	}
}

// The order in which keys are given is of no matter.
func TestOrderOfKeys(t *testing.T) {
	for _, policy := range []Policy{All, Any} {
		keys := randomKeys(5)
		s := sealer(t, policy, keys, Options{})
		blob := must[[]byte](t)(s.Append(nil, []byte("x"), Context{}))
		for i, j := 0, len(keys)-1; i < j; i, j = i+1, j-1 {
			keys[i], keys[j] = keys[j], keys[i]
		}
		if got, err := opener(t, policy, keys, Options{}).Append(nil, blob, Context{}); err != nil || string(got) != "x" {
			t.Errorf("%s: %v", policy, err)
		}
	}
}

// Whoever holds one key of an ANY blob opens it, and learns which.
func TestAnyTellsWhoOpened(t *testing.T) {
	keys := must[[]*Key](t)(ordered(randomKeys(4), 2))
	s := sealer(t, Any, keys, Options{})
	blob := must[[]byte](t)(s.Append(nil, []byte("x"), Context{}))
	stream := sealStream(t, s, []byte("x"), Context{}, 1)
	for held, want := range map[int][]*Key{0: {keys[2], keys[0], keys[3]}, 1: keys[1:2], 2: {keys[3], keys[2]}, 3: {randomKey(7, 1700000000), keys[3]}} {
		o := opener(t, Any, want, Options{})
		got, by, err := o.AppendBy(nil, blob, Context{})
		if err != nil || string(got) != "x" || by != keys[held].ID {
			t.Errorf("%d: %s, %v", held, by, err)
		}
		r := must[*Reader](t)(o.NewReader(t.Context(), bytes.NewReader(stream), Context{}, StreamOptions{}))
		if r.OpenedBy() != keys[held].ID {
			t.Errorf("%d: stream by %s", held, r.OpenedBy())
		}
		a := must[*ReaderAt](t)(o.NewReaderAt(bytes.NewReader(stream), int64(len(stream)), Context{}))
		if a.OpenedBy() != keys[held].ID {
			t.Errorf("%d: stream at random by %s", held, a.OpenedBy())
		}
	}
}

func TestContext(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	many := make([]Pair, 17)
	for i := range many {
		many[i].Name = fmt.Sprint(i)
	}
	for name, pairs := range map[string][]Pair{
		"no name":    {{"", "v"}},
		"long name":  {{long(65), "v"}},
		"long value": {{"n", long(1025)}},
		"twice":      {{"n", "1"}, {"m", "2"}, {"n", "1"}},
		"17":         many,
	} {
		if c, err := NewContext(pairs...); err != ErrInvalidContext || !c.IsZero() {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewContext(append(many[:15:15], Pair{long(64), long(1024)})...); err != nil {
		t.Error(err)
	}
	if c, err := NewContext(); err != nil || !c.IsZero() {
		t.Error("no pairs", err)
	}
}

// Two contexts have one encoding only if they are the same pairs.
func TestContextEncoding(t *testing.T) {
	text := rapid.StringOfN(rapid.RuneFrom([]rune("ab\x00")), 0, 3, -1)
	draw := rapid.Custom(func(t *rapid.T) map[string]string {
		return rapid.MapOfN(text.Filter(func(s string) bool { return s != "" }), text, 1, 4).Draw(t, "pairs")
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := draw.Draw(t, "a"), draw.Draw(t, "b")
		encode := func(m map[string]string) []byte {
			var pairs []Pair
			for n, v := range m {
				pairs = append(pairs, Pair{n, v})
			}
			c, err := NewContext(pairs...)
			if err != nil {
				t.Fatal(err)
			}
			return c.encoded
		}
		if !bytes.Equal(encode(a), encode(a)) || bytes.Equal(encode(a), encode(b)) != reflect.DeepEqual(a, b) {
			t.Fatal(a, b)
		}
	})
}

// A key prints, in every way, without its secret.
func TestKeyDoesNotPrint(t *testing.T) {
	k := Key{ID: KeyID{1}, Class: 2, Bucket: 3}
	for i := range k.Secret {
		k.Secret[i] = 0xAB
	}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x", "%X", "%q", "%d"} {
		for _, v := range []any{k, &k, []Key{k}, struct{ K Key }{k}} {
			s := strings.ToLower(fmt.Sprintf(format, v))
			if strings.Contains(s, "abab") || strings.Contains(s, "171 171") || strings.Contains(s, "0xab") {
				t.Errorf("%s of %T shows the secret", format, v)
			}
		}
	}
	b, err := json.Marshal(&k)
	if err != nil || bytes.Contains(b, []byte("171,171")) {
		t.Error("JSON shows the secret")
	}
	k.Wipe()
	if k.Secret != [KeySize]byte{} {
		t.Error("Wipe left the secret")
	}
}

// Whoever imports this package compiles the standard library and nothing else.
func TestDependencies(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(out)); len(got) != 1 || !strings.HasSuffix(got[0], "/envelope") {
		t.Errorf("depends on %q", got)
	}
}

func TestErrorsAreDistinct(t *testing.T) {
	all := []error{
		ErrNotSealed, ErrUnsupportedVersion, ErrTruncated, ErrCorrupt, ErrWrongContext, ErrWrongForm,
		ErrWrongRecipient, ErrMissingKeys, ErrWiped, ErrTooLarge, ErrInvalidContext, ErrInvalidRecipients, ErrClosed,
	}
	for i, a := range all {
		for j, b := range all {
			if (i == j) != errors.Is(a, b) {
				t.Errorf("%v is %v", a, b)
			}
		}
	}
	if !errors.Is(&MissingKeysError{}, ErrMissingKeys) {
		t.Error("MissingKeysError")
	}
}
