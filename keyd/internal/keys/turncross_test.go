package keys_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/keys"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

// everyStore runs a test over Badger, and over the store in memory whose
// transactions conflict.
// Calls wait for the anchor however slow the machine is.
func everyStore(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Run("badger", func(t *testing.T) {
		r := newRig(t)
		r.patience = time.Minute
		r.reopen()
		test(t, r)
	})
	t.Run("memory", func(t *testing.T) {
		r, _, _ := newMemoryRig(t)
		r.patience = time.Minute
		r.reopen2()
		test(t, r)
	})
}

// While epochs turn, nobody notices: no call fails, no key misses the train,
// nobody comes back.
func TestTurnsGoUnnoticed(t *testing.T) {
	everyStore(t, func(t *testing.T, r *rig) {
		const turns, workers = 3, 4
		for i := range 300 {
			r.seal(fmt.Sprintf("old-%d", i), "trace")
		}
		var stop atomic.Bool
		var calls atomic.Int64
		var wg sync.WaitGroup
		type life struct {
			key        *keydv1.BlobKey
			generation uint32
			dead       bool
			graves     []*keydv1.BlobKey
		}
		lives := make([]map[string]*life, workers)
		for w := range workers {
			lives[w] = make(map[string]*life)
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(w), 7))
				fail := func(what string, err error) {
					if err != nil {
						t.Errorf("worker %d: %s: %v", w, what, err)
						stop.Store(true)
					}
				}
				for n := 0; !stop.Load(); n++ {
					calls.Add(1)
					name := fmt.Sprintf("w%d-%d", w, rng.IntN(60))
					l := lives[w][name]
					switch {
					case l == nil:
						k, err := r.ask(sealQuery("acme", name, "trace"))
						fail("first use", err)
						lives[w][name] = &life{key: k, generation: 1}
					case l.dead:
						res, err := r.Reinstate(context.Background(), &keydv1.ReinstateRequest{
							Tenant: "acme", SubjectId: []byte(name), IfGeneration: l.generation, RequestId: fmt.Sprintf("i%d-%d", w, n), Reason: "test",
						})
						fail("reinstate", err)
						if err == nil {
							l.generation, l.dead = res.Generation, false
							l.key, err = r.ask(sealQuery("acme", name, "trace"))
							fail("first use after", err)
						}
					case rng.IntN(8) == 0:
						req := destroyRequest(name, fmt.Sprintf("d%d-%d", w, n))
						req.IfGeneration = l.generation
						_, err := r.DestroyKey(context.Background(), req)
						fail("destroy", err)
						l.dead = true
						l.graves = append(l.graves, l.key)
					case rng.IntN(50) == 0:
						_, err := r.CreateTenant(context.Background(), fmt.Sprintf("tenant-%d-%d", w, n), nil)
						fail("create tenant", err)
					default:
						k, err := r.ask(openQuery("acme", name, "trace", l.key))
						fail("open", err)
						if err == nil && !bytes.Equal(k.Key, l.key.Key) {
							fail("open", errors.New("another key"))
						}
					}
				}
			})
		}
		for n := range turns {
			number := uint32(n + 1)
			if _, err := r.TurnEpoch(t.Context(), number); err != nil {
				t.Error(err)
			}
			for r.epoch(number).State != drained || r.epoch(number).Sanitised == nil {
				if _, err := r.StepDuties(t.Context()); err != nil {
					t.Errorf("turn %d: %v", n, err)
					break
				}
			}
			if stop.Load() {
				break
			}
		}
		stop.Store(true)
		wg.Wait()
		t.Logf("%d calls during %d turns", calls.Load(), turns)
		if t.Failed() {
			return
		}
		for w := range workers {
			for name, l := range lives[w] {
				for _, g := range l.graves {
					_, err := r.ask(openQuery("acme", name, "trace", g))
					r.want(name+": a key that was destroyed", err, isErased)
				}
				if l.dead {
					continue
				}
				k, err := r.ask(openQuery("acme", name, "trace", l.key))
				if err != nil || !bytes.Equal(k.Key, l.key.Key) {
					t.Errorf("%s is lost: %v", name, err)
				}
			}
		}
		for i := range 300 {
			r.seal(fmt.Sprintf("old-%d", i), "trace")
		}
		r.work()
		r.closeEpoch(1)
	})
}

