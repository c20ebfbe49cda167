package main

import (
	"bytes"
	"crypto/aes"
	"crypto/rand"
	"fmt"
	"math"
	"strings"

	"lethe/bench/measure"
	"lethe/bench/peers"
	"lethe/bench/report"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// mbps turns nanoseconds an operation on n bytes into megabytes a second.
func mbps(n int, ns float64) float64 { return float64(n) / ns * 1e3 }

// oneShotPeers are made anew for every run; one that cannot be made is listed
// as not run, with why.
var oneShotPeers = []struct {
	name string
	make func() (peers.OneShot, error)
}{
	{"Tink AES256_GCM", peers.TinkGCM},
	{"Tink X-AES-GCM", peers.TinkXAES},
	{"age", peers.AgeOneShot},
	{"Asherah", peers.Asherah},
	{"AWS Encryption SDK, unsigned", func() (peers.OneShot, error) { return peers.AWSESDK(false) }},
	{"AWS Encryption SDK, signed", func() (peers.OneShot, error) { return peers.AWSESDK(true) }},
}

// largestSlow is the largest size at which peers that need 100 µs and more
// for any message are measured: beyond it they tell nothing new.
const largestSlow = 64 << 10

// lethe returns the product as it is used: an sdk.Client that holds leases.
func lethe(b *bench, client *sdk.Client, bound bool) (peers.OneShot, error) {
	t := sdk.Target{Tenant: tenant, Subject: "one-shot", Class: class}
	name, note := "Lethe", "sdk.Client.AppendSeal and AppendOpen, the lease held: key committed, clock checked before and after"
	if bound {
		var err error
		t, err = t.Bind(envelope.Pair{Name: "thread", Value: "0123456789abcdef"}, envelope.Pair{Name: "checkpoint", Value: "0123456789abcdef"})
		if err != nil {
			return peers.OneShot{}, err
		}
		name, note = "Lethe with context", "the same, bound to two pairs of name and value"
	}
	return peers.OneShot{
		Name: name, Note: note,
		Seal: func(dst, plaintext []byte) ([]byte, error) { return client.AppendSeal(b, dst, t, plaintext) },
		Open: func(dst, sealed []byte) ([]byte, error) { return client.AppendOpen(b, dst, t, sealed) },
	}, nil
}

func (b *bench) oneShot() (*report.Section, error) {
	keyd, err := b.startKeyd("oneshot")
	if err != nil {
		return nil, err
	}
	defer keyd.stop()
	client, err := sdk.Dial(b, keyd.target)
	if err != nil {
		return nil, err
	}
	defer client.Close()

	all := []peers.OneShot{peers.Limit()}
	for _, bound := range []bool{false, true} {
		p, err := lethe(b, client, bound)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	ours := len(all)
	missing := make(map[string]error)
	for _, m := range oneShotPeers {
		p, err := m.make()
		if err != nil {
			missing[m.name] = err
			continue
		}
		if p.Close != nil {
			defer p.Close()
		}
		all = append(all, p)
	}

	s := &report.Section{Title: "One-shot blobs"}
	var text strings.Builder
	text.WriteString("One thread, plaintext and destination in the cache, the destination allocated beforehand where the library takes one.\n")
	for _, p := range all {
		fmt.Fprintf(&text, "- **%s**: %s.\n", p.Name, p.Note)
	}
	for name, err := range missing {
		fmt.Fprintf(&text, "- **%s**: not run: %v.\n", name, err)
	}
	s.Text = text.String()

	small := report.Table{
		Title: "What a small message pays beside the cipher: the ceiling of whoever draws a nonce and reads the clocks",
		Head:  []string{"", "GCM ns", "a random nonce ns", "a reading of the clocks ns", "of the limit, at most", "Lethe"},
	}
	var atKiB []measure.Result // of sealing 1 KiB
	var topAtKiB float64       // what of the limit could be reached there
	ratios := make(map[string]map[int]float64)
	plots := []*report.Plot{}
	for _, op := range []string{"Seal", "Open"} {
		t := report.Table{Title: op, Head: []string{"size", "", "MB/s", "ns/op", "CPU ns/op", "allocs/op", "of the limit", "of the limit (CPU)", "spread"}}
		plot := &report.Plot{
			Name: strings.ToLower(op), Title: op + ": throughput by size, one thread",
			X: report.Axis{Label: "plaintext", Log: true, Bytes: true}, Y: report.Axis{Label: "MB/s", Log: true},
		}
		for _, p := range all {
			plot.Series = append(plot.Series, report.Series{Name: p.Name})
		}
		for _, size := range b.sizes {
			racers := all
			if size > largestSlow {
				racers = all[:min(ours+2, len(all))]
			}
			contenders, err := oneShotContenders(op, size, racers)
			if err != nil {
				return nil, err
			}
			if size <= largestSmall {
				contenders = append(contenders, besideCipher()...)
			}
			results, err := measure.Race{Turn: b.turn, Rounds: b.rounds}.Run(b, contenders...)
			if err != nil {
				return nil, err
			}
			note := ""
			if size <= largestSmall {
				nonce, clocks := results[len(racers)], results[len(racers)+1]
				results = results[:len(racers)]
				top, words := ceiling(op, results[0], nonce, clocks)
				small.Add(op+" "+byteSize(size), results[0].NsPerOp, nonce.NsPerOp, clocks.NsPerOp, top, results[1].Ratio)
				note = fmt.Sprintf("at most %.2f with %s", top, words)
				if op == "Seal" && size == 1<<10 {
					topAtKiB = top
				}
			}
			for i, r := range results {
				t.Add(byteSize(size), r.Name, mbps(size, r.NsPerOp), r.NsPerOp, r.CPUNsPerOp, r.AllocsPerOp, r.Ratio, r.CPURatio, percent(r.Spread))
				plot.Series[i].Add(float64(size), mbps(size, r.NsPerOp))
				if ratios[op+r.Name] == nil {
					ratios[op+r.Name] = make(map[int]float64)
				}
				ratios[op+r.Name][size] = r.Ratio
			}
			for _, p := range all[len(racers):] {
				t.Add(byteSize(size), p.Name, report.NotRun)
			}
			if op == "Seal" && size == 1<<10 {
				atKiB = results
			}
			for _, want := range []struct {
				size  int
				ratio float64
			}{{256, 0.60}, {1 << 10, 0.80}, {4 << 10, 0.92}, {64 << 10, 0.97}} {
				if size == want.size {
					b.target(report.AtLeast(fmt.Sprintf("%s %s, lease held, of raw GCM", op, byteSize(size)), want.ratio, results[1].Ratio, note))
				}
			}
			if size == 1<<10 {
				b.target(report.AtMost(op+" into the caller's buffer: allocations", 0, results[1].AllocsPerOp, "", ""))
			}
		}
		for name := range missing {
			t.Add("all", name, report.NotRun)
		}
		s.Tables = append(s.Tables, t)
		plots = append(plots, plot)
	}
	s.Tables = append(s.Tables, small)
	for _, p := range plots {
		s.Plots = append(s.Plots, *p)
	}
	for _, want := range []struct {
		name  string
		times float64
	}{{"Tink AES256_GCM", 1.5}, {"Asherah", 100}, {"AWS Encryption SDK, unsigned", 500}, {"AWS Encryption SDK, signed", 500}} {
		got, note := math.NaN(), ""
		for _, r := range atKiB {
			if r.Name == want.name {
				got = measure.Median(measure.Quotients(r.Rounds, atKiB[1].Rounds))
				note = fmt.Sprintf("at most %.3g with the nonce and the clocks", topAtKiB*measure.Median(measure.Quotients(r.Rounds, atKiB[0].Rounds)))
			}
		}
		b.target(report.AtLeast("Seal 1 KiB: times as fast as "+want.name, want.times, got, note))
	}
	for _, f := range []func() (report.Table, error){
		func() (report.Table, error) { return b.coldOpen() },
		func() (report.Table, error) { return b.twoGoroutines(all[0], all[1]) },
	} {
		t, err := f()
		if err != nil {
			return nil, err
		}
		s.Tables = append(s.Tables, t)
	}
	return s, nil
}

// largestSmall is up to which size what is beside the cipher matters.
const largestSmall = 4 << 10

// besideCipher is what a small message pays beside the cipher, to be measured
// in the same rounds.
func besideCipher() []measure.Contender {
	clock := sdk.SystemClock()
	nonce := make([]byte, 12)
	return []measure.Contender{
		{Name: "a random nonce", Run: func(_, n int) error {
			for range n {
				rand.Read(nonce) // never fails
			}
			return nil
		}},
		{Name: "a reading of the clocks", Run: func(_, n int) error {
			for range n {
				clock.Now()
			}
			return nil
		}},
	}
}

// ceiling returns what share of the limit no implementation can exceed that
// draws a nonce to seal and reads the clocks, once to seal and twice to open:
// the median of the rounds. It says also what that counts.
func ceiling(op string, limit, nonce, clocks measure.Result) (top float64, words string) {
	tops := make([]float64, len(limit.Rounds))
	for i, ns := range limit.Rounds {
		paid := nonce.Rounds[i] + clocks.Rounds[i]
		if op == "Open" {
			paid = 2 * clocks.Rounds[i]
		}
		tops[i] = ns / (ns + paid)
	}
	words = fmt.Sprintf("a random nonce (%.0f ns) and one reading of the clocks (%.0f ns) beside %.0f ns of GCM", nonce.NsPerOp, clocks.NsPerOp, limit.NsPerOp)
	if op == "Open" {
		words = fmt.Sprintf("two readings of the clocks (before use, before release; %.0f ns each) beside %.0f ns of GCM", clocks.NsPerOp, limit.NsPerOp)
	}
	return measure.Median(tops), words
}

func oneShotContenders(op string, size int, racers []peers.OneShot) ([]measure.Contender, error) {
	plain := make([]byte, size)
	rand.Read(plain) // never fails
	contenders := make([]measure.Contender, len(racers))
	for i, p := range racers {
		sealed, err := p.Seal(nil, plain)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.Name, err)
		}
		sealed = bytes.Clone(sealed)
		dst := make([]byte, 0, len(sealed)+64)
		f, in := p.Seal, plain
		if op == "Open" {
			f, in = p.Open, sealed
			if opened, err := f(dst, in); err != nil || !bytes.Equal(opened, plain) {
				return nil, fmt.Errorf("%s does not open what it sealed: %w", p.Name, err)
			}
		}
		contenders[i] = measure.Contender{Name: p.Name, Run: func(_, n int) error {
			for range n {
				if _, err := f(dst, in); err != nil {
					return err
				}
			}
			return nil
		}}
	}
	return contenders, nil
}

