package peers

import (
	"bytes"
	"io"

	"filippo.io/age"
)

const ageNote = "an X25519 recipient and a fresh file key a message; ChaCha20-Poly1305 in segments of 64 KiB"

// AgeOneShot is age with a message a file.
func AgeOneShot() (OneShot, error) {
	s, err := AgeStream()
	if err != nil {
		return OneShot{}, err
	}
	return OneShot{
		Name: "age", Note: ageNote,
		Seal: func(_, plaintext []byte) ([]byte, error) {
			var b bytes.Buffer
			w, err := s.Seal(&b)
			if err != nil {
				return nil, err
			}
			if _, err := w.Write(plaintext); err != nil {
				return nil, err
			}
			err = w.Close()
			return b.Bytes(), err
		},
		Open: func(_, sealed []byte) ([]byte, error) {
			r, err := s.Open(bytes.NewReader(sealed))
			if err != nil {
				return nil, err
			}
			return io.ReadAll(r)
		},
	}, nil
}

// AgeStream is age.
func AgeStream() (Stream, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return Stream{}, err
	}
	return Stream{
		Name: "age", Note: ageNote,
		Seal: func(w io.Writer) (io.WriteCloser, error) { return age.Encrypt(w, id.Recipient()) },
		Open: func(r io.Reader) (io.Reader, error) { return age.Decrypt(r, id) },
	}, nil
}
