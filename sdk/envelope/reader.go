package envelope

import (
	"context"
	"crypto/hmac"
	"errors"
	"io"
)

// Reader opens a stream. It hands out only whole segments that are authentic
// and in their place, and ends with io.EOF only behind the authentic end of the
// stream. Any other error is final, and is returned again by later calls. It
// is used by one goroutine at a time.
type Reader struct {
	ctx     context.Context
	o       *Opener
	r       io.Reader
	s       *openedStream
	workers int
	crew    crew // all but the caller's goroutine

	turn  *openTurn   // being handed out
	busy  []*openTurn // read ahead and being opened, oldest first
	plain []byte      // authentic, and not yet handed out
	spare []byte
	next  uint64 // segment that the next turn starts with
	turns uint64 // begun
	peek  byte   // first byte of the next turn, if next > 0
	ended bool   // no turn follows those begun
	err   error
}

// openTurn is what is read at once, and opened by the workers together.
type openTurn struct {
	buf   []byte
	n     int    // bytes of buf that are the turn's
	first uint64 // number of its first segment
	count int    // segments
	last  bool   // the last of them is the stream's last
	at    int    // segment to be handed out next
	good  int    // segments that are open and authentic
	plain []byte // the last of them, with one worker
	err   error  // what comes after the good ones; nil: more turns

	nonces [maxTurnSegments]segmentNonce
	// With several workers: the segments, and what became of each.
	parts    parts
	outcomes [maxTurnSegments]error
}

// openedStream is a stream whose first segment is yet to be opened.
type openedStream struct {
	cipher *segmentCipher
	by     KeyID
	// contextErr is told once the first segment is authentic.
	contextErr error
}

// start reads what stands before the segments, but for the header, and derives
// the stream's keys.
func (o *Opener) start(h *Header, r io.Reader, bound Context) (*openedStream, error) {
	i, err := o.accept(h, Stream)
	if err != nil {
		return nil, err
	}
	if err := o.admit(); err != nil {
		return nil, err
	}
	var keys contentKeys // Any
	defer keys.wipe()
	var enc *encodedHeader
	if o.policy == Any {
		if i, err = o.unwrapFirst(&keys, h); err != nil {
			return nil, err
		}
		enc = encode(h)
	} else {
		if h.Commitment != o.header.Commitment {
			return nil, ErrCorrupt
		}
		enc = o.encoded[Stream][boundIndex(h.Bound)]
	}

	buf := make([]byte, contextTagSize+streamHeaderSize)
	if !h.Bound {
		buf = buf[:streamHeaderSize]
	}
	n, err := fill(r, buf)
	if err != nil {
		return nil, err
	}
	tag, head := buf[:len(buf)-streamHeaderSize], buf[len(buf)-streamHeaderSize:]
	switch {
	case n <= len(tag):
		return nil, ErrTruncated
	case head[0] != streamHeaderSize:
		return nil, ErrCorrupt
	case n < len(buf):
		return nil, ErrTruncated
	}

	s := &openedStream{by: h.Recipients[i]}
	nonce := (*[streamNonceSize]byte)(head[1:])
	var want [contextTagSize]byte
	if o.policy == Any {
		s.cipher, err = newSegmentCipher(&keys.payload[Stream], nonce, &enc.hash)
		if h.Bound {
			newContextMAC(&keys.context[Stream]).tag(&want, nonce[:], bound)
		}
	} else {
		err = o.m.use(func() (err error) {
			s.cipher, err = newSegmentCipher(&o.m.keys.payload[Stream], nonce, &enc.hash)
			return err
		})
		if err == nil && h.Bound {
			err = o.m.tag(&want, Stream, nonce[:], bound)
		}
	}
	if err != nil {
		return nil, err
	}
	if h.Bound != !bound.IsZero() || h.Bound && !hmac.Equal(want[:], tag) {
		s.contextErr = ErrWrongContext
	}
	return s, nil
}

