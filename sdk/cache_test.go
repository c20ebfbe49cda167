package sdk_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"lethe/sdk"
	"lethe/sdk/envelope"
)

func subject(i int) sdk.Target {
	return sdk.Target{Tenant: "acme", Subject: fmt.Sprint("subject-", i), Class: "trace"}
}

func TestCacheLimits(t *testing.T) {
	c, f, clock := start(t, sdk.WithCacheLimits(10, 1<<30))
	for i := range 100 {
		mustSeal(t, c, subject(i), "data")
		mustSeal(t, c, alice, "data") // always in use
		clock.Advance(50 * time.Millisecond)
		if mapped, _ := c.Leases(); mapped > 10 {
			t.Fatalf("%d leases", mapped)
		}
	}
	if n := f.asked.Load(); n < 101 {
		t.Errorf("%d queries for 101 subjects", n)
	}
	// By memory.
	c, _, _ = start(t, sdk.WithCacheLimits(1000, 100<<10))
	for i := range 100 {
		mustOpen(t, c, subject(i), mustSeal(t, c, subject(i), "data"), "data")
		if n := c.CacheBytes(); n > 100<<10 {
			t.Fatalf("counted for %d bytes", n)
		}
	}
	// One lease is kept, even where none has room.
	c, f, _ = start(t, sdk.WithCacheLimits(1, 1))
	mustSeal(t, c, alice, "data")
	mustSeal(t, c, alice, "data")
	if n := f.asked.Load(); n != 1 {
		t.Errorf("%d queries", n)
	}
}

// What is used lately stays.
func TestEvictionPrefersTheUnused(t *testing.T) {
	c, f, clock := start(t, sdk.WithCacheLimits(64, 1<<30))
	f.setLease(time.Hour)
	for i := range 500 {
		for hot := range 4 {
			mustSeal(t, c, subject(hot), "data")
		}
		mustSeal(t, c, subject(100+i), "data")
		clock.Advance(2 * time.Second)
	}
	// Chance takes a hot one now and then: at most when it is among eight of
	// which all were used in the last two seconds.
	if n := f.asked.Load(); n > 520 {
		t.Errorf("%d queries for 504 subjects", n)
	}
}

