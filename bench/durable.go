package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"golang.org/x/sys/unix"

	"lethe/bench/measure"
	"lethe/bench/report"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
)

// rowSize is the size of a row's key and value.
type rowSize struct{ key, value int }

// shape is the rows that an operation writes.
type shape []rowSize

func (s shape) bytes() (n int) {
	for _, r := range s {
		n += r.key + r.value
	}
	return n
}

// scanner is what the store gives to those who read it, as far as needed here;
// its own name is out of reach of this module.
type scanner interface {
	Scan(prefix, after []byte, fn func(key, value []byte) bool) error
}

type viewer[R scanner] interface {
	View(ctx context.Context, fn func(R) error) error
}

// kinds adds up the rows of a store by kind: the first byte of a key, and for
// wrapped rows, which an epoch follows, the kind after it.
func kinds[R scanner](ctx context.Context, s viewer[R]) (map[string]*sum, error) {
	all := make(map[string]*sum)
	err := s.View(ctx, func(r R) error {
		return r.Scan(nil, nil, func(key, value []byte) bool {
			kind := string(key[:1])
			switch {
			case kind == "w" && len(key) > 5:
				kind += string(key[5:6])
			case kind == "L" && len(key) > 1:
				kind += string(key[1:2])
			}
			if all[kind] == nil {
				all[kind] = new(sum)
			}
			all[kind].rows++
			all[kind].key += len(key)
			all[kind].value += len(value)
			return true
		})
	})
	return all, err
}

type sum struct{ rows, key, value int }

// shapes finds out what rows a create and a destroy write, and how large a
// receipt is, from a keyd that has done a number of each.
func (b *bench) shapes() (create, destroy shape, receipt int, err error) {
	const n = 256
	look := func() (map[string]*sum, error) {
		s, err := badger.Open(badger.Options{Dir: filepath.Join(b.dir, "shapes", "store")})
		if err != nil {
			return nil, err
		}
		k, err := kinds(b, s)
		return k, errors.Join(err, s.Close())
	}
	session := func(do func(d *daemon) error) (map[string]*sum, error) {
		d, err := b.startKeyd("shapes")
		if err != nil {
			return nil, err
		}
		if err := errors.Join(do(d), d.stop()); err != nil {
			return nil, err
		}
		return look()
	}
	var seen [3]map[string]*sum
	if seen[0], err = session(func(d *daemon) error { _, err := d.fill(b, 0, 1, 0); return err }); err != nil {
		return nil, nil, 0, err
	}
	if seen[1], err = session(func(d *daemon) error { _, err := d.fill(b, 1, n+1, 0); return err }); err != nil {
		return nil, nil, 0, err
	}
	if seen[2], err = session(func(d *daemon) error {
		var bytes atomic.Int64
		_, err := closedLoop(b, 64, 0, n, func(_, i int) error {
			resp, err := keydv1.NewErasureServiceClient(d.conn).DestroyKey(b, destroyRequest(subjectID(i+1)))
			bytes.Add(int64(len(resp.GetReceipt())))
			return err
		})
		receipt = int(bytes.Load() / n)
		return err
	}); err != nil {
		return nil, nil, 0, err
	}
	// Rows that were added, as often as they were added an operation; rows that
	// were overwritten keep their number and change their size.
	written := func(before, after map[string]*sum, overwritten map[string]bool) (s shape) {
		for kind, a := range after {
			was := before[kind]
			if was == nil {
				was = new(sum)
			}
			added := a.rows - was.rows
			switch {
			case overwritten[kind]:
				s = append(s, rowSize{a.key / a.rows, a.value / a.rows})
			case added >= n/2:
				each := rowSize{(a.key - was.key) / added, (a.value - was.value) / added}
				for range (added + n/2) / n {
					s = append(s, each)
				}
			}
		}
		return s
	}
	create = written(seen[0], seen[1], nil)
	destroy = written(seen[1], seen[2], map[string]bool{"S": true, "wD": true})
	if len(create) == 0 || len(destroy) == 0 {
		return nil, nil, 0, fmt.Errorf("what keyd writes cannot be made out: %v", seen)
	}
	return create, destroy, receipt, nil
}

