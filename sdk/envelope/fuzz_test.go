package envelope

import (
	"bytes"
	"path/filepath"
	"reflect"
	"testing"
)

// seeds adds the blobs of the vectors.
func seeds(f *testing.F) {
	f.Helper()
	blobs := map[string][]byte{}
	for _, v := range loadBlobs(f) {
		blobs[v.Name] = v.bytes(f)
		f.Add(clip(blobs[v.Name]))
	}
	var file struct{ Refused []refusedVector }
	load(f, filepath.Join(vectorDir, "refused.json"), &file)
	for _, v := range file.Refused {
		f.Add(clip(v.bytes(f, blobs)))
	}
}

// clip keeps what a parser of headers can look at.
func clip(b []byte) []byte { return b[:min(len(b), MaxHeaderSize+10)] }

// What parses is encoded again to the same bytes; what does not fails with an
// error of the header's.
func FuzzParseHeader(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		h, n, err := ParseHeader(b)
		again, errAgain := ReadHeader(bytes.NewReader(b))
		if err != errAgain || !reflect.DeepEqual(h, again) {
			t.Fatal("ReadHeader differs", errAgain)
		}
		if err != nil {
			if h != nil || n != 0 || err != ErrNotSealed && err != ErrUnsupportedVersion && err != ErrTruncated && err != ErrCorrupt {
				t.Fatal(err)
			}
			return
		}
		encoded, err := h.AppendBinary(nil)
		if err != nil || !bytes.Equal(encoded, b[:n]) || n != h.Size() || n > MaxHeaderSize {
			t.Fatal(n, err)
		}
	})
}

// fuzzKeys are fixed, so that a finding can be run again.
func fuzzKeys() []*Key {
	keys := make([]*Key, 3)
	for i := range keys {
		keys[i] = &Key{ID: KeyID{byte(i + 1)}, Class: 1, Bucket: 2, Secret: [KeySize]byte{byte(i + 1)}}
	}
	return keys
}

// fuzzed is a blob to be changed, and what opens it.
type fuzzed struct {
	o    *Opener
	blob []byte
}

func fuzzedBlobs(f *testing.F, form Form, ctx Context, size int) (all []fuzzed) {
	f.Helper()
	for _, p := range []Policy{Single, All, Any} {
		s, o := pairOf(f, p, fuzzKeys())
		if form == OneShot {
			all = append(all, fuzzed{o, must[[]byte](f)(s.Append(nil, make([]byte, size), ctx))})
		} else {
			all = append(all, fuzzed{o, sealStream(f, s, make([]byte, size), ctx, 1)})
		}
	}
	return all
}

// change puts data in the place of n bytes of b from offset at.
func change(b, data []byte, at, n uint) []byte {
	at %= uint(len(b) + 1)
	n %= uint(len(b)) - at + 1
	return append(append(bytes.Clone(b[:at]), data...), b[at+n:]...)
}

// Bytes of any origin, and good blobs with any change, are refused with an
// error that tells what is wrong, and give nothing.
func FuzzOpen(f *testing.F) {
	ctx := must[Context](f)(NewContext(Pair{"a", "b"}))
	blobs := fuzzedBlobs(f, OneShot, ctx, 20)
	blobs = append(blobs, fuzzedBlobs(f, OneShot, Context{}, 20)...)
	f.Add([]byte{}, uint(0), uint(0))
	f.Add([]byte{0x92}, uint(5), uint(1))
	f.Add([]byte("\xC1Lth\x01"), uint(0), uint(1000))
	f.Fuzz(func(t *testing.T, data []byte, at, n uint) {
		for i, b := range blobs {
			c := Context{}
			if i < len(blobs)/2 {
				c = ctx
			}
			for _, bad := range [][]byte{data, change(b.blob, data, at, n)} {
				got, err := b.o.Append(nil, bad, c)
				if bytes.Equal(bad, b.blob) {
					if err != nil {
						t.Fatal(err)
					}
					continue
				}
				if err == nil || got != nil || !isOurs(err) {
					t.Fatal(err)
				}
			}
		}
	})
}

// As FuzzOpen, for streams of up to three segments; both kinds of reader agree.
func FuzzOpenStream(f *testing.F) {
	blobs := fuzzedBlobs(f, Stream, Context{}, 20)
	blobs = append(blobs, fuzzedBlobs(f, Stream, Context{}, 2*segmentPlain+5)[0])
	f.Add([]byte{}, uint(0), uint(0))
	f.Add([]byte{}, uint(65+segmentSize), uint(1<<20))
	f.Add([]byte{1}, uint(65+segmentSize), uint(0))
	f.Add([]byte{0x28}, uint(65), uint(1))
	f.Fuzz(func(t *testing.T, data []byte, at, n uint) {
		for _, b := range blobs {
			for _, bad := range [][]byte{data, change(b.blob, data, at, n)} {
				got, err := openStream(b.o, bytes.NewReader(bad), Context{}, 1+len(data)%2)
				_, errAt := openStreamAt(b.o, bad, Context{})
				if bytes.Equal(bad, b.blob) {
					if err != nil || errAt != nil {
						t.Fatal(err, errAt)
					}
					continue
				}
				if err == nil || errAt == nil || !isOurs(err) || !isOurs(errAt) {
					t.Fatal(err, errAt)
				}
				if bytes.Trim(got, "\x00") != nil {
					t.Fatal("what was given is not plaintext")
				}
			}
		}
	})
}
