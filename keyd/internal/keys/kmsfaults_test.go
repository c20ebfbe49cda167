package keys_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/awskms"
	"lethe/keyd/kms/awskms/awstest"
	keydv1 "lethe/proto/keyd/v1"
)

// ailment is what a call of a KMS meets.
type ailment struct {
	err  error // it fails with this
	hang bool  // it is not answered while the ailment lasts
	done bool  // what was asked for is done all the same
}

// refusals is a KMS whose calls meet what is set for them.
type refusals struct {
	keys.KMS
	mu   sync.Mutex
	ails map[string]ailment // by operation
	end  chan struct{}      // closed when they are over
	seen map[string]int
	hung func() // called when a call hangs
}

func newRefusals(kms keys.KMS) *refusals {
	return &refusals{KMS: kms, ails: make(map[string]ailment), end: make(chan struct{}), seen: make(map[string]int), hung: func() {}}
}

func (f *refusals) set(op string, err error) { f.afflict(op, ailment{err: err}) }

func (f *refusals) afflict(op string, a ailment) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ails[op] = a
}

func (f *refusals) onHang(hung func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hung = hung
}

func (f *refusals) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.ails)
	close(f.end)
	f.end = make(chan struct{})
}

func (f *refusals) count(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen[op]
}

func (f *refusals) call(ctx context.Context, op string, fn func() error) error {
	f.mu.Lock()
	f.seen[op]++
	a, end, hung := f.ails[op], f.end, f.hung
	f.mu.Unlock()
	if a.done || a == (ailment{}) {
		if err := fn(); err != nil || !a.done {
			return err
		}
	}
	if !a.hang {
		return a.err
	}
	hung()
	select {
	case <-ctx.Done():
	case <-end:
	}
	return fmt.Errorf("%w: it does not answer", keys.ErrKMSUnavailable)
}

// answer is call for what has an answer.
func answer[T any](ctx context.Context, f *refusals, op string, fn func() (T, error)) (T, error) {
	var out, zero T
	err := f.call(ctx, op, func() (err error) { out, err = fn(); return err })
	if err != nil {
		return zero, err
	}
	return out, nil
}

func (f *refusals) Wrap(ctx context.Context, root string, key []byte, ec keys.EncryptionContext) ([]byte, error) {
	return answer(ctx, f, "wrap", func() ([]byte, error) { return f.KMS.Wrap(ctx, root, key, ec) })
}

func (f *refusals) Unwrap(ctx context.Context, root string, b []byte, ec keys.EncryptionContext) ([]byte, error) {
	return answer(ctx, f, "unwrap", func() ([]byte, error) { return f.KMS.Unwrap(ctx, root, b, ec) })
}

func (f *refusals) Create(ctx context.Context, epoch uint32, request keys.RootRequest) (string, error) {
	return answer(ctx, f, "create", func() (string, error) { return f.KMS.Create(ctx, epoch, request) })
}

func (f *refusals) Disable(ctx context.Context, root string) error {
	return f.call(ctx, "disable", func() error { return f.KMS.Disable(ctx, root) })
}

func (f *refusals) ScheduleDestruction(ctx context.Context, root string) (time.Time, error) {
	return answer(ctx, f, "schedule", func() (time.Time, error) { return f.KMS.ScheduleDestruction(ctx, root) })
}

func (f *refusals) Cancel(ctx context.Context, root string) error {
	return f.call(ctx, "cancel", func() error { return f.KMS.Cancel(ctx, root) })
}

func (f *refusals) Describe(ctx context.Context, root string) (keys.Root, error) {
	return answer(ctx, f, "describe", func() (keys.Root, error) { return f.KMS.Describe(ctx, root) })
}

// ailments are those of a KMS whose calls return what is set for them.
var ailments = map[string]ailment{
	"unavailable": {err: keys.ErrKMSUnavailable}, "denied": {err: keys.ErrKMSDenied},
	"not usable": {err: keys.ErrRootNotUsable}, "unknown": {err: keys.ErrRootUnknown},
	"hangs": {hang: true}, "hangs, done": {hang: true, done: true},
	"answer lost": {err: keys.ErrKMSUnavailable, done: true},
}

