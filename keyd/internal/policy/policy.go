// Package policy is the one place that decides whether a call is allowed, and
// that audits it. An audit line says who called what for which tenant, and how
// it ended; it names no subject and holds no key.
package policy

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/peer"

	keydv1 "lethe/proto/keyd/v1"
)

// Policy decides and audits. It is safe for concurrent use.
type Policy struct {
	audit *slog.Logger
	calls *prometheus.HistogramVec
}

// Development allows every caller that reaches the listener everything; so the
// listener must be one that only this machine reaches. Audit lines go to
// audit, as JSON, one a call.
func Development(audit io.Writer, reg prometheus.Registerer) *Policy {
	p := &Policy{
		audit: slog.New(slog.NewJSONHandler(audit, nil)),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "lethe_call_seconds",
			Help:    "Time from a call's arrival to its answer, by method and outcome.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 18),
		}, []string{"method", "outcome"}),
	}
	reg.MustRegister(p.calls)
	return p
}

// Call is one call on its way.
type Call struct {
	policy    *Policy
	ctx       context.Context
	method    string
	principal string
	tenants   []string
	begun     time.Time
}

// Begin decides whether the caller may call method for these tenants. The
// caller of Begin ends what it returns, also when the call is denied.
func (p *Policy) Begin(ctx context.Context, method string, tenants []string) (*Call, error) {
	c := &Call{policy: p, ctx: ctx, method: method, tenants: tenants, begun: time.Now(), principal: "development"}
	if pr, ok := peer.FromContext(ctx); ok && pr.Addr != nil {
		c.principal += "@" + pr.Addr.Network()
	}
	return c, nil
}

// mixed is the outcome, in audit lines and metrics, of an answered batch whose
// queries ended differently.
const mixed = "MIXED"

// End audits the outcome; OUTCOME_UNSPECIFIED is success. Where the queries of
// an answered batch ended differently, queries counts them by outcome; else it
// is nil.
func (c *Call) End(outcome keydv1.Outcome, queries map[keydv1.Outcome]int) {
	word := wordFor(outcome)
	if queries != nil {
		word = mixed
	}
	took := time.Since(c.begun)
	c.policy.calls.WithLabelValues(c.method, word).Observe(took.Seconds())
	attrs := []slog.Attr{
		slog.String("method", c.method),
		slog.String("principal", c.principal),
		slog.String("outcome", word),
		slog.Duration("took", took),
	}
	switch len(c.tenants) {
	case 0:
	case 1:
		attrs = append(attrs, slog.String("tenant", c.tenants[0]))
	default:
		attrs = append(attrs, slog.Any("tenants", c.tenants))
	}
	if queries != nil {
		counts := make(map[string]int, len(queries))
		for o, n := range queries {
			counts[wordFor(o)] = n
		}
		attrs = append(attrs, slog.Any("queries", counts))
	}
	c.policy.audit.LogAttrs(c.ctx, slog.LevelInfo, "call", attrs...)
}

func wordFor(o keydv1.Outcome) string {
	if o == keydv1.Outcome_OUTCOME_UNSPECIFIED {
		return "OK"
	}
	return Reason(o)
}

// Reason is an outcome's name on the wire, in metrics and in audit lines:
// "ERASED".
func Reason(o keydv1.Outcome) string {
	const prefix = "OUTCOME_"
	return o.String()[len(prefix):]
}
