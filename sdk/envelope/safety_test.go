package envelope

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Every bit of a blob matters.
func TestBitFlips(t *testing.T) {
	for _, c := range []struct {
		policy Policy
		n      int
	}{{Single, 1}, {All, 3}, {Any, 3}} {
		for _, ctx := range []Context{{}, bound(t, "thread", "42")} {
			s, o := pair(t, c.policy, c.n)
			blob := must[[]byte](t)(s.Append(nil, randomBytes(50), ctx))
			stream := sealStream(t, s, randomBytes(50), ctx, 1)
			for i := range len(blob) * 8 {
				bad := bytes.Clone(blob)
				bad[i/8] ^= 1 << (i % 8)
				got, err := o.Append(nil, bad, ctx)
				if err == nil || len(got) != 0 || !isOurs(err) {
					t.Fatalf("%s, bit %d of byte %d: %v", c.policy, i%8, i/8, err)
				}
			}
			for i := range stream {
				bad := bytes.Clone(stream)
				bad[i] ^= 1 << (i % 8)
				got, err := openStream(o, bytes.NewReader(bad), ctx, 1)
				if err == nil || len(got) != 0 || !isOurs(err) {
					t.Fatalf("%s, stream, bit %d of byte %d: %v", c.policy, i%8, i, err)
				}
			}
		}
	}
}

