package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// A root's destruction that is called off in the KMS itself is noticed, stated
// and not worked against; the receipt takes back what it promised.
func TestRootIsKept(t *testing.T) {
	for _, how := range []string{"in the KMS", "in the KMS, which leaves it disabled", "through keyd", "before it was scheduled"} {
		t.Run(how, func(t *testing.T) {
			r, _, _ := newMemoryRig(t)
			p := r.populate(3)
			p.destroy("person-0")
			r.turn()
			root := r.epoch(1).RootId
			scheduled := how != "before it was scheduled"
			if scheduled {
				r.advance(3 * time.Hour)
				r.work()
				r.wantState(1, retiring)
			}
			if strings.HasPrefix(how, "in the KMS") {
				if err := r.kms.Cancel(t.Context(), root); err != nil {
					t.Fatal(err)
				}
				if strings.HasSuffix(how, "disabled") { // as AWS does
					if err := r.kms.Disable(t.Context(), root); err != nil {
						t.Fatal(err)
					}
				}
			} else if err := r.CancelRetirement(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			r.clock.Advance(2 * time.Minute)
			r.work()
			for range 30 {
				r.advance(12 * time.Hour)
				r.work()
			}
			r.wantState(1, drained)
			if d, err := r.kms.Describe(t.Context(), root); err != nil || d.State != keys.RootEnabled {
				t.Errorf("the root is %v, %v", d.State, err)
			}
			_, v := r.getReceipt("destroy-person-0")
			if st := v.Stages(); !st.Final.IsZero() || st.RootKept.IsZero() {
				t.Errorf("stages %+v", st)
			}
			if e := r.epoch(1); !e.Kept || !e.Late {
				t.Errorf("kept %v, late %v", e.Kept, e.Late)
			}
			for _, c := range r.Status(t.Context()).Components {
				if c.Name == "epochs" && (c.Healthy || !strings.Contains(c.Detail, "root of epoch 1 is kept")) {
					t.Errorf("health: %v", c)
				}
			}
			if g, err := r.EpochGauges(t.Context()); err != nil || g.Late == 0 {
				t.Errorf("gauges: %+v, %v", g, err)
			}
			if err := r.ResumeRetirement(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			r.work()
			r.advance(3 * time.Hour)
			r.work()
			r.wantState(1, retiring)
			_, v = r.getReceipt("destroy-person-0")
			if st := v.Stages(); !st.RootKept.IsZero() || st.RootDue.IsZero() {
				t.Errorf("scheduled again: stages %+v", st)
			}
			r.advance(2 * time.Hour)
			r.work()
			r.wantState(1, closed)
			_, v = r.getReceipt("destroy-person-0")
			if st := v.Stages(); st.Final.IsZero() || !st.RootKept.IsZero() {
				t.Errorf("in the end: stages %+v", st)
			}
			err := r.CancelRetirement(t.Context(), 1)
			r.want("keeping a root that is destroyed", err, isConflict)
		})
	}
}

// A root that an operator keeps stays kept through a restore from before that,
// whatever state its epoch was in; he is named at once, and a repeat states
// nothing more.
func TestKeptRootSurvivesARestore(t *testing.T) {
	for name, come := range map[string]func(r *rig){
		"draining": func(r *rig) {
			if _, err := r.TurnEpoch(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			r.stepUntil(1, draining)
		},
		"drained":  func(r *rig) { r.turn() },
		"retiring": func(r *rig) { r.turn(); r.advance(3 * time.Hour); r.work() },
	} {
		t.Run(name, func(t *testing.T) {
			r, store, _ := newMemoryRig(t)
			p := r.populate(2)
			p.destroy("person-0")
			come(r)
			rows := store.copyRows()
			for range 3 {
				if err := r.CancelRetirement(t.Context(), 1); err != nil {
					t.Fatal(err)
				}
			}
			size := r.LedgerSize()
			if name != "draining" && !strings.Contains(r.epoch(1).WaitingFor, "operator") {
				t.Errorf("it waits for %q", r.epoch(1).WaitingFor)
			}
			r.close()
			r.store = storeOf(rows)
			done := r.replay(keys.ReplayOptions{})
			if done.Missing[receipt.EpochCancelled] != 1 || done.To != size {
				t.Errorf("replayed %v up to %d of %d", done.Missing, done.To, size)
			}
			if _, v := r.getReceipt("destroy-person-0"); v.Stages().RootKept.IsZero() {
				t.Errorf("stages %+v", v.Stages())
			}
			for range 30 {
				r.advance(12 * time.Hour)
				r.work()
			}
			r.wantState(1, drained)
			if d, err := r.kms.Describe(t.Context(), r.epoch(1).RootId); err != nil || d.State != keys.RootEnabled {
				t.Errorf("the root is %v, %v", d.State, err)
			}
			if err := r.ResumeRetirement(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			if w := r.epoch(1).WaitingFor; strings.Contains(w, "operator") {
				t.Errorf("resumed, it waits for %q", w)
			}
			r.closeEpoch(1)
			p.check()
		})
	}
}

// Keeping a root is answered once the anchor has what is stated of it, by a
// repeat as well.
func TestKeptRootIsAnchored(t *testing.T) {
	r := newRig(t)
	var down atomic.Bool
	r.anchor.Inject = func(context.Context, string) anchortest.Fault {
		if down.Load() {
			return anchortest.Lost
		}
		return anchortest.None
	}
	r.seal("ann", "trace")
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for range 7 { // through the soak
		_ = keys.Duty(t.Context(), r.Keys)
		r.clock.Advance(20 * time.Minute)
	}
	all, _, err := r.Epochs(t.Context())
	if err != nil || all[0].State != keydv1.EpochState_EPOCH_STATE_RETIRING {
		t.Fatalf("%v, %v", all, err)
	}
	r.patience = 50 * time.Millisecond
	r.reopen()
	down.Store(true)
	for range 3 {
		r.want("the anchor is away", r.CancelRetirement(t.Context(), 1), isUnavail)
	}
	down.Store(false)
	for range 200 {
		if err = r.CancelRetirement(t.Context(), 1); err == nil {
			break
		}
	}
	if err != nil {
		t.Errorf("the anchor is back: %v", err)
	}
}

// A root that is scheduled at the moment when it is kept is called off.
func TestKeptWhileItIsScheduled(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	p := r.populate(2)
	r.turn()
	r.advance(2*time.Hour - time.Minute)
	r.wantState(1, drained)
	var h hooks
	kms.fault = h.fault
	h.once("schedule", func() {
		kms.fault = func(string) fault { return none }
		if err := r.CancelRetirement(t.Context(), 1); err != nil {
			t.Error(err)
		}
	})
	for range 20 {
		r.clock.Advance(10 * time.Minute)
		_, _ = r.StepDuties(t.Context())
	}
	r.wantState(1, drained)
	if d, err := r.kms.Describe(t.Context(), r.epoch(1).RootId); err != nil || d.State != keys.RootEnabled {
		t.Errorf("the root is %v, %v", d.State, err)
	}
	p.check()
}

// Epochs close in the order of their numbers: a key that was carried over has
// copies under the older root.
func TestEpochsCloseInOrder(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(3)
	before := store.copyRows()
	r.turn()
	p.destroy("person-0") // in epoch 2, with a copy under root 1
	r.advance(3 * time.Hour)
	r.work()
	r.wantState(1, retiring)
	if err := r.kms.Cancel(t.Context(), r.epoch(1).RootId); err != nil { // and nobody has looked yet
		t.Fatal(err)
	}
	r.turn()
	for range 6 {
		r.advance(2 * time.Hour)
		r.work()
	}
	r.wantState(2, retiring)
	if d, err := r.kms.Describe(t.Context(), r.epoch(2).RootId); err != nil || d.State != keys.RootDestroyed {
		t.Fatalf("root 2 is %v, %v", d.State, err)
	}
	if got := fmt.Sprint(p.opensAny(before, p.dead)); got != "[person-0]" {
		t.Fatalf("the backup opens %s: the test has no point", got)
	}
	_, v := r.getReceipt("destroy-person-0")
	if st := v.Stages(); !st.Final.IsZero() {
		t.Errorf("final although the root of a copy lives: %+v", st)
	}
	if err := r.ResumeRetirement(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for range 6 {
		r.advance(2 * time.Hour)
		r.work()
	}
	r.wantState(1, closed)
	r.wantState(2, closed)
	_, v = r.getReceipt("destroy-person-0")
	if st := v.Stages(); st.Final.IsZero() {
		t.Errorf("stages %+v", st)
	}
	if got := p.opensAny(before, p.dead); len(got) != 0 {
		t.Errorf("the backup opens %q", got)
	}
}

// A root that is called destroyed without having been seen pending, before its
// time, or while the KMS answers for no other root, closes nothing.
func TestClosingNeedsEvidence(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	r.populate(2)
	r.turn()
	root := r.epoch(1).RootId
	lies := &liar{KMS: kms.KMS, root: root}
	kms.KMS = lies
	r.clock.Advance(3 * time.Hour)

	// It says destroyed, and no date.
	lies.say(&keys.Root{ID: root, State: keys.RootDestroyed})
	if _, err := r.StepDuties(t.Context()); err == nil {
		t.Error("destroyed, never pending: nothing is said")
	}
	r.wantState(1, drained)
	lies.say(nil)
	r.clock.Advance(2 * time.Minute)
	r.work()
	r.wantState(1, retiring)

	// Before its time.
	r.clock.Advance(2 * time.Minute)
	lies.say(&keys.Root{ID: root, State: keys.RootDestroyed, DestroyAt: r.epoch(1).Due.AsTime()})
	if _, err := r.StepDuties(t.Context()); err == nil {
		t.Error("destroyed before its time: nothing is said")
	}
	r.wantState(1, retiring)
	lies.say(nil)

	// The open epoch's root is not answered for.
	r.clock.Advance(2 * time.Hour)
	lies.others = keys.ErrKMSDenied
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrKMSDenied) {
		t.Errorf("no witness: %v", err)
	}
	r.wantState(1, retiring)
	lies.others = nil
	r.clock.Advance(2 * time.Minute)
	r.work()
	r.wantState(1, closed)
}

// liar describes one root as it is told to.
type liar struct {
	keys.KMS
	root   string
	mu     sync.Mutex
	told   *keys.Root
	others error
}

func (l *liar) say(d *keys.Root) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = d
}

func (l *liar) Describe(ctx context.Context, root string) (keys.Root, error) {
	l.mu.Lock()
	told := l.told
	l.mu.Unlock()
	if root != l.root && l.others != nil {
		return keys.Root{}, l.others
	}
	if root == l.root && told != nil {
		return *told, nil
	}
	return l.KMS.Describe(ctx, root)
}

// While another keyd lives that has not seen the open epoch, nothing is
// dropped; one that is gone is not waited for.
func TestWaitsForOtherKeyds(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	p := r.populate(3)
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := r.another()
	k := p.keys["person-0"]
	q := []*keydv1.BlobKeyQuery{openQuery("acme", "person-0", "trace", k)}
	if _, err := other.BlobKeys(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	r.turn()
	r.wantState(1, draining)
	if e := r.epoch(1); !strings.Contains(e.WaitingFor, "1 other keyds") {
		t.Errorf("waits for %q", e.WaitingFor)
	}
	if other.HeldKEKs(1) == 0 {
		t.Fatal("the other keyd holds no KEK: the test has no point")
	}
	if err := other.Beat(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.work()
	r.wantState(1, drained)
	if other.HeldKEKs(1) == 0 {
		t.Fatal("the other keyd has dropped its KEKs already")
	}
	if d, err := r.kms.Describe(t.Context(), r.epoch(1).RootId); err != nil || d.State != keys.RootEnabled {
		t.Errorf("the root is %v (%v) while a keyd holds its KEKs", d.State, err)
	}
	if err := other.Beat(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := other.HeldKEKs(1); n != 0 {
		t.Errorf("it holds %d KEKs of the drained epoch", n)
	}
	if res, err := other.BlobKeys(t.Context(), q); err != nil || res[0].Err != nil || !bytes.Equal(res[0].Key.Key, k.Key) {
		t.Errorf("the other keyd does not serve: %v", err)
	}
	r.work()
	if d, err := r.kms.Describe(t.Context(), r.epoch(1).RootId); err != nil || d.State != keys.RootDisabled {
		t.Errorf("the root is %v, %v", d.State, err)
	}
	// It dies without a word.
	r.turn()
	r.wantState(2, draining)
	r.clock.Advance(keys.BeatLapse + time.Second)
	r.work()
	r.wantState(2, drained)
}

// A keyd that cannot write its heartbeat issues no keys, although it can read.
func TestCutOffKeydGoesQuiet(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	k := r.seal("ann", "trace")
	store.fault = func(string) fault { return lost }
	r.clock.Advance(keys.BeatLimit - time.Second)
	if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
		t.Errorf("within the limit: %v", err)
	}
	r.clock.Advance(2 * time.Second)
	_, err := r.BlobKeys(t.Context(), []*keydv1.BlobKeyQuery{openQuery("acme", "ann", "trace", k)})
	r.want("beyond the limit", err, isUnavail)
	store.fault = nil
	if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
		t.Errorf("when the store is back: %v", err)
	}
}

// KEKs go when their root is described as one that cannot be used, and only
// then; a fetch that was under way does not bring them back.
func TestKEKsGoWithTheirRoot(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	f := newRefusals(kms.KMS)
	kms.KMS = f
	k := r.seal("ann", "trace")
	ask := func() error {
		_, err := r.ask(openQuery("acme", "ann", "trace", k))
		return err
	}
	renew := func() { // goes beside the calls
		r.clock.Advance(8 * time.Minute)
		before := f.count("unwrap")
		for range 10_000 {
			_ = ask()
			// Nobody may join a renewal that has met what is over by then.
			if f.count("unwrap") > before && r.Loads() == 0 {
				return
			}
			time.Sleep(time.Millisecond)
		}
		t.Fatal("nothing is renewed")
	}
	f.set("unwrap", keys.ErrKMSDenied)
	f.set("describe", keys.ErrKMSDenied)
	renew()
	if err := ask(); err != nil {
		t.Errorf("a refusal took the KEKs: %v", err)
	}
	f.clear()
	r.clock.Advance(8 * time.Minute)
	if err := ask(); err != nil { // anew
		t.Fatal(err)
	}
	root := r.epoch(1).RootId
	if err := r.kms.Disable(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	renew()
	if n := r.HeldKEKs(1); n != 0 {
		t.Fatalf("%d KEKs of a disabled root are held", n)
	}
	r.want("after the root was disabled", ask(), isUnavail)
	if err := r.kms.Cancel(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	if err := ask(); err != nil {
		t.Errorf("enabled again: %v", err)
	}
}

// A damaged row is reported and keeps the epoch from draining; repaired, it is
// carried over.
func TestDamagedRowKeepsTheEpoch(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(6)
	var victim string
	for k := range r.rows("w\x00\x00\x00\x01D") {
		victim = k
	}
	good := store.copyRows()[victim]
	var w storev1.Wrapped
	if err := proto.Unmarshal(good, &w); err != nil {
		t.Fatal(err)
	}
	w.Ciphertext[20] ^= 1
	bad, err := proto.Marshal(&w)
	if err != nil {
		t.Fatal(err)
	}
	r.put(victim, bad)
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var problem error
	for range 20 {
		if _, problem = r.StepDuties(t.Context()); problem != nil {
			break
		}
	}
	if !errors.Is(problem, keys.ErrDamaged) {
		t.Fatalf("the damage is not reported: %v", problem)
	}
	if e := r.epoch(1); e.State != draining || e.RowsDamaged != 1 || e.RowsRewrapped == 0 {
		t.Errorf("epoch: %v", e)
	}
	for range 5 {
		r.clock.Advance(time.Hour)
		_, _ = r.StepDuties(t.Context())
	}
	r.wantState(1, draining)
	r.put(victim, good)
	for range 20 {
		r.clock.Advance(time.Hour)
		_, _ = r.StepDuties(t.Context())
	}
	r.work()
	if s := r.epoch(1).State; s == draining {
		t.Fatal("repaired, and it still drains")
	}
	p.check()
}

// The verification before an epoch is called drained sees what rewrapping
// could not know of.
func TestVerificationFinds(t *testing.T) {
	for name, plant := range map[string]func(r *rig, p *people, carried func(id []byte) string){
		"a successor that is missing": func(r *rig, p *people, carried func([]byte) string) {
			r.remove(carried(p.keys["person-1"].KeyId))
		},
		"a successor that does not open": func(r *rig, p *people, carried func([]byte) string) {
			r.put(carried(p.keys["person-1"].KeyId), r.rows(carried(p.keys["person-2"].KeyId))[carried(p.keys["person-2"].KeyId)])
		},
		"a key of somebody who is destroyed": func(r *rig, p *people, carried func([]byte) string) {
			key := carried(p.keys["person-1"].KeyId)
			row := r.rows(key)[key]
			p.destroy("person-1")
			r.put(key, row)
		},
		"an old key of somebody who is destroyed": func(r *rig, p *people, carried func([]byte) string) {
			key := carried(p.keys["person-1"].KeyId)
			key = key[:4] + "\x01" + key[5:]
			row := r.rows(key)[key]
			p.destroy("person-1")
			r.put(key, row)
		},
		"a pseudonym key that is missing": func(r *rig, _ *people, _ func([]byte) string) {
			for k := range r.rows("w\x00\x00\x00\x02P") {
				r.remove(k)
			}
		},
		"a bucket key that is missing": func(r *rig, _ *people, _ func([]byte) string) {
			for k := range r.rows("w\x00\x00\x00\x02B") {
				r.remove(k)
			}
		},
		"a secret of keyd's own that is missing": func(r *rig, _ *people, _ func([]byte) string) {
			for k := range r.rows("w\x00\x00\x00\x02S") {
				r.remove(k)
				break
			}
		},
		"a key whose both rows are missing": func(r *rig, p *people, carried func([]byte) string) {
			key := carried(p.keys["person-1"].KeyId)
			r.remove(key)
			r.remove(key[:4] + "\x01" + key[5:])
		},
		"a tenant's KEK that is missing": func(r *rig, _ *people, _ func([]byte) string) {
			for k := range r.rows("w\x00\x00\x00\x02K") {
				r.remove(k)
				break
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, _, _ := newMemoryRig(t)
			p := r.populate(4)
			if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			r.stepTo(1, draining)
			if _, err := r.StepDuties(t.Context()); err != nil { // rewraps
				t.Fatal(err)
			}
			r.wantState(1, draining)
			plant(r, p, func(id []byte) string {
				for k := range r.rows("w\x00\x00\x00\x02D") {
					if strings.HasSuffix(k, string(id)) {
						return k
					}
				}
				t.Fatal("no such row")
				return ""
			})
			_, err := r.StepDuties(t.Context())
			if !errors.Is(err, keys.ErrDamaged) {
				t.Errorf("not found: %v", err)
			}
			r.wantState(1, draining)
		})
	}
}

func (r *rig) remove(key string) {
	r.t.Helper()
	if err := r.store.Update(context.Background(), func(tx keys.Tx) error { return tx.Delete([]byte(key)) }); err != nil {
		r.t.Fatal(err)
	}
}

// The second verification, after the soak, keeps the root alive when something
// is wrong.
func TestSecondVerification(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.populate(3)
	rows := store.copyRows()
	r.turn()
	for k, v := range rows {
		if strings.HasPrefix(k, "w\x00\x00\x00\x01D") {
			r.put(k, v) // somebody has put it back
			break
		}
	}
	r.clock.Advance(3 * time.Hour)
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrDamaged) {
		t.Errorf("not found: %v", err)
	}
	r.wantState(1, drained)
	if d, err := r.kms.Describe(t.Context(), r.epoch(1).RootId); err != nil || d.State != keys.RootDisabled {
		t.Errorf("the root is %v, %v", d.State, err)
	}
}

// A root soaks for as long as a keyd that is cut off may hold its KEKs, however
// short the soak is set.
func TestSoakCoversTheLeaseOfKEKs(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	cfg := r.config()
	cfg.Soak = time.Second
	r.Keys.Close()
	var err error
	if r.Keys, err = keys.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	r.clock.Advance(keys.BeatLapse + time.Second)
	rec := r.destroy("ann", "r1")
	if by, want := r.verify(rec).Stages().FinalBy, r.epoch(1).PlannedEnd.AsTime().Add(cfg.DrainBudget+cfg.KEKLease+r.kms.Waiting()); by.Before(want) {
		t.Errorf("final by %v, before %v", by, want)
	}
	r.turn()
	r.clock.Advance(cfg.KEKLease - time.Second)
	r.work()
	r.wantState(1, drained)
	r.clock.Advance(2 * time.Second)
	r.work()
	r.wantState(1, retiring)
}

// A pass over all rows that takes long asks the KMS for its KEKs again: it uses
// none for longer than their lease.
func TestLongPassesRenewTheirKEKs(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	f := newRefusals(kms.KMS)
	kms.KMS = f
	p := r.populate(60)
	cfg := r.config()
	var slow atomic.Bool
	cfg.Clock = func() time.Time {
		if slow.Load() {
			r.clock.Advance(cfg.KEKLease / 20)
		}
		return r.clock.Now()
	}
	r.Keys.Close()
	var err error
	if r.Keys, err = keys.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	r.clock.Advance(keys.BeatLapse + time.Second)
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	for _, pass := range []struct {
		what string
		keks int // that it needs: keyd's own and the tenant's
	}{{"carrying over", 4}, {"the verification", 2}} {
		before := f.count("unwrap")
		slow.Store(true)
		_, err := r.StepDuties(t.Context())
		slow.Store(false)
		if n := f.count("unwrap") - before; err != nil || n <= pass.keks {
			t.Errorf("%s: %d KEKs were asked for, %v", pass.what, n, err)
		}
	}
	r.wantState(1, drained)
	p.check()
}

// What the clock triggers stops when the clock has jumped, until an operator
// says that it is right.
func TestClockJumps(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	r.populate(2)
	r.work()
	r.clock.Advance(8 * 24 * time.Hour) // beyond the planned end
	for range 3 {
		if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrClock) {
			t.Fatalf("a jump: %v", err)
		}
	}
	r.wantState(1, open)
	r.seal("ann", "trace")
	r.destroy("ann", "r1") // the ledger's time is that of the jump now
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrClock) {
		t.Errorf("traffic made the jump believed: %v", err)
	}
	if _, err := r.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.work()
	r.wantState(1, drained)
	// The end of the soak, and the date of the root's destruction.
	r.clock.Advance(30 * time.Hour)
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrClock) {
		t.Errorf("a jump over the soak: %v", err)
	}
	r.wantState(1, drained)
	if _, err := r.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.work()
	r.wantState(1, retiring)
	r.clock.Advance(-48 * time.Hour)
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrClock) {
		t.Errorf("a jump back: %v", err)
	}
	r.clock.Advance(48*time.Hour + 2*time.Hour)
	r.work()
	r.wantState(1, closed)
}

// An epoch turns by itself when its time is over.
func TestTurnsOnSchedule(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	p := r.populate(3)
	p.destroy("person-0")
	r.advance(7*24*time.Hour - 13*time.Hour)
	r.work()
	r.wantState(1, open)
	r.advance(13 * time.Hour)
	r.work()
	r.wantState(1, drained)
	_, v := r.getReceipt("destroy-person-0")
	finalBy := v.Stages().FinalBy
	r.closeEpoch(1)
	if now := r.clock.Now(); now.After(finalBy) {
		t.Errorf("closed at %v, promised by %v", now, finalBy)
	}
	p.check()
}

// An epoch whose root is lost before it opens is given up, and the turn begins
// anew.
func TestRootLostBeforeItOpens(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	p := r.populate(3)
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(2, preparing)
	if _, err := r.kms.ScheduleDestruction(t.Context(), r.epoch(2).RootId); err != nil {
		t.Fatal(err)
	}
	r.work()
	r.wantState(2, abandoned)
	r.wantState(3, open)
	r.wantState(1, drained)
	r.closeEpoch(1)
	if n := len(r.rows("w\x00\x00\x00\x02")); n != 0 {
		t.Errorf("%d rows of the epoch that was given up", n)
	}
	p.check()
	r.turn()
	r.closeEpoch(3)
	p.check()
}

// A tenant that is made while the next epoch is prepared, or while it opens,
// has its KEKs.
func TestTenantsMadeDuringATurn(t *testing.T) {
	r, store, kms := newMemoryRig(t)
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	create := func(name string) {
		t.Helper()
		if _, err := r.CreateTenant(t.Context(), name, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	var h hooks
	kms.fault = h.fault
	// It has asked the KMS for its KEK when the epoch is prepared, and opens.
	h.once("wrap", func() { r.stepTo(2, preparing) })
	create("before")
	create("while-prepared")
	h.once("wrap", func() { r.stepTo(2, open) })
	create("while-it-opens")
	create("after")
	store.fault = nil
	r.work()
	r.closeEpoch(1)
	for _, tenant := range []string{"before", "while-prepared", "while-it-opens", "after"} {
		if _, err := r.ask(sealQuery(tenant, "ann", "trace")); err != nil {
			t.Errorf("%s: %v", tenant, err)
		}
	}
}

// A store that takes small transactions only gets them.
func TestRewrapHalvesItsBatches(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(100)
	store.large = 40
	r.turn()
	r.wantState(1, drained)
	p.check()
}

// Nothing that cannot be undone is done before the anchor covers what led to it.
func TestAnchorBeforeTheIrreversible(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	r.populate(2)
	r.patience = 2 * time.Second
	r.reopen2()
	r.clock.Advance(keys.BeatLapse + time.Second)
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	var down atomic.Bool
	r.anchor.Inject = func(context.Context, string) anchortest.Fault {
		if down.Load() {
			return anchortest.Lost
		}
		return anchortest.None
	}
	settle := func() {
		for range 5 {
			_, _ = r.StepDuties(t.Context())
		}
	}
	down.Store(true)
	settle()
	r.wantState(1, drained)
	if len(r.rows("w\x00\x00\x00\x01D")) == 0 {
		t.Error("rows were dropped while the anchor was down")
	}
	down.Store(false)
	r.anchored()
	if _, err := r.StepDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r.epoch(1).Sanitised == nil {
		t.Fatal("not dropped when the anchor is back")
	}
	r.work()
	r.clock.Advance(3 * time.Hour)
	// Something is logged that the anchor does not get.
	down.Store(true)
	if _, err := r.DestroyKey(t.Context(), destroyRequest("person-0", "r0")); err == nil {
		t.Fatal("acknowledged without the anchor")
	}
	settle()
	r.wantState(1, drained)
	if d, err := r.kms.Describe(t.Context(), r.epoch(1).RootId); err != nil || d.State != keys.RootDisabled {
		t.Errorf("the root is %v (%v) while the anchor is down", d.State, err)
	}
	down.Store(false)
	r.anchored()
	r.work()
	r.wantState(1, retiring)
}

// A receipt states no stage that the anchor does not cover: a loss of the store
// could take it back.
func TestStagesAreAnchored(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(2)
	p.destroy("person-0")
	r.patience = 50 * time.Millisecond
	r.reopen2()
	r.clock.Advance(keys.BeatLapse + time.Second)
	var down atomic.Bool
	r.anchor.Inject = func(context.Context, string) anchortest.Fault {
		if down.Load() {
			return anchortest.Lost
		}
		return anchortest.None
	}
	store.fault = func(op string) fault {
		down.Store(down.Load() || op == "drop")
		return none
	}
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for n := 0; n < 50 && r.epoch(1).Sanitised == nil; n++ {
		_, _ = r.StepDuties(t.Context())
	}
	if r.epoch(1).Sanitised == nil || r.AnchoredSize() == r.LedgerSize() {
		t.Fatal("not what the test is about")
	}
	if _, v := r.getReceipt("destroy-person-0"); !v.Stages().Sanitised.IsZero() {
		t.Errorf("the anchor does not have it, and the receipt says: %+v", v.Stages())
	}
	down.Store(false)
	store.fault = nil
	r.anchored()
	if _, v := r.getReceipt("destroy-person-0"); v.Stages().Sanitised.IsZero() {
		t.Errorf("the anchor has it, and the receipt says: %+v", v.Stages())
	}
}

// A KMS that gives one root for two epochs is not asked to disable or destroy it.
func TestRootOfTwoEpochsIsNotTouched(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	p := r.populate(2)
	root := r.epoch(1).RootId
	kms.KMS = sameRoot{kms.KMS, root}
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var err error
	for range 20 {
		if _, err = r.StepDuties(t.Context()); err != nil {
			break
		}
		r.clock.Advance(20 * time.Minute)
	}
	if !errors.Is(err, keys.ErrDamaged) {
		t.Errorf("nobody is told: %v", err)
	}
	if d, err := r.kms.Describe(t.Context(), root); err != nil || d.State != keys.RootEnabled {
		t.Errorf("the root is %v, %v", d.State, err)
	}
	p.check()
}

// sameRoot makes no new root.
type sameRoot struct {
	keys.KMS
	id string
}

func (s sameRoot) Create(context.Context, uint32, keys.RootRequest) (string, error) { return s.id, nil }

// anchored waits until the anchor covers the ledger. One that was away is tried
// again after 10 s at the latest.
func (r *rig) anchored() {
	r.t.Helper()
	for range 12_000 {
		if r.AnchoredSize() == r.LedgerSize() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.t.Fatal("the anchor does not follow")
}

// A KEK that was being fetched when its root was found disabled is not kept.
func TestNoKEKReturnsFromAFetchUnderWay(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	k := r.seal("ann", "trace")
	late := &lateUnwrap{KMS: kms.KMS}
	kms.KMS = late
	r.clock.Advance(20 * time.Minute) // the lease of the KEKs is over
	late.hold()
	answer := make(chan error)
	go func() {
		_, err := r.ask(openQuery("acme", "ann", "trace", k))
		answer <- err
	}()
	<-late.holding // the KMS has unwrapped it, and the answer is on its way
	if err := r.kms.Disable(t.Context(), r.epoch(1).RootId); err != nil {
		t.Fatal(err)
	}
	// Meanwhile another tenant's fetch finds that out.
	r.DropKEKs(1)
	close(late.release)
	if err := <-answer; err == nil {
		t.Error("the key was given out")
	}
	if n := r.HeldKEKs(1); n != 0 {
		t.Errorf("%d KEKs are held", n)
	}
}

// lateUnwrap holds back the answer of one Unwrap.
type lateUnwrap struct {
	keys.KMS
	epoch   uint32 // zero: any
	mu      sync.Mutex
	held    bool
	holding chan struct{}
	release chan struct{}
}

func (l *lateUnwrap) hold() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held, l.holding, l.release = true, make(chan struct{}), make(chan struct{})
}

func (l *lateUnwrap) Unwrap(ctx context.Context, root string, b []byte, ec keys.EncryptionContext) ([]byte, error) {
	key, err := l.KMS.Unwrap(ctx, root, b, ec)
	l.mu.Lock()
	held := l.held && (l.epoch == 0 || l.epoch == ec.Epoch)
	l.held = l.held && !held
	l.mu.Unlock()
	if held {
		close(l.holding)
		<-l.release
	}
	return key, err
}

// Several cold calls for one tenant ask the KMS once.
func TestColdCallsShareOneUnwrap(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	f := newRefusals(kms.KMS)
	kms.KMS = f
	k := r.seal("ann", "trace")
	r.clock.Advance(20 * time.Minute)
	before := f.count("unwrap")
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := f.count("unwrap") - before; n > 2 {
		t.Errorf("%d calls of the KMS", n)
	}
}

// A store that is full takes no heartbeat, and is there: keyd goes on serving
// what it holds.
func TestFullStoreIsServedFrom(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	k := r.seal("ann", "trace")
	store.failure = keys.ErrFull
	store.fault = func(string) fault { return lost }
	for range 10 {
		r.clock.Advance(keys.BeatLimit)
		if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrFull) {
		t.Errorf("duties on a full store: %v", err)
	}
	r.Keys.Close()
	r.Keys = r.another()
	if _, err := r.ask(openQuery("acme", "ann", "trace", k)); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}

// Calls that find a tenant's next KEK missing share one call of the KMS.
func TestOpeningIsNoStampede(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	other := r.another()
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := other.BlobKeys(t.Context(), []*keydv1.BlobKeyQuery{sealQuery("acme", "ann", "trace")}); err != nil {
		t.Fatal(err) // it holds the KEK of epoch 1, and no other
	}
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(2, open)
	f := newRefusals(kms.KMS)
	kms.KMS = slowUnwrap{f}
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			res, err := other.BlobKeys(t.Context(), []*keydv1.BlobKeyQuery{sealQuery("acme", fmt.Sprintf("new-%d", i), "trace")})
			if err != nil || res[0].Err != nil {
				t.Errorf("first use: %v", err)
			}
		})
	}
	wg.Wait()
	if n := f.count("unwrap"); n > 2 {
		t.Errorf("%d calls of the KMS", n)
	}
}

