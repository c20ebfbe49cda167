package sdk_test

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"lethe/sdk"
	"lethe/sdk/envelope"
)

func mustSeal(t testing.TB, c *sdk.Client, target sdk.Target, plaintext string) []byte {
	t.Helper()
	blob, err := c.Seal(t.Context(), target, []byte(plaintext))
	if err != nil {
		t.Fatal(err)
	}
	return blob
}

func mustOpen(t testing.TB, c *sdk.Client, target sdk.Target, blob []byte, want string) {
	t.Helper()
	got, err := c.Open(t.Context(), target, blob)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Fatalf("opened %q, want %q", got, want)
	}
}

func TestSealOpen(t *testing.T) {
	c, f, _ := start(t)
	for _, plaintext := range []string{"", "x", strings.Repeat("long ", 30000)} {
		blob := mustSeal(t, c, alice, plaintext)
		if len(plaintext) > 1 && bytes.Contains(blob, []byte(plaintext)) {
			t.Fatal("the blob holds the plaintext")
		}
		mustOpen(t, c, alice, blob, plaintext)
	}
	if n := f.asked.Load(); n != 2 {
		t.Errorf("%d queries, want one to seal and one to open", n)
	}

	prefix := []byte("prefix")
	blob, err := c.AppendSeal(t.Context(), prefix, alice, []byte("data"))
	if err != nil || !bytes.HasPrefix(blob, prefix) {
		t.Fatalf("AppendSeal: %q, %v", blob, err)
	}
	plain, err := c.AppendOpen(t.Context(), prefix, alice, blob[len(prefix):])
	if err != nil || string(plain) != "prefixdata" {
		t.Fatalf("AppendOpen: %q, %v", plain, err)
	}
}

func TestBoundContext(t *testing.T) {
	c, _, _ := start(t)
	bound, err := alice.Bind(envelope.Pair{Name: "row", Value: "1"})
	if err != nil {
		t.Fatal(err)
	}
	other, err := alice.Bind(envelope.Pair{Name: "row", Value: "2"})
	if err != nil {
		t.Fatal(err)
	}
	blob := mustSeal(t, c, bound, "data")
	mustOpen(t, c, bound, blob, "data")
	for range 2 { // from keyd's answer, then from the table
		for _, target := range []sdk.Target{other, alice} {
			if _, err := c.Open(t.Context(), target, blob); !errors.Is(err, sdk.ErrWrongContext) {
				t.Errorf("opened with another context: %v", err)
			}
		}
	}
	if _, err := c.Open(t.Context(), bound, mustSeal(t, c, alice, "data")); !errors.Is(err, sdk.ErrWrongContext) {
		t.Errorf("opened with a context that it was not sealed with: %v", err)
	}
	_, err = alice.Bind(envelope.Pair{Name: "row", Value: "1"}, envelope.Pair{Name: "row", Value: "2"})
	if !errors.Is(err, sdk.ErrInvalidArgument) || !errors.Is(err, envelope.ErrInvalidContext) {
		t.Errorf("Bind with a name twice: %v", err)
	}
}

// What is refused must be refused before anything is sent, and whether or not
// keyd can be reached.
func TestRefusedBeforeSending(t *testing.T) {
	c, f, _ := start(t)
	good := mustSeal(t, c, alice, "data")
	f.calls.Store(0)
	for _, bad := range []sdk.Target{
		{Subject: "alice", Class: "trace"},
		{Tenant: "ACME", Subject: "alice", Class: "trace"},
		{Tenant: strings.Repeat("a", 129), Subject: "alice", Class: "trace"},
		{Tenant: "acme", Class: "trace"},
		{Tenant: "acme", Subject: "al\x00ice", Class: "trace"},
		{Tenant: "acme", Subject: "al\xffice", Class: "trace"},
		{Tenant: "acme", Subject: strings.Repeat("a", 1025), Class: "trace"},
		{Tenant: "acme", Subject: "alice"},
		{Tenant: "acme", Subject: "alice", Class: "Trace"},
		{Tenant: "acme", Subject: "alice", Class: strings.Repeat("a", 65)},
	} {
		_, sealErr := c.Seal(t.Context(), bad, nil)
		_, openErr := c.Open(t.Context(), bad, good)
		_, writerErr := c.SealWriter(t.Context(), bad, new(bytes.Buffer))
		_, readerErr := c.OpenReader(t.Context(), bad, bytes.NewReader(good))
		_, readerAtErr := c.OpenReaderAt(t.Context(), bad, bytes.NewReader(good), int64(len(good)))
		for _, err := range []error{sealErr, openErr, writerErr, readerErr, readerAtErr} {
			var e *sdk.Error
			if !errors.Is(err, sdk.ErrInvalidArgument) || !errors.As(err, &e) || e.Metadata["field"] == "" {
				t.Errorf("%.20q: %v", bad, err)
			}
		}
	}
	for _, tt := range []struct {
		blob []byte
		want error
	}{
		{nil, sdk.ErrNotSealed},
		{[]byte("plain text"), sdk.ErrNotSealed},
		{[]byte(strings.Repeat("plain text ", 20)), sdk.ErrNotSealed},
		{[]byte(`{"json":true}`), sdk.ErrNotSealed},
		{good[:20], sdk.ErrTruncated},
		{append(append(bytes.Clone(good[:4]), 9), good[5:]...), sdk.ErrUnsupportedVersion},
		{append(append(bytes.Clone(good[:5]), 0x7f), good[6:]...), sdk.ErrCorrupt},
	} {
		dst := []byte("dst")
		if out, err := c.AppendOpen(t.Context(), dst, alice, tt.blob); !errors.Is(err, tt.want) || string(out) != "dst" {
			t.Errorf("%.12q: %q, %v; want %v", tt.blob, out, err, tt.want)
		}
	}
	if n := f.calls.Load(); n != 0 {
		t.Errorf("%d calls were sent", n)
	}
}

