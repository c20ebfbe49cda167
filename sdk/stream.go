package sdk

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// held is the lease of an open stream.
type held struct {
	client *Client
	lease  *lease
	set    *set // whom it is for, if for a Group
	once   sync.Once
}

func (s *held) release() {
	s.once.Do(func() { s.client.release(s.lease) })
}

// hold obtains a lease of k for a stream.
func (c *Client) hold(ctx context.Context, k *leaseKey) (*held, error) {
	for range maxAttempts {
		l, err := c.obtain(ctx, k)
		if err != nil {
			return nil, err
		}
		if c.acquire(l) == nil {
			return &held{client: c, lease: l}, nil
		}
	}
	return nil, errTooShort()
}

// err says in this package's terms why the stream failed.
func (s *held) err(err error) error {
	why := err
	if ended := s.lease.ended.Load(); errors.Is(err, envelope.ErrWiped) && ended != nil {
		why = *ended
	}
	switch why {
	case errLapsed:
		return unavailable("the lease ended while the stream was open")
	case errDropped:
		return unavailable("the key was dropped while the stream was open")
	}
	return s.set.told(why)
}

// Writer seals what is written to it as a stream. It is for one goroutine at
// a time, and must be closed or aborted.
type Writer struct {
	held
	w *envelope.Writer
}

// SealWriter returns a Writer that seals for t and writes the blob to w. The
// blob is complete, and opens, only if Close returns nil. When ctx ends, the
// Writer fails with its error.
//
// While the Writer is open its lease is renewed; if that fails, or the key is
// destroyed, the Writer fails at its next turn of at most 1 MiB, as Open would.
func (c *Client) SealWriter(ctx context.Context, t Target, w io.Writer) (*Writer, error) {
	if err := t.validate(); err != nil {
		return nil, err
	}
	k := leaseKey{tenant: t.Tenant, subject: t.Subject, class: t.Class, purpose: keydv1.Purpose_PURPOSE_SEAL}
	return c.sealWriter(ctx, &k, nil, t.Context, w)
}

// Write seals p. After an error the stream cannot be completed.
func (w *Writer) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	return n, w.done(err)
}

// ReadFrom seals what r reads, up to its end.
func (w *Writer) ReadFrom(r io.Reader) (int64, error) {
	n, err := w.w.ReadFrom(r)
	return n, w.done(err)
}

// Close completes the stream. It does not close the writer below.
func (w *Writer) Close() error {
	err := w.w.Close()
	w.release()
	return w.held.err(err)
}

// Abort gives the stream up: what was written does not open, and later calls
// fail with cause.
func (w *Writer) Abort(cause error) {
	w.w.Abort(cause)
	w.release()
}

func (w *Writer) done(err error) error {
	if err == nil {
		return nil
	}
	w.release()
	return w.held.err(err)
}

// Reader opens a stream. It is for one goroutine at a time, and must be
// closed.
type Reader struct {
	held
	r *envelope.Reader
}

// OpenReader returns a Reader of the stream that r reads, which a Writer made
// for t. It reads the stream's header at once. Whatever the Reader returns is
// authentic; only after io.EOF is it also complete. When ctx ends, the Reader
// fails with its error.
//
// While the Reader is open its lease is renewed; if that fails, or the key is
// destroyed, the Reader fails at its next turn of at most 1 MiB, as Open would.
func (c *Client) OpenReader(ctx context.Context, t Target, r io.Reader) (*Reader, error) {
	if err := t.validate(); err != nil {
		return nil, err
	}
	h, err := envelope.ReadHeader(r)
	if err != nil {
		return nil, err
	}
	k, err := openKey(&t, h, envelope.Stream)
	if err != nil {
		return nil, err
	}
	s, err := c.hold(ctx, &k)
	if err != nil {
		return nil, err
	}
	er, err := s.lease.opener.NewReaderAfter(ctx, h, r, t.Context, envelope.StreamOptions{})
	if err != nil {
		s.release()
		return nil, s.err(err)
	}
	return &Reader{held: held{client: c, lease: s.lease}, r: er}, nil
}

// Read reads plaintext.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	return n, r.done(err)
}

// WriteTo writes all plaintext that is left to w.
func (r *Reader) WriteTo(w io.Writer) (int64, error) {
	n, err := r.r.WriteTo(w)
	if err == nil {
		r.release()
	}
	return n, r.done(err)
}

// Close wipes what is buffered. It does not close the reader below.
func (r *Reader) Close() error {
	err := r.r.Close()
	r.release()
	return r.held.err(err)
}

func (r *Reader) done(err error) error {
	if err == nil {
		return nil
	}
	r.release()
	return r.held.err(err)
}

// ReaderAt opens parts of a stream. It is safe for concurrent use, and must
// be closed.
type ReaderAt struct {
	held
	r      *envelope.ReaderAt
	closed atomic.Bool
}

// OpenReaderAt returns a ReaderAt of the stream of size bytes that r reads,
// which a Writer made for t. ctx bounds the wait for keyd.
//
// The lease is renewed while the ReaderAt is open, and bounds it as it does a
// Reader.
func (c *Client) OpenReaderAt(ctx context.Context, t Target, r io.ReaderAt, size int64) (*ReaderAt, error) {
	if err := t.validate(); err != nil {
		return nil, err
	}
	h, err := envelope.ReadHeader(io.NewSectionReader(r, 0, size))
	if err != nil {
		return nil, err
	}
	k, err := openKey(&t, h, envelope.Stream)
	if err != nil {
		return nil, err
	}
	s, err := c.hold(ctx, &k)
	if err != nil {
		return nil, err
	}
	er, err := s.lease.opener.NewReaderAt(r, size, t.Context)
	if err != nil {
		s.release()
		return nil, s.err(err)
	}
	return &ReaderAt{held: held{client: c, lease: s.lease}, r: er}, nil
}

// ReadAt reads plaintext at an offset of the plaintext.
func (r *ReaderAt) ReadAt(p []byte, off int64) (int, error) {
	if r.closed.Load() {
		return 0, envelope.ErrClosed
	}
	n, err := r.r.ReadAt(p, off)
	return n, r.err(err)
}

// Size returns the size of the plaintext, which is authenticated.
func (r *ReaderAt) Size() int64 { return r.r.Size() }

// Close gives up the lease. Reads afterwards fail with envelope.ErrClosed.
func (r *ReaderAt) Close() error {
	r.closed.Store(true)
	r.release()
	return nil
}
