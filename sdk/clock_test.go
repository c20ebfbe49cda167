package sdk_test

import (
	"sync"
	"testing"
	"time"

	"lethe/sdk"
)

// fakeClock stands still until it is told to move.
type fakeClock struct {
	mu     sync.Mutex
	wall   time.Time
	boot   time.Duration
	timers map[*fakeTimer]struct{}
	// onNow, if set, is called before each reading, without the lock.
	onNow func()
}

type fakeTimer struct {
	at time.Duration
	f  func()
}

func newFakeClock() *fakeClock {
	return &fakeClock{
		wall:   time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC),
		boot:   1000 * time.Hour,
		timers: make(map[*fakeTimer]struct{}),
	}
}

func (c *fakeClock) Now() (time.Time, time.Duration) {
	c.mu.Lock()
	hook := c.onNow
	c.mu.Unlock()
	if hook != nil {
		hook()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wall, c.boot
}

func (c *fakeClock) AfterFunc(d time.Duration, f func()) func() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &fakeTimer{at: c.boot + d, f: f}
	if d <= 0 {
		go f()
		return func() bool { return false }
	}
	c.timers[t] = struct{}{}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, pending := c.timers[t]
		delete(c.timers, t)
		return pending
	}
}

// Advance lets time pass, by both clocks.
func (c *fakeClock) Advance(d time.Duration) {
	c.mu.Lock()
	c.wall = c.wall.Add(d)
	c.mu.Unlock()
	c.suspend(d, true)
}

// Suspend moves the boot clock; timers fire only if they run.
func (c *fakeClock) suspend(d time.Duration, timersRun bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.boot += d
	for t := range c.timers {
		if !timersRun {
			t.at += d
		} else if t.at <= c.boot {
			delete(c.timers, t)
			go t.f()
		}
	}
}

// StepWall sets the wall clock forward or back.
func (c *fakeClock) StepWall(d time.Duration) {
	c.mu.Lock()
	c.wall = c.wall.Add(d)
	c.mu.Unlock()
}

func (c *fakeClock) setOnNow(f func()) {
	c.mu.Lock()
	c.onNow = f
	c.mu.Unlock()
}

// nextTimer returns for how long the next timer has to run.
func (c *fakeClock) nextTimer() (d time.Duration, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := range c.timers {
		if left := t.at - c.boot; !ok || left < d {
			d, ok = left, true
		}
	}
	return d, ok
}

// pass lets d go by in steps, and background work follow each of them.
func pass(t testing.TB, c *sdk.Client, clock *fakeClock, d, step time.Duration) {
	t.Helper()
	for ; d > 0; d -= step {
		clock.Advance(step)
		eventually(t, "the client follows the clock", c.Settled)
	}
}

// passUntil lets time go by in steps until something happens.
func passUntil(t testing.TB, clock *fakeClock, step time.Duration, what string, ok func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		if ok() {
			return true
		}
		clock.Advance(step)
		return false
	})
}

func TestSystemClock(t *testing.T) {
	c := sdk.SystemClock()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			_, last := c.Now()
			for range 10000 {
				wall, boot := c.Now()
				// Readings of the offset may differ by the tolerance.
				if boot < last-5*time.Millisecond {
					t.Errorf("boot time went from %v back to %v", last, boot)
					return
				}
				last = boot
				if wall.Year() < 2024 {
					t.Errorf("wall clock says %v", wall)
					return
				}
			}
		})
	}
	wg.Wait()
	_, first := c.Now()
	done := make(chan struct{})
	c.AfterFunc(10*time.Millisecond, func() { close(done) })
	<-done
	if _, second := c.Now(); second-first < 5*time.Millisecond {
		t.Errorf("%v passed in 10 ms", second-first)
	}
	if stop := c.AfterFunc(time.Hour, func() { t.Error("fired") }); !stop() {
		t.Error("stop came too late")
	}
	if n := testing.AllocsPerRun(1000, func() { c.Now() }); n > 0.1 {
		t.Errorf("%v allocations a reading", n)
	}
}
