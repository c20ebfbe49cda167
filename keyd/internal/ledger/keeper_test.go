package ledger_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

func newKeeper(t testing.TB, s *store, a ledger.Anchor) *ledger.Keeper {
	t.Helper()
	return keeperOf(t, s, a, signer(t, 1))
}

func keeperOf(t testing.TB, s *store, a ledger.Anchor, sign *ledger.Signer, past ...string) *ledger.Keeper {
	t.Helper()
	k, err := ledger.NewKeeper(ledger.KeeperOptions{
		View: s.View, Anchor: a, Signer: sign, PastKeys: past, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	must(t, "NewKeeper", err)
	return k
}

// initialised is a ledger with a genesis of two entries, and its anchor.
func initialised(t testing.TB) (*store, *anchortest.Memory, *ledger.Keeper) {
	t.Helper()
	s, m := newStore(t), anchortest.NewMemory()
	s.add(2)
	k := newKeeper(t, s, m)
	must(t, "Initialise", k.Initialise(context.Background()))
	return s, m, k
}

func wantAnchored(t testing.TB, k *ledger.Keeper, m *anchortest.Memory, size uint64) {
	t.Helper()
	o, err := m.Clone().Newest(context.Background())
	must(t, "Newest", err)
	if k.Anchored() != size || o.Size != size {
		t.Fatalf("the keeper says %d, the anchor holds %d, want %d", k.Anchored(), o.Size, size)
	}
}

func TestInitialise(t *testing.T) {
	s, m := newStore(t), anchortest.NewMemory()
	k := newKeeper(t, s, m)
	must(t, "Check of an empty ledger and an empty anchor", k.Check(t.Context()))
	s.add(2)

	// A crash between the first commit and the first Put: only the explicit
	// path goes on, as often as it takes.
	k = newKeeper(t, s, m)
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrAnchorMissing)
	wantErr(t, "Err", k.Err(), ledger.ErrAnchorMissing)
	for _, fault := range []anchortest.Fault{anchortest.Lost, anchortest.Persisted} {
		m.Inject = func(_ context.Context, op string) anchortest.Fault {
			if op == "put" {
				return fault
			}
			return anchortest.None
		}
		wantErr(t, "Initialise with a failing anchor", newKeeper(t, s, m).Initialise(t.Context()), ledger.ErrAnchorUnavailable)
	}
	m.Inject = nil
	k = newKeeper(t, s, m)
	must(t, "Initialise", k.Initialise(t.Context()))
	must(t, "Initialise again", k.Initialise(t.Context()))
	must(t, "Err", k.Err())
	wantAnchored(t, k, m, 2)
	s.add(1)
	must(t, "Initialise later, as a check", newKeeper(t, s, m).Initialise(t.Context()))
}

// An anchor that is lost, or another directory given by mistake, is never begun
// anew unless the operator says so.
func TestAnchorMissing(t *testing.T) {
	s, _, _ := initialised(t)
	s.add(1)
	empty := anchortest.NewMemory()
	k := newKeeper(t, s, empty)
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrAnchorMissing)
	wantErr(t, "Initialise", k.Initialise(t.Context()), ledger.ErrAnchorMissing)
	wantErr(t, "Advance", k.Advance(t.Context()), ledger.ErrAnchorMissing)
	wantErr(t, "WaitFor", k.WaitFor(t.Context(), 1), ledger.ErrAnchorMissing)
	if empty.Puts() != 0 {
		t.Fatal("something was written to it")
	}
	must(t, "Rebuild", k.Rebuild(t.Context()))
	must(t, "Err after Rebuild", k.Err())
	wantAnchored(t, k, empty, 3)
	must(t, "Audit", k.Audit(t.Context()))
}

