// Package anchortest is the conformance suite that every ledger.Anchor passes,
// with an anchor in memory and ledgers to fill anchors from.
package anchortest

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"

	"lethe/keyd/internal/ledger"
)

// Place is where an anchor under test keeps its objects.
type Place interface {
	// Open returns another instance on the same objects, as another process
	// would have it. The suite closes it.
	Open(t *testing.T) ledger.Anchor
	// Edit changes the stored bytes of the object of that size; nil removes it.
	Edit(t *testing.T, size uint64, edit func([]byte) []byte)
}

// Run tests the anchors that newPlace makes, each on a place of its own.
func Run(t *testing.T, newPlace func(t *testing.T) Place) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Place)
	}{
		{"Empty", testEmpty},
		{"OrderAndWalk", testOrderAndWalk},
		{"FarApart", testFarApart},
		{"WriteOnce", testWriteOnce},
		{"OverlappingCuts", testOverlappingCuts},
		{"Forked", testForked},
		{"ForkedBySize", testForkedBySize},
		{"OtherOrigin", testOtherOrigin},
		{"Gap", testGap},
		{"Malformed", testMalformed},
		{"Reopen", testReopen},
		{"ConcurrentSame", testConcurrentSame},
		{"ConcurrentCuts", testConcurrentCuts},
		{"ConcurrentForks", testConcurrentForks},
		{"OpenWhileFirst", testOpenWhileFirst},
		{"NewestNeverGoesBack", testNewestNeverGoesBack},
		{"Terms", testTerms},
		{"ConcurrentTerms", testConcurrentTerms},
		{"Damage", testDamage},
		{"Context", testContext},
		{"Domain", testDomain},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, newPlace(t)) })
	}
}

func open(t *testing.T, p Place) ledger.Anchor {
	t.Helper()
	a := p.Open(t)
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return a
}

func put(t *testing.T, a ledger.Anchor, o ledger.Object) {
	t.Helper()
	if err := a.Put(t.Context(), o); err != nil {
		t.Fatalf("Put of [%d, %d): %v", o.From, o.Size, err)
	}
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: got %v, want %v", what, err, want)
	}
}

func wantNewest(t *testing.T, a ledger.Anchor, want ledger.Object) {
	t.Helper()
	o, err := a.Newest(t.Context())
	if err != nil {
		t.Fatalf("Newest: %v", err)
	}
	wantObject(t, o, want)
}

func wantObject(t *testing.T, got, want ledger.Object) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got object [%d, %d), want [%d, %d), or its content differs", got.From, got.Size, want.From, want.Size)
	}
}

// walk reads the mirror from zero and checks that it has every entry of h up to size.
func walk(t *testing.T, a ledger.Anchor, h *History, size uint64) {
	t.Helper()
	var at uint64
	for {
		o, err := a.Get(t.Context(), at)
		if errors.Is(err, ledger.ErrNoObject) {
			break
		}
		if err != nil {
			t.Fatalf("Get(%d): %v", at, err)
		}
		if o.From > at || o.Size <= at {
			t.Fatalf("Get(%d): object [%d, %d) does not hold entry %d", at, o.From, o.Size, at)
		}
		wantObject(t, o, h.Object(o.From, o.Size))
		at = o.Size
	}
	if at != size {
		t.Fatalf("the walk ended at %d, want %d", at, size)
	}
}

func testEmpty(t *testing.T, p Place) {
	a := open(t, p)
	_, err := a.Newest(t.Context())
	wantErr(t, "Newest", err, ledger.ErrNoObject)
	_, err = a.Get(t.Context(), 0)
	wantErr(t, "Get(0)", err, ledger.ErrNoObject)
	_, err = a.Get(t.Context(), ledger.MaxSize)
	wantErr(t, "Get(MaxSize)", err, ledger.ErrNoObject)
}

