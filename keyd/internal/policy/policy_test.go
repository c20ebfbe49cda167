package policy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"lethe/internal/certtest"
	keydv1 "lethe/proto/keyd/v1"
)

// guarded is a Policy with access, and the context of a call by agent.test, who
// may seal for acme.
func guarded(t testing.TB) (*Policy, context.Context) {
	t.Helper()
	dir, ca := t.TempDir(), certtest.New(t)
	cert, key := ca.Issue(t, certtest.DNS("localhost"))
	access, err := Load(Files{
		Certificate: certtest.Write(t, dir, "cert", cert), Key: certtest.Write(t, dir, "key", key), ClientCA: certtest.Write(t, dir, "ca", ca.PEM),
		Policy: certtest.Write(t, dir, "policy", []byte("[principals.\"agent.test\"]\nacme = [\"sealer\"]\n")),
	}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	client, _ := ca.Issue(t, certtest.DNS("agent.test"))
	block, _ := pem.Decode(client)
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	c := &caller{TLSInfo: credentials.TLSInfo{State: tls.ConnectionState{}}, chain: []*x509.Certificate{leaf}, principal: "agent.test"}
	return New(access, io.Discard, slog.New(slog.DiscardHandler), prometheus.NewRegistry()), peer.NewContext(t.Context(), &peer.Peer{AuthInfo: c})
}

// Deciding costs one allocation, of the Call: for a batch too.
func TestDecidingAllocatesOnce(t *testing.T) {
	p, ctx := guarded(t)
	tenants := []string{"acme"}
	if n := testing.AllocsPerRun(100, func() {
		c, err := p.Begin(ctx, keydv1.KeyService_GetBlobKeys_FullMethodName, tenants)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			if err := c.Query("acme", keydv1.Purpose_PURPOSE_SEAL); err != nil {
				t.Fatal(err)
			}
		}
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

// What is in no table nobody may call, whatever their roles; and a connection
// without a certificate is nobody's.
func TestWhatIsNotForeseenIsDenied(t *testing.T) {
	p, ctx := guarded(t)
	if _, err := p.Begin(ctx, "/keyd.v1.KeyService/ComeWhatMay", []string{"acme"}); err == nil {
		t.Error("a method that is not in the table is allowed")
	}
	if _, err := p.Begin(ctx, keydv1.KeyService_WatchRevocations_FullMethodName, nil); err == nil {
		t.Error("a request about no tenant is allowed")
	}
	for name, ctx := range map[string]context.Context{
		"no peer": t.Context(), "another kind of peer": peer.NewContext(t.Context(), &peer.Peer{AuthInfo: credentials.TLSInfo{}}),
	} {
		if _, err := p.Begin(ctx, "/grpc.health.v1.Health/Check", nil); err == nil {
			t.Errorf("%s: allowed", name)
		}
	}
}

func BenchmarkBegin(b *testing.B) {
	tenants := []string{"acme"}
	p, ctx := guarded(b)
	b.Run("roles", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			c, _ := p.Begin(ctx, keydv1.KeyService_GetBlobKeys_FullMethodName, tenants)
			if err := c.Query("acme", keydv1.Purpose_PURPOSE_SEAL); err != nil {
				b.Fatal(err)
			}
		}
	})
	dev := New(nil, io.Discard, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	b.Run("development", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			c, _ := dev.Begin(ctx, keydv1.KeyService_GetBlobKeys_FullMethodName, tenants)
			if err := c.Query("acme", keydv1.Purpose_PURPOSE_SEAL); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// Files whose disk hangs make admission ill, although those before hold.
func TestSlowReloadIsTold(t *testing.T) {
	p, _ := guarded(t)
	if s := p.access.Status(); !s.Healthy {
		t.Fatal(s.Detail)
	}
	begun := time.Now().Add(-2 * slowReload)
	p.access.reading.Store(&begun)
	if s := p.access.Status(); s.Healthy || !strings.Contains(s.Detail, "being read again since") {
		t.Errorf("%v: %s", s.Healthy, s.Detail)
	}
	if err := p.access.Reload(); err != nil {
		t.Fatal(err)
	}
	if s := p.access.Status(); !s.Healthy {
		t.Errorf("afterwards: %s", s.Detail)
	}
}
