package envelope

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
)

func load(t testing.TB, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatal(name, err)
	}
}

// hexBytes is a byte string, in hexadecimal in JSON.
type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

func (h hexBytes) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(h)), nil }

// sealXAES is XAES-256-GCM with a nonce that is given.
func sealXAES(t testing.TB, key secretKey, nonce, plain, ad []byte) []byte {
	t.Helper()
	x := must[*xaes](t)(newXAES(&key))
	x.derive((*[xaesPrefixSize]byte)(nonce))
	block := must[cipher.Block](t)(aes.NewCipher(x.derived[:]))
	return must[cipher.AEAD](t)(cipher.NewGCM(block)).Seal(nil, nonce[xaesPrefixSize:], plain, ad)
}

func TestXAESVectors(t *testing.T) {
	var file struct {
		Vectors []struct {
			Key          hexBytes `json:"key"`
			Nonce        string   `json:"nonce_ascii"`
			Plain        string   `json:"plaintext_ascii"`
			AD           string   `json:"aad_ascii"`
			DerivedKey   hexBytes `json:"derived_key"`
			DerivedNonce hexBytes `json:"derived_nonce"`
			Sealed       hexBytes `json:"ciphertext"`
		}
		Accumulated struct {
			Hash hexBytes `json:"hash_10000"`
		}
	}
	load(t, "testdata/c2sp/xaes_256_gcm.json", &file)
	if len(file.Vectors) != 2 || len(file.Accumulated.Hash) != 32 {
		t.Fatal("vectors are missing")
	}
	for _, v := range file.Vectors {
		key := secretKey(v.Key)
		x := must[*xaes](t)(newXAES(&key))
		x.derive((*[xaesPrefixSize]byte)([]byte(v.Nonce)))
		if !bytes.Equal(x.derived[:], v.DerivedKey) || v.Nonce[xaesPrefixSize:] != string(v.DerivedNonce) {
			t.Fatalf("derived %x, want %x", x.derived, v.DerivedKey)
		}
		if got := sealXAES(t, key, []byte(v.Nonce), []byte(v.Plain), []byte(v.AD)); !bytes.Equal(got, v.Sealed) {
			t.Fatalf("sealed to %x, want %x", got, v.Sealed)
		}
		aead := must[cipher.AEAD](t)(xaesOnce(&key, (*[xaesPrefixSize]byte)([]byte(v.Nonce))))
		got, err := aead.Open(nil, nil, append([]byte(v.Nonce[xaesPrefixSize:]), v.Sealed...), []byte(v.AD))
		if err != nil || string(got) != v.Plain {
			t.Fatalf("opened to %q, %v", got, err)
		}
	}

	// The accumulated test: many random inputs, one hash of all outputs.
	source, sum := sha3.NewSHAKE128(), sha3.NewSHAKE128()
	read := func(n int) []byte {
		b := make([]byte, n)
		source.Read(b)
		return b
	}
	for range 10000 {
		key, nonce := secretKey(read(32)), read(24)
		plain := read(int(read(1)[0]))
		ad := read(int(read(1)[0]))
		sealed := sealXAES(t, key, nonce, plain, ad)
		sum.Write(sealed)
		aead := must[cipher.AEAD](t)(xaesOnce(&key, (*[xaesPrefixSize]byte)(nonce)))
		if got, err := aead.Open(nil, nil, append(nonce[xaesPrefixSize:], sealed...), ad); err != nil || !bytes.Equal(got, plain) {
			t.Fatal(err)
		}
	}
	got := make([]byte, 32)
	sum.Read(got)
	if !bytes.Equal(got, file.Accumulated.Hash) {
		t.Fatalf("accumulated %x, want %x", got, file.Accumulated.Hash)
	}
}

// gcms are the two AEADs that this package uses, with one way to open.
func gcms(t testing.TB, key []byte) map[string]func(dst, nonce, sealed, ad []byte) ([]byte, error) {
	block := must[cipher.Block](t)(aes.NewCipher(key))
	fixed := must[cipher.AEAD](t)(cipher.NewGCM(block))
	random := must[cipher.AEAD](t)(cipher.NewGCMWithRandomNonce(block))
	return map[string]func(dst, nonce, sealed, ad []byte) ([]byte, error){
		"GCM": fixed.Open,
		"GCM with random nonce": func(dst, nonce, sealed, ad []byte) ([]byte, error) {
			return random.Open(dst, nil, append(bytes.Clone(nonce), sealed...), ad)
		},
	}
}

// checkGCM opens, and looks for plaintext left behind by a failure.
func checkGCM(t *testing.T, key, nonce, sealed, ad, plain []byte, valid bool) {
	t.Helper()
	for name, open := range gcms(t, key) {
		dst := make([]byte, 0, len(sealed)+16)
		got, err := open(dst, nonce, sealed, ad)
		if valid && (err != nil || !bytes.Equal(got, plain)) {
			t.Errorf("%s: %v", name, err)
		}
		if !valid && (err == nil || got != nil || !bytes.Equal(dst[:cap(dst)], make([]byte, cap(dst)))) {
			t.Errorf("%s: a forgery was opened, or left something behind", name)
		}
	}
}

