package sdk_test

import (
	"fmt"
	"os"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	keydv1 "lethe/proto/keyd/v1"
)

const (
	erased  = keydv1.Outcome_OUTCOME_ERASED
	pending = keydv1.Outcome_OUTCOME_PENDING_ERASURE
	expired = keydv1.Outcome_OUTCOME_EXPIRED
)

func TestMain(m *testing.M) {
	exampleKeyd = startFakeKeyd(newFakeClock())
	code := m.Run()
	exampleKeyd.stop()
	// Every client is closed by now, and must have left nothing running.
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// aliased returns a string that shares b's memory.
func aliased(b []byte) string { return unsafe.String(&b[0], len(b)) }

// sinceFake is how far a fake clock is behind the real one.
func sinceFake(c *fakeClock) time.Duration {
	wall, _ := c.Now()
	return time.Since(wall)
}

// exampleAddress is where the examples' keyd listens. It knows nobody yet.
func exampleAddress() string {
	exampleKeyd.with(func() { exampleKeyd.keys = make(map[string]*fakeKey) })
	return exampleKeyd.addr
}

var exampleKeyd *fakeKeyd
