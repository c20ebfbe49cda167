package envelope

import (
	"bytes"
	"context"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// The vectors are described in proto/vectors/README.md.

var update = flag.Bool("update", false, "write proto/vectors anew")

const vectorDir = "../../proto/vectors"

type vectorKey struct {
	ID     hexBytes `json:"key_id"`
	Secret hexBytes `json:"blob_key"`
}

type vectorPair struct {
	Name  hexBytes `json:"name"`
	Value hexBytes `json:"value"`
}

// expectation is what whoever opens says beforehand.
type expectation struct {
	Form    string       `json:"form"`
	Policy  string       `json:"policy"`
	Class   uint16       `json:"class"`
	Bucket  uint64       `json:"bucket"`
	Keys    []vectorKey  `json:"keys"`
	Context []vectorPair `json:"context,omitempty"`
}

// blobVector is a blob that opens.
type blobVector struct {
	Name   string      `json:"name"`
	Expect expectation `json:"expect"`
	// One of two.
	Blob hexBytes `json:"blob,omitempty"`
	File string   `json:"file,omitempty"`
	// Plaintext byte i is i mod 251.
	PlaintextSize int      `json:"plaintext_size"`
	OpenedBy      hexBytes `json:"opened_by"`

	Header         hexBytes `json:"header"`
	HeaderHash     hexBytes `json:"header_hash"`
	ContentKey     hexBytes `json:"content_key"`
	Commitment     hexBytes `json:"commitment"`
	PayloadKey     hexBytes `json:"payload_key"`
	Nonce          hexBytes `json:"nonce"`
	GCMKey         hexBytes `json:"gcm_key"`
	EncodedContext hexBytes `json:"encoded_context,omitempty"`
	ContextKey     hexBytes `json:"context_key,omitempty"`
	ContextTag     hexBytes `json:"context_tag,omitempty"`
}

// refusedVector is a blob that is refused.
type refusedVector struct {
	Name   string      `json:"name"`
	Error  string      `json:"error"`
	Expect expectation `json:"expect"`
	// The blob is given, or is that of a vector of blobs.json, edited.
	Blob  *hexBytes `json:"blob,omitempty"`
	File  string    `json:"file,omitempty"`
	From  string    `json:"from,omitempty"`
	Edits []edit    `json:"edits,omitempty"`
	// Missing are the key ids that missing_keys tells.
	Missing []hexBytes `json:"missing,omitempty"`
}

// edit changes a blob. One of the fields is set; Bytes goes with At.
type edit struct {
	Keep   *int     `json:"keep,omitempty"` // cut off what is behind this many bytes
	At     *int     `json:"at,omitempty"`   // XOR with Bytes from this offset
	Bytes  hexBytes `json:"xor,omitempty"`
	Append hexBytes `json:"append,omitempty"` // put behind
	Copy   *move    `json:"copy,omitempty"`   // overwrite with other bytes of the unedited blob
}

type move struct {
	From int `json:"from"`
	Size int `json:"size"`
	To   int `json:"to"`
}

func (e edit) apply(b, original []byte) []byte {
	switch {
	case e.Keep != nil:
		return b[:*e.Keep]
	case e.At != nil:
		for i, x := range e.Bytes {
			b[*e.At+i] ^= x
		}
		return b
	case e.Copy != nil:
		for len(b) < e.Copy.To+e.Copy.Size {
			b = append(b, 0)
		}
		copy(b[e.Copy.To:], original[e.Copy.From:][:e.Copy.Size])
		return b
	}
	return append(b, e.Append...)
}

var errorNames = map[string]error{
	"not_sealed":          ErrNotSealed,
	"unsupported_version": ErrUnsupportedVersion,
	"truncated":           ErrTruncated,
	"corrupt":             ErrCorrupt,
	"wrong_context":       ErrWrongContext,
	"wrong_form":          ErrWrongForm,
	"wrong_recipient":     ErrWrongRecipient,
	"missing_keys":        ErrMissingKeys,
}

var policies = map[string]Policy{"single": Single, "all": All, "any": Any}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i % 251)
	}
	return b
}