func TestAnchorBehind(t *testing.T) {
	s, m, _ := initialised(t)
	for range 40 {
		s.add(100)
	}
	k := newKeeper(t, s, m)
	must(t, "Check", k.Check(t.Context()))
	wantAnchored(t, k, m, 4002)
	if n := m.Puts(); n < 4 || n > 6 {
		t.Errorf("4000 entries were put in %d calls", n)
	}
	must(t, "Audit", k.Audit(t.Context()))
	// Nothing new, nothing written.
	before := m.Puts()
	must(t, "Check", k.Check(t.Context()))
	must(t, "Advance", k.Advance(t.Context()))
	if m.Puts() != before {
		t.Error("a check of equals wrote to the anchor")
	}
}

// Large statements make small objects.
func TestObjectsAreBounded(t *testing.T) {
	s, m, k := initialised(t)
	st := receipt.Statement{
		Kind: receipt.Destroyed, Time: at(0), Tenant: "acme", Handle: make([]byte, 16), Scope: receipt.ScopePerson, Generation: 1,
		Existed: receipt.ExistedYes, Reason: "x", DrainedBy: at(60), Epoch: 1, Anchor: "file",
	}
	for i := range receipt.MaxListed {
		st.DeadKeys = append(st.DeadKeys, receipt.DeadKey{ClassNumber: uint32(i + 1), Generation: 1})
	}
	for range 100 {
		_, err := ledger.Append(s.r, at(1), []*receipt.Statement{&st})
		must(t, "Append", err)
	}
	must(t, "Advance", k.Advance(t.Context()))
	wantAnchored(t, k, m, 102)
	var from uint64
	for from < 102 {
		o, err := m.Get(t.Context(), from)
		must(t, "Get", err)
		enc, err := o.Encode()
		must(t, "Encode", err)
		if len(enc) > 1<<20+receipt.MaxStatement+4096 {
			t.Errorf("an object of %d bytes", len(enc))
		}
		from = o.Size
	}
	must(t, "Audit", k.Audit(t.Context()))
}

func TestStoreBehind(t *testing.T) {
	s, m, k := initialised(t)
	s.add(3)
	old := s.backup()
	must(t, "Advance", k.Advance(t.Context()))
	s.add(4)
	s.add(5)
	must(t, "Advance", k.Advance(t.Context()))
	want := s.backup()

	check := func(k *ledger.Keeper, what string, err error) {
		t.Helper()
		wantErr(t, what, err, ledger.ErrBehind)
		var behind *ledger.BehindError
		if !errors.As(err, &behind) || behind.Store != 5 || behind.Anchor != 14 || behind.Missing() != 9 {
			t.Fatalf("%s: %+v", what, behind)
		}
		wantErr(t, "Err", k.Err(), ledger.ErrBehind)
	}
	s.restore(old)
	restarted := newKeeper(t, s, m)
	check(restarted, "Check after a restart", restarted.Check(t.Context()))
	check(k, "Advance while running", k.Advance(t.Context()))
	wantErr(t, "WaitFor", k.WaitFor(t.Context(), 5), ledger.ErrBehind)

	// The anchor's mirror brings back what is missing, receipts and all.
	replay(t, s, restarted)
	must(t, "Check after the replay", restarted.Check(t.Context()))
	must(t, "Err", restarted.Err())
	must(t, "Check of the other", k.Check(t.Context()))
	sign := signer(t, 1)
	for i := range uint64(14) {
		a, err := ledger.Receipt(rows(want), sign, i)
		must(t, "Receipt", err)
		b, err := ledger.Receipt(s.r, sign, i)
		must(t, "Receipt", err)
		if !bytes.Equal(a, b) {
			t.Fatalf("another receipt of %d", i)
		}
	}
}

// replay gives the store what it lacks, in small steps, as one would who may be
// interrupted.
func replay(t testing.TB, s *store, k *ledger.Keeper) {
	t.Helper()
	done := errors.New("enough for now")
	for {
		var batch []ledger.Entry
		next := s.head().Size
		err := k.Missing(context.Background(), func(i uint64, e ledger.Entry) error {
			if i != next+uint64(len(batch)) {
				t.Fatalf("entry %d where %d is missing", i, next+uint64(len(batch)))
			}
			if batch = append(batch, e); len(batch) == 4 {
				return done
			}
			return nil
		})
		if err != nil && !errors.Is(err, done) {
			t.Fatalf("Missing: %v", err)
		}
		if len(batch) == 0 {
			return
		}
		s.mu.Lock()
		_, err = ledger.Replay(s.r, batch)
		s.mu.Unlock()
		must(t, "Replay", err)
	}
}

