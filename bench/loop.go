package main

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lethe/bench/measure"
)

// looped is what a closed loop saw.
type looped struct {
	ops       int
	took      time.Duration
	latencies []time.Duration // ascending
}

func (l looped) perSecond() float64 { return float64(l.ops) / l.took.Seconds() }

// at returns the q quantile of the latencies.
func (l looped) at(q float64) float64 {
	if len(l.latencies) == 0 {
		return math.NaN()
	}
	return float64(measure.Quantile(l.latencies, q))
}

// closedLoop has clients repeat an operation, each as soon as its last has
// ended: for d, or n times in all where n is not zero. i counts from 0 over
// all clients. It shows throughput; latencies under load are the open loop's
// to show.
func closedLoop(ctx context.Context, clients int, d time.Duration, n int, op func(client, i int) error) (looped, error) {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	all := make([][]time.Duration, clients)
	var wg sync.WaitGroup
	begun := time.Now()
	for client := range clients {
		wg.Go(func() {
			for failed.Load() == nil && ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				t := time.Now()
				if n > 0 && i >= n || n == 0 && t.Sub(begun) >= d {
					return
				}
				if err := op(client, i); err != nil {
					failed.CompareAndSwap(nil, &err)
					return
				}
				all[client] = append(all[client], time.Since(t))
			}
		})
	}
	wg.Wait()
	l := looped{took: time.Since(begun)}
	for _, some := range all {
		l.latencies = append(l.latencies, some...)
	}
	slices.Sort(l.latencies)
	l.ops = len(l.latencies)
	if err := failed.Load(); err != nil {
		return l, *err
	}
	return l, ctx.Err()
}