// stages are where in a turn of epoch 1 the KMS falls ill, and the calls that
// the turn then needs: the same for every KMS, under its own names of them.
var stages = []struct {
	name string
	come func(r *rig)
	ops  []string
	// holds is an epoch and the state that it does not leave without the call.
	epoch uint32
	holds keydv1.EpochState
}{
	{"open", func(*rig) {}, []string{"create"}, 1, open},
	{"preparing", func(r *rig) { r.stepTo(2, preparing) }, []string{"wrap", "unwrap"}, 2, preparing},
	{"draining", func(r *rig) { r.stepTo(1, draining) }, []string{"unwrap"}, 1, draining},
	{"drained", func(r *rig) { r.stepTo(1, drained) }, []string{"disable"}, 1, drained},
	{"disabled", func(r *rig) { r.work(); r.clock.Advance(3 * time.Hour) }, []string{"schedule", "describe", "unwrap"}, 1, drained},
	{"retiring", func(r *rig) { r.work(); r.clock.Advance(3 * time.Hour); r.stepTo(1, retiring) }, []string{"describe", "cancel"}, 1, retiring},
}

// illness is one of a KMS, at one call, for a while.
type illness struct {
	begin func(hung func()) // hung is called by a call that hangs
	end   func()
	hangs bool
	// waiting is the waiting period of the KMS.
	waiting time.Duration
	// holds: no call comes through, and the epoch stays where it is.
	holds bool
	// destroyed says whether a root is, as somebody knows who sees into the KMS.
	destroyed func(root string) bool
}