func TestWycheproofGCM(t *testing.T) {
	var file struct {
		TestGroups []struct {
			IVSize, KeySize, TagSize int
			Tests                    []struct {
				TcID                       int
				Key, IV, AAD, Msg, Ct, Tag hexBytes
				Result                     string
			}
		}
	}
	load(t, "testdata/wycheproof/aes_gcm_test.min.json", &file)
	n := 0
	for _, g := range file.TestGroups {
		if g.IVSize != 96 || g.KeySize != 256 || g.TagSize != 128 {
			continue // not what this package uses
		}
		for _, v := range g.Tests {
			n++
			checkGCM(t, v.Key, v.IV, append(v.Ct, v.Tag...), v.AAD, v.Msg, v.Result == "valid")
		}
	}
	if n != 66 {
		t.Fatalf("%d vectors", n)
	}
}

func TestNISTGCM(t *testing.T) {
	var file struct {
		Vectors []struct {
			Result           string
			Key, IV, CT, AAD hexBytes
			Tag, PT          hexBytes
			IVBits           int `json:"ivlen_bits"`
			TagBits          int `json:"taglen_bits"`
		}
	}
	load(t, "testdata/nist/aes256_gcm_sample.json", &file)
	pass, fail, refused := 0, 0, 0
	for _, v := range file.Vectors {
		switch valid := v.Result == "PASS"; {
		case v.IVBits != 96:
			continue // not what this package uses
		case v.TagBits != 128:
			// A short tag is not accepted, however right it is.
			refused++
			checkGCM(t, v.Key, v.IV, append(v.CT, v.Tag...), v.AAD, nil, false)
		default:
			if valid {
				pass++
			} else {
				fail++
			}
			checkGCM(t, v.Key, v.IV, append(v.CT, v.Tag...), v.AAD, v.PT, valid)
		}
	}
	if pass != 100 || fail != 50 || refused != 225 {
		t.Fatal(pass, fail, refused)
	}
}

func TestWycheproofHKDF(t *testing.T) {
	var file struct {
		TestGroups []struct {
			Tests []struct {
				TcID                 int
				IKM, Salt, Info, OKM hexBytes
				Size                 int
				Result               string
			}
		}
	}
	load(t, "testdata/wycheproof/hkdf_sha256_test.json", &file)
	n, ours := 0, 0
	for _, g := range file.TestGroups {
		for _, v := range g.Tests {
			n++
			got, err := hkdf.Key(sha256.New, v.IKM, v.Salt, string(v.Info), v.Size)
			if v.Result == "valid" != (err == nil && bytes.Equal(got, v.OKM)) {
				t.Errorf("%d: %v", v.TcID, err)
			}
			if len(v.Salt) == 0 && v.Size >= KeySize && v.Result == "valid" {
				ours++
				var key secretKey
				if err := deriveKey(&key, v.IKM, v.Info); err != nil || !bytes.Equal(key[:], v.OKM[:KeySize]) {
					t.Errorf("%d: deriveKey: %v", v.TcID, err)
				}
			}
		}
	}
	if n != 86 || ours == 0 {
		t.Fatal(n, ours)
	}
}

func TestWycheproofHMAC(t *testing.T) {
	var file struct {
		TestGroups []struct {
			KeySize, TagSize int
			Tests            []struct {
				TcID          int
				Key, Msg, Tag hexBytes
				Result        string
			}
		}
	}
	load(t, "testdata/wycheproof/hmac_sha256_test.json", &file)
	n := 0
	for _, g := range file.TestGroups {
		if g.KeySize != 256 || g.TagSize != 256 {
			continue // not what this package uses
		}
		for _, v := range g.Tests {
			n++
			key := secretKey(v.Key)
			var sum [contextTagSize]byte
			cut := min(len(v.Msg), streamNonceSize)
			mac := newContextMAC(&key)
			for range 2 { // the second time from a state that was used
				mac.tag(&sum, v.Msg[:cut], Context{encoded: v.Msg[cut:]})
				if v.Result == "valid" != hmac.Equal(sum[:], v.Tag) {
					t.Errorf("%d", v.TcID)
				}
			}
		}
	}
	if n != 81 {
		t.Fatalf("%d vectors", n)
	}
}

func TestInfo(t *testing.T) {
	for _, c := range []struct {
		label string
		parts [][]byte
		want  string
	}{
		{"ab", [][]byte{[]byte("c")}, "000000026162" + "0000000163"},
		{"ab", nil, "000000026162"},
		{"", [][]byte{nil, nil}, "000000000000000000000000"},
	} {
		if got := hex.EncodeToString(Info(c.label, c.parts...)); got != c.want {
			t.Errorf("Info(%q, %q) = %s, want %s", c.label, c.parts, got, c.want)
		}
	}
}
