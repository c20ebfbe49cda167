package main

import (
	"strings"
	"sync"
	"testing"
	"time"

	"lethe/internal/logtest"
)

func TestProgress(t *testing.T) {
	var mu sync.Mutex
	now := time.Unix(1000, 0)
	clock := func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}
	var out logtest.Buffer
	in := &input{size: 4 << 20}
	p := &progress{w: &out, verb: "sealing", in: in, now: clock}
	ticks := make(chan time.Time)
	stop := p.run(ticks)
	// Two ticks: once the second is taken, the first has been drawn.
	tick := func(d time.Duration) {
		mu.Lock()
		now = now.Add(d)
		mu.Unlock()
		ticks <- time.Time{}
		ticks <- time.Time{}
	}
	tick(999 * time.Millisecond)
	if out.String() != "" {
		t.Errorf("before a second it draws %q", out.String())
	}
	in.read.Store(1 << 20)
	tick(time.Second + time.Millisecond)
	if want := "\r\x1b[Ksealing  [######..................]  25%  1.0 MiB of 4.0 MiB  512.0 KiB/s"; !strings.HasPrefix(out.String(), want) {
		t.Errorf("it draws %q", out.String())
	}
	stop()
	if !strings.HasSuffix(out.String(), "/s\r\x1b[K") {
		t.Errorf("it leaves the line as %q", out.String())
	}

	for _, x := range []struct {
		size, read int64
		want       string
	}{
		{-1, 3 << 30, "opening  3.0 GiB  1.5 GiB/s"},
		{0, 10, "opening  10 B  5 B/s"},
		{100, 100, "opening  [########################] 100%  100 B of 100 B  50 B/s"},
		{100, 200, "opening  [########################] 100%  200 B of 100 B  100 B/s"},
	} {
		in := &input{size: x.size}
		in.read.Store(x.read)
		p := &progress{verb: "opening", in: in}
		if got := p.line(2 * time.Second); got != x.want {
			t.Errorf("%d of %d: %q, want %q", x.read, x.size, got, x.want)
		}
	}
}

// Nothing is drawn in JSON, or where there is no terminal.
func TestNoProgress(t *testing.T) {
	for _, x := range []struct{ terminal, json bool }{{false, false}, {true, true}, {false, true}} {
		a := newApp(strings.NewReader(""), nil, nil)
		a.json, a.isTerminal = x.json, func(any) bool { return x.terminal }
		a.now = func() time.Time { t.Errorf("terminal %v, json %v: it begins", x.terminal, x.json); return time.Time{} }
		a.showProgress("sealing", &input{})()
	}
	began := false
	a := newApp(strings.NewReader(""), nil, nil)
	a.isTerminal = func(any) bool { return true }
	a.now = func() time.Time { began = true; return time.Time{} }
	a.showProgress("sealing", &input{})()
	if !began {
		t.Error("it does not begin on a terminal")
	}
}
