package main

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lethe/bench/report"
	keydv1 "lethe/proto/keyd/v1"
)

// population is a keyd with a number of subjects, and what was measured of it.
type population struct {
	subjects       int
	fillRate       float64 // subjects a second since the population before, batches of 256
	getP50, getP99 float64 // ms, one client, random subjects
	getRate        float64 // calls/s, 64 clients
	destP50        float64 // ms, one client
	destP99        float64
	resident       int64 // bytes, after the calls
	anonymous      int64
	disk           int64   // bytes allocated to the store's files
	start          float64 // s, of keyd over such a store
}

// populations fills one keyd step by step and measures it at every step.
func (b *bench) populations(name string, steps []int) ([]population, error) {
	var all []population
	n := 0
	var opens []*keydv1.BlobKeyQuery
	const spare = 100_000_000 // subjects to destroy are beside the others
	for _, step := range steps {
		p := population{subjects: step}
		d, err := b.startKeyd(name)
		if err != nil {
			return nil, err
		}
		begun := time.Now()
		more, err := d.fill(b, n, step, 10_000)
		if err != nil {
			d.stop()
			return nil, err
		}
		p.fillRate = float64(step-n) / time.Since(begun).Seconds()
		n = step
		opens = append(opens, more...)
		if err := d.stop(); err != nil {
			return nil, err
		}
		// Started anew, so that memory and start-up are those of a keyd that
		// serves such a store, not of one that has just filled it.
		begun = time.Now()
		if d, err = b.startKeyd(name); err != nil {
			return nil, err
		}
		p.start = since(begun) / 1e3
		err = b.measurePopulation(d, &p, opens, spare+len(all)*b.unloaded)
		if err == nil {
			p.resident, p.anonymous, err = d.process().Memory()
		}
		if err == nil {
			p.disk, err = allocated(filepath.Join(b.dir, name, "store"))
		}
		if stop := d.stop(); err == nil {
			err = stop
		}
		if err != nil {
			return nil, err
		}
		all = append(all, p)
		fmt.Fprintf(os.Stderr, "  %d subjects: get %.3f ms, destroy %.3f ms, %d MiB anonymous, %d B a subject, start %.2f s\n",
			p.subjects, p.getP50, p.destP50, p.anonymous>>20, p.disk/int64(p.subjects), p.start)
	}
	return all, nil
}

func (b *bench) measurePopulation(d *daemon, p *population, opens []*keydv1.BlobKeyQuery, spare int) error {
	getOne := func(int, int) error {
		i := rand.IntN(len(opens))
		_, err := get(b, d.conn, &keydv1.GetBlobKeysRequest{Queries: opens[i : i+1]})
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
	p.getRate = many.perSecond()
	p.getP50, p.getP99 = one.at(0.5)/1e6, one.at(0.99)/1e6
	p.destP50, p.destP99 = destroys.at(0.5)/1e6, destroys.at(0.99)/1e6
	return nil
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
	t := report.Table{Title: "Number of subjects", Head: []string{"subjects", "created/s", "get p50 ms", "get p99", "gets/s, 64 clients", "destroy p50 ms", "destroy p99", "RssAnon MiB", "Rss MiB", "disk MiB", "bytes a subject", "start s"}}
	for _, p := range all {
		t.Add(p.subjects, p.fillRate, p.getP50, p.getP99, p.getRate, p.destP50, p.destP99, float64(p.anonymous>>20), float64(p.resident>>20),
			float64(p.disk>>20), float64(p.disk)/float64(p.subjects), p.start)
	}
	return t
}

func populationPlot(name string, all []population) report.Plot {
	lines := []report.Series{{Name: "get p50"}, {Name: "get p99"}, {Name: "destroy p50"}, {Name: "destroy p99"}}
	for _, p := range all {
		for i, v := range []float64{p.getP50, p.getP99, p.destP50, p.destP99} {
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
	s := &report.Section{Title: "Scale", Text: `One keyd over Badger, filled through GetBlobKeys in batches of 256; every number of subjects is measured by a keyd that was started anew over the store.
A subject here has one class, one key and no ledger entries. Bytes a subject are what the disk holds for the store's files, divided by the subjects.`}
	s.Tables = append(s.Tables, populationTable(all))
	s.Plots = append(s.Plots, populationPlot("subjects", all))
	first, last := all[0], all[len(all)-1]
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
	add(report.AtMost(name+"destroy p99, times that of "+fmt.Sprint(first.subjects), 1.5, last.destP99/first.destP99, "", ""))
	add(report.AtMost(name+"destroy p50, times that of "+fmt.Sprint(first.subjects), 1.5, last.destP50/first.destP50, "", ""))
	add(report.AtMost(name+"RssAnon", 1024, float64(last.anonymous>>20), " MiB", ""))
	add(report.AtMost(name+"start-up", 10, last.start, " s", ""))
	return s, nil
}
