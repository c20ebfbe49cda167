package s3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/anchor/s3"
	"lethe/keyd/internal/ledger"
)

func TestMain(m *testing.M) {
	// Nothing on this machine decides which region or credentials are used.
	for _, name := range []string{"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"} {
		os.Setenv(name, os.DevNull)
	}
	for _, name := range []string{"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} {
		os.Unsetenv(name)
	}
	os.Exit(m.Run())
}

const (
	bucket = "anchors"
	prefix = "a/ledger"
)

// place is a bucket of gofakes3, which honours If-None-Match as S3 does.
type place struct {
	backend *s3mem.Backend
	url     string

	mu sync.Mutex
	// before, if set, sees every request first, and says whether it answered it.
	before func(w http.ResponseWriter, r *http.Request) bool
	// after, if set, sees every answer, and may put another in its place.
	after    func(r *http.Request, answer *httptest.ResponseRecorder) *httptest.ResponseRecorder
	requests int
}

func newPlace(t testing.TB) *place {
	p := &place{backend: s3mem.New()}
	if err := p.backend.CreateBucket(bucket); err != nil {
		t.Fatal(err)
	}
	fake := gofakes3.New(p.backend, gofakes3.WithLogger(gofakes3.DiscardLog())).Server()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		before, after := p.before, p.after
		p.requests++
		p.mu.Unlock()
		if before != nil && before(w, r) {
			return
		}
		if after == nil {
			fake.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		fake.ServeHTTP(rec, r)
		rec = after(r, rec)
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(rec.Code)
		w.Write(rec.Body.Bytes())
	}))
	t.Cleanup(srv.Close)
	p.url = srv.URL
	return p
}

func (p *place) hook(before func(http.ResponseWriter, *http.Request) bool, after func(*http.Request, *httptest.ResponseRecorder) *httptest.ResponseRecorder) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before, p.after = before, after
}

func (p *place) options() s3.Options {
	return s3.Options{
		Bucket: bucket, Prefix: prefix, Endpoint: p.url, PathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider("AKIDEXAMPLE", "secret", ""),
		MaxBackoff:  time.Millisecond,
	}
}

func (p *place) Open(t *testing.T) ledger.Anchor { return p.open(t) }

func (p *place) open(t testing.TB) *s3.Anchor {
	t.Helper()
	a, err := s3.Open(t.Context(), p.options())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// object is the key of an object, spelled out by hand.
func object(size uint64) string {
	d := fmt.Sprintf("%015d", size)
	return prefix + "/objects/" + d[:3] + "/" + d[3:6] + "/" + d[6:9] + "/" + d[9:12] + "/" + d[12:]
}

func (p *place) Edit(t *testing.T, size uint64, edit func([]byte) []byte) {
	t.Helper()
	var b []byte
	if o, err := p.backend.GetObject(bucket, object(size), nil); err == nil {
		b, err = io.ReadAll(o.Contents)
		if err != nil {
			t.Fatal(err)
		}
	}
	if b = edit(b); b == nil {
		p.remove(t, object(size))
	} else {
		p.write(t, object(size), b)
	}
}

func (p *place) remove(t *testing.T, key string) {
	t.Helper()
	if _, err := p.backend.DeleteObject(bucket, key); err != nil {
		t.Fatal(err)
	}
}

func (p *place) write(t *testing.T, key string, b []byte) {
	t.Helper()
	if _, err := p.backend.PutObject(bucket, key, map[string]string{}, bytes.NewReader(b), int64(len(b)), nil); err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	anchortest.Run(t, func(t *testing.T) anchortest.Place { return newPlace(t) })
}

func wantErr(t *testing.T, what string, err error, want ...error) {
	t.Helper()
	for _, w := range want {
		if !errors.Is(err, w) {
			t.Fatalf("%s: got %v, want %v", what, err, w)
		}
	}
}

func TestOptions(t *testing.T) {
	p := newPlace(t)
	for name, change := range map[string]func(*s3.Options){
		"no bucket":       func(o *s3.Options) { o.Bucket = "" },
		"no region":       func(o *s3.Options) { o.Endpoint = "" },
		"plain http":      func(o *s3.Options) { o.Endpoint = "http://192.0.2.1:9000" },
		"no URL":          func(o *s3.Options) { o.Endpoint = "localhost:9000" },
		"user in the URL": func(o *s3.Options) { o.Endpoint = "https://user:word@s3.example" },
		"attempts":        func(o *s3.Options) { o.Attempts = -1 },
	} {
		o := p.options()
		change(&o)
		if _, err := s3.Open(t.Context(), o); err == nil || errors.Is(err, ledger.ErrAnchorUnavailable) || strings.Contains(err.Error(), "word") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if p.requests != 0 {
		t.Errorf("%d requests were made", p.requests)
	}
}

func TestUnavailable(t *testing.T) {
	p := newPlace(t)
	o := p.options()
	o.Bucket = "missing"
	_, err := s3.Open(t.Context(), o)
	wantErr(t, "Open of a bucket that is missing", err, ledger.ErrAnchorUnavailable)

	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(2)
	if err := a.Put(t.Context(), h.Object(0, 1)); err != nil {
		t.Fatal(err)
	}
	all := func(what string) {
		t.Helper()
		_, err := a.Newest(t.Context())
		wantErr(t, "Newest, "+what, err, ledger.ErrAnchorUnavailable)
		_, err = a.Get(t.Context(), 0)
		wantErr(t, "Get, "+what, err, ledger.ErrAnchorUnavailable)
		wantErr(t, "Put, "+what, a.Put(t.Context(), h.Object(1, 2)), ledger.ErrAnchorUnavailable)
		_, err = s3.Open(t.Context(), p.options())
		wantErr(t, "Open, "+what, err, ledger.ErrAnchorUnavailable)
	}
	answer := func(status int, code string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(status)
			fmt.Fprintf(w, "<Error><Code>%s</Code><Message>no</Message></Error>", code)
			return true
		}
	}
	p.hook(answer(http.StatusForbidden, "AccessDenied"), nil)
	all("denied")
	p.hook(answer(http.StatusNotFound, "NoSuchBucket"), nil)
	all("bucket gone")
	p.hook(answer(http.StatusServiceUnavailable, "SlowDown"), nil)
	all("slowed down")
	p.hook(answer(http.StatusConflict, "ConditionalRequestConflict"), nil)
	all("conflicts without end")
	p.hook(func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, "http://192.0.2.1/", http.StatusTemporaryRedirect)
		return true
	}, nil)
	all("redirected")
	p.hook(func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) }, nil)
	all("cut off")

	// And it goes on once the store does.
	p.hook(nil, nil)
	if err := a.Put(t.Context(), h.Object(1, 2)); err != nil {
		t.Fatal(err)
	}
	a.Close()
	_, err = a.Newest(t.Context())
	wantErr(t, "Newest after Close", err, ledger.ErrAnchorUnavailable)
}

