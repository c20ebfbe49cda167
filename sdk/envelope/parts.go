package envelope

import "sync/atomic"

// parts is work that several goroutines share: each does the next part that
// nobody has taken. So whoever needs all of it helps until nothing is left to
// take, rather than wait idly for one who may not even have begun.
type parts struct {
	count int32
	taken atomic.Int32
	left  atomic.Int32
	done  chan struct{} // closed when none is left
}

// start is called before any share, with a count of at least one.
func (p *parts) start(count int) {
	p.count = int32(count)
	p.left.Store(p.count)
	p.done = make(chan struct{})
}

// share does parts until all are taken; some may then still be under way.
func (p *parts) share(do func(i int)) {
	for {
		i := p.taken.Add(1) - 1
		if i >= p.count {
			return
		}
		do(int(i))
		if p.left.Add(-1) == 0 {
			close(p.done)
		}
	}
}

// finish does what nobody has taken, and returns when all is done.
func (p *parts) finish(do func(i int)) {
	p.share(do)
	<-p.done
}

// abandon leaves undone what nobody has taken, and returns when nothing is
// under way.
func (p *parts) abandon() {
	rest := p.count - p.taken.Swap(p.count)
	if rest <= 0 || p.left.Add(-rest) > 0 {
		<-p.done
	}
}
