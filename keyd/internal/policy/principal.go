package policy

import (
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"strings"
)

const (
	spiffe     = "spiffe://"
	maxSPIFFE  = 2048
	maxDNSName = 253
)

// principalOf returns the one name of the holder of a certificate: its SPIFFE
// id or, where it has none, its one DNS name. Its common name is nobody's.
func principalOf(cert *x509.Certificate) (string, error) {
	uris, err := urisOf(cert)
	if err != nil {
		return "", err
	}
	for _, id := range uris {
		if scheme, _, _ := strings.Cut(id, ":"); !strings.EqualFold(scheme, "spiffe") {
			continue
		}
		if len(uris) != 1 {
			return "", errors.New("the certificate names nobody: beside a SPIFFE id it has other URIs")
		}
		if !isSPIFFE(id) {
			return "", errors.New("the certificate names nobody: its SPIFFE id is malformed")
		}
		return id, nil
	}
	switch len(cert.DNSNames) {
	case 0:
		return "", errors.New("the certificate names nobody: it has no SPIFFE id and no DNS name")
	case 1:
	default:
		return "", errors.New("the certificate names nobody: it has no SPIFFE id and several DNS names")
	}
	name := strings.ToLower(cert.DNSNames[0])
	if !isDNSName(name) {
		return "", errors.New("the certificate names nobody: its DNS name is a pattern, or malformed")
	}
	return name, nil
}

var subjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}

// urisOf returns the URIs of a certificate as they stand there. Its URIs field
// has them parsed, and some spellings lost.
func urisOf(cert *x509.Certificate) (uris []string, err error) {
	const uri = 6 // of a GeneralName, RFC 5280 section 4.2.1.6
	for _, ext := range cert.Extensions {
		if !ext.Id.Equal(subjectAltName) {
			continue
		}
		var names []asn1.RawValue
		if rest, err := asn1.Unmarshal(ext.Value, &names); err != nil || len(rest) > 0 {
			return nil, errors.New("the certificate names nobody: its names are malformed")
		}
		for _, n := range names {
			if n.Class == asn1.ClassContextSpecific && n.Tag == uri {
				uris = append(uris, string(n.Bytes))
			}
		}
	}
	return uris, nil
}

// checkPrincipal refuses a name that principalOf never returns.
func checkPrincipal(name string) error {
	switch {
	case strings.HasPrefix(name, spiffe) && !isSPIFFE(name):
		return errors.New("it is no SPIFFE id")
	case !strings.HasPrefix(name, spiffe) && !isDNSName(name):
		return errors.New("it is neither a SPIFFE id nor a DNS name in lower case")
	}
	return nil
}

// isSPIFFE says whether s is a SPIFFE id in its one spelling.
func isSPIFFE(s string) bool {
	rest, ok := strings.CutPrefix(s, spiffe)
	if !ok || len(s) > maxSPIFFE {
		return false
	}
	domain, path, hasPath := strings.Cut(rest, "/")
	if domain == "" || len(domain) > 255 || !only(domain, inName) {
		return false
	}
	if !hasPath {
		return true
	}
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "" || segment == "." || segment == ".." || !only(segment, inSegment) {
			return false
		}
	}
	return true
}

// isDNSName says whether s is a DNS name in lower case, and no pattern.
func isDNSName(s string) bool {
	if len(s) > maxDNSName {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || !only(label, inName) {
			return false
		}
	}
	return true
}

func only(s string, allowed func(byte) bool) bool {
	for i := range len(s) {
		if !allowed(s[i]) {
			return false
		}
	}
	return true
}

func inName(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.'
}

func inSegment(c byte) bool { return inName(c) || 'A' <= c && c <= 'Z' }
