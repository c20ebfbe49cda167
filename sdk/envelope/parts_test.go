package envelope

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// Every part is done, by one goroutine, once done is closed.
func TestPartsAreDoneOnce(t *testing.T) {
	for round := range 500 {
		n := 1 + round%maxTurnSegments
		var p parts
		times := make([]int, n) // written without a lock: the race detector looks on
		p.start(n, func(i int) { times[i]++ })
		var wg sync.WaitGroup
		for range round % 3 {
			wg.Go(p.share)
		}
		p.share()
		<-p.done
		for i, k := range times {
			if k != 1 {
				t.Fatalf("part %d of %d was done %d times", i, n, k)
			}
		}
		wg.Wait()
	}
}

// After abandon nothing is under way, and nothing begins.
func TestPartsAbandoned(t *testing.T) {
	for round := range 500 {
		n := 1 + round%maxTurnSegments
		var p parts
		var begun, ended atomic.Int32
		p.start(n, func(int) { begun.Add(1); ended.Add(1) })
		var wg sync.WaitGroup
		for range round % 3 {
			wg.Go(p.share)
		}
		if round%2 == 0 {
			p.share() // as when all was taken by then
		}
		p.abandon()
		before := ended.Load()
		if begun.Load() != before {
			t.Fatal("a part was under way")
		}
		wg.Wait()
		p.share()
		if begun.Load() != before {
			t.Fatal("a part was begun after it was abandoned")
		}
	}
}

// Who waits for one work does parts of the next, and no more than that.
func TestPartsUntil(t *testing.T) {
	var first, next parts
	next.until(&first) // neither was started
	ran := 0
	next.start(4, func(int) {
		if ran++; ran == 2 {
			first.share()
		}
	})
	first.start(1, func(int) {})
	next.until(&first)
	if ran != 2 {
		t.Errorf("%d parts were done until the first work was; want 2", ran)
	}
	next.until(&first)
	if ran != 2 {
		t.Error("a part was done although there was nothing to wait for")
	}
}

// A crew shares all that it is given, with no more goroutines than it has, and
// without waiting for one to end.
func TestCrew(t *testing.T) {
	for _, size := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			c := crew{size: size}
			var now, most, done atomic.Int32
			release := make(chan struct{})
			works := make([]parts, 10)
			for i := range works {
				works[i].start(1, func(int) {
					most.Store(max(most.Load(), now.Add(1)))
					<-release
					now.Add(-1)
					done.Add(1)
				})
				c.share(&works[i])
			}
			synctest.Wait()
			if n := now.Load(); n != int32(size) {
				t.Errorf("a crew of %d: %d are at work", size, n)
			}
			close(release)
			for i := range works {
				<-works[i].done
			}
			if n := most.Load(); n > int32(size) || done.Load() != 10 {
				t.Errorf("a crew of %d: %d at once, %d of 10 done", size, n, done.Load())
			}
			synctest.Wait() // all have ended
			works = make([]parts, 1)
			works[0].start(1, func(int) {})
			c.share(&works[0])
			<-works[0].done
		})
	}
}
