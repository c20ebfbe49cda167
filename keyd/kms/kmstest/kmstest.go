// Package kmstest is the conformance suite of keys.KMS. Every adapter passes it.
package kmstest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
)

// Fixture is one KMS under test, and the handles on the world around it.
type Fixture struct {
	KMS keys.KMS
	// Reopen returns a KMS over the same roots, as a keyd has it after a
	// restart. KMS is not used any more.
	Reopen func(t *testing.T) keys.KMS
	// Break makes the KMS unreachable until repair is called.
	Break func(t *testing.T) (repair func())
	// UnknownRoot is a root id as the KMS writes them, of a root that never was.
	UnknownRoot string

	// Now is the KMS's clock, and Advance moves it forward. Without them what
	// happens after the waiting period is not tested: a real server's cannot
	// be passed.
	Now     func() time.Time
	Advance func(time.Duration)
	// Unauthenticated is for an emulator: how many bytes at the front of a
	// wrapped key it fails to authenticate. The real thing has none.
	Unauthenticated int
	// Hang makes the KMS accept calls and not answer, until release is called.
	// Nil where calls wait for nobody.
	Hang func(t *testing.T) (release func())
}

// Run tests a KMS. fresh makes one that has no root yet, for every subtest.
func Run(t *testing.T, fresh func(t *testing.T) Fixture) {
	tests := []struct {
		name string
		fn   func(*testing.T, Fixture)
	}{
		{"RoundTrip", testRoundTrip},
		{"BoundToContext", testBoundToContext},
		{"BoundToRoot", testBoundToRoot},
		{"AlteredBytes", testAlteredBytes},
		{"TwoWrapsDiffer", testTwoWrapsDiffer},
		{"SizeCap", testSizeCap},
		{"CreateGivesDistinctIDs", testCreate},
		{"CreateAgain", testCreateAgain},
		{"Disable", testDisable},
		{"ScheduleDestruction", testSchedule},
		{"Cancel", testCancel},
		{"UnknownRoot", testUnknownRoot},
		{"Unavailable", testUnavailable},
		{"EndedContext", testEndedContext},
		{"Reopen", testReopen},
		{"Concurrent", testConcurrent},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.fn(t, fresh(t)) })
	}
	probe := fresh(t)
	if probe.Advance != nil {
		t.Run("Destroyed", func(t *testing.T) { testDestroyed(t, fresh(t)) })
		t.Run("DestroyedWhileClosed", func(t *testing.T) { testDestroyedWhileClosed(t, fresh(t)) })
		t.Run("UnavailableIsNotDestroyed", func(t *testing.T) { testUnavailableIsNotDestroyed(t, fresh(t)) })
		t.Run("CancelledIsNotDestroyed", func(t *testing.T) { testCancelledIsNotDestroyed(t, fresh(t)) })
	}
	if probe.Hang != nil {
		t.Run("Hang", func(t *testing.T) { testHang(t, fresh(t)) })
	}
}

var tenantA = keys.EncryptionContext{Tenant: "tenant-a", Epoch: 7}

func create(t *testing.T, k keys.KMS, epoch uint32) string {
	t.Helper()
	id, err := k.Create(t.Context(), epoch, Request())
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return id
}

// Request is a request for a root that was never made before.
func Request() (r keys.RootRequest) {
	rand.Read(r[:])
	return r
}