func TestForks(t *testing.T) {
	s, m, k := initialised(t)
	fork := s.clone()
	s.add(3)
	must(t, "Advance", k.Advance(t.Context()))
	for name, grow := range map[string]int{"shorter": 1, "as long": 3, "longer": 6} {
		t.Run(name, func(t *testing.T) {
			f := fork.clone()
			f.add(grow)
			k := newKeeper(t, f, m)
			wantErr(t, "Check", k.Check(t.Context()), ledger.ErrForked)
			// It is for ever, even when the store is put right.
			f.restore(s.backup())
			wantErr(t, "Check", k.Check(t.Context()), ledger.ErrForked)
			wantErr(t, "Advance", k.Advance(t.Context()), ledger.ErrForked)
			wantErr(t, "Initialise", k.Initialise(t.Context()), ledger.ErrForked)
			wantErr(t, "Rebuild", k.Rebuild(t.Context()), ledger.ErrForked)
			wantErr(t, "WaitFor", k.WaitFor(t.Context(), 1), ledger.ErrForked)
			k.Notify()
			wantErr(t, "Run", k.Run(t.Context()), ledger.ErrForked)
			wantErr(t, "Err", k.Err(), ledger.ErrForked)
		})
	}
	wantAnchored(t, k, m, 5)

	other, err := ledger.NewSigner(make([]byte, 32), ledger.Origin([16]byte{0xcd}))
	must(t, "NewSigner", err)
	wantErr(t, "Check with another origin", keeperOf(t, s, m, other).Check(t.Context()), ledger.ErrForked)
	wantErr(t, "Check with another key", keeperOf(t, s, m, signer(t, 9)).Check(t.Context()), ledger.ErrForked)
	must(t, "Check with the next key", keeperOf(t, s, m, signer(t, 9), signer(t, 1).VerifierKey()).Check(t.Context()))
}

// TestForkedWriters has two keyds, each with a store of its own since a point in
// time, upon one anchor: never do both have new entries covered.
func TestForkedWriters(t *testing.T) {
	for round := range 200 {
		s, m, _ := initialised(t)
		a, b := s, s.clone()
		ka, kb := newKeeper(t, a, m), newKeeper(t, b, m)
		must(t, "Check", ka.Check(t.Context()))
		must(t, "Check", kb.Check(t.Context()))
		a.add(1 + round%3)
		b.add(1 + round/3%3)
		// Stop both before they look at what is there, now and then.
		var gate sync.WaitGroup
		gate.Add(2)
		var puts atomic.Int32
		m.Inject = func(_ context.Context, op string) anchortest.Fault {
			if round%2 == 0 && op == "put" && puts.Add(1) <= 2 {
				gate.Done()
				gate.Wait()
			}
			return anchortest.None
		}
		var errA, errB error
		var wg sync.WaitGroup
		wg.Go(func() { errA = ka.Advance(t.Context()) })
		wg.Go(func() { errB = kb.Advance(t.Context()) })
		wg.Wait()
		if errA == nil && errB == nil {
			t.Fatalf("round %d: both histories are covered", round)
		}
		for _, err := range []error{errA, errB} {
			if err != nil && !errors.Is(err, ledger.ErrForked) && !errors.Is(err, ledger.ErrAnchorDamaged) {
				t.Fatalf("round %d: %v", round, err)
			}
		}
	}
}

