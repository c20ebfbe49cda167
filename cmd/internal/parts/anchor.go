package parts

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"lethe/keyd"
	"lethe/keyd/anchor/file"
	"lethe/keyd/anchor/peer"
	"lethe/keyd/anchor/s3"
)

// How an anchor that is no directory begins.
const (
	anchorS3   = "s3://"
	anchorKeyd = "keyd:"
)

// CheckAnchor refuses an Anchor that is not one of
//
//	DIRECTORY
//	s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path-style=true
//	keyd:ADDRESS/NAME    the address being unix:PATH or HOST:PORT, a loopback one
//	                     without AnchorTLS
//
// where everything from the question mark on may be missing, and so may the
// prefix.
func (o Options) CheckAnchor() error {
	var err error
	switch {
	case strings.HasPrefix(o.Anchor, anchorS3):
		_, err = s3Options(o.Anchor)
	case strings.HasPrefix(o.Anchor, anchorKeyd):
		_, err = peerOptions(o.Anchor)
	}
	if err == nil && o.AnchorTLS.Given() && !strings.HasPrefix(o.Anchor, anchorKeyd) {
		return errors.New("--anchor-tls-ca, --anchor-tls-cert and --anchor-tls-key are for an anchor at another keyd")
	}
	if err != nil {
		return fmt.Errorf("--anchor: %w", err)
	}
	return nil
}

// anchorDir returns the anchor's directory on this host, or nothing.
func (o Options) anchorDir() string {
	if strings.HasPrefix(o.Anchor, anchorS3) || strings.HasPrefix(o.Anchor, anchorKeyd) {
		return ""
	}
	return o.Anchor
}

// openAnchor opens the anchor. With create, a directory is made; a bucket must
// exist, and another keyd makes what it keeps at the first write.
func (o Options) openAnchor(ctx context.Context, create bool) (keyd.Anchor, error) {
	switch {
	case strings.HasPrefix(o.Anchor, anchorS3):
		so, err := s3Options(o.Anchor)
		if err != nil {
			return nil, err
		}
		return opened(s3.Open(ctx, so))
	case strings.HasPrefix(o.Anchor, anchorKeyd):
		po, err := peerOptions(o.Anchor)
		if err != nil {
			return nil, err
		}
		if o.AnchorTLS.Given() {
			if po.TLS, err = o.AnchorTLS.Config(); err != nil {
				return nil, err
			}
		}
		return opened(peer.Open(po))
	}
	return opened(file.Open(file.Options{Dir: o.Anchor, Create: create, Exclusive: true}))
}

// opened keeps a nil pointer from becoming an anchor.
func opened[A keyd.Anchor](a A, err error) (keyd.Anchor, error) {
	if err != nil {
		return nil, err
	}
	return a, nil
}

func s3Options(anchor string) (s3.Options, error) {
	u, err := url.Parse(anchor)
	if err != nil {
		return s3.Options{}, errors.New("it is not a URL") // which may hold what is nobody's business
	}
	if u.User != nil || u.Fragment != "" || u.Port() != "" {
		return s3.Options{}, errors.New("it is not s3://BUCKET/PREFIX?…; credentials are the AWS SDK's configuration's")
	}
	o := s3.Options{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	if o.Bucket == "" {
		return o, errors.New("no bucket is given")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return o, errors.New("what follows its question mark is not a query")
	}
	for name, values := range query {
		if len(values) != 1 || values[0] == "" {
			return o, fmt.Errorf("%s: once, with a value", name)
		}
		switch name {
		case "endpoint":
			o.Endpoint = values[0]
		case "region":
			o.Region = values[0]
		case "path-style":
			if o.PathStyle, err = strconv.ParseBool(values[0]); err != nil {
				return o, errors.New("path-style: true or false")
			}
		default:
			return o, fmt.Errorf("%s: there are endpoint, region and path-style", name)
		}
	}
	return o, nil
}

func peerOptions(anchor string) (peer.Options, error) {
	rest := strings.TrimPrefix(anchor, anchorKeyd)
	slash := strings.LastIndexByte(rest, '/')
	if slash <= 0 || slash == len(rest)-1 {
		return peer.Options{}, errors.New("it is not keyd:ADDRESS/NAME")
	}
	o := peer.Options{Address: rest[:slash], Name: rest[slash+1:]}
	if err := file.CheckName(o.Name); err != nil {
		return o, fmt.Errorf("the name %w", err)
	}
	return o, nil
}
