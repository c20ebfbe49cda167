package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func (a *app) benchCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "bench",
		Short:   "Measure a deployment under load",
		Example: "  lethe bench keyd --tenant acme --class memory --rate 500 --duration 30s",
	}, a.benchKeydCommand())
}

// loadFlags say what load to make.
type loadFlags struct {
	tenant, class string
	op            string
	subjects      int
	batch         int
	loop          openLoop
	yes           bool
}

const (
	loadOpen    = "open"
	loadSeal    = "seal"
	loadCreate  = "create"
	loadDestroy = "destroy"
)

func (a *app) benchKeydCommand() *cobra.Command {
	var l loadFlags
	c := a.command(&cobra.Command{
		Use:   "keyd --tenant TENANT --class CLASS --rate CALLS",
		Short: "Call keyd at a steady rate and tell how long its answers take",
		Long: `Keyd makes calls at the times that a schedule sets, whether or not earlier calls
were answered (an open loop), and prints percentiles of two times:

  response   from when a call was due to its answer: what callers feel
  service    from when it was sent to its answer

While keyd keeps up they are about equal. When it stalls or is overloaded, calls
are sent late, and only the response time tells; the service time is what a test
reports that waits for answers before it sends on (coordinated omission).

What is called is said by --op:

  open      GetBlobKeys for blobs of subjects that have a key
  seal      GetBlobKeys for sealing, for the same subjects
  create    GetBlobKeys for sealing, for a new subject each time
  destroy   DestroyKey, for a subject each time that was made beforehand

Subjects are made for the run, with random ids. Their keys stay in the key store
and, once destroyed, leave a tombstone and an entry in the ledger for good; so
create and destroy want --yes. Use a tenant of its own.`,
		Example: `  lethe bench keyd --tenant load --class memory --rate 2000 --duration 1m
  lethe bench keyd --tenant load --class memory --rate 100 --op destroy --yes --json`,
	}, func(ctx context.Context, _ []string) error { return a.benchKeyd(ctx, &l) })
	f := c.Flags()
	a.addTenantFlag(c, &l.tenant)
	a.addClassFlag(c, &l.class)
	f.StringVar(&l.op, "op", loadOpen, "open, seal, create or destroy")
	f.Float64Var(&l.loop.rate, "rate", 0, "calls a second")
	f.DurationVar(&l.loop.duration, "duration", 10*time.Second, "for how long calls are made")
	f.BoolVar(&l.loop.even, "even", false, "space the calls evenly, instead of at random as independent callers do")
	f.IntVar(&l.loop.inFlight, "in-flight", 10_000, "most calls under way at once")
	f.IntVar(&l.subjects, "subjects", 1000, "subjects to open and seal for")
	f.IntVar(&l.batch, "batch", 1, "keys a call, 1 to 256; for destroy always 1")
	f.BoolVar(&l.yes, "yes", false, "make what stays for good, without asking")
	_ = c.MarkFlagRequired("rate")
	return c
}

// maxLoadSubjects bounds what is made beforehand.
const maxLoadSubjects = 1_000_000

func (l *loadFlags) check() error {
	switch {
	case l.op != loadOpen && l.op != loadSeal && l.op != loadCreate && l.op != loadDestroy:
		return usagef("--op: open, seal, create or destroy")
	case l.loop.rate <= 0 || l.loop.rate > 1e6:
		return usagef("--rate: more than 0, at most 1000000")
	case l.loop.duration <= 0:
		return usagef("--duration: more than 0")
	case l.loop.inFlight < 1:
		return usagef("--in-flight: at least 1")
	case l.subjects < 1 || l.subjects > maxLoadSubjects:
		return usagef("--subjects: 1 to %d", maxLoadSubjects)
	case l.batch < 1 || l.batch > 256:
		return usagef("--batch: 1 to 256")
	case (l.op == loadCreate || l.op == loadDestroy) && !l.yes:
		return usagef("--op %s makes rows that stay for good: say --yes", l.op)
	}
	if err := ident.Tenant(l.tenant); err != nil {
		return err
	}
	if err := ident.Class(l.class); err != nil {
		return err
	}
	if l.op == loadDestroy {
		l.batch = 1
		// Arrivals at random may be more than the average; some spare.
		n := l.loop.rate * l.loop.duration.Seconds()
		if n > maxLoadSubjects {
			return usagef("--rate and --duration: at most %d destructions", maxLoadSubjects)
		}
		l.subjects = int(n*1.1) + 100
	}
	return nil
}

