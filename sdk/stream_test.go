package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

func sealStream(t testing.TB, c *sdk.Client, target sdk.Target, plaintext []byte) []byte {
	t.Helper()
	var blob bytes.Buffer
	w, err := c.SealWriter(t.Context(), target, &blob)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plaintext); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return blob.Bytes()
}

func TestStreams(t *testing.T) {
	c, f, _ := start(t)
	bound, err := alice.Bind(envelope.Pair{Name: "file", Value: "1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 1, 64 << 10, 5<<20 + 17} {
		want := randomBytes(size)
		for _, target := range []sdk.Target{alice, bound} {
			blob := sealStream(t, c, target, want)

			r, err := c.OpenReader(t.Context(), target, iotest.OneByteReader(bytes.NewReader(blob[:min(len(blob), 2000)])))
			if size > 2000 {
				if err == nil {
					_, err = io.ReadAll(r)
					r.Close()
				}
				if err == nil {
					t.Error("a stream that was cut opened")
				}
			} else if err != nil {
				t.Fatal(err)
			} else {
				r.Close()
			}

			r, err = c.OpenReader(t.Context(), target, bytes.NewReader(blob))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d bytes: %d, %v", size, len(got), err)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}

			ra, err := c.OpenReaderAt(t.Context(), target, bytes.NewReader(blob), int64(len(blob)))
			if err != nil {
				t.Fatal(err)
			}
			if ra.Size() != int64(size) {
				t.Errorf("size %d, want %d", ra.Size(), size)
			}
			part := make([]byte, min(size, 1000))
			if _, err := ra.ReadAt(part, int64(size-len(part))); err != nil && err != io.EOF || !bytes.Equal(part, want[size-len(part):]) {
				t.Errorf("ReadAt: %v", err)
			}
			ra.Close()
			if _, err := ra.ReadAt(part, 0); size > 0 && !errors.Is(err, envelope.ErrClosed) {
				t.Errorf("ReadAt of a closed reader: %v", err)
			}
		}
		blob := sealStream(t, c, bound, want)
		r, err := c.OpenReader(t.Context(), alice, bytes.NewReader(blob))
		if err == nil {
			_, err = io.ReadAll(r)
			r.Close()
		}
		if !errors.Is(err, sdk.ErrWrongContext) {
			t.Errorf("another context: %v", err)
		}
	}
	// ReadFrom and WriteTo.
	want := randomBytes(3 << 20)
	var blob, got bytes.Buffer
	w, err := c.SealWriter(t.Context(), alice, &blob)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(w, bytes.NewReader(want)); n != int64(len(want)) || err != nil {
		t.Fatal(n, err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := c.OpenReader(t.Context(), alice, &blob)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(&got, r); n != int64(len(want)) || err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Fatal(n, err)
	}
	r.Close()
	if n := f.asked.Load(); n != 2 {
		t.Errorf("%d queries", n)
	}
}

func TestStreamsAreNotOneShotBlobs(t *testing.T) {
	c, _, _ := start(t)
	stream := sealStream(t, c, alice, []byte("data"))
	blob := mustSeal(t, c, alice, "data")
	_, err := c.Open(t.Context(), alice, stream)
	_, err2 := c.OpenReader(t.Context(), alice, bytes.NewReader(blob))
	_, err3 := c.OpenReaderAt(t.Context(), alice, bytes.NewReader(blob), int64(len(blob)))
	_, _, err4 := c.OpenGroup(t.Context(), sdk.Group{Tenant: "acme", Subjects: []string{"alice"}, Class: "trace"}, stream)
	for i, err := range []error{err, err2, err3, err4} {
		use := []string{"use OpenReader", "use Open", "use Open", "use OpenReader"}[i]
		if !errors.Is(err, envelope.ErrWrongForm) || !errors.Is(err, sdk.ErrInvalidArgument) || !strings.HasSuffix(err.Error(), use) ||
			sdk.OutcomeOf(err) != keydv1.Outcome_OUTCOME_INVALID_ARGUMENT {
			t.Errorf("got %v", err)
		}
	}
	_, err = c.OpenReader(t.Context(), alice, bytes.NewReader([]byte("plain text")))
	if !errors.Is(err, sdk.ErrNotSealed) {
		t.Errorf("got %v", err)
	}
	if _, err := c.OpenReader(t.Context(), alice, iotest.ErrReader(io.ErrClosedPipe)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
	bob := sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}
	if _, err := c.OpenReader(t.Context(), bob, bytes.NewReader(stream)); !errors.Is(err, sdk.ErrWrongSubject) {
		t.Errorf("got %v", err)
	}
}

// A stream that was given up does not open.
func TestAbort(t *testing.T) {
	c, _, _ := start(t)
	var blob bytes.Buffer
	w, err := c.SealWriter(t.Context(), alice, &blob)
	if err != nil {
		t.Fatal(err)
	}
	w.Write(randomBytes(3 << 20))
	cause := errors.New("the source failed")
	w.Abort(cause)
	if err := w.Close(); !errors.Is(err, cause) {
		t.Errorf("Close: %v", err)
	}
	r, err := c.OpenReader(t.Context(), alice, &blob)
	if err == nil {
		_, err = io.ReadAll(r)
		r.Close()
	}
	if err == nil {
		t.Error("it opened")
	}
	ctx, cancel := context.WithCancel(t.Context())
	w, err = c.SealWriter(ctx, alice, &blob)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	w.Write(randomBytes(3 << 20))
	if err := w.Close(); !errors.Is(err, context.Canceled) {
		t.Errorf("Close after ctx: %v", err)
	}
}

// openStreams returns a writer, a reader and a ReaderAt in the middle of
// their streams.
func openStreams(t *testing.T, c *sdk.Client) (w *sdk.Writer, r *sdk.Reader, ra *sdk.ReaderAt) {
	t.Helper()
	blob := sealStream(t, c, alice, randomBytes(20<<20))
	w, err := c.SealWriter(t.Context(), alice, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	r, err = c.OpenReader(t.Context(), alice, bytes.NewReader(blob))
	if err != nil {
		t.Fatal(err)
	}
	ra, err = c.OpenReaderAt(t.Context(), alice, bytes.NewReader(blob), int64(len(blob)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Abort(nil); r.Close(); ra.Close() })
	useStreams(t, w, r, ra)
	return w, r, ra
}

func useStreams(t *testing.T, w *sdk.Writer, r *sdk.Reader, ra *sdk.ReaderAt) {
	t.Helper()
	buf := make([]byte, 1000)
	if _, err := w.Write(buf); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r, buf); err != nil {
		t.Fatal(err)
	}
	if _, err := ra.ReadAt(buf, 10<<20); err != nil {
		t.Fatal(err)
	}
}

// streamErrs returns the errors with which the streams end.
func streamErrs(w *sdk.Writer, r *sdk.Reader, ra *sdk.ReaderAt) [3]error {
	var errs [3]error
	for range 30 {
		if _, errs[0] = w.Write(make([]byte, 1<<20)); errs[0] != nil {
			break
		}
	}
	_, errs[1] = io.Copy(io.Discard, r)
	_, errs[2] = ra.ReadAt(make([]byte, 1000), 5<<20)
	return errs
}

// A lease that ends stops the streams that run on it, with the reason.
func TestStreamsEndWithTheirLease(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(*testing.T, *sdk.Client, *fakeKeyd, *fakeClock)
		want error
	}{
		"lapsed": {func(t *testing.T, c *sdk.Client, f *fakeKeyd, clock *fakeClock) {
			f.setDown(true)
			pass(t, c, clock, time.Minute, time.Second)
		}, sdk.ErrUnavailable},
		"suspended": {func(t *testing.T, c *sdk.Client, f *fakeKeyd, clock *fakeClock) {
			clock.suspend(time.Minute, false)
		}, sdk.ErrUnavailable},
		"revoked": {func(t *testing.T, c *sdk.Client, f *fakeKeyd, clock *fakeClock) {
			eventually(t, "the stream is open", func() bool { return f.isWatching("acme") })
			f.kill("alice", erased, true)
			eventually(t, "the keys are gone", func() bool { return known(c) == 0 })
		}, sdk.ErrErased},
		"renewal refused": {func(t *testing.T, c *sdk.Client, f *fakeKeyd, clock *fakeClock) {
			f.kill("alice", erased, false)
			pass(t, c, clock, 50*time.Second, time.Second)
		}, sdk.ErrErased},
		"destroyed by this client": {func(t *testing.T, c *sdk.Client, f *fakeKeyd, clock *fakeClock) {
			f.with(func() { f.failing = []error{outcomeError(keydv1.Outcome_OUTCOME_HELD, 9)} })
			c.DestroyKey(t.Context(), destroyAlice())
		}, sdk.ErrUnavailable},
		"closed": {func(t *testing.T, c *sdk.Client, f *fakeKeyd, clock *fakeClock) { c.Close() }, sdk.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			c, f, clock := start(t)
			w, r, ra := openStreams(t, c)
			tt.end(t, c, f, clock)
			for i, err := range streamErrs(w, r, ra) {
				if !errors.Is(err, tt.want) {
					t.Errorf("stream %d: %v", i, err)
				}
			}
			if err := w.Close(); !errors.Is(err, tt.want) {
				t.Errorf("Close of the writer: %v", err)
			}
		})
	}
}

