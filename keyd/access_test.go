package keyd_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/internal/certtest"
	"lethe/internal/logtest"
	"lethe/keyd"
	"lethe/keyd/anchor/file"
	"lethe/keyd/anchor/peer"
	"lethe/keyd/kms/local"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
)

// guarded is a keyd with roles, on TCP.
type guarded struct {
	*keyd.Server
	ca      *certtest.CA
	files   keyd.AccessFiles
	address string
	audit   *logtest.Buffer
	metrics *prometheus.Registry
	ahead   atomic.Int64 // by how much keyd's clock is ahead
	anchor  string
}

// guard starts a keyd with this policy, and the tenant acme.
func guard(t *testing.T, policy string, opts ...func(*keyd.Config)) *guarded {
	t.Helper()
	dir := t.TempDir()
	g := &guarded{ca: certtest.New(t), audit: new(logtest.Buffer), metrics: prometheus.NewRegistry(), anchor: filepath.Join(dir, "anchor")}
	clock := func() time.Time { return time.Now().Add(time.Duration(g.ahead.Load())) }
	cert, key := g.ca.Issue(t, certtest.DNS("localhost"))
	g.files = keyd.AccessFiles{
		Certificate: certtest.Write(t, dir, "cert.pem", cert), Key: certtest.Write(t, dir, "key.pem", key),
		ClientCA: certtest.Write(t, dir, "ca.pem", g.ca.PEM),
		Policy:   certtest.Write(t, dir, "policy.toml", []byte(policy+"\n[principals.\"setup.test\"]\n\"*\" = [\"admin\"]\n")),
	}
	if err := local.GenerateKeyfile(filepath.Join(dir, "keyfile")); err != nil {
		t.Fatal(err)
	}
	kms, err := local.Open(local.Options{Path: filepath.Join(dir, "roots"), Keyfile: filepath.Join(dir, "keyfile"), Create: true, Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	anchor, err := file.Open(file.Options{Dir: g.anchor, Create: true})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	store, err := badger.Open(badger.Options{Dir: filepath.Join(dir, "store"), Create: true, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	shelfDir := filepath.Join(dir, "shelf")
	if err := os.Mkdir(shelfDir, 0o700); err != nil {
		t.Fatal(err)
	}
	shelf, err := file.OpenShelf(shelfDir)
	if err != nil {
		t.Fatal(err)
	}
	cfg := keyd.Config{
		Store: store, KMS: kms, Anchor: anchor, Anchors: shelf, Access: &g.files, Initialise: true,
		Clock: clock, Log: log, Audit: g.audit, Metrics: g.metrics, Heartbeat: 50 * time.Millisecond,
	}
	for _, o := range opts {
		o(&cfg)
	}
	g.Server, err = keyd.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	// An address that other machines reach, which development refuses.
	lis, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- g.Serve(lis) }()
	g.address = fmt.Sprintf("localhost:%d", lis.Addr().(*net.TCPAddr).Port)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		g.Stop(ctx)
		if err := <-served; err != nil {
			t.Error(err)
		}
		for _, c := range []io.Closer{store, anchor, kms, shelf} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	_, err = keydv1.NewAdminServiceClient(g.conn(t, "setup.test")).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "acme"})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// named is a certificate for a principal.
func named(principal string) certtest.Option {
	if strings.HasPrefix(principal, "spiffe:") {
		return certtest.URI(principal)
	}
	return certtest.DNS(principal)
}

func (g *guarded) conn(t *testing.T, principal string) *grpc.ClientConn {
	t.Helper()
	return g.connTLS(t, g.ca.Client(t, named(principal)))
}

func (g *guarded) connTLS(t *testing.T, config *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(g.address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// policy replaces the policy file. keyd does not read it until it is told.
func (g *guarded) policy(t *testing.T, policy string) {
	t.Helper()
	if err := os.WriteFile(g.files.Policy, []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
}

// only is a policy with one principal.
func only(principal, tenant string, roles ...string) string {
	return fmt.Sprintf("[principals.%q]\n%q = [\"%s\"]\n", principal, tenant, strings.Join(roles, `", "`))
}

func outcome(err error) keydv1.Outcome { return sdk.OutcomeOf(err) }

const denied = keydv1.Outcome_OUTCOME_DENIED

// attempts are what a caller may try: each method of each service, with a
// request for acme that changes nothing. An error of another outcome than denied
// says that it was allowed.
var attempts = map[string]func(context.Context, grpc.ClientConnInterface) error{
	"GetBlobKeys seal": getBlobKeys(keydv1.Purpose_PURPOSE_SEAL),
	"GetBlobKeys open": getBlobKeys(keydv1.Purpose_PURPOSE_OPEN),
	"WatchRevocations": func(ctx context.Context, c grpc.ClientConnInterface) error {
		return firstOf(keydv1.NewKeyServiceClient(c).WatchRevocations(ctx, &keydv1.WatchRevocationsRequest{Tenants: []string{"acme"}}))
	},
	"Backup": func(ctx context.Context, c grpc.ClientConnInterface) error {
		return firstOf(keydv1.NewAdminServiceClient(c).Backup(ctx, &keydv1.BackupRequest{}))
	},
	"Health.Watch": func(ctx context.Context, c grpc.ClientConnInterface) error {
		return firstOf(healthpb.NewHealthClient(c).Watch(ctx, &healthpb.HealthCheckRequest{}))
	},
	"Health.Check": unary("/grpc.health.v1.Health/Check", &healthpb.HealthCheckRequest{}, &healthpb.HealthCheckResponse{}),
	"Health.List":  unary("/grpc.health.v1.Health/List", &healthpb.HealthListRequest{}, &healthpb.HealthListResponse{}),

	"DestroyKey":        unary("/keyd.v1.ErasureService/DestroyKey", &keydv1.DestroyKeyRequest{Tenant: "acme"}, &keydv1.DestroyKeyResponse{}),
	"DestroyKey waits":  unary("/keyd.v1.ErasureService/DestroyKey", &keydv1.DestroyKeyRequest{Tenant: "acme", WaitForHolds: true}, &keydv1.DestroyKeyResponse{}),
	"CancelDestruction": unary("/keyd.v1.ErasureService/CancelDestruction", &keydv1.CancelDestructionRequest{Tenant: "acme"}, &keydv1.CancelDestructionResponse{}),
	"Reinstate":         unary("/keyd.v1.ErasureService/Reinstate", &keydv1.ReinstateRequest{Tenant: "acme"}, &keydv1.ReinstateResponse{}),
	"DestroyTenant":     unary("/keyd.v1.ErasureService/DestroyTenant", &keydv1.DestroyTenantRequest{Tenant: "acme"}, &keydv1.DestroyTenantResponse{}),
	"DescribeSubject":   unary("/keyd.v1.ErasureService/DescribeSubject", &keydv1.DescribeSubjectRequest{Tenant: "acme"}, &keydv1.DescribeSubjectResponse{}),

	"PlaceHold":   unary("/keyd.v1.HoldService/PlaceHold", &keydv1.PlaceHoldRequest{Tenant: "acme"}, &keydv1.PlaceHoldResponse{}),
	"ReleaseHold": unary("/keyd.v1.HoldService/ReleaseHold", &keydv1.ReleaseHoldRequest{Tenant: "acme"}, &keydv1.ReleaseHoldResponse{}),
	"ListHolds":   unary("/keyd.v1.HoldService/ListHolds", &keydv1.ListHoldsRequest{Tenant: "acme"}, &keydv1.ListHoldsResponse{}),

	"GetReceipt":          unary("/keyd.v1.LedgerService/GetReceipt", &keydv1.GetReceiptRequest{Tenant: "acme"}, &keydv1.GetReceiptResponse{}),
	"ListReceipts":        unary("/keyd.v1.LedgerService/ListReceipts", &keydv1.ListReceiptsRequest{Tenant: "acme"}, &keydv1.ListReceiptsResponse{}),
	"GetLedgerKey":        unary("/keyd.v1.LedgerService/GetLedgerKey", &keydv1.GetLedgerKeyRequest{}, &keydv1.GetLedgerKeyResponse{}),
	"GetCheckpoint":       unary("/keyd.v1.LedgerService/GetCheckpoint", &keydv1.GetCheckpointRequest{}, &keydv1.GetCheckpointResponse{}),
	"GetConsistencyProof": unary("/keyd.v1.LedgerService/GetConsistencyProof", &keydv1.GetConsistencyProofRequest{}, &keydv1.GetConsistencyProofResponse{}),

	"CreateTenant":     unary("/keyd.v1.AdminService/CreateTenant", &keydv1.CreateTenantRequest{Tenant: "acme"}, &keydv1.CreateTenantResponse{}),
	"ListTenants":      unary("/keyd.v1.AdminService/ListTenants", &keydv1.ListTenantsRequest{}, &keydv1.ListTenantsResponse{}),
	"PutClass":         unary("/keyd.v1.AdminService/PutClass", &keydv1.PutClassRequest{Tenant: "acme"}, &keydv1.PutClassResponse{}),
	"ListClasses":      unary("/keyd.v1.AdminService/ListClasses", &keydv1.ListClassesRequest{Tenant: "acme"}, &keydv1.ListClassesResponse{}),
	"GetStatus":        unary("/keyd.v1.AdminService/GetStatus", &keydv1.GetStatusRequest{}, &keydv1.GetStatusResponse{}),
	"GetEpochs":        unary("/keyd.v1.AdminService/GetEpochs", &keydv1.GetEpochsRequest{}, &keydv1.GetEpochsResponse{}),
	"TurnEpoch":        unary("/keyd.v1.AdminService/TurnEpoch", &keydv1.TurnEpochRequest{Epoch: 999}, &keydv1.TurnEpochResponse{}),
	"CancelRetirement": unary("/keyd.v1.AdminService/CancelRetirement", &keydv1.CancelRetirementRequest{Epoch: 999}, &keydv1.CancelRetirementResponse{}),
	"ResumeRetirement": unary("/keyd.v1.AdminService/ResumeRetirement", &keydv1.ResumeRetirementRequest{Epoch: 999}, &keydv1.ResumeRetirementResponse{}),
	"ConfirmClock":     unary("/keyd.v1.AdminService/ConfirmClock", &keydv1.ConfirmClockRequest{}, &keydv1.ConfirmClockResponse{}),

	"GetNewest": unary("/keyd.v1.AnchorService/GetNewest", &keydv1.GetNewestRequest{}, &keydv1.GetNewestResponse{}),
	"GetNext":   unary("/keyd.v1.AnchorService/GetNext", &keydv1.GetNextRequest{}, &keydv1.GetNextResponse{}),
	"PutObject": unary("/keyd.v1.AnchorService/PutObject", &keydv1.PutObjectRequest{}, &keydv1.PutObjectResponse{}),
	"EnterTerm": unary("/keyd.v1.AnchorService/EnterTerm", &keydv1.EnterTermRequest{}, &keydv1.EnterTermResponse{}),
}

func unary(method string, req, res proto.Message) func(context.Context, grpc.ClientConnInterface) error {
	return func(ctx context.Context, c grpc.ClientConnInterface) error {
		return c.Invoke(ctx, method, req, proto.Clone(res))
	}
}

func getBlobKeys(purpose keydv1.Purpose) func(context.Context, grpc.ClientConnInterface) error {
	return func(ctx context.Context, c grpc.ClientConnInterface) error {
		res, err := keydv1.NewKeyServiceClient(c).GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{
			Queries: []*keydv1.BlobKeyQuery{{Tenant: "acme", Purpose: purpose}},
		})
		if err != nil {
			return err
		}
		f := res.Results[0].GetFailure()
		return &sdk.Error{Outcome: f.GetOutcome(), Message: f.GetMessage()}
	}
}

func firstOf[T any](s grpc.ServerStreamingClient[T], err error) error {
	if err != nil {
		return err
	}
	_, err = s.Recv()
	return err
}

// matrix says who may do what: with the role for any tenant ("a"), for the tenant
// or for all ("t"), for all only ("*"), or not at all (".").
const matrix = `
                     sealer opener eraser holder releaser auditor admin anchor
GetBlobKeys_seal     t      .      .      .      .        .       .     .
GetBlobKeys_open     .      t      .      .      .        .       .     .
WatchRevocations     t      t      .      .      .        t       .     .
DestroyKey           .      .      t      .      .        .       .     .
DestroyKey_waits     .      .      t      .      .        .       .     .
CancelDestruction    .      .      t      .      .        .       .     .
Reinstate            .      .      t      .      .        .       .     .
DestroyTenant        .      .      *      .      .        .       .     .
DescribeSubject      .      .      t      t      t        t       .     .
PlaceHold            .      .      .      t      .        .       .     .
ReleaseHold          .      .      .      .      t        .       .     .
ListHolds            .      .      t      t      t        t       .     .
GetReceipt           .      .      t      t      t        t       .     .
ListReceipts         .      .      t      t      t        t       .     .
GetLedgerKey         .      .      a      a      a        a       a     .
GetCheckpoint        .      .      .      .      .        *       *     .
GetConsistencyProof  .      .      .      .      .        *       *     .
CreateTenant         .      .      .      .      .        .       *     .
ListTenants          .      .      .      .      .        *       *     .
PutClass             .      .      .      .      .        .       t     .
ListClasses          .      .      t      t      t        t       t     .
GetStatus            .      .      .      .      .        *       *     .
GetEpochs            .      .      .      .      .        *       *     .
TurnEpoch            .      .      .      .      .        .       *     .
CancelRetirement     .      .      .      .      .        .       *     .
ResumeRetirement     .      .      .      .      .        .       *     .
ConfirmClock         .      .      .      .      .        .       *     .
Backup               .      .      .      .      .        .       *     .
GetNewest            .      .      .      .      .        .       .     *
GetNext              .      .      .      .      .        .       .     *
PutObject            .      .      .      .      .        .       .     *
EnterTerm            .      .      .      .      .        .       .     *
Health.Check         a      a      a      a      a        a       a     a
Health.List          a      a      a      a      a        a       a     a
Health.Watch         a      a      a      a      a        a       a     a
`

func TestWhoMayDoWhat(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(matrix), "\n")
	roles := strings.Fields(lines[0])
	var policy strings.Builder
	for _, r := range roles {
		fmt.Fprint(&policy, only("all."+r+".test", "*", r))
		if r != "anchor" {
			fmt.Fprint(&policy, only("acme."+r+".test", "acme", r), only("other."+r+".test", "other", r))
		}
	}
	g := guard(t, policy.String())
	try := func(name, principal string, conn grpc.ClientConnInterface, want bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := attempts[name](ctx, conn)
		if got := outcome(err) != denied; got != want || outcome(err) == keydv1.Outcome_OUTCOME_UNAVAILABLE {
			t.Errorf("%s by %s: %v", name, principal, err)
		}
	}
	tried := make(map[string]bool)
	for i, role := range roles {
		conns := map[string]*grpc.ClientConn{"all": g.conn(t, "all."+role+".test")}
		if role != "anchor" {
			conns["acme"], conns["other"] = g.conn(t, "acme."+role+".test"), g.conn(t, "other."+role+".test")
		}
		for _, line := range lines[1:] {
			cells := strings.Fields(line)
			name, cell := strings.Replace(cells[0], "_", " ", 1), cells[i+1]
			tried[name] = true
			for of, conn := range conns {
				want := cell == "a" || of == "all" && cell != "." || of == "acme" && cell == "t"
				try(name, of+"."+role+".test", conn, want)
			}
		}
	}
	nobody := g.conn(t, "nobody.test")
	nameless := g.connTLS(t, g.ca.Client(t, certtest.CommonName("all.admin.test")))
	for name := range attempts {
		if !tried[name] {
			t.Errorf("%s is not in the matrix", name)
		}
		try(name, "who is not in the policy", nobody, strings.HasPrefix(name, "Health."))
		try(name, "who has no name", nameless, strings.HasPrefix(name, "Health."))
	}
}

// A denied call says who and what, nothing about a subject, and not whether a
// tenant is there; and it is audited.
func TestDenied(t *testing.T) {
	g := guard(t, only("spiffe://test/agent", "acme", "sealer"))
	conn := g.conn(t, "spiffe://test/agent")
	var messages []string
	for _, tenant := range []string{"acme", "other"} {
		_, err := keydv1.NewErasureServiceClient(conn).DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
			Tenant: tenant, SubjectId: []byte("needle-subject"), RequestId: "r", Reason: "test",
		})
		if outcome(err) != denied || !strings.Contains(err.Error(), "DestroyKey") || !strings.Contains(err.Error(), "spiffe://test/agent") {
			t.Errorf("%s: %v", tenant, err)
		}
		messages = append(messages, err.Error())
	}
	if messages[0] != messages[1] {
		t.Errorf("a tenant that is not there is told apart: %q", messages)
	}
	log := g.audit.String()
	if !strings.Contains(log, `"method":"DestroyKey","principal":"spiffe://test/agent","outcome":"DENIED"`) {
		t.Errorf("audited as %s", log)
	}
	if strings.Contains(log, "needle") {
		t.Errorf("names a subject: %s", log)
	}
}

// One query that is not allowed does not fail the others, and nothing is told
// about who is in the blob.
func TestQueriesAreJudgedApart(t *testing.T) {
	g := guard(t, only("agent.test", "acme", "sealer"))
	_, err := keydv1.NewAdminServiceClient(g.conn(t, "setup.test")).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "other"})
	if err != nil {
		t.Fatal(err)
	}
	client := keydv1.NewKeyServiceClient(g.conn(t, "agent.test"))
	query := func(tenant, class string, purpose keydv1.Purpose) *keydv1.BlobKeyQuery {
		return &keydv1.BlobKeyQuery{Tenant: tenant, SubjectId: []byte("ann"), Class: class, Purpose: purpose}
	}
	const seal, open = keydv1.Purpose_PURPOSE_SEAL, keydv1.Purpose_PURPOSE_OPEN
	first, err := client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{query("acme", "trace", seal)}})
	if err != nil {
		t.Fatal(err)
	}
	key := first.Results[0].GetKey()
	opened := query("acme", "trace", open)
	opened.KeyId, opened.ClassNumber, opened.Bucket = key.GetKeyId(), key.GetClassNumber(), key.GetBucket()
	res, err := client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{
		query("acme", "trace", seal), opened, query("other", "trace", seal), query("nowhere", "trace", seal), query("acme", "memory", seal),
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []keydv1.Outcome{0, denied, denied, denied, 0} {
		r := res.Results[i]
		if got := r.GetFailure().GetOutcome(); got != want || (r.GetKey() != nil) != (want == 0) {
			t.Errorf("query %d: %v", i, r)
		}
	}
	if !strings.Contains(g.audit.String(), `"DENIED":3,"OK":2`) {
		t.Error("the audit log does not say how many were denied")
	}

	// The states of a blob's recipients are for those who may open.
	second, err := client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{{
		Tenant: "acme", SubjectId: []byte("bob"), Class: "trace", Purpose: seal,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	ids := [][]byte{key.GetKeyId(), second.Results[0].GetKey().GetKeyId()}
	slices.SortFunc(ids, bytes.Compare)
	res, err = client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{opened}, Recipients: ids})
	if err != nil || len(res.Recipients) != 0 || res.Results[0].GetFailure().GetOutcome() != denied {
		t.Errorf("%v, %v", res, err)
	}
	g.policy(t, only("agent.test", "acme", "sealer", "opener"))
	if err := g.Reload(); err != nil {
		t.Fatal(err)
	}
	res, err = client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{opened}, Recipients: ids})
	if err != nil || len(res.Recipients) != 2 || res.Results[0].GetKey() == nil {
		t.Errorf("with the right to open: %v, %v", res, err)
	}
	// And for those who know whose blob it is: a key id alone tells nothing.
	opened.SubjectId = []byte("nobody")
	random := proto.CloneOf(opened)
	random.KeyId = bytes.Repeat([]byte{7}, 16)
	for _, q := range []*keydv1.BlobKeyQuery{opened, random} {
		res, err = client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}, Recipients: ids})
		if err != nil || len(res.Recipients) != 0 || res.Results[0].GetFailure() == nil {
			t.Errorf("without knowing whose blob it is: %v, %v", res, err)
		}
	}
}

