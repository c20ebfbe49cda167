package main

import (
	"context"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// openLoop makes calls at the times that a schedule sets, however long earlier
// ones take: as users do, who do not wait for each other. A call's response
// time counts from when it was due, so that what a stall delays is counted as
// late; a loop that waits for its answers would send less meanwhile, and leave
// the stall's victims out (coordinated omission).
type openLoop struct {
	rate     float64 // calls a second, on average
	duration time.Duration
	// even spaces the calls evenly; otherwise they come independently of each
	// other (exponential gaps).
	even bool
	// inFlight bounds the calls under way. A call that is due while so many
	// are waits, and its wait counts.
	inFlight int
	// call makes the n-th call.
	call func(ctx context.Context, n int) error
}

// loadResult is what an openLoop saw.
type loadResult struct {
	sent     int
	took     time.Duration // from the first call's due time to the last answer
	response *histogram    // from when a call was due to its answer
	service  *histogram    // from when it was sent
	waited   int           // calls that waited because too many were under way
	failed   map[string]int
	most     int64 // calls under way at once, at most
}

// run runs the loop until its duration is over and all answers have come, or
// ctx ends. outcome names an error.
func (l *openLoop) run(ctx context.Context, outcome func(error) string) *loadResult {
	r := &loadResult{response: new(histogram), service: new(histogram), failed: make(map[string]int)}
	var mu sync.Mutex
	var underway, most atomic.Int64
	var wg sync.WaitGroup
	slots := make(chan struct{}, l.inFlight)
	begun := time.Now()
	gap := func() time.Duration {
		mean := float64(time.Second) / l.rate
		if l.even {
			return time.Duration(mean)
		}
		return time.Duration(rand.ExpFloat64() * mean)
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
loop:
	for due := gap(); due < l.duration; due += gap() {
		if wait := due - time.Since(begun); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				break loop
			}
		}
		select {
		case slots <- struct{}{}:
		default:
			r.waited++
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				break loop
			}
		}
		n := r.sent
		r.sent++
		wg.Go(func() {
			defer func() { <-slots }()
			if u := underway.Add(1); u > most.Load() {
				most.Store(u)
			}
			sent := time.Now()
			err := l.call(ctx, n)
			now := time.Now()
			underway.Add(-1)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				r.failed[outcome(err)]++
				return
			}
			r.response.add(now.Sub(begun) - due)
			r.service.add(now.Sub(sent))
		})
	}
	wg.Wait()
	r.took, r.most = time.Since(begun), most.Load()
	return r
}

// histogram counts durations in buckets whose width is at most a 64th of what
// they hold, so that quantiles are right to 1.6 %.
type histogram struct {
	counts [64 * 64]int
	n      int
	sum    time.Duration
	most   time.Duration
}

// bucketOf returns the bucket of a duration: below 64 ns one each, then 64 for
// each power of two.
func bucketOf(d time.Duration) int {
	v := uint64(max(d, 0))
	if v < 64 {
		return int(v)
	}
	shift := bits.Len64(v) - 7
	return (shift+1)*64 + int(v>>shift) - 64
}

// topOf returns the greatest duration of a bucket.
func topOf(i int) time.Duration {
	if i < 64 {
		return time.Duration(i)
	}
	shift := i/64 - 1
	return time.Duration((uint64(i%64)+65)<<shift - 1)
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucketOf(d)]++
	h.n++
	h.sum += d
	h.most = max(h.most, d)
}

func (h *histogram) mean() time.Duration {
	if h.n == 0 {
		return 0
	}
	return h.sum / time.Duration(h.n)
}

// quantile returns a duration that a share of q of all are not above.
func (h *histogram) quantile(q float64) time.Duration {
	left := int(q * float64(h.n))
	for i, c := range h.counts {
		if left -= c; left < 0 {
			return min(topOf(i), h.most)
		}
	}
	return h.most
}
