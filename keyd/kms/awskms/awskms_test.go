package awskms

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/awskms/awstest"
	"lethe/keyd/kms/kmstest"
)

func TestMain(m *testing.M) {
	// Nothing of the machine's own AWS configuration gets into the tests.
	for name, value := range map[string]string{
		"AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
		"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "", "AWS_DEFAULT_REGION": "", "AWS_PROFILE": "",
		"AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_KMS": "", "HTTP_PROXY": "", "http_proxy": "",
	} {
		os.Setenv(name, value)
	}
	os.Exit(m.Run())
}

const unknownRoot = "arn:aws:kms:" + awstest.Region + ":" + awstest.Account + ":key/00000000-0000-4000-8000-000000000000"

// start serves a double and returns options for it.
func start(t testing.TB) (*awstest.Server, Options) {
	t.Helper()
	double := awstest.New(time.Date(2031, 2, 3, 4, 5, 6, 789_000_000, time.UTC))
	server := httptest.NewServer(double)
	t.Cleanup(server.Close)
	return double, Options{
		Region: awstest.Region, Endpoint: server.URL,
		Credentials: credentials.NewStaticCredentialsProvider("AKIDEXAMPLE", "secret", ""),
		Attempts:    3, MaxBackoff: time.Millisecond, AttemptTimeout: 5 * time.Second,
		Evidence: evidenceFile(t, filepath.Join(t.TempDir(), "evidence")),
		Clock:    double.Now,
	}
}