// NewReader reads the start of a stream from r and makes a reader of its
// plaintext. When ctx ends, the reader fails with its error, though not while
// it waits for r. NewReader fails as Append does where the start of the stream
// tells; r's own errors are returned as they are. A bound context that differs
// is told by the first Read.
//
// A Reader reads ahead: up to 512 KiB for each worker, and 256 KiB if there is
// one. It needs the end of r to know the end of the stream.
func (o *Opener) NewReader(ctx context.Context, r io.Reader, bound Context, opts StreamOptions) (*Reader, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	h, err := ReadHeader(r)
	if err != nil {
		return nil, err
	}
	return o.NewReaderAfter(ctx, h, r, bound, opts)
}

// NewReaderAfter is NewReader for a stream whose header was read before, with
// ReadHeader. r stands behind it.
func (o *Opener) NewReaderAfter(ctx context.Context, h *Header, r io.Reader, bound Context, opts StreamOptions) (*Reader, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := h.validate(); err != nil {
		return nil, err
	}
	s, err := o.start(h, r, bound)
	if err != nil {
		return nil, err
	}
	sr := &Reader{ctx: ctx, o: o, r: r, s: s, workers: opts.workers()}
	sr.crew.size = sr.workers - 1
	return sr, nil
}

// OpenedBy returns the id of the key that opens the stream, as AppendBy does.
func (r *Reader) OpenedBy() KeyID { return r.s.by }

// Read hands out plaintext.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.plain) == 0 {
		if err := r.advance(p); err != nil {
			return 0, err
		}
	}
	n := min(len(p), len(r.plain))
	if &p[0] != &r.plain[0] {
		copy(p, r.plain)
	}
	r.plain = r.plain[n:]
	return n, nil
}

// WriteTo writes the plaintext to w, without copying it.
func (r *Reader) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for {
		if len(r.plain) == 0 {
			if err := r.advance(nil); err == io.EOF {
				return total, nil
			} else if err != nil {
				return total, err
			}
		}
		n, err := w.Write(r.plain)
		if err == nil && n != len(r.plain) {
			err = io.ErrShortWrite
		}
		if n >= 0 && n <= len(r.plain) {
			total += int64(n)
			r.plain = r.plain[n:]
		}
		if err != nil {
			return total, err
		}
	}
}

// advance makes the next segment that has plaintext available, or fails. If
// the caller's goroutine opens it, and p has room for any, it lies in p.
func (r *Reader) advance(p []byte) error {
	for r.err == nil && len(r.plain) == 0 {
		if err := r.ctx.Err(); err != nil {
			return r.fail(err)
		}
		// A lease that ended stops the reader at its next segment.
		if err := r.o.admit(); err != nil {
			return r.fail(err)
		}
		t := r.turn
		if t != nil && r.workers == 1 && t.at == t.good && t.good < t.count {
			dst := t.sealed(t.at)
			if len(p) >= segmentPlain {
				dst = p
			}
			if t.openNext(r.s, dst) {
				if err := r.o.admit(); err != nil {
					clear(t.plain)
					return r.fail(err)
				}
			}
		}
		switch {
		case t == nil:
			r.turn = r.nextTurn()
		case t.at < t.good:
			if r.plain = t.plain; r.workers > 1 {
				sealed := t.sealed(t.at)
				r.plain = sealed[:len(sealed)-tagSize]
			}
			t.at++
		case t.err != nil:
			return r.fail(t.err)
		default:
			freeBuffer(r.spare)
			r.spare, r.turn = t.buf, nil
			r.turn = r.nextTurn()
		}
	}
	return r.err
}

// nextTurn returns the next turn, opened if there are several workers, and keeps
// the others busy with those that follow it.
func (r *Reader) nextTurn() *openTurn {
	if len(r.busy) == 0 {
		r.read()
	}
	t := r.busy[0]
	r.busy = append(r.busy[:0], r.busy[1:]...)
	// The first turn is short and is not kept waiting for a slow source.
	if t.first > 0 {
		for len(r.busy) < r.workers-1 && !r.ended {
			r.read()
			if ahead := r.busy[len(r.busy)-1]; ahead.count > 0 {
				r.crew.share(&ahead.parts)
			}
		}
	}
	if r.workers > 1 && t.count > 0 {
		r.finish(t)
	}
	return t
}

