package sdk

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootTime reads CLOCK_BOOTTIME, which runs through suspend.
func bootTime(mono time.Duration) time.Duration { return readClock(unix.CLOCK_BOOTTIME, mono) }