// A changed blob is an error whether its lease is in hand or not, and says
// nothing but what is wrong.
func TestDamagedBlobs(t *testing.T) {
	c, _, _ := start(t)
	blob := mustSeal(t, c, alice, "some data of alice")
	mustOpen(t, c, alice, blob, "some data of alice")
	for i := range blob {
		bad := bytes.Clone(blob)
		bad[i] ^= 1
		out, err := c.Open(t.Context(), alice, bad)
		if err == nil || len(out) != 0 {
			t.Fatalf("byte %d changed: opened %q", i, out)
		}
		if errors.Is(err, sdk.ErrErased) || errors.Is(err, sdk.ErrUnavailable) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
	}
	for n := range blob {
		if _, err := c.Open(t.Context(), alice, blob[:n]); err == nil {
			t.Fatalf("opened when cut to %d bytes", n)
		}
	}
	if _, err := c.Open(t.Context(), alice, append(bytes.Clone(blob), 0)); !errors.Is(err, sdk.ErrCorrupt) {
		t.Errorf("a byte more: %v", err)
	}
}

// An Open never uses a key that is cached for somebody else (G7).
func TestOpenNamesItsSubject(t *testing.T) {
	c, f, _ := start(t)
	blob := mustSeal(t, c, alice, "of alice")
	mustOpen(t, c, alice, blob, "of alice")
	bob := sdk.Target{Tenant: "acme", Subject: "bob", Class: "trace"}
	mustSeal(t, c, bob, "of bob")
	for _, tt := range []struct {
		target sdk.Target
		want   error
	}{
		{bob, sdk.ErrWrongSubject},
		{sdk.Target{Tenant: "acme", Subject: "alice ", Class: "trace"}, sdk.ErrWrongSubject},
		{sdk.Target{Tenant: "acme", Subject: "alice", Class: "backup"}, sdk.ErrWrongSubject},
		{sdk.Target{Tenant: "other", Subject: "alice", Class: "trace"}, sdk.ErrUnknown},
	} {
		if out, err := c.Open(t.Context(), tt.target, blob); !errors.Is(err, tt.want) || len(out) != 0 {
			t.Errorf("%+v: %q, %v; want %v", tt.target, out, err, tt.want)
		}
	}
	// Wrong subject is told even of an erased key.
	f.kill("alice", erased, true)
	eventually(t, "the key is dropped", func() bool {
		_, err := c.Open(t.Context(), alice, blob)
		return errors.Is(err, sdk.ErrErased)
	})
	if _, err := c.Open(t.Context(), bob, blob); !errors.Is(err, sdk.ErrWrongSubject) {
		t.Errorf("of an erased key: %v", err)
	}
}

// Ids that a careless join would make equal are different subjects.
func TestNoIdsCollide(t *testing.T) {
	c, _, _ := start(t)
	targets := []sdk.Target{
		{Tenant: "a", Subject: "bc", Class: "d"},
		{Tenant: "ab", Subject: "c", Class: "d"},
		{Tenant: "a", Subject: "b", Class: "cd"},
		{Tenant: "a", Subject: "b/c", Class: "d"},
		{Tenant: "a", Subject: "b|c", Class: "d"},
		{Tenant: "a", Subject: "12", Class: "d"},
		{Tenant: "a", Subject: "012", Class: "d"},
		{Tenant: "a", Subject: "12 ", Class: "d"},
		{Tenant: "a", Subject: "\u00e9", Class: "d"},
		{Tenant: "a", Subject: "e\u0301", Class: "d"},
	}
	blobs := make([][]byte, len(targets))
	for i, target := range targets {
		blobs[i] = mustSeal(t, c, target, fmt.Sprint(i))
	}
	for i, target := range targets {
		for j, blob := range blobs {
			got, err := c.Open(t.Context(), target, blob)
			if i == j && (err != nil || string(got) != fmt.Sprint(i)) || i != j && err == nil {
				t.Errorf("%q opens the blob of %q: %q, %v", target, targets[j], got, err)
			}
		}
	}
}