func evidenceFile(t testing.TB, path string) *FileEvidence {
	t.Helper()
	e, err := OpenEvidence(path)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func mustNew(t testing.TB, o Options) *KMS {
	t.Helper()
	k, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func mustCreate(t testing.TB, k *KMS, epoch uint32) string {
	t.Helper()
	id, err := k.Create(t.Context(), epoch, kmstest.Request())
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return id
}

func mustSchedule(t testing.TB, k *KMS, root string) time.Time {
	t.Helper()
	at, err := k.ScheduleDestruction(t.Context(), root)
	if err != nil {
		t.Fatalf("ScheduleDestruction: %v", err)
	}
	return at
}

// always injects one fault into every call, or into those of the given names.
func always(f awstest.Fault, calls ...string) func(*awstest.Server) {
	return func(s *awstest.Server) {
		s.Inject = func(call string, _ int) awstest.Fault {
			for _, c := range calls {
				if c == call {
					return f
				}
			}
			if len(calls) == 0 {
				return f
			}
			return awstest.Fault{}
		}
	}
}

func healthy(s *awstest.Server) { s.Inject = nil }

func TestConformanceDouble(t *testing.T) {
	kmstest.Run(t, func(t *testing.T) kmstest.Fixture {
		double, o := start(t)
		inject := func(f awstest.Fault) func(*testing.T) func() {
			return func(*testing.T) func() {
				double.Set(always(f))
				return func() { double.Set(healthy) }
			}
		}
		return kmstest.Fixture{
			KMS: mustNew(t, o),
			Reopen: func(t *testing.T) keys.KMS {
				again := o
				again.Evidence = evidenceFile(t, o.Evidence.(*FileEvidence).path)
				return mustNew(t, again)
			},
			Break:       inject(awstest.Fault{Drop: true}),
			Hang:        inject(awstest.Fault{Hang: true}),
			UnknownRoot: unknownRoot,
			Now:         double.Now,
			Advance:     double.Advance,
		}
	})
}

// A deleted key and one that never was get the same answer from AWS. Only all
// of the evidence makes it a destruction.
func TestDestroyedNeedsEvidence(t *testing.T) {
	type world struct {
		double *awstest.Server
		o      Options
		k      *KMS
		root   string
		other  string
		at     time.Time
	}
	reopen := func(t *testing.T, w *world, e Evidence) {
		w.o.Evidence = e
		w.k = mustNew(t, w.o)
	}
	pass := func(w *world) { w.double.Advance(w.at.Sub(w.double.Now()) + time.Second) }
	tests := []struct {
		name string
		do   func(t *testing.T, w *world)
		want error // nil: destroyed
	}{
		{"all of it", func(t *testing.T, w *world) { pass(w) }, nil},
		{"all of it, after a restart with Options.Witness", func(t *testing.T, w *world) {
			w.o.Witness = w.other
			reopen(t, w, evidenceFile(t, w.o.Evidence.(*FileEvidence).path))
			pass(w)
		}, nil},
		{"all of it, the witness being disabled", func(t *testing.T, w *world) {
			pass(w)
			if err := w.k.Disable(t.Context(), w.other); err != nil {
				t.Fatal(err)
			}
		}, nil},
		{"never seen pending", func(t *testing.T, w *world) {
			pass(w)
			reopen(t, w, evidenceFile(t, filepath.Join(t.TempDir(), "empty")))
		}, keys.ErrRootUnknown},
		{"evidence kept in memory, and a restart", func(t *testing.T, w *world) {
			reopen(t, w, nil)
			if _, err := w.k.Describe(t.Context(), w.root); err != nil {
				t.Fatal(err)
			}
			pass(w)
			reopen(t, w, nil)
		}, keys.ErrRootUnknown},
		{"gone before its date", func(t *testing.T, w *world) { w.double.Remove(w.root) }, keys.ErrRootUnknown},
		{"only this host's clock is past the date", func(t *testing.T, w *world) {
			w.double.Remove(w.root)
			w.o.Clock = func() time.Time { return w.at.Add(time.Hour) }
			w.o.Witness = w.other
			reopen(t, w, w.o.Evidence)
		}, keys.ErrRootUnknown},
		{"only AWS's clock is past the date", func(t *testing.T, w *world) {
			pass(w)
			w.o.Clock = func() time.Time { return w.at.Add(-time.Hour) }
			w.o.Witness = w.other
			reopen(t, w, w.o.Evidence)
		}, keys.ErrRootUnknown},
		{"AWS's answers have no date", func(t *testing.T, w *world) {
			pass(w)
			w.double.Set(func(s *awstest.Server) { s.NoDate = true })
		}, keys.ErrKMSUnavailable},
		{"no witness", func(t *testing.T, w *world) {
			pass(w)
			reopen(t, w, w.o.Evidence)
		}, keys.ErrKMSUnavailable},
		{"the key is its own witness", func(t *testing.T, w *world) {
			pass(w)
			w.o.Witness = w.root
			reopen(t, w, w.o.Evidence)
		}, keys.ErrKMSUnavailable},
		{"the witness is of another account", func(t *testing.T, w *world) {
			pass(w)
			w.o.Witness = strings.Replace(w.other, awstest.Account, "999999999999", 1)
			reopen(t, w, w.o.Evidence)
			w.double.Calls()
			w.double.Set(func(s *awstest.Server) {
				s.Inject = func(_ string, n int) (f awstest.Fault) {
					if n == 2 { // it would answer, were it asked
						f.Body = `{"KeyMetadata":{"Arn":"` + w.o.Witness + `","KeyId":"x","KeyState":"Enabled","Origin":"AWS_KMS"}}`
					}
					return f
				}
			})
		}, keys.ErrKMSUnavailable},
		{"the witness is gone too, as with another account's credentials", func(t *testing.T, w *world) {
			pass(w)
			w.double.Remove(w.other)
		}, keys.ErrKMSUnavailable},
		{"access denied", func(t *testing.T, w *world) {
			pass(w)
			w.double.Set(always(awstest.Fault{Code: "AccessDeniedException", Status: 400}))
		}, keys.ErrKMSDenied},
		{"access denied to the witness", func(t *testing.T, w *world) {
			pass(w)
			w.double.Calls()
			w.double.Set(func(s *awstest.Server) {
				s.Inject = func(_ string, n int) (f awstest.Fault) {
					if n == 2 {
						f = awstest.Fault{Code: "AccessDeniedException", Status: 400}
					}
					return f
				}
			})
		}, keys.ErrKMSDenied},
		{"found when asked again", func(t *testing.T, w *world) {
			w.double.Set(func(s *awstest.Server) { s.Late = 24 * time.Hour })
			pass(w)
			w.double.Calls()
			w.double.Set(func(s *awstest.Server) {
				s.Inject = func(_ string, n int) (f awstest.Fault) {
					if n == 1 {
						f = awstest.Fault{Code: "NotFoundException", Status: 400}
					}
					return f
				}
			})
		}, keys.ErrKMSUnavailable},
		{"cancelled, then gone", func(t *testing.T, w *world) {
			if err := w.k.Cancel(t.Context(), w.root); err != nil {
				t.Fatal(err)
			}
			pass(w)
			w.double.Remove(w.root)
		}, keys.ErrRootUnknown},
		{"cancelled by somebody else, seen, then gone", func(t *testing.T, w *world) {
			w.double.Edit(w.root, func(state, _ *string, _ *bool) { *state = "Disabled" })
			if d, err := w.k.Describe(t.Context(), w.root); err != nil || d.State != keys.RootDisabled {
				t.Fatalf("Describe = %+v, %v", d, err)
			}
			pass(w)
			w.double.Remove(w.root)
		}, keys.ErrRootUnknown},
		{"the evidence cannot be read", func(t *testing.T, w *world) {
			pass(w)
			w.o.Evidence, w.o.Witness = broken{}, w.other
			reopen(t, w, w.o.Evidence)
		}, keys.ErrKMSUnavailable},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := &world{}
			w.double, w.o = start(t)
			w.k = mustNew(t, w.o)
			w.root, w.other = mustCreate(t, w.k, 1), mustCreate(t, w.k, 2)
			w.at = mustSchedule(t, w.k, w.root)
			test.do(t, w)
			d, err := w.k.Describe(t.Context(), w.root)
			if test.want == nil {
				if err != nil || d.State != keys.RootDestroyed || !d.DestroyAt.Equal(w.at) {
					t.Fatalf("Describe = %+v, %v", d, err)
				}
				return
			}
			if !errors.Is(err, test.want) || d.State != 0 {
				t.Fatalf("Describe = %+v, %v; want %v", d, err, test.want)
			}
		})
	}
}

type broken struct{}

