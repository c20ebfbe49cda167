// Package s3 is an anchor in an S3-compatible object store: in another failure
// domain than the key store, and out of reach of whoever holds that alone.
//
// Below a prefix of a bucket it keeps
//
//	origin                        the ledger that it belongs to
//	objects/000/000/001/234/067   the object of size 1234067
//	terms/000000012               who entered term 12
//
// Every object is written with If-None-Match: *, which fails if the name
// exists: it is there whole or not at all, and never changes. There is no
// pointer to the newest one: it is found by listing, which goes by name, and
// names go by size. The store must honour If-None-Match, which is tried before
// the first object is written, and its reads and listings must show every
// write that was answered, as those of Amazon S3 do.
//
// The principal that keyd uses needs s3:GetObject, s3:PutObject on the prefix
// and s3:ListBucket on the bucket; without the last a missing object is taken
// for a refusal. It needs no leave to delete, and should have none: who deletes
// the newest objects rolls the anchor back. Object Lock in compliance mode
// forbids it to everybody.
package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"

	"lethe/keyd/internal/ledger"
)

const (
	originName  = "origin"
	objectsName = "objects/"
	termsName   = "terms/"

	originMagic = "lethe-anchor/v1"

	// levels of names below objects, three digits each: ledger.MaxSize has five
	// times three.
	levels = 5

	// page is how many names one listing returns, the most that S3 does.
	page = 1000
)

// Options of an anchor. Zero values are the defaults.
type Options struct {
	// Bucket must exist.
	Bucket string
	// Prefix is put before every name, with a slash between.
	Prefix string
	// Region is the bucket's; empty: that of the SDK's configuration, as are the
	// credentials. With an Endpoint it may be missing.
	Region string
	// Endpoint is the URL of a store that is not Amazon's: https, or http on
	// this machine.
	Endpoint string
	// PathStyle names the bucket in the URL's path, not in its host.
	PathStyle bool
	// Credentials; nil: those of the SDK's configuration.
	Credentials aws.CredentialsProvider

	// Attempts is how often a request is tried, the first time included; zero
	// is 4. Between attempts it waits with exponential backoff and jitter, at
	// most MaxBackoff, zero being 2 s. AttemptTimeout bounds one attempt; zero
	// is 10 s. The caller's context bounds the call.
	Attempts       int
	MaxBackoff     time.Duration
	AttemptTimeout time.Duration
}

// Anchor is a ledger.Anchor in an object store. Any number of processes may use
// one prefix at once.
type Anchor struct {
	client         *s3.Client
	bucket, prefix string
	where          string

	mu      sync.Mutex
	closed  bool
	origin  string      // of the anchor, once it is known
	claimed bool        // and that the store honours If-None-Match
	known   uint64      // greatest size that this process has seen
	term    ledger.Term // and the newest term
}

var _ ledger.Anchor = (*Anchor)(nil)

// Open opens the anchor below a prefix, and reads whose it is. Its errors wrap
// ledger.ErrAnchorUnavailable or ledger.ErrAnchorDamaged, except for options
// that make no sense.
func Open(ctx context.Context, o Options) (*Anchor, error) {
	client, err := newClient(ctx, &o)
	if err != nil {
		return nil, fmt.Errorf("S3: %w", err)
	}
	a := &Anchor{client: client, bucket: o.Bucket, prefix: o.Prefix}
	if a.prefix = strings.Trim(a.prefix, "/"); a.prefix != "" {
		a.prefix += "/"
	}
	a.where = "bucket " + o.Bucket
	if a.prefix != "" {
		a.where += ", prefix " + a.prefix
	}
	if endpoint := client.Options().BaseEndpoint; endpoint != nil {
		a.where += ", at " + *endpoint
	} else {
		a.where += ", region " + client.Options().Region
	}
	// The objects first: an origin is written before any of them.
	_, some, err := a.after(ctx, 0)
	if err != nil {
		return nil, err
	}
	origin, ok, err := a.readOrigin(ctx)
	if err != nil {
		return nil, err
	}
	if some && !ok {
		return nil, fmt.Errorf("%w: %s is missing", ledger.ErrAnchorDamaged, a.prefix+originName)
	}
	a.origin = origin
	return a, nil
}

