package sdk

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

func testKey(i int) leaseKey {
	return leaseKey{tenant: "t", subject: fmt.Sprint(i), class: "c", purpose: keydv1.Purpose_PURPOSE_SEAL}
}

// The table is a map, whatever the order of changes.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab := newTable(rapid.IntRange(1, 40).Draw(t, "size"))
		model := make(map[leaseKey]*lease)
		for range 200 {
			k := testKey(rapid.IntRange(0, 60).Draw(t, "key"))
			switch l := model[k]; {
			case l == nil:
				l = &lease{key: k}
				tab.put(l)
				model[k] = l
			default:
				tab.remove(l)
				delete(model, k)
			}
			for i := range 61 {
				k := testKey(i)
				if got := tab.get(&k); got != model[k] {
					t.Fatalf("key %d: got %p, want %p", i, got, model[k])
				}
			}
		}
		tab.remove(&lease{key: testKey(1000)}) // not in it: nothing happens
	})
}

// Every field of a key counts.
func TestTableTellsKeysApart(t *testing.T) {
	base := leaseKey{tenant: "t", subject: "s", class: "c", purpose: keydv1.Purpose_PURPOSE_OPEN, id: envelope.KeyID{1}, classNumber: 2, bucket: 3}
	tab := newTable(16)
	l := &lease{key: base}
	tab.put(l)
	if tab.get(&base) != l {
		t.Fatal("not found")
	}
	for i, change := range []func(*leaseKey){
		func(k *leaseKey) { k.tenant = "u" },
		func(k *leaseKey) { k.subject = "u" },
		func(k *leaseKey) { k.class = "u" },
		func(k *leaseKey) { k.purpose = keydv1.Purpose_PURPOSE_SEAL },
		func(k *leaseKey) { k.policy = All },
		func(k *leaseKey) { k.id[15] = 1 },
		func(k *leaseKey) { k.classNumber++ },
		func(k *leaseKey) { k.bucket++ },
		func(k *leaseKey) { k.tenant, k.subject = "ts", "" },
	} {
		k := base
		change(&k)
		if tab.get(&k) != nil {
			t.Errorf("change %d: found", i)
		}
	}
}

// Readers go undisturbed while one goroutine changes the table.
func TestTableReaders(t *testing.T) {
	tab := newTable(16)
	stable := make([]*lease, 20)
	for i := range stable {
		stable[i] = &lease{key: testKey(i)}
		tab.put(stable[i])
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				for i := range stable {
					k := testKey(i)
					if tab.get(&k) != stable[i] {
						t.Error("a lease was not found")
						return
					}
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for i := range 20000 {
		l := &lease{key: testKey(100 + i%50)}
		tab.put(l)
		if i%3 == 0 {
			tab.put(&lease{key: testKey(1000)})
			k := testKey(1000)
			tab.remove(tab.get(&k))
		}
		tab.remove(l)
	}
	close(stop)
	wg.Wait()
}

// Whatever the dead set has forgotten, no answer that a revocation has
// overtaken passes.
func TestDeadSetForgetsNothingThatMatters(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := newDeadSet(rapid.IntRange(1, 5).Draw(t, "limit"))
		type event struct {
			key     deadKey
			outcome keydv1.Outcome
			seq     uint64
		}
		var events []event
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			if rapid.IntRange(0, 9).Draw(t, "reset") == 0 {
				d.overtake()
				events = append(events, event{seq: d.seq})
				continue
			}
			k := deadKey{tenant: "t"}
			switch n := byte(rapid.IntRange(1, 8).Draw(t, "n")); rapid.IntRange(0, 2).Draw(t, "kind") {
			case 0:
				k.id = envelope.KeyID{n}
			case 1:
				k.class, k.bucket = 1, uint64(n)
			case 2:
				k.subject = fmt.Sprint(n)
			}
			o := rapid.SampledFrom([]keydv1.Outcome{
				keydv1.Outcome_OUTCOME_ERASED, keydv1.Outcome_OUTCOME_PENDING_ERASURE, keydv1.Outcome_OUTCOME_UNSPECIFIED,
			}).Draw(t, "outcome")
			d.add(k, o)
			events = append(events, event{k, o, d.seq})
		}
		if len(d.dead) > d.limit || len(d.order)-d.head != len(d.dead) {
			t.Fatalf("%d entries and %d in order, limit %d", len(d.dead), len(d.order)-d.head, d.limit)
		}
		l := &lease{
			key:         leaseKey{tenant: "t", subject: fmt.Sprint(rapid.IntRange(1, 8).Draw(t, "subject"))},
			id:          envelope.KeyID{byte(rapid.IntRange(1, 8).Draw(t, "id"))},
			classNumber: 1,
			bucket:      uint64(rapid.IntRange(1, 8).Draw(t, "bucket")),
		}
		began := uint64(rapid.IntRange(0, int(d.seq)).Draw(t, "began"))
		must := false
		for _, e := range events {
			hit := e.key == (deadKey{}) || e.key == deadKey{tenant: "t", id: l.id} ||
				e.key == deadKey{tenant: "t", class: 1, bucket: l.bucket} || e.key == deadKey{tenant: "t", subject: l.key.subject}
			must = must || hit && e.seq > began
		}
		_, refused := d.judge(l, began)
		if must && !refused {
			t.Fatalf("an overtaken answer passed: began %d, events %v", began, events)
		}
		// One that began after everything is refused only for a key that is
		// dead for good.
		if outcome, refused := d.judge(l, d.seq); refused && !final(outcome) {
			t.Fatalf("an answer of now was refused with %v: events %v", outcome, events)
		}
	})
}

