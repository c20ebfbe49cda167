//go:build unix

package main

import "golang.org/x/sys/unix"

// forbidCoreDumps keeps keys and plaintext out of core dumps, as far as the
// system lets it. The process stays debuggable by its own user: making it
// undumpable would also close /dev/fd/N, and so `--subject-file <(…)`, to it.
func forbidCoreDumps() { _ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) }
