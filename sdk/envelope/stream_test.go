package envelope

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/iotest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Sizes of plaintexts at which the framing turns.
var streamSizes = []int{
	0, 1, 100, 4096,
	segmentPlain - streamHeaderSize - 1, segmentPlain - streamHeaderSize, segmentPlain - streamHeaderSize + 1,
	2*segmentPlain - streamHeaderSize - 1, 2*segmentPlain - streamHeaderSize, 2*segmentPlain - streamHeaderSize + 1,
	5*segmentPlain - streamHeaderSize - 1, 5*segmentPlain - streamHeaderSize, 5*segmentPlain - streamHeaderSize + 1,
	21*segmentPlain - streamHeaderSize, 21*segmentPlain - streamHeaderSize + 1,
	3 << 20, 70*segmentPlain - streamHeaderSize,
}

// sizesFor leaves out the long ones where there is more than one recipient:
// the framing does not depend on them.
func sizesFor(recipients int) []int {
	if recipients > 1 {
		return streamSizes[:10]
	}
	return streamSizes
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func sealStream(t testing.TB, s *Sealer, plain []byte, ctx Context, workers int) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := s.NewWriter(context.Background(), &buf, ctx, StreamOptions{Workers: workers})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := w.Write(plain); n != len(plain) || err != nil {
		t.Fatal(n, err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// openStream returns what a Reader hands out, and how it ends.
func openStream(o *Opener, blob io.Reader, ctx Context, workers int) ([]byte, error) {
	r, err := o.NewReader(context.Background(), blob, ctx, StreamOptions{Workers: workers})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	plain, err := io.ReadAll(r)
	if err == nil {
		if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			return nil, fmt.Errorf("after the end: %d, %v", n, err)
		}
	} else if n, again := r.Read(make([]byte, 1)); n != 0 || again != err {
		return nil, fmt.Errorf("failed with %v, then %d, %v", err, n, again)
	}
	return plain, err
}

// openStreamAt is openStream through a ReaderAt.
func openStreamAt(o *Opener, blob []byte, ctx Context) ([]byte, error) {
	r, err := o.NewReaderAt(bytes.NewReader(blob), int64(len(blob)), ctx)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(r, 0, r.Size()))
}

func TestStreamRoundTrip(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy Policy, n int) {
		s, o := pair(t, policy, n)
		for _, ctx := range []Context{{}, bound(t, "thread", "42")} {
			for i, size := range sizesFor(n) {
				plain := randomBytes(size)
				workers := i%3 + 1
				blob := sealStream(t, s, plain, ctx, workers)
				for _, workers := range []int{1, 3} {
					got, err := openStream(o, bytes.NewReader(blob), ctx, workers)
					if err != nil {
						t.Fatalf("%d bytes, %d workers: %v", size, workers, err)
					}
					if !bytes.Equal(got, plain) {
						t.Fatalf("%d bytes, %d workers: opened to something else", size, workers)
					}
				}
				got, err := openStreamAt(o, blob, ctx)
				if err != nil || !bytes.Equal(got, plain) {
					t.Fatalf("%d bytes at random: %v", size, err)
				}
			}
		}
	})
}

