package envelope

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"sync"
)

// The framing of streams is that of Tink's AES-GCM-HKDF streaming AEAD with a
// 32-byte derived key, HKDF-SHA-256 and these segments. Offsets count from the
// stream header, which takes its place in segment 0.
const (
	segmentSize      = 64 << 10
	segmentPlain     = segmentSize - tagSize
	saltSize         = 32
	streamPrefixSize = 7
	streamHeaderSize = 1 + streamNonceSize
	maxSegments      = 1<<32 - 1
	maxTurnSegments  = 8 // 512 KiB
	maxWorkers       = 8
)

// StreamOptions tune a stream; they have no influence on its bytes.
type StreamOptions struct {
	// Workers is how many goroutines seal or open at once, the caller's among
	// them, which alone reads and writes. 0 means one for each CPU, and 8 at
	// most. A stream takes up to (Workers+2)/2 MiB of memory.
	Workers int
}

func (o StreamOptions) workers() int {
	n := o.Workers
	if n <= 0 {
		n = runtime.GOMAXPROCS(0)
	}
	return min(n, maxWorkers)
}

// turnSegments is how many segments the i-th turn of a stream has: few at
// first, so that short streams take little memory. With one worker there are
// few always: what one goroutine does after the other should find its data in
// the cache.
func turnSegments(i uint64, workers int) int {
	switch {
	case i == 0:
		return 1
	case i == 1 || workers == 1:
		return 4
	}
	return maxTurnSegments
}

// turnBuffers keeps the memory of long turns, wiped, for the next stream.
var turnBuffers = sync.Pool{New: func() any { return new([turnBufferSize]byte) }}

// A turn is read together with one byte that follows it.
const turnBufferSize = maxTurnSegments*segmentSize + 1

// newBuffer returns memory for a turn of n segments.
func newBuffer(n int) []byte {
	if n == maxTurnSegments {
		return turnBuffers.Get().(*[turnBufferSize]byte)[:]
	}
	return make([]byte, n*segmentSize+1)
}

// freeBuffer wipes b, which nobody uses any more.
func freeBuffer(b []byte) {
	clear(b)
	if len(b) == turnBufferSize {
		turnBuffers.Put((*[turnBufferSize]byte)(b))
	}
}

// segmentCipher seals and opens the segments of one stream. It is safe for
// concurrent use.
type segmentCipher struct {
	aead   cipher.AEAD
	prefix [streamPrefixSize]byte
}

// newSegmentCipher derives the key of a stream from the stream key, the salt
// and nonce prefix, and the hash of the header.
func newSegmentCipher(key *secretKey, nonce *[streamNonceSize]byte, hash *[sha256.Size]byte) (*segmentCipher, error) {
	derived, err := hkdf.Key(sha256.New, key[:], nonce[:saltSize], string(hash[:]), KeySize)
	if err != nil {
		return nil, err
	}
	defer clear(derived)
	block, err := aes.NewCipher(derived)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	return &segmentCipher{aead: aead, prefix: [streamPrefixSize]byte(nonce[saltSize:])}, nil
}

// segmentNonce is a nonce's buffer; kept with what outlives a call, it spares
// an allocation a segment.
type segmentNonce [gcmNonceSize]byte

func (n *segmentNonce) set(c *segmentCipher, i uint64, last bool) []byte {
	copy(n[:], c.prefix[:])
	binary.BigEndian.PutUint32(n[streamPrefixSize:], uint32(i))
	n[gcmNonceSize-1] = 0
	if last {
		n[gcmNonceSize-1] = 1
	}
	return n[:]
}

// seal encrypts segment i, whose plaintext is all of b, in place, and returns
// it with its tag, for which b has room.
func (c *segmentCipher) seal(n *segmentNonce, b []byte, i uint64, last bool) []byte {
	return c.aead.Seal(b[:0], n.set(c, i, last), b, nil)
}

// open decrypts segment i into dst, which may be the start of sealed or
// elsewhere, and returns the plaintext. It fails with ErrCorrupt, ErrTruncated or
// ErrTooLarge, and leaves no plaintext then.
func (c *segmentCipher) open(n *segmentNonce, dst, sealed []byte, i uint64, last bool) ([]byte, error) {
	switch {
	case i >= maxSegments:
		return nil, ErrTooLarge
	case len(sealed) < tagSize:
		return nil, ErrTruncated
	case last && i > 0 && len(sealed) == tagSize:
		return nil, ErrCorrupt
	}
	full := segmentSize
	if i == 0 {
		full -= streamHeaderSize
	}
	if last && len(sealed) == full {
		// If this fails it may yet be a segment that others should follow.
		// Opening in place would destroy it before the second try.
		sealed = append([]byte(nil), sealed...)
	}
	plain, err := c.aead.Open(dst[:0], n.set(c, i, last), sealed, nil)
	if err == nil {
		return plain, nil
	}
	if last && len(sealed) == full {
		plain, err = c.aead.Open(dst[:0], n.set(c, i, false), sealed, nil)
		if err == nil {
			clear(plain)
			return nil, ErrTruncated
		}
	}
	return nil, ErrCorrupt
}

// errReadCount: an io.Reader that breaks its contract.
var errReadCount = errors.New("envelope: invalid count from Read")

// fill reads from r until b is full or r has ended: n is then less than
// len(b). An error is r's own, and never io.EOF.
func fill(r io.Reader, b []byte) (n int, err error) {
	for idle := 0; n < len(b); {
		m, err := r.Read(b[n:])
		if m < 0 || m > len(b)-n {
			return n, errReadCount
		}
		n += m
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		if m > 0 {
			idle = 0
		} else if idle++; idle == 100 {
			return n, io.ErrNoProgress
		}
	}
	return n, nil
}