func newClient(ctx context.Context, o *Options) (*s3.Client, error) {
	if o.Attempts == 0 {
		o.Attempts = 4
	}
	if o.MaxBackoff == 0 {
		o.MaxBackoff = 2 * time.Second
	}
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = 10 * time.Second
	}
	switch {
	case o.Bucket == "":
		return nil, errors.New("no bucket is given")
	case o.Attempts < 1 || o.MaxBackoff < 0 || o.AttemptTimeout < 0:
		return nil, errors.New("attempts, backoff and timeout must be positive")
	}
	var load []func(*config.LoadOptions) error
	if o.Region != "" {
		load = append(load, config.WithRegion(o.Region))
	}
	if o.Credentials != nil {
		load = append(load, config.WithCredentialsProvider(o.Credentials))
	}
	cfg, err := config.LoadDefaultConfig(ctx, load...)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if cfg.Region == "" {
		if o.Endpoint == "" {
			return nil, errors.New("no region is configured")
		}
		cfg.Region = "us-east-1" // a part of signatures, which others ignore
	}
	client := s3.NewFromConfig(cfg, func(c *s3.Options) {
		if o.Endpoint != "" {
			c.BaseEndpoint = aws.String(o.Endpoint)
		}
		c.UsePathStyle = o.PathStyle
		// Conflict is S3's answer while another write under the name is on its way.
		c.Retryer = retry.AddWithErrorCodes(retry.NewStandard(func(s *retry.StandardOptions) {
			s.MaxAttempts = o.Attempts
			s.MaxBackoff = o.MaxBackoff
		}), codeConflict)
		c.HTTPClient = o.httpClient(cfg.HTTPClient)
		// Checksums that S3 alone knows stay away from other stores; ours are
		// in the objects, and in the request that writes one.
		c.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		c.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
		c.ClientLogMode = 0
	})
	if endpoint := client.Options().BaseEndpoint; endpoint != nil {
		if err := checkEndpoint(*endpoint); err != nil {
			return nil, err
		}
	}
	return client, nil
}

// httpClient is the SDK's client, with the proxy and the certificates that the
// configuration asks for, bounded in time. It follows no redirect: another
// host's answer is not the anchor's.
func (o *Options) httpClient(configured aws.HTTPClient) aws.HTTPClient {
	b, ok := configured.(*awshttp.BuildableClient)
	if !ok {
		b = awshttp.NewBuildableClient()
	}
	return &http.Client{
		Transport:     b.GetTransport(),
		Timeout:       o.AttemptTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func checkEndpoint(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.User != nil {
		return errors.New("the endpoint is not a URL of scheme and host")
	}
	if u.Scheme == "https" {
		return nil
	}
	ip, err := netip.ParseAddr(u.Hostname())
	if u.Scheme == "http" && (u.Hostname() == "localhost" || err == nil && ip.IsLoopback()) {
		return nil
	}
	return errors.New("an endpoint that is not on this machine must be https: who can forge its answers can roll the anchor back")
}

// Domain implements ledger.Anchor.
func (a *Anchor) Domain() (code, description string) { return "s3", a.where }

// Close implements ledger.Anchor.
func (a *Anchor) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	return nil
}

func (a *Anchor) ready(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return fmt.Errorf("%w: it is closed", ledger.ErrAnchorUnavailable)
	}
	return nil
}

// Newest implements ledger.Anchor. An object that this process saw before and
// that is gone is ErrAnchorDamaged.
func (a *Anchor) Newest(ctx context.Context) (ledger.Object, error) {
	if err := a.ready(ctx); err != nil {
		return ledger.Object{}, err
	}
	size, ok, err := a.last(ctx)
	if err != nil {
		return ledger.Object{}, err
	}
	if !ok {
		return ledger.Object{}, ledger.ErrNoObject
	}
	o, err := a.read(ctx, size)
	if err == nil {
		a.saw(size)
	}
	return o, err
}

// Get implements ledger.Anchor.
func (a *Anchor) Get(ctx context.Context, size uint64) (ledger.Object, error) {
	if err := a.ready(ctx); err != nil {
		return ledger.Object{}, err
	}
	next, ok, err := a.after(ctx, size)
	if err != nil {
		return ledger.Object{}, err
	}
	if !ok {
		return ledger.Object{}, ledger.ErrNoObject
	}
	return a.read(ctx, next)
}

