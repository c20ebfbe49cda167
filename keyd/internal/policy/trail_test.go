package policy

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	keydv1 "lethe/proto/keyd/v1"
)

type faulty struct {
	bytes.Buffer
	err error
}

func (f *faulty) Write(p []byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	return f.Buffer.Write(p)
}

// Lines that are lost are told of while they are, once when that begins and once
// when it ends, and counted.
func TestLostAuditLinesAreTold(t *testing.T) {
	var out faulty
	var log bytes.Buffer
	p := New(nil, &out, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
	status, lost := p.Audit()
	calls := func(n int) {
		t.Helper()
		for range n {
			c, err := p.Begin(t.Context(), "/keyd.v1.AdminService/GetStatus", nil)
			if err != nil {
				t.Fatal(err)
			}
			c.End(keydv1.Outcome_OUTCOME_UNSPECIFIED, nil)
		}
	}
	said := func(want ...string) {
		t.Helper()
		lines := strings.Split(strings.TrimSuffix(log.String(), "\n"), "\n")
		if log.Len() == 0 {
			lines = nil
		}
		if len(lines) != len(want) {
			t.Fatalf("it said:\n%s", log.String())
		}
		for i, w := range want {
			if !strings.Contains(lines[i], w) {
				t.Errorf("line %d is %s, want %s", i, lines[i], w)
			}
		}
		log.Reset()
	}
	calls(1)
	if s := status(); !s.Healthy || s.Name != "audit" || lost() != 0 {
		t.Errorf("at first it is %v, %d lost", s, lost())
	}
	said()
	out.err = errors.New("no space left on device")
	calls(600)
	if s := status(); s.Healthy || !strings.Contains(s.Detail, "600 since") || !strings.Contains(s.Detail, "no space left") || lost() != 600 {
		t.Errorf("while lines are lost it is %v, %d lost", s, lost())
	}
	said(`audit lines are being lost`)
	out.err = nil
	calls(2)
	if s := status(); !s.Healthy || !strings.Contains(s.Detail, "600 lines were lost") {
		t.Errorf("afterwards it is %v", s)
	}
	said("lost=600")
	if n := strings.Count(out.String(), "\n"); n != 3 {
		t.Errorf("%d lines were written", n)
	}
	p.Close()
	said()
	out.err = errors.New("input/output error")
	calls(3)
	p.Close()
	said("input/output error", "lost=3")
	if lost() != 603 {
		t.Errorf("%d lines are lost in all", lost())
	}
}
