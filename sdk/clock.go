package sdk

import (
	"context"
	"sync/atomic"
	"time"
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
// the wall clock. The offset is read again whenever that distance has moved,
// and once a second in any case.
type systemClock struct {
	// now reads the wall clock and the monotonic clock, and boot the boot-time
	// clock; it is given mono in case there is none.
	now    func() (wall time.Time, mono time.Duration)
	boot   func(mono time.Duration) time.Duration
	offset atomic.Pointer[bootOffset]
}

type bootOffset struct {
	read     time.Duration // monotonic time of the reading
	distance time.Duration // wall clock less monotonic time
	offset   time.Duration // boot time less monotonic time
}

const (
	offsetTolerance = time.Millisecond
	offsetAge       = time.Second
)

func newSystemClock() *systemClock {
	start := time.Now()
	return &systemClock{
		now: func() (time.Time, time.Duration) {
			wall := time.Now()
			return wall, wall.Sub(start)
		},
		boot: bootTime,
	}
}

func (c *systemClock) Now() (time.Time, time.Duration) {
	wall, mono := c.now()
	distance := time.Duration(wall.UnixNano()) - mono
	o := c.offset.Load()
	if o == nil || mono-o.read > offsetAge || (distance-o.distance).Abs() > offsetTolerance {
		o = c.readOffset()
	}
	return wall, mono + o.offset
}

func (c *systemClock) readOffset() *bootOffset {
	o := &bootOffset{}
	for range 10 {
		wall, mono := c.now()
		boot := c.boot(mono)
		o.read, o.distance, o.offset = mono, time.Duration(wall.UnixNano())-mono, boot-mono
		// Reading the two clocks took no longer than the offset may be off by.
		if _, after := c.now(); after-mono < offsetTolerance {
			break
		}
	}
	c.offset.Store(o)
	return o
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
