// Package mtls is how a client of keyd shows its certificate, as flags name it.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

// Files are PEM files: CA verifies keyd, and Certificate and Key are the
// client's own.
type Files struct{ CA, Certificate, Key string }

// Given says whether any of the files is named.
func (f Files) Given() bool { return f != Files{} }

// Config reads the files. The client's certificate and its key are read again at
// every new connection, so that they can be replaced meanwhile; the CA is not.
func (f Files) Config() (*tls.Config, error) {
	if f.CA == "" || f.Certificate == "" || f.Key == "" {
		return nil, errors.New("a CA, a certificate and its key are given together, or none of them")
	}
	b, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, fmt.Errorf("the CA: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("the CA: %s holds no certificate in PEM", f.CA)
	}
	if _, err := f.load(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		RootCAs:    roots,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return f.load()
		},
	}, nil
}

func (f Files) load() (*tls.Certificate, error) {
	fi, err := os.Stat(f.Key)
	if err == nil && fi.Mode().Perm()&0o007 != 0 {
		err = &fs.PathError{Op: "read", Path: f.Key, Err: fmt.Errorf("its mode is %04o: every user may read or write it", fi.Mode().Perm())}
	}
	if err != nil {
		return nil, fmt.Errorf("the key: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(f.Certificate, f.Key)
	if err != nil {
		return nil, fmt.Errorf("the certificate and its key: %w", err)
	}
	// keyd would refuse it, and a client may learn no more than that the
	// connection broke.
	if end := pair.Leaf.NotAfter; time.Now().After(end) {
		return nil, fmt.Errorf("the certificate %s is over since %s", f.Certificate, end.UTC().Format(time.RFC3339))
	}
	return &pair, nil
}
