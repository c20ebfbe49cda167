package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"lethe/bench/report"
	keydv1 "lethe/proto/keyd/v1"
)

// population is a keyd with a number of subjects, and what was measured of it.
type population struct {
	subjects int
	filled
	coldP50, coldP99 float64 // ms, one client, random subjects, no table in memory
	getP50, getP99   float64 // ms, the same with all tables in memory
	getRate          float64 // calls/s, 64 clients
	destP50, destP99 float64 // ms, one client
	resident         int64   // bytes, after the calls
	anonymous        int64
	disk             int64   // bytes allocated to the store's files
	start            float64 // s, of keyd over such a store, no table in memory
}

// filled is what was seen while a keyd was filled, maybe by an earlier run.
type filled struct {
	FillRate         float64 // subjects a second, batches of 256
	CaughtUp         float64 // s, from the fill's end until compaction had caught up
	BusyP50, BusyP99 float64 // ms, one client, random subjects, compaction catching up
	Commit           string
}

// populations measures a keyd with each of these numbers of subjects.
func (b *bench) populations(name string, steps []int) ([]population, error) {
	var all []population
	for _, step := range steps {
		p, err := b.population(fmt.Sprintf("%s-%d", name, step), step)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
		fmt.Fprintf(os.Stderr, "  %d subjects: get %.3f ms (99 %% %.3f; cold %.3f, %.3f), %.0f/s, destroy %.3f ms (99 %% %.3f), %d MiB anonymous, %d B a subject, start %.2f s\n",
			p.subjects, p.getP50, p.getP99, p.coldP50, p.coldP99, p.getRate, p.destP50, p.destP99, p.anonymous>>20, p.disk/int64(p.subjects), p.start)
	}
	return all, nil
}

// sampled is how many of a population's subjects the gets are about. They are
// spread evenly over all of them.
const sampled = 100_000

func (b *bench) population(name string, subjects int) (population, error) {
	p := population{subjects: subjects}
	opens, err := b.noted(name, &p.filled)
	if errors.Is(err, fs.ErrNotExist) {
		opens, err = b.fillStore(name, subjects, &p.filled)
	}
	if err != nil {
		return p, err
	}
	store := filepath.Join(b.dir, name, "store")
	if err := evict(store); err != nil {
		return p, err
	}
	// Started anew, so that memory and start-up are those of a keyd that
	// serves such a store, not of one that has just filled it.
	begun := time.Now()
	d, err := b.startKeyd(name)
	if err != nil {
		return p, err
	}
	p.start = since(begun) / 1e3
	err = b.measurePopulation(d, &p, opens, store)
	if err == nil {
		p.resident, p.anonymous, err = d.process().Memory()
	}
	if err == nil {
		p.disk, err = allocated(store)
	}
	return p, errors.Join(err, d.stop())
}

// fillStore makes a keyd's data, and notes what was seen and a sample of the
// queries that open its subjects' blobs.
func (b *bench) fillStore(name string, subjects int, f *filled) ([]*keydv1.BlobKeyQuery, error) {
	d, err := b.startKeyd(name)
	if err != nil {
		return nil, err
	}
	f.Commit = b.report.Commit
	begun := time.Now()
	opens, err := d.fill(b, 0, subjects, sampled)
	if err == nil {
		f.FillRate = float64(subjects) / time.Since(begun).Seconds()
		begun = time.Now()
		var busy looped
		if busy, err = closedLoop(b, 1, 0, b.unloaded, getOneOf(b, d, opens)); err == nil {
			f.BusyP50, f.BusyP99 = busy.at(0.5)/1e6, busy.at(0.99)/1e6
			err = d.waitIdle(b)
			f.CaughtUp = since(begun) / 1e3
		}
	}
	if err := errors.Join(err, d.stop()); err != nil {
		return nil, err
	}
	sample, err := proto.Marshal(&keydv1.GetBlobKeysRequest{Queries: opens})
	if err != nil {
		return nil, err
	}
	note, err := json.Marshal(f)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(b.dir, name)
	return opens, errors.Join(os.WriteFile(path+".json", note, 0o600), os.WriteFile(path+".sample", sample, 0o600))
}