func testOrderAndWalk(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	var at uint64
	for _, n := range []int{1, 1, 3, 95, 900, 1, 99, 1000} {
		size := h.Grow(n)
		o := h.Object(at, size)
		put(t, a, o)
		wantNewest(t, a, o)
		at = size
	}
	walk(t, a, h, at)
	// Get from between sizes, from a size, and from beyond.
	for _, c := range []struct{ from, size uint64 }{{0, 1}, {1, 2}, {2, 5}, {3, 5}, {4, 5}, {5, 100}, {99, 100}, {100, 1000}, {999, 1000}, {1000, 1001}, {1001, 1100}, {1100, 2100}, {2099, 2100}} {
		o, err := a.Get(t.Context(), c.from)
		if err != nil || o.Size != c.size {
			t.Fatalf("Get(%d) = size %d, %v; want size %d", c.from, o.Size, err, c.size)
		}
	}
	_, err := a.Get(t.Context(), at)
	wantErr(t, "Get(newest)", err, ledger.ErrNoObject)
}

// testFarApart has sizes that differ in every digit, which names must order.
func testFarApart(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	for h.Grow(1000) < 12_000 {
	}
	sizes := []uint64{9, 10, 99, 100, 101, 999, 1000, 1001, 1999, 2000, 9999, 10_000, 10_001, 12_000}
	var at uint64
	for _, s := range sizes {
		put(t, a, h.Object(at, s))
		at = s
	}
	wantNewest(t, a, h.Object(10_001, 12_000))
	walk(t, a, h, at)
}

func testWriteOnce(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	h.Grow(3)
	o := h.Object(0, 3)
	put(t, a, o)
	put(t, a, o)
	put(t, open(t, p), o)
	h.Grow(2)
	put(t, a, h.Object(3, 5))
	put(t, a, o) // a late repeat, below the newest
	wantNewest(t, a, h.Object(3, 5))
	walk(t, a, h, 5)
}

func testOverlappingCuts(t *testing.T, p Place) {
	a, b, h := open(t, p), open(t, p), NewHistory(t, 1)
	h.Grow(20)
	put(t, a, h.Object(0, 10))
	put(t, b, h.Object(0, 12))
	put(t, a, h.Object(10, 15))
	put(t, b, h.Object(0, 15)) // same history, cut elsewhere
	put(t, a, h.Object(12, 20))
	put(t, b, h.Object(15, 18)) // smaller than the newest
	wantNewest(t, b, h.Object(12, 20))
	walk(t, b, h, 20)
	o, err := b.Get(t.Context(), 14)
	if err != nil {
		t.Fatal(err)
	}
	wantObject(t, o, h.Object(10, 15)) // the first that was written stays
}

func testForked(t *testing.T, p Place) {
	a, h, fork := open(t, p), NewHistory(t, 1), NewHistory(t, 1)
	h.Grow(5)
	fork.Grow(5)
	put(t, a, h.Object(0, 5))
	wantErr(t, "Put of a fork", a.Put(t.Context(), fork.Object(0, 5)), ledger.ErrForked)
	wantErr(t, "Put of a fork by another instance", open(t, p).Put(t.Context(), fork.Object(0, 5)), ledger.ErrForked)
	wantNewest(t, a, h.Object(0, 5))
}

// testForkedBySize: an object that contradicts a greater one, or smaller ones, is
// not written, though nothing is there under its own size.
func testForkedBySize(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	h.Grow(4)
	fork := h.Fork(t)
	h.Grow(6)
	fork.Grow(6)
	put(t, a, h.Object(0, 4))
	put(t, a, h.Object(4, 8))
	for _, b := range []ledger.Anchor{a, open(t, p)} {
		for _, size := range []uint64{5, 7, 9, 10} {
			wantErr(t, "Put of a fork", b.Put(t.Context(), fork.Object(4, size)), ledger.ErrForked)
		}
		wantErr(t, "Put of a fork from the start", b.Put(t.Context(), fork.Object(0, 10)), ledger.ErrForked)
		wantErr(t, "Put of a fork, cut early", b.Put(t.Context(), fork.Object(0, 6)), ledger.ErrForked)
	}
	wantNewest(t, a, h.Object(4, 8))
	put(t, a, h.Object(4, 6)) // a late one of the same history
	put(t, a, h.Object(4, 10))
	walk(t, a, h, 10)
}

func testOtherOrigin(t *testing.T, p Place) {
	a, h, other := open(t, p), NewHistory(t, 1), NewHistory(t, 2)
	h.Grow(5)
	other.Grow(9)
	put(t, a, h.Object(0, 5))
	for _, b := range []ledger.Anchor{a, open(t, p)} {
		wantErr(t, "Put of another ledger", b.Put(t.Context(), other.Object(0, 9)), ledger.ErrForked)
		wantErr(t, "Put of another ledger on top", b.Put(t.Context(), other.Object(5, 9)), ledger.ErrForked)
	}
	wantNewest(t, a, h.Object(0, 5))
}