var errBroken = errors.New("broken")

func (broken) Saw(context.Context, string, time.Time) error { return errBroken }
func (broken) Forget(context.Context, string) error         { return errBroken }
func (broken) Seen(context.Context, string) (time.Time, bool, error) {
	return time.Time{}, false, errBroken
}

// forgetful can be read and not written.
type forgetful struct{ broken }

func (forgetful) Seen(context.Context, string) (time.Time, bool, error) {
	return time.Time{}, false, nil
}

// A pending key that cannot be remembered is not called pending: its
// destruction could never be told. Evidence that cannot be read stops it before.
func TestEvidenceComesBeforeTheAnswer(t *testing.T) {
	for name, test := range map[string]struct {
		evidence Evidence
		state    string
	}{
		"unreadable": {broken{}, "Enabled"},
		"unwritable": {forgetful{}, "PendingDeletion"},
	} {
		double, o := start(t)
		root := mustCreate(t, mustNew(t, o), 1)
		good := o.Evidence
		o.Evidence = test.evidence
		k := mustNew(t, o)
		if at, err := k.ScheduleDestruction(t.Context(), root); !errors.Is(err, keys.ErrKMSUnavailable) || !at.IsZero() {
			t.Fatalf("%s: ScheduleDestruction = %v, %v", name, at, err)
		}
		if got := double.KeyState(root); got != test.state {
			t.Fatalf("%s: the key is %s", name, got)
		}
		o.Evidence = good
		mustSchedule(t, mustNew(t, o), root)
		if _, ok, _ := good.Seen(t.Context(), root); !ok {
			t.Fatalf("%s: not recorded when repeated", name)
		}
	}
}

// AWS may delete a key up to a day after its date; it is pending until then.
func TestDeletedLate(t *testing.T) {
	double, o := start(t)
	double.Late = 23 * time.Hour
	k := mustNew(t, o)
	root := mustCreate(t, k, 1)
	mustCreate(t, k, 2)
	scheduled := double.Now()
	at := mustSchedule(t, k, root)
	if want := scheduled.Add(7 * 24 * time.Hour); !at.Equal(want) {
		t.Fatalf("the date is %v; want %v", at, want)
	}
	double.Advance(at.Sub(double.Now()) + time.Hour)
	if d, err := k.Describe(t.Context(), root); err != nil || d.State != keys.RootPending {
		t.Fatalf("Describe = %+v, %v", d, err)
	}
	// Waiting is what a final_by can be promised by.
	double.Advance(scheduled.Add(k.Waiting()).Sub(double.Now()))
	if d, err := k.Describe(t.Context(), root); err != nil || d.State != keys.RootDestroyed {
		t.Fatalf("Describe = %+v, %v", d, err)
	}
}

func TestWaitingDays(t *testing.T) {
	_, o := start(t)
	o.WaitingDays = 30
	k := mustNew(t, o)
	root := mustCreate(t, k, 1)
	if at, want := mustSchedule(t, k, root), o.Clock().Add(30*24*time.Hour); !at.Equal(want) {
		t.Fatalf("the date is %v; want %v", at, want)
	}
	for _, days := range []int{-1, 1, 6, 31} {
		o.WaitingDays = days
		if _, err := New(t.Context(), o); err == nil {
			t.Errorf("%d days are accepted", days)
		}
	}
}

// operation is a method of the KMS as the fault tests run it.
type operation struct {
	name string
	// begin is the key's state before, and end after.
	begin, end string
	run        func(ctx context.Context, k *KMS, root string, wrapped []byte) error
}

var operations = []operation{
	{"Create", "Enabled", "Enabled", func(ctx context.Context, k *KMS, _ string, _ []byte) error {
		_, err := k.Create(ctx, 9, kmstest.Request())
		return err
	}},
	{"Wrap", "Enabled", "Enabled", func(ctx context.Context, k *KMS, root string, _ []byte) error {
		_, err := k.Wrap(ctx, root, []byte("0123456789abcdef"), keys.EncryptionContext{})
		return err
	}},
	{"Unwrap", "Enabled", "Enabled", func(ctx context.Context, k *KMS, root string, wrapped []byte) error {
		_, err := k.Unwrap(ctx, root, wrapped, keys.EncryptionContext{})
		return err
	}},
	{"Disable", "Enabled", "Disabled", func(ctx context.Context, k *KMS, root string, _ []byte) error {
		return k.Disable(ctx, root)
	}},
	{"ScheduleDestruction", "Enabled", "PendingDeletion", func(ctx context.Context, k *KMS, root string, _ []byte) error {
		_, err := k.ScheduleDestruction(ctx, root)
		return err
	}},
	{"ScheduleDestruction of a disabled key", "Disabled", "PendingDeletion", func(ctx context.Context, k *KMS, root string, _ []byte) error {
		_, err := k.ScheduleDestruction(ctx, root)
		return err
	}},
	{"Cancel", "PendingDeletion", "Enabled", func(ctx context.Context, k *KMS, root string, _ []byte) error {
		return k.Cancel(ctx, root)
	}},
	{"Describe", "PendingDeletion", "PendingDeletion", func(ctx context.Context, k *KMS, root string, _ []byte) error {
		_, err := k.Describe(ctx, root)
		return err
	}},
}