// noted returns what fillStore noted, of a store that an earlier run filled with
// -keep, or fs.ErrNotExist.
func (b *bench) noted(name string, f *filled) ([]*keydv1.BlobKeyQuery, error) {
	path := filepath.Join(b.dir, name)
	sample, err := os.ReadFile(path + ".sample")
	if err != nil {
		return nil, err
	}
	note, err := os.ReadFile(path + ".json")
	if err != nil {
		return nil, err
	}
	var req keydv1.GetBlobKeysRequest
	if err := errors.Join(proto.Unmarshal(sample, &req), json.Unmarshal(note, f)); err != nil {
		return nil, err
	}
	return req.Queries, nil
}

// getOneOf returns an operation that makes one of the queries, drawn anew each
// time.
func getOneOf(ctx context.Context, d *daemon, queries []*keydv1.BlobKeyQuery) func(int, int) error {
	return func(int, int) error {
		i := rand.IntN(len(queries))
		_, err := get(ctx, d.conn, &keydv1.GetBlobKeysRequest{Queries: queries[i : i+1]})
		return err
	}
}

// waitIdle waits until the daemon, which nobody calls, has hardly used a
// processor for a while: until compaction has caught up.
func (d *daemon) waitIdle(ctx context.Context) error {
	const look, times = time.Second, 3
	for idle := 0; idle < times; {
		before, err := d.process().CPU()
		if err != nil {
			return err
		}
		select {
		case <-time.After(look):
		case <-ctx.Done():
			return ctx.Err()
		}
		after, err := d.process().CPU()
		if err != nil {
			return err
		}
		idle++
		if after-before > look/20 {
			idle = 0
		}
	}
	return nil
}

func (b *bench) measurePopulation(d *daemon, p *population, opens []*keydv1.BlobKeyQuery, store string) error {
	getOne := getOneOf(b, d, opens)
	cold, err := closedLoop(b, 1, 0, b.unloaded, getOne)
	if err != nil {
		return err
	}
	if err := load(store); err != nil {
		return err
	}
	if _, err := closedLoop(b, 64, b.callTurn, 0, getOne); err != nil { // warms up
		return err
	}
	many, err := closedLoop(b, 64, 2*b.callTurn, 0, getOne)
	if err != nil {
		return err
	}
	one, err := closedLoop(b, 1, 0, 2*b.unloaded, getOne)
	if err != nil {
		return err
	}
	// Those to destroy come after all others, and after those of earlier runs.
	spare := 100_000_000 + int(time.Now().Unix()%1_000_000_000)*1000
	if _, err := d.fill(b, spare, spare+b.unloaded, 0); err != nil {
		return err
	}
	erasure := keydv1.NewErasureServiceClient(d.conn)
	destroys, err := closedLoop(b, 1, 0, b.unloaded, func(_, i int) error {
		_, err := erasure.DestroyKey(b, destroyRequest(subjectID(spare+i)))
		return err
	})
	if err != nil {
		return err
	}
	p.coldP50, p.coldP99 = cold.at(0.5)/1e6, cold.at(0.99)/1e6
	p.getRate = many.perSecond()
	p.getP50, p.getP99 = one.at(0.5)/1e6, one.at(0.99)/1e6
	p.destP50, p.destP99 = destroys.at(0.5)/1e6, destroys.at(0.99)/1e6
	return nil
}

// evict has the system forget what it holds of the files below dir.
func evict(dir string) error {
	unix.Sync()
	return eachFile(dir, func(f *os.File) error {
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
}

// load reads the files below dir, so that the system holds them.
func load(dir string) error {
	return eachFile(dir, func(f *os.File) error {
		_, err := io.Copy(io.Discard, f)
		return err
	})
}

func eachFile(dir string, do func(*os.File) error) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !e.Type().IsRegular() {
			return nil // compaction goes on
		}
		if err != nil {
			return err
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer f.Close()
		return do(f)
	})
}

