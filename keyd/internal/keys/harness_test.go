package keys_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/local"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// clock is a wall clock that the test moves.
type clock struct {
	mu   sync.Mutex
	now  time.Time
	also func(time.Duration) // moves another clock along; nil: there is none
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
	if c.also != nil {
		c.also(d)
	}
}

// rig is a key store with everything that a test wants to reach.
type rig struct {
	*keys.Keys
	t      testing.TB
	dir    string
	clock  *clock
	store  keys.Store
	kms    keys.KMS
	anchor *anchortest.Memory
	// patience is how long calls wait for the anchor, if not the time that suits
	// most tests.
	patience time.Duration
	// gather is the GatherLimit, if not the usual one.
	gather time.Duration
	// uptime is the clock that nobody sets, if it is not to follow clock.
	uptime func() time.Duration
}

func newRig(t testing.TB) *rig {
	t.Helper()
	r := &rig{
		t: t, dir: t.TempDir(), anchor: anchortest.NewMemory(),
		clock: &clock{now: time.Date(2026, 3, 1, 12, 30, 0, 123456, time.UTC)},
	}
	if err := local.GenerateKeyfile(filepath.Join(r.dir, "keyfile")); err != nil {
		t.Fatal(err)
	}
	kms, err := local.Open(local.Options{
		Path: filepath.Join(r.dir, "roots"), Keyfile: filepath.Join(r.dir, "keyfile"), Create: true, Clock: r.clock.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kms.Close() })
	r.kms = kms
	r.open(true)
	t.Cleanup(r.close)
	if _, err := r.CreateTenant(t.Context(), "acme", nil); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) config() keys.Config {
	patience := time.Minute
	if r.patience != 0 {
		patience = r.patience
	}
	return keys.Config{
		Store: r.store, KMS: r.kms, Anchor: r.anchor, Clock: r.clock.Now, Uptime: r.uptime, Log: slog.New(slog.DiscardHandler),
		Initialise: true, EpochLength: 7 * 24 * time.Hour, KEKLease: 15 * time.Minute,
		DrainBudget: 24 * time.Hour, Soak: 2 * time.Hour, DutyInterval: -1,
		AnchorTimeout: patience, SkewAllowance: 5 * time.Second, Grace: 24 * time.Hour,
		GatherLimit: r.gather,
	}
}