// Every call of every operation meets every fault. A passing one is retried
// away; a lasting one gives the right error; and when it is over the operation
// succeeds and the key is as it should be.
func TestFaultsAtEveryCall(t *testing.T) {
	faults := map[string]struct {
		fault awstest.Fault
		want  error
		// retried: the SDK tries again, so that once is no harm.
		retried bool
	}{
		"throttled":      {awstest.Fault{Code: "ThrottlingException", Status: 400}, keys.ErrKMSUnavailable, true},
		"internal":       {awstest.Fault{Code: "KMSInternalException", Status: 500}, keys.ErrKMSUnavailable, true},
		"500 of a proxy": {awstest.Fault{Code: "Oops", Status: 502}, keys.ErrKMSUnavailable, true},
		"dropped":        {awstest.Fault{Drop: true}, keys.ErrKMSUnavailable, true},
		"dropped, done":  {awstest.Fault{Drop: true, Done: true}, keys.ErrKMSUnavailable, true},
		"hangs, done":    {awstest.Fault{Hang: true, Done: true}, keys.ErrKMSUnavailable, true},
		"denied":         {awstest.Fault{Code: "AccessDeniedException", Status: 400}, keys.ErrKMSDenied, false},
		"bad signature":  {awstest.Fault{Code: "InvalidSignatureException", Status: 400}, keys.ErrKMSDenied, false},
		"not JSON":       {awstest.Fault{Body: "<html>"}, keys.ErrKMSUnavailable, false},
		"empty object":   {awstest.Fault{Body: "{}"}, keys.ErrKMSUnavailable, false},
	}
	for _, op := range operations {
		// Which calls it makes when all is well.
		double, o, root, wrapped := setUp(t, op)
		if err := op.run(t.Context(), mustNew(t, o), root, wrapped); err != nil {
			t.Fatalf("%s: %v", op.name, err)
		}
		calls := double.Calls()
		if got := double.KeyState(root); got != op.end {
			t.Fatalf("%s leaves the key %s; want %s", op.name, got, op.end)
		}
		for at, call := range calls {
			for name, f := range faults {
				if name == "empty object" && emptyAnswer[call] {
					continue // that is its answer
				}
				t.Run(fmt.Sprintf("%s/%d %s/%s", op.name, at+1, call, name), func(t *testing.T) {
					t.Parallel()
					testFault(t, op, at+1, f.fault, f.want, f.retried)
				})
			}
		}
	}
}

// emptyAnswer are the calls of whose answer nothing is read.
var emptyAnswer = map[string]bool{
	"CreateAlias": true, "DisableKey": true, "EnableKey": true,
	"ScheduleKeyDeletion": true, "CancelKeyDeletion": true,
}

func setUp(t *testing.T, op operation) (double *awstest.Server, o Options, root string, wrapped []byte) {
	t.Helper()
	double, o = start(t)
	o.Evidence = &memory{at: map[string]time.Time{}}
	k := mustNew(t, o)
	root = mustCreate(t, k, 1)
	wrapped, err := k.Wrap(t.Context(), root, []byte("0123456789abcdef"), keys.EncryptionContext{})
	if err != nil {
		t.Fatal(err)
	}
	switch op.begin {
	case "Disabled":
		err = k.Disable(t.Context(), root)
	case "PendingDeletion":
		mustSchedule(t, k, root)
	}
	if err != nil {
		t.Fatal(err)
	}
	double.Calls()
	return double, o, root, wrapped
}

func testFault(t *testing.T, op operation, at int, fault awstest.Fault, want error, retried bool) {
	for _, times := range []int{1, 1 << 30} {
		double, o, root, wrapped := setUp(t, op)
		hasty := o
		if fault.Hang {
			hasty.AttemptTimeout = 40 * time.Millisecond
		}
		double.Set(func(s *awstest.Server) {
			s.Inject = func(call string, n int) awstest.Fault {
				// From the call on, as often as told.
				if n >= at && n < at+times {
					return fault
				}
				return awstest.Fault{}
			}
		})
		err := op.run(t.Context(), mustNew(t, hasty), root, wrapped)
		switch {
		case times == 1 && retried:
			// A call that was done and whose answer was lost may need the
			// operation's own repetition; it must not be called refused.
			if err != nil && !(fault.Done && errors.Is(err, keys.ErrKMSUnavailable)) {
				t.Fatalf("once: %v", err)
			}
		case times == 1:
			// The operation may have found another way; it must not lie.
			if err == nil && op.name != "Create" && double.KeyState(root) != op.end {
				t.Fatalf("once: success, and the key is %s", double.KeyState(root))
			}
			if err != nil && !errors.Is(err, want) {
				t.Fatalf("once: %v; want %v", err, want)
			}
		case !errors.Is(err, want):
			t.Fatalf("lasting: %v; want %v", err, want)
		}
		if err != nil && strings.Contains(err.Error(), "0123456789abcdef") {
			t.Fatalf("the error quotes the key: %v", err)
		}
		double.Set(healthy)
		if err := op.run(t.Context(), mustNew(t, o), root, wrapped); err != nil {
			t.Fatalf("after the fault: %v", err)
		}
		if got := double.KeyState(root); got != op.end {
			t.Fatalf("after the fault the key is %s; want %s", got, op.end)
		}
	}
}

