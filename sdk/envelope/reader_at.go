package envelope

import (
	"errors"
	"io"
	"sync"
)

// ReaderAt opens any part of a stream without what precedes it: a read opens
// the segments that it touches, of 64 KiB each, and no more. It keeps nothing
// that it has opened. It is safe for concurrent use.
type ReaderAt struct {
	o        *Opener
	r        io.ReaderAt
	base     int64 // offset of the stream header in r
	length   int64 // from the stream header on
	segments int64
	s        *openedStream
	buffers  sync.Pool // *segmentBuffer
}

type segmentBuffer struct {
	sealed, plain [segmentSize]byte
	nonce         segmentNonce
}

var errNegativeOffset = errors.New("envelope: negative offset")

// NewReaderAt makes a reader of the stream that r holds from offset 0 to
// size. It authenticates the first and the last segment, so that Size can be
// relied on. It fails as NewReader and Reader.Read do.
func (o *Opener) NewReaderAt(r io.ReaderAt, size int64, bound Context) (*ReaderAt, error) {
	size = max(size, 0)
	section := io.NewSectionReader(r, 0, size)
	h, err := ReadHeader(section)
	if err != nil {
		return nil, err
	}
	s, err := o.start(h, section, bound)
	if err != nil {
		return nil, err
	}
	read, err := section.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, err
	}
	a := &ReaderAt{o: o, r: r, s: s}
	a.buffers.New = func() any { return new(segmentBuffer) }
	a.base = read - streamHeaderSize
	a.length = size - a.base
	a.segments = (a.length + segmentSize - 1) / segmentSize
	if a.segments > maxSegments {
		return nil, ErrTooLarge
	}
	b := a.buffers.Get().(*segmentBuffer)
	defer a.recycle(b)
	if _, err := a.open(b, 0); err != nil {
		return nil, err
	}
	if s.contextErr != nil {
		return nil, s.contextErr
	}
	if a.segments > 1 {
		if _, err := a.open(b, a.segments-1); err != nil {
			return nil, err
		}
	}
	if err := o.admit(); err != nil {
		return nil, err
	}
	return a, nil
}

// OpenedBy returns the id of the key that opens the stream, as AppendBy does.
func (a *ReaderAt) OpenedBy() KeyID { return a.s.by }

// Size returns the size of the plaintext in bytes.
func (a *ReaderAt) Size() int64 {
	return a.length - streamHeaderSize - a.segments*tagSize
}

// ReadAt implements io.ReaderAt. When it fails because of the key or the
// lease, p holds no plaintext; otherwise what it returns is authentic.
func (a *ReaderAt) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, errNegativeOffset
	}
	if off >= a.Size() {
		return 0, io.EOF
	}
	var end error
	if rest := a.Size() - off; int64(len(p)) > rest {
		p, end = p[:rest], io.EOF
	}
	b := a.buffers.Get().(*segmentBuffer)
	defer a.recycle(b)
	n := 0
	for n < len(p) {
		if err := a.o.admit(); err != nil {
			clear(p[:n])
			return 0, err
		}
		// The stream header takes plaintext's place in segment 0.
		at := off + int64(n) + streamHeaderSize
		i := at / segmentPlain
		plain, err := a.open(b, i)
		if err != nil {
			return n, err
		}
		skip := at - i*segmentPlain
		if i == 0 {
			skip -= streamHeaderSize
		}
		n += copy(p[n:], plain[skip:])
	}
	if err := a.o.admit(); err != nil {
		clear(p[:n])
		return 0, err
	}
	return n, end
}

// open reads and opens segment i.
func (a *ReaderAt) open(b *segmentBuffer, i int64) ([]byte, error) {
	lo, hi := i*segmentSize, min((i+1)*segmentSize, a.length)
	if i == 0 {
		lo = streamHeaderSize
	}
	sealed := b.sealed[:hi-lo]
	n, err := a.r.ReadAt(sealed, a.base+lo)
	if n < len(sealed) {
		if err == io.EOF {
			err = ErrTruncated // less than the size that was stated
		}
		return nil, err
	}
	return a.s.cipher.open(&b.nonce, b.plain[:0], sealed, uint64(i), i == a.segments-1)
}

func (a *ReaderAt) recycle(b *segmentBuffer) {
	clear(b.plain[:])
	a.buffers.Put(b)
}