// Put implements ledger.Anchor.
func (a *Anchor) Put(ctx context.Context, o ledger.Object) error {
	if err := a.ready(ctx); err != nil {
		return err
	}
	c, err := o.Check()
	if err != nil {
		return err
	}
	b, err := o.Encode()
	if err != nil {
		return err
	}
	if err := a.claim(ctx, c.Origin); err != nil {
		return err
	}
	// What o builds on, and what is there beyond it.
	there, err := a.two(ctx, max(o.From, 1)-1)
	if err != nil {
		return err
	}
	if o.From > 0 {
		if len(there) == 0 || there[0] != o.From {
			if _, ok, err := a.get(ctx, a.name(o.Size)); err != nil {
				return err
			} else if ok {
				return a.compare(ctx, o)
			}
			return fmt.Errorf("%w: there is no object of size %d", ledger.ErrAnchorDamaged, o.From)
		}
		there = there[1:]
	}
	for len(there) != 0 && there[0] != o.Size {
		next, err := a.read(ctx, there[0])
		if err != nil {
			return err
		}
		if ledger.Contradicts(next, o) {
			return fmt.Errorf("%w: object of size %d", ledger.ErrForked, next.Size)
		}
		if next.Size > o.Size {
			break
		}
		if there, err = a.two(ctx, next.Size); err != nil {
			return err
		}
	}
	switch created, err := a.create(ctx, a.name(o.Size), b); {
	case err != nil:
		return err
	case !created:
		return a.compare(ctx, o)
	}
	a.saw(o.Size)
	return nil
}

// Enter implements ledger.Anchor. Terms that this process has seen are not read
// again.
func (a *Anchor) Enter(ctx context.Context, t ledger.Term) (ledger.Term, error) {
	if err := errors.Join(a.ready(ctx), t.Check()); err != nil {
		return ledger.Term{}, err
	}
	newest, err := a.newestTerm(ctx)
	if err != nil || t.Number <= newest.Number {
		return newest, err
	}
	if t.Number > newest.Number+1 {
		return ledger.Term{}, fmt.Errorf("%w: there is no term %d", ledger.ErrAnchorDamaged, t.Number-1)
	}
	if _, err := a.create(ctx, a.termName(t.Number), t.Encode()); err != nil {
		return ledger.Term{}, err
	}
	return a.newestTerm(ctx)
}

func (a *Anchor) termName(number uint64) string {
	return fmt.Sprintf("%s%s%09d", a.prefix, termsName, number)
}

// newestTerm returns the term of the greatest number.
func (a *Anchor) newestTerm(ctx context.Context) (ledger.Term, error) {
	a.mu.Lock()
	seen := a.term
	a.mu.Unlock()
	number := seen.Number
	in := &s3.ListObjectsV2Input{Prefix: aws.String(a.prefix + termsName), StartAfter: aws.String(a.termName(number))}
	for {
		out, err := a.list(ctx, in)
		if err != nil {
			return ledger.Term{}, err
		}
		for _, c := range out.Contents {
			name := aws.ToString(c.Key)
			n, err := strconv.ParseUint(strings.TrimPrefix(name, a.prefix+termsName), 10, 64)
			if err == nil && a.termName(n) == name {
				number = max(number, n)
			}
		}
		if in.ContinuationToken = out.NextContinuationToken; !aws.ToBool(out.IsTruncated) {
			break
		}
	}
	if number == seen.Number {
		return seen, nil
	}
	b, ok, err := a.get(ctx, a.termName(number))
	if err != nil {
		return ledger.Term{}, err
	}
	t, err := ledger.DecodeTerm(b)
	if !ok || err != nil || t.Number != number {
		return ledger.Term{}, fmt.Errorf("%w: %s", ledger.ErrAnchorDamaged, a.termName(number))
	}
	a.mu.Lock()
	if a.term.Number < number {
		a.term = t
	}
	a.mu.Unlock()
	return t, nil
}

// compare is Put where an object of that size exists.
func (a *Anchor) compare(ctx context.Context, o ledger.Object) error {
	there, err := a.read(ctx, o.Size)
	if err != nil {
		return err
	}
	if !ledger.SameHistory(there, o) {
		return fmt.Errorf("%w: object of size %d", ledger.ErrForked, o.Size)
	}
	a.saw(o.Size)
	return nil
}

func (a *Anchor) saw(size uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.known = max(a.known, size)
}

// read reads the object of a size that was listed, or seen before.
func (a *Anchor) read(ctx context.Context, size uint64) (ledger.Object, error) {
	name := a.name(size)
	b, ok, err := a.get(ctx, name)
	if err != nil {
		return ledger.Object{}, err
	}
	if !ok {
		return ledger.Object{}, fmt.Errorf("%w: %s is gone", ledger.ErrAnchorDamaged, name)
	}
	o, err := ledger.DecodeObject(b)
	if err != nil {
		return ledger.Object{}, fmt.Errorf("%s: %w", name, err)
	}
	if o.Size != size {
		return ledger.Object{}, fmt.Errorf("%w: %s: object of size %d under another name", ledger.ErrAnchorDamaged, name, o.Size)
	}
	return o, nil
}

