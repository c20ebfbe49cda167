//go:build pkcs11

package pkcs11

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/kmstest"
)

// The tests run against SoftHSM, a real PKCS#11 module whose tokens are files.
// One module serves the whole process, and every test has a token of its own.
const (
	userPIN = "4711-user"
	soPIN   = "0815-officer"
)

var (
	softHSM string  // the module's path
	tokens  string  // the directory of its tokens
	library *module // keeps it initialised while tests come and go
	labels  atomic.Int64
)

func TestMain(m *testing.M) {
	code, err := withSoftHSM(m.Run)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func withSoftHSM(run func() int) (int, error) {
	for _, path := range []string{
		os.Getenv("SOFTHSM2_MODULE"),
		"/usr/lib/softhsm/libsofthsm2.so",
		"/usr/lib64/softhsm/libsofthsm2.so", "/usr/lib64/libsofthsm2.so",
		"/usr/local/lib/softhsm/libsofthsm2.so", "/opt/homebrew/lib/softhsm/libsofthsm2.so",
	} {
		if _, err := os.Stat(path); path != "" && err == nil {
			softHSM = path
			break
		}
	}
	if softHSM == "" {
		return 1, errors.New("SoftHSM is missing: install the package softhsm2, or name the module in SOFTHSM2_MODULE")
	}
	dir, err := os.MkdirTemp("", "softhsm")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	tokens = filepath.Join(dir, "tokens")
	conf := filepath.Join(dir, "softhsm2.conf")
	text := fmt.Sprintf("directories.tokendir = %s\nobjectstore.backend = file\nlog.level = ERROR\nslots.removable = false\n", tokens)
	if err := os.Mkdir(tokens, 0o700); err != nil {
		return 1, err
	}
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return 1, err
	}
	if err := os.Setenv("SOFTHSM2_CONF", conf); err != nil {
		return 1, err
	}
	if library, err = loadModule(softHSM); err != nil {
		return 1, err
	}
	return run(), library.unload()
}

// newToken initialises a token and returns its label.
func newToken(t testing.TB) string {
	t.Helper()
	label := fmt.Sprint("lethe ", labels.Add(1))
	initToken(t, label)
	return label
}

func initToken(t testing.TB, label string) {
	t.Helper()
	library.calls.RLock()
	defer library.calls.RUnlock()
	c := library.ctx
	slots, err := c.GetSlotList(false)
	must(t, err)
	for _, slot := range slots {
		info, err := c.GetTokenInfo(slot)
		if err != nil || info.Flags&p11.CKF_TOKEN_INITIALIZED != 0 {
			continue
		}
		must(t, c.InitToken(slot, soPIN, label))
		h, err := c.OpenSession(slot, p11.CKF_SERIAL_SESSION|p11.CKF_RW_SESSION)
		must(t, err)
		must(t, c.Login(h, p11.CKU_SO, soPIN))
		must(t, c.InitPIN(h, userPIN))
		must(t, c.Logout(h))
		must(t, c.CloseSession(h))
		return
	}
	t.Fatal("SoftHSM has no free slot")
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type clock struct {
	mu  sync.Mutex
	now time.Time
}

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

// faults stand between a KMS and the library.
type faults struct {
	mu    sync.Mutex
	fn    func(call string) error
	calls []string
}

func (f *faults) set(fn func(call string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fn = fn
}

// once makes the next call fail.
func (f *faults) once(c p11.Error) {
	var done atomic.Bool
	f.set(func(string) error {
		if done.Swap(true) {
			return nil
		}
		return c
	})
}

// cutAfter makes all calls fail but the next n.
func (f *faults) cutAfter(n int64) {
	var calls atomic.Int64
	f.set(func(string) error {
		if calls.Add(1) > n {
			return p11.Error(p11.CKR_DEVICE_ERROR)
		}
		return nil
	})
}

func (f *faults) intercept(call string) error {
	f.mu.Lock()
	f.calls = append(f.calls, call)
	fn := f.fn
	f.mu.Unlock()
	if fn != nil {
		return fn(call)
	}
	return nil
}

// count returns how often a call was made since the last count.
func (f *faults) count(call string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if c == call {
			n++
		}
	}
	f.calls = nil
	return n
}

// options returns options for a new token.
func options(t testing.TB) (Options, *clock, *faults) {
	t.Helper()
	c, f := &clock{now: time.Unix(1_900_000_000, 123_456_789)}, new(faults)
	return Options{
		Module: softHSM, Token: newToken(t), PINFile: pinFile(t, userPIN+"\n"),
		Waiting: time.Minute, Clock: c.Now, intercept: f.intercept,
	}, c, f
}

func pinFile(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pin")
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func mustOpen(t testing.TB, o Options) *KMS {
	t.Helper()
	k, err := Open(t.Context(), o)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { must(t, k.Close()) })
	return k
}

const unknownRoot = "pkcs11-7-00000000000000000000000000000000"

func fixture(t *testing.T) kmstest.Fixture {
	o, c, f := options(t)
	k := mustOpen(t, o)
	return kmstest.Fixture{
		KMS: k,
		Reopen: func(t *testing.T) keys.KMS {
			must(t, k.Close())
			return mustOpen(t, o)
		},
		Break: func(*testing.T) func() {
			f.set(func(string) error { return p11.Error(p11.CKR_DEVICE_REMOVED) })
			return func() { f.set(nil) }
		},
		Hang: func(*testing.T) func() {
			gate := make(chan struct{})
			f.set(func(string) error { <-gate; return nil })
			return func() {
				f.set(nil)
				close(gate)
			}
		},
		UnknownRoot: unknownRoot, Now: c.Now, Advance: c.Advance,
	}
}

func TestConformance(t *testing.T) { kmstest.Run(t, fixture) }

// TestConformanceTokenGone takes the token's files away instead of asking for
// an error, so that it is SoftHSM that says what it says without a token: first
// that a search finds nothing.
func TestConformanceTokenGone(t *testing.T) {
	kmstest.Run(t, func(t *testing.T) kmstest.Fixture {
		f := fixture(t)
		f.Hang = nil
		f.Break = func(t *testing.T) func() {
			must(t, os.Rename(tokens, tokens+".away"))
			return func() { must(t, os.Rename(tokens+".away", tokens)) }
		}
		return f
	})
}