// Two keyds on one store cut objects as they like.
func TestTwoKeepersOneStore(t *testing.T) {
	s, m, _ := initialised(t)
	var wg sync.WaitGroup
	for i := range 3 {
		k := newKeeper(t, s, m)
		must(t, "Check", k.Check(t.Context()))
		wg.Go(func() {
			for range 60 {
				h := s.add(1 + i)
				if err := k.Advance(t.Context()); err != nil {
					t.Errorf("Advance: %v", err)
					return
				}
				if k.Anchored() < h.Size {
					t.Errorf("anchored %d, want %d", k.Anchored(), h.Size)
				}
			}
		})
	}
	wg.Wait()
	k := newKeeper(t, s, m)
	must(t, "Check", k.Check(t.Context()))
	must(t, "Audit", k.Audit(t.Context()))
	wantAnchored(t, k, m, s.head().Size)
}

func TestDamagedAnchor(t *testing.T) {
	s, m, k := initialised(t)
	s.add(3)
	must(t, "Advance", k.Advance(t.Context()))
	s.add(3)
	must(t, "Advance", k.Advance(t.Context()))
	rewrite := func(size uint64, edit func(*ledger.Object)) *anchortest.Memory {
		c := m.Clone()
		c.Edit(size, func(b []byte) []byte {
			o, err := ledger.DecodeObject(b)
			must(t, "Decode", err)
			edit(&o)
			b, err = o.Encode()
			must(t, "Encode", err)
			return b
		})
		return c
	}
	// Whoever edits the mirror can make its checksums right, not its tree.
	statement := func(o *ledger.Object) { o.Entries[0].Statement = statement(t, 8) }
	salt := func(o *ledger.Object) { o.Entries[1].Salt = make([]byte, 32) }
	for what, edited := range map[string]*anchortest.Memory{"statement": rewrite(8, statement), "salt": rewrite(8, salt)} {
		bad := newKeeper(t, s, edited)
		wantErr(t, "Check of an edited "+what, bad.Check(t.Context()), ledger.ErrAnchorDamaged)
		wantErr(t, "Err", bad.Err(), ledger.ErrAnchorDamaged)
		wantErr(t, "Audit", bad.Audit(t.Context()), ledger.ErrAnchorDamaged)
	}
	// Older objects are looked at by Audit.
	edited := rewrite(5, statement)
	older := newKeeper(t, s, edited)
	must(t, "Check", older.Check(t.Context()))
	wantErr(t, "Audit of an edited older object", older.Audit(t.Context()), ledger.ErrAnchorDamaged)

	gap := m.Clone()
	gap.Edit(5, func([]byte) []byte { return nil })
	holed := newKeeper(t, s, gap)
	wantErr(t, "Audit of a gap", holed.Audit(t.Context()), ledger.ErrAnchorDamaged)

	torn := m.Clone()
	torn.Edit(8, func(b []byte) []byte { return b[:len(b)-1] })
	tornKeeper := newKeeper(t, s, torn)
	wantErr(t, "Check of a torn object", tornKeeper.Check(t.Context()), ledger.ErrAnchorDamaged)
	// It is put right: the verdict falls.
	torn.Edit(8, func([]byte) []byte {
		o, err := m.Newest(t.Context())
		must(t, "Newest", err)
		b, err := o.Encode()
		must(t, "Encode", err)
		return b
	})
	must(t, "Advance", tornKeeper.Advance(t.Context()))
	must(t, "Err", tornKeeper.Err())
}

// What this keeper has seen in the anchor must not vanish under it.
func TestAnchorRolledBackWhileRunning(t *testing.T) {
	s, m, k := initialised(t)
	s.add(3)
	must(t, "Advance", k.Advance(t.Context()))
	remove := func(size uint64) { m.Edit(size, func([]byte) []byte { return nil }) }
	remove(5)
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrAnchorDamaged)
	remove(2)
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrAnchorMissing)

	// Put on what is gone.
	s, m, k = initialised(t)
	m.Edit(2, func([]byte) []byte { return nil })
	s.add(1)
	wantErr(t, "Advance", k.Advance(t.Context()), ledger.ErrAnchorDamaged)
}

