package main

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// Progress is shown from progressAfter on, and then every progressEvery.
const (
	progressAfter = time.Second
	progressEvery = 200 * time.Millisecond
)

// progress shows how far the reading of an input has come.
type progress struct {
	w    io.Writer
	verb string
	in   *input
	now  func() time.Time

	began time.Time
	drawn bool
}

// showProgress shows the progress on a terminal while the work takes long.
// The function that it returns ends that.
func (a *app) showProgress(verb string, in *input) (stop func()) {
	if a.json || !a.isTerminal(a.err) {
		return func() {}
	}
	p := &progress{w: a.err, verb: verb, in: in, now: a.now}
	ticks := time.NewTicker(progressEvery)
	done := p.run(ticks.C)
	return func() {
		ticks.Stop()
		done()
	}
}

// run draws at each tick until the function that it returns is called, and
// then clears the line.
func (p *progress) run(ticks <-chan time.Time) (stop func()) {
	p.began = p.now()
	quit := make(chan struct{})
	var drawing sync.WaitGroup
	drawing.Go(func() {
		for {
			select {
			case <-ticks:
				p.draw()
			case <-quit:
				if p.drawn {
					fmt.Fprint(p.w, "\r\x1b[K")
				}
				return
			}
		}
	})
	return func() {
		close(quit)
		drawing.Wait()
	}
}

func (p *progress) draw() {
	elapsed := p.now().Sub(p.began)
	if elapsed < progressAfter {
		return
	}
	p.drawn = true
	fmt.Fprint(p.w, "\r\x1b[K"+p.line(elapsed))
}

// line is what is drawn.
func (p *progress) line(elapsed time.Duration) string {
	const width = 24
	done := p.in.read.Load()
	rate := float64(done) / elapsed.Seconds()
	if p.in.size <= 0 {
		return fmt.Sprintf("%s  %s  %s/s", p.verb, formatBytes(float64(done)), formatBytes(rate))
	}
	part := min(float64(done)/float64(p.in.size), 1) // a file can grow meanwhile
	full := int(part * width)
	bar := strings.Repeat("#", full) + strings.Repeat(".", width-full)
	return fmt.Sprintf("%s  [%s] %3.0f%%  %s of %s  %s/s", p.verb, bar, 100*part,
		formatBytes(float64(done)), formatBytes(float64(p.in.size)), formatBytes(rate))
}

// formatBytes writes a number of bytes in units of 1024.
func formatBytes(n float64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%.0f B", n)
	}
	i := -1
	for n >= 1024 && i < len(units)-1 {
		n /= 1024
		i++
	}
	return fmt.Sprintf("%.1f %ciB", n, units[i])
}