// put writes rows of a shape under keys that n makes unique; the value of one
// row is what varies least among stores: random bytes.
func (s shape) put(n uint64, put func(key, value []byte) error) error {
	for i, r := range s {
		key := make([]byte, max(r.key, 10))
		key[0], key[1] = 'x', byte(i)
		// Spread over the key space, as handles are.
		binary.BigEndian.PutUint64(key[2:], n*0x9e3779b97f4a7c15)
		value := make([]byte, r.value)
		for j := 0; j+8 <= len(value); j += 8 {
			binary.LittleEndian.PutUint64(value[j:], rand.Uint64())
		}
		if err := put(key, value); err != nil {
			return err
		}
	}
	return nil
}

type putter interface{ Put(key, value []byte) error }

type updater[T putter] interface {
	Update(ctx context.Context, fn func(T) error) error
}

// straight writes a shape straight into the product's store, which groups what
// comes at the same time into one commit.
func straight[T putter](s updater[T], sh shape) func(int, int) error {
	var n atomic.Uint64
	return func(int, int) error {
		id := n.Add(1)
		return s.Update(context.Background(), func(tx T) error { return sh.put(id, tx.Put) })
	}
}

// groupCommit writes a shape into Badger alone: clients hand their rows to one
// goroutine, which commits all that wait in one transaction with one sync.
type groupCommit struct {
	db    *badgerdb.DB
	mu    sync.Mutex
	more  sync.Cond
	waits []*pending
	end   bool
	n     atomic.Uint64
	done  chan struct{}
}

type pending struct {
	keys, values [][]byte
	done         chan error
}

func openGroupCommit(dir string) (*groupCommit, error) {
	// As the product's store has it: values in the tree, synced, uncompressed.
	db, err := badgerdb.Open(badgerdb.DefaultOptions(dir).WithSyncWrites(true).WithCompression(options.None).
		WithMemTableSize(16 << 20).WithNumMemtables(2).WithNumCompactors(2).WithBaseTableSize(8 << 20).
		WithBlockCacheSize(0).WithIndexCacheSize(0).WithValueThreshold(1 << 20).
		WithDetectConflicts(false).WithMetricsEnabled(false).WithLogger(nil))
	if err != nil {
		return nil, err
	}
	g := &groupCommit{db: db, done: make(chan struct{})}
	g.more.L = &g.mu
	go g.loop()
	return g, nil
}

func (g *groupCommit) write(sh shape) func(int, int) error {
	return func(int, int) error {
		p := &pending{done: make(chan error, 1)}
		err := sh.put(g.n.Add(1), func(key, value []byte) error {
			p.keys, p.values = append(p.keys, key), append(p.values, value)
			return nil
		})
		if err != nil {
			return err
		}
		g.mu.Lock()
		g.waits = append(g.waits, p)
		g.more.Signal()
		g.mu.Unlock()
		return <-p.done
	}
}

func (g *groupCommit) loop() {
	defer close(g.done)
	for {
		g.mu.Lock()
		for len(g.waits) == 0 && !g.end {
			g.more.Wait()
		}
		group := g.waits
		g.waits = nil
		g.mu.Unlock()
		if len(group) == 0 {
			return
		}
		err := g.db.Update(func(txn *badgerdb.Txn) error {
			for _, p := range group {
				for i := range p.keys {
					if err := txn.Set(p.keys[i], p.values[i]); err != nil {
						return err
					}
				}
			}
			return nil
		})
		for _, p := range group {
			p.done <- err
		}
	}
}

func (g *groupCommit) close() error {
	g.mu.Lock()
	g.end = true
	g.more.Signal()
	g.mu.Unlock()
	<-g.done
	return g.db.Close()
}