// glance finds what ParseHeader finds, in every header that ParseHeader takes.
func TestGlanceAgreesWithTheParser(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := envelope.Header{
			Form:       rapid.SampledFrom([]envelope.Form{envelope.OneShot, envelope.Stream}).Draw(t, "form"),
			Policy:     envelope.Single,
			Bound:      rapid.Bool().Draw(t, "bound"),
			Class:      rapid.Uint16().Draw(t, "class"),
			Bucket:     rapid.Uint64().Draw(t, "bucket"),
			Recipients: []envelope.KeyID{envelope.KeyID(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "id"))},
		}
		blob, err := h.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		k, ok := glance(blob)
		if !ok || k.id != h.Recipients[0] || k.classNumber != h.Class || k.bucket != h.Bucket {
			t.Fatalf("glance says %+v of %+v", k, h)
		}
	})
}

// The system clock knows of a suspend at the first reading after it, however
// rarely it reads the boot-time clock itself.
func TestSystemClockSeesSuspend(t *testing.T) {
	wall, mono, suspended := time.Unix(1_800_000_000, 0), time.Duration(0), time.Duration(0)
	readings := 0
	c := newClock(
		func() (time.Time, time.Duration) { return wall, mono },
		func(time.Duration) time.Duration {
			readings++
			return 100*time.Hour + mono + suspended
		})
	run := func(d time.Duration) { wall, mono = wall.Add(d), mono+d }
	check := func(what string) {
		t.Helper()
		if got, boot := c.Now(); boot != 100*time.Hour+mono+suspended || !got.Equal(wall) {
			t.Errorf("%s: boot time %v, want %v", what, boot, 100*time.Hour+mono+suspended)
		}
	}
	check("at first")
	for range 900 {
		run(10 * time.Microsecond)
		check("running")
	}
	if readings != 1 {
		t.Errorf("the boot-time clock was read %d times in 9 ms", readings)
	}
	suspended += 5 * time.Second
	wall = wall.Add(5 * time.Second)
	check("after a suspend")
	wall = wall.Add(-time.Hour)
	check("after a step of the wall clock")
	run(time.Minute)
	check("running on")
	suspended += time.Minute // and the wall clock was set back by as much
	run(offsetAge + 1)
	check("10 ms after a suspend that a step of the wall clock hides")
}

// A set is decoded to what it was made of, and different sets never share a key.
func TestSetIsUnambiguous(t *testing.T) {
	seen := make(map[string]string)
	rapid.Check(t, func(t *rapid.T) {
		subjects := rapid.SliceOfNDistinct(rapid.StringN(1, 4, 1024), 1, MaxSubjects, rapid.ID[string]).Draw(t, "subjects")
		ids := make([]envelope.KeyID, rapid.IntRange(0, MaxSubjects).Draw(t, "ids"))
		for i := range ids {
			ids[i][0], ids[i][15] = byte(i), rapid.Byte().Draw(t, "id")
		}
		k := leaseKey{subject: encodeSet(subjects, ids)}
		gotSubjects, gotIDs := k.decodeSet()
		if !slices.Equal(gotSubjects, subjects) || !slices.Equal(gotIDs, ids) {
			t.Fatal("decoded to something else")
		}
		what := fmt.Sprintf("%q %v", subjects, ids)
		if old, known := seen[k.subject]; known && old != what {
			t.Fatal("two sets with one key")
		}
		seen[k.subject] = what
	})
}

// If all are needed, what is most final decides; if one would do, what is least.
func TestWorst(t *testing.T) {
	const (
		fine        = keydv1.Outcome_OUTCOME_UNSPECIFIED
		erased      = keydv1.Outcome_OUTCOME_ERASED
		expired     = keydv1.Outcome_OUTCOME_EXPIRED
		pending     = keydv1.Outcome_OUTCOME_PENDING_ERASURE
		unavailable = keydv1.Outcome_OUTCOME_UNAVAILABLE
		wrong       = keydv1.Outcome_OUTCOME_WRONG_SUBJECT
		unknown     = keydv1.Outcome_OUTCOME_UNKNOWN
	)
	for _, x := range []struct {
		of       []keydv1.Outcome
		all, any keydv1.Outcome
	}{
		{[]keydv1.Outcome{fine, fine}, fine, fine},
		{[]keydv1.Outcome{fine, erased}, erased, fine},
		{[]keydv1.Outcome{fine, unavailable}, unavailable, fine},
		{[]keydv1.Outcome{unavailable, erased}, erased, unavailable},
		{[]keydv1.Outcome{pending, erased}, erased, pending},
		{[]keydv1.Outcome{pending, expired}, expired, pending},
		{[]keydv1.Outcome{expired, erased}, erased, expired},
		{[]keydv1.Outcome{erased, erased}, erased, erased},
		{[]keydv1.Outcome{erased, wrong, fine}, wrong, wrong},
		{[]keydv1.Outcome{unknown, wrong}, wrong, wrong},
		{[]keydv1.Outcome{erased, unknown}, unknown, unknown},
	} {
		failed, granted := make([]*Error, len(x.of)), 0
		for i, o := range x.of {
			if o == fine {
				granted++
			} else {
				failed[i] = &Error{Outcome: o}
			}
		}
		for _, needAll := range []bool{true, false} {
			want, got := x.any, fine
			if needAll {
				want = x.all
			}
			if f := worst(failed, needAll, granted); f != nil {
				got = f.Outcome
			}
			if got != want {
				t.Errorf("%v, all %v: %v, want %v", x.of, needAll, got, want)
			}
		}
	}
}