func randomKey(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func wrap(t *testing.T, k keys.KMS, root string, key []byte, ec keys.EncryptionContext) []byte {
	t.Helper()
	w, err := k.Wrap(t.Context(), root, key, ec)
	if err != nil {
		t.Fatalf("Wrap: %v", err)
	}
	return w
}

// mustUnwrap fails the test unless wrapped opens to key.
func mustUnwrap(t *testing.T, k keys.KMS, root string, wrapped, key []byte, ec keys.EncryptionContext) {
	t.Helper()
	got, err := k.Unwrap(t.Context(), root, wrapped, ec)
	if err != nil {
		t.Fatalf("Unwrap: %v", err)
	}
	if !bytes.Equal(got, key) {
		t.Fatal("Unwrap returned another key")
	}
}

// mustFail fails the test unless err is want and none of the other sentinels.
func mustFail(t *testing.T, what string, err, want error) {
	t.Helper()
	if err == nil {
		t.Fatalf("%s succeeded; want %q", what, want)
	}
	for _, sentinel := range []error{keys.ErrKMSUnavailable, keys.ErrKMSDenied, keys.ErrRootNotUsable, keys.ErrRootUnknown} {
		if is := errors.Is(err, sentinel); is != (sentinel == want) {
			t.Fatalf("%s: %v; errors.Is %q = %v", what, err, sentinel, is)
		}
	}
}

func mustUnwrapFail(t *testing.T, k keys.KMS, what, root string, wrapped []byte, ec keys.EncryptionContext, want error) {
	t.Helper()
	got, err := k.Unwrap(t.Context(), root, wrapped, ec)
	mustFail(t, "Unwrap "+what, err, want)
	if got != nil {
		t.Fatalf("Unwrap %s returned bytes with its error", what)
	}
}

// mustBe fails the test unless Describe tells this state.
func mustBe(t *testing.T, k keys.KMS, root string, want keys.RootState) keys.Root {
	t.Helper()
	d, err := k.Describe(t.Context(), root)
	if err != nil {
		t.Fatalf("Describe: %v", err)
	}
	if d.ID != root || d.State != want {
		t.Fatalf("Describe = %+v; want state %d of %s", d, want, root)
	}
	if want == keys.RootPending && d.DestroyAt.IsZero() {
		t.Fatal("Describe tells no date of a pending root")
	}
	if (want == keys.RootEnabled || want == keys.RootDisabled) && !d.DestroyAt.IsZero() {
		t.Fatal("Describe tells a date of a root that is not pending")
	}
	return d
}

// mustNotWork fails the test unless the root refuses to wrap and unwrap.
func mustNotWork(t *testing.T, k keys.KMS, root string, wrapped []byte, ec keys.EncryptionContext) {
	t.Helper()
	_, err := k.Wrap(t.Context(), root, randomKey(32), ec)
	mustFail(t, "Wrap under a root that is not enabled", err, keys.ErrRootNotUsable)
	mustUnwrapFail(t, k, "under a root that is not enabled", root, wrapped, ec, keys.ErrRootNotUsable)
}

// mustWork fails the test unless the root unwraps what it wrapped, and wraps.
func mustWork(t *testing.T, k keys.KMS, root string, wrapped, key []byte, ec keys.EncryptionContext) {
	t.Helper()
	mustUnwrap(t, k, root, wrapped, key, ec)
	other := randomKey(32)
	mustUnwrap(t, k, root, wrap(t, k, root, other, ec), other, ec)
}

func schedule(t *testing.T, k keys.KMS, root string) time.Time {
	t.Helper()
	at, err := k.ScheduleDestruction(t.Context(), root)
	if err != nil {
		t.Fatalf("ScheduleDestruction: %v", err)
	}
	return at
}

func testRoundTrip(t *testing.T, f Fixture) {
	if f.KMS.Kind() == "" {
		t.Error("Kind is empty")
	}
	root := create(t, f.KMS, 7)
	mustBe(t, f.KMS, root, keys.RootEnabled)
	for _, n := range []int{1, 16, 32, 64} {
		for _, ec := range []keys.EncryptionContext{
			{}, {Epoch: 1 << 31}, tenantA, {Tenant: strings.Repeat("t", 128), Epoch: 1<<32 - 1},
		} {
			key := randomKey(n)
			given := bytes.Clone(key)
			wrapped := wrap(t, f.KMS, root, given, ec)
			if !bytes.Equal(given, key) {
				t.Fatal("Wrap changed the key it was given")
			}
			if n >= 16 && bytes.Contains(wrapped, key) {
				t.Fatal("the wrapped key holds the key")
			}
			before := bytes.Clone(wrapped)
			mustUnwrap(t, f.KMS, root, wrapped, key, ec)
			if !bytes.Equal(wrapped, before) {
				t.Fatal("Unwrap changed the bytes it was given")
			}
		}
	}
}

func testBoundToContext(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	key := randomKey(32)
	contexts := []keys.EncryptionContext{
		{Tenant: "a", Epoch: 11}, {Tenant: "a1", Epoch: 1}, {Tenant: "a", Epoch: 1}, {Tenant: "b", Epoch: 11},
		{Tenant: "", Epoch: 11}, {Tenant: "", Epoch: 1}, {Tenant: "system", Epoch: 11}, {Tenant: "A", Epoch: 11},
	}
	for _, sealed := range contexts {
		wrapped := wrap(t, f.KMS, root, key, sealed)
		for _, other := range contexts {
			if other == sealed {
				mustUnwrap(t, f.KMS, root, wrapped, key, other)
				continue
			}
			mustUnwrapFail(t, f.KMS, fmt.Sprintf("%+v as %+v", sealed, other), root, wrapped, other, keys.ErrKMSDenied)
		}
	}
}

func testBoundToRoot(t *testing.T, f Fixture) {
	one, two := create(t, f.KMS, 7), create(t, f.KMS, 7)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, one, key, tenantA)
	mustUnwrapFail(t, f.KMS, "under another root", two, wrapped, tenantA, keys.ErrKMSDenied)
	mustUnwrap(t, f.KMS, one, wrapped, key, tenantA)
}

