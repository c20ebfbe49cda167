package sdk_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// fakeKeyd answers as keyd would, and misbehaves on demand.
type fakeKeyd struct {
	keydv1.UnimplementedKeyServiceServer
	keydv1.UnimplementedErasureServiceServer

	clock *fakeClock
	addr  string
	stop  func() // stops the listener
	calls atomic.Int64
	asked atomic.Int64 // queries
	seals atomic.Int64 // queries of purpose seal

	mu       sync.Mutex
	lease    *durationpb.Duration
	width    time.Duration
	skew     time.Duration // keyd's clock less the client's
	classes  map[string]uint32
	keys     map[string]*fakeKey // by tenant, subject, class
	log      []*keydv1.Revocation
	oldest   int // entries of log before it are forgotten
	changed  chan struct{}
	cut      chan struct{} // closed to break the streams
	mute     bool          // streams say nothing
	down     bool
	unsized  bool           // leases do not tell the size of the ledger
	old      bool           // it does not know that one may ask ahead
	aheads   []time.Time    // when it was asked ahead
	watching map[string]int // streams by tenant
	cursors  []uint64       // of the WatchRevocations calls
	tenants  [][]string     // of the WatchRevocations calls
	destroys []*keydv1.DestroyKeyRequest
	failing  []error // what the next calls of DestroyKey return
	// onDestroy, if set, is called before a DestroyKey is carried out.
	onDestroy func()
	// late, if not nil, holds the streams back until it is closed.
	late chan struct{}

	// answer, if set, may replace the answer to a GetBlobKeys, or hold it back.
	answer func(ctx context.Context, req *keydv1.GetBlobKeysRequest, resp *keydv1.GetBlobKeysResponse) (*keydv1.GetBlobKeysResponse, error)
}

type fakeKey struct {
	tenant, subject string
	id, secret      []byte
	generation      uint32
	outcome         keydv1.Outcome // unspecified while it lives
}

// newFakeKeyd starts a keyd that stops with the test.
func newFakeKeyd(t testing.TB, clock *fakeClock) *fakeKeyd {
	f := startFakeKeyd(clock)
	t.Cleanup(func() { f.stop() })
	return f
}

func startFakeKeyd(clock *fakeClock) *fakeKeyd {
	f := &fakeKeyd{
		clock:    clock,
		lease:    durationpb.New(time.Minute),
		width:    24 * time.Hour,
		classes:  make(map[string]uint32),
		keys:     make(map[string]*fakeKey),
		changed:  make(chan struct{}),
		cut:      make(chan struct{}),
		watching: make(map[string]int),
	}
	f.listen("127.0.0.1:0")
	return f
}

func (f *fakeKeyd) listen(addr string) {
	network, at := "tcp", addr
	if path, unix := strings.CutPrefix(addr, "unix://"); unix {
		network, at = "unix", path
	}
	lis, err := net.Listen(network, at)
	if err != nil {
		panic(err)
	}
	s := grpc.NewServer()
	keydv1.RegisterKeyServiceServer(s, f)
	keydv1.RegisterErasureServiceServer(s, f)
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(lis) })
	f.addr = addr
	if network == "tcp" {
		f.addr = lis.Addr().String()
	}
	f.stop = func() { s.Stop(); wg.Wait() }
}

