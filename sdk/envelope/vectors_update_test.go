package envelope

import (
	"bytes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/cryptotest"
)

// maxInline is the size up to which a blob is in the JSON, not in a file.
const maxInline = 8 << 10

// TestVectorsUpdate makes the vectors anew, with -update. The randomness is a
// fixed sequence, so that the same version of Go makes the same vectors.
func TestVectorsUpdate(t *testing.T) {
	if !*update {
		return
	}
	cryptotest.SetGlobalRandom(t, 1)
	g := &generator{t: t}
	g.derivations()
	g.blobs()
	g.refusals()
}

type generator struct {
	t       *testing.T
	made    map[string]blobVector
	refused []refusedVector
}

func (g *generator) bytes(n int) hexBytes {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func (g *generator) keys(n int) []vectorKey {
	keys := make([]vectorKey, n)
	for i := range keys {
		keys[i] = vectorKey{g.bytes(KeyIDSize), g.bytes(KeySize)}
	}
	slices.SortFunc(keys, func(a, b vectorKey) int { return bytes.Compare(a.ID, b.ID) })
	return keys
}

func fileName(name string) string {
	return strings.ReplaceAll(strings.ReplaceAll(name, ",", ""), " ", "-") + ".bin"
}

func pairs(kv ...string) (p []vectorPair) {
	for i := 0; i < len(kv); i += 2 {
		p = append(p, vectorPair{hexBytes(kv[i]), hexBytes(kv[i+1])})
	}
	return p
}

func (g *generator) derivations() {
	d := new(derivations)
	for _, c := range []struct {
		label string
		parts []hexBytes
	}{
		{"ab", []hexBytes{hexBytes("c")}},
		{"ab", nil},
		{"a", []hexBytes{hexBytes("bc")}},
		{"lethe/v1/blob", []hexBytes{hexBytes("acme"), {0, 7}, {0, 0, 0, 0, 0x65, 0x53, 0xf1, 0x00}, g.bytes(16)}},
		{"lethe/v1/blob", []hexBytes{{}, {}}},
	} {
		d.Info = append(d.Info, struct {
			Label string     `json:"label"`
			Parts []hexBytes `json:"parts"`
			Info  hexBytes   `json:"info"`
		}{Label: c.label, Parts: c.parts})
	}
	for _, v := range []hierarchyVector{
		{Tenant: "acme", Class: 1, Bucket: 1700006400},
		{Tenant: "a", Class: 65535, Bucket: 0},
	} {
		v.KeyID, v.BucketKey, v.DEK = g.bytes(16), g.bytes(32), g.bytes(32)
		d.Hierarchy = append(d.Hierarchy, v)
	}
	for _, n := range []int{2, 3, MaxRecipients} {
		d.All = append(d.All, allVector{Class: 7, Bucket: 1700006400, Keys: g.keys(n)})
	}
	d.Wrap = append(d.Wrap, struct {
		BlobKey hexBytes `json:"blob_key"`
		WrapKey hexBytes `json:"wrap_key"`
	}{BlobKey: g.bytes(32)})
	d.Content = append(d.Content, contentVector{ContentKey: g.bytes(32)}, contentVector{ContentKey: make(hexBytes, 32)})
	for _, p := range [][]vectorPair{
		pairs("thread", "42"),
		pairs("b", "2", "a", "1", "ab", ""),
		pairs("\xff\x00", string(bytes.Repeat([]byte("v"), MaxContextValue)), string(bytes.Repeat([]byte("n"), MaxContextName)), "\x00"),
	} {
		d.Context = append(d.Context, struct {
			Pairs   []vectorPair `json:"pairs"`
			Encoded hexBytes     `json:"encoded"`
		}{Pairs: p})
	}
	d.derive(g.t)
	writeVectors(g.t, "derivation.json", d)
}

const vectorBucket = 1700006400

func (g *generator) blobs() {
	g.made = map[string]blobVector{}
	var all []blobVector
	add := func(v blobVector, held []vectorKey) {
		blob := g.seal(v.Expect, v.PlaintextSize)
		if held != nil {
			v.Expect.Keys = held
		}
		v.Blob = blob
		if len(blob) > maxInline {
			v.Blob, v.File = nil, fileName(v.Name)
			writeFile(g.t, v.File, blob)
		}
		_, by, err := v.Expect.open(g.t, blob)
		if err != nil {
			g.t.Fatal(v.Name, err)
		}
		v.OpenedBy = by[:]
		v.fill(g.t, blob)
		g.made[v.Name] = v
		all = append(all, v)
	}
	for _, form := range []string{"one-shot", "stream"} {
		for _, c := range []struct {
			policy string
			n      int
		}{{"single", 1}, {"all", 2}, {"all", 3}, {"all", MaxRecipients}, {"any", 2}, {"any", 3}, {"any", MaxRecipients}} {
			for _, ctx := range [][]vectorPair{nil, pairs("thread", "42", "checkpoint", "\x00\x01")} {
				keys := g.keys(c.n)
				name := form + ", " + c.policy
				if c.n > 1 {
					name += fmt.Sprintf(" of %d", c.n)
				}
				if ctx != nil {
					name += ", context"
				}
				v := blobVector{Name: name, PlaintextSize: 37, Expect: expectation{
					Form: form, Policy: c.policy, Class: uint16(c.n), Bucket: vectorBucket, Keys: keys, Context: ctx,
				}}
				add(v, nil)
				if c.policy == "any" && c.n == 3 {
					v.Name += ", one key held"
					add(v, keys[1:2])
				}
			}
		}
	}
	for _, c := range []struct {
		form, name string
		size       int
	}{
		{"one-shot", "empty", 0},
		{"one-shot", "1024 bytes", 1024},
		{"stream", "empty", 0},
		{"stream", "1024 bytes", 1024},
		{"stream", "one segment less a byte", segmentPlain - streamHeaderSize - 1},
		{"stream", "one full segment", segmentPlain - streamHeaderSize},
		{"stream", "one segment and a byte", segmentPlain - streamHeaderSize + 1},
		{"stream", "two full segments", 2*segmentPlain - streamHeaderSize},
		{"stream", "four segments", 3*segmentPlain - streamHeaderSize + 100},
	} {
		add(blobVector{Name: c.form + ", single, " + c.name, PlaintextSize: c.size, Expect: expectation{
			Form: c.form, Policy: "single", Class: 1, Bucket: vectorBucket, Keys: g.keys(1),
		}}, nil)
	}
	add(blobVector{Name: "one-shot, single, largest numbers", PlaintextSize: 5, Expect: expectation{
		Form: "one-shot", Policy: "single", Class: 65535, Bucket: 1<<64 - 1, Keys: g.keys(1),
	}}, nil)
	add(blobVector{Name: "one-shot, single, largest context", PlaintextSize: 5, Expect: expectation{
		Form: "one-shot", Policy: "single", Class: 1, Bucket: vectorBucket, Keys: g.keys(1), Context: func() (p []vectorPair) {
			for i := range MaxContextPairs {
				p = append(p, vectorPair{bytes.Repeat([]byte{byte(i)}, MaxContextName), bytes.Repeat([]byte{byte(i)}, 64*i+64)})
			}
			return p
		}(),
	}}, nil)
	writeVectors(g.t, "blobs.json", struct {
		Blobs []blobVector `json:"blobs"`
	}{all})
}

func (g *generator) seal(e expectation, size int) []byte {
	s := sealer(g.t, policies[e.Policy], e.keys(), Options{})
	if e.Form == "stream" {
		return sealStream(g.t, s, pattern(size), e.context(g.t), 1)
	}
	return must[[]byte](g.t)(s.Append(nil, pattern(size), e.context(g.t)))
}

// Edits.
func keep(n int) edit               { return edit{Keep: &n} }
func xor(at int, b ...byte) edit    { return edit{At: &at, Bytes: b} }
func appendix(b ...byte) edit       { return edit{Append: b} }
func moved(from, size, to int) edit { return edit{Copy: &move{from, size, to}} }

func (g *generator) refusals() {
	// from adds a vector that is another one, edited, and opened with what
	// change leaves of the other's expectation.
	from := func(class, base, name string, change func(*expectation), edits ...edit) {
		v, ok := g.made[base]
		if !ok {
			g.t.Fatal(base)
		}
		e := v.Expect
		e.Keys = slices.Clone(e.Keys)
		if change != nil {
			change(&e)
		}
		g.refused = append(g.refused, refusedVector{Name: name, Error: class, Expect: e, From: base, Edits: edits})
	}
	given := func(class, base, name string, blob []byte) {
		r := refusedVector{Name: name, Error: class, Expect: g.made[base].Expect, Blob: (*hexBytes)(&blob)}
		if len(blob) > maxInline {
			r.Blob, r.File = nil, fileName(name)
			writeFile(g.t, r.File, blob)
		}
		g.refused = append(g.refused, r)
	}
	const (
		single  = "one-shot, single"
		withCtx = "one-shot, single, context"
		all3    = "one-shot, all of 3"
		any3    = "one-shot, any of 3"
		anyHeld = "one-shot, any of 3, one key held"
		stream  = "stream, single"
		strCtx  = "stream, single, context"
		strAny  = "stream, any of 3"
		full    = "stream, single, one full segment"
		plus    = "stream, single, one segment and a byte"
		four    = "stream, single, four segments"
	)
	one := sizeOf(Single, 1) // the end of a header for one
	wraps := sizeOf(All, 3)  // the first wrapped key of three
	anyEnd := sizeOf(Any, 3) // the end of a header for any of three
	seg := one + segmentSize // the end of the first full segment
	size := func(base string) int { v := g.made[base]; return len(v.bytes(g.t)) }

	// Steps 1 to 6.
	given("not_sealed", single, "empty", []byte{})
	given("not_sealed", single, "JSON", []byte(`{"messages":[]}`))
	given("not_sealed", single, "MessagePack", []byte{0x82, 0xa1, 'a', 1})
	given("not_sealed", stream, "JSON, as a stream", []byte(`{"messages":[]}`))
	given("not_sealed", stream, "empty, as a stream", []byte{})
	from("not_sealed", single, "magic, first byte", nil, xor(0, 0x80))
	from("not_sealed", single, "magic, last byte", nil, xor(3, 1))
	from("not_sealed", single, "wrong magic that ends early", nil, xor(2, 1), keep(3))
	for _, n := range []int{1, 3, 4} {
		from("truncated", single, fmt.Sprintf("%d bytes", n), nil, keep(n))
	}
	for _, version := range []byte{0, 2, 0xff} {
		from("unsupported_version", single, fmt.Sprintf("version %d", version), nil, xor(4, 1^version))
	}
	from("unsupported_version", single, "version 2, and nothing else", nil, xor(4, 3), keep(5))
	from("unsupported_version", stream, "version 2, as a stream", nil, xor(4, 3))
	from("truncated", single, "5 bytes", nil, keep(5))
	for _, mode := range []byte{0x00, 0x01, 0x10, 0x14, 0x1f, 0x31, 0x41, 0x51, 0x71, 0x80, 0x90, 0xb1, 0xff} {
		from("corrupt", single, fmt.Sprintf("mode %#02x", mode), nil, xor(5, 0x11^mode))
	}
	for _, n := range []int{6, 8, 16} {
		from("truncated", single, fmt.Sprintf("%d bytes", n), nil, keep(n))
	}
	from("corrupt", single, "single of none", nil, xor(16, 1))
	from("corrupt", single, "single of two", nil, xor(16, 3))
	from("corrupt", single, "single of two, and nothing else", nil, xor(16, 3), keep(17))
	from("corrupt", all3, "ALL of none", nil, xor(16, 3))
	from("corrupt", all3, "ALL of one", nil, xor(16, 2))
	from("corrupt", "one-shot, all of 64", "ALL of 65", nil, xor(16, 0x40^0x41))
	from("corrupt", any3, "ANY of one", nil, xor(16, 2))
	from("corrupt", any3, "ANY of 255, and nothing else", nil, xor(16, 0xfc), keep(17))
	for _, n := range []int{17, 32, 33, 64} {
		from("truncated", single, fmt.Sprintf("header cut to %d bytes", n), nil, keep(n))
	}
	from("truncated", any3, "ANY, wrapped keys cut", nil, keep(anyEnd-1))
	from("truncated", stream, "stream, header cut", nil, keep(64))
	from("corrupt", all3, "ALL, ids out of order", nil, moved(17, 16, 33), moved(33, 16, 17))
	from("corrupt", all3, "ALL, an id twice", nil, moved(17, 16, 33))
	from("corrupt", any3, "ANY, ids out of order", nil, moved(33, 16, 49), moved(49, 16, 33))

	// Steps 7 and 8.
	from("wrong_form", single, "one-shot, opened as a stream", func(e *expectation) { e.Form = "stream" })
	from("wrong_form", stream, "stream, opened as one-shot", func(e *expectation) { e.Form = "one-shot" })
	from("wrong_form", single, "form changed", nil, xor(5, 0x30))
	from("wrong_recipient", single, "another class expected", func(e *expectation) { e.Class++ })
	from("wrong_recipient", single, "another bucket expected", func(e *expectation) { e.Bucket++ })
	from("wrong_recipient", single, "another key expected", func(e *expectation) { e.Keys = g.keys(1) })
	from("wrong_recipient", single, "class changed", nil, xor(7, 2))
	from("wrong_recipient", single, "bucket changed", nil, xor(8, 1))
	from("wrong_recipient", single, "key id changed", nil, xor(32, 1))
	from("wrong_recipient", single, "single, opened as ANY", func(e *expectation) { e.Policy = "any" })
	from("wrong_recipient", all3, "ALL, opened as single", func(e *expectation) { e.Policy, e.Keys = "single", e.Keys[:1] })
	from("wrong_recipient", all3, "ALL, opened as ANY", func(e *expectation) { e.Policy = "any" })
	from("wrong_recipient", all3, "ALL, another key expected too", func(e *expectation) { e.Keys = append(e.Keys, g.keys(1)...) })
	from("wrong_recipient", all3, "ALL, one expected key of two", func(e *expectation) { e.Keys = append(e.Keys[:1:1], g.keys(1)...) })
	from("wrong_recipient", all3, "ALL, other keys expected", func(e *expectation) { e.Keys = g.keys(3) })
	from("wrong_recipient", any3, "ANY, opened as single", func(e *expectation) { e.Policy, e.Keys = "single", e.Keys[:1] })
	from("wrong_recipient", any3, "ANY, opened as ALL", func(e *expectation) { e.Policy = "all" })
	from("wrong_recipient", any3, "ANY, other keys expected", func(e *expectation) { e.Keys = g.keys(2) })
	from("wrong_recipient", any3, "ANY, another class expected", func(e *expectation) { e.Class++ })
	from("missing_keys", all3, "ALL, the first key missing", func(e *expectation) { e.Keys = e.Keys[1:] })
	g.refused[len(g.refused)-1].Missing = []hexBytes{g.made[all3].Expect.Keys[0].ID}
	from("missing_keys", "stream, all of 64", "ALL, two of 64 held", func(e *expectation) { e.Keys = e.Keys[10:12] })
	for i, k := range g.made["stream, all of 64"].Expect.Keys {
		if i < 10 || i > 11 {
			r := &g.refused[len(g.refused)-1]
			r.Missing = append(r.Missing, k.ID)
		}
	}

	// Steps 9 and 10.
	from("corrupt", single, "another key under the same id", func(e *expectation) { e.Keys[0].Secret = g.bytes(32) })
	from("corrupt", all3, "ALL, another key under one id", func(e *expectation) { e.Keys[2].Secret = g.bytes(32) })
	from("corrupt", any3, "ANY, another key under the first id", func(e *expectation) { e.Keys[0].Secret = g.bytes(32) })
	from("corrupt", single, "commitment", nil, xor(one-1, 1))
	from("corrupt", any3, "ANY, commitment", nil, xor(wraps-1, 1))
	from("corrupt", any3, "ANY, wrapped key of the first", nil, xor(wraps+40, 1))
	from("corrupt", any3, "ANY, wrapped key of another", nil, xor(anyEnd-1, 1))
	from("corrupt", anyHeld, "ANY, wrapped key of a recipient who is not held", nil, xor(wraps, 1))
	from("corrupt", any3, "ANY, wrapped keys changed places", nil, moved(wraps, 72, wraps+72), moved(wraps+72, 72, wraps))
	from("corrupt", stream, "stream, another key under the same id", func(e *expectation) { e.Keys[0].Secret = g.bytes(32) })
	from("corrupt", stream, "stream, commitment, and nothing else", nil, xor(one-1, 1), keep(one))
	from("corrupt", strAny, "stream, ANY, wrapped key of another", nil, xor(anyEnd-1, 1))
	given("corrupt", single, "commitment to one key, payload under another", g.splitCommitment(single))

	given("corrupt", any3, "ANY, commitment to one content key, another wrapped for the first", g.splitWrap(any3))

	// One-shot, steps 11 to 13.
	from("truncated", single, "header alone", nil, keep(one))
	from("truncated", single, "header and 39 bytes", nil, keep(one+39))
	from("truncated", withCtx, "header, context tag and 39 bytes", nil, keep(one+71))
	from("corrupt", single, "header and 40 bytes", nil, keep(one+40))
	from("truncated", any3, "ANY, header and 39 bytes", nil, keep(anyEnd+39))
	from("corrupt", single, "prefix of the nonce", nil, xor(one, 1))
	from("corrupt", single, "last byte of the nonce", nil, xor(one+23, 1))
	from("corrupt", single, "ciphertext", nil, xor(one+24, 1))
	from("corrupt", single, "tag", nil, xor(one+24+37, 0x80))
	from("corrupt", single, "last byte cut off", nil, keep(size(single)-1))
	from("corrupt", single, "a byte more", nil, appendix(0))
	from("corrupt", "one-shot, single, empty", "empty plaintext, a byte more", nil, appendix(0))
	from("corrupt", withCtx, "flag cleared", nil, xor(5, 0x80))
	from("corrupt", single, "flag set", nil, xor(5, 0x80), appendix(make([]byte, 32)...))
	from("corrupt", any3, "ANY, ciphertext", nil, xor(anyEnd+24, 1))
	from("corrupt", all3, "ALL, ciphertext", nil, xor(sizeOf(All, 3)+24, 1))
	from("wrong_context", withCtx, "none given", func(e *expectation) { e.Context = nil })
	from("wrong_context", single, "one given where there is none", func(e *expectation) { e.Context = pairs("thread", "42") })
	from("wrong_context", withCtx, "another value", func(e *expectation) { e.Context = pairs("thread", "43", "checkpoint", "\x00\x01") })
	from("wrong_context", withCtx, "another name", func(e *expectation) { e.Context = pairs("threae", "42", "checkpoint", "\x00\x01") })
	from("wrong_context", withCtx, "a pair less", func(e *expectation) { e.Context = pairs("thread", "42") })
	from("wrong_context", withCtx, "a pair more", func(e *expectation) { e.Context = append(pairs("a", ""), e.Context...) })
	from("wrong_context", withCtx, "context tag", nil, xor(one, 1))
	from("corrupt", withCtx, "ciphertext, and another value", func(e *expectation) { e.Context = pairs("thread", "43") }, xor(size(withCtx)-17, 1))
	from("wrong_context", "one-shot, any of 3, context", "ANY, none given", func(e *expectation) { e.Context = nil })
	from("wrong_context", "one-shot, all of 3, context", "ALL, another value", func(e *expectation) { e.Context = pairs("thread", "43") })

	// Streams, steps 11 to 13.
	from("truncated", strCtx, "stream, header alone, with the flag", nil, keep(one))
	from("truncated", strCtx, "stream, context tag cut", nil, keep(one+31))
	from("truncated", strCtx, "stream, context tag and nothing else", nil, keep(one+32))
	from("truncated", stream, "stream, header alone", nil, keep(one))
	from("corrupt", stream, "stream, length of the stream header", nil, xor(one, 1))
	from("corrupt", stream, "stream, length of the stream header, and nothing else", nil, xor(one, 1), keep(one+1))
	from("truncated", stream, "stream, within the stream header", nil, keep(one+39))
	from("truncated", stream, "stream, no segment", nil, keep(one+40))
	from("truncated", stream, "stream, 15 bytes of a segment", nil, keep(one+55))
	from("corrupt", stream, "stream, 16 bytes of a segment", nil, keep(one+56))
	from("corrupt", stream, "stream, last byte cut off", nil, keep(size(stream)-1))
	from("corrupt", stream, "stream, a byte more", nil, appendix(0))
	from("corrupt", "stream, single, empty", "stream, empty plaintext, a byte more", nil, appendix(0))
	from("corrupt", stream, "stream, salt", nil, xor(one+1, 1))
	from("corrupt", stream, "stream, nonce prefix", nil, xor(one+39, 1))
	from("corrupt", stream, "stream, ciphertext", nil, xor(one+40, 1))
	from("truncated", plus, "stream, missing end, after one segment", nil, keep(seg))
	from("truncated", four, "stream, missing end, after three segments", nil, keep(seg+2*segmentSize))
	from("truncated", four, "stream, 15 bytes of the last segment", nil, keep(seg+2*segmentSize+15))
	from("corrupt", four, "stream, 16 bytes of the last segment", nil, keep(seg+2*segmentSize+16))
	from("corrupt", four, "stream, within the second segment", nil, keep(seg+1000))
	from("corrupt", four, "stream, two segments changed places", nil, moved(seg, segmentSize, seg+segmentSize), moved(seg+segmentSize, segmentSize, seg))
	from("corrupt", four, "stream, a segment twice", nil, moved(seg, size(four)-seg, seg+segmentSize))
	from("corrupt", four, "stream, a segment left out", nil, moved(seg+segmentSize, size(four)-seg-segmentSize, seg), keep(size(four)-segmentSize))
	from("corrupt", four, "stream, the last segment twice", nil, moved(seg+2*segmentSize, size(four)-seg-2*segmentSize, size(four)))
	from("corrupt", four, "stream, first bit of the second segment", nil, xor(seg, 0x80))
	from("corrupt", full, "stream, a byte more after a full segment", nil, appendix(0))
	from("corrupt", full, "stream, itself again after a full segment", nil, moved(one+40, segmentSize-40, seg))
	from("corrupt", full, "stream, full, last byte of the tag", nil, xor(seg-1, 1))
	from("wrong_context", strCtx, "stream, none given", func(e *expectation) { e.Context = nil })
	from("wrong_context", stream, "stream, one given where there is none", func(e *expectation) { e.Context = pairs("thread", "42") })
	from("wrong_context", strCtx, "stream, another value", func(e *expectation) { e.Context = pairs("thread", "43") })
	from("wrong_context", strCtx, "stream, context tag", nil, xor(one+31, 1))
	from("wrong_context", "stream, any of 3, context", "stream, ANY, none given", func(e *expectation) { e.Context = nil })
	from("corrupt", strCtx, "stream, ciphertext, and another value", func(e *expectation) { e.Context = nil }, xor(one+32+40, 1))

	// Streams that a writer who breaks the rules seals.
	given("corrupt", stream, "stream, an empty last segment after a full one", g.segments(stream, segmentPlain-40, 0))
	given("truncated", stream, "stream, a short segment that is not the last, and no last", g.segments(stream, segmentPlain-40, -1))
	given("corrupt", stream, "stream, a short segment in the middle", g.segments(stream, 100, 100))
	given("corrupt", stream, "stream, two last segments", g.segments(stream, -200, 100))

	writeVectors(g.t, "refused.json", struct {
		Refused []refusedVector `json:"refused"`
	}{g.refused})
}

// splitCommitment makes a blob whose header commits to the key of a vector, and
// whose payload is sealed under another key.
func (g *generator) splitCommitment(base string) []byte {
	v := g.made[base]
	s := sealer(g.t, Single, v.Expect.keys(), Options{})
	rand.Read(s.m.keys.payload[OneShot][:])
	return must[[]byte](g.t)(s.Append(nil, pattern(10), Context{}))
}

// splitWrap makes an ANY blob that would open to one plaintext for the first
// recipient and to another for the others: its header commits to one content
// key, and for the first recipient it holds another, and the payload to it.
func (g *generator) splitWrap(base string) []byte {
	v := g.made[base]
	s := sealer(g.t, Any, v.Expect.keys(), Options{})
	var committed, content secretKey
	copy(committed[:], g.bytes(KeySize))
	copy(content[:], g.bytes(KeySize))
	var first, second contentKeys
	if err := errors.Join(first.derive(committed[:]), second.derive(content[:])); err != nil {
		g.t.Fatal(err)
	}
	h := s.header
	h.Form, h.Commitment = OneShot, first.commit
	h.Wrapped = make([][WrappedKeySize]byte, len(h.Recipients))
	data := newWrapData(&h)
	for i := range h.Wrapped {
		k := committed
		if i == 0 {
			k = content
		}
		pre := (*[xaesPrefixSize]byte)(h.Wrapped[i][:])
		copy(pre[:], g.bytes(xaesPrefixSize))
		aead := must[cipher.AEAD](g.t)(xaesOnce(&s.m.wrap[i].key, pre))
		aead.Seal(h.Wrapped[i][:xaesPrefixSize], nil, k[:], data.at(i))
	}
	pre := [xaesPrefixSize]byte(g.bytes(xaesPrefixSize))
	aead := must[cipher.AEAD](g.t)(xaesOnce(&second.payload[OneShot], &pre))
	return sealOneShot(nil, pattern(37), encode(&h), 0, &pre, aead)
}

// segments makes a stream of segments of the given plaintext sizes. A negative
// size is that of a segment that says it is the last where it is not; -1 at the
// end leaves the last out.
func (g *generator) segments(base string, sizes ...int) []byte {
	v := g.made[base]
	s := sealer(g.t, Single, v.Expect.keys(), Options{})
	h := s.encoded[Stream][0]
	var nonce [streamNonceSize]byte
	rand.Read(nonce[:])
	c := must[*segmentCipher](g.t)(newSegmentCipher(&s.m.keys.payload[Stream], &nonce, &h.hash))
	blob := append(bytes.Clone(h.raw), streamHeaderSize)
	blob = append(blob, nonce[:]...)
	for i, size := range sizes {
		if size == -1 {
			break
		}
		last := i == len(sizes)-1
		if size < 0 {
			size, last = -size, true
		}
		blob = append(blob, c.seal(new(segmentNonce), append(make([]byte, 0, size+tagSize), pattern(size)...), uint64(i), last)...)
	}
	return blob
}
