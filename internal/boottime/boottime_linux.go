package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Read reads CLOCK_BOOTTIME, which runs through suspend.
func Read(mono time.Duration) time.Duration { return readClock(unix.CLOCK_BOOTTIME, mono) }
