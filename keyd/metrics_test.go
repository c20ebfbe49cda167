package keyd_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"lethe/keyd"
	keydv1 "lethe/proto/keyd/v1"
)

// Metrics tell how far a turn is, and that a final_by was missed, as OPERATIONS
// says under these names.
func TestEpochMetrics(t *testing.T) {
	g := guard(t, only("agent.test", "acme", "sealer"), func(c *keyd.Config) {
		c.RewrapRate, c.DutyInterval = 1, 20*time.Millisecond
	})
	keysOf := keydv1.NewKeyServiceClient(g.conn(t, "agent.test"))
	for i := range 60 { // which take a minute, at this rate
		res, err := keysOf.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{
			{Tenant: "acme", SubjectId: fmt.Appendf(nil, "subject %d", i), Class: "trace", Purpose: keydv1.Purpose_PURPOSE_SEAL},
		}})
		if err != nil || res.Results[0].GetKey() == nil {
			t.Fatal(res, err)
		}
	}
	want := func(when string, gauges map[string]float64) {
		t.Helper()
		for name, v := range gauges {
			if got := metric(t, g.metrics, name); got != v {
				t.Errorf("%s: %s is %v, want %v", when, name, got, v)
			}
		}
		if got := metric(t, g.metrics, "lethe_component_healthy", "component", "epochs"); (got == 1) != (gauges["lethe_epochs_late"] == 0) {
			t.Errorf("%s: the health of epochs is %v", when, got)
		}
	}
	want("at first", map[string]float64{
		"lethe_epoch": 1, "lethe_epochs_unclosed": 0, "lethe_epochs_late": 0, "lethe_rewrap_rows": 0, "lethe_rewrap_rows_done": 0,
	})
	admin := keydv1.NewAdminServiceClient(g.conn(t, "setup.test"))
	if _, err := admin.TurnEpoch(t.Context(), &keydv1.TurnEpochRequest{}); err != nil {
		t.Fatal(err)
	}
	for metric(t, g.metrics, "lethe_rewrap_rows_done") < 60 {
		time.Sleep(10 * time.Millisecond)
	}
	rows := metric(t, g.metrics, "lethe_rewrap_rows_done")
	want("while keys are carried over", map[string]float64{
		"lethe_epoch": 2, "lethe_epochs_unclosed": 1, "lethe_epochs_late": 0, "lethe_rewrap_rows": rows,
	})
	g.ahead.Store(int64(40 * 24 * time.Hour))
	want("beyond the final_by of both", map[string]float64{"lethe_epoch": 2, "lethe_epochs_unclosed": 1, "lethe_epochs_late": 2})
}

type lossy struct{}

func (lossy) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

// Metrics and the status tell that audit lines are lost, while calls go on.
func TestLostAuditLines(t *testing.T) {
	g := guard(t, "", func(c *keyd.Config) { c.Audit = lossy{} })
	before := metric(t, g.metrics, "lethe_audit_lines_lost_total")
	res, err := keydv1.NewAdminServiceClient(g.conn(t, "setup.test")).GetStatus(t.Context(), &keydv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(res.Components, func(c *keydv1.ComponentStatus) bool { return c.Name == "audit" && !c.Healthy }); i < 0 {
		t.Errorf("the components are %v", res.Components)
	}
	if n := metric(t, g.metrics, "lethe_audit_lines_lost_total") - before; before < 1 || n != 1 {
		t.Errorf("%v lines are lost, and %v for a call more", before, n)
	}
	if healthy := metric(t, g.metrics, "lethe_component_healthy", "component", "audit"); healthy != 0 {
		t.Errorf("the metric says %v", healthy)
	}
}