// isOurs reports whether err tells what is wrong with a blob.
func isOurs(err error) bool {
	for _, known := range append(slices.Collect(mapValues(errorNames)), ErrTooLarge) {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

func mapValues(m map[string]error) func(func(error) bool) {
	return func(yield func(error) bool) {
		for _, v := range m {
			if !yield(v) {
				return
			}
		}
	}
}

// Any change of a blob makes it fail: bytes changed, cut out, put in, doubled.
func TestMutations(t *testing.T) {
	s, o := pair(t, Single, 1)
	ctx := bound(t, "a", "b")
	blobs := map[string][]byte{
		"one-shot": must[[]byte](t)(s.Append(nil, randomBytes(300), ctx)),
		"stream":   sealStream(t, s, randomBytes(2*segmentPlain+300), ctx, 1),
	}
	rapid.Check(t, func(t *rapid.T) {
		form := rapid.SampledFrom([]string{"one-shot", "stream"}).Draw(t, "form")
		blob := blobs[form]
		at := rapid.IntRange(0, len(blob)).Draw(t, "at")
		n := rapid.IntRange(0, min(len(blob)-at, 70000)).Draw(t, "n")
		var bad []byte
		switch rapid.IntRange(0, 3).Draw(t, "kind") {
		case 0:
			bad = slices.Delete(bytes.Clone(blob), at, at+n)
		case 1:
			bad = slices.Insert(bytes.Clone(blob), at, rapid.SliceOfN(rapid.Byte(), 1, 40).Draw(t, "bytes")...)
		case 2:
			bad = slices.Insert(bytes.Clone(blob), at, blob[at:at+n]...)
		case 3:
			bad = append(bytes.Clone(blob[:at]), make([]byte, len(blob)-at)...)
		}
		if bytes.Equal(bad, blob) {
			return
		}
		var err error
		if form == "one-shot" {
			_, err = o.Append(nil, bad, ctx)
		} else {
			_, err = openStream(o, bytes.NewReader(bad), ctx, rapid.IntRange(1, 2).Draw(t, "workers"))
		}
		if err == nil || !isOurs(err) {
			t.Fatal(err)
		}
	})
}

func TestRoundTripProperty(t *testing.T) {
	keys := randomKeys(3)
	type both struct {
		s *Sealer
		o *Opener
	}
	pairs := map[Policy]both{}
	for _, p := range []Policy{Single, All, Any} {
		s, o := pairOf(t, p, keys)
		pairs[p] = both{s, o}
	}
	rapid.Check(t, func(t *rapid.T) {
		p := pairs[rapid.SampledFrom([]Policy{Single, All, Any}).Draw(t, "policy")]
		plain := make([]byte, rapid.OneOf(rapid.IntRange(0, 300), rapid.IntRange(0, 3*segmentPlain)).Draw(t, "size"))
		rand.Read(plain)
		var ctx Context
		if rapid.Bool().Draw(t, "context") {
			ctx, _ = NewContext(Pair{"n", rapid.String().Filter(func(s string) bool { return len(s) <= MaxContextValue }).Draw(t, "value")})
		}
		blob, err := p.s.Append(nil, plain, ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := p.o.Append(nil, blob, ctx); err != nil || !bytes.Equal(got, plain) {
			t.Fatal(err)
		}
		var stream bytes.Buffer
		w, err := p.s.NewWriter(context.Background(), &stream, ctx, StreamOptions{Workers: rapid.IntRange(1, 3).Draw(t, "writers")})
		if err != nil {
			t.Fatal(err)
		}
		for rest := plain; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "write")
			if rapid.Bool().Draw(t, "ReadFrom") {
				_, err = w.ReadFrom(bytes.NewReader(rest[:n]))
			} else {
				_, err = w.Write(rest[:n])
			}
			if err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		r, err := p.o.NewReader(context.Background(), &stream, ctx, StreamOptions{Workers: rapid.IntRange(1, 3).Draw(t, "readers")})
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		for {
			n := rapid.SampledFrom([]int{1, 100, 32 << 10, segmentPlain, 1 << 20}).Draw(t, "read")
			if n == 1 {
				n = rapid.IntRange(1, 1000).Draw(t, "small read")
			}
			b := make([]byte, n)
			m, err := r.Read(b)
			got = append(got, b[:m]...)
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(got) > 2000 && n < 1000 {
				rest, err := io.ReadAll(r)
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, rest...)
				break
			}
		}
		if !bytes.Equal(got, plain) {
			t.Fatal("stream opened to something else")
		}
	})
}

func TestAllocations(t *testing.T) {
	ctx := bound(t, "thread", "42", "checkpoint", "7")
	for _, c := range []struct {
		policy Policy
		n      int
	}{{Single, 1}, {All, 5}} {
		s, o := pair(t, c.policy, c.n)
		checked := sealer(t, c.policy, randomKeys(c.n), Options{Check: func() error { return nil }})
		for _, ctx := range []Context{{}, ctx} {
			if raceEnabled && !ctx.IsZero() {
				continue // the MACs of contexts are in a sync.Pool
			}
			plain := randomBytes(1000)
			blob := must[[]byte](t)(s.Append(nil, plain, ctx))
			dst := make([]byte, 0, len(blob))
			for name, f := range map[string]func() error{
				"Seal":              func() error { _, err := s.Append(dst, plain, ctx); return err },
				"Seal with a check": func() error { _, err := checked.Append(dst, plain, ctx); return err },
				"Open":              func() error { _, err := o.Append(dst, blob, ctx); return err },
			} {
				if err := f(); err != nil {
					t.Fatal(err)
				}
				if n := testing.AllocsPerRun(100, func() { f() }); n != 0 {
					t.Errorf("%s, %s, context %v: %v allocations", c.policy, name, !ctx.IsZero(), n)
				}
			}
		}
	}
}

func TestTooLarge(t *testing.T) {
	s, o := pair(t, Single, 1)
	// Address space alone: no memory is used.
	huge, err := syscall.Mmap(-1, 0, MaxPlaintext+s.Overhead(Context{})+1, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(huge)
	if _, err := s.Append(nil, huge[:MaxPlaintext+1], Context{}); err != ErrTooLarge {
		t.Error(err)
	}
	copy(huge, must[[]byte](t)(s.Append(nil, []byte("x"), Context{})))
	if _, err := o.Append(nil, huge, Context{}); err != ErrTooLarge {
		t.Error(err)
	}
}

func TestTooManySegments(t *testing.T) {
	s, _ := pair(t, Single, 1)
	var n segmentNonce
	var nonce [streamNonceSize]byte
	c := must[*segmentCipher](t)(newSegmentCipher(&s.m.keys.payload[Stream], &nonce, &s.encoded[Stream][0].hash))
	seal := func(i uint64) []byte { return bytes.Clone(c.seal(&n, append(make([]byte, 0, 100), "x"...), i, true)) }
	if got, err := c.open(&n, nil, seal(maxSegments-1), maxSegments-1, true); err != nil || string(got) != "x" {
		t.Errorf("the last segment that there can be: %v", err)
	}
	if _, err := c.open(&n, nil, seal(maxSegments), maxSegments, true); err != ErrTooLarge {
		t.Error(err)
	}
	// A writer that is about to begin one more.
	var out bytes.Buffer
	w := must[*Writer](t)(s.NewWriter(t.Context(), &out, Context{}, StreamOptions{Workers: 1}))
	w.turn.first, w.turn.off = maxSegments-1, segmentPlain
	if _, err := w.Write([]byte("x")); err != ErrTooLarge || w.Close() != ErrTooLarge || out.Len() != 0 {
		t.Error(err)
	}
}

// An output that lies where the input lies: the standard library refuses it
// where it would not work, and never silently makes a wrong blob.
func TestOverlap(t *testing.T) {
	s, o := pair(t, Single, 1)
	for _, shift := range []int{0, 1, 76, 77, 89, 200, 500} {
		buf := make([]byte, 2000)
		plain := buf[shift : shift+100]
		copy(plain, pattern(100))
		var blob []byte
		func() {
			defer func() { recover() }()
			blob, _ = s.Append(buf[:0], plain, Context{})
		}()
		if blob == nil {
			continue
		}
		if got, err := o.Append(nil, blob, Context{}); err != nil || !bytes.Equal(got, pattern(100)) {
			t.Errorf("shift %d: a wrong blob: %v", shift, err)
		}
	}
}

// What fails leaves nothing of the plaintext behind dst.
func TestFailedOpenLeavesNothing(t *testing.T) {
	errOver := errors.New("lease is over")
	plain := bytes.Repeat([]byte("secret"), 100)
	ctx, other := bound(t, "a", "b"), bound(t, "a", "c")
	for _, policy := range []Policy{Single, Any} {
		keys := randomKeys(3)
		blob := must[[]byte](t)(sealer(t, policy, keys, Options{}).Append(nil, plain, ctx))
		calls := 0
		leased := opener(t, policy, keys, Options{Check: func() error {
			if calls++; calls == 2 {
				return errOver
			}
			return nil
		}})
		bad := bytes.Clone(blob)
		bad[len(bad)-1] ^= 1
		for name, c := range map[string]struct {
			o    *Opener
			blob []byte
			ctx  Context
			want error
		}{
			"lease":   {leased, blob, ctx, errOver},
			"context": {opener(t, policy, keys, Options{}), blob, other, ErrWrongContext},
			"corrupt": {opener(t, policy, keys, Options{}), bad, ctx, ErrCorrupt},
		} {
			dst := append(make([]byte, 0, 1000), "front"...)
			got, err := c.o.Append(dst, c.blob, c.ctx)
			if err != c.want || string(got) != "front" {
				t.Errorf("%s: %v", name, err)
			}
			if !bytes.Equal(dst[5:1000], make([]byte, 995)) {
				t.Errorf("%s: plaintext is left", name)
			}
		}
		if calls != 2 {
			t.Errorf("%d calls of Check", calls)
		}
	}
}

// A lease that ends stops everything: sealing, opening, running streams.
func TestCheck(t *testing.T) {
	errOver := errors.New("lease is over")
	var over atomic.Bool
	opts := Options{Check: func() error {
		if over.Load() {
			return errOver
		}
		return nil
	}}
	for _, policy := range []Policy{Single, All, Any} {
		over.Store(false)
		keys := randomKeys(2)
		s, o := sealer(t, policy, keys, opts), opener(t, policy, keys, opts)
		plain := randomBytes(40 * segmentPlain)
		blob := must[[]byte](t)(s.Append(nil, plain, Context{}))
		stream := sealStream(t, s, plain, Context{}, 2)
		var readers []*Reader
		for _, workers := range []int{1, 2} {
			for _, size := range []int{100, segmentPlain} {
				r := must[*Reader](t)(o.NewReader(t.Context(), bytes.NewReader(stream), Context{}, StreamOptions{Workers: workers}))
				if n, err := io.ReadFull(r, make([]byte, size)); err != nil {
					t.Fatal(n, err)
				}
				readers = append(readers, r)
			}
		}
		at := must[*ReaderAt](t)(o.NewReaderAt(bytes.NewReader(stream), int64(len(stream)), Context{}))
		w := must[*Writer](t)(s.NewWriter(t.Context(), io.Discard, Context{}, StreamOptions{}))
		over.Store(true)
		for _, f := range []func() error{
			func() error { _, err := s.Append(nil, plain, Context{}); return err },
			func() error { _, err := o.Append(nil, blob, Context{}); return err },
			func() error { _, err := s.NewWriter(t.Context(), io.Discard, Context{}, StreamOptions{}); return err },
			func() error { return w.Close() },
			func() error { _, err := openStream(o, bytes.NewReader(stream), Context{}, 1); return err },
			func() error { _, err := openStreamAt(o, stream, Context{}); return err },
			func() error { _, err := at.ReadAt(make([]byte, 10), 0); return err },
		} {
			if err := f(); err != errOver {
				t.Errorf("%s: %v", policy, err)
			}
		}
		for _, r := range readers {
			// At most what is left of the segment that was released before.
			n, err := io.Copy(io.Discard, struct{ io.Reader }{r})
			if err != errOver || n >= segmentPlain {
				t.Errorf("%s: a reader went on for %d bytes, %v", policy, n, err)
			}
		}
	}
}

// A check that fails between opening and release: nothing is released.
func TestCheckBeforeRelease(t *testing.T) {
	errOver := errors.New("lease is over")
	key := randomKey(1, 2)
	stream := sealStream(t, must[*Sealer](t)(NewSealer(key, Options{})), bytes.Repeat([]byte("secret"), 3*segmentPlain/6), Context{}, 1)
	for left := range 12 {
		for _, workers := range []int{1, 2} {
			n, failed := left, false
			o := must[*Opener](t)(NewOpener(key, Options{Check: func() error {
				if n--; n < 0 {
					failed = true
					return errOver
				}
				return nil
			}}))
			r, err := o.NewReader(t.Context(), bytes.NewReader(stream), Context{}, StreamOptions{Workers: workers})
			if err != nil {
				if err != errOver {
					t.Fatal(err)
				}
				continue
			}
			p := make([]byte, segmentPlain)
			for {
				clear(p)
				m, err := r.Read(p)
				if failed && m > 0 {
					t.Fatalf("%d checks, %d workers: released after a check failed", left, workers)
				}
				if !bytes.Equal(p[m:], make([]byte, len(p)-m)) {
					t.Fatalf("%d checks, %d workers: plaintext behind what was read", left, workers)
				}
				if err == io.EOF {
					break
				}
				if err != nil {
					if err != errOver {
						t.Fatal(err)
					}
					break
				}
			}
			n = left
			at, err := o.NewReaderAt(bytes.NewReader(stream), int64(len(stream)), Context{})
			if err != nil {
				continue
			}
			clear(p)
			if m, err := at.ReadAt(p, 10); err == errOver && (m != 0 || !bytes.Equal(p, make([]byte, len(p)))) {
				t.Fatalf("%d checks: ReadAt left plaintext", left)
			}
		}
	}
}

// Nor does what a failing Read has opened stay in its argument.
func TestFailedReadLeavesNothing(t *testing.T) {
	s, o := pair(t, Single, 1)
	const full = segmentPlain - streamHeaderSize
	noEnd, _ := frames(t, s, []frame{{full, false, false, 0}})
	second, _ := frames(t, s, []frame{{full, false, false, 0}, {segmentPlain, false, false, 0}})
	ctx := bound(t, "a", "b")
	for name, c := range map[string]struct {
		blob []byte
		want error
	}{
		"missing end":            {noEnd, ErrTruncated},
		"missing end, second":    {second, ErrTruncated},
		"context":                {sealStream(t, s, randomBytes(full), ctx, 1), ErrWrongContext},
		"context, many segments": {sealStream(t, s, randomBytes(9*segmentPlain), ctx, 1), ErrWrongContext},
	} {
		for _, workers := range []int{1, 2} {
			r := must[*Reader](t)(o.NewReader(t.Context(), bytes.NewReader(c.blob), Context{}, StreamOptions{Workers: workers}))
			for {
				p := make([]byte, 2*segmentPlain)
				n, err := r.Read(p)
				if err == nil {
					continue
				}
				if err != c.want || n != 0 || !bytes.Equal(p, make([]byte, len(p))) {
					t.Errorf("%s, %d workers: %d, %v, or plaintext is left", name, workers, n, err)
				}
				break
			}
		}
	}
}

func TestWiped(t *testing.T) {
	ctx := bound(t, "a", "b")
	for _, policy := range []Policy{Single, All, Any} {
		s, o := pair(t, policy, 2)
		if policy == Single {
			s, o = pair(t, policy, 1)
		}
		blob := must[[]byte](t)(s.Append(nil, []byte("x"), ctx))
		stream := sealStream(t, s, randomBytes(20*segmentPlain), ctx, 1)
		r := must[*Reader](t)(o.NewReader(t.Context(), bytes.NewReader(stream), ctx, StreamOptions{}))
		at := must[*ReaderAt](t)(o.NewReaderAt(bytes.NewReader(stream), int64(len(stream)), ctx))
		must[[]byte](t)(o.Append(nil, blob, ctx))
		s.Wipe()
		o.Wipe()
		for _, c := range []Context{{}, ctx} {
			if _, err := s.Append(nil, nil, c); err != ErrWiped {
				t.Error(err)
			}
			if _, err := s.NewWriter(t.Context(), io.Discard, c, StreamOptions{}); err != ErrWiped {
				t.Error(err)
			}
		}
		if _, err := o.Append(nil, blob, ctx); err != ErrWiped {
			t.Error(err)
		}
		if _, err := openStream(o, bytes.NewReader(stream), ctx, 1); err != ErrWiped {
			t.Error(err)
		}
		if _, err := io.ReadAll(r); err != ErrWiped {
			t.Error(err)
		}
		if _, err := at.ReadAt(make([]byte, 1), 0); err != ErrWiped {
			t.Error(err)
		}
		for _, m := range []*material{s.m, o.m} {
			if m.keys.payload != [3]secretKey{} || m.keys.context != [3]secretKey{} {
				t.Error("keys are left")
			}
			for _, w := range m.wrap {
				if w != (wrapKey{}) {
					t.Error("wrap keys are left")
				}
			}
		}
		if s.current.Load() != nil || o.cache != (prefixCache{}) {
			t.Error("derived keys are left")
		}
	}
}

// Sealing while the keys are wiped makes good blobs or none: never one under a
// zeroed key.
func TestWipeWhileSealing(t *testing.T) {
	ctx := bound(t, "a", "b")
	for range 10 {
		for _, policy := range []Policy{Single, All, Any} {
			keys := randomKeys(2)
			s, o := pairOf(t, policy, keys)
			var wg sync.WaitGroup
			for i := range 3 {
				wg.Go(func() {
					c := []Context{{}, ctx}[i%2]
					for range 100 {
						blob, err := s.Append(nil, []byte("plaintext"), c)
						if err != nil {
							if err != ErrWiped {
								t.Error(err)
							}
							return
						}
						if got, err := o.Append(nil, blob, c); err != nil || string(got) != "plaintext" {
							t.Errorf("%s: a bad blob: %v", policy, err)
						}
					}
				})
				wg.Go(func() {
					var buf bytes.Buffer
					w, err := s.NewWriter(context.Background(), &buf, Context{}, StreamOptions{Workers: 2})
					if err == nil {
						w.Write(make([]byte, 1<<18))
						err = w.Close()
					}
					if err == nil {
						_, err = openStream(o, &buf, Context{}, 1)
					}
					if err != nil && err != ErrWiped {
						t.Errorf("%s: stream: %v", policy, err)
					}
				})
			}
			wg.Go(func() {
				for range 50 {
					runtime.Gosched()
				}
				s.Wipe()
			})
			wg.Wait()
		}
	}
}

// Opening while the keys are wiped opens rightly or fails with ErrWiped.
func TestWipeWhileOpening(t *testing.T) {
	ctx := bound(t, "a", "b")
	for range 30 {
		for _, policy := range []Policy{Single, Any} {
			keys := randomKeys(2)
			s, o := pairOf(t, policy, keys)
			blob := must[[]byte](t)(s.Append(nil, []byte("plaintext"), ctx))
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					for range 100 {
						got, err := o.Append(nil, blob, ctx)
						if err != nil && err != ErrWiped || err == nil && string(got) != "plaintext" {
							t.Error(err)
						}
						if err != nil {
							return
						}
					}
				})
			}
			wg.Go(func() {
				for range 50 {
					runtime.Gosched()
				}
				o.Wipe()
			})
			wg.Wait()
		}
	}
}