func testAlteredBytes(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, root, key, tenantA)
	for i := f.Unauthenticated; i < len(wrapped); i++ {
		bad := bytes.Clone(wrapped)
		bad[i] ^= 1 << (i % 8)
		mustUnwrapFail(t, f.KMS, fmt.Sprintf("with a bit of byte %d flipped", i), root, bad, tenantA, keys.ErrKMSDenied)
	}
	for name, bad := range map[string][]byte{
		"nil":       nil,
		"empty":     {},
		"one byte":  wrapped[:1],
		"half":      wrapped[:len(wrapped)/2],
		"cut short": wrapped[:len(wrapped)-1],
		"too long":  append(bytes.Clone(wrapped), 0),
		"twice":     append(bytes.Clone(wrapped), wrapped...),
		"huge":      make([]byte, 1<<20),
	} {
		mustUnwrapFail(t, f.KMS, name, root, bad, tenantA, keys.ErrKMSDenied)
	}
	mustUnwrap(t, f.KMS, root, wrapped, key, tenantA)
}

func testTwoWrapsDiffer(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	key := randomKey(32)
	if bytes.Equal(wrap(t, f.KMS, root, key, tenantA), wrap(t, f.KMS, root, key, tenantA)) {
		t.Fatal("two wraps of a key are the same")
	}
}

func testSizeCap(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	for _, n := range []int{0, 65, 4096, 1 << 20} {
		w, err := f.KMS.Wrap(t.Context(), root, make([]byte, n), tenantA)
		// It is none of the sentinels: nothing is amiss with the KMS or the root.
		mustFail(t, fmt.Sprintf("Wrap of %d bytes", n), err, nil)
		if w != nil {
			t.Fatal("Wrap returned bytes with its error")
		}
	}
}

func testCreate(t *testing.T, f Fixture) {
	seen := map[string]bool{f.UnknownRoot: true}
	for _, epoch := range []uint32{0, 1, 1, 1<<32 - 1} {
		id := create(t, f.KMS, epoch)
		if seen[id] {
			t.Fatalf("Create gave %s twice", id)
		}
		seen[id] = true
		if id == "" || len(id) > 256 {
			t.Fatalf("a root id has %d bytes; want 1 to 256", len(id))
		}
		for _, c := range []byte(id) {
			if c < ' ' || c > '~' {
				t.Fatalf("root id %q is not printable ASCII", id)
			}
		}
		mustBe(t, f.KMS, id, keys.RootEnabled)
	}
}