func (e expectation) keys() []*Key {
	var keys []*Key
	for _, k := range e.Keys {
		keys = append(keys, &Key{ID: KeyID(k.ID), Class: e.Class, Bucket: e.Bucket, Secret: [KeySize]byte(k.Secret)})
	}
	return keys
}

func (e expectation) context(t testing.TB) Context {
	t.Helper()
	var pairs []Pair
	for _, p := range e.Context {
		pairs = append(pairs, Pair{string(p.Name), string(p.Value)})
	}
	return must[Context](t)(NewContext(pairs...))
}

// open opens a blob in every way that there is, which must agree.
func (e expectation) open(t testing.TB, blob []byte) ([]byte, KeyID, error) {
	t.Helper()
	o := opener(t, policies[e.Policy], e.keys(), Options{})
	ctx := e.context(t)
	if e.Form == "one-shot" {
		return o.AppendBy(nil, blob, ctx)
	}
	got, err := openStream(o, bytes.NewReader(blob), ctx, 1)
	for _, other := range []func() ([]byte, error){
		func() ([]byte, error) { return openStream(o, bytes.NewReader(blob), ctx, 2) },
		func() ([]byte, error) { return openStreamAt(o, blob, ctx) },
	} {
		again, errAgain := other()
		// A ReaderAt looks at the end first, so what it gives before an error is less.
		if !sameError(err, errAgain) || err == nil && !bytes.Equal(got, again) {
			t.Errorf("one reader: %v; another: %v", err, errAgain)
		}
	}
	if err != nil {
		return nil, KeyID{}, err
	}
	r := must[*Reader](t)(o.NewReader(context.Background(), bytes.NewReader(blob), ctx, StreamOptions{}))
	defer r.Close()
	return got, r.OpenedBy(), nil
}

func sameError(a, b error) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Error() == b.Error()
}

func (v *blobVector) bytes(t testing.TB) []byte {
	t.Helper()
	if v.File == "" {
		return v.Blob
	}
	return must[[]byte](t)(os.ReadFile(filepath.Join(vectorDir, v.File)))
}

func loadBlobs(t testing.TB) []blobVector {
	t.Helper()
	var file struct{ Blobs []blobVector }
	load(t, filepath.Join(vectorDir, "blobs.json"), &file)
	if len(file.Blobs) < 20 {
		t.Fatalf("%d vectors", len(file.Blobs))
	}
	return file.Blobs
}

func TestVectorsOpen(t *testing.T) {
	for _, v := range loadBlobs(t) {
		t.Run(v.Name, func(t *testing.T) {
			blob := v.bytes(t)
			got, by, err := v.Expect.open(t, blob)
			if err != nil || !bytes.Equal(got, pattern(v.PlaintextSize)) || !bytes.Equal(by[:], v.OpenedBy) {
				t.Fatalf("%d bytes by %s, %v", len(got), by, err)
			}
			h, n, err := ParseHeader(blob)
			if err != nil || !bytes.Equal(v.Header, blob[:n]) || !bytes.Equal(v.Header, must[[]byte](t)(h.AppendBinary(nil))) {
				t.Fatal("header", err)
			}
			want := v
			want.fill(t, blob)
			if !reflect.DeepEqual(want, v) {
				t.Errorf("intermediate values differ:\n%+v\n%+v", want, v)
			}
		})
	}
}

func TestVectorsRefused(t *testing.T) {
	blobs := map[string][]byte{}
	for _, v := range loadBlobs(t) {
		blobs[v.Name] = v.bytes(t)
	}
	var file struct{ Refused []refusedVector }
	load(t, filepath.Join(vectorDir, "refused.json"), &file)
	seen := map[string]int{}
	for _, v := range file.Refused {
		t.Run(v.Name, func(t *testing.T) {
			seen[v.Error]++
			blob := v.bytes(t, blobs)
			_, _, err := v.Expect.open(t, blob)
			want := errorNames[v.Error]
			if want == nil || !errors.Is(err, want) {
				t.Fatalf("got %v, want %v", err, want)
			}
			var missing *MissingKeysError
			if errors.As(err, &missing) != (v.Missing != nil) {
				t.Fatal("missing keys", err)
			}
			for i, id := range v.Missing {
				if len(missing.IDs) != len(v.Missing) || missing.IDs[i] != KeyID(id) {
					t.Fatal("missing keys", missing.IDs)
				}
			}
		})
	}
	for name := range errorNames {
		if seen[name] == 0 {
			t.Errorf("no vector for %s", name)
		}
	}
}

