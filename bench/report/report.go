// Package report writes down what was measured: JSON for programs, Markdown
// and SVG for people.
package report

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"lethe/bench/measure"
)

// NotRun stands in the place of a number that was not measured.
const NotRun = "not run"

// Report is one run.
type Report struct {
	Profile  string            `json:"profile"`
	Commit   string            `json:"commit"`
	Modified bool              `json:"modified"` // the tree was not the commit's
	Begun    time.Time         `json:"begun"`
	Seconds  float64           `json:"seconds"`
	Machine  measure.Machine   `json:"machine"`
	LoadEnd  float64           `json:"load_average_end"`
	Modules  map[string]string `json:"modules"` // versions of what was measured
	Targets  []Target          `json:"targets"`
	Sections []*Section        `json:"sections"`
}

// Section is one subject of measurement.
type Section struct {
	Name   string  `json:"name"` // in file names
	Title  string  `json:"title"`
	Text   string  `json:"text"` // how it was measured; Markdown
	Tables []Table `json:"tables"`
	Plots  []Plot  `json:"plots,omitempty"`
}

// Table is rows of strings and numbers.
type Table struct {
	Title string   `json:"title"`
	Head  []string `json:"head"`
	Rows  [][]any  `json:"rows"`
}

// Add appends a row.
func (t *Table) Add(cells ...any) {
	for i, c := range cells {
		if v, ok := c.(float64); ok && (math.IsNaN(v) || math.IsInf(v, 0)) {
			cells[i] = NotRun
		}
	}
	t.Rows = append(t.Rows, cells)
}

// Plot is a line chart.
type Plot struct {
	Name   string   `json:"name"` // in the file's name
	Title  string   `json:"title"`
	X      Axis     `json:"x"`
	Y      Axis     `json:"y"`
	Series []Series `json:"series"`
}

// Axis is one axis of a Plot.
type Axis struct {
	Label string `json:"label"`
	Log   bool   `json:"log,omitempty"`
	Bytes bool   `json:"bytes,omitempty"` // ticks in KiB and MiB
}

// Series is one line.
type Series struct {
	Name   string       `json:"name"`
	Points [][2]float64 `json:"points"`
}

// Add appends a point; one that was not measured is left out.
func (s *Series) Add(x, y float64) {
	if !math.IsNaN(x) && !math.IsNaN(y) && !math.IsInf(x, 0) && !math.IsInf(y, 0) {
		s.Points = append(s.Points, [2]float64{x, y})
	}
}

// Target is what was aimed at, and what came of it.
type Target struct {
	Name string `json:"name"`
	Want string `json:"want"`
	Got  string `json:"got"`
	// Verdict is "met", "not met" or "not run".
	Verdict string `json:"verdict"`
	// Note says what the measured ceiling is, and why, where it was not met.
	Note string `json:"note,omitempty"`
}

// AtLeast is the target that got be at least want.
func AtLeast(name string, want, got float64, note string) Target {
	t := Target{Name: name, Want: "≥ " + number(want), Got: number(got), Verdict: verdict(got >= want), Note: note}
	return t.ran(got)
}

// AtMost is the target that got be at most want.
func AtMost(name string, want, got float64, unit, note string) Target {
	t := Target{Name: name, Want: "≤ " + number(want) + unit, Got: number(got) + unit, Verdict: verdict(got <= want), Note: note}
	return t.ran(got)
}

// Skipped is a target that this run says nothing about.
func Skipped(name, want, why string) Target {
	return Target{Name: name, Want: want, Got: "–", Verdict: NotRun, Note: why}
}

func (t Target) ran(got float64) Target {
	if math.IsNaN(got) {
		t.Got, t.Verdict = "–", NotRun
	}
	return t
}

func verdict(met bool) string {
	if met {
		return "met"
	}
	return "not met"
}

