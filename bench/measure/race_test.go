package measure

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"
)

func spin(iterations int) func(int, int) error {
	return func(_, n int) error {
		x := uint64(1)
		for range n * iterations {
			x = x*6364136223846793005 + 1442695040888963407
		}
		if x == 0 {
			return errors.New("never")
		}
		return nil
	}
}

// A contender that does four times the work is found about four times as slow,
// however busy the machine.
func TestRatio(t *testing.T) {
	results, err := Race{Turn: time.Millisecond, Rounds: 31}.Run(context.Background(),
		Contender{Name: "one", Run: spin(1000)}, Contender{Name: "four", Run: spin(4000)})
	if err != nil {
		t.Fatal(err)
	}
	if r := results[0].Ratio; r != 1 {
		t.Errorf("the first contender's ratio to itself is %v", r)
	}
	if r := results[1].Ratio; r < 0.15 || r > 0.4 {
		t.Errorf("ratio %v, want about 0.25", r)
	}
	if a := results[1].AllocsPerOp; a != 0 {
		t.Errorf("%v allocations an operation", a)
	}
}

// Each round times a turn of each contender, before which others are run that
// are not timed.
func TestRounds(t *testing.T) {
	const rounds = 5
	results, err := Race{Turn: time.Millisecond, Rounds: rounds}.Run(context.Background(),
		Contender{Name: "one", Run: spin(100)}, Contender{Name: "two", Run: spin(200)})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results {
		if len(r.Rounds) != rounds || r.NsPerOp != Median(r.Rounds) {
			t.Errorf("%s: rounds %v of median %v", r.Name, r.Rounds, r.NsPerOp)
		}
	}
	var ran []int
	if _, _, err := turn(Contender{Run: func(_, n int) error { ran = append(ran, n); return nil }}, 100); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(ran, []int{25, 100}) {
		t.Errorf("a turn of 100 ran %v", ran)
	}
}

var sink []byte

func TestAllocations(t *testing.T) {
	results, err := Race{Turn: 100 * time.Microsecond, Rounds: 3}.Run(context.Background(),
		Contender{Name: "two", Run: func(_, n int) error {
			for range n {
				sink = make([]byte, 100)
				sink = make([]byte, 200)
			}
			return nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	if a := results[0].AllocsPerOp; a < 2 || a > 3 {
		t.Errorf("%v allocations an operation, want 2", a)
	}
}

func TestThreadsAndErrors(t *testing.T) {
	failed := errors.New("failed")
	seen := make([]int, 3)
	results, err := Race{Turn: 100 * time.Microsecond, Rounds: 3}.Run(context.Background(),
		Contender{"ok", func(thread, n int) error { seen[thread] += n; return spin(100)(0, n) }, 3})
	if err != nil || len(results) != 1 {
		t.Fatal(results, err)
	}
	if seen[1] == 0 || seen[1] != seen[2] {
		t.Errorf("threads did %v operations", seen)
	}
	for bad := range 3 {
		calls := 0
		_, err = Race{Turn: 100 * time.Microsecond, Rounds: 3}.Run(context.Background(),
			Contender{"bad", func(thread, n int) error {
				if thread == bad {
					if calls++; bad != 0 || calls > 20 {
						return failed
					}
				}
				return spin(100)(0, n)
			}, 3})
		if bad != 0 && !errors.Is(err, failed) {
			t.Errorf("thread %d failed, and the race: %v", bad, err)
		}
	}
}

func TestQuantile(t *testing.T) {
	v := []float64{5, 1, 4, 2, 3}
	if m := Median(v); m != 3 {
		t.Errorf("median %v", m)
	}
	if q := Quantile(v, 1); q != 5 {
		t.Errorf("the greatest is %v", q)
	}
	if v[0] != 5 {
		t.Error("the argument was sorted")
	}
}

func TestProcess(t *testing.T) {
	self := Process(os.Getpid())
	for begun := CPU(); CPU()-begun < 50*time.Millisecond; {
		spin(1000)(0, 100)
	}
	cpu, err := self.CPU()
	if err != nil || cpu == 0 {
		t.Errorf("processor time %v: %v", cpu, err)
	}
	all, anonymous, err := self.Memory()
	if err != nil || all == 0 || anonymous == 0 || anonymous > all {
		t.Errorf("memory %d, %d: %v", all, anonymous, err)
	}
}
