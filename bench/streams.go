package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lethe/bench/measure"
	"lethe/bench/peers"
	"lethe/bench/report"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

const (
	segment = 64 << 10
	chunk   = 256 << 10 // of a Write and a Read
)

// repeated reads the same bytes until n were read.
type repeated struct {
	b    []byte
	left int64
}

func (r *repeated) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(int64(len(p)), r.left)], r.b)
	r.left -= int64(n)
	return n, nil
}

// nowhere is io.Discard without its ReadFrom.
type nowhere struct{}

func (nowhere) Write(p []byte) (int, error) { return len(p), nil }

// sourceAlone is no way of sealing: it shows what the copy costs with which all
// but the limit get at their input.
const sourceAlone = "reading the source, no cipher"

// streamer is one way of sealing and opening a stream of b.streamBytes.
type streamer struct {
	name       string
	seal, open func() error
}

func (b *bench) streams() (*report.Section, error) {
	s := &report.Section{Title: "Streams", Text: fmt.Sprintf(`Streams of %s from memory to nowhere. The limit seals segments of 64 KiB that stay in the cache, on one and on two goroutines.
"Write" and "Read" go through io.Writer and io.Reader with %[2]s a call, which copies; "ReadFrom" and "WriteTo" do not.
Each of them gets at its input with one copy of it, which is also measured alone: sealing reads the same %[2]s over and over, opening a blob in memory.`, byteSize(b.streamBytes), byteSize(chunk))}
	all, err := b.streamers()
	if err != nil {
		return nil, err
	}
	for _, op := range []string{"Seal", "Open"} {
		t := report.Table{Title: op, Head: []string{"", "MB/s", "CPU ns/KiB", "allocs per MiB", "of one limit", "spread"}}
		contenders := make([]measure.Contender, len(all))
		for i, st := range all {
			f := st.seal
			if op == "Open" {
				f = st.open
			}
			contenders[i] = measure.Contender{Name: st.name, Run: func(_, n int) error {
				for range n {
					if err := f(); err != nil {
						return err
					}
				}
				return nil
			}}
		}
		results, err := measure.Race{Turn: b.turn, Rounds: max(b.rounds/2, 9)}.Run(b, contenders...)
		if err != nil {
			return nil, err
		}
		by := make(map[string]measure.Result)
		mib := float64(b.streamBytes) / (1 << 20)
		for i, r := range results {
			by[r.Name] = r
			name := strings.Replace(r.Name, "Write/Read", map[string]string{"Seal": "Write", "Open": "Read"}[op], 1)
			name = strings.Replace(name, "ReadFrom/WriteTo", map[string]string{"Seal": "ReadFrom", "Open": "WriteTo"}[op], 1)
			results[i].Name = name
			t.Add(name, mbps(b.streamBytes, r.NsPerOp), r.CPUNsPerOp/mib/1024, r.AllocsPerOp/mib, r.Ratio, percent(r.Spread))
		}
		s.Tables = append(s.Tables, t)
		one, two, source := by["AES-256-GCM ×1 (the limit)"], by["AES-256-GCM ×2"], by[sourceAlone]
		ratio := func(name string) float64 { return by[name].Ratio }
		// A stream's bytes come from somewhere: one copy of each is the least.
		top := func(limit measure.Result, workers float64) float64 {
			tops := make([]float64, len(limit.Rounds))
			for i, ns := range limit.Rounds {
				tops[i] = ns / (ns + source.Rounds[i]/workers)
			}
			return measure.Median(tops)
		}
		of := func(limit measure.Result, name string) float64 {
			return measure.Median(measure.Quotients(limit.Rounds, by[name].Rounds))
		}
		oneTop := fmt.Sprintf("at most %.2f with reading the source, a copy of every byte, beside GCM", top(one, 1))
		b.target(report.AtLeast(op+" stream, 1 worker, io.Reader/io.Writer, of raw GCM", 0.82, ratio("Lethe Write/Read, 1 worker"), oneTop))
		b.target(report.AtLeast(op+" stream, 1 worker, no copy, of raw GCM", 0.90, ratio("Lethe ReadFrom/WriteTo, 1 worker"), oneTop))
		b.target(report.AtLeast(op+" stream, 2 workers, of raw GCM on two", 0.85,
			max(of(two, "Lethe ReadFrom/WriteTo, 2 workers"), of(two, "Lethe Write/Read, 2 workers")),
			fmt.Sprintf("at most %.2f with reading the source; raw GCM on two goroutines reaches %.2f times one", top(two, 2), two.Ratio)))
		tink := max(ratio("Tink AES-GCM-HKDF 4 KiB"), ratio("Tink AES-GCM-HKDF 1 MiB"))
		b.target(report.AtLeast(op+" stream, 2 workers, times Tink's streaming", 1.7,
			max(ratio("Lethe ReadFrom/WriteTo, 2 workers"), ratio("Lethe Write/Read, 2 workers"))/tink,
			fmt.Sprintf("at most %.2f with reading the source, on two cores that make %.2f times one", top(two, 2)*two.Ratio/tink, two.Ratio)))
	}
	for _, f := range []func() (report.Table, error){b.streamMemory, b.randomAccess, b.pipes} {
		t, err := f()
		if err != nil {
			return nil, err
		}
		s.Tables = append(s.Tables, t)
	}
	return s, nil
}

