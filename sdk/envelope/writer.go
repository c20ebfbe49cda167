package envelope

import (
	"context"
	"crypto/rand"
	"io"
)

// Writer seals a stream. What is written to it is sealed in segments, and
// passed on in pieces of at most 512 KiB; Close completes the stream. It is used
// by one goroutine at a time.
//
// Only Close writes the end without which a stream does not open. After any
// error the stream is given up: Write and Close fail with that error and write
// nothing more. When the source of the data fails, call Abort, so that a
// deferred Close does not complete what is not complete.
type Writer struct {
	ctx     context.Context
	s       *Sealer
	w       io.Writer
	cipher  *segmentCipher
	head    []byte // header and context tag, until written
	workers int
	crew    crew // all but the caller's goroutine

	turn  *sealTurn   // being filled
	busy  []*sealTurn // being sealed, oldest first
	spare []byte
	probe [1]byte
	turns uint64 // begun
	err   error  // why nothing more can be written
	done  bool   // Close succeeded
}

// sealTurn is what the workers seal together: up to maxTurnSegments segments,
// each of segmentSize bytes, in which the plaintext leaves room for the tag.
type sealTurn struct {
	buf   []byte
	size  int    // segments it has room for
	first uint64 // number of its first segment
	at    int    // segment being filled, within the turn
	off   int    // where in it the next byte goes
	last  bool   // the segment being filled is the stream's last
	// sealed is how many segments are, with one worker, before the turn is full.
	sealed int
	nonces [maxTurnSegments]segmentNonce
	parts  parts // with several workers: the segments
}

// NewWriter begins a stream that is written to w. When ctx ends, the stream is
// given up. It fails with ErrWiped, the error of Options.Check or that of ctx.
// Nothing is written to w before there is something to write.
func (s *Sealer) NewWriter(ctx context.Context, w io.Writer, bound Context, opts StreamOptions) (*Writer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	sw := &Writer{ctx: ctx, s: s, w: w, workers: opts.workers()}
	sw.crew.size = sw.workers - 1
	var nonce [streamNonceSize]byte
	rand.Read(nonce[:]) // never fails
	var tag [contextTagSize]byte
	var h *encodedHeader
	var err error
	if s.policy == Any {
		var keys contentKeys
		defer keys.wipe()
		if h, err = s.draw(&keys, Stream, bound); err != nil {
			return nil, err
		}
		sw.cipher, err = newSegmentCipher(&keys.payload[Stream], &nonce, &h.hash)
		if !bound.IsZero() {
			newContextMAC(&keys.context[Stream]).tag(&tag, nonce[:], bound)
		}
	} else {
		h = s.encoded[Stream][boundIndex(!bound.IsZero())]
		err = s.m.use(func() (err error) {
			sw.cipher, err = newSegmentCipher(&s.m.keys.payload[Stream], &nonce, &h.hash)
			return err
		})
		if err == nil && !bound.IsZero() {
			err = s.m.tag(&tag, Stream, nonce[:], bound)
		}
	}
	if err != nil {
		return nil, err
	}
	sw.head = append(sw.head, h.raw...)
	if !bound.IsZero() {
		sw.head = append(sw.head, tag[:]...)
	}
	sw.begin(0)
	sw.turn.buf[0] = streamHeaderSize
	sw.turn.off = 1 + copy(sw.turn.buf[1:], nonce[:])
	return sw, nil
}

// begin makes the turn that starts with the given segment.
func (w *Writer) begin(first uint64) {
	n := turnSegments(w.turns, w.workers)
	buf := w.spare
	w.spare = nil
	if len(buf) < n*segmentSize {
		freeBuffer(buf)
		buf = newBuffer(n)
	}
	w.turns++
	w.turn = &sealTurn{buf: buf, size: n, first: first}
}

// room returns where the next plaintext goes in the segment being filled.
func (t *sealTurn) room() []byte {
	return t.buf[t.at*segmentSize+t.off : t.at*segmentSize+segmentPlain]
}

// extend goes on to the next segment, which there must be plaintext for. It
// reports false if the turn has no more.
func (t *sealTurn) extend() bool {
	if t.at+1 == t.size {
		return false
	}
	t.at++
	t.off = 0
	return true
}

// seal seals the segments that are not sealed yet, up to the one being filled.
func (t *sealTurn) seal(c *segmentCipher) {
	for ; t.sealed <= t.at; t.sealed++ {
		t.sealSegment(c, t.sealed)
	}
}

func (t *sealTurn) sealSegment(c *segmentCipher, i int) {
	lo, hi := i*segmentSize, i*segmentSize+segmentPlain
	if i == t.at {
		hi = i*segmentSize + t.off
	}
	if t.first == 0 && i == 0 {
		lo += streamHeaderSize
	}
	c.seal(&t.nonces[i], t.buf[lo:hi], t.first+uint64(i), t.last && i == t.at)
}

// bytes is the turn as it goes out, once sealed.
func (t *sealTurn) bytes() []byte { return t.buf[:t.at*segmentSize+t.off+tagSize] }

