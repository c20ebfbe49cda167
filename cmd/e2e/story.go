package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// story tells what happens, with timings.
type story struct {
	out   io.Writer
	begun time.Time
	lap   time.Time
	err   error // of writing
}

func newStory(out io.Writer) *story {
	now := time.Now()
	return &story{out: out, begun: now, lap: now}
}

func (s *story) print(format string, args ...any) {
	if _, err := fmt.Fprintf(s.out, format, args...); err != nil && s.err == nil {
		s.err = err
	}
}

func (s *story) act(n int, title string) {
	s.print("\n%d. %s\n", n, title)
	s.lap = time.Now()
}

// tell states a claim that was checked, and how long it took since the last.
func (s *story) tell(format string, args ...any) {
	now := time.Now()
	text := wrap(fmt.Sprintf(format, args...), 78)
	s.print("   %-78s %8s\n", text[0], brief(now.Sub(s.lap)))
	for _, line := range text[1:] {
		s.print("   %s\n", line)
	}
	s.lap = now
}

// quote shows what a program printed.
func (s *story) quote(text string) {
	for line := range strings.Lines(strings.TrimSpace(text)) {
		s.print("     | %s\n", strings.TrimRight(line, "\n"))
	}
}

// brief is a duration in at most four characters and a unit.
func brief(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// wrap cuts text into lines of at most width characters, at spaces.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = "  " + word
			continue
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