// name returns the key of the object of size.
func (a *Anchor) name(size uint64) string {
	digits := fmt.Sprintf("%0*d", 3*levels, size)
	parts := make([]string, levels)
	for i := range parts {
		parts[i] = digits[3*i : 3*i+3]
	}
	return a.prefix + objectsName + strings.Join(parts, "/")
}

// size reads the size from an object's key.
func (a *Anchor) size(key string) (uint64, bool) {
	digits, ok := strings.CutPrefix(key, a.prefix+objectsName)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.ReplaceAll(digits, "/", ""), 10, 64)
	return n, err == nil && a.name(n) == key
}

// after returns the least size beyond size that has an object.
func (a *Anchor) after(ctx context.Context, size uint64) (uint64, bool, error) {
	sizes, err := a.sizes(ctx, size, 1)
	if err != nil || len(sizes) == 0 {
		return 0, false, err
	}
	return sizes[0], true, nil
}

// two returns the least sizes beyond size that have an object, two at most.
func (a *Anchor) two(ctx context.Context, size uint64) ([]uint64, error) {
	return a.sizes(ctx, size, 2)
}

func (a *Anchor) sizes(ctx context.Context, size uint64, most int32) (sizes []uint64, err error) {
	if size >= ledger.MaxSize {
		return nil, nil
	}
	in := &s3.ListObjectsV2Input{
		Prefix: aws.String(a.prefix + objectsName), StartAfter: aws.String(a.name(size)), MaxKeys: aws.Int32(most),
	}
	for {
		out, err := a.list(ctx, in)
		if err != nil {
			return nil, err
		}
		for _, c := range out.Contents {
			// What begins with our name and is none of ours is passed over.
			n, ok := a.size(aws.ToString(c.Key))
			if !ok || n <= size {
				continue
			}
			if sizes = append(sizes, n); len(sizes) == int(most) {
				return sizes, nil
			}
		}
		if in.ContinuationToken = out.NextContinuationToken; !aws.ToBool(out.IsTruncated) {
			return sizes, nil
		}
		in.MaxKeys = aws.Int32(page)
	}
}

// last returns the greatest size that has an object, or that this process has
// seen one of.
func (a *Anchor) last(ctx context.Context) (uint64, bool, error) {
	a.mu.Lock()
	known := a.known
	a.mu.Unlock()
	if known == 0 {
		return a.greatest(ctx, a.prefix+objectsName, levels-1)
	}
	out, err := a.list(ctx, &s3.ListObjectsV2Input{
		Prefix: aws.String(a.prefix + objectsName), StartAfter: aws.String(a.name(known)), MaxKeys: aws.Int32(page),
	})
	if err != nil {
		return 0, false, err
	}
	if aws.ToBool(out.IsTruncated) {
		return a.greatest(ctx, a.prefix+objectsName, levels-1)
	}
	for _, c := range out.Contents {
		if n, ok := a.size(aws.ToString(c.Key)); ok {
			known = max(known, n)
		}
	}
	return known, true, nil
}

// greatest returns the greatest size of the objects below dir, whose parts are
// objects at level zero. An object store has no empty directories, so that it
// takes one listing a level, unless there are names that are none of ours.
func (a *Anchor) greatest(ctx context.Context, dir string, level int) (uint64, bool, error) {
	in := &s3.ListObjectsV2Input{Prefix: aws.String(dir), Delimiter: aws.String("/"), MaxKeys: aws.Int32(page)}
	var parts []string // three digits each
	for {
		out, err := a.list(ctx, in)
		if err != nil {
			return 0, false, err
		}
		if level > 0 {
			for _, p := range out.CommonPrefixes {
				name, ok := strings.CutSuffix(strings.TrimPrefix(aws.ToString(p.Prefix), dir), "/")
				if ok && isPart(name) {
					parts = append(parts, name)
				}
			}
		} else {
			for _, c := range out.Contents {
				if name := strings.TrimPrefix(aws.ToString(c.Key), dir); isPart(name) {
					parts = append(parts, name)
				}
			}
		}
		if in.ContinuationToken = out.NextContinuationToken; !aws.ToBool(out.IsTruncated) {
			break
		}
	}
	slices.Sort(parts)
	for _, name := range slices.Backward(parts) {
		if level == 0 {
			if n, ok := a.size(dir + name); ok {
				return n, true, nil
			}
			continue
		}
		if n, ok, err := a.greatest(ctx, dir+name+"/", level-1); ok || err != nil {
			return n, ok, err
		}
	}
	return 0, false, nil
}