func TestStreamInSmallPieces(t *testing.T) {
	s, o := pair(t, Single, 1)
	plain := randomBytes(3*segmentPlain + 77)
	for _, workers := range []int{1, 2} {
		var buf bytes.Buffer
		w := must[*Writer](t)(s.NewWriter(context.Background(), &buf, Context{}, StreamOptions{Workers: workers}))
		for rest := plain; len(rest) > 0; {
			n := min(len(rest), 997)
			if _, err := w.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		got, err := openStream(o, iotest.HalfReader(iotest.DataErrReader(&buf)), Context{}, workers)
		if err != nil || !bytes.Equal(got, plain) {
			t.Fatal(err)
		}
	}
}

func TestStreamByCopy(t *testing.T) {
	s, o := pair(t, Single, 1)
	for _, size := range streamSizes {
		for _, workers := range []int{1, 2} {
			plain := randomBytes(size)
			var sealed, opened bytes.Buffer
			w := must[*Writer](t)(s.NewWriter(context.Background(), &sealed, Context{}, StreamOptions{Workers: workers}))
			if n, err := w.ReadFrom(bytes.NewReader(plain)); n != int64(size) || err != nil {
				t.Fatal(n, err)
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			r := must[*Reader](t)(o.NewReader(context.Background(), &sealed, Context{}, StreamOptions{Workers: workers}))
			if n, err := r.WriteTo(&opened); n != int64(size) || err != nil {
				t.Fatal(n, err)
			}
			if !bytes.Equal(opened.Bytes(), plain) {
				t.Fatal("opened to something else")
			}
		}
	}
}

func TestReaderAt(t *testing.T) {
	s, o := pair(t, Single, 1)
	plain := randomBytes(5*segmentPlain + 1000)
	ctx := bound(t, "row", "9")
	r := must[*ReaderAt](t)(o.NewReaderAt(bytes.NewReader(sealStream(t, s, plain, ctx, 1)), int64(len(sealStream(t, s, plain, ctx, 1))), ctx))
	if r.Size() != int64(len(plain)) {
		t.Fatalf("size is %d, want %d", r.Size(), len(plain))
	}
	first := int64(segmentPlain - streamHeaderSize)
	for _, off := range []int64{0, 1, first - 1, first, first + 1, first + segmentPlain, r.Size() - 1, r.Size()} {
		for _, n := range []int{0, 1, 4096, segmentPlain, 2*segmentPlain + 5} {
			p := make([]byte, n)
			got, err := r.ReadAt(p, off)
			want := plain[off:min(int(off)+n, len(plain))]
			if off == r.Size() && err == io.EOF {
				continue
			}
			if got != len(want) || !bytes.Equal(p[:got], want) {
				t.Fatalf("%d bytes at %d: got %d", n, off, got)
			}
			if (got < n) != (err == io.EOF) || err != nil && err != io.EOF {
				t.Fatalf("%d bytes at %d: got %d, %v", n, off, got, err)
			}
		}
	}
	if _, err := r.ReadAt(make([]byte, 1), -1); err == nil || err == io.EOF {
		t.Fatal(err)
	}
}

// countingReaderAt counts what is read below a ReaderAt.
type countingReaderAt struct {
	io.ReaderAt
	bytes int
}

func (c *countingReaderAt) ReadAt(p []byte, off int64) (int, error) {
	c.bytes += len(p)
	return c.ReaderAt.ReadAt(p, off)
}

func TestReaderAtTouchesOneSegment(t *testing.T) {
	s, o := pair(t, Single, 1)
	blob := sealStream(t, s, randomBytes(10*segmentPlain), Context{}, 1)
	c := &countingReaderAt{ReaderAt: bytes.NewReader(blob)}
	r := must[*ReaderAt](t)(o.NewReaderAt(c, int64(len(blob)), Context{}))
	c.bytes = 0
	if _, err := r.ReadAt(make([]byte, 4096), 4*segmentPlain+100); err != nil {
		t.Fatal(err)
	}
	if c.bytes != segmentSize {
		t.Fatalf("a read of 4 KiB read %d bytes", c.bytes)
	}
}

// limitedWriter fails when more than n bytes are written.
type limitedWriter struct {
	bytes.Buffer
	n int
}

var errFull = errors.New("full")

func (l *limitedWriter) Write(p []byte) (int, error) {
	if l.Len()+len(p) > l.n {
		return 0, errFull
	}
	return l.Buffer.Write(p)
}

// An unfinished stream never opens, however it was given up.
func TestUnfinishedStreamDoesNotOpen(t *testing.T) {
	errGone := errors.New("lease is over")
	cancelled, cancel := context.WithCancel(context.Background())
	for name, giveUp := range map[string]struct {
		ctx     context.Context
		at      func(w *Writer, s *Sealer, check *error)
		limit   int
		wantErr error
	}{
		"abort":           {at: func(w *Writer, _ *Sealer, _ *error) { w.Abort(errGone) }, wantErr: errGone},
		"abort, no cause": {at: func(w *Writer, _ *Sealer, _ *error) { w.Abort(nil) }, wantErr: ErrClosed},
		"cancelled":       {ctx: cancelled, at: func(*Writer, *Sealer, *error) { cancel() }, wantErr: context.Canceled},
		"lease":           {at: func(_ *Writer, _ *Sealer, check *error) { *check = errGone }, wantErr: errGone},
		"wiped":           {at: func(_ *Writer, s *Sealer, _ *error) { s.Wipe() }, wantErr: ErrWiped},
		"source fails": {at: func(w *Writer, _ *Sealer, _ *error) {
			w.ReadFrom(iotest.ErrReader(errGone))
		}, wantErr: errGone},
		"no space": {at: func(*Writer, *Sealer, *error) {}, limit: 3 << 20, wantErr: errFull},
	} {
		for _, workers := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s, %d workers", name, workers), func(t *testing.T) {
				var check error
				key := randomKey(1, 2)
				s := must[*Sealer](t)(NewSealer(key, Options{Check: func() error { return check }}))
				o := must[*Opener](t)(NewOpener(key, Options{}))
				out := &limitedWriter{n: 1 << 30}
				if giveUp.limit > 0 {
					out.n = giveUp.limit
				}
				ctx := giveUp.ctx
				if ctx == nil {
					ctx = context.Background()
				} else {
					ctx, cancel = context.WithCancel(context.Background())
				}
				w := must[*Writer](t)(s.NewWriter(ctx, out, Context{}, StreamOptions{Workers: workers}))
				_, err := w.Write(make([]byte, 5<<20))
				if err == nil {
					giveUp.at(w, s, &check)
					err = w.Close()
				}
				if !errors.Is(err, giveUp.wantErr) {
					t.Fatalf("got %v, want %v", err, giveUp.wantErr)
				}
				check = nil
				if again := w.Close(); again != err {
					t.Fatalf("closed again: %v", again)
				}
				if _, again := w.Write([]byte("x")); again != err {
					t.Fatalf("written again: %v", again)
				}
				_, err = openStream(o, bytes.NewReader(out.Bytes()), Context{}, 1)
				if !errors.Is(err, ErrTruncated) {
					t.Fatalf("what was written: %v", err)
				}
			})
		}
	}
}

