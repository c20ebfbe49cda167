package main

import (
	"errors"

	"golang.org/x/sys/unix"
)

// connections is how many are served at a time: the rest wait. The store needs
// file descriptors of its own, and must never find that clients have them all.
func connections() int {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 256
	}
	return int(min(l.Cur/4, 10_000))
}

// hideMemory keeps keys out of core dumps and away from debuggers of the same
// user, and new files away from other users.
func hideMemory() error {
	unix.Umask(0o077)
	return errors.Join(
		unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}),
		unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0),
	)
}