func (b *bench) streamers() ([]streamer, error) {
	plain := make([]byte, chunk)
	rand.Read(plain) // never fails
	write := func(w io.Writer) error {
		for range b.streamBytes / chunk {
			if _, err := w.Write(plain); err != nil {
				return err
			}
		}
		return nil
	}
	into := make([]byte, chunk)
	drain := func(r io.Reader) error {
		for {
			if _, err := r.Read(into); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
		}
	}
	all := []streamer{
		{"AES-256-GCM ×1 (the limit)", func() error { return rawSegments(false, 1, b.streamBytes) }, func() error { return rawSegments(true, 1, b.streamBytes) }},
		{"AES-256-GCM ×2", func() error { return rawSegments(false, 2, b.streamBytes) }, func() error { return rawSegments(true, 2, b.streamBytes) }},
	}

	sealer, opener, err := freshPair()
	if err != nil {
		return nil, err
	}
	var blob bytes.Buffer
	w, err := sealer.NewWriter(b, &blob, envelope.Context{}, envelope.StreamOptions{})
	if err != nil {
		return nil, err
	}
	if err := write(w); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	all = append(all, streamer{sourceAlone,
		func() error { return drain(&repeated{plain, int64(b.streamBytes)}) },
		func() error { return drain(bytes.NewReader(blob.Bytes())) }})
	for _, workers := range []int{1, 2} {
		opts := envelope.StreamOptions{Workers: workers}
		sealWith := func(fill func(*envelope.Writer) error) func() error {
			return func() error {
				w, err := sealer.NewWriter(b, nowhere{}, envelope.Context{}, opts)
				if err != nil {
					return err
				}
				if err := fill(w); err != nil {
					return err
				}
				return w.Close()
			}
		}
		openWith := func(empty func(*envelope.Reader) error) func() error {
			return func() error {
				r, err := opener.NewReader(b, bytes.NewReader(blob.Bytes()), envelope.Context{}, opts)
				if err != nil {
					return err
				}
				defer r.Close()
				return empty(r)
			}
		}
		suffix := ", 1 worker"
		if workers > 1 {
			suffix = fmt.Sprintf(", %d workers", workers)
		}
		all = append(all,
			streamer{"Lethe Write/Read" + suffix,
				sealWith(func(w *envelope.Writer) error { return write(w) }),
				openWith(func(r *envelope.Reader) error { return drain(r) })},
			streamer{"Lethe ReadFrom/WriteTo" + suffix,
				sealWith(func(w *envelope.Writer) error {
					_, err := w.ReadFrom(&repeated{plain, int64(b.streamBytes)})
					return err
				}),
				openWith(func(r *envelope.Reader) error { _, err := r.WriteTo(nowhere{}); return err })},
		)
	}

	for _, m := range []func() (peers.Stream, error){
		func() (peers.Stream, error) { return peers.TinkStream(false) },
		func() (peers.Stream, error) { return peers.TinkStream(true) },
		peers.AgeStream,
	} {
		p, err := m()
		if err != nil {
			return nil, err
		}
		var sealed bytes.Buffer
		seal := func(to io.Writer) error {
			w, err := p.Seal(to)
			if err != nil {
				return err
			}
			if err := write(w); err != nil {
				return err
			}
			return w.Close()
		}
		if err := seal(&sealed); err != nil {
			return nil, err
		}
		all = append(all, streamer{p.Name, func() error { return seal(nowhere{}) }, func() error {
			r, err := p.Open(bytes.NewReader(sealed.Bytes()))
			if err != nil {
				return err
			}
			return drain(r)
		}})
	}
	return all, nil
}

func freshPair() (*envelope.Sealer, *envelope.Opener, error) {
	key := &envelope.Key{Class: 1}
	rand.Read(key.ID[:])
	rand.Read(key.Secret[:])
	s, err := envelope.NewSealer(key, envelope.Options{})
	if err != nil {
		return nil, nil, err
	}
	o, err := envelope.NewOpener(key, envelope.Options{})
	return s, o, err
}