func (r *rig) open(create bool) {
	r.t.Helper()
	store, err := badger.Open(badger.Options{Dir: filepath.Join(r.dir, "store"), Create: create, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		r.t.Fatal(err)
	}
	r.store = store
	if r.Keys, err = keys.Open(context.Background(), r.config()); err != nil {
		store.Close()
		r.t.Fatal(err)
	}
}

func (r *rig) close() {
	if r.Keys != nil {
		r.Keys.Close()
		r.store.Close()
		r.Keys = nil
	}
}

func (r *rig) reopen() {
	r.t.Helper()
	r.close()
	r.open(false)
}

// copyTo copies the store, which may be open, as it is between two merges of
// its tables.
func (r *rig) copyTo(name string) string {
	r.t.Helper()
	store, to := filepath.Join(r.dir, "store"), filepath.Join(r.dir, name)
	tables := func(dir string) (names []string) {
		all, err := os.ReadDir(dir)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range all {
			if filepath.Ext(e.Name()) == ".sst" {
				names = append(names, e.Name())
			}
		}
		return names
	}
	for {
		before := tables(store)
		err := os.CopyFS(to, os.DirFS(store))
		if err == nil && slices.Equal(tables(store), before) && slices.Equal(tables(to), before) {
			return to
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			r.t.Fatal(err)
		}
		if err := os.RemoveAll(to); err != nil {
			r.t.Fatal(err)
		}
	}
}

// ask sends one query.
func (r *rig) ask(q *keydv1.BlobKeyQuery) (*keydv1.BlobKey, error) {
	results, err := r.BlobKeys(context.Background(), []*keydv1.BlobKeyQuery{q})
	if err != nil {
		return nil, err
	}
	return results[0].Key, results[0].Err
}

func sealQuery(tenant, subject, class string) *keydv1.BlobKeyQuery {
	return &keydv1.BlobKeyQuery{Tenant: tenant, SubjectId: []byte(subject), Class: class, Purpose: keydv1.Purpose_PURPOSE_SEAL}
}

// openQuery asks for the key under which something was sealed.
func openQuery(tenant, subject, class string, k *keydv1.BlobKey) *keydv1.BlobKeyQuery {
	return &keydv1.BlobKeyQuery{
		Tenant: tenant, SubjectId: []byte(subject), Class: class, Purpose: keydv1.Purpose_PURPOSE_OPEN,
		KeyId: k.KeyId, ClassNumber: k.ClassNumber, Bucket: k.Bucket,
	}
}

func (r *rig) seal(subject, class string) *keydv1.BlobKey {
	r.t.Helper()
	k, err := r.ask(sealQuery("acme", subject, class))
	if err != nil {
		r.t.Fatalf("seal: %v", err)
	}
	return k
}

func (r *rig) destroy(subject, request string, classes ...string) *keys.Recorded {
	r.t.Helper()
	rec, err := r.DestroyKey(context.Background(), destroyRequest(subject, request, classes...))
	if err != nil {
		r.t.Fatalf("destroy: %v", err)
	}
	return rec
}

func destroyRequest(subject, request string, classes ...string) *keydv1.DestroyKeyRequest {
	return &keydv1.DestroyKeyRequest{
		Tenant: "acme", SubjectId: []byte(subject), Classes: classes, RequestId: request, Reason: "test",
	}
}

// verify checks a receipt as a stranger with the pinned key would.
func (r *rig) verify(rec *keys.Recorded) *receipt.Verified {
	r.t.Helper()
	pinned, err := receipt.PinKeys(r.VerifierKeys()...)
	if err != nil {
		r.t.Fatal(err)
	}
	v, err := receipt.Verify(rec.Receipt, pinned)
	if err != nil {
		r.t.Fatalf("receipt: %v", err)
	}
	return v
}

// outcome is the outcome of an error; UNSPECIFIED for nil.
func outcome(err error) keydv1.Outcome {
	var e *keys.Error
	switch {
	case err == nil:
		return keydv1.Outcome_OUTCOME_UNSPECIFIED
	case errors.As(err, &e):
		return e.Outcome
	}
	return -1
}

func (r *rig) want(what string, err error, o keydv1.Outcome) {
	r.t.Helper()
	if got := outcome(err); got != o {
		r.t.Errorf("%s: %v (%v), want %v", what, got, err, o)
	}
}

const (
	ok         = keydv1.Outcome_OUTCOME_UNSPECIFIED
	isErased   = keydv1.Outcome_OUTCOME_ERASED
	isHeld     = keydv1.Outcome_OUTCOME_HELD
	isUnknown  = keydv1.Outcome_OUTCOME_UNKNOWN
	isInvalid  = keydv1.Outcome_OUTCOME_INVALID_ARGUMENT
	isConflict = keydv1.Outcome_OUTCOME_CONFLICT
	isWrong    = keydv1.Outcome_OUTCOME_WRONG_SUBJECT
	isUnavail  = keydv1.Outcome_OUTCOME_UNAVAILABLE
	isExpired  = keydv1.Outcome_OUTCOME_EXPIRED
	isPending  = keydv1.Outcome_OUTCOME_PENDING_ERASURE
)

func class(name string, width, lease time.Duration) *keydv1.Class {
	return &keydv1.Class{Name: name, BucketWidth: durationpb.New(width), Lease: durationpb.New(lease)}
}

func emptyStore(t *testing.T) keys.Store {
	t.Helper()
	store, err := badger.Open(badger.Options{Dir: filepath.Join(t.TempDir(), "store"), Create: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}