// A store that does not answer is given up when the caller's time is over.
func TestSilence(t *testing.T) {
	p := newPlace(t)
	a := p.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	p.hook(func(_ http.ResponseWriter, r *http.Request) bool {
		cancel()
		<-r.Context().Done()
		return true
	}, nil)
	_, err := a.Newest(ctx)
	wantErr(t, "Newest", err, ledger.ErrAnchorUnavailable, context.Canceled)
}

// Writes whose answers are lost, or that meet others on their way, are
// repeated, and are there once.
func TestLostAnswers(t *testing.T) {
	p := newPlace(t)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(6)
	for size := uint64(1); size <= 6; size++ {
		lost := 0
		p.hook(nil, func(r *http.Request, answer *httptest.ResponseRecorder) *httptest.ResponseRecorder {
			if r.Method != http.MethodPut || lost == 2 {
				return answer
			}
			lost++
			rec := httptest.NewRecorder()
			if size%2 == 0 {
				rec.Code = http.StatusConflict
				fmt.Fprint(rec.Body, "<Error><Code>ConditionalRequestConflict</Code></Error>")
			} else {
				rec.Code = http.StatusInternalServerError
			}
			return rec
		})
		if err := a.Put(t.Context(), h.Object(size-1, size)); err != nil {
			t.Fatalf("Put of %d: %v", size, err)
		}
		if lost != 2 {
			t.Fatalf("Put of %d lost %d answers", size, lost)
		}
		if o, err := a.Newest(t.Context()); err != nil || o.Size != size {
			t.Fatalf("Newest: size %d, %v", o.Size, err)
		}
	}
}

// A store that ignores the condition is found out before anything is anchored.
func TestStoreWithoutConditions(t *testing.T) {
	p := newPlace(t)
	p.hook(func(_ http.ResponseWriter, r *http.Request) bool {
		r.Header.Del("If-None-Match")
		return false
	}, nil)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(1)
	err := a.Put(t.Context(), h.Object(0, 1))
	wantErr(t, "Put", err, ledger.ErrAnchorUnavailable)
	if !strings.Contains(err.Error(), "If-None-Match") {
		t.Errorf("it does not say why: %v", err)
	}
	_, err = a.Newest(t.Context())
	wantErr(t, "Newest", err, ledger.ErrNoObject)
}

