package badger

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
)

var dropRows = flag.Int("drop.rows", 100_000, "rows of BenchmarkDropRange")

// BenchmarkDropRange drops -drop.rows wrapped rows of an old epoch from a store
// that holds as many of the new one, laid out as keyd does, and says what those
// who read and write meanwhile see of it: how long a call took, and how much
// processor time this process used meanwhile, which says more where others use
// the machine too. Run it with -benchtime 1x.
func BenchmarkDropRange(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		s := openBench(b)
		fillEpochs(b, s, *dropRows)
		quiet := watch(b, s, func() { time.Sleep(5 * time.Second) })
		b.StartTimer()
		busy := watch(b, s, func() {
			if err := s.DropRange(b.Context(), oldEpoch); err != nil {
				b.Fatal(err)
			}
		})
		b.StopTimer()
		quiet.log(b, "before")
		longest := busy.log(b, "dropping")
		b.ReportMetric(float64(longest.wall)/float64(time.Millisecond), "longest-ms")
		b.ReportMetric(float64(longest.cpu)/float64(time.Millisecond), "longest-cpu-ms")
		b.ReportMetric(float64(*dropRows)/b.Elapsed().Seconds(), "rows/s")
		b.StartTimer()
	}
}

var oldEpoch, newEpoch = []byte("w\x00\x00\x00\x01"), []byte("w\x00\x00\x00\x02")

// dekRow is the key of a subject's wrapped row.
func dekRow(epoch []byte, n int) []byte {
	h := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(n)))
	k := append(bytes.Clone(epoch), 'D')
	k = append(k, "sixteen bytes :)"...)
	return append(k, h[:]...)
}

// fillEpochs writes rows under the old epoch as subjects come, then carries
// them over in their order.
func fillEpochs(b *testing.B, s *Store, n int) {
	b.Helper()
	const batch = 4096
	value := make([]byte, 110)
	put := func(rows [][]byte) {
		err := s.Update(b.Context(), func(tx keys.Tx) error {
			for _, k := range rows {
				if err := tx.Put(k, value); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	for from := 0; from < n; from += batch {
		var rows [][]byte
		for i := from; i < min(n, from+batch); i++ {
			rows = append(rows, dekRow(oldEpoch, i))
		}
		put(rows)
	}
	var after []byte
	for {
		var rows [][]byte
		err := s.View(b.Context(), func(r keys.Reader) error {
			return r.Scan(oldEpoch, after, func(key, _ []byte) bool {
				after = key
				rows = append(rows, append(bytes.Clone(newEpoch), key[len(newEpoch):]...))
				return len(rows) < batch
			})
		})
		if err != nil {
			b.Fatal(err)
		}
		if len(rows) == 0 {
			return
		}
		put(rows)
	}
}

// call is what one read or write took.
type call struct{ wall, cpu time.Duration }

type seen struct{ reads, writes []call }

// log says how long calls took, and returns the longest by either measure.
func (s *seen) log(b *testing.B, when string) (longest call) {
	for _, kind := range []struct {
		name  string
		calls []call
	}{{"reads", s.reads}, {"writes", s.writes}} {
		var wall, cpu []time.Duration
		over := 0
		for _, c := range kind.calls {
			wall, cpu = append(wall, c.wall), append(cpu, c.cpu)
			if c.wall >= 100*time.Millisecond {
				over++
			}
		}
		slices.Sort(wall)
		slices.Sort(cpu)
		n := len(wall)
		longest.wall, longest.cpu = max(longest.wall, wall[n-1]), max(longest.cpu, cpu[n-1])
		b.Logf("%s, %d %s: median %v, 99 %% %v, 99.9 %% %v, longest %v; %d over 100 ms; most processor time meanwhile %v",
			when, n, kind.name, wall[n/2], wall[n*99/100], wall[n*999/1000], wall[n-1], over, cpu[n-1])
	}
	return longest
}

// cpuTime is what this process has used of its cores.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// watch reads and writes for as long as fn runs, and once more after it.
func watch(b *testing.B, s *Store, fn func()) *seen {
	b.Helper()
	var stop atomic.Bool
	var wg sync.WaitGroup
	all, ctx := new(seen), context.Background()
	loop := func(calls *[]call, op func() error) {
		wg.Go(func() {
			for last := false; !last; {
				last = stop.Load()
				begun, cpu := time.Now(), cpuTime()
				if err := op(); err != nil {
					b.Error(err)
					return
				}
				*calls = append(*calls, call{time.Since(begun), cpuTime() - cpu})
			}
		})
	}
	loop(&all.reads, func() error {
		return s.View(ctx, func(r keys.Reader) error {
			_, err := r.Get(dekRow(newEpoch, rand.IntN(*dropRows)))
			return err
		})
	})
	loop(&all.writes, func() error {
		return s.Update(ctx, func(tx keys.Tx) error { return tx.Put(dekRow(newEpoch, -rand.Int()), make([]byte, 110)) })
	})
	fn()
	stop.Store(true)
	wg.Wait()
	return all
}
