package sdk

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootTime reads CLOCK_MONOTONIC, which on Darwin runs through sleep.
func bootTime(mono time.Duration) time.Duration { return readClock(unix.CLOCK_MONOTONIC, mono) }