func testGap(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	h.Grow(10)
	wantErr(t, "Put upon nothing", a.Put(t.Context(), h.Object(4, 10)), ledger.ErrAnchorDamaged)
	put(t, a, h.Object(0, 4))
	wantErr(t, "Put with a gap", a.Put(t.Context(), h.Object(5, 10)), ledger.ErrAnchorDamaged)
	wantErr(t, "Put from no object's size", a.Put(t.Context(), h.Object(3, 10)), ledger.ErrAnchorDamaged)
	wantNewest(t, a, h.Object(0, 4))
}

func testMalformed(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	h.Grow(6)
	for name, spoil := range map[string]func(*ledger.Object){
		"no entries":          func(o *ledger.Object) { o.From, o.Entries = o.Size, nil },
		"an entry too few":    func(o *ledger.Object) { o.Entries = o.Entries[1:] },
		"an entry too many":   func(o *ledger.Object) { o.Entries = append(o.Entries, o.Entries[0]) },
		"another size":        func(o *ledger.Object) { o.Size++; o.Entries = append(o.Entries, o.Entries[0]) },
		"no checkpoint":       func(o *ledger.Object) { o.Checkpoint = nil },
		"checkpoint cut":      func(o *ledger.Object) { o.Checkpoint = o.Checkpoint[:20] },
		"a short salt":        func(o *ledger.Object) { o.Entries[0].Salt = o.Entries[0].Salt[1:] },
		"an empty statement":  func(o *ledger.Object) { o.Entries[0].Statement = nil },
		"an impossible group": func(o *ledger.Object) { o.Entries[5].TreeSize = 5 },
	} {
		o := h.Object(0, 6)
		spoil(&o)
		wantErr(t, "Put with "+name, a.Put(t.Context(), o), ledger.ErrAnchorDamaged)
	}
	_, err := a.Newest(t.Context())
	wantErr(t, "Newest", err, ledger.ErrNoObject)
}

func testReopen(t *testing.T, p Place) {
	h := NewHistory(t, 1)
	var at uint64
	for range 5 {
		a := p.Open(t)
		size := h.Grow(2)
		put(t, a, h.Object(at, size))
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		at = size
		b := open(t, p)
		wantNewest(t, b, h.Object(size-2, size))
		walk(t, b, h, size)
	}
}

func testConcurrentSame(t *testing.T, p Place) {
	h := NewHistory(t, 1)
	h.Grow(4)
	o := h.Object(0, 4)
	parallel(t, 8, func(i int) {
		a := open(t, p)
		for range 4 {
			if err := a.Put(t.Context(), o); err != nil {
				t.Errorf("Put: %v", err)
			}
			if got, err := a.Newest(t.Context()); err != nil || !reflect.DeepEqual(got, o) {
				t.Errorf("Newest after Put: size %d, %v", got.Size, err)
			}
		}
	})
}

// testConcurrentCuts has several writers of one history, each from the newest
// object that it sees to a size of its own.
func testConcurrentCuts(t *testing.T, p Place) {
	const size = 400
	h := NewHistory(t, 1)
	h.Grow(size)
	var mu sync.Mutex // h is not safe for concurrent use
	parallel(t, 4, func(i int) {
		a := open(t, p)
		for {
			var from uint64
			switch o, err := a.Newest(t.Context()); {
			case err == nil:
				from = o.Size
			case !errors.Is(err, ledger.ErrNoObject):
				t.Errorf("Newest: %v", err)
				return
			}
			if from == size {
				return
			}
			mu.Lock()
			o := h.Object(from, min(size, from+7+5*uint64(i)))
			mu.Unlock()
			if err := a.Put(t.Context(), o); err != nil {
				t.Errorf("Put of [%d, %d): %v", o.From, o.Size, err)
				return
			}
			if got, err := a.Get(t.Context(), o.Size-1); err != nil || got.Size != o.Size {
				t.Errorf("Get(%d) after Put: size %d, %v", o.Size-1, got.Size, err)
				return
			}
		}
	})
	walk(t, open(t, p), h, size)
}

