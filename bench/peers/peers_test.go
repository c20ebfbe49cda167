package peers

import (
	"bytes"
	"io"
	"testing"
)

// What is measured must be the real thing: every peer opens what it sealed,
// and refuses it once a bit is flipped.
func TestOneShot(t *testing.T) {
	for _, make := range []func() (OneShot, error){
		func() (OneShot, error) { return Limit(), nil },
		TinkGCM, TinkXAES, AgeOneShot, Asherah,
		func() (OneShot, error) { return AWSESDK(false) },
		func() (OneShot, error) { return AWSESDK(true) },
	} {
		p, err := make()
		if err != nil {
			t.Fatal(err)
		}
		t.Run(p.Name, func(t *testing.T) {
			if p.Close != nil {
				defer p.Close()
			}
			plain := bytes.Repeat([]byte("plaintext "), 100)
			sealed, err := p.Seal(nil, plain)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(sealed, plain[:50]) {
				t.Error("the plaintext is in the sealed bytes")
			}
			sealed = bytes.Clone(sealed)
			opened, err := p.Open(nil, sealed)
			if err != nil || !bytes.Equal(opened, plain) {
				t.Fatalf("opened %d bytes: %v", len(opened), err)
			}
			sealed[len(sealed)/2] ^= 1
			if _, err := p.Open(nil, sealed); err == nil {
				t.Error("changed bytes open")
			}
		})
	}
}

func TestStream(t *testing.T) {
	for _, make := range []func() (Stream, error){
		func() (Stream, error) { return TinkStream(false) },
		func() (Stream, error) { return TinkStream(true) },
		AgeStream,
	} {
		p, err := make()
		if err != nil {
			t.Fatal(err)
		}
		t.Run(p.Name, func(t *testing.T) {
			plain := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
			var sealed bytes.Buffer
			w, err := p.Seal(&sealed)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(plain); err != nil {
				t.Fatal(err)
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			r, err := p.Open(bytes.NewReader(sealed.Bytes()))
			if err != nil {
				t.Fatal(err)
			}
			opened, err := io.ReadAll(r)
			if err != nil || !bytes.Equal(opened, plain) {
				t.Fatalf("opened %d bytes: %v", len(opened), err)
			}
			r, err = p.Open(bytes.NewReader(sealed.Bytes()[:sealed.Len()-1]))
			if err == nil {
				_, err = io.ReadAll(r)
			}
			if err == nil {
				t.Error("a stream that was cut opens")
			}
		})
	}
}