// testCreateAgain: one request makes one root for an epoch, in whatever state
// that is by now, across restarts and among processes.
func testCreateAgain(t *testing.T, f Fixture) {
	request := Request()
	k := f.KMS
	ask := func(epoch uint32, request keys.RootRequest) string {
		t.Helper()
		id, err := k.Create(t.Context(), epoch, request)
		if err != nil {
			t.Fatalf("Create: %v", err)
		}
		return id
	}
	id := ask(7, request)
	key := randomKey(32)
	wrapped := wrap(t, k, id, key, tenantA)
	for name, other := range map[string]string{
		"another epoch": ask(8, request), "another request": ask(7, Request()),
	} {
		if other == id {
			t.Errorf("%s gets the same root", name)
		}
	}
	again := func(when string, want keys.RootState) {
		t.Helper()
		if got := ask(7, request); got != id {
			t.Fatalf("%s, the request repeated gets %s; want %s", when, got, id)
		}
		mustBe(t, k, id, want)
	}
	again("at once", keys.RootEnabled)
	mustWork(t, k, id, wrapped, key, tenantA)
	k = f.Reopen(t)
	again("after a restart", keys.RootEnabled)
	mustWork(t, k, id, wrapped, key, tenantA)
	if err := k.Disable(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	again("disabled", keys.RootDisabled)
	schedule(t, k, id)
	again("pending", keys.RootPending)

	// At once: one of them makes it, whoever is told so is told the same, and
	// whoever is not asks again.
	shared := Request()
	ids := make([]string, 4)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			for range 100 {
				var err error
				if ids[i], err = k.Create(t.Context(), 9, shared); err == nil {
					return
				} else if !errors.Is(err, keys.ErrKMSUnavailable) {
					t.Errorf("Create: %v", err)
					return
				}
			}
			t.Error("Create never ends")
		})
	}
	wg.Wait()
	for _, got := range ids {
		if got != ids[0] {
			t.Errorf("requests made at once got %q", ids)
			break
		}
	}
}

func testDisable(t *testing.T, f Fixture) {
	root, other := create(t, f.KMS, 7), create(t, f.KMS, 8)
	key := randomKey(32)
	wrapped, elsewhere := wrap(t, f.KMS, root, key, tenantA), wrap(t, f.KMS, other, key, tenantA)
	for range 2 {
		if err := f.KMS.Disable(t.Context(), root); err != nil {
			t.Fatalf("Disable: %v", err)
		}
		mustBe(t, f.KMS, root, keys.RootDisabled)
		mustNotWork(t, f.KMS, root, wrapped, tenantA)
	}
	mustWork(t, f.KMS, other, elsewhere, key, tenantA)
}