func TestErrorCodes(t *testing.T) {
	double, o := start(t)
	o.Attempts = 1
	k := mustNew(t, o)
	root := mustCreate(t, k, 1)
	all := []error{keys.ErrKMSUnavailable, keys.ErrKMSDenied, keys.ErrRootNotUsable, keys.ErrRootUnknown}
	for _, test := range []struct {
		code   string
		status int
		want   error
	}{
		{"ThrottlingException", 400, keys.ErrKMSUnavailable},
		{"TooManyRequestsException", 400, keys.ErrKMSUnavailable},
		{"RequestLimitExceeded", 400, keys.ErrKMSUnavailable},
		{"LimitExceededException", 400, keys.ErrKMSUnavailable},
		{"Whatever", 429, keys.ErrKMSUnavailable},
		{"KMSInternalException", 500, keys.ErrKMSUnavailable},
		{"DependencyTimeoutException", 400, keys.ErrKMSUnavailable},
		{"KeyUnavailableException", 400, keys.ErrKMSUnavailable},
		{"InternalFailure", 500, keys.ErrKMSUnavailable},
		{"Whatever", 503, keys.ErrKMSUnavailable},
		{"KMSInvalidStateException", 400, keys.ErrKMSUnavailable}, // for DescribeKey says that it is enabled
		{"NotFoundException", 400, keys.ErrKMSUnavailable},        // likewise
		{"DisabledException", 400, keys.ErrRootNotUsable},
		{"AccessDeniedException", 400, keys.ErrKMSDenied},
		{"InvalidCiphertextException", 400, keys.ErrKMSDenied},
		{"IncorrectKeyException", 400, keys.ErrKMSDenied},
		{"InvalidKeyUsageException", 400, keys.ErrKMSDenied},
		{"InvalidGrantTokenException", 400, keys.ErrKMSDenied},
		{"UnrecognizedClientException", 400, keys.ErrKMSDenied},
		{"ExpiredTokenException", 400, keys.ErrKMSDenied},
		{"ValidationException", 400, keys.ErrKMSDenied},
		{"SomethingNewException", 400, keys.ErrKMSDenied},
	} {
		double.Set(always(awstest.Fault{Code: test.code, Status: test.status}, "Encrypt"))
		_, err := k.Wrap(t.Context(), root, []byte("0123456789abcdef"), keys.EncryptionContext{})
		for _, sentinel := range all {
			if errors.Is(err, sentinel) != (sentinel == test.want) {
				t.Errorf("%s with %d: %v; want %v", test.code, test.status, err, test.want)
			}
		}
		if err == nil || strings.Contains(err.Error(), "0123456789abcdef") {
			t.Errorf("%s: the error quotes the key, as AWS did: %v", test.code, err)
		}
	}
}

func TestThrottlingIsRetriedAndBounded(t *testing.T) {
	double, o := start(t)
	o.Attempts = 5
	k := mustNew(t, o)
	root := mustCreate(t, k, 1)
	wrap := func(k *KMS) error {
		_, err := k.Wrap(t.Context(), root, make([]byte, 32), keys.EncryptionContext{})
		return err
	}
	throttled := awstest.Fault{Code: "ThrottlingException", Status: 400}
	first := func(times int) func(*awstest.Server) {
		return func(s *awstest.Server) {
			s.Inject = func(_ string, n int) (f awstest.Fault) {
				if n <= times {
					f = throttled
				}
				return f
			}
		}
	}
	double.Calls()
	double.Set(first(4))
	if err := wrap(k); err != nil {
		t.Fatalf("throttled four times of five: %v", err)
	}
	if n := len(double.Calls()); n != 5 {
		t.Fatalf("%d calls; want 5", n)
	}
	double.Set(always(throttled))
	if err := wrap(k); !errors.Is(err, keys.ErrKMSUnavailable) {
		t.Fatalf("throttled for ever: %v", err)
	}
	if n := len(double.Calls()); n != 5 {
		t.Fatalf("%d calls; want 5", n)
	}
	o.Adaptive = true
	double.Set(first(1))
	if err := wrap(mustNew(t, o)); err != nil {
		t.Fatalf("adaptive, throttled once: %v", err)
	}
	if n := len(double.Calls()); n != 2 {
		t.Fatalf("adaptive: %d calls; want 2", n)
	}
}