func isPart(name string) bool {
	return len(name) == 3 && strings.Trim(name, "0123456789") == ""
}

// claim makes the prefix the anchor of origin's ledger, or verifies that it is,
// and that the store honours If-None-Match.
func (a *Anchor) claim(ctx context.Context, origin string) error {
	a.mu.Lock()
	claimed, have := a.claimed, a.origin
	a.mu.Unlock()
	if have != "" && have != origin {
		return fmt.Errorf("%w: %s is another ledger's anchor", ledger.ErrForked, a.where)
	}
	if claimed {
		return nil
	}
	name := a.prefix + originName
	created, err := a.create(ctx, name, originFile(origin))
	if err == nil && created {
		created, err = a.create(ctx, name, originFile(origin))
	}
	if err != nil {
		return err
	}
	if created {
		return fmt.Errorf("%w: the object store at %s ignores If-None-Match: it would let objects be written over", ledger.ErrAnchorUnavailable, a.where)
	}
	have, ok, err := a.readOrigin(ctx)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%w: %s is gone", ledger.ErrAnchorDamaged, name)
	}
	a.mu.Lock()
	a.origin, a.claimed = have, true
	a.mu.Unlock()
	if have != origin {
		return fmt.Errorf("%w: %s is another ledger's anchor", ledger.ErrForked, a.where)
	}
	return nil
}

// originFile has the origin on its second line and, on its third, a checksum.
func originFile(origin string) []byte {
	text := originMagic + "\n" + origin + "\n"
	sum := sha256.Sum256([]byte(text))
	return []byte(text + hex.EncodeToString(sum[:]) + "\n")
}

func (a *Anchor) readOrigin(ctx context.Context) (origin string, ok bool, err error) {
	name := a.prefix + originName
	b, ok, err := a.get(ctx, name)
	if err != nil || !ok {
		return "", false, err
	}
	_, rest, _ := strings.Cut(string(b), "\n")
	origin, _, _ = strings.Cut(rest, "\n")
	if origin == "" || !bytes.Equal(b, originFile(origin)) {
		return "", false, fmt.Errorf("%w: %s", ledger.ErrAnchorDamaged, name)
	}
	return origin, true, nil
}

// Codes of errors that S3 answers with.
const (
	codeNoKey    = "NoSuchKey"
	codeExists   = "PreconditionFailed"
	codeConflict = "ConditionalRequestConflict"
)

func code(err error) string {
	var e smithy.APIError
	if errors.As(err, &e) {
		return e.ErrorCode()
	}
	return ""
}

// get reads what is under a key; ok says whether there is anything.
func (a *Anchor) get(ctx context.Context, key string) (b []byte, ok bool, err error) {
	out, err := a.client.GetObject(ctx, &s3.GetObjectInput{Bucket: aws.String(a.bucket), Key: aws.String(key)})
	if code(err) == codeNoKey {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, unavailable(err)
	}
	defer out.Body.Close()
	if b, err = io.ReadAll(io.LimitReader(out.Body, ledger.MaxObject+1)); err != nil {
		return nil, false, unavailable(err)
	}
	if len(b) > ledger.MaxObject {
		return nil, false, fmt.Errorf("%w: %s is larger than %d bytes", ledger.ErrAnchorDamaged, key, ledger.MaxObject)
	}
	return b, true, nil
}

// create writes b under a key unless something is there: then it returns false.
// The answer to a request that was repeated, because its first answer was lost,
// may be false too.
func (a *Anchor) create(ctx context.Context, key string, b []byte) (bool, error) {
	sum := sha256.Sum256(b)
	_, err := a.client.PutObject(ctx, &s3.PutObjectInput{
		Bucket: aws.String(a.bucket), Key: aws.String(key), Body: bytes.NewReader(b),
		IfNoneMatch: aws.String("*"),
		ContentType: aws.String("application/octet-stream"),
		// A bucket that locks its objects asks for a checksum.
		ChecksumSHA256: aws.String(base64.StdEncoding.EncodeToString(sum[:])),
	})
	if code(err) == codeExists {
		return false, nil
	}
	if err != nil {
		return false, unavailable(err)
	}
	return true, nil
}

func (a *Anchor) list(ctx context.Context, in *s3.ListObjectsV2Input) (*s3.ListObjectsV2Output, error) {
	in.Bucket = aws.String(a.bucket)
	out, err := a.client.ListObjectsV2(ctx, in)
	if err != nil {
		return nil, unavailable(err)
	}
	return out, nil
}

func unavailable(err error) error {
	return fmt.Errorf("%w: %w", ledger.ErrAnchorUnavailable, err)
}
