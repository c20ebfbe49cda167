package envelope

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"fmt"
	"io"
	"sync"
	"testing"
)

// The limit: AES-256-GCM alone, on one thread, into a buffer that is there.
func rawGCM() cipher.AEAD {
	var key [32]byte
	rand.Read(key[:])
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return aead
}

var oneShotSizes = []int{256, 1 << 10, 4 << 10, 64 << 10}

func BenchmarkOneShot(b *testing.B) {
	ctx := bound(b, "thread", "0123456789abcdef", "checkpoint", "0123456789abcdef")
	for _, size := range oneShotSizes {
		plain := make([]byte, size)
		aead := rawGCM()
		nonce := make([]byte, 12)
		dst := make([]byte, 0, size+256)
		run := func(name string, f func() error) {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if err := f(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		sealed := aead.Seal(nil, nonce, plain, nil)
		run("GCM.Seal", func() error { aead.Seal(dst, nonce, plain, nil); return nil })
		run("GCM.Open", func() error { _, err := aead.Open(dst, nonce, sealed, nil); return err })

		s, o := pair(b, Single, 1)
		blob := must[[]byte](b)(s.Append(nil, plain, Context{}))
		run("Seal", func() error { _, err := s.Append(dst, plain, Context{}); return err })
		run("Open", func() error { _, err := o.Append(dst, blob, Context{}); return err })
		blob = must[[]byte](b)(s.Append(nil, plain, ctx))
		run("Seal+context", func() error { _, err := s.Append(dst, plain, ctx); return err })
		run("Open+context", func() error { _, err := o.Append(dst, blob, ctx); return err })

		s, o = pair(b, Any, 3)
		big := make([]byte, 0, size+1024)
		blob = must[[]byte](b)(s.Append(nil, plain, Context{}))
		run("SealAny3", func() error { _, err := s.Append(big, plain, Context{}); return err })
		run("OpenAny3", func() error { _, err := o.Append(big, blob, Context{}); return err })
	}
}

func BenchmarkOneShotParallel(b *testing.B) {
	const size = 256
	plain := make([]byte, size)
	aead := rawGCM()
	s, o := pair(b, Single, 1)
	blob := must[[]byte](b)(s.Append(nil, plain, Context{}))
	run := func(name string, f func(dst []byte) error) {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			b.RunParallel(func(pb *testing.PB) {
				dst := make([]byte, 0, size+256)
				for pb.Next() {
					if err := f(dst); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
	nonce := make([]byte, 12)
	run("GCM.Seal", func(dst []byte) error { aead.Seal(dst, nonce, plain, nil); return nil })
	run("Seal", func(dst []byte) error { _, err := s.Append(dst, plain, Context{}); return err })
	run("Open", func(dst []byte) error { _, err := o.Append(dst, blob, Context{}); return err })
}

func BenchmarkNew(b *testing.B) {
	keys := randomKeys(3)
	for _, c := range []struct {
		name string
		f    func() error
	}{
		{"Sealer", func() error { _, err := NewSealer(keys[0], Options{}); return err }},
		{"Opener", func() error { _, err := NewOpener(keys[0], Options{}); return err }},
		{"All3", func() error { _, err := NewMultiSealer(All, keys, Options{}); return err }},
		{"Any3", func() error { _, err := NewMultiSealer(Any, keys, Options{}); return err }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.f(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// repeat reads the same bytes n times.
type repeat struct {
	b    []byte
	left int
	off  int
}

func (r *repeat) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.b[r.off:])
	if r.off += n; r.off == len(r.b) {
		r.off = 0
		r.left--
	}
	return n, nil
}

// discard is io.Discard without its ReadFrom.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

const streamBench = 16 << 20

func BenchmarkStream(b *testing.B) {
	for _, threads := range []int{1, 2} {
		for _, op := range []string{"Seal", "Open"} {
			b.Run(fmt.Sprintf("GCM.%s/64KiB/threads=%d", op, threads), func(b *testing.B) {
				b.SetBytes(int64(threads) * streamBench)
				for b.Loop() {
					var wg sync.WaitGroup
					for range threads {
						wg.Go(func() { rawSegments(op, streamBench) })
					}
					wg.Wait()
				}
			})
		}
	}
	s, o := pair(b, Single, 1)
	chunk := randomBytes(256 << 10)
	blob := sealStream(b, s, make([]byte, streamBench), Context{}, 0)
	for _, workers := range []int{1, 2} {
		run := func(name string, f func(b *testing.B)) {
			b.Run(fmt.Sprintf("%s/workers=%d", name, workers), func(b *testing.B) {
				b.SetBytes(streamBench)
				for b.Loop() {
					f(b)
				}
			})
		}
		opts := StreamOptions{Workers: workers}
		run("Write", func(b *testing.B) {
			w := must[*Writer](b)(s.NewWriter(context.Background(), discard{}, Context{}, opts))
			for range streamBench / len(chunk) {
				if _, err := w.Write(chunk); err != nil {
					b.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
		})
		run("ReadFrom", func(b *testing.B) {
			w := must[*Writer](b)(s.NewWriter(context.Background(), discard{}, Context{}, opts))
			if _, err := w.ReadFrom(&repeat{b: chunk, left: streamBench / len(chunk)}); err != nil {
				b.Fatal(err)
			}
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
		})
		run("Read", func(b *testing.B) {
			r := must[*Reader](b)(o.NewReader(context.Background(), bytes.NewReader(blob), Context{}, opts))
			defer r.Close()
			p := make([]byte, 256<<10)
			for {
				if _, err := r.Read(p); err == io.EOF {
					return
				} else if err != nil {
					b.Fatal(err)
				}
			}
		})
		run("WriteTo", func(b *testing.B) {
			r := must[*Reader](b)(o.NewReader(context.Background(), bytes.NewReader(blob), Context{}, opts))
			defer r.Close()
			if _, err := r.WriteTo(discard{}); err != nil {
				b.Fatal(err)
			}
		})
	}
	r := must[*ReaderAt](b)(o.NewReaderAt(bytes.NewReader(blob), int64(len(blob)), Context{}))
	b.Run("ReadAt/4KiB", func(b *testing.B) {
		p := make([]byte, 4096)
		b.SetBytes(4096)
		b.ReportAllocs()
		var off int64
		for b.Loop() {
			if _, err := r.ReadAt(p, off); err != nil {
				b.Fatal(err)
			}
			off = (off + 1234567) % (r.Size() - 4096)
		}
	})
}

// rawSegments seals or opens n bytes in segments that stay in the
// cache.
func rawSegments(op string, n int) {
	aead := rawGCM()
	nonce := make([]byte, 12)
	plain := make([]byte, segmentPlain)
	dst := make([]byte, 0, segmentSize)
	sealed := aead.Seal(nil, nonce, plain, nil)
	for range n / segmentPlain {
		if op == "Seal" {
			aead.Seal(dst, nonce, plain, nil)
		} else if _, err := aead.Open(dst, nonce, sealed, nil); err != nil {
			panic(err)
		}
	}
}