// A caller may reuse the memory of the ids that it passed.
func TestTargetsAreCopied(t *testing.T) {
	c, f, _ := start(t)
	id := []byte("alice")
	target := sdk.Target{Tenant: "acme", Subject: aliased(id), Class: "trace"}
	if _, err := c.Seal(t.Context(), target, []byte("x")); err != nil {
		t.Fatal(err)
	}
	copy(id, "mallo")
	blob := mustSeal(t, c, alice, "y")
	if n := f.asked.Load(); n != 1 {
		t.Errorf("alice's lease was not found again: %d queries", n)
	}
	if _, err := c.Open(t.Context(), target, blob); !errors.Is(err, sdk.ErrWrongSubject) {
		t.Errorf("opened for another subject: %v", err)
	}
}

func TestTooLarge(t *testing.T) {
	c, f, _ := start(t)
	big := make([]byte, envelope.MaxPlaintext+1)
	_, err := c.Seal(t.Context(), alice, big)
	if !errors.Is(err, sdk.ErrExhausted) || !errors.Is(err, envelope.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if f.calls.Load() != 0 {
		t.Error("keyd was asked")
	}
}

func TestNoAllocationsWithALease(t *testing.T) {
	c, _, _ := start(t)
	bound, err := alice.Bind(envelope.Pair{Name: "row", Value: "1"})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	plaintext := make([]byte, 1024)
	targets := []sdk.Target{alice, bound}
	if raceDetector {
		targets = targets[:1] // tags of bound contexts use a pool
	}
	for _, target := range targets {
		blob := mustSeal(t, c, target, string(plaintext))
		mustOpen(t, c, target, blob, string(plaintext))
		dst := make([]byte, 0, 2048)
		if n := testing.AllocsPerRun(1000, func() {
			if _, err := c.AppendSeal(ctx, dst, target, plaintext); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("AppendSeal: %v allocations", n)
		}
		if n := testing.AllocsPerRun(1000, func() {
			if _, err := c.AppendOpen(ctx, dst, target, blob); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("AppendOpen: %v allocations", n)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	c, _, clock := start(t)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				target := sdk.Target{Tenant: "acme", Subject: fmt.Sprint("s", (g+i)%5), Class: "trace"}
				want := fmt.Sprint(g, "/", i)
				blob, err := c.Seal(t.Context(), target, []byte(want))
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := c.Open(t.Context(), target, blob); err != nil || string(got) != want {
					t.Errorf("%q, %v", got, err)
					return
				}
				if i%20 == 0 {
					clock.Advance(7e9)
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkAppendSeal(b *testing.B) { benchmark(b, sdk.SystemClock(), true) }
func BenchmarkAppendOpen(b *testing.B) { benchmark(b, sdk.SystemClock(), false) }

func benchmark(b *testing.B, clock sdk.Clock, seal bool) {
	c, f, fake := start(b, sdk.WithClock(clock))
	fake.Advance(sinceFake(fake))
	f.setLease(3600e9)
	for _, size := range []int{256, 1024, 4096} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			plaintext := make([]byte, size)
			blob := mustSeal(b, c, alice, string(plaintext))
			mustOpen(b, c, alice, blob, string(plaintext))
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				dst := make([]byte, 0, size+1024)
				ctx := context.Background()
				for pb.Next() {
					var err error
					if seal {
						_, err = c.AppendSeal(ctx, dst, alice, plaintext)
					} else {
						_, err = c.AppendOpen(ctx, dst, alice, blob)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

// BenchmarkRatio measures sealing and opening with a lease in hand as a
// fraction of raw AES-256-GCM's speed. They are run by turns, so that what else
// the machine does disturbs all alike; the metrics are medians of the turns.
func BenchmarkRatio(b *testing.B) {
	c, f, fake := start(b, sdk.WithClock(sdk.SystemClock()))
	fake.Advance(sinceFake(fake))
	f.setLease(3600e9)
	block, err := aes.NewCipher(make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		b.Fatal(err)
	}
	for _, size := range []int{256, 1024, 4096} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			plaintext, nonce, dst := make([]byte, size), make([]byte, 12), make([]byte, 0, size+256)
			sealed := aead.Seal(nil, nonce, plaintext, nil)
			blob := mustSeal(b, c, alice, string(plaintext))
			mustOpen(b, c, alice, blob, string(plaintext))
			times := func(f func()) float64 {
				begun := time.Now()
				for range 1000 {
					f()
				}
				return float64(time.Since(begun))
			}
			var seal, open []float64
			for b.Loop() {
				seal = append(seal, times(func() { aead.Seal(dst, nonce, plaintext, nil) })/
					times(func() { c.AppendSeal(b.Context(), dst, alice, plaintext) }))
				open = append(open, times(func() { aead.Open(dst, nonce, sealed, nil) })/
					times(func() { c.AppendOpen(b.Context(), dst, alice, blob) }))
			}
			slices.Sort(seal)
			slices.Sort(open)
			b.ReportMetric(seal[len(seal)/2], "Seal/GCM")
			b.ReportMetric(open[len(open)/2], "Open/GCM")
			b.ReportMetric(0, "ns/op")
		})
	}
}
