package local

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/kmstest"
)

// cheap is the least that a file may name.
var cheap = argon2Cost{passes: 2, memory: 19 << 10, lanes: 1}

type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Unix(1_900_000_000, 123_456_789)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// privateDir returns a directory that safeDir passes, links resolved.
func privateDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func mustOpen(t testing.TB, o Options) *KMS {
	t.Helper()
	k, err := open(o, cheap)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

// withKeyfile returns options for a new root file under a new keyfile.
func withKeyfile(t testing.TB) (Options, *clock) {
	t.Helper()
	dir, c := privateDir(t), newClock()
	o := Options{
		Path: filepath.Join(dir, "roots"), Keyfile: filepath.Join(dir, "key"),
		Create: true, Clock: c.Now, Waiting: time.Minute,
	}
	if err := GenerateKeyfile(o.Keyfile); err != nil {
		t.Fatal(err)
	}
	return o, c
}

func fixture(t *testing.T, o Options, c *clock) kmstest.Fixture {
	k := mustOpen(t, o)
	return kmstest.Fixture{
		KMS: k,
		Reopen: func(t *testing.T) keys.KMS {
			if err := k.Close(); err != nil {
				t.Fatal(err)
			}
			o.Create = false
			return mustOpen(t, o)
		},
		Break: func(t *testing.T) func() {
			if err := os.Rename(o.Path, o.Path+".away"); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := os.Rename(o.Path+".away", o.Path); err != nil {
					t.Fatal(err)
				}
			}
		},
		UnknownRoot: "local-7-00000000000000000000000000000000",
		Now:         c.Now,
		Advance:     c.Advance,
	}
}

func TestConformanceKeyfile(t *testing.T) {
	kmstest.Run(t, func(t *testing.T) kmstest.Fixture {
		o, c := withKeyfile(t)
		return fixture(t, o, c)
	})
}

func TestConformancePassphrase(t *testing.T) {
	kmstest.Run(t, func(t *testing.T) kmstest.Fixture {
		o, c := withKeyfile(t)
		o.Keyfile, o.Passphrase = "", []byte("correct horse battery staple")
		return fixture(t, o, c)
	})
}
