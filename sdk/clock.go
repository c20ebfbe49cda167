package sdk

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"lethe/internal/boottime"
)

// Clock is where a Client takes the time from. It is safe for concurrent use.
type Clock interface {
	// Now returns the wall clock's time, and the time since some fixed instant
	// by a clock that nobody can set and that goes on while the machine is
	// suspended. A lease is over when either of them says so.
	Now() (wall time.Time, boot time.Duration)
	// AfterFunc calls f in a goroutine of its own once d has passed. stop
	// reports whether it came before the call.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
}

// SystemClock returns the machine's clock. The boot time is CLOCK_BOOTTIME on
// Linux and CLOCK_MONOTONIC on Darwin, which both run through suspend;
// elsewhere it is Go's monotonic clock, and a suspend is seen by the wall
// clock alone.
func SystemClock() Clock { return system }

var system = newSystemClock()

// systemClock spares the hot path a system call: boot time is Go's monotonic
// clock plus an offset that only a suspend changes, and a suspend also changes
// the distance between the wall clock and the monotonic one, as does a step of
// the wall clock. The offset is read again whenever that distance has moved, and
// every 10 ms in any case: for no longer can a suspend be missed, even if
// the wall clock was set back by as much.
type systemClock struct {
	// now reads the wall clock and the monotonic clock, and boot the boot-time
	// clock; it is given mono in case there is none.
	now  func() (wall time.Time, mono time.Duration)
	boot func(mono time.Duration) time.Duration

	// Read in this order and written in the other, so that no offset is taken
	// for one that was read later than it was.
	read     atomic.Int64 // monotonic time of the reading
	distance atomic.Int64 // wall clock less monotonic time
	offset   atomic.Int64 // boot time less monotonic time
	writing  sync.Mutex
}

const (
	offsetTolerance = time.Millisecond
	offsetAge       = 10 * time.Millisecond
)

func newSystemClock() *systemClock {
	start := time.Now()
	return newClock(func() (time.Time, time.Duration) {
		wall := time.Now()
		return wall, wall.Sub(start)
	}, boottime.Read)
}

func newClock(now func() (time.Time, time.Duration), boot func(time.Duration) time.Duration) *systemClock {
	c := &systemClock{now: now, boot: boot}
	c.readOffset()
	return c
}

func (c *systemClock) Now() (time.Time, time.Duration) {
	wall, mono := c.now()
	read, distance, offset := time.Duration(c.read.Load()), time.Duration(c.distance.Load()), time.Duration(c.offset.Load())
	if mono-read > offsetAge || (time.Duration(wall.UnixNano())-mono-distance).Abs() > offsetTolerance {
		offset = c.readOffset()
	}
	return wall, mono + offset
}

func (c *systemClock) readOffset() time.Duration {
	var read, distance, offset time.Duration
	for range 10 {
		wall, mono := c.now()
		boot := c.boot(mono)
		read, distance, offset = mono, time.Duration(wall.UnixNano())-mono, boot-mono
		// Reading the two clocks took no longer than the offset may be off by.
		if _, after := c.now(); after-mono < offsetTolerance {
			break
		}
	}
	// Nobody waits for another who writes: he has a reading of his own.
	if c.writing.TryLock() {
		c.offset.Store(int64(offset))
		c.distance.Store(int64(distance))
		c.read.Store(int64(read))
		c.writing.Unlock()
	}
	return offset
}

func (c *systemClock) AfterFunc(d time.Duration, f func()) func() bool {
	return time.AfterFunc(d, f).Stop
}

// sleep waits for d by clock, and reports whether it did so before ctx ended.
func sleep(ctx context.Context, clock Clock, d time.Duration) bool {
	over := make(chan struct{})
	stop := clock.AfterFunc(d, func() { close(over) })
	select {
	case <-over:
		return true
	case <-ctx.Done():
		stop()
		return false
	}
}
