package envelope

import (
	"bytes"
	"io"
	"testing"

	"github.com/tink-crypto/tink-go/v2/aead"
	"github.com/tink-crypto/tink-go/v2/aead/xaesgcm"
	"github.com/tink-crypto/tink-go/v2/insecuresecretdataaccess"
	tinkkeys "github.com/tink-crypto/tink-go/v2/keyset"
	"github.com/tink-crypto/tink-go/v2/secretdata"
	"github.com/tink-crypto/tink-go/v2/streamingaead/subtle"
	"github.com/tink-crypto/tink-go/v2/tink"
)

// tinkXAES is Tink's X-AES-GCM with a salt of 12 bytes and no prefix.
func tinkXAES(t testing.TB, key *secretKey) tink.AEAD {
	t.Helper()
	params := must[*xaesgcm.Parameters](t)(xaesgcm.NewParameters(xaesgcm.VariantNoPrefix, 12))
	data := secretdata.NewBytesFromData(bytes.Clone(key[:]), insecuresecretdataaccess.Token{})
	m := tinkkeys.NewManager()
	id := must[uint32](t)(m.AddKey(must[*xaesgcm.Key](t)(xaesgcm.NewKey(data, 0, params))))
	if err := m.SetPrimary(id); err != nil {
		t.Fatal(err)
	}
	return must[tink.AEAD](t)(aead.New(must[*tinkkeys.Handle](t)(m.Handle())))
}

// tinkStream is Tink's AES-GCM-HKDF with our segments.
func tinkStream(t testing.TB, key *secretKey) *subtle.AESGCMHKDF {
	t.Helper()
	return must[*subtle.AESGCMHKDF](t)(subtle.NewAESGCMHKDF(key[:], "SHA256", 32, segmentSize, 0))
}

// keysOf derives what whoever holds the keys of a blob derives.
func keysOf(t testing.TB, h *Header, keys []*Key) *contentKeys {
	t.Helper()
	derived := new(contentKeys)
	var content secretKey
	switch h.Policy {
	case Single:
		content = keys[0].Secret
	case All:
		sorted := must[[]*Key](t)(ordered(keys, 2))
		if err := contentOfAll(&content, sorted); err != nil {
			t.Fatal(err)
		}
	case Any:
		o := must[*Opener](t)(NewMultiOpener(Any, keys, Options{}))
		if err := o.unwrap(derived, h, 0); err != nil {
			t.Fatal(err)
		}
		return derived
	}
	if err := derived.derive(content[:]); err != nil {
		t.Fatal(err)
	}
	return derived
}

// Given the content key, Tink opens every payload, and what Tink seals under it
// can be opened.
func TestTinkOneShot(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy Policy, n int) {
		keys := randomKeys(n)
		s, o := pairOf(t, policy, keys)
		for _, ctx := range []Context{{}, bound(t, "a", "b")} {
			for _, size := range []int{0, 1, 1000, 1 << 20} {
				plain := randomBytes(size)
				blob := must[[]byte](t)(s.Append(nil, plain, ctx))
				h, at, err := ParseHeader(blob)
				if err != nil {
					t.Fatal(err)
				}
				if h.Bound {
					at += contextTagSize
				}
				hash := encode(h).hash
				x := tinkXAES(t, &keysOf(t, h, keys).payload[OneShot])
				got, err := x.Decrypt(blob[at:], hash[:])
				if err != nil || !bytes.Equal(got, plain) {
					t.Fatalf("Tink opens %d bytes: %v", size, err)
				}
				if !ctx.IsZero() {
					continue // the tag is over the nonce
				}
				theirs := append(blob[:at:at], must[[]byte](t)(x.Encrypt(plain, hash[:]))...)
				got, err = o.Append(nil, theirs, ctx)
				if err != nil || !bytes.Equal(got, plain) {
					t.Fatalf("Tink sealed %d bytes: %v", size, err)
				}
			}
		}
	})
}

func TestTinkUnwraps(t *testing.T) {
	keys := randomKeys(3)
	s, _ := pairOf(t, Any, keys)
	blob := must[[]byte](t)(s.Append(nil, []byte("x"), Context{}))
	h, _, err := ParseHeader(blob)
	if err != nil {
		t.Fatal(err)
	}
	data := newWrapData(h)
	for _, k := range keys {
		for i, id := range h.Recipients {
			var wrap secretKey
			if err := deriveKey(&wrap, k.Secret[:], Info(labelWrap)); err != nil {
				t.Fatal(err)
			}
			content, err := tinkXAES(t, &wrap).Decrypt(h.Wrapped[i][:], data.at(i))
			if (err == nil) != (id == k.ID) {
				t.Fatalf("recipient %d: %v", i, err)
			}
			if err != nil {
				continue
			}
			var derived contentKeys
			if err := derived.derive(content); err != nil || derived.commit != h.Commitment {
				t.Fatal("the content key is another", err)
			}
		}
	}
}

func TestTinkStream(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy Policy, n int) {
		keys := randomKeys(n)
		s, o := pairOf(t, policy, keys)
		for _, ctx := range []Context{{}, bound(t, "a", "b")} {
			for _, size := range sizesFor(n) {
				plain := randomBytes(size)
				blob := sealStream(t, s, plain, ctx, 2)
				h, at, err := ParseHeader(blob)
				if err != nil {
					t.Fatal(err)
				}
				if h.Bound {
					at += contextTagSize
				}
				hash := encode(h).hash
				x := tinkStream(t, &keysOf(t, h, keys).payload[Stream])
				r, err := x.NewDecryptingReader(bytes.NewReader(blob[at:]), hash[:])
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, plain) {
					t.Fatalf("Tink opens %d bytes: %v", size, err)
				}
				if !ctx.IsZero() {
					continue // the tag is over the nonce
				}
				theirs := bytes.NewBuffer(blob[:at:at])
				w, err := x.NewEncryptingWriter(theirs, hash[:])
				if err != nil {
					t.Fatal(err)
				}
				if _, err := w.Write(plain); err != nil {
					t.Fatal(err)
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				if theirs.Len() != len(blob) {
					t.Fatalf("Tink needs %d bytes for %d, we %d", theirs.Len(), size, len(blob))
				}
				for _, workers := range []int{1, 2} {
					got, err = openStream(o, bytes.NewReader(theirs.Bytes()), ctx, workers)
					if err != nil || !bytes.Equal(got, plain) {
						t.Fatalf("Tink sealed %d bytes: %v", size, err)
					}
				}
				got, err = openStreamAt(o, theirs.Bytes(), ctx)
				if err != nil || !bytes.Equal(got, plain) {
					t.Fatalf("Tink sealed %d bytes: at random: %v", size, err)
				}
			}
		}
	})
}
