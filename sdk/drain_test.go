package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/sdktest"
)

// badNetwork stands between clients and keyd. It delays calls, sends each of
// them twice, loses answers to calls that were carried out, swallows what is
// pushed, and cuts connections.
type badNetwork struct {
	keydv1.UnimplementedKeyServiceServer
	keydv1.UnimplementedErasureServiceServer
	keys    keydv1.KeyServiceClient
	erasure keydv1.ErasureServiceClient
	addr    string
	delay   time.Duration // at most
	healed  atomic.Bool
	calls   atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]bool
}

func newBadNetwork(t *testing.T, k *sdktest.Keyd, delay time.Duration) *badNetwork {
	t.Helper()
	up, err := grpc.NewClient(k.Target(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &badNetwork{
		keys: keydv1.NewKeyServiceClient(up), erasure: keydv1.NewErasureServiceClient(up),
		addr: lis.Addr().String(), delay: delay, conns: make(map[net.Conn]bool),
	}
	s := grpc.NewServer()
	keydv1.RegisterKeyServiceServer(s, b)
	keydv1.RegisterErasureServiceServer(s, b)
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(&cutListener{lis, b}) })
	t.Cleanup(func() {
		s.Stop()
		serving.Wait()
		up.Close()
	})
	return b
}

// cutListener knows the connections that it has accepted.
type cutListener struct {
	net.Listener
	b *badNetwork
}

func (l *cutListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.b.mu.Lock()
		l.b.conns[c] = true
		l.b.mu.Unlock()
	}
	return c, err
}

// cut breaks every connection.
func (b *badNetwork) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.conns {
		c.Close()
		delete(b.conns, c)
	}
}

// twice carries a call out twice, late, and perhaps loses the answer.
func twice[T any](ctx context.Context, b *badNetwork, call func(context.Context) (T, error)) (resp T, err error) {
	if b.healed.Load() {
		return call(ctx)
	}
	n := b.calls.Add(1)
	wait := func() { time.Sleep(rand.N(b.delay)) }
	wait()
	// The duplicate comes through whatever becomes of the caller.
	late := context.WithoutCancel(ctx)
	var second sync.WaitGroup
	second.Go(func() { wait(); call(late) })
	resp, err = call(late)
	second.Wait()
	wait()
	if n%7 == 0 {
		return resp, status.Error(codes.Unavailable, "the answer was lost")
	}
	return resp, err
}

func (b *badNetwork) GetBlobKeys(ctx context.Context, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	return twice(ctx, b, func(ctx context.Context) (*keydv1.GetBlobKeysResponse, error) { return b.keys.GetBlobKeys(ctx, req) })
}

func (b *badNetwork) DestroyKey(ctx context.Context, req *keydv1.DestroyKeyRequest) (*keydv1.DestroyKeyResponse, error) {
	return twice(ctx, b, func(ctx context.Context) (*keydv1.DestroyKeyResponse, error) { return b.erasure.DestroyKey(ctx, req) })
}

