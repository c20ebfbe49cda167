package policy

import (
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	keydv1 "lethe/proto/keyd/v1"
)

// trail writes audit lines, and counts those that cannot be written. A call does
// not fail for its line: erasure goes on while the audit log's disk is full. So
// that lines are lost has to be told otherwise.
type trail struct {
	to  io.Writer
	log *slog.Logger

	mu    sync.Mutex
	err   error     // of the last line, if it was lost
	since time.Time // when the first line was lost since one was written
	lost  uint64    // lines since then
	total uint64    // lines lost since the start
}

// Write writes one line.
func (t *trail) Write(line []byte) (int, error) {
	n, err := t.to.Write(line)
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case err != nil:
		if t.err == nil {
			t.since, t.lost = time.Now(), 0
			t.log.Error("audit lines are being lost: calls go on, and have none", "error", err)
		}
		t.err = err
		t.lost++
		t.total++
	case t.err != nil:
		t.err = nil
		t.log.Warn("audit lines are written again", "lost", t.lost, "since", stamp(t.since))
	}
	return n, err
}

// end says what nobody was told of yet.
func (t *trail) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		t.log.Error("audit lines were lost until the end", "lost", t.lost, "since", stamp(t.since), "error", t.err)
	}
}

func (t *trail) lines() (lost uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.total
}

// status is how the trail is, as a component of keyd. That it is well again is
// known by the next line that is written.
func (t *trail) status() *keydv1.ComponentStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &keydv1.ComponentStatus{Name: "audit", Healthy: t.err == nil, Detail: "takes a line a call"}
	switch {
	case t.err != nil:
		s.Detail = fmt.Sprintf("audit lines are lost, %d since %s: %v", t.lost, stamp(t.since), t.err)
	case t.total > 0:
		s.Detail += fmt.Sprintf("; %d lines were lost since keyd was started", t.total)
	}
	return s
}
