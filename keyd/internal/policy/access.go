package policy

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	keydv1 "lethe/proto/keyd/v1"
)

// Files are what admission rests on.
type Files struct {
	// Certificate and Key are keyd's own, and ClientCA the certificates of those
	// who issue its callers', all in PEM.
	Certificate, Key, ClientCA string
	// Policy is a policy file; see Parse.
	Policy string
}

// Access admits callers by their certificates, and knows their roles. It is
// safe for concurrent use.
type Access struct {
	credentials.TransportCredentials
	files   Files
	now     func() time.Time
	log     *slog.Logger
	refused atomic.Uint64 // handshakes that failed
	told    atomic.Int64  // when the log last had one, in Unix seconds

	reload  sync.Mutex
	reading atomic.Pointer[time.Time] // since when the files are being read; nil: they are not
	current atomic.Pointer[admission]
	stale   atomic.Pointer[error] // why the files could not be read again; nil: they could
}

// admission is what all files said at one time.
type admission struct {
	certificate tls.Certificate
	clients     *x509.CertPool
	file        *File
}

// Load reads the files. now is the wall clock; nil: time.Now. What is refused
// before there is a call to audit goes to log.
func Load(files Files, now func() time.Time, log *slog.Logger) (*Access, error) {
	if now == nil {
		now = time.Now
	}
	a := &Access{files: files, now: now, log: log}
	if err := a.Reload(); err != nil {
		return nil, err
	}
	a.TransportCredentials = credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return a.current.Load().config(now), nil
		},
	})
	return a, nil
}

// slowReload is after what time files that are still being read make admission
// ill: their file system may hang.
const slowReload = 10 * time.Second

func (m *admission) config(now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{m.certificate},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    m.clients,
		NextProtos:   []string{"h2"},
		Time:         now,
		// A resumed session would be admitted by what held when it began.
		SessionTicketsDisabled: true,
	}
}

// Reload reads the files again: all of them hold from the next call on, on
// connections that are open too, or none does.
func (a *Access) Reload() error {
	a.reload.Lock()
	defer a.reload.Unlock()
	begun := time.Now()
	a.reading.Store(&begun)
	defer a.reading.Store(nil)
	next, err := a.files.load(a.now())
	if err != nil {
		a.stale.Store(&err)
		return err
	}
	a.current.Store(next)
	a.stale.Store(nil)
	return nil
}

func (f *Files) load(now time.Time) (*admission, error) {
	key, err := readFile(f.Key, 0o007)
	if err != nil {
		return nil, fmt.Errorf("the key %s: %w", f.Key, err)
	}
	defer clear(key)
	cert, err := readFile(f.Certificate, 0o002)
	if err != nil {
		return nil, fmt.Errorf("the certificate %s: %w", f.Certificate, err)
	}
	var m admission
	if m.certificate, err = tls.X509KeyPair(cert, key); err != nil {
		return nil, fmt.Errorf("the certificate %s, with the key %s: %w", f.Certificate, f.Key, err)
	}
	leaf := m.certificate.Leaf
	if now.Before(leaf.NotBefore) || now.After(leaf.NotAfter) {
		return nil, fmt.Errorf("the certificate %s is good from %s to %s only", f.Certificate, stamp(leaf.NotBefore), stamp(leaf.NotAfter))
	}
	if len(leaf.ExtKeyUsage) > 0 && !slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageServerAuth) && !slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageAny) {
		return nil, fmt.Errorf("the certificate %s is not for server authentication", f.Certificate)
	}
	ca, err := readFile(f.ClientCA, 0o002)
	if err == nil {
		m.clients, err = parseCA(ca)
	}
	if err != nil {
		return nil, fmt.Errorf("the clients' CA %s: %w", f.ClientCA, err)
	}
	if m.file, err = Read(f.Policy); err != nil {
		return nil, err
	}
	return &m, nil
}

// Read reads a policy file as keyd does: it refuses one that every user may
// write, and what Parse refuses.
func Read(name string) (*File, error) {
	b, err := readFile(name, 0o002)
	if err != nil {
		return nil, fmt.Errorf("the policy %s: %w", name, err)
	}
	f, err := Parse(b)
	if err != nil {
		return nil, fmt.Errorf("the policy %s: %w", name, err)
	}
	return f, nil
}

// readFile reads a file on which no other user has any of the forbidden rights.
func readFile(name string, forbidden fs.FileMode) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would wait for who writes
	if err != nil {
		return nil, errors.Unwrap(err) // the caller tells the name
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	if !fi.Mode().IsRegular() {
		return nil, errors.New("it is no regular file")
	}
	if bad := fi.Mode().Perm() & forbidden; bad != 0 {
		return nil, fmt.Errorf("its mode is %04o: every user may read or write it", fi.Mode().Perm())
	}
	b, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	if err == nil && len(b) > MaxFile {
		err = fmt.Errorf("larger than %d bytes", MaxFile)
	}
	return b, err
}