// loadTarget makes the calls of a load.
type loadTarget struct {
	*loadFlags
	keys    keydv1.KeyServiceClient
	erasure keydv1.ErasureServiceClient
	timeout func(context.Context) (context.Context, context.CancelFunc)
	run     string                 // in the ids of the run's subjects
	queries []*keydv1.BlobKeyQuery // of the subjects made beforehand
}

func (t *loadTarget) sealQuery(kind string, n int) *keydv1.BlobKeyQuery {
	return &keydv1.BlobKeyQuery{
		Tenant: t.tenant, SubjectId: fmt.Appendf(nil, "lethe-bench/%s/%s/%d", t.run, kind, n),
		Class: t.class, Purpose: keydv1.Purpose_PURPOSE_SEAL,
	}
}

// prepare makes the subjects.
func (t *loadTarget) prepare(ctx context.Context) error {
	if t.op == loadCreate {
		return nil
	}
	for len(t.queries) < t.subjects {
		req := new(keydv1.GetBlobKeysRequest)
		for i := range min(256, t.subjects-len(t.queries)) {
			req.Queries = append(req.Queries, t.sealQuery("made", len(t.queries)+i))
		}
		res, err := t.get(ctx, req)
		if err != nil {
			return err
		}
		for i, r := range res.GetResults() {
			q := req.Queries[i]
			if k := r.GetKey(); t.op == loadOpen {
				q.Purpose, q.KeyId, q.ClassNumber, q.Bucket = keydv1.Purpose_PURPOSE_OPEN, k.GetKeyId(), k.GetClassNumber(), k.GetBucket()
			}
			t.queries = append(t.queries, q)
		}
	}
	return nil
}