func (f *fakeKeyd) with(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

func (f *fakeKeyd) setLease(d time.Duration) { f.with(func() { f.lease = durationpb.New(d) }) }
func (f *fakeKeyd) setDown(down bool)        { f.with(func() { f.down = down }) }

func outcomeError(o keydv1.Outcome, code codes.Code) error {
	st, err := status.New(code, "as scripted").WithDetails(&errdetails.ErrorInfo{
		Domain: "lethe", Reason: o.String()[len("OUTCOME_"):],
	})
	if err != nil {
		panic(err)
	}
	return st.Err()
}

func (f *fakeKeyd) GetBlobKeys(ctx context.Context, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	f.mu.Lock()
	answer := f.answer
	// Counted once the answer stands: whoever waits for the count may then change
	// what it would have been.
	count := func() { f.calls.Add(1); f.asked.Add(int64(len(req.Queries))) }
	if f.down {
		count()
		f.mu.Unlock()
		return nil, status.Error(codes.Unavailable, "down")
	}
	resp := &keydv1.GetBlobKeysResponse{}
	for _, q := range req.Queries {
		if q.Purpose == keydv1.Purpose_PURPOSE_SEAL {
			f.seals.Add(1)
		}
		r := &keydv1.BlobKeyResult{}
		if q.Purpose == keydv1.Purpose_PURPOSE_OPEN && len(q.KeyId) == 0 && len(req.Recipients) > 0 {
			q = f.among(q, req.Recipients)
			r.KeyId = q.KeyId
		}
		if key, outcome := f.blobKey(q); outcome == keydv1.Outcome_OUTCOME_UNSPECIFIED {
			r.Result = &keydv1.BlobKeyResult_Key{Key: key}
		} else {
			r.Result = &keydv1.BlobKeyResult_Failure{Failure: &keydv1.Failure{Outcome: outcome, Message: "as scripted"}}
		}
		if o := r.GetFailure().GetOutcome(); o == keydv1.Outcome_OUTCOME_WRONG_SUBJECT || o == keydv1.Outcome_OUTCOME_UNKNOWN {
			r.KeyId = nil
		}
		resp.Results = append(resp.Results, r)
	}
	resp.Recipients = f.states(req.Recipients)
	count()
	f.mu.Unlock()
	if answer != nil {
		return answer(ctx, req, resp)
	}
	return resp, nil
}

// among returns q with the key id among recipients that is its subject's.
func (f *fakeKeyd) among(q *keydv1.BlobKeyQuery, recipients [][]byte) *keydv1.BlobKeyQuery {
	for _, k := range f.keys {
		for _, id := range recipients {
			if k.tenant == q.Tenant && k.subject == string(q.SubjectId) && slices.Equal(k.id, id) {
				q = proto.Clone(q).(*keydv1.BlobKeyQuery)
				q.KeyId = id
				return q
			}
		}
	}
	q = proto.Clone(q).(*keydv1.BlobKeyQuery)
	q.KeyId = recipients[0] // somebody else's
	return q
}

// states tells what has become of recipients.
func (f *fakeKeyd) states(recipients [][]byte) (all []*keydv1.Recipient) {
	for _, id := range recipients {
		r := &keydv1.Recipient{Outcome: keydv1.Outcome_OUTCOME_UNKNOWN}
		for _, k := range f.keys {
			if slices.Equal(k.id, id) {
				sum := sha256.Sum256([]byte(k.subject))
				r = &keydv1.Recipient{Handle: sum[:16], Outcome: k.outcome}
			}
		}
		all = append(all, r)
	}
	return all
}

func (f *fakeKeyd) now() time.Time {
	f.clock.mu.Lock()
	defer f.clock.mu.Unlock()
	return f.clock.wall.Add(f.skew)
}

func (f *fakeKeyd) blobKey(q *keydv1.BlobKeyQuery) (*keydv1.BlobKey, keydv1.Outcome) {
	name := fmt.Sprintf("%q%q%q", q.Tenant, q.SubjectId, q.Class)
	k := f.keys[name]
	class := f.classes[q.Class]
	if class == 0 {
		class = uint32(len(f.classes) + 1)
		f.classes[q.Class] = class
	}
	width := uint64(f.width / time.Second)
	now := uint64(f.now().Unix())
	bucket := now / width * width
	if q.SealFrom != 0 && !f.old {
		bucket = max(now, q.SealFrom) / width * width
		f.aheads = append(f.aheads, f.now())
	}
	if q.Purpose == keydv1.Purpose_PURPOSE_OPEN {
		var owner *fakeKey
		for _, other := range f.keys {
			if other.tenant == q.Tenant && slices.Equal(other.id, q.KeyId) {
				owner = other
			}
		}
		switch {
		case owner == nil:
			return nil, keydv1.Outcome_OUTCOME_UNKNOWN
		case owner != k:
			return nil, keydv1.Outcome_OUTCOME_WRONG_SUBJECT
		}
		bucket = q.Bucket
	} else if k == nil {
		k = &fakeKey{tenant: q.Tenant, subject: string(q.SubjectId), id: make([]byte, 16), secret: make([]byte, 32), generation: 1}
		rand.Read(k.id)
		rand.Read(k.secret)
		f.keys[name] = k
	}
	if k.outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
		return nil, k.outcome
	}
	size := uint64(len(f.log)) + 1
	if f.unsized {
		size = 0
	}
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(slices.Clone(k.secret), bucket))
	var startsIn *durationpb.Duration
	if q.Purpose == keydv1.Purpose_PURPOSE_SEAL && bucket > now {
		startsIn = durationpb.New(time.Unix(int64(bucket), 0).Sub(f.now()))
	}
	return &keydv1.BlobKey{
		StartsIn:    startsIn,
		KeyId:       slices.Clone(k.id),
		ClassNumber: class,
		Bucket:      bucket,
		BucketEnd:   bucket + width,
		Key:         sum[:],
		Lease:       f.lease,
		Generation:  k.generation,
		LedgerSize:  size,
	}, keydv1.Outcome_OUTCOME_UNSPECIFIED
}

// kill makes a subject's keys dead, and streams it if told to.
func (f *fakeKeyd) kill(subject string, outcome keydv1.Outcome, tell bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range f.keys {
		if k.subject != subject {
			continue
		}
		k.outcome = outcome
		if tell {
			f.tell(&keydv1.Revocation{Tenant: k.tenant, KeyId: k.id, Outcome: outcome})
		}
	}
}

// tell streams a revocation. f.mu is held.
func (f *fakeKeyd) tell(r *keydv1.Revocation) {
	f.log = append(f.log, r)
	close(f.changed)
	f.changed = make(chan struct{})
}