// turnThrough turns epoch 1 of a fresh rig while its KMS is ill from a stage on.
// Meanwhile everybody is served, health says what is wrong, and no answer that
// did not come is taken for one; afterwards the turn ends by itself.
func turnThrough(t *testing.T, r *rig, stage int, op string, sick illness) {
	s := stages[stage]
	p := r.populate(3)
	p.destroy("person-0")
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	s.come(r)
	p.check()                               // so that all KEKs are held again
	leap := min(sick.waiting, 23*time.Hour) // no farther than a clock is believed
	pace, rounds := time.Minute, 3
	if op == "describe" && s.holds == retiring {
		pace, rounds = leap, int(sick.waiting/leap)+2 // beyond the date of the root's destruction
	}
	// impatient is for a caller that gives up after a while. Where a root is made
	// he does so once a call hangs, lest one be made that he does not hear of.
	var giveUp atomic.Pointer[context.CancelFunc]
	impatient := func() (context.Context, context.CancelFunc) {
		if !sick.hangs {
			return context.WithCancel(t.Context())
		}
		if op != "create" {
			return context.WithTimeout(t.Context(), 100*time.Millisecond)
		}
		ctx, cancel := context.WithCancel(t.Context())
		giveUp.Store(&cancel)
		return ctx, cancel
	}
	step := func() (bool, error) {
		ctx, cancel := impatient()
		defer cancel()
		return r.StepDuties(ctx)
	}
	root := r.epoch(1).RootId
	truth := func(when string) {
		t.Helper()
		if e := r.epoch(1); e.State == closed && !sick.destroyed(root) {
			t.Fatalf("%s: the epoch is closed, and its root is not destroyed", when)
		}
		_, v := r.getReceipt("destroy-person-0")
		if !v.Stages().Final.IsZero() && !sick.destroyed(root) {
			t.Fatalf("%s: the receipt is final, and the root is not destroyed", when)
		}
	}

	sick.begin(func() {
		if cancel := giveUp.Load(); cancel != nil {
			(*cancel)()
		}
	})
	said := false
	for i := range rounds {
		for range 10 {
			if again, err := step(); err != nil || !again {
				break
			}
		}
		if op == "cancel" {
			ctx, cancel := impatient()
			if err := r.CancelRetirement(ctx, 1); err != nil {
				said = true
			} else if sick.holds {
				t.Error("a root is said to be kept, and the KMS was not told")
			}
			cancel()
		}
		for _, c := range r.Status(t.Context()).Components {
			said = said || !c.Healthy && (c.Name == "epochs" || c.Name == "kms")
		}
		truth("while the KMS is ill")
		if got := r.epoch(s.epoch).State; got != s.holds && sick.holds {
			t.Fatalf("the epoch has gone from %v to %v", s.holds, got)
		}
		late := fmt.Sprintf("late-%d", i)
		p.keys[late] = r.seal(late, "trace")
		if i == 1 {
			p.destroy("person-1")
		}
		p.check()
		r.clock.Advance(pace)
		if err := r.Beat(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if !said && sick.holds {
		t.Error("nobody is told")
	}

	sick.end()
	resumed := op != "cancel"
	for n := 0; r.epoch(1).State != closed; n++ {
		if n > 200 {
			t.Fatalf("the turn does not end: epoch 1 is %v and waits for %q", r.epoch(1).State, r.epoch(1).WaitingFor)
		}
		if _, err := r.StepDuties(t.Context()); err == nil && r.epoch(1).Kept && !resumed {
			// The KMS is told by itself what it was not told then.
			r.clock.Advance(2 * time.Minute)
			r.work()
			if d, err := r.kms.Describe(t.Context(), root); err != nil || d.State != keys.RootEnabled {
				t.Fatalf("the root that is kept is %v, %v", d.State, err)
			}
			if err := r.ResumeRetirement(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			resumed = true
		}
		truth("afterwards")
		r.clock.Advance(leap)
		_ = r.Beat(t.Context())
	}
	p.check()
	r.reopen2()
	p.check()
	if _, v := r.getReceipt("destroy-person-0"); v.Stages().Sanitised.IsZero() || v.Stages().Final.IsZero() {
		t.Errorf("stages %+v", v.Stages())
	}
	if got := strings.Join(r.kinds(0), ", "); strings.Count(got, "epoch-opened 2") != 1 || strings.Count(got, "epoch-closed 1") != 1 {
		t.Errorf("the ledger says %s", got)
	}
}

// Whatever the KMS does not do, at whatever call and state of a turn, is
// evidence of nothing: keyd serves, says so, and the turn goes on by itself when
// the KMS is well.
func TestTurnsThroughFaultsOfTheKMS(t *testing.T) {
	for stage, s := range stages {
		for _, op := range s.ops {
			for name, a := range ailments {
				t.Run(fmt.Sprintf("%s/%s %s", s.name, op, name), func(t *testing.T) {
					t.Parallel()
					r, _, kms := newMemoryRig(t)
					made := make(map[string]bool)
					f := newRefusals(rootLog{kms.KMS, func(id string) { made[id] = true }})
					kms.KMS = f
					turnThrough(t, r, stage, op, illness{
						begin: func(hung func()) { f.onHang(hung); f.afflict(op, a) }, end: f.clear, hangs: a.hang, waiting: f.Waiting(),
						holds: op != "cancel" || !a.done, // that the root is kept is seen in it
						destroyed: func(root string) bool {
							d, err := f.KMS.Describe(t.Context(), root)
							return err == nil && d.State == keys.RootDestroyed
						},
					})
					if len(made) != 1 || !made[r.epoch(2).RootId] {
						t.Errorf("roots %v were made; epoch 2 has %s", made, r.epoch(2).RootId)
					}
				})
			}
		}
	}
}

// The same over the protocol of AWS. Where an answer was lost the adapter asks
// how things are, and the turn need not wait.
func TestTurnsThroughFaultsOfAWSKMS(t *testing.T) {
	calls := map[string][]string{
		"create": {"CreateKey", "CreateAlias"}, "wrap": {"Encrypt"}, "unwrap": {"Decrypt"}, "disable": {"DisableKey"},
		"schedule": {"ScheduleKeyDeletion"}, "describe": {"DescribeKey"}, "cancel": {"CancelKeyDeletion", "EnableKey"},
	}
	faults := map[string]awstest.Fault{
		"500": {Code: "KMSInternalException", Status: 500}, "denied": {Code: "AccessDeniedException", Status: 400},
		"hangs": {Hang: true}, "answer lost": {Drop: true, Done: true},
	}
	for stage, s := range stages {
		for _, op := range s.ops {
			for _, call := range calls[op] {
				for name, fault := range faults {
					t.Run(fmt.Sprintf("%s/%s %s", s.name, call, name), func(t *testing.T) {
						t.Parallel()
						r, double := newAWSRig(t)
						turnThrough(t, r, stage, op, illness{
							begin: func(hung func()) {
								double.Set(func(d *awstest.Server) {
									d.Inject = func(c string, _ int) awstest.Fault {
										if c == call {
											if fault.Hang {
												hung()
											}
											return fault
										}
										return awstest.Fault{}
									}
								})
							},
							end:       func() { double.Set(func(d *awstest.Server) { d.Inject = nil }) },
							waiting:   r.kms.Waiting(),
							hangs:     fault.Hang,
							holds:     !fault.Done && call != "EnableKey", // the deletion is cancelled by then
							destroyed: func(root string) bool { return double.KeyState(root) == "" },
						})
						roots := make(map[string]bool)
						all, _, err := r.Epochs(t.Context())
						if err != nil {
							t.Fatal(err)
						}
						for _, e := range all {
							roots[e.RootId] = true
						}
						for _, arn := range double.Keys() {
							// One whose making was not told can only be found by its tags.
							told := call != "CreateKey" || !fault.Done
							if told && !roots[arn] && double.KeyState(arn) != "PendingDeletion" {
								t.Errorf("a key is left over: %s, %s", double.KeyState(arn), double.Aliases(arn))
							}
						}
					})
				}
			}
		}
	}
}

// newAWSRig is a rig over the double of AWS KMS, whose clock is the rig's.
func newAWSRig(t *testing.T) (*rig, *awstest.Server) {
	t.Helper()
	r := &rig{
		t: t, dir: t.TempDir(), anchor: anchortest.NewMemory(), store: newMemory(),
		clock: &clock{now: time.Date(2026, 3, 1, 12, 30, 0, 123456, time.UTC)},
	}
	double := awstest.New(r.clock.Now())
	r.clock.also = double.Advance
	server := httptest.NewServer(double)
	t.Cleanup(server.Close)
	evidence, err := awskms.OpenEvidence(filepath.Join(r.dir, "evidence"))
	if err != nil {
		t.Fatal(err)
	}
	r.kms, err = awskms.New(t.Context(), awskms.Options{
		Region: awstest.Region, Endpoint: server.URL, Credentials: credentials.NewStaticCredentialsProvider("AKIDEXAMPLE", "secret", ""),
		Attempts: 1, MaxBackoff: time.Millisecond, AttemptTimeout: 5 * time.Second, Evidence: evidence, Clock: r.clock.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Keys = r.another()
	t.Cleanup(r.close)
	if _, err := r.CreateTenant(t.Context(), "acme", nil); err != nil {
		t.Fatal(err)
	}
	return r, double
}

// A keyd that starts while its KMS is ill does not start, or serves; it says
// what is wrong and takes it for no root's end, and it starts when the KMS is well.
func TestStartsThroughFaultsOfTheKMS(t *testing.T) {
	for _, fresh := range []bool{true, false} {
		for _, op := range []string{"create", "wrap", "unwrap", "describe"} {
			for name, a := range ailments {
				t.Run(fmt.Sprintf("fresh %v/%s %s", fresh, op, name), func(t *testing.T) {
					t.Parallel()
					r, _, kms := newMemoryRig(t)
					p := r.populate(2)
					p.destroy("person-0")
					r.close()
					if fresh {
						r.store, r.anchor = newMemory(), anchortest.NewMemory()
					}
					f := newRefusals(kms.KMS)
					kms.KMS = f
					f.afflict(op, a)
					for range 2 {
						ctx, cancel := t.Context(), func() {}
						if a.hang {
							ctx, cancel = context.WithTimeout(ctx, 30*time.Millisecond)
						}
						k, err := keys.Open(ctx, r.config())
						cancel()
						needed := op == "unwrap" || fresh && op != "describe"
						switch {
						case err == nil:
							k.Close()
							if needed {
								t.Fatal("it starts")
							}
						case errors.Is(err, keys.ErrRootDestroyed) || errors.Is(err, keys.ErrRootRetiring) || outcome(err) == isErased:
							t.Fatalf("it takes that for a root's end: %v", err)
						case !needed && !a.hang: // the deadline may have come
							t.Fatalf("it does not start: %v", err)
						}
					}
					f.clear()
					if err := r.serve(); err != nil {
						t.Fatalf("afterwards: %v", err)
					}
					if !fresh {
						p.check()
					}
				})
			}
		}
	}
}