// hookKMS runs a hook before a call of its own choice.
type hooks struct {
	mu sync.Mutex
	do map[string]func()
}

// once runs fn at the next call of op.
func (h *hooks) once(op string, fn func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.do == nil {
		h.do = make(map[string]func())
	}
	h.do[op] = fn
}

func (h *hooks) fault(op string) fault {
	h.mu.Lock()
	fn := h.do[op]
	delete(h.do, op)
	h.mu.Unlock()
	if fn != nil {
		fn()
	}
	return none
}

// stepTo does the duties until an epoch is in a state.
func (r *rig) stepTo(number uint32, s keydv1.EpochState) {
	r.t.Helper()
	for range 50 {
		all, _, err := r.Epochs(context.Background())
		if err != nil {
			r.t.Fatal(err)
		}
		if int(number) <= len(all) && all[number-1].State == s {
			return
		}
		if _, err := r.StepDuties(context.Background()); err != nil {
			r.t.Fatal(err)
		}
	}
	r.t.Fatalf("epoch %d does not come to %v: %v", number, s, r.epoch(number))
}

// deadRows counts the wrapped rows of a key id in all epochs, and the dead ones.
func (r *rig) deadRows(keyID []byte) (all, dead int) {
	r.t.Helper()
	for k, v := range r.rows("w") {
		if k[5] != 'D' || !strings.HasSuffix(k, string(keyID)) {
			continue
		}
		var w storev1.Wrapped
		if err := proto.Unmarshal(v, &w); err != nil {
			r.t.Fatal(err)
		}
		all++
		if w.Dead && len(w.Ciphertext) == 0 {
			dead++
		}
	}
	return all, dead
}

// A key that is destroyed between its rewrapping and the commit of that is not
// carried over; one that is destroyed afterwards dies in both epochs.
func TestDestroyedWhileItIsRewrapped(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(5)
	var h hooks
	store.fault = h.fault
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	// The next commits are that of the progress row, and that of the batch.
	h.once("update", func() { h.once("update", func() { p.destroy("person-0") }) })
	if _, err := r.StepDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if p.dead["person-0"] == nil {
		t.Fatal("the hook did not run")
	}
	if all, dead := r.deadRows(p.dead["person-0"].KeyId); all != 1 || dead != 1 {
		t.Errorf("destroyed meanwhile: %d rows, %d dead", all, dead)
	}
	p.destroy("person-1")
	if all, dead := r.deadRows(p.dead["person-1"].KeyId); all != 2 || dead != 2 {
		t.Errorf("destroyed afterwards: %d rows, %d dead", all, dead)
	}
	if e := r.epoch(1); e.RowsDead != 1 {
		t.Errorf("%d dead rows were met, want 1", e.RowsDead)
	}
	r.work()
	p.check()
	r.closeEpoch(1)
	p.check()
}

// Keys of a tenant that is erased between their rewrapping and the commit of that
// are not carried over, although their rows are as they were.
func TestTenantErasedWhileItIsRewrapped(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.populate(3)
	var h hooks
	store.fault = h.fault
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	erased := false
	h.once("update", func() {
		h.once("update", func() {
			_, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "all", Reason: "test"})
			erased = err == nil
		})
	})
	if _, err := r.StepDuties(t.Context()); err != nil || !erased {
		t.Fatalf("%v, erased: %v", err, erased)
	}
	if n := len(r.rows("w\x00\x00\x00\x02D")); n != 0 {
		t.Errorf("%d keys of an erased tenant were carried over", n)
	}
	r.work()
	r.closeEpoch(1)
}