func (b *bench) durable() (*report.Section, error) {
	create, destroy, receipt, err := b.shapes()
	if err != nil {
		return nil, fmt.Errorf("shapes: %w", err)
	}
	keyd, err := b.startKeyd("durable")
	if err != nil {
		return nil, err
	}
	defer keyd.stop()
	empty, err := b.startEmpty()
	if err != nil {
		return nil, err
	}
	defer empty.stop()
	least, err := b.startLeast("least", destroy, receipt)
	if err != nil {
		return nil, err
	}
	defer least.stop()
	store, err := badger.Open(badger.Options{Dir: filepath.Join(b.dir, "straight"), Create: true})
	if err != nil {
		return nil, err
	}
	defer store.Close()
	group, err := openGroupCommit(filepath.Join(b.dir, "group"))
	if err != nil {
		return nil, err
	}
	defer group.close()

	var created, destroyed atomic.Int64
	erasure := keydv1.NewErasureServiceClient(keyd.conn)
	createOne := func(int, int) error {
		n := int(created.Add(1)) - 1
		_, err := get(b, keyd.conn, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{sealQuery(n)}})
		return err
	}
	var spare atomic.Int64 // from here on subjects are made for destroying only
	spare.Store(10_000_000)
	destroyOne := func(int, int) error {
		_, err := erasure.DestroyKey(b, destroyRequest(subjectID(10_000_000+int(destroyed.Add(1))-1)))
		return err
	}
	const clients = 64
	type contender struct {
		name     string
		op       func(int, int) error
		clients  int
		server   *daemon // whose processor time counts; nil: this process's
		prepare  func() error
		rates    []float64
		p50, p99 []float64
		cpu      []float64 // µs an operation, of whoever does the work
	}
	all := []*contender{
		{name: "store, the rows of a create", op: straight(store, create)},
		{name: "Badger, the rows of a create", op: group.write(create)},
		{name: "keyd: create", op: createOne, server: keyd},
		{name: "store, the rows of a destroy", op: straight(store, destroy)},
		{name: "Badger, the rows of a destroy", op: group.write(destroy)},
		{name: "keyd: destroy", op: destroyOne, server: keyd},
		{name: "an empty call, which writes nothing", op: func(int, int) error { return callEmpty(b, empty.conn) }, server: empty},
		{name: "keyd: create, 256 clients", op: createOne, server: keyd, clients: 256},
		{name: "keyd: destroy, 256 clients", op: destroyOne, server: keyd, clients: 256},
		{name: "the least destroy", op: func(int, int) error { return callLeast(b, least.conn) }, server: least},
	}
	for _, destroyer := range []*contender{all[5], all[8]} {
		destroyer.prepare = func() error {
			// Enough of them for a turn, or else for all that are left: what a fill
			// leaves keyd to merge is no part of a destroy.
			rate := max(measure.Quantile(destroyer.rates, 1), 6000)
			turn := int(1.5 * b.callTurn.Seconds() * rate)
			from, next := int(spare.Load()), 10_000_000+int(destroyed.Load())
			if from >= next+turn {
				return nil
			}
			want := next + 2*(b.callRounds+1-len(destroyer.rates))*turn
			spare.Store(int64(want))
			_, err := keyd.fill(b, from, want, 0)
			return err
		}
	}
	busy := func(d *daemon) (time.Duration, error) {
		if d == nil {
			return measure.CPU(), nil
		}
		return d.process().CPU()
	}
	for round := range b.callRounds + 1 {
		for _, j := range rand.Perm(len(all)) {
			c := all[j]
			if c.prepare != nil {
				if err := c.prepare(); err != nil {
					return nil, err
				}
			}
			before, err := busy(c.server)
			if err != nil {
				return nil, err
			}
			l, err := closedLoop(b, max(c.clients, clients), b.callTurn, 0, c.op)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			after, err := busy(c.server)
			if err != nil {
				return nil, err
			}
			if round > 0 {
				c.rates = append(c.rates, l.perSecond())
				c.p50, c.p99 = append(c.p50, l.at(0.5)), append(c.p99, l.at(0.99))
				c.cpu = append(c.cpu, perOp(after-before, l.ops)/1e3)
			}
		}
	}

	s := &report.Section{Title: "Durable creates and destroys", Text: fmt.Sprintf(`%d clients in a closed loop. A create is the first use of a subject: %d rows, %d bytes. A destroy is %d rows, %d bytes, and beyond
them the anchor's object (a file, synced, linked, its directory synced) and the signed receipt. The limit is the same rows, by number and size, written by
%[1]d clients straight into the store that keyd uses, and into Badger with a group commit of the bench's own: no call, no cryptography, no checks, no anchor.
The least destroy is a call with those rows, an object of the anchor and a signature a group, and an answer as long as a receipt, in a process of its own, grouped as
keyd groups: no key, no check, no tree, no proof, no audit, nothing read. What it is short of the limit is the price of an acknowledged call that is grouped so.
Processor time is keyd's alone in its rows, and the bench's own in those of the stores. A closed loop is bound by latency: with more clients more share a commit.`,
		clients, len(create), create.bytes(), len(destroy), destroy.bytes())}
	ratio := func(i, base int) float64 { return measure.Median(measure.Quotients(all[i].rates, all[base].rates)) }
	t := report.Table{Title: "With 64 clients, and some with more", Head: []string{"", "ops/s", "p50 ms", "p99 ms", "CPU µs/op", "of the store", "of Badger", "spread"}}
	for i, c := range all[:6] {
		base := all[i/3*3]
		q := measure.Quotients(c.rates, base.rates)
		t.Add(c.name, measure.Median(c.rates), measure.Median(c.p50)/1e6, measure.Median(c.p99)/1e6, measure.Median(c.cpu),
			measure.Median(q), measure.Median(measure.Quotients(c.rates, all[i/3*3+1].rates)), percent(measure.Spread(q)))
	}
	for _, c := range all[6:] {
		row := []any{c.name, measure.Median(c.rates), measure.Median(c.p50) / 1e6, measure.Median(c.p99) / 1e6, measure.Median(c.cpu)}
		if c == all[9] {
			row = append(row, ratio(9, 3), ratio(9, 4))
		}
		t.Add(row...)
	}
	s.Tables = append(s.Tables, t)
	b.target(report.AtLeast("Durable creates, 64 clients, of the rows straight into the store", 0.5, ratio(2, 0), fmt.Sprintf("of Badger alone %.2f; the same clients make empty calls at %.2f of the store's rate, on the same cores", ratio(2, 1), ratio(6, 0))))
	b.target(report.AtLeast("Durable destroys, 64 clients, of the rows straight into the store", 0.5, ratio(5, 3), fmt.Sprintf("the least destroy, with a call and an anchor's object a group but nothing else, reaches %.2f; of Badger alone %.2f; empty calls %.2f of the store's rate", ratio(9, 3), ratio(5, 4), ratio(6, 3))))

	alone, err := b.unloadedLatency(keyd, empty, createOne, func(n int) error {
		_, err := erasure.DestroyKey(b, destroyRequest(subjectID(n)))
		return err
	})
	if err != nil {
		return nil, err
	}
	s.Tables = append(s.Tables, alone)
	return s, nil
}

