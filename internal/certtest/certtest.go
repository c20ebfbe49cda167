// Package certtest makes certificates for tests.
package certtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// CA issues certificates.
type CA struct {
	// PEM is its own certificate.
	PEM  []byte
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Option changes a certificate before it is issued.
type Option func(t testing.TB, c *x509.Certificate)

// URI adds a URI, such as a SPIFFE id.
func URI(uri string) Option {
	return func(t testing.TB, c *x509.Certificate) {
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		c.URIs = append(c.URIs, u)
	}
}

// DNS adds a DNS name.
func DNS(name string) Option {
	return func(_ testing.TB, c *x509.Certificate) { c.DNSNames = append(c.DNSNames, name) }
}

// CommonName sets the common name.
func CommonName(name string) Option {
	return func(_ testing.TB, c *x509.Certificate) { c.Subject.CommonName = name }
}

// Until sets when the certificate is over.
func Until(end time.Time) Option {
	return func(_ testing.TB, c *x509.Certificate) { c.NotAfter = end }
}

// Usage sets what the certificate's key may be used for: servers and clients
// else.
func Usage(use ...x509.ExtKeyUsage) Option {
	return func(_ testing.TB, c *x509.Certificate) { c.ExtKeyUsage = use }
}

// RawURI is a URI in a spelling that url.URL does not keep. It is the only name.
func RawURI(uri string) Option {
	return func(t testing.TB, c *x509.Certificate) {
		value, err := asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 6, Bytes: []byte(uri)}})
		if err != nil {
			t.Fatal(err)
		}
		c.ExtraExtensions = append(c.ExtraExtensions, pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value})
	}
}

// New makes a CA whose certificate is good from two days ago to in two days.
func New(t testing.TB, opts ...Option) *CA {
	t.Helper()
	c := template(t, append([]Option{CommonName("test CA")}, opts...))
	c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
	return new(CA).sign(t, c)
}

// Sub makes a CA below ca.
func (ca *CA) Sub(t testing.TB, opts ...Option) *CA {
	t.Helper()
	c := template(t, append([]Option{CommonName("test sub-CA")}, opts...))
	c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
	return ca.sign(t, c)
}

// Leaf makes a certificate that is no CA's, to issue with all the same.
func (ca *CA) Leaf(t testing.TB, opts ...Option) *CA {
	t.Helper()
	return ca.sign(t, template(t, opts))
}

// DER is its own certificate's.
func (ca *CA) DER() []byte { return ca.cert.Raw }

// Issue makes a certificate, and its key, in PEM.
func (ca *CA) Issue(t testing.TB, opts ...Option) (cert, key []byte) {
	t.Helper()
	leaf := ca.sign(t, template(t, opts))
	der, err := x509.MarshalPKCS8PrivateKey(leaf.key)
	if err != nil {
		t.Fatal(err)
	}
	return leaf.PEM, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// Client makes a certificate for a client that trusts this CA too.
func (ca *CA) Client(t testing.TB, opts ...Option) *tls.Config {
	t.Helper()
	pair, err := tls.X509KeyPair(ca.Issue(t, opts...))
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}}
}

// Pool holds the CA alone.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	return pool
}

// Write writes a file that only its owner reads, and returns its name.
func Write(t testing.TB, dir, name string, content []byte) string {
	t.Helper()
	name = filepath.Join(dir, name)
	if err := os.WriteFile(name, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func template(t testing.TB, opts []Option) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(48 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, o := range opts {
		o(t, c)
	}
	for _, name := range c.DNSNames {
		if name == "localhost" {
			c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
		}
	}
	return c
}

// sign makes the certificate c under ca, or under itself for a CA without one.
func (ca *CA) sign(t testing.TB, c *x509.Certificate) *CA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parent, by := ca.cert, ca.key
	if parent == nil {
		parent, by = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	made := &CA{key: key, PEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	if made.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return made
}