func testSchedule(t *testing.T, f Fixture) {
	if f.KMS.Waiting() <= 0 {
		t.Fatal("Waiting is not positive")
	}
	root, other := create(t, f.KMS, 7), create(t, f.KMS, 8)
	key := randomKey(32)
	wrapped, elsewhere := wrap(t, f.KMS, root, key, tenantA), wrap(t, f.KMS, other, key, tenantA)
	// Once from enabled, once from disabled.
	if err := f.KMS.Disable(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	for id, w := range map[string][]byte{root: wrapped, other: elsewhere} {
		at := schedule(t, f.KMS, id)
		if f.Now != nil {
			wait := at.Sub(f.Now())
			if wait <= 0 || wait > f.KMS.Waiting()+2*time.Second {
				t.Fatalf("the root is destroyed in %v; Waiting is %v", wait, f.KMS.Waiting())
			}
		}
		d := mustBe(t, f.KMS, id, keys.RootPending)
		if !d.DestroyAt.Equal(at) {
			t.Fatalf("ScheduleDestruction says %v, Describe %v", at, d.DestroyAt)
		}
		mustNotWork(t, f.KMS, id, w, tenantA)
		if f.Advance != nil {
			f.Advance(time.Second)
		}
		if again := schedule(t, f.KMS, id); !again.Equal(at) {
			t.Fatalf("repeated, ScheduleDestruction says %v instead of %v", again, at)
		}
		if err := f.KMS.Disable(t.Context(), id); err != nil {
			t.Fatalf("Disable of a pending root: %v", err)
		}
		d = mustBe(t, f.KMS, id, keys.RootPending)
		if !d.DestroyAt.Equal(at) {
			t.Fatal("Disable moved the date of a pending root")
		}
	}
}

func testCancel(t *testing.T, f Fixture) {
	root, other := create(t, f.KMS, 7), create(t, f.KMS, 8)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, root, key, tenantA)
	schedule(t, f.KMS, other)
	steps := map[string]func(){
		"enabled":  func() {},
		"disabled": func() { _ = f.KMS.Disable(t.Context(), root) },
		"pending":  func() { schedule(t, f.KMS, root) },
		"disabled and pending": func() {
			_ = f.KMS.Disable(t.Context(), root)
			schedule(t, f.KMS, root)
		},
	}
	for name, step := range steps {
		step()
		for range 2 {
			if err := f.KMS.Cancel(t.Context(), root); err != nil {
				t.Fatalf("Cancel of a root that was %s: %v", name, err)
			}
			mustBe(t, f.KMS, root, keys.RootEnabled)
			mustWork(t, f.KMS, root, wrapped, key, tenantA)
		}
	}
	mustBe(t, f.KMS, other, keys.RootPending)
}

// everyCall calls every method that can fail, and checks each error.
func everyCall(t *testing.T, ctx context.Context, k keys.KMS, root string, wrapped []byte, check func(what string, err error)) {
	t.Helper()
	_, err := k.Wrap(ctx, root, randomKey(32), tenantA)
	check("Wrap", err)
	_, err = k.Unwrap(ctx, root, wrapped, tenantA)
	check("Unwrap", err)
	check("Disable", k.Disable(ctx, root))
	at, err := k.ScheduleDestruction(ctx, root)
	check("ScheduleDestruction", err)
	if !at.IsZero() {
		t.Error("ScheduleDestruction returned a date with its error")
	}
	check("Cancel", k.Cancel(ctx, root))
	d, err := k.Describe(ctx, root)
	check("Describe", err)
	if d.State != 0 {
		t.Errorf("Describe returned state %d with its error", d.State)
	}
}

func testUnknownRoot(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	wrapped := wrap(t, f.KMS, root, randomKey(32), tenantA)
	everyCall(t, t.Context(), f.KMS, f.UnknownRoot, wrapped, func(what string, err error) {
		mustFail(t, what+" of an unknown root", err, keys.ErrRootUnknown)
	})
}

func testUnavailable(t *testing.T, f Fixture) {
	root, disabled, pending := create(t, f.KMS, 7), create(t, f.KMS, 8), create(t, f.KMS, 9)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, root, key, tenantA)
	if err := f.KMS.Disable(t.Context(), disabled); err != nil {
		t.Fatal(err)
	}
	at := schedule(t, f.KMS, pending)

	repair := f.Break(t)
	_, err := f.KMS.Create(t.Context(), 10, Request())
	mustFail(t, "Create", err, keys.ErrKMSUnavailable)
	for _, id := range []string{root, disabled, pending, f.UnknownRoot} {
		everyCall(t, t.Context(), f.KMS, id, wrapped, func(what string, err error) {
			mustFail(t, what+" of a broken KMS", err, keys.ErrKMSUnavailable)
		})
	}
	repair()

	mustBe(t, f.KMS, root, keys.RootEnabled)
	mustWork(t, f.KMS, root, wrapped, key, tenantA)
	mustBe(t, f.KMS, disabled, keys.RootDisabled)
	if d := mustBe(t, f.KMS, pending, keys.RootPending); !d.DestroyAt.Equal(at) {
		t.Fatal("the date moved while the KMS was unavailable")
	}
}