// Store and anchor rolled back together, under a keeper that saw more.
func TestBothRolledBackWhileRunning(t *testing.T) {
	s, m, k := initialised(t)
	old, oldAnchor := s.backup(), m.Clone()
	s.add(3)
	must(t, "Advance", k.Advance(t.Context()))
	s.restore(old)
	m.Edit(5, func([]byte) []byte { return nil })
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrBehind)
	// A keeper that starts afterwards cannot know: that is the guarantee's limit.
	must(t, "Check of a new keeper", newKeeper(t, s, oldAnchor).Check(t.Context()))
}

func TestDamagedStore(t *testing.T) {
	s, m, _ := initialised(t)
	s.add(3)
	for key := range s.r {
		if key[1] == 'h' {
			s.r[key] = make([]byte, 32)
		}
	}
	k := newKeeper(t, s, m)
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrDamaged)
	wantErr(t, "Err", k.Err(), ledger.ErrDamaged)
}

func TestWaitFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, m, k := initialised(t)
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { wantErr(t, "Run", k.Run(ctx), context.Canceled) })

		// While one Put is under way, many wait: the next serves them all.
		hold := make(chan struct{})
		var first atomic.Bool
		m.Inject = func(_ context.Context, op string) anchortest.Fault {
			if op == "put" && first.CompareAndSwap(false, true) {
				<-hold
			}
			return anchortest.None
		}
		var waiters sync.WaitGroup
		wait := func() {
			size := s.add(1).Size
			waiters.Go(func() {
				if err := k.WaitFor(t.Context(), size); err != nil {
					t.Errorf("WaitFor(%d): %v", size, err)
				}
				if k.Anchored() < size {
					t.Errorf("WaitFor(%d) returned at %d", size, k.Anchored())
				}
			})
		}
		before := m.Puts()
		wait()
		synctest.Wait()
		for range 50 {
			wait()
		}
		synctest.Wait()
		if k.Anchored() != 2 {
			t.Fatalf("anchored %d while the first Put is under way", k.Anchored())
		}
		close(hold)
		waiters.Wait()
		if n := m.Puts() - before; n != 2 {
			t.Errorf("51 waiters took %d Puts, want 2", n)
		}
		must(t, "WaitFor of what is covered", k.WaitFor(t.Context(), 2))
		cancel()
		run.Wait()
	})
}

func TestWaitForAnchorDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, m, k := initialised(t)
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { wantErr(t, "Run", k.Run(ctx), context.Canceled) })
		var attempts atomic.Int32
		var up atomic.Bool
		m.Inject = func(context.Context, string) anchortest.Fault {
			attempts.Add(1)
			if up.Load() {
				return anchortest.None
			}
			return anchortest.Lost
		}
		size := s.add(1).Size
		short, stop := context.WithTimeout(t.Context(), 5*time.Second)
		err := k.WaitFor(short, size)
		stop()
		wantErr(t, "WaitFor with the anchor down", err, context.DeadlineExceeded)
		wantErr(t, "WaitFor with the anchor down", err, ledger.ErrAnchorUnavailable)
		wantErr(t, "Last", k.Last(), ledger.ErrAnchorUnavailable)
		must(t, "Err: keyd may serve what needs no anchor", k.Err())
		if n := attempts.Load(); n < 3 || n > 12 {
			t.Errorf("%d attempts in five seconds", n)
		}
		// However often it is asked, it does not try more often.
		before := attempts.Load()
		for range 1000 {
			k.Notify()
			time.Sleep(10 * time.Millisecond)
		}
		if n := attempts.Load() - before; n > 5 {
			t.Errorf("%d attempts in the next ten seconds", n)
		}
		up.Store(true)
		must(t, "WaitFor once it is up again", k.WaitFor(t.Context(), size))
		must(t, "Last", k.Last())
		cancel()
		run.Wait()
	})
}