func TestWriterAfterClose(t *testing.T) {
	s, _ := pair(t, Single, 1)
	var buf bytes.Buffer
	w := must[*Writer](t)(s.NewWriter(context.Background(), &buf, Context{}, StreamOptions{}))
	if err := errors.Join(w.Close(), w.Close()); err != nil {
		t.Fatal(err)
	}
	n := buf.Len()
	w.Abort(errFull)
	if _, err := w.Write([]byte("x")); err != ErrClosed {
		t.Fatal(err)
	}
	if _, err := w.ReadFrom(&buf); err != ErrClosed {
		t.Fatal(err)
	}
	if w.Close() != nil || buf.Len() != n {
		t.Fatal("something was written after Close")
	}
}

// An error of the source is neither truncation nor an end, even where it is
// the one that others use for an early end.
func TestSourceErrorIsReportedAsItIs(t *testing.T) {
	s, o := pair(t, Single, 1)
	blob := sealStream(t, s, randomBytes(2<<20), Context{}, 1)
	for _, cut := range []int{0, 3, 20, 64, 65, 80, 105, 120, 65 + segmentSize, 65 + segmentSize + 1, 1 << 20, len(blob)} {
		for _, workers := range []int{1, 2} {
			src := io.MultiReader(bytes.NewReader(blob[:cut]), iotest.ErrReader(io.ErrUnexpectedEOF))
			got, err := openStream(o, src, Context{}, workers)
			if err != io.ErrUnexpectedEOF {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			// What is whole, authentic and known not to be the last comes first.
			if want := max(0, cut-65-1) / segmentSize; len(got) < want*segmentPlain-streamHeaderSize {
				t.Fatalf("cut at %d: %d bytes came first", cut, len(got))
			}
		}
	}
}