func (v *refusedVector) bytes(t testing.TB, blobs map[string][]byte) []byte {
	t.Helper()
	switch {
	case v.File != "":
		return must[[]byte](t)(os.ReadFile(filepath.Join(vectorDir, v.File)))
	case v.From == "":
		return *v.Blob
	}
	original, ok := blobs[v.From]
	if !ok {
		t.Fatalf("no vector %q", v.From)
	}
	b := bytes.Clone(original)
	for _, e := range v.Edits {
		b = e.apply(b, original)
	}
	return b
}

// fill sets the intermediate values of a blob that opens.
func (v *blobVector) fill(t testing.TB, blob []byte) {
	t.Helper()
	h, n, err := ParseHeader(blob)
	if err != nil {
		t.Fatal(err)
	}
	v.Header = blob[:n]
	hash := sha256.Sum256(v.Header)
	v.HeaderHash = hash[:]
	keys := v.Expect.keys()
	content := contentKeyOf(t, h, keys)
	v.ContentKey = content[:]
	var derived contentKeys
	if err := derived.derive(content[:]); err != nil {
		t.Fatal(err)
	}
	v.Commitment = derived.commit[:]
	v.PayloadKey = derived.payload[h.Form][:]
	rest := blob[n:]
	if h.Bound {
		v.ContextTag, rest = rest[:contextTagSize], rest[contextTagSize:]
		v.ContextKey = derived.context[h.Form][:]
		v.EncodedContext = v.Expect.context(t).encoded
	}
	if h.Form == OneShot {
		v.Nonce = rest[:xaesNonceSize]
		key := secretKey(v.PayloadKey)
		x := must[*xaes](t)(newXAES(&key))
		x.derive((*[xaesPrefixSize]byte)(v.Nonce))
		v.GCMKey = x.derived[:]
	} else {
		v.Nonce = rest[1:streamHeaderSize]
		v.GCMKey = must[[]byte](t)(hkdf.Key(sha256.New, v.PayloadKey, v.Nonce[:saltSize], string(hash[:]), KeySize))
	}
}

// contentKeyOf returns the content key of a blob.
func contentKeyOf(t testing.TB, h *Header, keys []*Key) (content secretKey) {
	t.Helper()
	switch h.Policy {
	case Single:
		return keys[0].Secret
	case All:
		if err := contentOfAll(&content, must[[]*Key](t)(ordered(keys, 2))); err != nil {
			t.Fatal(err)
		}
		return content
	}
	data := newWrapData(h)
	for i, id := range h.Recipients {
		for _, k := range keys {
			if k.ID != id {
				continue
			}
			var wrap secretKey
			if err := deriveKey(&wrap, k.Secret[:], Info(labelWrap)); err != nil {
				t.Fatal(err)
			}
			aead := must[cipher.AEAD](t)(xaesOnce(&wrap, (*[xaesPrefixSize]byte)(h.Wrapped[i][:])))
			return secretKey(must[[]byte](t)(aead.Open(nil, nil, h.Wrapped[i][xaesPrefixSize:], data.at(i))))
		}
	}
	t.Fatal("no key")
	return content
}

// derivations are the vectors of derivation.json.
type derivations struct {
	Info []struct {
		Label string     `json:"label"`
		Parts []hexBytes `json:"parts"`
		Info  hexBytes   `json:"info"`
	} `json:"info"`
	Hierarchy []hierarchyVector `json:"hierarchy"`
	All       []allVector       `json:"all"`
	Wrap      []struct {
		BlobKey hexBytes `json:"blob_key"`
		WrapKey hexBytes `json:"wrap_key"`
	} `json:"wrap"`
	Content []contentVector `json:"content"`
	Context []struct {
		Pairs   []vectorPair `json:"pairs"`
		Encoded hexBytes     `json:"encoded"`
	} `json:"context"`
}

