package envelope

import (
	"sync"
	"sync/atomic"
	"testing"
)

// Every part is done, by one goroutine, before finish returns to any.
func TestPartsAreDoneOnce(t *testing.T) {
	for round := range 500 {
		n := 1 + round%maxTurnSegments
		var p parts
		p.start(n)
		times := make([]int, n) // written without a lock: the race detector looks on
		do := func(i int) { times[i]++ }
		var wg sync.WaitGroup
		for range round % 3 {
			wg.Go(func() { p.share(do) })
		}
		p.finish(do)
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
		p.start(n)
		var begun, ended atomic.Int32
		do := func(int) { begun.Add(1); ended.Add(1) }
		var wg sync.WaitGroup
		for range round % 3 {
			wg.Go(func() { p.share(do) })
		}
		if round%2 == 0 {
			p.share(do) // as when all was taken by then
		}
		p.abandon()
		before := ended.Load()
		if begun.Load() != before {
			t.Fatal("a part was under way")
		}
		wg.Wait()
		p.share(do)
		if begun.Load() != before {
			t.Fatal("a part was begun after it was abandoned")
		}
	}
}
