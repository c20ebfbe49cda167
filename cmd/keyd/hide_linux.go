package main

import (
	"errors"

	"golang.org/x/sys/unix"
)

// hideMemory keeps keys out of core dumps and away from debuggers of the same
// user, and new files away from other users.
func hideMemory() error {
	unix.Umask(0o077)
	return errors.Join(
		unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}),
		unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0),
	)
}