// Capacity never fails an operation, however fast leases come and go.
func TestEvictionUnderLoad(t *testing.T) {
	c, _, _ := start(t, sdk.WithCacheLimits(2, 1<<30))
	blobs := make([][]byte, 8)
	for i := range blobs {
		blobs[i] = mustSeal(t, c, subject(i), "data")
	}
	long := sealStream(t, c, subject(0), randomBytes(4<<20))
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			for i := range 150 {
				n := (g + i) % len(blobs)
				if got, err := c.Open(t.Context(), subject(n), blobs[n]); err != nil || string(got) != "data" {
					t.Errorf("Open: %q, %v", got, err)
				}
				if _, err := c.Seal(t.Context(), subject(n), []byte("x")); err != nil {
					t.Errorf("Seal: %v", err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 5 {
			r, err := c.OpenReader(t.Context(), subject(0), bytes.NewReader(long))
			if err != nil {
				t.Error(err)
				return
			}
			if n, err := io.Copy(io.Discard, r); n != 4<<20 || err != nil {
				t.Errorf("stream: %d, %v", n, err)
			}
			r.Close()
		}
	})
	wg.Wait()
}

// What was evicted is not forgotten while it is used, and not kept when it is
// not.
func TestEvictedKeys(t *testing.T) {
	c, f, _ := start(t, sdk.WithCacheLimits(1, 1<<30))
	mustSeal(t, c, alice, "data")
	evicted := c.Sealers()[0]
	mustSeal(t, c, subject(1), "data")
	if _, err := evicted.Append(nil, nil, envelope.Context{}); err != nil {
		t.Errorf("the evicted sealer: %v", err)
	}
	eventually(t, "the stream is open", func() bool { return f.isWatching("acme") })
	f.kill("alice", erased, true)
	eventually(t, "it is revoked", func() bool {
		_, err := evicted.Append(nil, nil, envelope.Context{})
		return err != nil
	})
	runtime.KeepAlive(evicted)
	for i := range 50 {
		mustSeal(t, c, subject(i), "data")
	}
	eventually(t, "the collector takes them", func() bool {
		runtime.GC()
		return known(c) == 1
	})
}

// Close wipes every key, ends what is under way, and leaves nothing running
// (which TestMain checks).
func TestClose(t *testing.T) {
	c, f, _ := start(t)
	blob := mustSeal(t, c, alice, "data")
	mustOpen(t, c, alice, blob, "data")
	sealer, opener := c.Sealers()[0], c.Openers()[0]

	gate := make(chan struct{})
	defer close(gate)
	f.with(func() { f.answer = held(gate) })
	waiting := make(chan error, 3)
	go func() { _, err := c.Seal(t.Context(), subject(1), nil); waiting <- err }()
	go func() { _, err := c.Seal(t.Context(), subject(1), nil); waiting <- err }()
	go func() { _, err := c.Open(t.Context(), subject(2), blob); waiting <- err }()
	eventually(t, "calls are under way", func() bool { return c.Flights() == 2 })

	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if n := c.Flights(); n != 0 {
				t.Errorf("%d calls are under way after Close", n)
			}
		})
	}
	wg.Wait()
	for range 3 {
		if err := <-waiting; !errors.Is(err, sdk.ErrClosed) {
			t.Errorf("a waiting call: %v", err)
		}
	}
	if _, err := sealer.Append(nil, nil, envelope.Context{}); !errors.Is(err, envelope.ErrWiped) {
		t.Errorf("the sealer: %v", err)
	}
	if _, err := opener.Append(nil, blob, envelope.Context{}); !errors.Is(err, envelope.ErrWiped) {
		t.Errorf("the opener: %v", err)
	}
	if n := known(c); n != 0 {
		t.Errorf("%d keys are kept", n)
	}
	_, sealErr := c.Seal(t.Context(), alice, nil)
	_, openErr := c.Open(t.Context(), alice, blob)
	_, writerErr := c.SealWriter(t.Context(), alice, io.Discard)
	_, destroyErr := c.DestroyKey(t.Context(), destroyAlice())
	_, describeErr := c.Describe(t.Context(), "acme", "alice")
	for i, err := range []error{sealErr, openErr, writerErr, destroyErr, describeErr} {
		if !errors.Is(err, sdk.ErrClosed) {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

// keyd may come and go; clients carry on by themselves.
func TestOutage(t *testing.T) {
	clock := newFakeClock()
	f := newFakeKeyd(t, clock)
	f.stop()
	dir, err := os.MkdirTemp("", "lethe")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	// No port: somebody else may take it while keyd is away.
	addr := "unix://" + filepath.Join(dir, "keyd.sock")
	c, err := sdk.Dial(t.Context(), addr, sdk.WithClock(clock))
	if err != nil {
		t.Fatalf("Dial without a keyd: %v", err)
	}
	defer c.Close()
	if _, err := c.Seal(t.Context(), alice, nil); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("without a keyd: %v", err)
	}
	f.listen(addr)
	var blob []byte
	eventually(t, "keyd is found", func() bool {
		blob, err = c.Seal(t.Context(), alice, []byte("data"))
		return err == nil
	})
	mustOpen(t, c, alice, blob, "data")
	f.stop()
	mustOpen(t, c, alice, blob, "data")
	clock.Advance(time.Minute)
	if err := openErr(t, c, blob); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("after the lease: %v", err)
	}
	f.listen(addr)
	eventually(t, "keyd is found again", func() bool {
		_, err := c.Open(t.Context(), alice, blob)
		return err == nil
	})
}