// Where messages may be large, the policy decides before one is read.
func TestScreened(t *testing.T) {
	g := guard(t, only("agent.test", "acme", "sealer"))
	for _, principal := range []string{"agent.test", "stranger.test", "setup.test"} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		stream, err := g.conn(t, principal).NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, keydv1.AnchorService_PutObject_FullMethodName)
		if err == nil {
			err = stream.RecvMsg(new(keydv1.PutObjectResponse)) // nothing was sent
		}
		cancel()
		if outcome(err) != denied {
			t.Errorf("%s: %v", principal, err)
		}
		if line := fmt.Sprintf(`"method":"PutObject","principal":%q,"outcome":"DENIED"`, principal); !strings.Contains(g.audit.String(), line) {
			t.Errorf("no audit line for %s", principal)
		}
	}
}

// Who places a hold cannot release it, nor the other way round; the ledger and
// the list of holds say who did.
func TestHoldsNameWhoAndWhy(t *testing.T) {
	g := guard(t, only("counsel.test", "acme", "holder")+only("clerk.test", "acme", "releaser")+only("erasure.test", "acme", "eraser"))
	counsel, clerk, erasure := g.conn(t, "counsel.test"), g.conn(t, "clerk.test"), g.conn(t, "erasure.test")
	place := func(conn *grpc.ClientConn) (*keydv1.PlaceHoldResponse, error) {
		return keydv1.NewHoldServiceClient(conn).PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{
			Tenant: "acme", SubjectId: []byte("ann"), HoldId: "case-1", Reason: "litigation", RequestId: "place",
		})
	}
	release := func(conn *grpc.ClientConn) (*keydv1.ReleaseHoldResponse, error) {
		return keydv1.NewHoldServiceClient(conn).ReleaseHold(t.Context(), &keydv1.ReleaseHoldRequest{
			Tenant: "acme", SubjectId: []byte("ann"), HoldId: "case-1", Reason: "case-closed", RequestId: "release",
		})
	}
	destroy := func() (*keydv1.DestroyKeyResponse, error) {
		return keydv1.NewErasureServiceClient(erasure).DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
			Tenant: "acme", SubjectId: []byte("ann"), RequestId: "destroy", Reason: "gdpr-art17",
		})
	}
	for name, conn := range map[string]*grpc.ClientConn{"the releaser": clerk, "the eraser": erasure} {
		if _, err := place(conn); outcome(err) != denied {
			t.Errorf("placed by %s: %v", name, err)
		}
	}
	placed, err := place(counsel)
	if err != nil {
		t.Fatal(err)
	}
	for name, conn := range map[string]*grpc.ClientConn{"the holder": counsel, "the eraser": erasure} {
		if _, err := release(conn); outcome(err) != denied {
			t.Errorf("released by %s: %v", name, err)
		}
	}
	if _, err := destroy(); outcome(err) != keydv1.Outcome_OUTCOME_HELD {
		t.Errorf("destroyed under the hold: %v", err)
	}
	list, err := keydv1.NewHoldServiceClient(clerk).ListHolds(t.Context(), &keydv1.ListHoldsRequest{Tenant: "acme", SubjectId: []byte("ann")})
	if err != nil || len(list.Holds) != 1 || list.Holds[0].Principal != "counsel.test" || list.Holds[0].Reason != "litigation" {
		t.Errorf("listed as %v, %v", list, err)
	}
	released, err := release(clerk)
	if err != nil {
		t.Fatal(err)
	}
	destroyed, err := destroy()
	if err != nil {
		t.Fatal(err)
	}
	// A repeat by somebody else changes nothing of what is logged.
	g.policy(t, only("counsel.test", "acme", "releaser"))
	if err := g.Reload(); err != nil {
		t.Fatal(err)
	}
	if again, err := release(counsel); err != nil || !again.Repeat || again.LedgerIndex != released.LedgerIndex {
		t.Errorf("repeated: %v, %v", again, err)
	}
	for i, c := range []struct {
		receipt           []byte
		principal, reason string
	}{
		{placed.Receipt, "counsel.test", "litigation"},
		{released.Receipt, "clerk.test", "case-closed"},
		{destroyed.Receipt, "erasure.test", "gdpr-art17"},
	} {
		if s := stated(t, c.receipt); s.Principal != c.principal || s.Reason != c.reason {
			t.Errorf("receipt %d is of %q, for %q", i, s.Principal, s.Reason)
		}
	}
}