func testConcurrentForks(t *testing.T, p Place) {
	const writers = 6
	forks := make([]*History, writers)
	objects := make([]ledger.Object, writers)
	for i := range forks {
		forks[i] = NewHistory(t, 1)
		forks[i].Grow(3)
		objects[i] = forks[i].Object(0, 3)
	}
	errs := make([]error, writers)
	parallel(t, writers, func(i int) { errs[i] = open(t, p).Put(t.Context(), objects[i]) })
	won := -1
	for i, err := range errs {
		switch {
		case err == nil && won >= 0:
			t.Fatalf("two forks were written under one size")
		case err == nil:
			won = i
		default:
			wantErr(t, "Put of a losing fork", err, ledger.ErrForked)
		}
	}
	if won < 0 {
		t.Fatal("no fork was written")
	}
	wantNewest(t, open(t, p), objects[won])
}

// testOpenWhileFirst opens an anchor over and over while its first object is put:
// no moment of that looks like damage.
func testOpenWhileFirst(t *testing.T, p Place) {
	h := NewHistory(t, 1)
	h.Grow(1)
	o := h.Object(0, 1)
	first := open(t, p)
	done := make(chan struct{})
	var openers sync.WaitGroup
	for range 2 {
		openers.Go(func() {
			for {
				a := open(t, p)
				if _, err := a.Newest(t.Context()); err != nil && !errors.Is(err, ledger.ErrNoObject) {
					t.Errorf("Newest: %v", err)
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	if err := first.Put(t.Context(), o); err != nil {
		t.Errorf("Put: %v", err)
	}
	close(done)
	openers.Wait()
	wantNewest(t, open(t, p), o)
}

func testNewestNeverGoesBack(t *testing.T, p Place) {
	const size = 150
	h := NewHistory(t, 1)
	h.Grow(size)
	objects := make([]ledger.Object, size)
	for i := range objects {
		objects[i] = h.Object(uint64(i), uint64(i)+1)
	}
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 3 {
		a := open(t, p)
		readers.Go(func() {
			var at uint64
			for {
				select {
				case <-done:
					return
				default:
				}
				o, err := a.Newest(t.Context())
				if err != nil && !(at == 0 && errors.Is(err, ledger.ErrNoObject)) {
					t.Errorf("Newest: %v", err)
					return
				}
				if o.Size < at {
					t.Errorf("Newest went from %d back to %d", at, o.Size)
					return
				}
				at = o.Size
			}
		})
	}
	a := open(t, p)
	for _, o := range objects {
		put(t, a, o)
	}
	close(done)
	readers.Wait()
}

// testDamage truncates an object at every length and flips a bit of every byte.
func enter(t *testing.T, a ledger.Anchor, term, want ledger.Term) {
	t.Helper()
	if got, err := a.Enter(t.Context(), term); err != nil || got != want {
		t.Fatalf("Enter(%v) = %v, %v; want %v", term, got, err, want)
	}
}

func testTerms(t *testing.T, p Place) {
	a, b, h := open(t, p), open(t, p), NewHistory(t, 1)
	h.Grow(3)
	enter(t, a, ledger.Term{}, ledger.Term{})
	put(t, a, h.Object(0, 3))
	enter(t, a, ledger.Term{}, ledger.Term{})
	first, second, left := ledger.Term{Number: 1, Holder: "a"}, ledger.Term{Number: 2, Holder: "0f-b"}, ledger.Term{Number: 3}
	enter(t, a, first, first)
	enter(t, a, first, first)
	enter(t, b, ledger.Term{}, first)
	enter(t, b, ledger.Term{Number: 1, Holder: "b"}, first)
	enter(t, b, second, second)
	enter(t, a, ledger.Term{}, second)
	enter(t, a, first, second)
	enter(t, a, ledger.Term{Number: 2}, second) // a late leave
	enter(t, b, left, left)
	enter(t, open(t, p), ledger.Term{}, left)
	wantNewest(t, a, h.Object(0, 3))
	walk(t, a, h, 3)

	_, err := a.Enter(t.Context(), ledger.Term{Number: 5, Holder: "a"})
	wantErr(t, "Enter of a term too far", err, ledger.ErrAnchorDamaged)
	for _, bad := range []ledger.Term{{Number: ledger.MaxTerm + 1}, {Number: 4, Holder: "A"}, {Number: 4, Holder: "a\nb"}, {Number: 4, Holder: strings.Repeat("a", ledger.MaxHolder+1)}} {
		if _, err := a.Enter(t.Context(), bad); err == nil {
			t.Fatalf("Enter(%v) succeeded", bad)
		}
	}
	// More of them than one page of a listing has.
	for n := uint64(4); n < 1030; n++ {
		enter(t, a, ledger.Term{Number: n, Holder: "a"}, ledger.Term{Number: n, Holder: "a"})
	}
	enter(t, open(t, p), ledger.Term{}, ledger.Term{Number: 1029, Holder: "a"})
	enter(t, b, ledger.Term{}, ledger.Term{Number: 1029, Holder: "a"})
}

// testConcurrentTerms: of those who enter one term, one does, and all see who.
func testConcurrentTerms(t *testing.T, p Place) {
	const n = 8
	var got [n]ledger.Term
	var errs [n]error
	var wg sync.WaitGroup
	for i := range n {
		a := open(t, p)
		wg.Go(func() { got[i], errs[i] = a.Enter(t.Context(), ledger.Term{Number: 1, Holder: strconv.Itoa(i)}) })
	}
	wg.Wait()
	for i := range n {
		if errs[i] != nil || got[i] != got[0] || got[i].Number != 1 {
			t.Errorf("%d: %v, %v; the first: %v", i, got[i], errs[i], got[0])
		}
	}
}

func testDamage(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	h.Grow(4)
	put(t, a, h.Object(0, 2))
	put(t, a, h.Object(2, 4))
	var original []byte
	p.Edit(t, 4, func(b []byte) []byte {
		original = bytes.Clone(b)
		return b
	})
	check := func(what string, at int, edited []byte) {
		t.Helper()
		p.Edit(t, 4, func([]byte) []byte { return edited })
		if _, err := a.Newest(t.Context()); !errors.Is(err, ledger.ErrAnchorDamaged) {
			t.Fatalf("Newest, %s at %d: %v", what, at, err)
		}
		if _, err := a.Get(t.Context(), 2); !errors.Is(err, ledger.ErrAnchorDamaged) {
			t.Fatalf("Get, %s at %d: %v", what, at, err)
		}
	}
	for i := range original {
		check("truncated", i, original[:i:i])
		b := bytes.Clone(original)
		b[i] ^= 1 << (i % 8)
		check("a bit flipped", i, b)
	}
	check("a byte appended", len(original), append(bytes.Clone(original), 0))
	// What is there in its place is whole, but another object.
	var first []byte
	p.Edit(t, 2, func(b []byte) []byte {
		first = bytes.Clone(b)
		return b
	})
	check("another object", 0, first)
	wantErr(t, "Put upon damage", a.Put(t.Context(), h.Object(2, 4)), ledger.ErrAnchorDamaged)

	p.Edit(t, 4, func([]byte) []byte { return original })
	wantNewest(t, a, h.Object(2, 4))
	// A missing one in the middle shows as a gap when something is put on it.
	p.Edit(t, 2, func([]byte) []byte { return nil })
	o, err := a.Get(t.Context(), 0)
	if err != nil || o.From == 0 {
		t.Fatalf("Get(0) without the first object: [%d, %d), %v", o.From, o.Size, err)
	}
	h.Grow(1)
	wantErr(t, "Put upon a missing object", a.Put(t.Context(), h.Object(2, 5)), ledger.ErrAnchorDamaged)
}

func testContext(t *testing.T, p Place) {
	a, h := open(t, p), NewHistory(t, 1)
	h.Grow(1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, "Put", a.Put(ctx, h.Object(0, 1)), context.Canceled)
	_, err := a.Newest(ctx)
	wantErr(t, "Newest", err, context.Canceled)
	_, err = a.Get(ctx, 0)
	wantErr(t, "Get", err, context.Canceled)
}

func testDomain(t *testing.T, p Place) {
	code, description := open(t, p).Domain()
	if code == "" || len(code) > 64 || description == "" {
		t.Fatalf("Domain() = %q, %q", code, description)
	}
	for _, c := range code {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' {
			t.Fatalf("Domain code %q is not a code", code)
		}
	}
}

func parallel(t *testing.T, n int, fn func(i int)) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { fn(i) })
	}
	wg.Wait()
}
