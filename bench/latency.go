package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"lethe/bench/report"
	keydv1 "lethe/proto/keyd/v1"
)

// loadReport is what `lethe bench keyd --json` prints, as far as it is used.
type loadReport struct {
	Offered  float64        `json:"offered_calls_per_s"`
	Achieved float64        `json:"answered_calls_per_s"`
	Failed   map[string]int `json:"failed"`
	Response loadTimes      `json:"response"`
	Service  loadTimes      `json:"service"`
}

type loadTimes struct {
	Percentiles [][2]float64 `json:"percentiles_us"`
}

// at returns the time in ms that is told for a percentile.
func (t loadTimes) at(percent float64) float64 {
	for _, p := range t.Percentiles {
		if p[0] == percent {
			return p[1] / 1e3
		}
	}
	return 0
}

// openLoad runs the product's own load generator.
func (b *bench) openLoad(d *daemon, op string, rate float64) (loadReport, error) {
	var r loadReport
	cmd := exec.CommandContext(b, filepath.Join(b.bin, "lethe"), "--keyd", d.target, "--json", "bench", "keyd",
		"--tenant", tenant, "--class", class, "--op", op, "--yes",
		"--rate", strconv.FormatFloat(rate, 'f', 1, 64), "--duration", b.openLoop.String())
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return r, fmt.Errorf("lethe bench keyd: %w: %s", err, said.String())
	}
	return r, json.Unmarshal(out, &r)
}

func (b *bench) latency() (*report.Section, error) {
	d, err := b.startKeyd("latency")
	if err != nil {
		return nil, err
	}
	defer d.stop()
	s := &report.Section{Title: "Latency under load", Text: fmt.Sprintf(`An open loop, which sends when calls are due and not when answers have come (%s a row; "lethe bench keyd", one process, one connection).
Response counts from when a call was due; service from when it was sent. Loads are shares of what 64 clients reach in a closed loop just before,
on the same two cores that the load generator and everything else uses: near the top, queueing is what is measured.`, b.openLoop)}
	plot := report.Plot{
		Name: "latency", Title: "Response time by percentile, open loop",
		X: report.Axis{Label: "1 / (1 − percentile): 10 is the 90th, 100 the 99th, 1000 the 99.9th", Log: true},
		Y: report.Axis{Label: "ms", Log: true},
	}
	t := report.Table{Head: []string{"", "load", "offered/s", "answered/s", "p50 ms", "p90", "p99", "p99.9", "max", "service p99", "failed"}}
	opens, err := d.fill(b, 0, b.subjects, b.subjects)
	if err != nil {
		return nil, err
	}
	const spare = 30_000_000
	kinds := []struct {
		op     string
		shares []float64
		most   func() (looped, error)
	}{
		{"open", []float64{0.25, 0.5, 0.75}, func() (looped, error) {
			return closedLoop(b, 64, b.callTurn, 0, func(_, i int) error {
				_, err := get(b, d.conn, &keydv1.GetBlobKeysRequest{Queries: opens[i*7919%len(opens) : i*7919%len(opens)+1]})
				return err
			})
		}},
		{"destroy", []float64{0.25, 0.5}, func() (looped, error) {
			n := 64 * 20
			if _, err := d.fill(b, spare, spare+n, 0); err != nil {
				return looped{}, err
			}
			return closedLoop(b, 64, 0, n, func(_, i int) error {
				_, err := keydv1.NewErasureServiceClient(d.conn).DestroyKey(b, destroyRequest(subjectID(spare+i)))
				return err
			})
		}},
	}
	for _, k := range kinds {
		most, err := k.most()
		if err != nil {
			return nil, err
		}
		t.Add(k.op+", closed loop, 64 clients", "1", nil, most.perSecond(), most.at(0.5)/1e6, most.at(0.9)/1e6, most.at(0.99)/1e6, most.at(0.999)/1e6, most.at(1)/1e6, most.at(0.99)/1e6, 0)
		for _, share := range k.shares {
			r, err := b.openLoad(d, k.op, share*most.perSecond())
			if err != nil {
				return nil, err
			}
			failed := 0
			for _, n := range r.Failed {
				failed += n
			}
			t.Add(k.op, fmt.Sprint(share), r.Offered, r.Achieved, r.Response.at(50), r.Response.at(90), r.Response.at(99), r.Response.at(99.9), r.Response.at(100), r.Service.at(99), failed)
			line := report.Series{Name: fmt.Sprintf("%s, %.0f/s (%g of most)", k.op, r.Offered, share)}
			for _, p := range r.Response.Percentiles {
				if p[0] < 100 {
					line.Add(100/(100-p[0]), p[1]/1e3)
				}
			}
			plot.Series = append(plot.Series, line)
		}
	}
	s.Tables, s.Plots = append(s.Tables, t), append(s.Plots, plot)
	return s, nil
}

// since returns the milliseconds since t.
func since(t time.Time) float64 { return float64(time.Since(t)) / 1e6 }
