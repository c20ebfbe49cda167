// Package measure times things against each other, so that what else the
// machine does disturbs all of them alike: contenders take short turns, round
// by round, in an order drawn anew for each, and what is stated is the median of
// the rounds' ratios.
package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Contender is one way of doing the work that a Race compares.
type Contender struct {
	Name string
	// Run does n operations on the goroutine that calls it. Thread tells
	// goroutines apart, for buffers of their own.
	Run func(thread, n int) error
	// Threads is how many goroutines do so at once; 0 is one.
	Threads int
}

// Race says how to compare.
type Race struct {
	// Turn is how long one contender runs before the next; Rounds how often
	// all of them do.
	Turn   time.Duration
	Rounds int
}

// warmUp is the share of a turn that is run before it, and not timed: whoever
// came before has left the caches full of his own, and the collector at work on
// what he allocated.
const warmUp = 0.25

// Result is what a Race found of one contender.
type Result struct {
	Name string
	// NsPerOp is the median time of one operation: with several threads, wall
	// time divided by the operations of all.
	NsPerOp float64
	// CPUNsPerOp is the processor time of one operation, of all threads, the
	// collector's among them.
	CPUNsPerOp float64
	// AllocsPerOp and BytesPerOp are heap allocations.
	AllocsPerOp, BytesPerOp float64
	// Ratio is how fast it is beside the first contender: the median of the
	// rounds' quotients of times. CPURatio is the same of processor time.
	Ratio, CPURatio float64
	// Spread is half the distance between the quartiles of the quotients,
	// divided by their median.
	Spread float64
	// Rounds are the times of one operation, round by round.
	Rounds []float64
}

// Run races the contenders; the first is the one that Ratio refers to.
func (r Race) Run(ctx context.Context, contenders ...Contender) ([]Result, error) {
	counts := make([]int, len(contenders))
	results := make([]Result, len(contenders))
	for i, c := range contenders {
		results[i].Name = c.Name
		n, err := calibrate(c, r.Turn)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.Name, err)
		}
		counts[i] = n
		if results[i].AllocsPerOp, results[i].BytesPerOp, err = allocations(c, min(n, 1000)); err != nil {
			return nil, fmt.Errorf("%s: %w", c.Name, err)
		}
	}
	wall, cpu := make([][]float64, len(contenders)), make([][]float64, len(contenders))
	for range r.Rounds {
		for _, i := range rand.Perm(len(contenders)) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			w, c, err := turn(contenders[i], counts[i])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", contenders[i].Name, err)
			}
			ops := float64(counts[i] * max(contenders[i].Threads, 1))
			wall[i] = append(wall[i], float64(w)/ops)
			cpu[i] = append(cpu[i], float64(c)/ops)
		}
	}
	for i := range results {
		q := Quotients(wall[0], wall[i])
		results[i].NsPerOp, results[i].CPUNsPerOp = Median(wall[i]), Median(cpu[i])
		results[i].Ratio, results[i].Spread = Median(q), Spread(q)
		results[i].CPURatio = Median(Quotients(cpu[0], cpu[i]))
		results[i].Rounds = wall[i]
	}
	return results, nil
}

// calibrate finds how many operations take about d.
func calibrate(c Contender, d time.Duration) (int, error) {
	for n := 1; ; {
		begun := time.Now()
		if err := c.Run(0, n); err != nil {
			return 0, err
		}
		took := time.Since(begun)
		if took >= d/2 || n >= 1<<30 {
			return max(1, int(float64(n)*float64(d)/float64(max(took, 1)))), nil
		}
		n = max(n+1, min(100*n, int(1.2*float64(n)*float64(d)/float64(max(took, 1)))))
	}
}

func turn(c Contender, n int) (wall, cpu time.Duration, err error) {
	if warm := int(warmUp * float64(n)); warm > 0 {
		if err := c.run(warm); err != nil {
			return 0, 0, err
		}
	}
	w, p := time.Now(), CPU()
	err = c.run(n)
	return time.Since(w), CPU() - p, err
}

// run does n operations on each thread.
func (c Contender) run(n int) error {
	if c.Threads <= 1 {
		return c.Run(0, n)
	}
	errs := make([]error, c.Threads)
	var wg sync.WaitGroup
	for t := range c.Threads {
		wg.Go(func() { errs[t] = c.Run(t, n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func allocations(c Contender, n int) (allocs, bytes float64, err error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err = c.Run(0, n)
	runtime.ReadMemStats(&after)
	// What the runtime itself allocates meanwhile is not the contender's.
	allocs = math.Floor(float64(after.Mallocs-before.Mallocs)/float64(n)*10) / 10
	return allocs, float64(after.TotalAlloc-before.TotalAlloc) / float64(n), err
}

// Quotients divides a by b, pair by pair.
func Quotients(a, b []float64) []float64 {
	q := make([]float64, min(len(a), len(b)))
	for i := range q {
		q[i] = a[i] / b[i]
	}
	return q
}

// Median returns the median of v, NaN if it is empty.
func Median(v []float64) float64 { return Quantile(v, 0.5) }

// Spread returns half the distance between the quartiles of v, divided by its
// median.
func Spread(v []float64) float64 {
	return (Quantile(v, 0.75) - Quantile(v, 0.25)) / 2 / Median(v)
}

// Quantile returns the q quantile of v, NaN if it is empty.
func Quantile[T cmp.Ordered](v []T, q float64) T {
	if len(v) == 0 {
		var none T
		return none
	}
	s := slices.Sorted(slices.Values(v))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}
