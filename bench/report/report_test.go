package report

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func sample() *Report {
	one := Series{Name: "one"}
	one.Add(256, 1)
	one.Add(1024, 2)
	one.Add(65536, math.NaN())
	t := Table{Title: "t", Head: []string{"what", "MB/s"}}
	t.Add("a|b", 1234.567)
	t.Add("c", math.NaN())
	return &Report{
		Profile: "quick", Commit: "abc", Begun: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC),
		Modules: map[string]string{"x": "v1", "a": "v2"},
		Targets: []Target{AtLeast("fast", 0.9, 0.95, ""), AtLeast("faster", 0.9, 0.89, "why"), AtMost("small", 16, math.NaN(), " MiB", "")},
		Sections: []*Section{{
			Name: "s", Title: "S", Text: "how", Tables: []Table{t},
			Plots: []Plot{{
				Name: "p", Title: "<p> & q", X: Axis{Label: "size", Log: true, Bytes: true}, Y: Axis{Label: "y"},
				Series: []Series{one, {Name: "none"}},
			}},
		}},
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	if err := sample().Write(dir, "name"); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	md := read("name.md")
	for _, want := range []string{
		"| a\\|b | 1230 |", "| c | not run |", "| fast | ≥ 0.900 | 0.950 | met |", "| faster | ≥ 0.900 | 0.890 | **not met** | why |",
		"| small | ≤ 16.0 MiB | – | not run |", "](name-p.svg)", "| a | v2 |\n| x | v1 |",
	} {
		if !strings.Contains(md, want) {
			t.Errorf("the report lacks %q:\n%s", want, md)
		}
	}
	var back Report
	if err := json.Unmarshal([]byte(read("name.json")), &back); err != nil {
		t.Fatal(err)
	}
	if back.Commit != "abc" || len(back.Targets) != 3 || back.Sections[0].Tables[0].Rows[0][1] != 1234.567 {
		t.Errorf("the JSON holds %+v", back)
	}
	d := xml.NewDecoder(strings.NewReader(read("name-p.svg")))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal("the plot is not well-formed: ", err)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.012345: "0.0123", 1: "1.00", 12.34: "12.3", 123.4: "123", 1234.5: "1230", 999.6: "1000", 0.9999: "1.000"} {
		if got := number(v); got != want {
			t.Errorf("%v is written %s, want %s", v, got, want)
		}
	}
}

func TestScale(t *testing.T) {
	p := Plot{X: Axis{Log: true}, Series: []Series{{"", [][2]float64{{10, 0}, {1000, 4}}}}}
	s := p.scale(0, true, 0, 100)
	if s.at(10) != 0 || s.at(1000) != 100 || math.Abs(s.at(100)-50) > 1e-9 {
		t.Errorf("10, 100, 1000 stand at %v, %v, %v", s.at(10), s.at(100), s.at(1000))
	}
	if n := len(s.ticks()); n != 3 {
		t.Errorf("%d ticks", n)
	}
	if n := len(p.scale(1, false, 100, 0).ticks()); n < 3 || n > 8 {
		t.Errorf("%d ticks on a linear axis", n)
	}
}