// A subject that is destroyed and reinstated between reading and commit has
// another key by then.
func TestReinstatedWhileItIsRewrapped(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(3)
	var h hooks
	store.fault = h.fault
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	h.once("update", func() {
		h.once("update", func() {
			p.destroy("person-0")
			if _, err := r.Reinstate(t.Context(), &keydv1.ReinstateRequest{
				Tenant: "acme", SubjectId: []byte("person-0"), IfGeneration: 1, RequestId: "again", Reason: "test",
			}); err != nil {
				t.Error(err)
			}
			p.keys["person-0"] = r.seal("person-0", "trace")
		})
	})
	r.work()
	if all, dead := r.deadRows(p.dead["person-0"].KeyId); all != dead {
		t.Errorf("the old key has %d rows, %d dead", all, dead)
	}
	p.check()
}

// However slow a keyd is, what it commits is not wrapped under an epoch that
// has begun to drain.
func TestNoKeyUnderADyingEpoch(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	var h hooks
	store.fault = h.fault
	r.seal("someone", "trace")
	turned := make(chan struct{})
	h.once("update", func() {
		go func() {
			defer close(turned)
			if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
				t.Error(err)
			}
			r.stepTo(1, draining)
		}()
		<-turned
	})
	k := r.seal("late", "trace")
	for key := range r.rows("w\x00\x00\x00\x01D") {
		if strings.HasSuffix(key, string(k.KeyId)) {
			t.Fatal("a key was committed under the epoch that drains")
		}
	}
	if len(r.rows("w\x00\x00\x00\x02D")) != 1 {
		t.Error("the key is not under the open epoch")
	}
	r.work()
	if got := r.seal("late", "trace"); !bytes.Equal(got.Key, k.Key) {
		t.Error("another key")
	}
}

// A key that was carried over and is destroyed afterwards is final only with
// the epoch that it was carried to: a backup taken in between has it.
func TestGuaranteeBackupProof(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	p := r.populate(4)
	before := store.copyRows()
	p.destroy("person-0")
	r.turn()
	between := store.copyRows()
	p.destroy("person-1")
	r.closeEpoch(1)

	stages := func(request string, sanitised, final bool) {
		t.Helper()
		_, v := r.getReceipt(request)
		st := v.Stages()
		if !st.Sanitised.IsZero() != sanitised || !st.Final.IsZero() != final {
			t.Errorf("%s: stages %+v, want sanitised %v, final %v", request, st, sanitised, final)
		}
	}
	stages("destroy-person-0", true, true)
	stages("destroy-person-1", false, false)
	if got := p.opensAny(before, p.keys); len(got) != 0 {
		t.Errorf("the backup from before opens %q", got)
	}
	if got := p.opensAny(before, p.dead); len(got) != 0 {
		t.Errorf("the backup from before opens %q", got)
	}
	if got := fmt.Sprint(p.opensAny(between, p.dead)); got != "[person-1]" {
		t.Errorf("the backup in between opens %s, want person-1: its root lives", got)
	}

	r.turn()
	stages("destroy-person-1", true, false)
	r.closeEpoch(2)
	stages("destroy-person-1", true, true)
	if got := p.opensAny(between, p.dead); len(got) != 0 {
		t.Errorf("the backup in between opens %q after epoch 2 has closed", got)
	}
	if got := p.opensAny(store.copyRows(), p.dead); len(got) != 0 {
		t.Errorf("the store opens %q", got)
	}
	p.check()
}