type hierarchyVector struct {
	Tenant    string   `json:"tenant"`
	Class     uint16   `json:"class"`
	Bucket    uint64   `json:"bucket"`
	KeyID     hexBytes `json:"key_id"`
	BucketKey hexBytes `json:"bucket_key"`
	DEK       hexBytes `json:"dek"`
	Share     hexBytes `json:"share"`
	BlobKey   hexBytes `json:"blob_key"`
}

type allVector struct {
	Class      uint16      `json:"class"`
	Bucket     uint64      `json:"bucket"`
	Keys       []vectorKey `json:"keys"`
	ContentKey hexBytes    `json:"content_key"`
}

type contentVector struct {
	ContentKey        hexBytes `json:"content_key"`
	Commitment        hexBytes `json:"commitment"`
	OneShotKey        hexBytes `json:"oneshot_key"`
	StreamKey         hexBytes `json:"stream_key"`
	OneShotContextKey hexBytes `json:"oneshot_context_key"`
	StreamContextKey  hexBytes `json:"stream_context_key"`
}

// derive sets every output of d from its inputs.
func (d *derivations) derive(t testing.TB) {
	t.Helper()
	key := func(secret, info []byte) hexBytes {
		var k secretKey
		if err := deriveKey(&k, secret, info); err != nil {
			t.Fatal(err)
		}
		return k[:]
	}
	for i := range d.Info {
		v := &d.Info[i]
		parts := make([][]byte, len(v.Parts))
		for i, p := range v.Parts {
			parts[i] = p
		}
		v.Info = Info(v.Label, parts...)
	}
	for i := range d.Hierarchy {
		v := &d.Hierarchy[i]
		parts := [][]byte{[]byte(v.Tenant), be(uint64(v.Class), 2), be(v.Bucket, 8), v.KeyID}
		v.Share = key(v.BucketKey, Info(LabelShare, parts...))
		v.BlobKey = key(append(bytes.Clone(v.DEK), v.Share...), Info(LabelBlob, parts...))
	}
	for i := range d.All {
		v := &d.All[i]
		e := expectation{Class: v.Class, Bucket: v.Bucket, Keys: v.Keys}
		var k secretKey
		if err := contentOfAll(&k, e.keys()); err != nil {
			t.Fatal(err)
		}
		v.ContentKey = k[:]
	}
	for i := range d.Wrap {
		d.Wrap[i].WrapKey = key(d.Wrap[i].BlobKey, Info(labelWrap))
	}
	for i := range d.Content {
		v := &d.Content[i]
		var k contentKeys
		if err := k.derive(v.ContentKey); err != nil {
			t.Fatal(err)
		}
		*v = contentVector{v.ContentKey, k.commit[:], k.payload[OneShot][:], k.payload[Stream][:], k.context[OneShot][:], k.context[Stream][:]}
	}
	for i := range d.Context {
		v := &d.Context[i]
		v.Encoded = expectation{Context: v.Pairs}.context(t).encoded
	}
}

// be is v in n bytes, big-endian.
func be(v uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(v >> (8 * (n - 1 - i)))
	}
	return b
}

func TestVectorsDerivation(t *testing.T) {
	var file, again derivations
	load(t, filepath.Join(vectorDir, "derivation.json"), &file)
	load(t, filepath.Join(vectorDir, "derivation.json"), &again)
	if len(file.Info) == 0 || len(file.Hierarchy) == 0 || len(file.All) == 0 || len(file.Wrap) == 0 || len(file.Content) == 0 || len(file.Context) == 0 {
		t.Fatal("vectors are missing")
	}
	again.derive(t)
	if !reflect.DeepEqual(file, again) {
		t.Errorf("derived values differ:\n%+v\n%+v", again, file)
	}
}

func writeVectors(t *testing.T, name string, v any) {
	t.Helper()
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, name, append(b, '\n'))
}

func writeFile(t *testing.T, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(vectorDir, name), b, 0o644); err != nil {
		t.Fatal(err)
	}
}