// Who changes a class's policy is logged, beside who is said to have approved it.
func TestRetentionNamesWho(t *testing.T) {
	g := guard(t, only("ops.test", "acme", "admin")+only("auditor.test", "acme", "auditor"))
	_, err := keydv1.NewAdminServiceClient(g.conn(t, "ops.test")).PutClass(t.Context(), &keydv1.PutClassRequest{Tenant: "acme", Class: &keydv1.Class{
		Name: "trace", BucketWidth: durationpb.New(24 * time.Hour), Lease: durationpb.New(time.Minute),
		Retention: durationpb.New(14 * 24 * time.Hour), EndAction: keydv1.EndAction_END_ACTION_DESTROY, ApprovedBy: "dpo",
	}})
	if err != nil {
		t.Fatal(err)
	}
	res, err := keydv1.NewLedgerServiceClient(g.conn(t, "auditor.test")).ListReceipts(t.Context(), &keydv1.ListReceiptsRequest{Tenant: "acme"})
	if err != nil {
		t.Fatal(err)
	}
	last, err := receipt.ParseStatement(res.Entries[len(res.Entries)-1].Statement)
	if err != nil || last.Kind != receipt.ClassSet || last.Principal != "ops.test" || last.ApprovedBy != "dpo" {
		t.Errorf("%+v, %v", last, err)
	}
	first, err := receipt.ParseStatement(res.Entries[0].Statement)
	if err != nil || first.Kind != receipt.TenantCreated || first.Principal != "setup.test" {
		t.Errorf("%+v, %v", first, err)
	}
}