// unloadedLatency compares one client's creates and destroys with what they
// are made of: syncs of the disk and an empty call.
func (b *bench) unloadedLatency(keyd, empty *daemon, create func(int, int) error, destroy func(int) error) (report.Table, error) {
	t := report.Table{Title: "One client, nothing else: latency in ms", Head: []string{"", "p50", "p90", "p99", "max"}}
	const first = 20_000_000
	if _, err := keyd.fill(b, first, first+b.unloaded, 0); err != nil {
		return t, err
	}
	f, err := os.Create(filepath.Join(b.dir, "synced"))
	if err != nil {
		return t, err
	}
	defer f.Close()
	line := make([]byte, 200)
	ops := []struct {
		name string
		op   func(i int) error
	}{
		{"append of 200 B and fdatasync", func(int) error {
			if _, err := f.Write(line); err != nil {
				return err
			}
			return unix.Fdatasync(int(f.Fd()))
		}},
		{"empty call", func(int) error { return callEmpty(b, empty.conn) }},
		{"create", func(i int) error { return create(0, i) }},
		{"destroy", func(i int) error { return destroy(first + i) }},
	}
	took := make([][]float64, len(ops))
	for i := range b.unloaded {
		for j := range ops {
			k := (i + j) % len(ops)
			begun := time.Now()
			if err := ops[k].op(i); err != nil {
				return t, fmt.Errorf("%s: %w", ops[k].name, err)
			}
			took[k] = append(took[k], float64(time.Since(begun))/1e6)
		}
	}
	p99 := make([]float64, len(ops))
	for k, o := range ops {
		p99[k] = measure.Quantile(took[k], 0.99)
		t.Add(o.name, measure.Median(took[k]), measure.Quantile(took[k], 0.9), p99[k], measure.Quantile(took[k], 1))
	}
	limit := 2*p99[0] + p99[1]
	b.target(report.AtMost("Create, unloaded: p99 against two syncs and a round trip", limit, p99[2], " ms",
		"two syncs: Badger syncs its value log with every commit, which is empty"))
	b.target(report.AtMost("Destroy, unloaded: p99 against two syncs and a round trip", limit, p99[3], " ms",
		fmt.Sprintf("four syncs: the store's log, Badger's value log, which is empty, the anchor's file, its directory; p50 %.2f ms, of two syncs and a call %.2f ms", measure.Median(took[3]), 2*measure.Median(took[0])+measure.Median(took[1]))))
	return t, nil
}
