package measure

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// CPU returns the processor time that this process has used, of all threads.
func CPU() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Process is another process, watched through /proc.
type Process int

// CPU returns the processor time that the process has used, in steps of 10 ms.
func (p Process) CPU() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", int(p)))
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may hold anything; fields 14 and 15 count
	// from 1 with the name as the second.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat: too short", int(p))
	}
	var ticks int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil
}

// Memory returns the process's resident memory in bytes: all of it, and what
// of it is anonymous, not mapped from files.
func (p Process) Memory() (resident, anonymous int64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", int(p)))
	if err != nil {
		return 0, 0, err
	}
	for line := range bytes.Lines(b) {
		fields := bytes.Fields(line)
		if len(fields) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(string(fields[1]), 10, 64)
		switch string(fields[0]) {
		case "VmRSS:":
			resident = n << 10
		case "RssAnon:":
			anonymous = n << 10
		}
	}
	return resident, anonymous, nil
}