// rawSegments seals or opens n bytes with raw GCM in segments that stay in the
// cache, shared among threads.
func rawSegments(open bool, threads, n int) error {
	errs := make([]error, threads)
	work := func(t int) {
		aead := peers.GCM()
		nonce := make([]byte, aead.NonceSize())
		plain, dst := make([]byte, segment), make([]byte, 0, segment+aead.Overhead())
		sealed := aead.Seal(nil, nonce, plain, nil)
		for range n / segment / threads {
			if !open {
				aead.Seal(dst, nonce, plain, nil)
			} else if _, err := aead.Open(dst, nonce, sealed, nil); err != nil {
				errs[t] = err
			}
		}
	}
	var wg sync.WaitGroup
	for t := 1; t < threads; t++ {
		wg.Go(func() { work(t) })
	}
	work(0)
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// streamMemory finds the peak of the heap while long streams run.
func (b *bench) streamMemory() (report.Table, error) {
	t := report.Table{Title: "Memory of one stream: the heap's peak beyond what it was before", Head: []string{"", "length", "MiB"}}
	sealer, opener, err := freshPair()
	if err != nil {
		return t, err
	}
	worst := 0.0
	for _, length := range []int64{int64(b.streamBytes), 16 * int64(b.streamBytes)} {
		piece := make([]byte, chunk)
		r, w := io.Pipe() // from the sealing to the opening, so that nothing holds the whole
		peak, err := peakHeap(func() error {
			sealed := make(chan error, 1)
			go func() {
				ew, err := sealer.NewWriter(b, w, envelope.Context{}, envelope.StreamOptions{})
				if err == nil {
					if _, err = ew.ReadFrom(&repeated{piece, length}); err == nil {
						err = ew.Close()
					}
				}
				w.CloseWithError(err)
				sealed <- err
			}()
			er, err := opener.NewReader(b, r, envelope.Context{}, envelope.StreamOptions{})
			if err != nil {
				return err
			}
			defer er.Close()
			if _, err := er.WriteTo(nowhere{}); err != nil {
				return err
			}
			return <-sealed
		})
		if err != nil {
			return t, err
		}
		worst = max(worst, peak)
		t.Add("sealing and opening at once", byteSize(int(length)), peak)
	}
	b.target(report.AtMost("Memory of a stream, sealing and opening together", 16, worst, " MiB", ""))
	return t, nil
}

// peakHeap runs f and returns by how many MiB the heap grew at most.
func peakHeap(f func() error) (float64, error) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before, peak := m.HeapInuse, m.HeapInuse
	done := make(chan error, 1)
	go func() { done <- f() }()
	for {
		select {
		case err := <-done:
			return float64(peak-before) / (1 << 20), err
		case <-time.After(2 * time.Millisecond):
			runtime.ReadMemStats(&m)
			peak = max(peak, m.HeapInuse)
		}
	}
}

// counted counts what is read through it.
type counted struct {
	io.ReaderAt
	calls, bytes atomic.Int64
}

func (c *counted) ReadAt(p []byte, off int64) (int, error) {
	c.calls.Add(1)
	c.bytes.Add(int64(len(p)))
	return c.ReaderAt.ReadAt(p, off)
}

// randomAccess reads 4 KiB here and there in a large blob that is a file.
func (b *bench) randomAccess() (report.Table, error) {
	t := report.Table{
		Title: "Random access: 4 KiB from a blob of " + byteSize(int(b.rangedBytes)) + " in a file",
		Head:  []string{"", "µs/op", "allocs/op", "bytes read of the file an operation", "of the limit", "spread"},
	}
	sealer, opener, err := freshPair()
	if err != nil {
		return t, err
	}
	f, err := os.Create(filepath.Join(b.dir, "blob"))
	if err != nil {
		return t, err
	}
	defer f.Close()
	w, err := sealer.NewWriter(b, f, envelope.Context{}, envelope.StreamOptions{})
	if err != nil {
		return t, err
	}
	if _, err := w.ReadFrom(&repeated{make([]byte, chunk), b.rangedBytes}); err != nil {
		return t, err
	}
	if err := w.Close(); err != nil {
		return t, err
	}
	info, err := f.Stat()
	if err != nil {
		return t, err
	}
	file := &counted{ReaderAt: f}
	r, err := opener.NewReaderAt(file, info.Size(), envelope.Context{})
	if err != nil {
		return t, err
	}
	p := make([]byte, 4<<10)
	var off int64
	file.bytes.Store(0)
	file.calls.Store(0)
	ops := 0
	aead := peers.GCM()
	nonce := make([]byte, aead.NonceSize())
	sealed := aead.Seal(nil, nonce, make([]byte, segment), nil)
	dst := make([]byte, 0, segment)
	results, err := measure.Race{Turn: b.turn, Rounds: b.rounds}.Run(b,
		measure.Contender{Name: "raw GCM of one segment of 64 KiB (the limit)", Run: func(_, n int) error {
			for range n {
				if _, err := aead.Open(dst, nonce, sealed, nil); err != nil {
					return err
				}
			}
			return nil
		}},
		measure.Contender{Name: "ReadAt", Run: func(_, n int) error {
			for range n {
				off = (off + 123_456_789) % (r.Size() - int64(len(p)))
				if _, err := r.ReadAt(p, off); err != nil {
					return err
				}
				ops++
			}
			return nil
		}})
	if err != nil {
		return t, err
	}
	read := float64(file.bytes.Load()) / float64(ops)
	t.Add(results[0].Name, results[0].NsPerOp/1e3, results[0].AllocsPerOp, nil, 1.0, "")
	t.Add(results[1].Name, results[1].NsPerOp/1e3, results[1].AllocsPerOp, read, results[1].Ratio, percent(results[1].Spread))
	// One in sixteen of such reads crosses into the next segment.
	perSegment := read / segment
	b.target(report.AtMost("4 KiB at random of "+byteSize(int(b.rangedBytes))+": segments opened a read", 1.08, perSegment, "", "a read of 4 KiB crosses into a second segment in one of sixteen cases"))
	return t, nil
}