// get makes a call for keys. It fails if one of its queries does.
func (t *loadTarget) get(ctx context.Context, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	ctx, cancel := t.timeout(ctx)
	defer cancel()
	res, err := t.keys.GetBlobKeys(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, r := range res.GetResults() {
		if f := r.GetFailure(); f != nil {
			return nil, &sdk.Error{Outcome: f.GetOutcome(), Message: f.GetMessage(), Metadata: f.GetMetadata()}
		}
		clear(r.GetKey().GetKey())
	}
	return res, nil
}

// call makes the n-th call.
func (t *loadTarget) call(ctx context.Context, n int) error {
	switch t.op {
	case loadDestroy:
		if n >= len(t.queries) {
			return errOutOfSubjects
		}
		ctx, cancel := t.timeout(ctx)
		defer cancel()
		_, err := t.erasure.DestroyKey(ctx, &keydv1.DestroyKeyRequest{
			Tenant: t.tenant, SubjectId: t.queries[n].SubjectId, RequestId: fmt.Sprintf("lethe-bench/%s/%d", t.run, n), Reason: "bench",
		})
		return err
	case loadCreate:
		req := new(keydv1.GetBlobKeysRequest)
		for i := range t.batch {
			req.Queries = append(req.Queries, t.sealQuery("new", n*t.batch+i))
		}
		_, err := t.get(ctx, req)
		return err
	}
	req := new(keydv1.GetBlobKeysRequest)
	for i := range t.batch {
		// A step that is coprime to nearly every number of subjects.
		req.Queries = append(req.Queries, t.queries[(n*t.batch+i)*7919%len(t.queries)])
	}
	_, err := t.get(ctx, req)
	return err
}

var errOutOfSubjects = errors.New("more calls were due than subjects were made")

func (a *app) benchKeyd(ctx context.Context, l *loadFlags) error {
	if err := l.check(); err != nil {
		return err
	}
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	t := &loadTarget{
		loadFlags: l, keys: keydv1.NewKeyServiceClient(c.Conn()), erasure: keydv1.NewErasureServiceClient(c.Conn()),
		timeout: a.call, run: rand.Text(),
	}
	if err := t.prepare(ctx); err != nil {
		return err
	}
	l.loop.call = t.call
	r := l.loop.run(ctx, func(err error) string { return exitOf(err).name })
	if err := ctx.Err(); err != nil {
		return err
	}
	v := newLoadReport(l, r)
	if err := a.print(v, v.write); err != nil {
		return err
	}
	if v.Answered == 0 {
		return fmt.Errorf("%w: no call was answered", sdk.ErrUnavailable)
	}
	return nil
}

// loadPercentiles are those that are told, in per cent.
var loadPercentiles = []float64{50, 75, 90, 95, 99, 99.9, 99.99, 100}

// loadTimes are times in microseconds.
type loadTimes struct {
	Mean        float64      `json:"mean_us"`
	Percentiles [][2]float64 `json:"percentiles_us"` // per cent, µs
}

func newLoadTimes(h *histogram) loadTimes {
	t := loadTimes{Mean: float64(h.mean()) / 1e3}
	for _, p := range loadPercentiles {
		t.Percentiles = append(t.Percentiles, [2]float64{p, float64(h.quantile(p/100)) / 1e3})
	}
	return t
}

type loadReport struct {
	Op       string         `json:"op"`
	Batch    int            `json:"batch"`
	Offered  float64        `json:"offered_calls_per_s"`
	Answered int            `json:"answered"`
	Achieved float64        `json:"answered_calls_per_s"`
	Failed   map[string]int `json:"failed"`
	Waited   int            `json:"waited_for_a_slot"`
	Most     int64          `json:"most_under_way"`
	Seconds  float64        `json:"seconds"`
	Response loadTimes      `json:"response"`
	Service  loadTimes      `json:"service"`
}

func newLoadReport(l *loadFlags, r *loadResult) loadReport {
	return loadReport{
		Op: l.op, Batch: l.batch, Offered: float64(r.sent) / l.loop.duration.Seconds(),
		Answered: r.response.n, Achieved: float64(r.response.n) / r.took.Seconds(),
		Failed: r.failed, Waited: r.waited, Most: r.most, Seconds: r.took.Seconds(),
		Response: newLoadTimes(r.response), Service: newLoadTimes(r.service),
	}
}

func (v loadReport) write(w io.Writer) {
	facts(w,
		"calls", fmt.Sprintf("%s, %d keys each", v.Op, v.Batch),
		"offered", fmt.Sprintf("%.1f calls/s", v.Offered),
		"answered", fmt.Sprintf("%.1f calls/s, %d in %.1f s, at most %d under way", v.Achieved, v.Answered, v.Seconds, v.Most),
	)
	for _, name := range slices.Sorted(maps.Keys(v.Failed)) {
		facts(w, "failed", fmt.Sprintf("%d as %s", v.Failed[name], name))
	}
	if v.Waited > 0 {
		facts(w, "sent late", fmt.Sprintf("%d, because as many were under way as --in-flight allows", v.Waited))
	}
	fmt.Fprintln(w)
	rows := [][]string{{"", "RESPONSE ms", "SERVICE ms"}, {"mean", millis(v.Response.Mean), millis(v.Service.Mean)}}
	for i, p := range v.Response.Percentiles {
		rows = append(rows, []string{fmt.Sprintf("%g %%", p[0]), millis(p[1]), millis(v.Service.Percentiles[i][1])})
	}
	table(w, rows)
}

func millis(us float64) string { return fmt.Sprintf("%.3f", us/1e3) }
