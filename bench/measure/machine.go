package measure

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine is what results belong to.
type Machine struct {
	CPU      string  `json:"cpu"`
	Cores    int     `json:"cores"`
	MemoryMB int64   `json:"memory_mb"`
	Kernel   string  `json:"kernel"`
	Go       string  `json:"go"`
	Load     float64 `json:"load_average"` // of one minute, before the run
}

// ThisMachine describes the machine, as far as it tells.
func ThisMachine() Machine {
	m := Machine{CPU: runtime.GOARCH, Cores: runtime.GOMAXPROCS(0), Kernel: runtime.GOOS, Go: runtime.Version(), Load: Load()}
	if v := field("/proc/cpuinfo", "model name"); v != "" {
		m.CPU = v + " (" + runtime.GOARCH + has(" aes", "AES-NI") + has(" vaes", "VAES") + has(" sha_ni", "SHA-NI") + ")"
	}
	kb, _, _ := strings.Cut(field("/proc/meminfo", "MemTotal"), " ")
	n, _ := strconv.ParseInt(kb, 10, 64)
	m.MemoryMB = n >> 10
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
	}
	return m
}

// Load is the load average of the last minute.
func Load() float64 {
	b, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(b), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}

func has(flag, word string) string {
	if strings.Contains(" "+field("/proc/cpuinfo", "flags")+" ", flag+" ") {
		return ", " + word
	}
	return ""
}

// field returns the first value of a name in a file of "name: value" lines.
func field(file, name string) string {
	b, _ := os.ReadFile(file)
	for line := range bytes.Lines(b) {
		k, v, ok := strings.Cut(string(line), ":")
		if ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