func testEndedContext(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, root, key, tenantA)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	for _, ctx := range []context.Context{cancelled, late} {
		check := func(what string, err error) {
			mustFail(t, what+" with an ended context", err, keys.ErrKMSUnavailable)
			if !errors.Is(err, ctx.Err()) {
				t.Fatalf("%s: %v does not wrap %v", what, err, ctx.Err())
			}
		}
		_, err := f.KMS.Create(ctx, 8, Request())
		check("Create", err)
		everyCall(t, ctx, f.KMS, root, wrapped, check)
	}
	mustBe(t, f.KMS, root, keys.RootEnabled)
	mustWork(t, f.KMS, root, wrapped, key, tenantA)
}

func testHang(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, root, key, tenantA)
	release := f.Hang(t)
	calls := map[string]func(context.Context) error{
		"Create":   func(ctx context.Context) error { _, err := f.KMS.Create(ctx, 8, Request()); return err },
		"Wrap":     func(ctx context.Context) error { _, err := f.KMS.Wrap(ctx, root, key, tenantA); return err },
		"Unwrap":   func(ctx context.Context) error { _, err := f.KMS.Unwrap(ctx, root, wrapped, tenantA); return err },
		"Disable":  func(ctx context.Context) error { return f.KMS.Disable(ctx, root) },
		"Schedule": func(ctx context.Context) error { _, err := f.KMS.ScheduleDestruction(ctx, root); return err },
		"Cancel":   func(ctx context.Context) error { return f.KMS.Cancel(ctx, root) },
		"Describe": func(ctx context.Context) error { _, err := f.KMS.Describe(ctx, root); return err },
	}
	for name, call := range calls {
		// Each would hang for ever but for its context.
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		err := call(ctx)
		cancel()
		mustFail(t, name+" of a KMS that hangs", err, keys.ErrKMSUnavailable)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%s: %v does not wrap context.DeadlineExceeded", name, err)
		}
	}
	release()
	if err := f.KMS.Cancel(t.Context(), root); err != nil {
		t.Fatalf("Cancel after the hang: %v", err)
	}
	mustWork(t, f.KMS, root, wrapped, key, tenantA)
}

func testReopen(t *testing.T, f Fixture) {
	enabled, disabled, pending := create(t, f.KMS, 7), create(t, f.KMS, 8), create(t, f.KMS, 9)
	key := randomKey(32)
	wrapped := map[string][]byte{}
	for _, id := range []string{enabled, disabled, pending} {
		wrapped[id] = wrap(t, f.KMS, id, key, tenantA)
	}
	if err := f.KMS.Disable(t.Context(), disabled); err != nil {
		t.Fatal(err)
	}
	at := schedule(t, f.KMS, pending)

	k := f.Reopen(t)
	mustBe(t, k, enabled, keys.RootEnabled)
	mustWork(t, k, enabled, wrapped[enabled], key, tenantA)
	mustBe(t, k, disabled, keys.RootDisabled)
	mustNotWork(t, k, disabled, wrapped[disabled], tenantA)
	if d := mustBe(t, k, pending, keys.RootPending); !d.DestroyAt.Equal(at) {
		t.Fatalf("after reopening the date is %v instead of %v", d.DestroyAt, at)
	}
	mustNotWork(t, k, pending, wrapped[pending], tenantA)
	if again := schedule(t, k, pending); !again.Equal(at) {
		t.Fatal("repeated after reopening, ScheduleDestruction gave another date")
	}
	for _, id := range []string{disabled, pending} {
		if err := k.Cancel(t.Context(), id); err != nil {
			t.Fatalf("Cancel after reopening: %v", err)
		}
		mustWork(t, k, id, wrapped[id], key, tenantA)
	}
}

