package keys

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/wrap"
	storev1 "lethe/proto/keyd/store/v1"
)

// BenchmarkRewrapWork is what a core does for one key that is carried over,
// beside the store's reads and writes: the row is parsed, unwrapped, wrapped,
// opened again, and encoded.
func BenchmarkRewrapWork(b *testing.B) {
	newKEK := func(epoch uint32) *kek {
		w, err := wrap.New(newKey())
		if err != nil {
			b.Fatal(err)
		}
		return &kek{w, epoch}
	}
	old, next := newKEK(1), newKEK(2)
	oldID, nextID, id, tenant, handle := newID(), newID(), newID(), newID(), newID()
	key := wrappedDEKKey(1, tenant, handle, id[:])
	o := &owned{tenant: tenant, live: true, class: 1, generation: 1}
	w, err := wrapRow(old.Wrapper, oldID, newKey(), o.identity(key, oldID))
	if err != nil {
		b.Fatal(err)
	}
	value, err := encode(w)
	if err != nil {
		b.Fatal(err)
	}
	subject, err := encode(&storev1.Subject{
		State: storev1.LifeState_LIFE_STATE_ACTIVE, Generation: 1,
		Classes: []*storev1.SubjectClass{{ClassNumber: 1, State: storev1.LifeState_LIFE_STATE_ACTIVE, Generation: 1, KeyId: id[:]}},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	begun := cpuTime()
	for b.Loop() {
		row := &wrappedRow{key: key, value: value, old: old, next: next, nextID: nextID}
		if err := decode(row.value, &row.w); err != nil {
			b.Fatal(err)
		}
		row.owner = &owned{tenant: tenant, value: subject}
		if err := row.owner.judge(key); err != nil || !row.owner.live {
			b.Fatal(err)
		}
		if row.wrap(2); row.damage != nil {
			b.Fatal(row.damage)
		}
	}
	b.ReportMetric(float64(b.N)/(cpuTime()-begun).Seconds(), "keys/cpu-s")
}

// cpuTime is what this process has used of its cores: the clock on the wall
// says little on a machine that others use too.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// CPUTime is cpuTime for the other benchmarks.
var CPUTime = cpuTime