// Write seals p, all of it or fails.
func (w *Writer) Write(p []byte) (int, error) {
	if err := w.usable(); err != nil {
		return 0, err
	}
	n := 0
	for n < len(p) {
		room := w.turn.room()
		if len(room) == 0 {
			// Full, and not the last, for there is more.
			if w.workers == 1 {
				w.turn.seal(w.cipher) // while it is in the cache
			}
			if !w.turn.extend() {
				if err := w.flush(); err != nil {
					return n, err
				}
			}
			continue
		}
		m := copy(room, p[n:])
		w.turn.off += m
		n += m
	}
	return n, nil
}

// ReadFrom seals what r has until its end, without copying it. If r fails, the
// stream is given up. It does not close the stream.
func (w *Writer) ReadFrom(r io.Reader) (int64, error) {
	var total int64
	for {
		if err := w.usable(); err != nil {
			return total, err
		}
		room := w.turn.room()
		full := len(room) == 0
		if full {
			room = w.probe[:] // is there more?
		}
		m, err := r.Read(room)
		if m < 0 || m > len(room) {
			return total, w.fail(errReadCount)
		}
		total += int64(m)
		if full && m > 0 {
			if _, err := w.Write(w.probe[:]); err != nil {
				return total - 1, err
			}
		} else {
			w.turn.off += m
		}
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			w.fail(err)
			return total, err
		}
	}
}

func (w *Writer) usable() error {
	if w.err != nil {
		return w.err
	}
	if w.done {
		return ErrClosed
	}
	if err := w.ctx.Err(); err != nil {
		return w.fail(err)
	}
	return nil
}

// flush has the turn sealed and begins the next.
func (w *Writer) flush() error {
	t := w.turn
	next := t.first + uint64(t.at) + 1
	if next >= maxSegments {
		return w.fail(ErrTooLarge)
	}
	if err := w.s.admit(); err != nil {
		return w.fail(err)
	}
	if w.workers == 1 {
		t.seal(w.cipher)
	} else {
		w.share(t)
		if len(w.busy) < w.workers {
			w.begin(next)
			return nil
		}
		t = w.finishOldest()
	}
	w.turn = nil
	if err := w.emit(t); err != nil {
		return err
	}
	w.begin(next)
	return nil
}

// share has the other workers begin to seal t.
func (w *Writer) share(t *sealTurn) {
	t.parts.start(t.at+1, func(i int) { t.sealSegment(w.cipher, i) })
	w.busy = append(w.busy, t)
	w.crew.share(&t.parts)
}

// finishOldest returns the oldest turn that is being sealed, once it is, and
// helps to seal it and those that follow.
func (w *Writer) finishOldest() *sealTurn {
	t := w.busy[0]
	w.busy = append(w.busy[:0], w.busy[1:]...)
	t.parts.share()
	for _, next := range w.busy {
		next.parts.until(&t.parts)
	}
	<-t.parts.done
	return t
}

// emit writes a sealed turn, and keeps its memory for the next.
func (w *Writer) emit(t *sealTurn) error {
	if w.head != nil {
		if err := w.write(w.head); err != nil {
			return err
		}
		w.head = nil
	}
	if err := w.write(t.bytes()); err != nil {
		return err
	}
	freeBuffer(w.spare)
	w.spare = t.buf
	return nil
}

func (w *Writer) write(b []byte) error {
	n, err := w.w.Write(b)
	if err == nil && n != len(b) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return w.fail(err)
	}
	return nil
}

// Close seals what is left as the last segment, writes it, and ends the
// stream. It does not close the writer below. If the stream was given up
// before, it writes nothing and fails with the reason; what was written does
// not open. Closing again after success does nothing.
func (w *Writer) Close() error {
	if w.done {
		return nil
	}
	if err := w.usable(); err != nil {
		return err
	}
	// Everything before the end goes out first: what may take long comes before
	// the last look at ctx and the lease.
	for len(w.busy) > 0 {
		if err := w.emit(w.finishOldest()); err != nil {
			return err
		}
	}
	if err := w.usable(); err != nil {
		return err
	}
	if err := w.s.admit(); err != nil {
		return w.fail(err)
	}
	t := w.turn
	t.last = true
	if w.workers == 1 || t.at == 0 {
		t.seal(w.cipher)
	} else {
		w.turn = nil
		w.share(t)
		w.finishOldest()
	}
	if err := w.emit(t); err != nil {
		return err
	}
	freeBuffer(w.spare)
	w.turn, w.spare, w.done = nil, nil, true
	return nil
}

// Abort gives the stream up: no end is written, and Write and Close fail with
// cause, or with ErrClosed if cause is nil. It does nothing after Close or
// after another failure.
func (w *Writer) Abort(cause error) {
	if w.done || w.err != nil {
		return
	}
	if cause == nil {
		cause = ErrClosed
	}
	w.fail(cause)
}

// fail gives the stream up because of err, and returns err.
func (w *Writer) fail(err error) error {
	w.err = err
	if w.turn != nil {
		freeBuffer(w.turn.buf)
	}
	for _, t := range w.busy {
		t.parts.abandon()
		freeBuffer(t.buf)
	}
	freeBuffer(w.spare)
	w.turn, w.busy, w.spare, w.head = nil, nil, nil, nil
	return err
}