// A use that is denied because of the key's state, as emulators do, is told as
// that; one that is denied for want of permission stays denied.
func TestDeniedUse(t *testing.T) {
	double, o := start(t)
	k := mustNew(t, o)
	root := mustCreate(t, k, 1)
	wrapped, err := k.Wrap(t.Context(), root, make([]byte, 32), keys.EncryptionContext{})
	if err != nil {
		t.Fatal(err)
	}
	denied := awstest.Fault{Code: "AccessDeniedException", Status: 400}
	check := func(what string, want error) {
		t.Helper()
		_, err := k.Wrap(t.Context(), root, make([]byte, 32), keys.EncryptionContext{})
		_, err2 := k.Unwrap(t.Context(), root, wrapped, keys.EncryptionContext{})
		if !errors.Is(err, want) || !errors.Is(err2, want) {
			t.Errorf("%s: Wrap: %v; Unwrap: %v; want %v", what, err, err2, want)
		}
	}
	double.Set(always(denied, "Encrypt", "Decrypt"))
	check("enabled", keys.ErrKMSDenied)
	mustSchedule(t, k, root)
	check("pending", keys.ErrRootNotUsable)
	double.Set(always(denied))
	check("pending, and DescribeKey is denied too", keys.ErrKMSDenied)
}

func TestCreateLabelsTheKey(t *testing.T) {
	double, o := start(t)
	o.Deployment, o.Tags = "prod-eu", map[string]string{"team": "privacy"}
	request := kmstest.Request()
	root, err := mustNew(t, o).Create(t.Context(), 41, request)
	if err != nil {
		t.Fatal(err)
	}
	tags := double.Tags(root)
	if len(tags) != 3 || tags["lethe:deployment"] != "prod-eu" || tags["lethe:epoch"] != "41" || tags["team"] != "privacy" {
		t.Errorf("tags %v", tags)
	}
	if got := double.Aliases(root); len(got) != 1 || got[0] != fmt.Sprintf("alias/lethe/prod-eu/epoch-41-%x", request) {
		t.Errorf("aliases %v", got)
	}
}

// A key that Create made and could not finish is not left enabled.
func TestCreateAbandonsWhatItCannotFinish(t *testing.T) {
	double, o := start(t)
	double.Set(always(awstest.Fault{Code: "AccessDeniedException", Status: 400}, "CreateAlias"))
	if id, err := mustNew(t, o).Create(t.Context(), 1, kmstest.Request()); !errors.Is(err, keys.ErrKMSDenied) || id != "" {
		t.Fatalf("Create = %q, %v", id, err)
	}
	for _, arn := range double.Keys() {
		if got := double.KeyState(arn); got != "PendingDeletion" {
			t.Errorf("the key is left %s", got)
		}
	}
	if len(double.Keys()) != 1 {
		t.Errorf("%d keys; want 1", len(double.Keys()))
	}
}

// Of keys that were made for one request at once, one remains.
func TestCreateAtOnceLeavesOneKey(t *testing.T) {
	double, o := start(t)
	request := kmstest.Request()
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if _, err := mustNew(t, o).Create(t.Context(), 1, request); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	enabled := 0
	for _, arn := range double.Keys() {
		switch got := double.KeyState(arn); {
		case got == "Enabled" && len(double.Aliases(arn)) == 1:
			enabled++
		case got != "PendingDeletion" || len(double.Aliases(arn)) != 0:
			t.Errorf("a key is left %s, with %d aliases", got, len(double.Aliases(arn)))
		}
	}
	if enabled != 1 {
		t.Errorf("%d roots; want 1", enabled)
	}
}

// AWS does not know a new key everywhere at once.
func TestCreateWaitsForTheKeyToBeKnown(t *testing.T) {
	double, o := start(t)
	double.Set(func(s *awstest.Server) {
		s.Inject = func(call string, n int) (f awstest.Fault) {
			if call != "CreateKey" && n < 5 {
				f = awstest.Fault{Code: "NotFoundException", Status: 400}
			}
			return f
		}
	})
	k := mustNew(t, o)
	root := mustCreate(t, k, 1)
	if d, err := k.Describe(t.Context(), root); err != nil || d.State != keys.RootEnabled {
		t.Fatalf("Describe = %+v, %v", d, err)
	}
	double.Set(always(awstest.Fault{Code: "NotFoundException", Status: 400}, "DescribeKey"))
	if _, err := k.Create(t.Context(), 2, kmstest.Request()); !errors.Is(err, keys.ErrKMSUnavailable) || errors.Is(err, keys.ErrRootUnknown) {
		t.Fatalf("never known: %v", err)
	}
}