// pipes compares the command line with the library, each a process that seals
// from a pipe into a pipe.
func (b *bench) pipes() (report.Table, error) {
	t := report.Table{
		Title: "Pipe to pipe: " + byteSize(int(b.pipeBytes)),
		Head:  []string{"", "MB/s", "CPU s", "of the library"},
	}
	keyd, err := b.startKeyd("pipes")
	if err != nil {
		return t, err
	}
	defer keyd.stop()
	self, err := os.Executable()
	if err != nil {
		return t, err
	}
	var lib, cli, libCPU, cliCPU []float64
	for round := range b.pipeRounds {
		runs := []func() error{
			func() error {
				speed, cpu, err := b.pipe(exec.CommandContext(b, self, "pipe-seal", keyd.target))
				lib, libCPU = append(lib, speed), append(libCPU, cpu)
				return err
			},
			func() error {
				speed, cpu, err := b.pipe(exec.CommandContext(b, filepath.Join(b.bin, "lethe"), "--keyd", keyd.target,
					"seal", "--tenant", tenant, "--subject", "pipe", "--class", class))
				cli, cliCPU = append(cli, speed), append(cliCPU, cpu)
				return err
			},
		}
		for i := range runs {
			if err := runs[(round+i)%2](); err != nil {
				return t, err
			}
		}
	}
	ratio := measure.Median(measure.Quotients(cli, lib))
	t.Add("sdk.Client.SealWriter", measure.Median(lib), measure.Median(libCPU), 1.0)
	t.Add("lethe seal", measure.Median(cli), measure.Median(cliCPU), ratio)
	b.target(report.AtLeast("lethe seal, "+byteSize(int(b.pipeBytes))+" pipe to pipe, of the library", 0.8, ratio, ""))
	return t, nil
}

// pipe feeds a process and drains it, and returns MB/s and its CPU seconds.
func (b *bench) pipe(cmd *exec.Cmd) (speed, cpu float64, err error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, 0, err
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	begun := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, 0, err
	}
	fed := make(chan error, 1)
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{in}, &repeated{make([]byte, 1<<20), b.pipeBytes}, make([]byte, 1<<20))
		in.Close()
		fed <- err
	}()
	n, err := io.CopyBuffer(nowhere{}, struct{ io.Reader }{out}, make([]byte, 1<<20))
	if feed := <-fed; err == nil {
		err = feed
	}
	if wait := cmd.Wait(); wait != nil {
		return 0, 0, fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), wait, said.String())
	}
	if err == nil && n < b.pipeBytes {
		err = fmt.Errorf("%s wrote %d bytes only", filepath.Base(cmd.Path), n)
	}
	took := time.Since(begun)
	state := cmd.ProcessState
	return float64(b.pipeBytes) / 1e6 / took.Seconds(), (state.UserTime() + state.SystemTime()).Seconds(), err
}

// pipeSeal is the library's side of pipes: args are keyd's address.
func pipeSeal(args []string) error {
	ctx := context.Background()
	client, err := sdk.Dial(ctx, args[0])
	if err != nil {
		return err
	}
	defer client.Close()
	w, err := client.SealWriter(ctx, sdk.Target{Tenant: tenant, Subject: "pipe", Class: class}, os.Stdout)
	if err != nil {
		return err
	}
	if _, err := w.ReadFrom(os.Stdin); err != nil {
		return err
	}
	return w.Close()
}
