//go:build linux || darwin

// Package boottime reads a clock that nobody sets and that runs while the machine
// sleeps. Where there is none, a reading is the monotonic one that it is given.
package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// readClock falls back to mono where the system has no such clock.
func readClock(id int32, mono time.Duration) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return mono
	}
	return time.Duration(ts.Nano())
}