// coldOpen opens blobs each of which has a prefix that the opener has not
// seen, as after a start: the key is there, and nothing derived from it.
func (b *bench) coldOpen() (report.Table, error) {
	t := report.Table{
		Title: "Cold Open: the key is held, the blob's derived key is not",
		Head:  []string{"size", "", "ns/op", "allocs/op", "of the limit", "spread"},
	}
	key := &envelope.Key{Class: 1}
	rand.Read(key.ID[:])
	rand.Read(key.Secret[:])
	opener, err := envelope.NewOpener(key, envelope.Options{})
	if err != nil {
		return t, err
	}
	limit := peers.Limit()
	for _, size := range []int{256, 1 << 10, 4 << 10} {
		plain := make([]byte, size)
		dst := make([]byte, 0, size+256)
		sealed, err := limit.Seal(nil, plain)
		if err != nil {
			return t, err
		}
		root, err := aes.NewCipher(key.Secret[:])
		if err != nil {
			return t, err
		}
		from, derived, constant, associated := make([]byte, 32), make([]byte, 32), make([]byte, 12), make([]byte, 32)
		root.Encrypt(derived, from)
		root.Encrypt(derived[aes.BlockSize:], from[aes.BlockSize:])
		other, err := peers.NewGCM(derived)
		if err != nil {
			return t, err
		}
		elsewhere := other.Seal(nil, constant, plain, associated)
		blobs := make([][]byte, 2048)
		for i := range blobs {
			sealer, err := envelope.NewSealer(key, envelope.Options{})
			if err != nil {
				return t, err
			}
			if blobs[i], err = sealer.Append(nil, plain, envelope.Context{}); err != nil {
				return t, err
			}
		}
		i := 0
		results, err := measure.Race{Turn: b.turn, Rounds: b.rounds}.Run(b,
			measure.Contender{Name: "AES-256-GCM (the limit)", Run: func(_, n int) error {
				for range n {
					if _, err := limit.Open(dst, sealed); err != nil {
						return err
					}
				}
				return nil
			}},
			measure.Contender{Name: "AES-256-GCM, its key derived and scheduled anew", Run: func(_, n int) error {
				for range n {
					// As XAES-256-GCM does: two blocks under a key that is there.
					root.Encrypt(derived, from)
					root.Encrypt(derived[aes.BlockSize:], from[aes.BlockSize:])
					aead, err := peers.NewGCM(derived)
					if err != nil {
						return err
					}
					if _, err := aead.Open(dst, constant, elsewhere, associated); err != nil {
						return err
					}
				}
				return nil
			}},
			measure.Contender{Name: "Lethe, cold", Run: func(_, n int) error {
				for range n {
					if _, err := opener.Append(dst, blobs[i%len(blobs)], envelope.Context{}); err != nil {
						return err
					}
					i++
				}
				return nil
			}})
		if err != nil {
			return t, err
		}
		for _, r := range results {
			t.Add(byteSize(size), r.Name, r.NsPerOp, r.AllocsPerOp, r.Ratio, percent(r.Spread))
		}
		if size == 1<<10 {
			b.target(report.AtLeast("Open 1 KiB, cold, of raw GCM", 0.30, results[2].Ratio,
				fmt.Sprintf("at most %.2f with deriving a key and its schedule, which takes %.0f allocations, and nothing remembered", results[1].Ratio, results[1].AllocsPerOp)))
			b.target(report.AtMost("Open 1 KiB, cold: allocations", 3, results[2].AllocsPerOp, "", ""))
		}
	}
	return t, nil
}

