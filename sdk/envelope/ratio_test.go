package envelope

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
)

// BenchmarkRatio measures speed as a fraction of raw AES-256-GCM's. Both are
// run by turns, a few hundred microseconds each, so that what else the machine
// does disturbs both alike; the metric is the median of the turns' ratios.
func BenchmarkRatio(b *testing.B) {
	aead := rawGCM()
	nonce := make([]byte, 12)
	s, o := pair(b, Single, 1)
	for _, size := range oneShotSizes {
		plain := make([]byte, size)
		dst := make([]byte, 0, size+256)
		sealed := aead.Seal(nil, nonce, plain, nil)
		blob := must[[]byte](b)(s.Append(nil, plain, Context{}))
		n := max(1, 200_000/(100+size/4))
		times := func(f func()) func() {
			return func() {
				for range n {
					f()
				}
			}
		}
		ratio(b, fmt.Sprintf("Seal/%d", size),
			times(func() { aead.Seal(dst, nonce, plain, nil) }),
			times(func() { s.Append(dst, plain, Context{}) }))
		ratio(b, fmt.Sprintf("Open/%d", size),
			times(func() { aead.Open(dst, nonce, sealed, nil) }),
			times(func() { o.Append(dst, blob, Context{}) }))
		both := func(f func(dst []byte)) func() {
			dsts := [2][]byte{make([]byte, 0, size+256), make([]byte, 0, size+256)}
			return func() {
				var wg sync.WaitGroup
				for _, dst := range dsts {
					wg.Go(func() {
						for range 10 * n {
							f(dst)
						}
					})
				}
				wg.Wait()
			}
		}
		ratio(b, fmt.Sprintf("Seal/%d/two goroutines", size),
			both(func(dst []byte) { aead.Seal(dst, nonce, plain, nil) }),
			both(func(dst []byte) { s.Append(dst, plain, Context{}) }))
		ratio(b, fmt.Sprintf("Open/%d/two goroutines", size),
			both(func(dst []byte) { aead.Open(dst, nonce, sealed, nil) }),
			both(func(dst []byte) { o.Append(dst, blob, Context{}) }))
	}

	benchStreams(b)
}

func benchStreams(b *testing.B) {
	s, o := pair(b, Single, 1)
	blob := sealStream(b, s, make([]byte, streamBench), Context{}, 0)
	chunk := randomBytes(256 << 10)
	p := make([]byte, 256<<10)
	for _, workers := range []int{1, 2} {
		raw := func(op string) func() {
			return func() {
				var wg sync.WaitGroup
				for range workers {
					wg.Go(func() { rawSegments(op, streamBench/workers) })
				}
				wg.Wait()
			}
		}
		opts := StreamOptions{Workers: workers}
		ratio(b, fmt.Sprintf("Write/%d workers", workers), raw("Seal"), func() {
			w, _ := s.NewWriter(context.Background(), discard{}, Context{}, opts)
			for range streamBench / len(chunk) {
				w.Write(chunk)
			}
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
		})
		ratio(b, fmt.Sprintf("ReadFrom/%d workers", workers), raw("Seal"), func() {
			w, _ := s.NewWriter(context.Background(), discard{}, Context{}, opts)
			w.ReadFrom(&repeat{b: chunk, left: streamBench / len(chunk)})
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
		})
		open := func() *Reader {
			r, err := o.NewReader(context.Background(), bytes.NewReader(blob), Context{}, opts)
			if err != nil {
				b.Fatal(err)
			}
			return r
		}
		ratio(b, fmt.Sprintf("Read/%d workers", workers), raw("Open"), func() {
			r := open()
			for {
				if _, err := r.Read(p); err == io.EOF {
					return
				} else if err != nil {
					b.Fatal(err)
				}
			}
		})
		ratio(b, fmt.Sprintf("WriteTo/%d workers", workers), raw("Open"), func() {
			if _, err := open().WriteTo(discard{}); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func ratio(b *testing.B, name string, limit, ours func()) {
	b.Run(name, func(b *testing.B) {
		var wall, cpu []float64
		for b.Loop() {
			t0, c0 := time.Now(), cpuTime()
			limit()
			t1, c1 := time.Now(), cpuTime()
			ours()
			t2, c2 := time.Now(), cpuTime()
			wall = append(wall, float64(t1.Sub(t0))/float64(t2.Sub(t1)))
			cpu = append(cpu, float64(c1-c0)/float64(c2-c1))
		}
		b.ReportMetric(median(wall), "of-GCM")
		b.ReportMetric(median(cpu), "of-GCM(cpu)")
		b.ReportMetric(0, "ns/op")
	})
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// cpuTime is what this process has spent on all CPUs.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
