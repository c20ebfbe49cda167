package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lethe/bench/measure"
	"lethe/bench/report"
)

// The bench starts itself as other processes; here that is the test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		if role, ok := roles[os.Args[1]]; ok {
			exit(role(os.Args[2:]))
		}
	}
	os.Exit(m.Run())
}

// Every section runs, as briefly as may be, and the report holds what they are
// asked for: numbers that were measured, and every target.
func TestEverySection(t *testing.T) {
	var all []string
	for _, s := range sections {
		all = append(all, s.name)
	}
	profiles["test"] = profile{
		sections: all,
		sizes:    []int{256, 1 << 10, 4 << 10, 64 << 10, 1 << 20},
		turn:     50 * time.Microsecond, rounds: 3,
		streamBytes: 1 << 20, rangedBytes: 4 << 20, pipeBytes: 4 << 20, pipeRounds: 1,
		subjects: 300, callTurn: 50 * time.Millisecond, callRounds: 1, unloaded: 10,
		openLoop:       200 * time.Millisecond,
		growthSubjects: []int{100, 200}, growthBuckets: []int{1, 3}, scaleSubjects: []int{100, 200},
	}
	out := t.TempDir()
	if err := run("test", out, t.TempDir(), "", 0, false); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(out, "*"))
	if err != nil {
		t.Fatal(err)
	}
	var r report.Report
	plots := 0
	for _, f := range files {
		switch b, err := os.ReadFile(f); {
		case err != nil:
			t.Fatal(err)
		case strings.HasSuffix(f, ".json"):
			if err := json.Unmarshal(b, &r); err != nil {
				t.Fatal(err)
			}
		case strings.HasSuffix(f, ".svg"):
			plots++
			if err := wellFormed(b); err != nil {
				t.Errorf("%s: %v", filepath.Base(f), err)
			}
		case strings.HasSuffix(f, ".md"):
			tables(t, string(b))
		}
	}
	if len(r.Sections) != len(sections) {
		t.Errorf("%d of %d sections are in the report", len(r.Sections), len(sections))
	}
	if len(r.Targets) < 35 {
		t.Errorf("%d targets are in the report", len(r.Targets))
	}
	for _, x := range r.Targets {
		if x.Verdict == report.NotRun {
			t.Errorf("target %q was not measured", x.Name)
		}
	}
	for _, s := range r.Sections {
		for _, table := range s.Tables {
			if len(table.Rows) == 0 {
				t.Errorf("%s: table %q is empty", s.Name, table.Title)
			}
		}
	}
	if plots < 4 {
		t.Errorf("%d plots were drawn", plots)
	}
}

func wellFormed(b []byte) error {
	d := xml.NewDecoder(bytes.NewReader(b))
	for {
		if _, err := d.Token(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// tables checks that every row of a table has as many cells as its head.
func tables(t *testing.T, markdown string) {
	cells, rows := 0, 0
	for line := range strings.Lines(markdown) {
		if !strings.HasPrefix(line, "|") {
			cells = 0
			continue
		}
		n := strings.Count(strings.ReplaceAll(line, `\|`, ""), "|")
		if cells == 0 {
			cells = n
		}
		if n != cells {
			t.Errorf("a row of another width than its table: %s", line)
		}
		rows++
	}
	if rows < 100 {
		t.Errorf("the report has %d rows", rows)
	}
}

// What is beside the cipher is taken from the same round as the cipher.
func TestCeiling(t *testing.T) {
	limit, nonce, clocks := measure.Result{Rounds: []float64{100, 200, 400}}, measure.Result{Rounds: []float64{50, 100, 0}}, measure.Result{Rounds: []float64{50, 100, 400}}
	for op, want := range map[string]float64{"Seal": 0.5, "Open": 0.5} {
		if got, _ := ceiling(op, limit, nonce, clocks); got != want {
			t.Errorf("%s: %v, want %v", op, got, want)
		}
	}
	clocks.Rounds = []float64{0, 0, 0}
	if got, _ := ceiling("Open", limit, nonce, clocks); got != 1 {
		t.Errorf("Open without clocks: %v", got)
	}
	if got, _ := ceiling("Seal", limit, nonce, clocks); got != 2.0/3 {
		t.Errorf("Seal with a nonce alone: %v", got)
	}
}

func TestClosedLoop(t *testing.T) {
	seen := make([]bool, 100)
	l, err := closedLoop(t.Context(), 7, 0, len(seen), func(_, i int) error { seen[i] = true; return nil })
	if err != nil || l.ops != len(seen) || len(l.latencies) != len(seen) {
		t.Errorf("%d operations: %v", l.ops, err)
	}
	for i, s := range seen {
		if !s {
			t.Errorf("operation %d was not done", i)
		}
	}
	if _, err := closedLoop(t.Context(), 3, time.Hour, 0, func(_, i int) error {
		if i == 50 {
			return os.ErrInvalid
		}
		return nil
	}); err != os.ErrInvalid {
		t.Errorf("one operation failed, and the loop: %v", err)
	}
}
