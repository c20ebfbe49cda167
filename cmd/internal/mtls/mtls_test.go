package mtls_test

import (
	"bytes"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"lethe/cmd/internal/mtls"
	"lethe/internal/certtest"
)

// A certificate that was replaced is shown on the next connection; one that does
// not fit its key is not.
func TestReplacedCertificate(t *testing.T) {
	dir, ca := t.TempDir(), certtest.New(t)
	var files mtls.Files
	issue := func() []byte {
		cert, key := ca.Issue(t, certtest.DNS("a.test"))
		files = mtls.Files{
			CA: certtest.Write(t, dir, "ca", ca.PEM), Certificate: certtest.Write(t, dir, "cert", cert), Key: certtest.Write(t, dir, "key", key),
		}
		block, _ := pem.Decode(cert)
		return block.Bytes
	}
	first := issue()
	config, err := files.Config()
	if err != nil {
		t.Fatal(err)
	}
	shows := func(want []byte) {
		t.Helper()
		shown, err := config.GetClientCertificate(nil)
		if err != nil || !bytes.Equal(shown.Certificate[0], want) {
			t.Errorf("another certificate is shown: %v", err)
		}
	}
	shows(first)
	shows(issue())
	other, _ := ca.Issue(t, certtest.DNS("a.test"))
	certtest.Write(t, dir, "cert", other)
	if _, err := config.GetClientCertificate(nil); err == nil {
		t.Error("a certificate with another's key is shown")
	}
	over, key := ca.Issue(t, certtest.DNS("a.test"), certtest.Until(time.Now().Add(-time.Hour)))
	certtest.Write(t, dir, "cert", over)
	certtest.Write(t, dir, "key", key)
	if _, err := config.GetClientCertificate(nil); err == nil || !strings.Contains(err.Error(), "is over since") {
		t.Errorf("a certificate that is over: %v", err)
	}
}
