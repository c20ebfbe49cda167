package peers

import (
	"io"

	"github.com/tink-crypto/tink-go/v2/aead"
	"github.com/tink-crypto/tink-go/v2/keyset"
	tinkpb "github.com/tink-crypto/tink-go/v2/proto/tink_go_proto"
	"github.com/tink-crypto/tink-go/v2/streamingaead"
)

// TinkGCM is Tink's AEAD of type AES256_GCM.
func TinkGCM() (OneShot, error) {
	return tinkAEAD("Tink AES256_GCM", "a random nonce a message", aead.AES256GCMKeyTemplate())
}

// TinkXAES is Tink's X-AES-GCM.
func TinkXAES() (OneShot, error) {
	return tinkAEAD("Tink X-AES-GCM", "a derived key and a random nonce a message", aead.XAES256GCM192BitNonceKeyTemplate())
}

func tinkAEAD(name, note string, t *tinkpb.KeyTemplate) (OneShot, error) {
	h, err := keyset.NewHandle(t)
	if err != nil {
		return OneShot{}, err
	}
	a, err := aead.New(h)
	if err != nil {
		return OneShot{}, err
	}
	return OneShot{
		Name: name, Note: note + "; no key commitment",
		Seal: func(_, plaintext []byte) ([]byte, error) { return a.Encrypt(plaintext, nil) },
		Open: func(_, sealed []byte) ([]byte, error) { return a.Decrypt(sealed, nil) },
	}, nil
}

// TinkStream is Tink's AES-GCM-HKDF streaming with segments of 4 KiB or 1 MiB.
func TinkStream(large bool) (Stream, error) {
	name, template := "Tink AES-GCM-HKDF 4 KiB", streamingaead.AES256GCMHKDF4KBKeyTemplate
	if large {
		name, template = "Tink AES-GCM-HKDF 1 MiB", streamingaead.AES256GCMHKDF1MBKeyTemplate
	}
	h, err := keyset.NewHandle(template())
	if err != nil {
		return Stream{}, err
	}
	a, err := streamingaead.New(h)
	if err != nil {
		return Stream{}, err
	}
	return Stream{
		Name: name, Note: "one thread; segments of the size named",
		Seal: func(w io.Writer) (io.WriteCloser, error) { return a.NewEncryptingWriter(w, nil) },
		Open: func(r io.Reader) (io.Reader, error) { return a.NewDecryptingReader(r, nil) },
	}, nil
}