// allocated adds up what the disk holds for the files below dir; some are
// sparse.
func allocated(dir string) (n int64, err error) {
	unix.Sync()
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			n += st.Blocks * 512
		}
		return nil
	})
	return n, err
}

func populationTable(all []population) report.Table {
	t := report.Table{Title: "Number of subjects", Head: []string{"subjects", "created/s", "caught up after s", "busy get p50 ms", "busy get p99", "cold get p50", "cold get p99", "get p50", "get p99", "gets/s, 64 clients", "destroy p50 ms", "destroy p99", "RssAnon MiB", "Rss MiB", "disk MiB", "bytes a subject", "start s"}}
	for _, p := range all {
		t.Add(p.subjects, p.FillRate, p.CaughtUp, p.BusyP50, p.BusyP99, p.coldP50, p.coldP99, p.getP50, p.getP99, p.getRate, p.destP50, p.destP99, float64(p.anonymous>>20), float64(p.resident>>20),
			float64(p.disk>>20), float64(p.disk)/float64(p.subjects), p.start)
	}
	return t
}

func populationPlot(name string, all []population) report.Plot {
	lines := []report.Series{{Name: "cold get p50"}, {Name: "cold get p99"}, {Name: "get p50"}, {Name: "get p99"}, {Name: "destroy p50"}, {Name: "destroy p99"}}
	for _, p := range all {
		for i, v := range []float64{p.coldP50, p.coldP99, p.getP50, p.getP99, p.destP50, p.destP99} {
			lines[i].Add(float64(p.subjects), v)
		}
	}
	return report.Plot{
		Name: name, Title: "Cost by number of subjects: one client",
		X: report.Axis{Label: "subjects", Log: true}, Y: report.Axis{Label: "ms", Log: true}, Series: lines,
	}
}

func (b *bench) scale() (*report.Section, error) {
	all, err := b.populations("scale", b.scaleSubjects)
	if err != nil {
		return nil, err
	}
	s := &report.Section{Title: "Scale", Text: `One keyd over Badger for each number of subjects, filled through GetBlobKeys in batches of 256. A subject here has one class, one key and no ledger entries.
- **busy**: right after the fill, as fast as it goes, while compaction catches up. **caught up after**: until keyd, which nobody calls, uses less than a twentieth of a processor for three seconds.
- **cold**: keyd started anew, after the system was made to forget the store's files. A start reads the index of every table, and what the system reads ahead with it.
- The other columns: with all of the store's files read once. Gets are about 100,000 subjects at most, spread evenly.
- Bytes a subject are what the disk holds for the store's files, divided by the subjects.`}
	s.Tables = append(s.Tables, populationTable(all))
	s.Plots = append(s.Plots, populationPlot("subjects", all))
	first, last := all[0], all[len(all)-1]
	if last.Commit != b.report.Commit {
		s.Text += "\n- The stores were filled, and measured busy, at " + last.Commit + "."
	}
	name := fmt.Sprintf("%d subjects: ", last.subjects)
	full := last.subjects >= 10_000_000
	add := func(t report.Target) {
		if !full {
			t.Note += "; the target is for 10000000"
		}
		b.target(t)
	}
	add(report.AtMost(name+"get p50, times that of "+fmt.Sprint(first.subjects), 1.5, last.getP50/first.getP50, "", ""))
	add(report.AtMost(name+"get p99, times that of "+fmt.Sprint(first.subjects), 1.5, last.getP99/first.getP99, "", ""))
	add(report.AtMost(name+"cold get p99, times that of "+fmt.Sprint(first.subjects), 1.5, last.coldP99/first.coldP99, "", ""))
	add(report.AtMost(name+"destroy p99, times that of "+fmt.Sprint(first.subjects), 1.5, last.destP99/first.destP99, "", ""))
	add(report.AtMost(name+"destroy p50, times that of "+fmt.Sprint(first.subjects), 1.5, last.destP50/first.destP50, "", ""))
	add(report.AtMost(name+"RssAnon", 1024, float64(last.anonymous>>20), " MiB", ""))
	add(report.AtMost(name+"start-up", 10, last.start, " s", ""))
	return s, nil
}