// Run compares now and then without being asked.
func TestRunChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, k := initialised(t)
		old := s.backup()
		s.add(1)
		must(t, "Advance", k.Advance(t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { wantErr(t, "Run", k.Run(ctx), context.Canceled) })
		s.restore(old)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantErr(t, "Err", k.Err(), ledger.ErrBehind)
		cancel()
		run.Wait()
	})
}

// An anchor that hangs does not hang those who wait with a deadline.
func TestAnchorHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, m, k := initialised(t)
		m.Inject = func(ctx context.Context, op string) anchortest.Fault {
			<-ctx.Done()
			return anchortest.Lost
		}
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { wantErr(t, "Run", k.Run(ctx), context.Canceled) })
		size := s.add(1).Size
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		wantErr(t, "WaitFor", k.WaitFor(short, size), context.DeadlineExceeded)
		wantErr(t, "Check while another has its turn", k.Check(short), context.DeadlineExceeded)
		cancel()
		run.Wait()
	})
}

func TestMissingVerifies(t *testing.T) {
	s, m, k := initialised(t)
	old := s.backup()
	s.add(4)
	must(t, "Advance", k.Advance(t.Context()))
	s.add(4)
	must(t, "Advance", k.Advance(t.Context()))
	s.restore(old)

	edit := func(size uint64) *anchortest.Memory {
		c := m.Clone()
		c.Edit(size, func(b []byte) []byte {
			o, err := ledger.DecodeObject(b)
			must(t, "Decode", err)
			o.Entries[0].Statement = statement(t, 8)
			b, err = o.Encode()
			must(t, "Encode", err)
			return b
		})
		return c
	}
	collect := func(m *anchortest.Memory) (seen []uint64, err error) {
		err = newKeeper(t, s, m).Missing(t.Context(), func(i uint64, _ ledger.Entry) error {
			seen = append(seen, i)
			return nil
		})
		return seen, err
	}
	seen, err := collect(m)
	must(t, "Missing", err)
	if !reflect.DeepEqual(seen, []uint64{2, 3, 4, 5, 6, 7, 8, 9}) {
		t.Errorf("missing %v", seen)
	}
	seen, err = collect(edit(10))
	wantErr(t, "Missing with a later object edited", err, ledger.ErrAnchorDamaged)
	if len(seen) != 4 {
		t.Errorf("%v was handed out", seen)
	}
	seen, err = collect(edit(6))
	wantErr(t, "Missing with the next object edited", err, ledger.ErrForked)
	if len(seen) != 0 {
		t.Errorf("%v was handed out", seen)
	}
	stop := errors.New("stop")
	err = newKeeper(t, s, m).Missing(t.Context(), func(uint64, ledger.Entry) error { return stop })
	if err != stop {
		t.Errorf("Missing returned %v for fn's error", err)
	}
}