func TestRefusedKeys(t *testing.T) {
	double, o := start(t)
	k := mustNew(t, o)
	for name, test := range map[string]struct {
		edit func(state, origin *string, multiRegion *bool)
		want error
	}{
		"multi-Region":          {func(_, _ *string, m *bool) { *m = true }, ErrMultiRegion},
		"replicas left":         {func(s, _ *string, _ *bool) { *s = "PendingReplicaDeletion" }, ErrMultiRegion},
		"imported material":     {func(_, o *string, _ *bool) { *o = "EXTERNAL" }, ErrOrigin},
		"external key store":    {func(_, o *string, _ *bool) { *o = "EXTERNAL_KEY_STORE" }, ErrOrigin},
		"CloudHSM":              {func(_, o *string, _ *bool) { *o = "AWS_CLOUDHSM" }, ErrOrigin},
		"no origin":             {func(_, o *string, _ *bool) { *o = "" }, ErrOrigin},
		"being made":            {func(s, _ *string, _ *bool) { *s = "Creating" }, keys.ErrKMSUnavailable},
		"being updated":         {func(s, _ *string, _ *bool) { *s = "Updating" }, keys.ErrKMSUnavailable},
		"cut off":               {func(s, _ *string, _ *bool) { *s = "Unavailable" }, keys.ErrKMSUnavailable},
		"a state of the future": {func(s, _ *string, _ *bool) { *s = "Resting" }, keys.ErrKMSUnavailable},
		"pending without date":  {func(s, _ *string, _ *bool) { *s = "PendingDeletion" }, keys.ErrKMSUnavailable},
	} {
		root := mustCreate(t, k, 1)
		double.Edit(root, test.edit)
		if d, err := k.Describe(t.Context(), root); !errors.Is(err, test.want) || d.State != 0 {
			t.Errorf("%s: Describe = %+v, %v", name, d, err)
		}
		double.Calls()
		if _, err := k.ScheduleDestruction(t.Context(), root); !errors.Is(err, test.want) {
			t.Errorf("%s: ScheduleDestruction: %v", name, err)
		}
		for _, call := range double.Calls() {
			if call != "DescribeKey" {
				t.Errorf("%s: %s was called", name, call)
			}
		}
	}
	double.Calls()
	for id, want := range map[string]error{
		"arn:aws:kms:eu-west-1:111122223333:key/mrk-1234abcd12ab34cd56ef1234567890ab": ErrMultiRegion,
		"arn:aws:kms:us-east-1:111122223333:key/00000000-0000-4000-8000-000000000000": keys.ErrRootUnknown,
		"arn:aws:kms:eu-west-1:111122223333:alias/lethe/default/epoch-1":              keys.ErrRootUnknown,
		"00000000-0000-4000-8000-000000000000":                                        keys.ErrRootUnknown,
		"local-1-00000000000000000000000000000000":                                    keys.ErrRootUnknown,
		"": keys.ErrRootUnknown,
	} {
		_, err := k.Describe(t.Context(), id)
		_, err2 := k.Wrap(t.Context(), id, make([]byte, 32), keys.EncryptionContext{})
		_, err3 := k.Unwrap(t.Context(), id, make([]byte, 80), keys.EncryptionContext{})
		_, err4 := k.ScheduleDestruction(t.Context(), id)
		for _, err := range []error{err, err2, err3, err4, k.Disable(t.Context(), id), k.Cancel(t.Context(), id)} {
			if !errors.Is(err, want) {
				t.Errorf("%q: %v; want %v", id, err, want)
			}
		}
	}
	if calls := double.Calls(); len(calls) != 0 {
		t.Errorf("calls about keys that cannot be: %v", calls)
	}
}

// An answer about another key than the one asked for is no answer.
func TestAnswerAboutAnotherKey(t *testing.T) {
	double, o := start(t)
	k := mustNew(t, o)
	root, other := mustCreate(t, k, 1), mustCreate(t, k, 2)
	bodies := map[string]string{
		"DescribeKey": `{"KeyMetadata":{"Arn":"` + other + `","KeyId":"x","KeyState":"PendingDeletion","Origin":"AWS_KMS","DeletionDate":1}}`,
		"Encrypt":     `{"KeyId":"` + other + `","CiphertextBlob":"AAAA"}`,
		"Decrypt":     `{"KeyId":"` + other + `","Plaintext":"AAAA"}`,
	}
	double.Set(func(s *awstest.Server) {
		s.Inject = func(call string, _ int) awstest.Fault { return awstest.Fault{Body: bodies[call]} }
	})
	_, err1 := k.Describe(t.Context(), root)
	_, err2 := k.Wrap(t.Context(), root, make([]byte, 32), keys.EncryptionContext{})
	_, err3 := k.Unwrap(t.Context(), root, make([]byte, 80), keys.EncryptionContext{})
	for i, err := range []error{err1, err2, err3} {
		if !errors.Is(err, keys.ErrKMSUnavailable) {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// A redirect would take a key to another host.
func TestRedirectIsNotFollowed(t *testing.T) {
	for _, status := range []int{http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
		var reached atomic.Bool
		thief := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Store(true) }))
		defer thief.Close()
		server := httptest.NewServer(http.RedirectHandler(thief.URL, status))
		defer server.Close()
		_, o := start(t)
		o.Endpoint = server.URL
		_, err := mustNew(t, o).Wrap(t.Context(), unknownRoot, make([]byte, 32), keys.EncryptionContext{})
		if !errors.Is(err, keys.ErrKMSUnavailable) || reached.Load() {
			t.Errorf("%d: Wrap: %v; the other host was reached: %v", status, err, reached.Load())
		}
	}
}