func testConcurrent(t *testing.T, f Fixture) {
	stays := create(t, f.KMS, 7)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, stays, key, tenantA)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 8 {
				ec := keys.EncryptionContext{Tenant: fmt.Sprint("tenant-", w), Epoch: uint32(i)}
				own := randomKey(32)
				got, err := f.KMS.Wrap(t.Context(), stays, own, ec)
				if err != nil {
					t.Errorf("Wrap: %v", err)
					return
				}
				got, err = f.KMS.Unwrap(t.Context(), stays, got, ec)
				if err != nil || !bytes.Equal(got, own) {
					t.Errorf("Unwrap: %v, or another key", err)
					return
				}
			}
		})
	}
	var mu sync.Mutex
	ids := map[string]bool{}
	for range 2 {
		wg.Go(func() {
			for i := range 4 {
				id, err := f.KMS.Create(t.Context(), uint32(i), Request())
				if err != nil {
					t.Errorf("Create: %v", err)
					return
				}
				mu.Lock()
				if ids[id] {
					t.Errorf("Create gave %s twice", id)
				}
				ids[id] = true
				mu.Unlock()
				if err := f.KMS.Disable(t.Context(), id); err != nil {
					t.Errorf("Disable: %v", err)
				}
				if _, err := f.KMS.ScheduleDestruction(t.Context(), id); err != nil {
					t.Errorf("ScheduleDestruction: %v", err)
				}
				if d, err := f.KMS.Describe(t.Context(), id); err != nil || d.State != keys.RootPending {
					t.Errorf("Describe = %+v, %v", d, err)
				}
			}
		})
	}
	// One root goes to and fro: a use succeeds or says that it cannot be used.
	swings := create(t, f.KMS, 8)
	swung := wrap(t, f.KMS, swings, key, tenantA)
	wg.Go(func() {
		for range 8 {
			if err := f.KMS.Disable(t.Context(), swings); err != nil {
				t.Errorf("Disable: %v", err)
			}
			if err := f.KMS.Cancel(t.Context(), swings); err != nil {
				t.Errorf("Cancel: %v", err)
			}
		}
	})
	wg.Go(func() {
		for range 32 {
			got, err := f.KMS.Unwrap(t.Context(), swings, swung, tenantA)
			if err == nil && !bytes.Equal(got, key) {
				t.Error("Unwrap returned another key")
			}
			if err != nil && !errors.Is(err, keys.ErrRootNotUsable) {
				t.Errorf("Unwrap: %v", err)
			}
		}
	})
	// All schedule one root: all get one date.
	dies := create(t, f.KMS, 9)
	dates := make([]time.Time, 4)
	for i := range dates {
		wg.Go(func() {
			var err error
			if dates[i], err = f.KMS.ScheduleDestruction(t.Context(), dies); err != nil {
				t.Errorf("ScheduleDestruction: %v", err)
			}
		})
	}
	wg.Wait()
	for _, at := range dates {
		if !at.Equal(dates[0]) {
			t.Errorf("concurrent ScheduleDestruction gave %v and %v", dates[0], at)
		}
	}
	mustWork(t, f.KMS, stays, wrapped, key, tenantA)
	mustBe(t, f.KMS, swings, keys.RootEnabled)
}

// pass moves the clock to just after the instant.
func (f Fixture) pass(at time.Time) { f.Advance(at.Sub(f.Now()) + 2*time.Second) }