func TestOrigin(t *testing.T) {
	p := newPlace(t)
	h := anchortest.NewHistory(t, 1)
	h.Grow(1)
	if err := p.open(t).Put(t.Context(), h.Object(0, 1)); err != nil {
		t.Fatal(err)
	}
	key := prefix + "/origin"
	o, err := p.backend.GetObject(bucket, key, nil)
	if err != nil {
		t.Fatal(err)
	}
	original, err := io.ReadAll(o.Contents)
	if err != nil {
		t.Fatal(err)
	}
	for i := range original {
		for _, b := range [][]byte{original[:i], append(append(bytes.Clone(original[:i]), original[i]^1), original[i+1:]...)} {
			p.write(t, key, b)
			_, err := s3.Open(t.Context(), p.options())
			wantErr(t, fmt.Sprintf("Open with the origin damaged at %d", i), err, ledger.ErrAnchorDamaged)
		}
	}
	p.remove(t, key)
	_, err = s3.Open(t.Context(), p.options())
	wantErr(t, "Open of objects without their origin", err, ledger.ErrAnchorDamaged)
	p.write(t, key, original)
	// It binds the prefix, and no other one, before the first object is there.
	p.remove(t, object(1))
	other := anchortest.NewHistory(t, 2)
	other.Grow(1)
	wantErr(t, "Put of another ledger", p.open(t).Put(t.Context(), other.Object(0, 1)), ledger.ErrForked)
	for _, beside := range []string{"a/ledger2", "a", ""} {
		o := p.options()
		o.Prefix = beside
		a, err := s3.Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Put(t.Context(), other.Object(0, 1)); err != nil {
			t.Errorf("prefix %q: %v", beside, err)
		}
	}
}

// What this process has seen is remembered: an anchor whose newest objects are
// gone is not an older anchor.
func TestNewestGone(t *testing.T) {
	p := newPlace(t)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(2)
	for size := uint64(1); size <= 2; size++ {
		if err := a.Put(t.Context(), h.Object(size-1, size)); err != nil {
			t.Fatal(err)
		}
	}
	p.remove(t, object(2))
	_, err := a.Newest(t.Context())
	wantErr(t, "Newest", err, ledger.ErrAnchorDamaged)
}

func TestStrangersAndSize(t *testing.T) {
	p := newPlace(t)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(3)
	if err := a.Put(t.Context(), h.Object(0, 2)); err != nil {
		t.Fatal(err)
	}
	dir := strings.TrimSuffix(object(2), "002")
	for _, key := range []string{
		dir + "002x", dir + "0020", dir + "02", dir + "x02", dir + "+03", dir + "003/x", dir + "002/004",
		prefix + "/objects/999/x", prefix + "/objects/998/000/000/000/x", prefix + "/objects/000/zzz", prefix + "/objects/README",
		prefix + "/objects/001/000/000/00/0000", prefix + "/zzz", "zzz",
	} {
		p.write(t, key, []byte("stray"))
	}
	for i := range 1100 { // more than one listing holds
		p.write(t, fmt.Sprintf("%s002-%04d", dir, i), nil)
		p.write(t, fmt.Sprintf("%s/objects/99x%04d/x", prefix, i), nil)
	}
	for _, b := range []*s3.Anchor{a, p.open(t)} {
		if o, err := b.Newest(t.Context()); err != nil || o.Size != 2 {
			t.Fatalf("Newest: size %d, %v", o.Size, err)
		}
		if _, err := b.Get(t.Context(), 2); !errors.Is(err, ledger.ErrNoObject) {
			t.Fatalf("Get(2): %v", err)
		}
	}
	if err := p.open(t).Put(t.Context(), h.Object(2, 3)); err != nil {
		t.Fatal(err)
	}
	for _, b := range []*s3.Anchor{a, p.open(t)} {
		if o, err := b.Newest(t.Context()); err != nil || o.Size != 3 {
			t.Fatalf("Newest: size %d, %v", o.Size, err)
		}
		if o, err := b.Get(t.Context(), 2); err != nil || o.Size != 3 {
			t.Fatalf("Get(2): size %d, %v", o.Size, err)
		}
	}
	p.write(t, object(3), make([]byte, ledger.MaxObject+1))
	_, err := a.Newest(t.Context())
	wantErr(t, "Newest of an object beyond all bounds", err, ledger.ErrAnchorDamaged)
}

// The newest object costs a listing a level at first, and one afterwards,
// however many there are.
func TestRequestsToFindNewest(t *testing.T) {
	p := newPlace(t)
	a, h := p.open(t), anchortest.NewHistory(t, 1)
	h.Grow(3)
	for size := uint64(1); size <= 3; size++ {
		if err := a.Put(t.Context(), h.Object(size-1, size)); err != nil {
			t.Fatal(err)
		}
	}
	b := p.open(t)
	for _, want := range []int{6, 2, 2} {
		p.requests = 0
		if _, err := b.Newest(t.Context()); err != nil {
			t.Fatal(err)
		}
		if p.requests != want {
			t.Errorf("%d requests, want %d", p.requests, want)
		}
	}
}