// An open stream is in use, even when its other end is slow: its lease is
// renewed, across the end of the bucket too, and it is not given up for room.
func TestOpenStreamsAreRenewed(t *testing.T) {
	c, f, clock := start(t, sdk.WithCacheLimits(2, 1<<30))
	f.with(func() { f.width = time.Hour })
	clock.Advance(50 * time.Minute)
	w, r, ra := openStreams(t, c)
	for i := range 5 { // capacity
		mustSeal(t, c, sdk.Target{Tenant: "acme", Subject: string(rune('a' + i)), Class: "trace"}, "x")
	}
	pass(t, c, clock, 15*time.Minute, 5*time.Second)
	useStreams(t, w, r, ra)
	if errs := streamErrs(w, r, ra); errs != [3]error{} {
		t.Errorf("%v", errs)
	}
	if err := w.Close(); err != nil {
		t.Errorf("%v", err)
	}
	r.Close()
	ra.Close()
	// What is closed is cold.
	pass(t, c, clock, 3*time.Minute, 5*time.Second)
	if n := known(c); n != 0 {
		t.Errorf("%d keys are kept", n)
	}
}

// A writer whose key may not be opened by this client goes on to the end of
// its lease after the bucket has ended, and then stops.
func TestWriterThatMayNotOpen(t *testing.T) {
	c, f, clock := start(t)
	f.with(func() {
		f.width = time.Hour
		f.answer = func(_ context.Context, req *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error) {
			for i, q := range req.Queries {
				if q.Purpose == keydv1.Purpose_PURPOSE_OPEN {
					resp.Results[i].Result = &keydv1.BlobKeyResult_Failure{Failure: &keydv1.Failure{Outcome: keydv1.Outcome_OUTCOME_DENIED}}
				}
			}
			return resp, nil
		}
	})
	clock.Advance(59*time.Minute + 50*time.Second)
	w, err := c.SealWriter(t.Context(), alice, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	pass(t, c, clock, 50*time.Second, time.Second)
	if _, err := w.Write(make([]byte, 4<<20)); err != nil {
		t.Fatalf("within the lease: %v", err)
	}
	pass(t, c, clock, 20*time.Second, time.Second)
	if _, err := w.Write(make([]byte, 4<<20)); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("after it: %v", err)
	}
	w.Abort(nil)
}

