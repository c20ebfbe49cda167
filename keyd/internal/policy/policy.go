// Package policy is the one place that decides whether a call is allowed, and
// that audits it. An audit line says who called what for which tenant, and how
// it ended; it names no subject and holds no key.
//
// A caller is known by its certificate (principal.go), has the roles that a file
// gives it (file.go), and needs those that a table asks for (methods.go).
package policy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/peer"

	keydv1 "lethe/proto/keyd/v1"
)

// Policy decides and audits. It is safe for concurrent use.
type Policy struct {
	access *Access // nil: for development
	trail  *trail  // nil: no audit lines are kept
	audit  *slog.Logger
	calls  *prometheus.HistogramVec
}

// New decides by access. Without it every caller that reaches the listener may
// do everything; so the listener must be one that only this machine reaches.
// Audit lines go to audit, as JSON, one a call and one a Write; nil: none are
// kept. What is wrong with that goes to log.
func New(access *Access, audit io.Writer, log *slog.Logger, reg prometheus.Registerer) *Policy {
	p := &Policy{
		access: access,
		audit:  slog.New(slog.DiscardHandler),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "lethe_call_seconds",
			Help:    "Time from a call's arrival to its answer, by method and outcome.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 18),
		}, []string{"method", "outcome"}),
	}
	if audit != nil {
		p.trail = &trail{to: audit, log: log}
		p.audit = slog.New(slog.NewJSONHandler(p.trail, nil))
	}
	reg.MustRegister(p.calls)
	return p
}

// Audit is how the audit lines fare; nil functions where none are kept.
func (p *Policy) Audit() (status func() *keydv1.ComponentStatus, lost func() uint64) {
	if p.trail == nil {
		return nil, nil
	}
	return p.trail.status, p.trail.lines
}

// Close says in the log how many audit lines were lost, if they still are.
func (p *Policy) Close() {
	if p.trail != nil {
		p.trail.end()
	}
}

// Call is one call on its way.
type Call struct {
	policy    *Policy
	ctx       context.Context
	rule      *rule
	caller    *caller // nil: for development
	principal string
	tenants   []string
	begun     time.Time
	grants    *grants // when it was last allowed
}

// DeniedError says who may not do what, and nothing about anything else.
type DeniedError struct {
	Method, Principal string
	// Tenant is the one for which it is not allowed, where it depends on that.
	Tenant string
	rule   *rule
	cause  error
}

func (e *DeniedError) Error() string {
	if e.cause != nil {
		return e.Method + " is denied: " + e.cause.Error()
	}
	text := e.Method + " is not allowed to " + e.Principal
	if roles := e.rule.roles.list(); len(roles) > 0 {
		text += ": it takes the role " + strings.Join(roles, " or ")
		switch e.rule.scope {
		case ofDeployment:
			text += " for all tenants"
		case ofTenants:
			text += " for the tenant"
		}
	}
	return text
}

// nobody is the principal, in audit lines, of a caller that has no name.
const nobody = "(none)"

// Begin decides whether the caller may call method, by its full name, for these
// tenants. The caller of Begin ends what it returns, also when the call is
// denied.
func (p *Policy) Begin(ctx context.Context, method string, tenants []string) (*Call, error) {
	c := &Call{policy: p, ctx: ctx, rule: rules[method], tenants: tenants, begun: time.Now()}
	if c.rule == nil {
		c.rule = &rule{method: short(method), scope: ofDeployment}
	}
	pr, ok := peer.FromContext(ctx)
	if p.access == nil {
		c.principal = "development"
		if ok && pr.Addr != nil {
			c.principal += "@" + pr.Addr.Network()
		}
		return c, nil
	}
	c.principal = nobody
	if ok {
		c.caller, _ = pr.AuthInfo.(*caller)
	}
	if c.caller != nil && c.caller.nameless == nil {
		c.principal = c.caller.principal
	}
	return c, c.Check()
}

// Screen decides before a call's message is read: it refuses, and audits, one
// that no message could make allowed.
func (p *Policy) Screen(ctx context.Context, method string) error {
	c, err := p.Begin(ctx, method, nil)
	if err == nil || c.rule.scope == ofTenants && c.grants != nil && c.grants.any&c.rule.roles != 0 {
		return nil
	}
	c.End(keydv1.Outcome_OUTCOME_DENIED, nil)
	return err
}

// Principal is the caller's name, empty for development.
func (c *Call) Principal() string {
	if c.caller == nil {
		return ""
	}
	return c.caller.principal
}

// Check decides again, for a call that goes on for long.
func (c *Call) Check() error {
	access := c.policy.access
	if access == nil {
		return nil
	}
	if c.caller == nil {
		return c.denied(errors.New("the connection has no certificate"))
	}
	var err error
	if c.grants, err = access.admit(c.caller, access.now()); err != nil {
		return c.denied(err)
	}
	switch c.rule.scope {
	case nowhere:
		return nil
	case ofTenants:
		for _, t := range c.tenants {
			if c.grants.of(t)&c.rule.roles == 0 {
				e := c.denied(c.caller.nameless)
				e.Tenant = t
				return e
			}
		}
		if len(c.tenants) > 0 {
			return nil
		}
	case ofDeployment:
		if c.grants != nil && c.grants.everywhere&c.rule.roles != 0 {
			return nil
		}
	case ofAny:
		if c.grants != nil && c.grants.any&c.rule.roles != 0 {
			return nil
		}
	}
	return c.denied(c.caller.nameless)
}

// Query decides whether what one query of a call asks for is allowed.
func (c *Call) Query(tenant string, purpose keydv1.Purpose) error {
	if c.policy.access == nil {
		return nil
	}
	need := c.rule.roles // for what is neither, and is refused as such
	switch purpose {
	case keydv1.Purpose_PURPOSE_SEAL:
		need = sealer
	case keydv1.Purpose_PURPOSE_OPEN:
		need = opener
	}
	if c.grants.of(tenant)&need == 0 {
		return c.denied(c.caller.nameless)
	}
	return nil
}

func (c *Call) denied(cause error) *DeniedError {
	return &DeniedError{Method: c.rule.method, Principal: c.principal, rule: c.rule, cause: cause}
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
	c.policy.calls.WithLabelValues(c.rule.method, word).Observe(took.Seconds())
	attrs := []slog.Attr{
		slog.String("method", c.rule.method),
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