// Write writes <name>.json, <name>.md and <name>-*.svg into dir.
func (r *Report) Write(dir, name string) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	j, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(j, '\n'), 0o666); err != nil {
		return err
	}
	for _, s := range r.Sections {
		for _, p := range s.Plots {
			if err := os.WriteFile(filepath.Join(dir, name+"-"+p.Name+".svg"), p.SVG(), 0o666); err != nil {
				return err
			}
		}
	}
	return os.WriteFile(filepath.Join(dir, name+".md"), []byte(r.markdown(name)), 0o666)
}

func (r *Report) markdown(name string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Measured: %s, %s\n\n", r.Commit, r.Begun.UTC().Format("2006-01-02"))
	commit := r.Commit
	if r.Modified {
		commit += ", with changes that are not committed"
	}
	facts := [][2]string{
		{"commit", commit},
		{"profile", fmt.Sprintf("%s, %.0f s", r.Profile, r.Seconds)},
		{"machine", fmt.Sprintf("%s; %d cores; %d MiB; %s", r.Machine.CPU, r.Machine.Cores, r.Machine.MemoryMB, r.Machine.Kernel)},
		{"Go", r.Machine.Go},
		{"load average", fmt.Sprintf("%.1f before, %.1f at the end (the run itself makes about %d)", r.Machine.Load, r.LoadEnd, r.Machine.Cores)},
	}
	for _, m := range slices.Sorted(maps.Keys(r.Modules)) {
		facts = append(facts, [2]string{m, r.Modules[m]})
	}
	b.WriteString("| | |\n|---|---|\n")
	for _, f := range facts {
		fmt.Fprintf(&b, "| %s | %s |\n", f[0], cell(f[1]))
	}
	b.WriteString("\nRatios are of the same run: contenders take turns, round by round, in an order drawn anew for each; stated is the median of the rounds' quotients. " +
		"\"Spread\" is half the distance between the quartiles of the quotients, divided by their median: how far the machine's noise moves one round.\n")
	if len(r.Targets) != 0 {
		b.WriteString("\n## Targets\n\n")
		t := Table{Head: []string{"target", "wanted", "measured", "", "note"}}
		for _, x := range r.Targets {
			v := x.Verdict
			if v == "not met" {
				v = "**not met**"
			}
			t.Add(x.Name, x.Want, x.Got, v, x.Note)
		}
		t.markdown(&b)
	}
	for _, s := range r.Sections {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", s.Title, strings.TrimSpace(s.Text))
		for _, t := range s.Tables {
			b.WriteString("\n")
			if t.Title != "" {
				fmt.Fprintf(&b, "### %s\n\n", t.Title)
			}
			t.markdown(&b)
		}
		for _, p := range s.Plots {
			fmt.Fprintf(&b, "\n![%s](%s-%s.svg)\n", p.Title, name, p.Name)
		}
	}
	return b.String()
}

func (t *Table) markdown(b *strings.Builder) {
	row := func(cells []string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	row(t.Head)
	rule := make([]string, len(t.Head))
	for i := range rule {
		rule[i] = "---"
		if len(t.Rows) > 0 && i < len(t.Rows[0]) {
			if _, text := t.Rows[0][i].(string); !text {
				rule[i] = "--:"
			}
		}
	}
	row(rule)
	for _, r := range t.Rows {
		cells := make([]string, len(t.Head))
		for i := range cells {
			if i < len(r) {
				cells[i] = text(r[i])
			}
		}
		row(cells)
	}
}

func text(v any) string {
	switch v := v.(type) {
	case nil:
		return "–"
	case string:
		return cell(v)
	case float64:
		return number(v)
	case int:
		return strconv.Itoa(v)
	}
	return cell(fmt.Sprint(v))
}

func cell(s string) string { return strings.ReplaceAll(s, "|", "\\|") }

// number writes three significant digits, without an exponent.
func number(v float64) string {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	digits := 2 - int(math.Floor(math.Log10(math.Abs(v))))
	if digits < 0 {
		scale := math.Pow10(-digits)
		return strconv.FormatFloat(math.Round(v/scale)*scale, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'f', digits, 64)
}