// Streams under a lease of zero are one operation each, and keyd is asked
// again while they run.
func TestStreamsUnderZeroLease(t *testing.T) {
	c, f, clock := start(t)
	f.setLease(0)
	w, r, ra := openStreams(t, c)
	pass(t, c, clock, 30*time.Second, 500*time.Millisecond)
	useStreams(t, w, r, ra)
	if n := f.asked.Load(); n < 15 {
		t.Errorf("keyd was asked %d times in half a minute", n)
	}
	f.kill("alice", erased, false)
	pass(t, c, clock, 10*time.Second, 500*time.Millisecond)
	for i, err := range streamErrs(w, r, ra) {
		if !errors.Is(err, sdk.ErrErased) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	if n := known(c); n != 0 {
		t.Errorf("%d keys are kept", n)
	}
}

// A reader that stops at the end of its lease has released nothing after it.
func TestReaderReleasesNothingAfterTheLease(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	blob := sealStream(t, c, alice, randomBytes(8<<20))
	r, err := c.OpenReader(t.Context(), alice, bytes.NewReader(blob))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.ReadFull(r, make([]byte, 100<<10)); err != nil {
		t.Fatal(err)
	}
	f.setDown(true)
	clock.StepWall(time.Hour)
	n, err := io.Copy(io.Discard, r)
	if !errors.Is(err, sdk.ErrUnavailable) || n > 64<<10 {
		t.Errorf("%d bytes and %v after the lease", n, err)
	}
}

func TestReaderAtConcurrently(t *testing.T) {
	c, _, _ := start(t)
	want := randomBytes(2 << 20)
	blob := sealStream(t, c, alice, want)
	ra, err := c.OpenReaderAt(t.Context(), alice, bytes.NewReader(blob), int64(len(blob)))
	if err != nil {
		t.Fatal(err)
	}
	defer ra.Close()
	var bad atomic.Int64
	done := make(chan struct{})
	for g := range 4 {
		go func() {
			defer func() { done <- struct{}{} }()
			buf := make([]byte, 4096)
			for i := range 100 {
				off := (g*100 + i) * 5000 % (len(want) - len(buf))
				if _, err := ra.ReadAt(buf, int64(off)); err != nil || !bytes.Equal(buf, want[off:off+len(buf)]) {
					bad.Add(1)
				}
			}
		}()
	}
	for range 4 {
		<-done
	}
	if bad.Load() != 0 {
		t.Errorf("%d bad reads", bad.Load())
	}
}