// parseCA refuses what x509.CertPool would pass over.
func parseCA(b []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	for n := 0; ; n++ {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			if n == 0 {
				return nil, errors.New("no certificate in PEM is there")
			}
			return pool, nil
		}
		if block.Type != "CERTIFICATE" {
			return nil, errors.New("something else than certificates is there")
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		if !cert.IsCA {
			return nil, errors.New("a certificate is not of a CA")
		}
		pool.AddCert(cert)
	}
}

// Status is how admission is, as a component of keyd.
func (a *Access) Status() *keydv1.ComponentStatus {
	m := a.current.Load()
	end := m.certificate.Leaf.NotAfter
	s := &keydv1.ComponentStatus{Name: "access"}
	stale, reading := a.stale.Load(), a.reading.Load()
	switch {
	case reading != nil && time.Since(*reading) > slowReload:
		s.Detail = "the policy and certificates are being read again since " + stamp(*reading) + "; those before hold"
	case stale != nil:
		s.Detail = "the policy and certificates were not read again, those before hold: " + (*stale).Error()
	case a.now().After(end):
		s.Detail = "keyd's certificate is over since " + stamp(end)
	default:
		s.Healthy = true
		s.Detail = fmt.Sprintf("%d principals; keyd's certificate is good until %s", len(m.file.principals), stamp(end))
	}
	return s
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// CertificateEnd is when keyd's own certificate is over.
func (a *Access) CertificateEnd() time.Time { return a.current.Load().certificate.Leaf.NotAfter }

// Refused counts the handshakes that failed.
func (a *Access) Refused() uint64 { return a.refused.Load() }

// ServerHandshake implements credentials.TransportCredentials.
func (a *Access) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := a.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		a.refused.Add(1)
		a.tell(raw, err)
		return nil, nil, err
	}
	t := info.(credentials.TLSInfo)
	c := &caller{TLSInfo: t, chain: t.State.PeerCertificates}
	c.principal, c.nameless = principalOf(c.chain[0])
	return conn, c, nil
}

// tell logs why a handshake failed, once a second at most: a caller often sees a
// broken connection, and no reason.
func (a *Access) tell(raw net.Conn, err error) {
	now := time.Now().Unix()
	if last := a.told.Load(); now != last && a.told.CompareAndSwap(last, now) {
		a.log.Warn("a connection was refused", "from", raw.RemoteAddr().String(), "error", err)
	}
}

// Clone implements credentials.TransportCredentials: there is one Access.
func (a *Access) Clone() credentials.TransportCredentials { return a }

// caller is the other end of a connection.
type caller struct {
	credentials.TLSInfo
	chain     []*x509.Certificate // the leaf first
	principal string
	nameless  error // why there is no principal
	admitted  atomic.Pointer[admitted]
}

// admitted is what one admission says of a caller.
type admitted struct {
	by     *admission
	err    error
	until  time.Time
	grants *grants
}

// errCertificate does not say what is wrong with it.
var (
	errCertificate = errors.New("the certificate is not one of the CA's")
	errOver        = errors.New("the certificate is over")
)

// admit says whether the caller's certificate holds, and what it grants. A
// handshake tells that for its moment only: certificates end, and CAs and
// policies are replaced, while connections are open.
func (a *Access) admit(c *caller, now time.Time) (*grants, error) {
	m := a.current.Load()
	d := c.admitted.Load()
	if d == nil || d.by != m {
		d = m.verify(c, now)
		c.admitted.Store(d)
	}
	if d.err == nil && now.After(d.until) {
		return nil, errOver
	}
	return d.grants, d.err
}

func (m *admission) verify(c *caller, now time.Time) *admitted {
	d := &admitted{by: m, grants: m.file.principals[c.principal]}
	between := x509.NewCertPool()
	for _, cert := range c.chain[1:] {
		between.AddCert(cert)
	}
	chains, err := c.chain[0].Verify(x509.VerifyOptions{
		Roots: m.clients, Intermediates: between, CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		d.err, d.grants = errCertificate, nil
	}
	for _, chain := range chains {
		end := chain[0].NotAfter
		for _, cert := range chain[1:] {
			if cert.NotAfter.Before(end) {
				end = cert.NotAfter
			}
		}
		if end.After(d.until) {
			d.until = end
		}
	}
	return d
}