// read reads a turn.
func (r *Reader) read() {
	segments := turnSegments(r.turns, r.workers)
	size := segments * segmentSize
	r.turns++
	buf := r.spare
	r.spare = nil
	if len(buf) <= size {
		freeBuffer(buf)
		buf = newBuffer(segments)
	}
	t := &openTurn{buf: buf, first: r.next}
	from := streamHeaderSize
	if t.first > 0 {
		buf[0] = r.peek
		from = 1
	}
	n, err := fill(r.r, buf[from:size+1])
	t.n = from + n
	switch {
	case err != nil:
		// What is followed by another byte is not the last and can be opened.
		t.err = err
		t.count = (t.n - 1) / segmentSize
		t.n = t.count * segmentSize
	case t.n > size:
		r.peek = buf[size]
		t.n = size
		t.count = size / segmentSize
	default:
		t.last = true
		t.err = io.EOF
		t.count = (t.n + segmentSize - 1) / segmentSize
	}
	r.ended = t.err != nil
	r.next += uint64(t.count)
	r.busy = append(r.busy, t)
	if t.count > 0 {
		t.parts.start(t.count, func(i int) { _, t.outcomes[i] = t.open(r.s, i, t.sealed(i)) }) // in place
	}
}

// finish opens what is left of t and helps with those that follow until the
// others are done with it, and finds how many segments are good up to the first
// that is not.
func (r *Reader) finish(t *openTurn) {
	t.parts.share()
	for _, next := range r.busy {
		next.parts.until(&t.parts)
	}
	<-t.parts.done
	for t.good < t.count {
		if err := t.outcomes[t.good]; err != nil {
			t.err = err
			t.count = t.good
			return
		}
		t.good++
	}
}

// openNext opens the segment that follows the good ones into dst, which may be
// that segment itself. It is for one worker.
func (t *openTurn) openNext(s *openedStream, dst []byte) bool {
	plain, err := t.open(s, t.good, dst)
	if err != nil {
		t.err = err
		t.count = t.good
		return false
	}
	t.plain = plain
	t.good++
	return true
}

// open opens segment i into dst, which may be that segment itself, and leaves
// no plaintext there if it fails.
func (t *openTurn) open(s *openedStream, i int, dst []byte) ([]byte, error) {
	number := t.first + uint64(i)
	plain, err := s.cipher.open(&t.nonces[i], dst, t.sealed(i), number, t.last && i == t.count-1)
	if err == nil && number == 0 {
		err = s.contextErr
	}
	if err != nil {
		clear(plain)
		return nil, err
	}
	return plain, nil
}

// sealed returns the bytes of segment i.
func (t *openTurn) sealed(i int) []byte {
	lo, hi := i*segmentSize, min((i+1)*segmentSize, t.n)
	if t.first == 0 && i == 0 {
		lo = streamHeaderSize
	}
	return t.buf[lo:hi]
}

// Close wipes what was opened and not yet read; it does not close the reader
// below. Afterwards Read fails with ErrClosed, if it has not failed before.
func (r *Reader) Close() error {
	if r.err == nil || errors.Is(r.err, io.EOF) {
		r.fail(ErrClosed)
	}
	return nil
}

// fail ends the reader with err and wipes its buffers.
func (r *Reader) fail(err error) error {
	r.err = err
	for _, t := range r.busy {
		if t.count > 0 {
			t.parts.abandon()
		}
		freeBuffer(t.buf)
	}
	if r.turn != nil {
		freeBuffer(r.turn.buf)
	}
	freeBuffer(r.spare)
	r.turn, r.busy, r.spare, r.plain = nil, nil, nil, nil
	return err
}
