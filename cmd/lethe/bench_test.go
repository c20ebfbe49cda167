package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lethe/sdk"
)

// A server that stands still for a second delays all calls that are due
// meanwhile, and their response times say so; their service times do not, which
// is why both are told.
func TestOpenLoopCountsFromWhenCallsAreDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		l := openLoop{rate: 100, duration: 10 * time.Second, even: true, inFlight: 1,
			call: func(context.Context, int) error {
				if now := time.Since(begun); now >= 5*time.Second && now < 6*time.Second {
					time.Sleep(6*time.Second - now)
				}
				time.Sleep(time.Millisecond)
				return nil
			}}
		r := l.run(t.Context(), nil)
		if r.sent != 999 || r.response.n != 999 {
			t.Errorf("%d sent, %d answered, want 999", r.sent, r.response.n)
		}
		// A hundred calls were due in that second, and the queue that they made
		// takes some more to work off: of them all, the half waited half of it.
		if q := r.response.quantile(0.95); q < 400*time.Millisecond || q > 700*time.Millisecond {
			t.Errorf("the 95th percentile of the response time is %v", q)
		}
		if r.response.most < time.Second || r.response.most > 1020*time.Millisecond {
			t.Errorf("the longest response took %v", r.response.most)
		}
		if q := r.service.quantile(0.998); q > 2*time.Millisecond {
			t.Errorf("the 99.8th percentile of the service time is %v: one call alone stood still", q)
		}
		if r.waited < 90 {
			t.Errorf("%d calls waited for a slot", r.waited)
		}
	})
}

// With slots enough, calls are sent when they are due, however long earlier
// ones take.
func TestOpenLoopDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		l := openLoop{rate: 10, duration: 5 * time.Second, even: true, inFlight: 1000,
			call: func(_ context.Context, n int) error {
				time.Sleep(3 * time.Second)
				if n%7 == 0 {
					return broken
				}
				return nil
			}}
		r := l.run(t.Context(), func(err error) string { return err.Error() })
		if r.sent != 49 || r.failed["broken"] != 7 || r.response.n != 42 {
			t.Errorf("%d sent, %d answered, failed: %v", r.sent, r.response.n, r.failed)
		}
		if r.most < 30 || r.most > 31 || r.waited != 0 {
			t.Errorf("at most %d were under way, %d waited", r.most, r.waited)
		}
		if r.response.most != 3*time.Second || r.took != 4900*time.Millisecond+3*time.Second {
			t.Errorf("the longest took %v, all of it %v", r.response.most, r.took)
		}
	})
}

// Arrivals that are independent have the same rate, and gaps of every length.
func TestOpenLoopAtRandom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := openLoop{rate: 1000, duration: 20 * time.Second, inFlight: 1000, call: func(context.Context, int) error { return nil }}
		r := l.run(t.Context(), nil)
		if r.sent < 19_000 || r.sent > 21_000 { // seven deviations
			t.Errorf("%d calls in 20 s, want about 20000", r.sent)
		}
	})
}

func TestHistogram(t *testing.T) {
	for d := time.Duration(0); d < 10*time.Hour; d += d/100 + 1 {
		i := bucketOf(d)
		if top := topOf(i); top < d || top > d+d/64 {
			t.Fatalf("%v is in a bucket up to %v", d, top)
		}
		if i > 0 && topOf(i-1) >= d {
			t.Fatalf("%v would be in the bucket before, up to %v", d, topOf(i-1))
		}
	}
	h := new(histogram)
	if h.quantile(0.5) != 0 || h.mean() != 0 {
		t.Error("an empty one has a median")
	}
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Millisecond)
	}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 501, 0.99: 991, 1: 1000} {
		got := h.quantile(q)
		if got < want*time.Millisecond || got > want*time.Millisecond*65/64 {
			t.Errorf("quantile %v is %v, want %d ms", q, got, want)
		}
	}
	if h.mean() != 500500*time.Microsecond {
		t.Errorf("the mean is %v", h.mean())
	}
}

func TestBenchKeyd(t *testing.T) {
	c := newCLI(t)
	bench := func(args ...string) map[string]any {
		t.Helper()
		return c.object("", append([]string{"bench", "keyd", "--tenant", "acme", "--class", "memory", "--rate", "400", "--duration", "250ms", "--subjects", "20"}, args...)...)
	}
	for _, op := range [][]string{{}, {"--op", "seal", "--batch", "3"}, {"--op", "create", "--yes"}, {"--op", "destroy", "--yes"}} {
		v := bench(op...)
		if v["answered"].(float64) < 20 || len(v["failed"].(map[string]any)) != 0 {
			t.Errorf("%v: %v", op, v)
		}
		p := v["response"].(map[string]any)["percentiles_us"].([]any)
		if last := p[len(p)-1].([]any); last[0].(float64) != 100 || last[1].(float64) <= 0 {
			t.Errorf("%v: percentiles %v", op, p)
		}
	}
	// Nothing of a load that makes no subjects anew is destroyed.
	out := c.ok("", "bench", "keyd", "--tenant", "acme", "--class", "memory", "--rate", "100", "--duration", "100ms", "--even")
	for _, want := range []string{"open, 1 keys each", "RESPONSE ms", "99.9 %"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
	args := func(more ...string) []string {
		return append([]string{"bench", "keyd", "--tenant", "acme", "--class", "memory", "--rate", "100"}, more...)
	}
	for _, bad := range [][]string{
		{"--op", "open", "--batch", "300"}, {"--op", "destroy"}, {"--op", "create"}, {"--op", "steal"}, {"--duration", "0s"},
		{"--rate", "0"}, {"--in-flight", "0"}, {"--subjects", "0"}, {"--op", "destroy", "--yes", "--rate", "1e6", "--duration", "1h"},
	} {
		c.fails(exitInvalid, "", args(bad...)...)
	}
	c.fails(exitOf(sdk.ErrUnknown).code, "", "bench", "keyd", "--tenant", "nobody", "--class", "memory", "--rate", "100")
	c.keyd.Stop()
	c.fails(exitUnavailable, "", append(args("--op", "create", "--yes", "--duration", "100ms"), "--timeout", "200ms")...)
}