// What a destruction stated once is said again with the same bytes, however
// far it has come.
func TestFirstAnswerIsRepeated(t *testing.T) {
	r, _, _ := newMemoryRig(t)
	r.seal("ann", "trace")
	first := r.destroy("ann", "r1")
	if st := r.verify(first).Stages(); !st.FinalBy.Equal(r.clock.Now().Truncate(time.Millisecond).Add((7*24+24+2+1)*time.Hour)) || st.FinalBasis != "local-root-file" {
		t.Errorf("final by %v on the basis %q", st.FinalBy, st.FinalBasis)
	}
	r.turn()
	r.closeEpoch(1)
	again := r.destroy("ann", "r1")
	if !bytes.Equal(first.Receipt, again.Receipt) || again.Repeated {
		t.Error("the repeated request was answered otherwise")
	}
	full, v := r.getReceipt("r1")
	if len(v.Entries) != 3 || full.Index != first.Index {
		t.Errorf("the full receipt has %d entries, of index %d", len(v.Entries), full.Index)
	}
	if again, _ := r.getReceipt("r1"); !bytes.Equal(again.Receipt, full.Receipt) {
		t.Error("the full receipt comes out differently")
	}
}

// Two keyds that turn the same epoch make one root.
func TestTwoWorkersMakeOneRoot(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	p := r.populate(5)
	other := r.another()
	var made []string
	var mu sync.Mutex
	var h hooks
	kms.KMS = rootLog{kms.KMS, func(id string) { mu.Lock(); made = append(made, id); mu.Unlock() }}
	kms.fault = h.fault
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := other.StepDuties(t.Context()); err != nil { // sees who has them
		t.Fatal(err)
	}
	// While the first makes its root, it is taken for gone.
	h.once("create", func() {
		r.clock.Advance(keys.BeatLapse + time.Second)
		for range 3 {
			if _, err := other.StepDuties(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	if again, err := r.StepDuties(t.Context()); again || err != nil {
		t.Errorf("the one that was too late: %v, %v", again, err)
	}
	if len(made) != 2 {
		t.Fatalf("a root was asked for %d times; the test needs two", len(made))
	}
	if _, err := r.StepDuties(t.Context()); err != nil {
		t.Error(err)
	}
	if root := r.epoch(2).RootId; made[0] != root || made[1] != root {
		t.Errorf("roots %q were made; epoch 2 has %s", made, root)
	}
	// Both go on, by turns, each taking the duties from the other.
	for n := 0; r.epoch(1).State != closed; n++ {
		if n > 200 {
			t.Fatalf("epoch 1 does not close: %v", r.epoch(1))
		}
		r.clock.Advance(20 * time.Minute)
		for _, k := range []*keys.Keys{r.Keys, other} {
			if err := k.Beat(t.Context()); err != nil {
				t.Error(err)
			}
			if _, err := k.StepDuties(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	if got := strings.Join(r.kinds(0), ", "); strings.Count(got, "epoch-opened 2") != 1 || strings.Count(got, "epoch-closed 1") != 1 {
		t.Errorf("the ledger says %s", got)
	}
	p.check()
}

// rootLog tells of the roots that are made.
type rootLog struct {
	keys.KMS
	made func(id string)
}

func (l rootLog) Create(ctx context.Context, epoch uint32, request keys.RootRequest) (string, error) {
	id, err := l.KMS.Create(ctx, epoch, request)
	if err == nil {
		l.made(id)
	}
	return id, err
}

// A holder that was taken for gone, and was not, writes nothing any more.
func TestFencing(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.populate(5)
	other := r.another()
	var h hooks
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := other.StepDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	store.fault = h.fault
	h.once("update", func() {
		r.clock.Advance(keys.BeatLapse + time.Second)
		if err := other.TakeDuties(t.Context()); err != nil {
			t.Error(err)
		}
	})
	before := store.copyRows()
	if again, err := r.StepDuties(t.Context()); again || err != nil {
		t.Errorf("the one that was taken for gone: %v, %v", again, err)
	}
	after := store.copyRows()
	for k, v := range after {
		if k[0] != 'U' && k[0] != 'A' && !bytes.Equal(before[k], v) {
			t.Errorf("it wrote a row of kind %c", k[0])
		}
	}
}

// Nor does it have the KMS do what cannot be undone.
func TestFencedFromTheKMS(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	r.populate(2)
	if err := r.TakeDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.turn()
	r.clock.Advance(3 * time.Hour) // through the soak
	if err := r.Beat(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := r.another()
	if _, err := other.StepDuties(t.Context()); err != nil { // sees who has them
		t.Fatal(err)
	}
	taken, scheduled := false, false
	kms.fault = func(op string) fault {
		switch op {
		case "unwrap": // for the verification
			if !taken {
				taken = true
				r.clock.Advance(keys.BeatLapse + time.Second)
				if err := other.TakeDuties(t.Context()); err != nil {
					t.Error(err)
				}
			}
		case "schedule":
			scheduled = true
		}
		return none
	}
	if again, err := r.StepDuties(t.Context()); again || err != nil || !taken {
		t.Errorf("the one that was taken for gone: %v, %v, taken for gone %v", again, err, taken)
	}
	if scheduled {
		t.Error("it has a root destroyed")
	}
}

// A holder that was taken for gone at whatever commit of what falls due retires
// no bucket, destroys nobody and sweeps nothing any more.
func TestFencingOfWhatIsDue(t *testing.T) {
	for n := 1; ; n++ {
		r, store, _ := newMemoryRig(t)
		r.retain("trace", day, day, keydv1.EndAction_END_ACTION_DESTROY)
		for _, s := range []string{"ann", "bob", "carl"} {
			r.seal(s, "trace")
		}
		r.want("hold", r.hold("ann", "h"), ok)
		due := destroyRequest("bob", "r1")
		due.NotBefore = timestamppb.New(r.clock.Now().Add(time.Hour))
		if _, err := r.DestroyKey(t.Context(), due); err != nil {
			t.Fatal(err)
		}
		if _, err := r.CreateTenant(t.Context(), "left", nil); err != nil {
			t.Fatal(err)
		}
		if _, err := r.ask(sealQuery("left", "zoe", "trace")); err != nil {
			t.Fatal(err)
		}
		r.clock.Advance(4 * day)
		if _, err := r.ConfirmClock(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := keys.MoveBuckets(t.Context(), r.Keys); err != nil {
			t.Fatal(err)
		}
		if _, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "left", RequestId: "r2", Reason: "test"}); err != nil {
			t.Fatal(err)
		}
		r.clock.Advance(25 * time.Hour)
		if _, err := r.ConfirmClock(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := r.TakeDuties(t.Context()); err != nil {
			t.Fatal(err)
		}
		other := r.another()
		if _, err := other.StepDuties(t.Context()); err != nil { // it sees that there is a holder
			t.Fatal(err)
		}
		var c commits
		var before map[string][]byte
		var over atomic.Bool
		c.at(n, func() {
			if over.Load() {
				return
			}
			r.clock.Advance(keys.BeatLapse + time.Second)
			if err := other.TakeDuties(t.Context()); err != nil {
				t.Error(err)
			}
			before = store.copyRows()
		})
		store.fault = c.fault
		_ = keys.WorkOnSubjects(t.Context(), r.Keys)
		over.Store(true)
		if before == nil {
			if n < 8 {
				t.Errorf("%d commits: the test has no point", n-1)
			}
			return
		}
		for k, v := range store.copyRows() {
			if k[0] != 'U' && k[0] != 'A' && !bytes.Equal(before[k], v) {
				t.Errorf("at commit %d: it wrote a row of kind %c", n, k[0])
			}
		}
		r.close()
	}
}

// commits counts the commits of a store, and stops at those that a test wants.
type commits struct {
	mu   sync.Mutex
	n    int
	stop map[int]func()
}

func (c *commits) at(n int, fn func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop == nil {
		c.stop = make(map[int]func())
	}
	c.stop[c.n+n] = fn
}

func (c *commits) fault(op string) fault {
	c.mu.Lock()
	c.n++
	fn := c.stop[c.n]
	c.mu.Unlock()
	if fn != nil {
		fn()
	}
	return none
}

// A first use that is about to commit when the epoch opens that follows its
// own is made again, under the open one.
func TestFirstUseMeetsTheOpening(t *testing.T) {
	r, store, _ := newMemoryRig(t)
	r.seal("someone", "trace")
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(2, preparing)
	var c commits
	store.fault = c.fault
	sealed, atCommit, opened := make(chan *keydv1.BlobKey), make(chan struct{}), make(chan struct{})
	// Two tenants get their KEKs, then the epoch opens.
	c.at(3, func() {
		c.at(1, func() {
			close(atCommit)
			<-opened
		})
		go func() {
			k, err := r.ask(sealQuery("acme", "late", "trace"))
			if err != nil {
				t.Error(err)
			}
			sealed <- k
		}()
		<-atCommit
	})
	if _, err := r.StepDuties(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.wantState(2, open)
	close(opened)
	k := <-sealed
	for key := range r.rows("w\x00\x00\x00\x01D") {
		if k != nil && strings.HasSuffix(key, string(k.KeyId)) {
			t.Fatal("a key was committed under the epoch that drains")
		}
	}
	r.work()
	if got := r.seal("late", "trace"); k == nil || !bytes.Equal(got.Key, k.Key) {
		t.Error("another key")
	}
}

// A tenant that another keyd makes just before the next epoch opens, after all
// tenants were looked through, has its KEK of it.
func TestTenantMeetsTheOpening(t *testing.T) {
	t.Run("begun while it is prepared", func(t *testing.T) {
		r, store, _ := newMemoryRig(t)
		other := r.another()
		if err := r.TakeDuties(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		r.stepTo(2, preparing)
		var c commits
		store.fault = c.fault
		c.at(3, func() {
			if _, err := other.CreateTenant(t.Context(), "late", nil); err != nil {
				t.Error(err)
			}
		})
		if _, err := r.StepDuties(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.wantState(2, open)
		if _, err := r.ask(sealQuery("late", "ann", "trace")); err != nil {
			t.Error(err)
		}
	})
	t.Run("begun before", func(t *testing.T) {
		r, store, kms := newMemoryRig(t)
		other := r.another()
		if err := r.TakeDuties(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		var c commits
		var h hooks
		kms.fault = h.fault
		atFlip, made, flipped := make(chan struct{}), make(chan struct{}), make(chan error)
		h.once("wrap", func() { // the other keyd wraps the tenant's KEK
			r.stepTo(2, preparing)
			c.at(3, func() {
				close(atFlip)
				<-made
			})
			store.fault = c.fault
			go func() {
				_, err := r.StepDuties(t.Context())
				flipped <- err
			}()
			<-atFlip
		})
		if _, err := other.CreateTenant(t.Context(), "late", nil); err != nil {
			t.Error(err)
		}
		close(made)
		if err := <-flipped; err != nil {
			t.Fatal(err)
		}
		r.wantState(2, open)
		if _, err := r.ask(sealQuery("late", "ann", "trace")); err != nil {
			t.Error(err)
		}
	})
}

// A KEK that was being fetched when its epoch drained is not kept.
func TestNoKEKOfADrainedEpochReturns(t *testing.T) {
	r, _, kms := newMemoryRig(t)
	p := r.populate(3)
	if _, err := r.TurnEpoch(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stepTo(1, draining)
	late := &lateUnwrap{KMS: kms.KMS, epoch: 1}
	kms.KMS = late
	r.clock.Advance(20 * time.Minute) // the lease of the KEKs is over
	late.hold()
	answer := make(chan error)
	go func() {
		_, err := r.ask(openQuery("acme", "person-0", "trace", p.keys["person-0"]))
		answer <- err
	}()
	<-late.holding
	r.stepTo(1, drained)
	r.work()
	close(late.release)
	if err := <-answer; err != nil {
		t.Errorf("the call that it was for: %v", err)
	}
	if n := r.HeldKEKs(1); n != 0 {
		t.Errorf("%d KEKs of the drained epoch are held", n)
	}
	p.check()
}