func mustBeDestroyed(t *testing.T, k keys.KMS, root string, wrapped []byte, at time.Time) {
	t.Helper()
	for range 2 {
		mustBe(t, k, root, keys.RootDestroyed)
	}
	mustNotWork(t, k, root, wrapped, tenantA)
	mustFail(t, "Cancel of a destroyed root", k.Cancel(t.Context(), root), keys.ErrRootNotUsable)
	mustFail(t, "Disable of a destroyed root", k.Disable(t.Context(), root), keys.ErrRootNotUsable)
	if again := schedule(t, k, root); !again.Equal(at) {
		t.Fatalf("ScheduleDestruction of a destroyed root says %v instead of %v", again, at)
	}
	mustBe(t, k, root, keys.RootDestroyed)
}

func testDestroyed(t *testing.T, f Fixture) {
	root, other := create(t, f.KMS, 7), create(t, f.KMS, 8)
	key := randomKey(32)
	wrapped, elsewhere := wrap(t, f.KMS, root, key, tenantA), wrap(t, f.KMS, other, key, tenantA)
	at := schedule(t, f.KMS, root)

	f.Advance(at.Sub(f.Now()) - 5*time.Second)
	mustBe(t, f.KMS, root, keys.RootPending)
	mustNotWork(t, f.KMS, root, wrapped, tenantA)

	f.pass(at)
	mustBeDestroyed(t, f.KMS, root, wrapped, at)
	mustBe(t, f.KMS, other, keys.RootEnabled)
	mustWork(t, f.KMS, other, elsewhere, key, tenantA)

	k := f.Reopen(t)
	// A keyd uses its newest root before it asks after an old one.
	mustWork(t, k, other, elsewhere, key, tenantA)
	mustBeDestroyed(t, k, root, wrapped, at)
	if id := create(t, k, 7); id == root {
		t.Fatal("Create gave the id of a destroyed root again")
	}
}

func testDestroyedWhileClosed(t *testing.T, f Fixture) {
	root, other := create(t, f.KMS, 7), create(t, f.KMS, 8)
	key := randomKey(32)
	wrapped, elsewhere := wrap(t, f.KMS, root, key, tenantA), wrap(t, f.KMS, other, key, tenantA)
	at := schedule(t, f.KMS, root)
	f.pass(at)
	k := f.Reopen(t)
	mustWork(t, k, other, elsewhere, key, tenantA)
	mustBeDestroyed(t, k, root, wrapped, at)
}

func testUnavailableIsNotDestroyed(t *testing.T, f Fixture) {
	root, other := create(t, f.KMS, 7), create(t, f.KMS, 8)
	key := randomKey(32)
	wrapped, elsewhere := wrap(t, f.KMS, root, key, tenantA), wrap(t, f.KMS, other, key, tenantA)
	at := schedule(t, f.KMS, root)
	f.pass(at)
	repair := f.Break(t)
	for _, id := range []string{root, other} {
		everyCall(t, t.Context(), f.KMS, id, wrapped, func(what string, err error) {
			mustFail(t, what+" of a broken KMS", err, keys.ErrKMSUnavailable)
		})
	}
	repair()
	mustWork(t, f.KMS, other, elsewhere, key, tenantA)
	mustBeDestroyed(t, f.KMS, root, wrapped, at)
}

func testCancelledIsNotDestroyed(t *testing.T, f Fixture) {
	root := create(t, f.KMS, 7)
	key := randomKey(32)
	wrapped := wrap(t, f.KMS, root, key, tenantA)
	at := schedule(t, f.KMS, root)
	f.Advance(at.Sub(f.Now()) / 2)
	if err := f.KMS.Cancel(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	f.pass(at)
	mustBe(t, f.KMS, root, keys.RootEnabled)
	mustWork(t, f.KMS, root, wrapped, key, tenantA)
	// A second schedule counts from now.
	if again := schedule(t, f.KMS, root); !again.After(f.Now()) {
		t.Fatalf("scheduled again, the root is destroyed at %v, which is past", again)
	}
	mustBe(t, f.KMS, root, keys.RootPending)
}