// cutStreams breaks every revocation stream.
func (f *fakeKeyd) cutStreams() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.cut)
	f.cut = make(chan struct{})
}

func (f *fakeKeyd) WatchRevocations(req *keydv1.WatchRevocationsRequest, s grpc.ServerStreamingServer[keydv1.WatchRevocationsResponse]) error {
	f.mu.Lock()
	if f.down {
		f.mu.Unlock()
		return status.Error(codes.Unavailable, "down")
	}
	f.cursors = append(f.cursors, req.Cursor)
	f.tenants = append(f.tenants, slices.Clone(req.Tenants))
	for _, t := range req.Tenants {
		f.watching[t]++
	}
	cut, late := f.cut, f.late
	f.mu.Unlock()
	if late != nil {
		select {
		case <-late:
		case <-s.Context().Done():
		}
	}
	defer f.with(func() {
		for _, t := range req.Tenants {
			f.watching[t]--
		}
	})
	// Cursors are places in the log, plus one.
	at := int(req.Cursor) - 1
	first := true
	for {
		f.mu.Lock()
		m := &keydv1.WatchRevocationsResponse{Time: timestamppb.Now()}
		switch {
		case at < 0:
			at = len(f.log)
		case at < f.oldest:
			at, m.Reset_ = len(f.log), true
		}
		for _, r := range f.log[at:] {
			if slices.Contains(req.Tenants, r.Tenant) {
				m.Revocations = append(m.Revocations, r)
			}
		}
		at = len(f.log)
		m.Cursor = uint64(at) + 1
		changed, mute := f.changed, f.mute
		f.mu.Unlock()
		if !mute && (first || m.Reset_ || len(m.Revocations) > 0) {
			if err := s.Send(m); err != nil {
				return err
			}
			first = false
		}
		select {
		case <-changed:
		case <-cut:
			return status.Error(codes.Unavailable, "cut")
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

func (f *fakeKeyd) isWatching(tenant string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.watching[tenant] > 0
}

func (f *fakeKeyd) DestroyKey(ctx context.Context, req *keydv1.DestroyKeyRequest) (*keydv1.DestroyKeyResponse, error) {
	f.mu.Lock()
	f.destroys = append(f.destroys, req)
	if len(f.failing) > 0 {
		err := f.failing[0]
		f.failing = f.failing[1:]
		f.mu.Unlock()
		return nil, err
	}
	onDestroy := f.onDestroy
	f.mu.Unlock()
	if onDestroy != nil {
		onDestroy()
	}
	f.kill(string(req.SubjectId), keydv1.Outcome_OUTCOME_ERASED, true)
	return &keydv1.DestroyKeyResponse{Receipt: []byte("receipt"), LedgerIndex: 7, DrainedBy: timestamppb.New(f.now().Add(time.Minute))}, nil
}

func (f *fakeKeyd) Reinstate(ctx context.Context, req *keydv1.ReinstateRequest) (*keydv1.ReinstateResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, k := range f.keys {
		if k.subject == string(req.SubjectId) {
			delete(f.keys, name)
		}
	}
	return &keydv1.ReinstateResponse{Receipt: []byte("receipt"), LedgerIndex: 8, Generation: req.IfGeneration + 1}, nil
}

func (f *fakeKeyd) DescribeSubject(ctx context.Context, req *keydv1.DescribeSubjectRequest) (*keydv1.DescribeSubjectResponse, error) {
	if string(req.SubjectId) == "nobody" {
		return nil, outcomeError(keydv1.Outcome_OUTCOME_UNKNOWN, codes.NotFound)
	}
	return &keydv1.DescribeSubjectResponse{
		Handle:     make([]byte, 16),
		State:      keydv1.SubjectState_SUBJECT_STATE_ACTIVE,
		Generation: 2,
		Classes: []*keydv1.ClassState{{
			Class: "trace", State: keydv1.SubjectState_SUBJECT_STATE_ACTIVE, Generation: 2,
			KeyId: slices.Repeat([]byte{1}, 16), DeadKeyIds: [][]byte{slices.Repeat([]byte{2}, 16)},
		}},
		Holds:         []string{"case-1"},
		LedgerIndexes: []uint64{3, 4},
	}, nil
}

// start returns a client of a fake keyd, both on one fake clock.
func start(t testing.TB, opts ...sdk.Option) (*sdk.Client, *fakeKeyd, *fakeClock) {
	t.Helper()
	clock := newFakeClock()
	f := newFakeKeyd(t, clock)
	c, err := sdk.Dial(t.Context(), f.addr, append([]sdk.Option{sdk.WithClock(clock)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, f, clock
}

// eventually waits for something that happens in the background. It gives up
// late: a client that was cut off waits the longer the longer keyd was away.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 60_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("did not happen: %s", what)
}

var alice = sdk.Target{Tenant: "acme", Subject: "alice", Class: "trace"}
