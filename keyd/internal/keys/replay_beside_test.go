package keys_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"lethe/keyd/anchor/s3"
	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/ledger"
)

// slow is an anchor whose calls each take a while of their own.
type slow struct{ ledger.Anchor }

func (slow) wait() { time.Sleep(rand.N(300 * time.Microsecond)) }

func (a slow) Newest(ctx context.Context) (ledger.Object, error) {
	a.wait()
	return a.Anchor.Newest(ctx)
}

func (a slow) Get(ctx context.Context, size uint64) (ledger.Object, error) {
	a.wait()
	return a.Anchor.Get(ctx, size)
}

func (a slow) Put(ctx context.Context, o ledger.Object) error {
	a.wait()
	defer a.wait()
	return a.Anchor.Put(ctx, o)
}

func (a slow) Enter(ctx context.Context, t ledger.Term) (ledger.Term, error) {
	a.wait()
	defer a.wait()
	return a.Anchor.Enter(ctx, t)
}

// agree verifies that no two objects of an anchor contradict each other, and
// returns how many entries it has.
func agree(t *testing.T, a ledger.Anchor) (size uint64) {
	t.Helper()
	var all []ledger.Object
	for at := uint64(0); ; {
		o, err := a.Get(t.Context(), at)
		if errors.Is(err, ledger.ErrNoObject) {
			return at
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range all {
			if ledger.Contradicts(o, other) {
				t.Fatalf("objects [%d, %d) and [%d, %d) have different entries", o.From, o.Size, other.From, other.Size)
			}
		}
		all = append(all, o)
		at = o.Size
	}
}

// copyAnchor puts what is in one anchor, whose last term was left, into another.
func copyAnchor(t *testing.T, from, to ledger.Anchor) {
	t.Helper()
	for at := uint64(0); ; {
		o, err := from.Get(t.Context(), at)
		if errors.Is(err, ledger.ErrNoObject) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := to.Put(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		at = o.Size
	}
	newest, err := from.Enter(t.Context(), ledger.Term{})
	if err != nil {
		t.Fatal(err)
	}
	for n := uint64(1); n <= newest.Number; n++ {
		if _, err := to.Enter(t.Context(), ledger.Term{Number: n, Holder: newest.Holder}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReplayBesideOneThatServes: a copy is replayed while the keyd of the store
// serves on, and destroys. The anchor holds one history; whatever was
// acknowledged, by either, is in it; and the replayed store starts without
// waiting for anybody.
func TestReplayBesideOneThatServes(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		for range 30 {
			replayBeside(t, func(r *rig) ledger.Anchor { return r.anchor })
		}
	})
	t.Run("s3", func(t *testing.T) {
		for range 6 {
			replayBeside(t, func(r *rig) ledger.Anchor {
				backend := s3mem.New()
				if err := backend.CreateBucket("anchors"); err != nil {
					t.Fatal(err)
				}
				srv := httptest.NewServer(gofakes3.New(backend, gofakes3.WithLogger(gofakes3.DiscardLog())).Server())
				t.Cleanup(srv.Close)
				a, err := s3.Open(t.Context(), s3.Options{
					Bucket: "anchors", Region: "eu-central-1", Endpoint: srv.URL, PathStyle: true,
					Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""),
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { a.Close() })
				copyAnchor(t, r.anchor, a)
				return a
			})
		}
	})
}

func replayBeside(t *testing.T, place func(*rig) ledger.Anchor) {
	r := newOwnedRig(t)
	for i := range 3 {
		r.seal(fmt.Sprint("person ", i), "memory")
	}
	r.close()
	copied := r.allRows()
	anchor := place(r)
	cfg := r.config()
	cfg.Anchor, cfg.AnchorTimeout = slow{anchor}, 10*time.Second
	one, err := keys.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	acknowledged := make(map[string]string) // subjects, by request
	destroy := func(k *keys.Keys, i int) error {
		subject, request := fmt.Sprint("person ", i), fmt.Sprint("d", i)
		_, err := k.DestroyKey(t.Context(), destroyRequest(subject, request))
		if err == nil {
			acknowledged[request] = subject
		}
		return err
	}
	before := rand.N(3)
	for i := range before {
		if err := destroy(one, i); err != nil {
			t.Fatal(err)
		}
	}
	var serving sync.WaitGroup
	over := make(chan struct{}) // one has seen that it was taken over from
	serving.Go(func() {
		defer close(over)
		for i := before; one.Serving() == nil; i++ {
			destroy(one, i)
		}
	})
	time.Sleep(rand.N(3 * time.Millisecond))

	// Between the term and what follows, time passes until one has seen it. A
	// replay that is cut off, anywhere, is run again.
	other := cfg
	other.Store, other.TakeOver = owned{storeOf(copied)}, time.Nanosecond
	waited := false
	o := keys.ReplayOptions{Waits: func(time.Duration) {
		waited = true
		<-over
	}}
	for {
		ctx, cancel := context.WithCancel(t.Context())
		if !waited && rand.N(2) == 0 {
			time.AfterFunc(rand.N(5*time.Millisecond), cancel)
		}
		_, err := keys.Replay(ctx, other, o)
		cancelled := ctx.Err() != nil
		cancel()
		if err == nil {
			break
		}
		if !cancelled {
			t.Fatal(err)
		}
	}
	serving.Wait()
	if err := one.Serving(); !errors.Is(err, ledger.ErrSuperseded) {
		t.Errorf("the one that served: %v", err)
	}
	if err := destroy(one, 1000); err == nil {
		t.Error("it acknowledges a destruction after the replay")
	}
	agree(t, anchor)

	other.TakeOver = time.Hour // which it does not wait
	two, err := keys.Open(t.Context(), other)
	if err != nil {
		t.Fatalf("after the replay: %v", err)
	}
	defer two.Close()
	one.Close()
	if err := destroy(two, 2000); err != nil {
		t.Fatal(err)
	}
	size := agree(t, anchor)
	for request, subject := range acknowledged {
		if _, err := two.DestroyKey(t.Context(), destroyRequest(subject, request)); err != nil {
			t.Errorf("%s, which was acknowledged: %v", request, err)
		}
	}
	if now := agree(t, anchor); now != size {
		t.Errorf("of what was acknowledged, %d entries were not in the ledger", now-size)
	}
}
