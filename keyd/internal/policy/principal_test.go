package policy

import (
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"

	"lethe/internal/certtest"
)

func TestPrincipalOf(t *testing.T) {
	ca := certtest.New(t)
	uri, dns, cn := certtest.URI, certtest.DNS, certtest.CommonName
	for _, c := range []struct {
		name string
		opts []certtest.Option
		want string // begins with "!": an error that holds the rest
	}{
		{"a SPIFFE id", []certtest.Option{uri("spiffe://example.org/ns/prod/agent")}, "spiffe://example.org/ns/prod/agent"},
		{"a trust domain alone", []certtest.Option{uri("spiffe://example.org")}, "spiffe://example.org"},
		{"a SPIFFE id goes before DNS names", []certtest.Option{uri("spiffe://example.org/a"), dns("a.example.org"), dns("b.example.org")}, "spiffe://example.org/a"},
		{"a DNS name", []certtest.Option{dns("Agent.Example.org"), cn("else.example.org")}, "agent.example.org"},
		{"a DNS name beside another URI", []certtest.Option{uri("https://example.org/a"), dns("a.example.org")}, "a.example.org"},
		{"a common name only", []certtest.Option{cn("agent.example.org")}, "!no DNS name"},
		{"two SPIFFE ids", []certtest.Option{uri("spiffe://example.org/a"), uri("spiffe://example.org/b")}, "!other URIs"},
		{"a SPIFFE id beside another URI", []certtest.Option{uri("https://example.org/a"), uri("spiffe://example.org/b")}, "!other URIs"},
		{"two DNS names", []certtest.Option{dns("a.example.org"), dns("b.example.org")}, "!several"},
		{"a pattern", []certtest.Option{dns("*.example.org")}, "!pattern"},
		{"a SPIFFE id of no domain", []certtest.Option{uri("spiffe:///a")}, "!malformed"},
		{"a SPIFFE id with a port", []certtest.Option{uri("spiffe://example.org:1/a")}, "!malformed"},
		{"a SPIFFE id with a user", []certtest.Option{uri("spiffe://u@example.org/a")}, "!malformed"},
		{"a SPIFFE id with a query", []certtest.Option{uri("spiffe://example.org/a?b=c")}, "!malformed"},
		{"a SPIFFE id with an escape", []certtest.Option{uri("spiffe://example.org/a%2Fb")}, "!malformed"},
		{"a SPIFFE id that climbs", []certtest.Option{uri("spiffe://example.org/a/../b")}, "!malformed"},
		{"a SPIFFE id that ends with a slash", []certtest.Option{uri("spiffe://example.org/a/")}, "!malformed"},
		{"a SPIFFE id in capitals", []certtest.Option{uri("spiffe://Example.org/a")}, "!malformed"},
		{"a SPIFFE id with an empty fragment", []certtest.Option{certtest.RawURI("spiffe://example.org/a#")}, "!malformed"},
		{"a SPIFFE id with an empty query", []certtest.Option{certtest.RawURI("spiffe://example.org/a?")}, "!malformed"},
		{"a SPIFFE id with its scheme in capitals", []certtest.Option{certtest.RawURI("SPIFFE://example.org/a")}, "!malformed"},
		{"a SPIFFE id, spelled as is", []certtest.Option{certtest.RawURI("spiffe://example.org/a")}, "spiffe://example.org/a"},
		{"a malformed SPIFFE id is not passed over", []certtest.Option{uri("spiffe:a"), dns("a.example.org")}, "!malformed"},
		{"one that is too long", []certtest.Option{uri("spiffe://example.org/" + strings.Repeat("a", 2048))}, "!malformed"},
	} {
		chain, _ := ca.Issue(t, c.opts...)
		block, _ := pem.Decode(chain)
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		got, err := principalOf(cert)
		if part, refused := strings.CutPrefix(c.want, "!"); refused {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q, %v", c.name, got, err)
			}
			continue
		}
		if err != nil || got != c.want {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
		if err := checkPrincipal(got); err != nil {
			t.Errorf("%s: no policy can name it: %v", c.name, err)
		}
	}
}