// stated parses a receipt without its proof.
func stated(t *testing.T, b []byte) *receipt.Statement {
	t.Helper()
	r, err := receipt.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	s, err := receipt.ParseStatement(r[0].Statement)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestHandshakes(t *testing.T) {
	g := guard(t, only("admin.test", "*", "admin"))
	foreign := certtest.New(t)
	status := func(config *tls.Config) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := keydv1.NewAdminServiceClient(g.connTLS(t, config)).GetStatus(ctx, &keydv1.GetStatusRequest{})
		return err
	}
	admin := certtest.DNS("admin.test")
	if err := status(g.ca.Client(t, admin)); err != nil {
		t.Errorf("a good certificate: %v", err)
	}
	old := g.ca.Client(t, admin)
	old.MaxVersion = tls.VersionTLS12
	other := foreign.Client(t, admin)
	other.RootCAs = g.ca.Pool()
	for name, config := range map[string]*tls.Config{
		"TLS 1.2":                    old,
		"no certificate":             {RootCAs: g.ca.Pool()},
		"of another CA":              other,
		"over":                       g.ca.Client(t, admin, certtest.Until(time.Now().Add(-time.Hour))),
		"for servers only":           g.ca.Client(t, admin, certtest.Usage(x509.ExtKeyUsageServerAuth)),
		"of a CA that may not issue": leafAsCA(t, g.ca, admin),
	} {
		if err := status(config); outcome(err) != keydv1.Outcome_OUTCOME_UNAVAILABLE {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, opts := range map[string][]certtest.Option{
		"a common name only": {certtest.CommonName("admin.test")},
		"two SPIFFE ids":     {certtest.URI("spiffe://test/a"), certtest.URI("spiffe://test/b"), admin},
		"two DNS names":      {admin, certtest.DNS("other.test")},
	} {
		if err := status(g.ca.Client(t, opts...)); outcome(err) != denied || !strings.Contains(err.Error(), "names nobody") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !strings.Contains(g.audit.String(), `"principal":"(none)","outcome":"DENIED"`) {
		t.Error("a denial of a caller without a name is not audited")
	}
	// keyd counts them after the caller has seen that it is refused.
	for begun := time.Now(); metric(t, g.metrics, "lethe_handshakes_refused_total") < 6; time.Sleep(time.Millisecond) {
		if time.Since(begun) > time.Minute {
			t.Fatalf("%v handshakes are counted as refused", metric(t, g.metrics, "lethe_handshakes_refused_total"))
		}
	}
	// A sub-CA in the chain is as good as the CA.
	sub := g.ca.Sub(t)
	below := sub.Client(t, admin)
	below.RootCAs = g.ca.Pool()
	if err := status(below); outcome(err) != keydv1.Outcome_OUTCOME_UNAVAILABLE {
		t.Errorf("a certificate whose issuer is not shown: %v", err)
	}
	below.Certificates[0].Certificate = append(below.Certificates[0].Certificate, sub.DER())
	if err := status(below); err != nil {
		t.Errorf("a certificate with its issuer: %v", err)
	}
}

// leafAsCA is a certificate that was issued with a certificate that is no CA's.
func leafAsCA(t *testing.T, ca *certtest.CA, opts ...certtest.Option) *tls.Config {
	leaf := ca.Leaf(t, certtest.DNS("leaf.test"))
	config := leaf.Client(t, opts...)
	config.RootCAs = ca.Pool()
	config.Certificates[0].Certificate = append(config.Certificates[0].Certificate, leaf.DER())
	return config
}

func metric(t *testing.T, reg *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if len(labels) == 2 && (m.GetLabel()[0].GetName() != labels[0] || m.GetLabel()[0].GetValue() != labels[1]) {
				continue
			}
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

// A connection does not outlive its certificate, nor a CA between it and the root.
func TestExpiresWhileConnected(t *testing.T) {
	g := guard(t, only("a.test", "*", "auditor")+only("b.test", "*", "auditor")+only("c.test", "*", "auditor"))
	soon := certtest.Until(time.Now().Add(time.Hour))
	sub := g.ca.Sub(t, soon)
	below := sub.Client(t, certtest.DNS("b.test"))
	below.RootCAs = g.ca.Pool()
	below.Certificates[0].Certificate = append(below.Certificates[0].Certificate, sub.DER())
	conns := map[string]*grpc.ClientConn{
		"over":            g.connTLS(t, g.ca.Client(t, certtest.DNS("a.test"), soon)),
		"of a CA over":    g.connTLS(t, below),
		"good for longer": g.conn(t, "c.test"),
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // it never ends by itself
	defer cancel()
	watch, err := keydv1.NewKeyServiceClient(conns["over"]).WatchRevocations(ctx, &keydv1.WatchRevocationsRequest{Tenants: []string{"acme"}})
	if err == nil {
		_, err = watch.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	status := func(name string) error {
		_, err := keydv1.NewAdminServiceClient(conns[name]).GetStatus(t.Context(), &keydv1.GetStatusRequest{})
		return err
	}
	for name := range conns {
		if err := status(name); err != nil {
			t.Fatalf("%s, before: %v", name, err)
		}
	}
	g.ahead.Store(int64(2 * time.Hour))
	for name := range conns {
		want := denied
		if name == "good for longer" {
			want = 0
		}
		if err := status(name); outcome(err) != want {
			t.Errorf("%s: %v", name, err)
		}
		_, err := healthpb.NewHealthClient(conns[name]).Check(t.Context(), &healthpb.HealthCheckRequest{})
		if outcome(err) != want {
			t.Errorf("%s, its health: %v", name, err)
		}
	}
	for err == nil {
		_, err = watch.Recv()
	}
	if outcome(err) != denied {
		t.Errorf("the stream ended with %v", err)
	}
}

// A reload grants and takes away on connections that are open, and ends streams.
func TestReload(t *testing.T) {
	g := guard(t, only("agent.test", "acme", "sealer"))
	conn := g.conn(t, "agent.test")
	holds := func() error {
		_, err := keydv1.NewHoldServiceClient(conn).ListHolds(t.Context(), &keydv1.ListHoldsRequest{Tenant: "acme"})
		return err
	}
	component := func() *keydv1.ComponentStatus {
		res, err := keydv1.NewAdminServiceClient(g.conn(t, "setup.test")).GetStatus(t.Context(), &keydv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range res.Components {
			if c.Name == "access" {
				return c
			}
		}
		t.Fatal("no such component")
		return nil
	}
	setup := only("setup.test", "*", "admin")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // it never ends by itself
	defer cancel()
	watch, err := keydv1.NewKeyServiceClient(conn).WatchRevocations(ctx, &keydv1.WatchRevocationsRequest{Tenants: []string{"acme"}})
	if err == nil {
		_, err = watch.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := holds(); outcome(err) != denied {
		t.Errorf("before: %v", err)
	}
	g.policy(t, setup+only("agent.test", "acme", "holder"))
	if err := holds(); outcome(err) != denied {
		t.Errorf("before keyd was told: %v", err)
	}
	if err := g.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := holds(); err != nil {
		t.Errorf("granted: %v", err)
	}
	for err == nil {
		_, err = watch.Recv()
	}
	if outcome(err) != denied {
		t.Errorf("the stream ended with %v", err)
	}

	// A bad file changes nothing, and is told of.
	g.policy(t, setup+"[principals.\"agent.test\"]\nacme = [\"owner\"]\n")
	if err := g.Reload(); err == nil || !strings.Contains(err.Error(), "owner") {
		t.Errorf("a bad policy: %v", err)
	}
	if err := holds(); err != nil {
		t.Errorf("what held before: %v", err)
	}
	if c := component(); c.Healthy || metric(t, g.metrics, "lethe_component_healthy", "component", "access") != 0 {
		t.Errorf("health says %v", c)
	}
	g.policy(t, setup+only("agent.test", "acme", "sealer"))
	if err := g.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := holds(); outcome(err) != denied {
		t.Errorf("taken away: %v", err)
	}
	if c := component(); !c.Healthy || metric(t, g.metrics, "lethe_component_healthy", "component", "access") != 1 {
		t.Errorf("health says %v", c)
	}
}

// keyd's own certificate and its clients' CA are replaced without a restart;
// who has a certificate of a CA that is gone is denied on an open connection.
func TestCertificatesAreReplaced(t *testing.T) {
	g := guard(t, only("agent.test", "*", "auditor"))
	status := func(conn *grpc.ClientConn) error {
		_, err := keydv1.NewAdminServiceClient(conn).GetStatus(t.Context(), &keydv1.GetStatusRequest{})
		return err
	}
	before := g.conn(t, "agent.test")
	if err := status(before); err != nil {
		t.Fatal(err)
	}
	next := certtest.New(t)
	write := func(name string, content []byte) {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert, key := next.Issue(t, certtest.DNS("localhost"))
	write(g.files.Certificate, cert)
	if err := g.Reload(); err == nil {
		t.Error("a certificate with another's key is taken")
	}
	if err := status(g.conn(t, "agent.test")); err != nil {
		t.Errorf("a new connection, as before: %v", err)
	}
	write(g.files.Key, key)
	write(g.files.ClientCA, next.PEM)
	if err := g.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := status(before); outcome(err) != denied {
		t.Errorf("of the CA that is gone: %v", err)
	}
	if err := status(g.connTLS(t, next.Client(t, certtest.DNS("agent.test")))); err != nil {
		t.Errorf("of the new CA: %v", err)
	}
}

func TestBadAccessFiles(t *testing.T) {
	ca := certtest.New(t)
	dir := t.TempDir()
	cert, key := ca.Issue(t, certtest.DNS("localhost"))
	over, overKey := ca.Issue(t, certtest.DNS("localhost"), certtest.Until(time.Now().Add(-time.Hour)))
	good := keyd.AccessFiles{
		Certificate: certtest.Write(t, dir, "cert", cert), Key: certtest.Write(t, dir, "key", key),
		ClientCA: certtest.Write(t, dir, "ca", ca.PEM), Policy: certtest.Write(t, dir, "policy", []byte(only("a.test", "acme", "admin"))),
	}
	open := certtest.Write(t, dir, "open", key)
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	writable := certtest.Write(t, dir, "writable", []byte(only("a.test", "acme", "admin")))
	if err := os.Chmod(writable, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, want string
		change     func(*keyd.AccessFiles)
	}{
		{"no key", "no such file", func(f *keyd.AccessFiles) { f.Key += ".gone" }},
		{"a key that everybody reads", "its mode", func(f *keyd.AccessFiles) { f.Key = open }},
		{"a policy that everybody writes", "its mode", func(f *keyd.AccessFiles) { f.Policy = writable }},
		{"a certificate that is over", "is good from", func(f *keyd.AccessFiles) {
			f.Certificate, f.Key = certtest.Write(t, dir, "over", over), certtest.Write(t, dir, "over.key", overKey)
		}},
		{"a CA that is no CA", "not of a CA", func(f *keyd.AccessFiles) { f.ClientCA = f.Certificate }},
		{"a CA that is a key", "something else", func(f *keyd.AccessFiles) { f.ClientCA = f.Key }},
		{"a CA that is empty", "no certificate", func(f *keyd.AccessFiles) { f.ClientCA = certtest.Write(t, dir, "empty", nil) }},
		{"a certificate for clients", "not for server", func(f *keyd.AccessFiles) {
			cert, key := ca.Issue(t, certtest.DNS("localhost"), certtest.Usage(x509.ExtKeyUsageClientAuth))
			f.Certificate, f.Key = certtest.Write(t, dir, "client", cert), certtest.Write(t, dir, "client.key", key)
		}},
		{"a policy that is a pipe", "no regular file", func(f *keyd.AccessFiles) {
			f.Policy = filepath.Join(dir, "pipe")
			if err := syscall.Mkfifo(f.Policy, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"a policy that is a directory", "no regular file", func(f *keyd.AccessFiles) { f.Policy = dir }},
		{"a policy that is none", "policy", func(f *keyd.AccessFiles) { f.Policy = f.Certificate }},
	} {
		files := good
		c.change(&files)
		_, err := keyd.Open(t.Context(), keyd.Config{Access: &files})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for name, cfg := range map[string]keyd.Config{"neither": {}, "both": {Development: true, Access: &good}} {
		if _, err := keyd.Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "not both") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A client that lives longer than its certificate is never denied for that: it
// shows the next one in time, without being dialled anew.
func TestClientsShowTheirNewestCertificate(t *testing.T) {
	g := guard(t, only("old.test", "acme", "sealer")+only("new.test", "acme", "sealer"),
		func(c *keyd.Config) { c.ConnectionAge = 100 * time.Millisecond })
	var current atomic.Pointer[tls.Config]
	current.Store(g.ca.Client(t, certtest.DNS("old.test")))
	client, err := sdk.Dial(t.Context(), g.address, sdk.WithTLS(&tls.Config{
		RootCAs: g.ca.Pool(), GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &current.Load().Certificates[0], nil
		},
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	seal := func() {
		t.Helper()
		req := &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{{Tenant: "acme", SubjectId: []byte("ann"), Class: "trace", Purpose: keydv1.Purpose_PURPOSE_SEAL}}}
		res, err := keydv1.NewKeyServiceClient(client.Conn()).GetBlobKeys(t.Context(), req)
		if err != nil || res.Results[0].GetKey() == nil {
			t.Fatalf("%v, %v", res, err)
		}
	}
	seal()
	current.Store(g.ca.Client(t, certtest.DNS("new.test")))
	for begun := time.Now(); !strings.Contains(g.audit.String(), `"principal":"new.test"`); time.Sleep(time.Millisecond) {
		seal()
		if time.Since(begun) > time.Minute {
			t.Fatal("the old certificate is shown for ever")
		}
	}
}

// A client that loses its right to one tenant goes on to hear of others.
func TestRevocationsOfOtherTenantsGoOn(t *testing.T) {
	agent := only("agent.test", "acme", "sealer", "opener")
	g := guard(t, agent+"other = [\"sealer\", \"opener\"]\n")
	admin := keydv1.NewAdminServiceClient(g.conn(t, "setup.test"))
	if _, err := admin.CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "other"}); err != nil {
		t.Fatal(err)
	}
	_, err := admin.PutClass(t.Context(), &keydv1.PutClassRequest{Tenant: "acme", Class: &keydv1.Class{
		Name: "long", BucketWidth: durationpb.New(30 * 24 * time.Hour), Lease: durationpb.New(time.Hour),
	}})
	if err != nil {
		t.Fatal(err)
	}
	client, err := sdk.Dial(t.Context(), g.address, sdk.WithTLS(g.ca.Client(t, certtest.DNS("agent.test"))))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ann, bob := sdk.Target{Tenant: "acme", Subject: "ann", Class: "long"}, sdk.Target{Tenant: "other", Subject: "bob", Class: "trace"}
	blob, err := client.Seal(t.Context(), ann, []byte("text"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Seal(t.Context(), bob, []byte("text")); err != nil {
		t.Fatal(err)
	}
	g.policy(t, agent+only("erasure.test", "acme", "eraser"))
	if err := g.Reload(); err != nil {
		t.Fatal(err)
	}
	for begun := time.Now(); !strings.Contains(g.audit.String(), `"method":"WatchRevocations","principal":"agent.test","outcome":"DENIED"`); time.Sleep(time.Millisecond) {
		if time.Since(begun) > 50*time.Second {
			t.Fatal("the stream goes on")
		}
	}
	if _, err := client.Open(t.Context(), ann, blob); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	_, err = keydv1.NewErasureServiceClient(g.conn(t, "erasure.test")).DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
		Tenant: "acme", SubjectId: []byte("ann"), RequestId: "d", Reason: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	for !errors.Is(err, sdk.ErrErased) {
		if _, err = client.Open(t.Context(), ann, blob); time.Since(begun) > 50*time.Second { // the lease is an hour
			t.Fatalf("it has not heard of the destruction: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
}

// A keyd keeps another's anchor for whom the policy says, over TLS.
func TestAnchorOfAnotherOverTLS(t *testing.T) {
	g := guard(t, only("other.test", "*", "anchor"))
	open := func(config *tls.Config) keyd.Anchor {
		a, err := peer.Open(peer.Options{Address: g.address, Name: "other", TLS: config})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		return a
	}
	if _, err := open(g.ca.Client(t, certtest.DNS("other.test"))).Newest(t.Context()); !errors.Is(err, keyd.ErrNoObject) {
		t.Errorf("with the role: %v", err)
	}
	_, err := open(g.ca.Client(t, certtest.DNS("setup.test"))).Newest(t.Context())
	if err == nil || errors.Is(err, keyd.ErrNoObject) || !strings.Contains(err.Error(), "not allowed") {
		t.Errorf("without it: %v", err)
	}
}

// The SDK seals and opens with a certificate, takes up a new one by itself, and
// takes a denial for what it is.
func TestSDKWithCertificates(t *testing.T) {
	g := guard(t, only("agent.test", "acme", "sealer", "opener")+only("reader.test", "acme", "opener"))
	var current atomic.Pointer[tls.Config]
	current.Store(g.ca.Client(t, certtest.DNS("stranger.test")))
	dial := func(config *tls.Config) *sdk.Client {
		client, err := sdk.Dial(t.Context(), g.address, sdk.WithTLS(config))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		return client
	}
	rotating := &tls.Config{RootCAs: g.ca.Pool(), GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &current.Load().Certificates[0], nil
	}}
	target := sdk.Target{Tenant: "acme", Subject: "ann", Class: "trace"}
	if _, err := dial(rotating).Seal(t.Context(), target, []byte("text")); !errors.Is(err, sdk.ErrDenied) || errors.Is(err, sdk.ErrErased) {
		t.Errorf("a stranger: %v", err)
	}
	current.Store(g.ca.Client(t, certtest.DNS("agent.test")))
	agent := dial(rotating)
	blob, err := agent.Seal(t.Context(), target, []byte("text"))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := agent.Open(t.Context(), target, blob); err != nil || string(b) != "text" {
		t.Errorf("%q, %v", b, err)
	}
	reader := dial(g.ca.Client(t, certtest.DNS("reader.test")))
	if b, err := reader.Open(t.Context(), target, blob); err != nil || string(b) != "text" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := reader.Seal(t.Context(), target, []byte("text")); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("a reader seals: %v", err)
	}
	_, err = agent.DestroyKey(t.Context(), sdk.DestroyRequest{Tenant: "acme", Subject: "ann", RequestID: "r", Reason: "test"})
	if !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("an agent destroys: %v", err)
	}
	if b, err := agent.Open(t.Context(), target, blob); err != nil || string(b) != "text" {
		t.Errorf("after that: %q, %v", b, err)
	}
}