// slowUnwrap takes its time, so that callers meet.
type slowUnwrap struct{ keys.KMS }

func (s slowUnwrap) Unwrap(ctx context.Context, root string, b []byte, ec keys.EncryptionContext) ([]byte, error) {
	time.Sleep(50 * time.Millisecond)
	return s.KMS.Unwrap(ctx, root, b, ec)
}

// Many tenants go along, those included that nobody asks for meanwhile.
func TestManyTenantsTurn(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	sealed := make(map[string]*keydv1.BlobKey)
	for i := range 300 {
		tenant := fmt.Sprintf("tenant-%d", i)
		if _, err := r.CreateTenant(t.Context(), tenant, nil); err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 {
			k, err := r.ask(sealQuery(tenant, "ann", "trace"))
			if err != nil {
				t.Fatal(err)
			}
			sealed[tenant] = k
		}
	}
	r.turn()
	r.closeEpoch(1)
	r.reopen2()
	for i := range 300 {
		tenant := fmt.Sprintf("tenant-%d", i)
		k, err := r.ask(sealQuery(tenant, "ann", "trace"))
		if err != nil {
			t.Fatalf("%s: %v", tenant, err)
		}
		if was := sealed[tenant]; was != nil && !bytes.Equal(was.Key, k.Key) {
			t.Errorf("%s has another key", tenant)
		}
	}
	for key, value := range r.rows("T") {
		var row storev1.Tenant
		if err := proto.Unmarshal(value, &row); err != nil {
			t.Fatal(err)
		}
		if row.KekEpoch != 2 || row.NextKekEpoch != 0 || len(row.NextKekId) != 0 {
			t.Errorf("tenant %x: KEK of epoch %d, next of %d", key, row.KekEpoch, row.NextKekEpoch)
		}
	}
}

// A disk that fills up while keys are carried over, or rows are dropped, holds
// up the turn; when there is room again it goes on.
func TestDiskFullDuringATurn(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(5)
	store.failure = keys.ErrFull
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	for _, full := range []struct {
		op    string
		state keydv1.EpochState
	}{{"update", draining}, {"drop", drained}} {
		r.stepTo(1, full.state)
		store.fault = func(op string) fault {
			if op == full.op {
				return lost
			}
			return none
		}
		for range 3 {
			if _, err := r.StepDuties(t.Context()); !errors.Is(err, keys.ErrFull) {
				t.Errorf("%s: %v", full.op, err)
			}
		}
		r.wantState(1, full.state)
		if r.epoch(1).Sanitised != nil {
			t.Errorf("sanitised although the %s failed", full.op)
		}
		p.check()
		store.fault = nil
	}
	r.work()
	r.closeEpoch(1)
	p.check()
}
