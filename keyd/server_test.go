package keyd_test

import (
	"bytes"
	"context"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"lethe/internal/logtest"
	"lethe/keyd"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/sdktest"
)

func TestRefusesListenersThatOthersReach(t *testing.T) {
	k := sdktest.Start(t)
	lis, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Serve(lis); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("served on %s: %v", lis.Addr(), err)
	}
	if _, err := keyd.Open(t.Context(), keyd.Config{}); err == nil {
		t.Error("opened without Development")
	}
}

func TestStandardHealthService(t *testing.T) {
	k := sdktest.Start(t)
	res, err := healthpb.NewHealthClient(k.Conn()).Check(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil || res.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("%v, %v", res, err)
	}
	_, err = healthpb.NewHealthClient(k.Conn()).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "nobody.v1.Knows"})
	if status.Code(err) != codes.NotFound {
		t.Errorf("of a service that there is not: %v", err)
	}
}

// Every call leaves one audit line, which names no subject, and nothing that
// was sent where a tenant's name belongs.
func TestAudit(t *testing.T) {
	var log logtest.Buffer
	k := sdktest.Start(t, sdktest.WithLog(&log))
	k.Tenant(t, "acme")
	keysClient, erasure := keydv1.NewKeyServiceClient(k.Conn()), keydv1.NewErasureServiceClient(k.Conn())
	query := &keydv1.BlobKeyQuery{Tenant: "acme", SubjectId: []byte("needle-subject"), Class: "trace", Purpose: keydv1.Purpose_PURPOSE_SEAL}
	lost := &keydv1.BlobKeyQuery{Tenant: "Needle Tenant", SubjectId: []byte("needle-subject"), Class: "trace", Purpose: keydv1.Purpose_PURPOSE_SEAL}
	if _, err := keysClient.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{query, lost}}); err != nil {
		t.Fatal(err)
	}
	if _, err := erasure.DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
		Tenant: "acme", SubjectId: []byte("needle-subject"), RequestId: "needle-request", Reason: "test",
	}); err != nil {
		t.Fatal(err)
	}
	for _, queries := range [][]*keydv1.BlobKeyQuery{{query}, {query, query, query}} { // refused, all alike
		if _, err := keysClient.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: queries}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := erasure.DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("needle\x00")})
	if status.Code(err) != codes.InvalidArgument || strings.Contains(err.Error(), "needle") {
		t.Errorf("a subject id with a NUL: %v", err)
	}
	text := log.String()
	if strings.Contains(strings.ToLower(text), "needle") {
		t.Errorf("the log names what it must not:\n%s", text)
	}
	for _, want := range []string{
		`"method":"GetBlobKeys","principal":"development@unix","outcome":"MIXED"`, `"queries":{"INVALID_ARGUMENT":1,"OK":1}`, `"(invalid)"`,
		`"method":"DestroyKey","principal":"development@unix","outcome":"OK"`, `"outcome":"INVALID_ARGUMENT"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in the log:\n%s", want, text)
		}
	}
	if n := strings.Count(text, `"method":"GetBlobKeys","principal":"development@unix","outcome":"ERASED"`); n != 2 {
		t.Errorf("%d calls are logged as refused, want 2:\n%s", n, text)
	}
}

// A watcher hears of a death at once, and of none twice when it resumes.
func TestWatchRevocations(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme")
	client := keydv1.NewKeyServiceClient(k.Conn())
	res, err := client.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{
		{Tenant: "acme", SubjectId: []byte("ann"), Class: "trace", Purpose: keydv1.Purpose_PURPOSE_SEAL},
		{Tenant: "acme", SubjectId: []byte("bob"), Class: "trace", Purpose: keydv1.Purpose_PURPOSE_SEAL},
	}})
	if err != nil {
		t.Fatal(err)
	}
	destroy := func(subject string) {
		t.Helper()
		_, err := keydv1.NewErasureServiceClient(k.Conn()).DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
			Tenant: "acme", SubjectId: []byte(subject), RequestId: subject, Reason: "test",
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	// watch reads until the n-th revocation and returns the cursor behind it.
	watch := func(cursor uint64, then func(), ids ...[]byte) uint64 {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := client.WatchRevocations(ctx, &keydv1.WatchRevocationsRequest{Tenants: []string{"acme"}, Cursor: cursor})
		if err != nil {
			t.Fatal(err)
		}
		for first := true; ; first = false {
			m, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if first {
				then()
			}
			for _, r := range m.Revocations {
				if len(ids) == 0 || !bytes.Equal(r.KeyId, ids[0]) || r.Outcome != keydv1.Outcome_OUTCOME_ERASED {
					t.Fatalf("revoked %v", r)
				}
				ids = ids[1:]
			}
			if cursor = m.Cursor; len(ids) == 0 {
				return cursor
			}
		}
	}
	ann, bob := res.Results[0].GetKey().KeyId, res.Results[1].GetKey().KeyId
	cursor := watch(0, func() { destroy("ann") }, ann)
	destroy("bob")
	k.Restart(t)
	watch(cursor, func() {}, bob)
}