func TestOptions(t *testing.T) {
	_, good := start(t)
	for name, edit := range map[string]func(*Options){
		"no region":              func(o *Options) { o.Region = "" },
		"plain http elsewhere":   func(o *Options) { o.Endpoint = "http://kms.example:8080" },
		"plain http in disguise": func(o *Options) { o.Endpoint = "http://127.0.0.1.example" },
		"not a URL":              func(o *Options) { o.Endpoint = "kms" },
		"another scheme":         func(o *Options) { o.Endpoint = "ftp://127.0.0.1" },
		"deployment with slash":  func(o *Options) { o.Deployment = "a/b" },
		"negative attempts":      func(o *Options) { o.Attempts = -1 },
		"no such profile":        func(o *Options) { o.Profile = "nobody" },
		"witness of a region":    func(o *Options) { o.Witness = strings.Replace(unknownRoot, "eu-west-1", "eu-west-2", 1) },
	} {
		o := good
		edit(&o)
		if _, err := New(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, endpoint := range []string{"", "https://kms.example", "http://localhost:1", "http://[::1]:1", "http://127.9.9.9:1"} {
		o := good
		o.Endpoint = endpoint
		if _, err := New(t.Context(), o); err != nil {
			t.Errorf("endpoint %q: %v", endpoint, err)
		}
	}
	t.Run("an endpoint of the environment is checked too", func(t *testing.T) {
		t.Setenv("AWS_ENDPOINT_URL_KMS", "http://kms.example")
		o := good
		o.Endpoint = ""
		if _, err := New(t.Context(), o); err == nil {
			t.Error("accepted")
		}
	})
	t.Run("the chain", func(t *testing.T) {
		t.Setenv("AWS_REGION", awstest.Region)
		t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
		t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
		t.Setenv("AWS_ENDPOINT_URL_KMS", good.Endpoint)
		k := mustNew(t, Options{Clock: good.Clock})
		if k.Kind() != "awskms" || k.FinalBasis() != "aws-kms" || k.Waiting() != 8*24*time.Hour {
			t.Errorf("%s, %s, %v", k.Kind(), k.FinalBasis(), k.Waiting())
		}
		mustCreate(t, k, 1)
	})
	t.Run("no credentials", func(t *testing.T) {
		o := good
		o.Credentials = nil
		_, err := mustNew(t, o).Describe(t.Context(), unknownRoot)
		if !errors.Is(err, keys.ErrKMSUnavailable) {
			t.Errorf("Describe: %v", err)
		}
	})
}

func TestEncryptionContext(t *testing.T) {
	seen := map[string]keys.EncryptionContext{}
	for _, ec := range []keys.EncryptionContext{
		{}, {Epoch: 1}, {Tenant: "system"}, {Tenant: "tenant"}, {Tenant: "a", Epoch: 11}, {Tenant: "a1", Epoch: 1},
	} {
		m := encryptionContext(ec)
		for name, value := range m {
			if name == "" || value == "" {
				t.Errorf("%+v: %q = %q", ec, name, value)
			}
		}
		text := fmt.Sprint(m)
		if other, ok := seen[text]; ok {
			t.Errorf("%+v and %+v are both %s", ec, other, text)
		}
		seen[text] = ec
	}
}

func TestEvidenceFile(t *testing.T) {
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "evidence")
	e := evidenceFile(t, path)
	other := strings.Replace(unknownRoot, "key/0", "key/1", 1)
	at := time.Date(2031, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
	for _, err := range []error{
		e.Saw(ctx, unknownRoot, at.Add(-time.Hour)), e.Saw(ctx, unknownRoot, at),
		e.Saw(ctx, other, at), e.Forget(ctx, other), e.Forget(ctx, other),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range []*FileEvidence{e, evidenceFile(t, path)} {
		if got, ok, err := e.Seen(ctx, unknownRoot); err != nil || !ok || !got.Equal(at) {
			t.Errorf("Seen = %v, %v, %v", got, ok, err)
		}
		if _, ok, err := e.Seen(ctx, other); err != nil || ok {
			t.Errorf("forgotten: %v, %v", ok, err)
		}
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range good {
		if err := os.WriteFile(path, good[:i], 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenEvidence(path); !errors.Is(err, ErrEvidenceDamaged) {
			t.Fatalf("cut to %d bytes: %v", i, err)
		}
	}
	for name, bad := range map[string][]byte{
		"a byte more": append(bytes.Clone(good), '\n'),
		"twice":       append(bytes.Clone(good), good...),
		"another":     []byte("hello\n"),
	} {
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenEvidence(path); !errors.Is(err, ErrEvidenceDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := OpenEvidence(t.TempDir()); !errors.Is(err, ErrEvidenceDamaged) {
		t.Errorf("a directory: %v", err)
	}
	// A write that fails changes nothing.
	e = evidenceFile(t, filepath.Join(t.TempDir(), "none", "evidence"))
	if err := e.Saw(ctx, unknownRoot, at); err == nil {
		t.Error("Saw succeeded without a directory")
	}
	if _, ok, _ := e.Seen(ctx, unknownRoot); ok {
		t.Error("what could not be written is remembered")
	}
}

// Whoever does not use AWS does not compile its SDK.
func TestOtherKMSPackagesDoNotImportTheSDK(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "lethe/keyd/internal/keys", "lethe/keyd/kms/local", "lethe/keyd/kms/kmstest").Output()
	if err != nil {
		t.Fatal(err)
	}
	if len(out) == 0 || strings.Contains(string(out), "github.com/aws/") {
		t.Errorf("the packages need %s", out)
	}
}