// twoGoroutines shows what a second core brings: to the limit, to the limit
// with a nonce drawn for each message, and to us.
func (b *bench) twoGoroutines(limit, ours peers.OneShot) (report.Table, error) {
	t := report.Table{
		Title: "Two goroutines: throughput beside one",
		Head:  []string{"size", "", "one: ns/op", "two: ns/op", "two of one", "of what the limit gains"},
	}
	for _, op := range []string{"Seal", "Open"} {
		for _, size := range []int{256, 1 << 10, 64 << 10} {
			racers := []peers.OneShot{limit, ours}
			if op == "Seal" {
				racers = append(racers, peers.RandomNonce())
			}
			var contenders []measure.Contender
			for _, p := range racers {
				for _, threads := range []int{1, 2} {
					plain := make([]byte, size)
					sealed, err := p.Seal(nil, plain)
					if err != nil {
						return t, err
					}
					dsts := [2][]byte{make([]byte, 0, size+512), make([]byte, 0, size+512)}
					f, in := p.Seal, plain
					if op == "Open" {
						f, in = p.Open, sealed
					}
					contenders = append(contenders, measure.Contender{Name: p.Name, Threads: threads, Run: func(thread, n int) error {
						for range n {
							if _, err := f(dsts[thread], in); err != nil {
								return err
							}
						}
						return nil
					}})
				}
			}
			r, err := measure.Race{Turn: b.turn, Rounds: b.rounds}.Run(b, contenders...)
			if err != nil {
				return t, err
			}
			gains := make([]float64, len(racers))
			for i, p := range racers {
				one, two := r[2*i], r[2*i+1]
				gains[i] = measure.Median(measure.Quotients(one.Rounds, two.Rounds))
				t.Add(byteSize(size), op+", "+p.Name, one.NsPerOp, two.NsPerOp, gains[i], gains[i]/gains[0])
			}
			note := fmt.Sprintf("Lethe ×%.2f, the limit ×%.2f on this machine", gains[1], gains[0])
			if op == "Seal" {
				note += fmt.Sprintf(", with a random nonce ×%.2f, %.2f of it: Go's source of them writes to memory that all processors share", gains[2], gains[2]/gains[0])
			}
			b.target(report.AtLeast(fmt.Sprintf("%s %s, two goroutines beside one, of what the limit gains (1.9 of 2)", op, byteSize(size)), 0.95, gains[1]/gains[0], note))
		}
	}
	return t, nil
}

func byteSize(n int) string {
	switch {
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }
