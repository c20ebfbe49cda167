package report

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// Size of a plot, and of the frame inside it, in pixels.
const (
	plotWidth, plotHeight    = 860, 440
	left, right, top, bottom = 70.0, 620.0, 40.0, 390.0
	legendX, legendStep      = 636.0, 20.0
	background, ink, grid    = "#ffffff", "#222222", "#dddddd"
)

// colours are told apart by people who do not see all of them, too (Okabe and
// Ito's palette); beyond them lines are dashed.
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"}

// SVG draws the plot.
func (p Plot) SVG() []byte {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="12">`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="%s"/>`+"\n", background)
	label := func(x, y float64, anchor, extra, s string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s" %s>%s</text>`+"\n", x, y, anchor, ink, extra, html.EscapeString(s))
	}
	label(left, 24, "start", `font-weight="bold" font-size="14"`, p.Title)
	xs, ys := p.scale(0, p.X.Log, left, right), p.scale(1, p.Y.Log, bottom, top)
	for _, t := range xs.ticks() {
		x := xs.at(t)
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%.0f" x2="%.1f" y2="%.0f" stroke="%s"/>`+"\n", x, top, x, bottom, grid)
		label(x, bottom+18, "middle", "", tick(t, p.X.Bytes))
	}
	for _, t := range ys.ticks() {
		y := ys.at(t)
		fmt.Fprintf(&b, `<line x1="%.0f" y1="%.1f" x2="%.0f" y2="%.1f" stroke="%s"/>`+"\n", left, y, right, y, grid)
		label(left-6, y+4, "end", "", tick(t, p.Y.Bytes))
	}
	fmt.Fprintf(&b, `<rect x="%.0f" y="%.0f" width="%.0f" height="%.0f" fill="none" stroke="%s"/>`+"\n", left, top, right-left, bottom-top, ink)
	label((left+right)/2, bottom+40, "middle", "", p.X.Label)
	label(0, 0, "middle", fmt.Sprintf(`transform="translate(16 %.0f) rotate(-90)"`, (top+bottom)/2), p.Y.Label)
	for i, s := range p.Series {
		style := fmt.Sprintf(`stroke="%s" stroke-width="2" fill="none"`, colours[i%len(colours)])
		if i >= len(colours) {
			style += ` stroke-dasharray="5 3"`
		}
		var points []string
		for _, pt := range s.Points {
			if p.drawable(pt) {
				points = append(points, fmt.Sprintf("%.1f,%.1f", xs.at(pt[0]), ys.at(pt[1])))
			}
		}
		fmt.Fprintf(&b, `<polyline points="%s" %s/>`+"\n", strings.Join(points, " "), style)
		for _, pt := range points {
			x, y, _ := strings.Cut(pt, ",")
			fmt.Fprintf(&b, `<circle cx="%s" cy="%s" r="3" fill="%s"/>`+"\n", x, y, colours[i%len(colours)])
		}
		y := top + 10 + float64(i)*legendStep
		fmt.Fprintf(&b, `<line x1="%.0f" y1="%.0f" x2="%.0f" y2="%.0f" %s/>`+"\n", legendX, y, legendX+22, y, style)
		label(legendX+28, y+4, "start", "", s.Name)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// drawable reports whether a point can stand on the plot's axes.
func (p Plot) drawable(pt [2]float64) bool {
	for i, log := range []bool{p.X.Log, p.Y.Log} {
		if log && pt[i] <= 0 {
			return false
		}
	}
	return true
}

// scale maps the values of one dimension onto pixels.
type scale struct {
	low, high float64 // values
	from, to  float64 // pixels
	log       bool
}

func (p Plot) scale(dimension int, log bool, from, to float64) scale {
	s := scale{low: math.Inf(1), high: math.Inf(-1), from: from, to: to, log: log}
	for _, series := range p.Series {
		for _, pt := range series.Points {
			if p.drawable(pt) {
				s.low, s.high = min(s.low, pt[dimension]), max(s.high, pt[dimension])
			}
		}
	}
	switch {
	case s.low > s.high:
		s.low, s.high = 1, 10 // nothing to draw
	case log:
		if dimension == 1 || s.low == s.high {
			s.low = math.Pow(10, math.Floor(math.Log10(s.low)))
			s.high = math.Pow(10, math.Ceil(math.Log10(s.high*1.0001)))
		}
	default:
		s.low = min(s.low, 0)
		if s.high *= 1.05; s.high == s.low {
			s.high = s.low + 1
		}
	}
	return s
}

func (s scale) at(v float64) float64 {
	f := (v - s.low) / (s.high - s.low)
	if s.log {
		f = math.Log(v/s.low) / math.Log(s.high/s.low)
	}
	return s.from + f*(s.to-s.from)
}

// ticks returns the values to mark: powers, or about five round numbers.
func (s scale) ticks() []float64 {
	var ticks []float64
	if s.log {
		step := 10.0
		if s.from < s.to && s.low >= 16 && math.Mod(math.Log2(s.low), 1) == 0 { // sizes
			step = 4
		}
		first := s.low
		if step == 10 {
			first = math.Pow(10, math.Ceil(math.Log10(s.low)-1e-9))
		}
		for v := first; v <= s.high*1.0001; v *= step {
			ticks = append(ticks, v)
		}
		return ticks
	}
	step := math.Pow(10, math.Floor(math.Log10((s.high-s.low)/4)))
	for _, m := range []float64{5, 2} {
		if (s.high-s.low)/(m*step) >= 3 {
			step *= m
			break
		}
	}
	for v := math.Ceil(s.low/step) * step; v <= s.high; v += step {
		ticks = append(ticks, v)
	}
	return ticks
}

func tick(v float64, bytes bool) string {
	units, base := []string{"", "k", "M", "G"}, 1000.0
	if bytes {
		units, base = []string{" B", " KiB", " MiB", " GiB"}, 1024
	}
	i := 0
	for i < len(units)-1 && math.Abs(v) >= base {
		v /= base
		i++
	}
	return fmt.Sprintf("%.4g%s", v, units[i])
}
