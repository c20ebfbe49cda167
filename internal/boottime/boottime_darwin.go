package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Read reads CLOCK_MONOTONIC, which on Darwin runs through sleep.
func Read(mono time.Duration) time.Duration { return readClock(unix.CLOCK_MONOTONIC, mono) }