// WatchRevocations says that it lives, and nothing else.
func (b *badNetwork) WatchRevocations(req *keydv1.WatchRevocationsRequest, s grpc.ServerStreamingServer[keydv1.WatchRevocationsResponse]) error {
	if err := s.Send(&keydv1.WatchRevocationsResponse{Cursor: max(req.Cursor, 1)}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// Fifty clients with warm caches, half of them behind a network that delays,
// repeats, loses and cuts, and that no revocation passes: none opens after the
// instant that the receipt states, none seals after the acknowledgement and a
// lease, and however often the request came, there is one destruction and one
// receipt. Those who shared a blob with the erased go on without her.
func TestGuaranteeDrained(t *testing.T) {
	const clients, lease = 50, 1500 * time.Millisecond
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, lease))
	bad := newBadNetwork(t, k, lease/10)
	bad.healed.Store(true) // it begins well

	all, any := groupOf(sdk.All, "alice", "bob"), groupOf(sdk.Any, "alice", "bob")
	sealer := dialKeyd(t, k)
	blob := mustSeal(t, sealer, alice, "what alice said")
	allBlob, anyBlob := sealGroup(t, sealer, all, "said"), sealGroup(t, sealer, any, "said")

	// What clients do, each for itself, again and again.
	type deed struct {
		what string
		do   func(*sdk.Client) (flagged bool, err error)
	}
	deeds := []deed{
		{"open", func(c *sdk.Client) (bool, error) { _, err := c.Open(t.Context(), alice, blob); return false, err }},
		{"seal", func(c *sdk.Client) (bool, error) {
			_, err := c.Seal(t.Context(), alice, []byte("x"))
			return false, err
		}},
		{"open all", func(c *sdk.Client) (bool, error) {
			_, _, err := c.OpenGroup(t.Context(), all, allBlob)
			return false, err
		}},
		{"seal all", func(c *sdk.Client) (bool, error) { _, err := c.SealGroup(t.Context(), all, nil); return false, err }},
		{"open any", func(c *sdk.Client) (bool, error) {
			_, r, err := c.OpenGroup(t.Context(), any, anyBlob)
			return err == nil && len(r.Gone()) == 1 && r.Gone()[0].Index == 0, err
		}},
	}
	type did struct {
		last    [5]time.Time // when the last deed began that succeeded unflagged
		flagged atomic.Int64
		warm    atomic.Int64 // a bit for each deed that succeeded
	}
	var dids [clients]did
	agents := make([]*sdk.Client, clients)
	for i := range agents {
		if i%2 == 0 {
			agents[i] = dialKeyd(t, k)
			continue
		}
		c, err := sdk.Dial(t.Context(), bad.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		agents[i] = c
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	for i, c := range agents {
		wg.Go(func() {
			d := &dids[i]
			for n := i; ctx.Err() == nil; n++ {
				at := n % len(deeds)
				begun := time.Now()
				switch flagged, err := deeds[at].do(c); {
				case err == nil && flagged:
					d.flagged.Add(1)
				case err == nil:
					d.last[at] = begun
					d.warm.Or(1 << at)
				case !errors.Is(err, sdk.ErrErased) && !errors.Is(err, sdk.ErrUnavailable):
					t.Errorf("client %d, %s: %v", i, deeds[at].what, err)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	// Cuts come while the network is bad.
	wg.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(2 * lease)
			if !bad.healed.Load() {
				bad.cut()
			}
		}
	})
	eventually(t, "the caches are warm", func() bool {
		for i := range dids {
			if dids[i].warm.Load() != 1<<len(deeds)-1 {
				return false
			}
		}
		return true
	})

	bad.healed.Store(false)

	// One intent, sent by ten clients at once.
	receipts := make([]*sdk.Destruction, 10)
	var acked time.Time
	var once sync.Once
	var senders sync.WaitGroup
	for i := range receipts {
		senders.Go(func() {
			d, err := agents[i].DestroyKey(t.Context(), destroyAlice())
			if err != nil {
				t.Errorf("destroy: %v", err)
				return
			}
			once.Do(func() { acked = time.Now() })
			receipts[i] = d
		})
	}
	senders.Wait()
	if t.Failed() {
		return
	}
	drained := receipts[0].DrainedBy
	for i, d := range receipts {
		if !bytes.Equal(d.Receipt, receipts[0].Receipt) || !d.DrainedBy.Equal(drained) {
			t.Errorf("request %d got another receipt", i)
		}
	}
	if s, err := sealer.Describe(t.Context(), "acme", "alice"); err != nil || len(s.LedgerIndexes) != 1 {
		t.Errorf("%d entries in the ledger, %v", len(s.LedgerIndexes), err)
	}
	time.Sleep(time.Until(drained.Add(lease)))
	bad.healed.Store(true)
	eventually(t, "all have opened what she had shared, without her", func() bool {
		for i := range dids {
			if dids[i].flagged.Load() == 0 {
				return false
			}
		}
		return true
	})
	stop()
	wg.Wait()

	for i := range dids {
		d := &dids[i]
		for at, last := range d.last {
			limit := drained
			if deeds[at].what == "seal" || deeds[at].what == "seal all" {
				limit = acked.Add(lease)
			}
			if last.After(limit) {
				t.Errorf("client %d: %s succeeded %v too late", i, deeds[at].what, last.Sub(limit))
			}
		}
		var err error
		eventually(t, "the last cut is mended", func() bool {
			_, err = agents[i].Open(t.Context(), alice, blob)
			return !errors.Is(err, sdk.ErrUnavailable)
		})
		if !errors.Is(err, sdk.ErrErased) {
			t.Errorf("client %d, at last: %v", i, err)
		}
		if n := bad.calls.Load(); i == 0 && n == 0 {
			t.Error("nothing went through the bad network")
		}
	}
	t.Logf("%d calls through the bad network; drained %v after the acknowledgement", bad.calls.Load(), drained.Sub(acked))
}
