package keys_test

import (
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/internal/keys"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

var (
	turnSubjects = flag.Int("turn.subjects", 20_000, "subjects of BenchmarkTurn")
	turnServing  = flag.Bool("turn.serving", true, "calls are answered while the epoch turns")
)

// BenchmarkTurn turns an epoch of -turn.subjects with one key each, on Badger,
// durable, with calls going on beside it. Run it with -benchtime 1x.
func BenchmarkTurn(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		r := newRig(b)
		keysOf := r.manySubjects(*turnSubjects)
		b.StartTimer()
		r.benchTurn(b, keysOf)
	}
}

// manySubjects makes subjects with batches of first uses.
func (r *rig) manySubjects(n int) []*keydv1.BlobKey {
	r.t.Helper()
	all := make([]*keydv1.BlobKey, n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for {
				from := int(next.Add(keys.MaxBatch)) - keys.MaxBatch
				if from >= n {
					return
				}
				var batch []*keydv1.BlobKeyQuery
				for i := from; i < min(n, from+keys.MaxBatch); i++ {
					batch = append(batch, sealQuery("acme", fmt.Sprintf("subject-%d", i), "trace"))
				}
				res, err := r.BlobKeys(r.t.Context(), batch)
				if err != nil {
					r.t.Error(err)
					return
				}
				for i := range res {
					if res[i].Err != nil {
						r.t.Error(res[i].Err)
						return
					}
					all[from+i] = res[i].Key
				}
			}
		})
	}
	wg.Wait()
	return all
}

func (r *rig) benchTurn(b *testing.B, keysOf []*keydv1.BlobKey) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	var mu sync.Mutex
	type call struct{ at, took time.Duration }
	var opens, seals []call
	begun, cpu := time.Now(), keys.CPUTime()
	if *turnServing {
		for w := range 2 {
			wg.Go(func() {
				var o, s []call
				for n := 0; !stop.Load(); n++ {
					i := (n*7919 + w*104729) % len(keysOf)
					at := time.Now()
					if n%4 == 3 {
						if _, err := r.ask(sealQuery("acme", fmt.Sprintf("new-%d-%d", w, n), "trace")); err != nil {
							b.Error(err)
							return
						}
						s = append(s, call{at.Sub(begun), time.Since(at)})
					} else {
						if _, err := r.ask(openQuery("acme", fmt.Sprintf("subject-%d", i), "trace", keysOf[i])); err != nil {
							b.Error(err)
							return
						}
						o = append(o, call{at.Sub(begun), time.Since(at)})
					}
				}
				mu.Lock()
				opens, seals = append(opens, o...), append(seals, s...)
				mu.Unlock()
			})
		}
	}
	if _, err := r.TurnEpoch(b.Context(), 1); err != nil {
		b.Fatal(err)
	}
	var rewrapped, verified, dropped time.Duration
	for dropped == 0 {
		if _, err := r.StepDuties(b.Context()); err != nil {
			b.Fatal(err)
		}
		e := r.epoch(1)
		switch {
		case e.Sanitised != nil:
			dropped = time.Since(begun)
		case e.State == drained && verified == 0:
			verified = time.Since(begun)
		case e.RowsTotal != 0 && e.RowsRewrapped+e.RowsDead == e.RowsTotal && rewrapped == 0:
			rewrapped = time.Since(begun)
			b.ReportMetric(float64(len(keysOf))/(keys.CPUTime()-cpu).Seconds(), "rewrapped/cpu-s")
		}
	}
	stop.Store(true)
	wg.Wait()
	b.ReportMetric(float64(len(keysOf))/rewrapped.Seconds(), "rewrapped/s")
	b.Logf("%d subjects: carried over after %v, verified after %v, dropped after %v", len(keysOf), rewrapped, verified, dropped)
	for name, calls := range map[string][]call{"opens": opens, "first uses": seals} {
		for _, phase := range []struct {
			name     string
			from, to time.Duration
		}{{"carrying over", 0, rewrapped}, {"verifying", rewrapped, verified}, {"dropping", verified, dropped}} {
			var d []time.Duration
			for _, c := range calls {
				if c.at >= phase.from && c.at < phase.to {
					d = append(d, c.took)
				}
			}
			if slices.Sort(d); len(d) != 0 {
				b.Logf("%d %s while %s: median %v, 99 %% %v, longest %v", len(d), name, phase.name, d[len(d)/2], d[len(d)*99/100], d[len(d)-1])
			}
		}
	}
	// A sample, read back.
	rows := r.rows("w\x00\x00\x00\x02D")
	for _, v := range rows {
		var w storev1.Wrapped
		if err := proto.Unmarshal(v, &w); err != nil || w.Dead {
			b.Fatal("a row is not what it should be")
		}
	}
	if len(rows) < len(keysOf) {
		b.Fatalf("%d rows of %d", len(rows), len(keysOf))
	}
}