// A sealer that is dropped, as an evicting cache does, is wiped by the runtime;
// what it began is not disturbed.
func TestDroppedSealerIsWiped(t *testing.T) {
	var sealed bytes.Buffer
	key := randomKey(1, 2)
	s := must[*Sealer](t)(NewSealer(key, Options{}))
	m := s.m
	w := must[*Writer](t)(s.NewWriter(t.Context(), &sealed, Context{}, StreamOptions{}))
	s = nil
	for range 5 {
		runtime.GC()
	}
	if m.dead.Load() {
		t.Fatal("wiped while a stream was running")
	}
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	w = nil
	for deadline := time.Now().Add(time.Minute); !m.dead.Load(); runtime.GC() {
		if time.Now().After(deadline) {
			t.Fatal("never wiped")
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.keys.payload != [3]secretKey{} {
		t.Fatal("keys are left")
	}
}

// The prefix is kept, and drawn anew when its budget is spent.
func TestPrefixIsRenewed(t *testing.T) {
	s, o := pair(t, Single, 1)
	prefixOf := func(plain []byte) [xaesPrefixSize]byte {
		blob := must[[]byte](t)(s.Append(nil, plain, Context{}))
		must[[]byte](t)(o.Append(nil, blob, Context{}))
		return [xaesPrefixSize]byte(blob[sizeOf(Single, 1):])
	}
	first := prefixOf(nil)
	if prefixOf(nil) != first {
		t.Fatal("a prefix served for one blob only")
	}
	s.current.Load().used.Store(prefixBudget - 1)
	if prefixOf(nil) != first {
		t.Fatal("drawn anew too early")
	}
	second := prefixOf(nil)
	if second == first {
		t.Fatal("a prefix serves for more than 2^20 blobs")
	}
	s.current.Load().used.Store(prefixBudget - 1)
	if prefixOf(make([]byte, 64<<10)) == second {
		t.Fatal("a prefix serves for more than 64 GiB")
	}
	if got := s.current.Load().used.Load(); got != 2 {
		t.Fatalf("64 KiB cost %d", got)
	}
	// All at once: every blob is good, and the budgets are kept.
	s.current.Load().used.Store(prefixBudget - 10)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[[xaesPrefixSize]byte]int{}
	for range 4 {
		wg.Go(func() {
			for range 50 {
				p := prefixOf(nil)
				mu.Lock()
				count[p]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(count) != 2 {
		t.Fatalf("%d prefixes", len(count))
	}
}

func TestPrefixCache(t *testing.T) {
	key := randomKey(1, 2)
	o := must[*Opener](t)(NewOpener(key, Options{}))
	var blobs [][]byte
	for range 300 { // more than the cache holds
		s := must[*Sealer](t)(NewSealer(key, Options{}))
		blobs = append(blobs, must[[]byte](t)(s.Append(nil, []byte("x"), Context{})))
	}
	open := func(b []byte) {
		t.Helper()
		if got, err := o.Append(nil, b, Context{}); err != nil || string(got) != "x" {
			t.Fatal(err)
		}
	}
	kept := func() (n int) {
		for i := range o.cache.slots {
			if o.cache.slots[i].Load() != nil {
				n++
			}
		}
		return n
	}
	// One that is opened once is not worth a place.
	for _, b := range blobs {
		open(b)
	}
	if n := kept(); n > 0 {
		t.Errorf("%d prefixes that were seen once are kept", n)
	}
	for _, b := range blobs {
		for range 30 {
			open(b)
		}
	}
	if n := kept(); n < cacheSets*cacheWays*3/4 {
		t.Errorf("%d prefixes are kept", n)
	}
	// What is not authentic is not kept.
	o = must[*Opener](t)(NewOpener(key, Options{}))
	for _, b := range blobs {
		bad := bytes.Clone(b)
		bad[len(bad)-1] ^= 1
		if _, err := o.Append(nil, bad, Context{}); err != ErrCorrupt {
			t.Fatal(err)
		}
	}
	if o.cache != (prefixCache{}) {
		t.Error("a forgery's prefix is kept")
	}
}

// Prefixes that share the place where it is noted that they were seen are kept
// all the same when they come by turns.
func TestPrefixesByTurns(t *testing.T) {
	key := randomKey(1, 2)
	o := must[*Opener](t)(NewOpener(key, Options{}))
	at := len(o.encoded[OneShot][0].raw)
	shared := make(map[byte][][]byte)
	var turns [][]byte
	for turns == nil {
		s := must[*Sealer](t)(NewSealer(key, Options{}))
		b := must[[]byte](t)(s.Append(nil, nil, Context{}))
		place := b[at+7] % cacheSeen
		if shared[place] = append(shared[place], b); len(shared[place]) == 3 {
			turns = shared[place]
		}
	}
	for range 1000 {
		kept := 0
		for _, b := range turns {
			if _, err := o.Append(nil, b, Context{}); err != nil {
				t.Fatal(err)
			}
			if o.cache.get((*[xaesPrefixSize]byte)(b[at:])) != nil {
				kept++
			}
		}
		if kept == len(turns) {
			return
		}
	}
	t.Error("they keep each other out")
}

// An opener refuses what others' keys sealed, whatever their numbers.
func TestNoMixing(t *testing.T) {
	a := randomKey(1, 100)
	for name, b := range map[string]*Key{
		"key":    randomKey(1, 100),
		"class":  {ID: a.ID, Class: 2, Bucket: 100, Secret: a.Secret},
		"bucket": {ID: a.ID, Class: 1, Bucket: 101, Secret: a.Secret},
	} {
		blob := must[[]byte](t)(must[*Sealer](t)(NewSealer(b, Options{})).Append(nil, nil, Context{}))
		if _, err := must[*Opener](t)(NewOpener(a, Options{})).Append(nil, blob, Context{}); err != ErrWrongRecipient {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A blob of a class or bucket cannot be passed off as one of another.
	s, _ := pairOf(t, Single, []*Key{a})
	blob := must[[]byte](t)(s.Append(nil, nil, Context{}))
	blob[7] = 2
	k := *a
	k.Class = 2
	if _, err := must[*Opener](t)(NewOpener(&k, Options{})).Append(nil, blob, Context{}); err != ErrCorrupt {
		t.Error(err)
	}
}

// An opener for several goes on with the keys that are left, and so does a
// stream that it has begun with one that is not.
func TestForget(t *testing.T) {
	keys := []*Key{{ID: KeyID{1}, Secret: [KeySize]byte{1}}, {ID: KeyID{2}, Secret: [KeySize]byte{2}}, {ID: KeyID{3}, Secret: [KeySize]byte{3}}}
	s, err := NewMultiSealer(Any, keys, Options{})
	if err != nil {
		t.Fatal(err)
	}
	o, err := NewMultiOpener(Any, keys, Options{})
	if err != nil {
		t.Fatal(err)
	}
	blob, err := s.Append(nil, []byte("said"), Context{})
	if err != nil {
		t.Fatal(err)
	}
	var stream bytes.Buffer
	w, err := s.NewWriter(t.Context(), &stream, Context{}, StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.Write([]byte("said"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := o.NewReader(t.Context(), &stream, Context{}, StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, k := range keys {
		plain, by, err := o.AppendBy(nil, blob, Context{})
		if err != nil || string(plain) != "said" || by != k.ID {
			t.Errorf("%d forgotten: opened by %v: %v", i, by, err)
		}
		o.Forget(k.ID)
		if o.m.wrap[i].key != (secretKey{}) {
			t.Errorf("key %d is still there", i)
		}
	}
	if _, _, err := o.AppendBy(nil, blob, Context{}); err != ErrWrongRecipient {
		t.Errorf("all forgotten: %v", err)
	}
	if plain, err := io.ReadAll(r); err != nil || string(plain) != "said" {
		t.Errorf("the stream: %q, %v", plain, err)
	}
	o.Wipe()
	if _, _, err := o.AppendBy(nil, blob, Context{}); err != ErrWiped {
		t.Errorf("wiped: %v", err)
	}
	single, err := NewOpener(keys[0], Options{})
	if err != nil {
		t.Fatal(err)
	}
	single.Forget(keys[0].ID)
	if single.m.keys.commit == ([CommitmentSize]byte{}) {
		t.Error("Forget does something for one key")
	}
}
