package envelope

import (
	"sync"
	"sync/atomic"
)

// parts is work that several goroutines share: each does the next part that
// nobody has taken. So whoever needs all of it helps until nothing is left to
// take, rather than wait idly for one who may not even have begun.
type parts struct {
	do    func(i int)
	count int32
	taken atomic.Int32
	left  atomic.Int32
	done  chan struct{} // closed when none is left
}

// start is called before any share, with a count of at least one.
func (p *parts) start(count int, do func(i int)) {
	p.do = do
	p.count = int32(count)
	p.left.Store(p.count)
	p.done = make(chan struct{})
}

// one does a part; it reports false if all are taken.
func (p *parts) one() bool {
	i := p.taken.Add(1) - 1
	if i >= p.count {
		return false
	}
	p.do(int(i))
	if p.left.Add(-1) == 0 {
		close(p.done)
	}
	return true
}

// share does parts until all are taken; some may then still be under way.
func (p *parts) share() {
	for p.one() {
	}
}

// until does parts for as long as there are any and those of first are not
// done.
func (p *parts) until(first *parts) {
	for first.left.Load() > 0 && p.one() {
	}
}

// abandon leaves undone what nobody has taken, and returns when nothing is
// under way.
func (p *parts) abandon() {
	rest := p.count - p.taken.Swap(p.count)
	if rest <= 0 || p.left.Add(-rest) > 0 {
		<-p.done
	}
}

// crew is the goroutines that share one work after the other. They end when
// there is none: nobody has to dismiss them. A goroutine for each work would
// begin later: what was just made waits longest for a processor.
type crew struct {
	size int // goroutines at most

	mu     sync.Mutex
	queue  []*parts
	atWork int
}

// share has one of the crew share p, once it is free.
func (c *crew) share(p *parts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, p)
	if c.atWork < c.size {
		c.atWork++
		go c.work()
	}
}

func (c *crew) work() {
	for p := c.next(); p != nil; p = c.next() {
		p.share()
	}
}

// next returns what to share next, or nil if the goroutine is to end.
func (c *crew) next() *parts {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		c.atWork--
		return nil
	}
	p := c.queue[0]
	c.queue = append(c.queue[:0], c.queue[1:]...)
	return p
}