func TestNewKeeperNeedsItsParts(t *testing.T) {
	s, m := newStore(t), anchortest.NewMemory()
	for _, o := range []ledger.KeeperOptions{
		{Anchor: m, Signer: signer(t, 1)},
		{View: s.View, Signer: signer(t, 1)},
		{View: s.View, Anchor: m},
		{View: s.View, Anchor: m, Signer: signer(t, 1), PastKeys: []string{"x"}},
	} {
		if _, err := ledger.NewKeeper(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// forgetful acknowledges what it does not keep.
type forgetful struct{ *anchortest.Memory }

func (forgetful) Put(context.Context, ledger.Object) error { return nil }

func TestAnchorForgets(t *testing.T) {
	s, m, _ := initialised(t)
	s.add(1)
	k := newKeeper(t, s, forgetful{m})
	wantErr(t, "Check", k.Check(t.Context()), ledger.ErrAnchorDamaged)
	if k.Anchored() != 2 {
		t.Fatalf("anchored %d", k.Anchored())
	}
}

// TestTerms: of two keepers, that of the later term goes on, and nothing of the
// other's is covered that the later one has not seen.
func TestTerms(t *testing.T) {
	s, m, one := initialised(t)
	if left, err := one.Enter(t.Context(), "one", false, anyTerm); err != nil || !left {
		t.Fatalf("the first: %v, %v", left, err)
	}
	must(t, "Check", one.Check(t.Context()))
	two := newKeeper(t, s, m)
	if _, err := two.Enter(t.Context(), "two", false, anyTerm); err == nil {
		t.Fatal("a term was entered without a check")
	}
	must(t, "Check", two.Check(t.Context()))
	if left, err := two.Enter(t.Context(), "two", false, anyTerm); err != nil || left {
		t.Fatalf("while the first has not left: %v, %v", left, err)
	}
	must(t, "Leave, too late", one.Leave(t.Context()))
	must(t, "Check of the second", two.Check(t.Context()))
	size := one.Anchored()
	s.add(1)
	if err := one.Advance(t.Context()); !errors.Is(err, ledger.ErrSuperseded) || one.Anchored() != size {
		t.Errorf("Advance of the first: %v, covers %d", err, one.Anchored())
	}
	for range 2 {
		if err := one.Check(t.Context()); !errors.Is(err, ledger.ErrSuperseded) || !errors.Is(one.Err(), ledger.ErrSuperseded) {
			t.Errorf("Check of the first: %v, verdict %v", err, one.Err())
		}
	}
	one.Notify()
	if err := one.Run(t.Context()); !errors.Is(err, ledger.ErrSuperseded) {
		t.Errorf("Run of the first: %v", err)
	}
	must(t, "Check of the second", two.Check(t.Context()))
	must(t, "Leave", two.Leave(t.Context()))
	three := newKeeper(t, s, m)
	must(t, "Check of the third", three.Check(t.Context()))
	if left, err := three.Enter(t.Context(), "three", false, anyTerm); err != nil || !left {
		t.Errorf("after the second has left: %v, %v", left, err)
	}
}

// TestTermsWithFaults: a term that may have been entered is entered once.
func TestTermsWithFaults(t *testing.T) {
	for _, fault := range []anchortest.Fault{anchortest.Lost, anchortest.Persisted} {
		for failing := range 3 {
			_, m, k := initialised(t)
			calls := 0
			m.Inject = func(_ context.Context, op string) anchortest.Fault {
				if op != "enter" {
					return anchortest.None
				}
				if calls++; calls == failing+1 {
					return fault
				}
				return anchortest.None
			}
			if _, err := k.Enter(t.Context(), "one", false, anyTerm); (err != nil) != (failing < 2) {
				t.Errorf("call %d fails (%d): %v", failing, fault, err)
			}
			if err := k.Check(t.Context()); failing == 2 && !errors.Is(err, ledger.ErrAnchorUnavailable) {
				t.Errorf("a check that could not see the term: %v", err)
			}
			if failing < 2 {
				_, err := k.Enter(t.Context(), "one", false, anyTerm)
				must(t, "Enter again", err)
			}
			must(t, "Check", k.Check(t.Context()))
			if last, err := m.Enter(t.Context(), ledger.Term{}); err != nil || last != (ledger.Term{Number: 1, Holder: "one"}) {
				t.Errorf("the newest term: %v, %v", last, err)
			}
		}
	}
}

// TestTermsGone: an anchor from which terms were taken is not trusted.
func TestTermsGone(t *testing.T) {
	s, m, k := initialised(t)
	older := m.Clone()
	_, err := k.Enter(t.Context(), "one", false, anyTerm)
	must(t, "Enter", err)
	rolled := &switched{Anchor: m}
	two := newKeeper(t, s, rolled)
	must(t, "Check", two.Check(t.Context()))
	_, err = two.Enter(t.Context(), "two", false, anyTerm)
	must(t, "Enter", err)
	rolled.Anchor = older
	if err := two.Check(t.Context()); !errors.Is(err, ledger.ErrAnchorDamaged) || two.Err() == nil {
		t.Errorf("Check: %v, verdict %v", err, two.Err())
	}
}

// switched is an anchor in whose place another one is put.
type switched struct{ ledger.Anchor }

func anyTerm(_, _ ledger.Term) error { return nil }
