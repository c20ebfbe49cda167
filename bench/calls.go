package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"

	"lethe/bench/measure"
	"lethe/bench/report"
	keydv1 "lethe/proto/keyd/v1"
)

// caller is one kind of call, made in a closed loop by turns with others.
type caller struct {
	name    string
	server  *daemon
	keys    int // that one call brings
	clients int
	call    func(client, i int) error

	rates, client, process []float64 // a round each: calls/s, CPU ns a call here and there
}

// calls compares GetBlobKeys with an empty call through the same transport.
func (b *bench) calls() (*report.Section, error) {
	const batch = 100
	keyd, err := b.startKeyd("calls")
	if err != nil {
		return nil, err
	}
	defer keyd.stop()
	empty, err := b.startEmpty()
	if err != nil {
		return nil, err
	}
	defer empty.stop()
	open, err := keyd.fill(b, 0, b.subjects, b.subjects)
	if err != nil {
		return nil, err
	}

	singles := make([]*keydv1.GetBlobKeysRequest, len(open))
	for i, q := range open {
		singles[i] = &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}}
	}
	batches := make([]*keydv1.GetBlobKeysRequest, 64)
	for i := range batches {
		batches[i] = new(keydv1.GetBlobKeysRequest)
		for j := range batch {
			batches[i].Queries = append(batches[i].Queries, open[(i*batch+j*7)%len(open)])
		}
	}
	getOne := func(conn grpc.ClientConnInterface) func(int, int) error {
		return func(_, i int) error {
			// A step that is coprime to the number, so that all come about
			// and neighbours do not follow each other.
			_, err := get(b, conn, singles[i*7919%len(singles)])
			return err
		}
	}
	all := []*caller{
		{name: "empty call", server: empty, clients: 64, call: func(int, int) error { return callEmpty(b, empty.conn) }},
		{name: "GetBlobKeys, 1 key", server: keyd, keys: 1, clients: 64, call: getOne(keyd.conn)},
		{name: fmt.Sprintf("GetBlobKeys, %d keys", batch), server: keyd, keys: batch, clients: 64, call: func(_, i int) error {
			_, err := get(b, keyd.conn, batches[i%len(batches)])
			return err
		}},
		{name: "empty call, 1 client", server: empty, clients: 1, call: func(int, int) error { return callEmpty(b, empty.conn) }},
		{name: "GetBlobKeys, 1 key, 1 client", server: keyd, keys: 1, clients: 1, call: getOne(keyd.conn)},
	}
	if err := b.takeTurns(all); err != nil {
		return nil, err
	}

	s := &report.Section{Title: "Calls to keyd", Text: fmt.Sprintf(`Closed loop, one connection over a Unix socket, client and server on this machine and sharing its cores; no TLS.
The empty call is an empty message for an empty message between gRPC's defaults, to a process of its own. keyd is the real daemon: every
call reads the store, is audited to a file, and is counted in metrics. %d subjects, opened at random.`, b.subjects)}
	t := report.Table{Head: []string{"", "clients", "calls/s", "keys/s", "client CPU µs/call", "server CPU µs/call", "of the empty call", "spread"}}
	for _, c := range all {
		base := all[0]
		if c.clients == 1 {
			base = all[3]
		}
		q := measure.Quotients(c.rates, base.rates)
		rate := measure.Median(c.rates)
		var keys any
		if c.keys > 0 {
			keys = rate * float64(c.keys)
		}
		t.Add(c.name, c.clients, rate, keys, measure.Median(c.client)/1e3, measure.Median(c.process)/1e3, measure.Median(q), percent(measure.Spread(q)))
	}
	s.Tables = append(s.Tables, t)
	cpu := func(c *caller) float64 { return (measure.Median(c.client) + measure.Median(c.process)) / 1e3 }
	b.target(report.AtLeast("GetBlobKeys, 64 clients, of an empty call", 0.75, measure.Median(measure.Quotients(all[1].rates, all[0].rates)),
		fmt.Sprintf("both processors' time a call: %.0f µs empty, %.0f µs GetBlobKeys, of it %.0f µs in keyd", cpu(all[0]), cpu(all[1]), measure.Median(all[1].process)/1e3)))
	b.target(report.AtLeast(fmt.Sprintf("Batches of %d: keys/s, times those of single calls", batch), 4,
		batch*measure.Median(measure.Quotients(all[2].rates, all[1].rates)), ""))
	return s, nil
}

// takeTurns runs the callers' loops by turns.
func (b *bench) takeTurns(all []*caller) error {
	for round := range b.callRounds + 1 { // the first warms up
		for _, j := range rand.Perm(len(all)) {
			c := all[j]
			here := measure.CPU()
			there, err := c.server.process().CPU()
			if err != nil {
				return err
			}
			l, err := closedLoop(b, c.clients, b.callTurn, 0, c.call)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			if round == 0 {
				continue
			}
			hereAfter := measure.CPU()
			thereAfter, err := c.server.process().CPU()
			if err != nil {
				return err
			}
			c.rates = append(c.rates, l.perSecond())
			c.client = append(c.client, perOp(hereAfter-here, l.ops))
			c.process = append(c.process, perOp(thereAfter-there, l.ops))
		}
	}
	return nil
}

func perOp(d time.Duration, ops int) float64 {
	if ops == 0 {
		return math.NaN()
	}
	return float64(d) / float64(ops)
}
