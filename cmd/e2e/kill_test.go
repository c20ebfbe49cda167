package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
)

// life is what one worker knows of one subject.
type life struct {
	subject string
	plain   []byte
	blob    []byte // once the seal was acknowledged
	asked   bool   // its destruction was asked for
	receipt []byte // once the destruction was acknowledged
}

func (l *life) request() sdk.DestroyRequest {
	return destroyRequest("acme", l.subject, "destroy "+l.subject)
}

// TestGuaranteeDurableAndFinalAcrossKills kills keyd in the middle of hundreds
// of creates and destroys, over and over: whatever was acknowledged holds, and
// what was asked for and not answered can be asked again. G1, G2, G5.
func TestGuaranteeDurableAndFinalAcrossKills(t *testing.T) {
	const cycles, clients, workers = 16, 6, 48
	d := deploy(t)
	d.tenant("acme", time.Minute)
	pinned := d.pinned()
	var lives []*life
	var checkpoint []byte
	interrupted := 0
	for cycle := range cycles {
		begun, unanswered := d.work(cycle, clients, workers, d.keyd.kill)
		lives = append(lives, begun...)
		interrupted += unanswered
		for range cycle % 3 { // now and then it is killed while it starts, too
			k, err := launchKeyd(filepath.Join(bin, "keyd"), d.data)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(rand.N(60 * time.Millisecond))
			k.kill()
		}
		d.start()
		d.verify(begun, pinned)
		checkpoint = d.extends(checkpoint, pinned)
	}
	d.verify(lives, pinned)
	sealed, destroyed := 0, 0
	for _, l := range lives {
		if l.blob != nil {
			sealed++
		}
		if l.receipt != nil {
			destroyed++
		}
	}
	t.Logf("%d kills, %d acknowledged creates, %d acknowledged destroys, %d calls unanswered when the process died", cycles, sealed, destroyed, interrupted)
	if sealed < 100*cycles || destroyed < 20*cycles || interrupted < cycles {
		t.Error("too little happened to show anything")
	}
}

// work has workers seal for new subjects and destroy some of them, calls end
// meanwhile, which ends keyd, and returns the subjects and how many calls were
// unanswered.
func (d *deployment) work(cycle, clients, workers int, end func()) (lives []*life, unanswered int) {
	d.t.Helper()
	ctx, cancel := context.WithCancel(d.t.Context())
	defer cancel()
	shared := make([]*sdk.Client, clients)
	for i := range shared {
		c, err := sdk.Dial(ctx, d.keyd.target())
		if err != nil {
			d.t.Fatal(err)
		}
		defer c.Close()
		shared[i] = c
	}
	var mu sync.Mutex
	var dead atomic.Bool // the process is, or is about to be
	var sealed, destroyed atomic.Int64
	var work sync.WaitGroup
	var broken atomic.Pointer[error]
	for w := range workers {
		work.Go(func() {
			var mine []*life
			defer func() {
				mu.Lock()
				lives = append(lives, mine...)
				mu.Unlock()
			}()
			for n := 0; ctx.Err() == nil; n++ {
				c := shared[(w+n)%clients]
				var err error
				if n%4 == 3 {
					l := mine[rand.IntN(len(mine))]
					if l.asked || l.blob == nil {
						continue
					}
					l.asked = true
					var done *sdk.Destruction
					if done, err = c.DestroyKey(ctx, l.request()); err == nil {
						l.receipt = done.Receipt
						destroyed.Add(1)
					}
				} else {
					l := &life{subject: fmt.Sprintf("subject %d %d %d", cycle, w, n), plain: random(200)}
					mine = append(mine, l)
					if l.blob, err = c.Seal(ctx, of("acme", l.subject), l.plain); err == nil {
						sealed.Add(1)
					}
				}
				if err != nil {
					mu.Lock()
					unanswered++
					mu.Unlock()
					if !dead.Load() {
						err = fmt.Errorf("before keyd was ended: %w", err)
						broken.Store(&err)
						return
					}
					if !errors.Is(err, sdk.ErrUnavailable) && !errors.Is(err, context.Canceled) {
						broken.Store(&err)
						return
					}
				}
			}
		})
	}
	enoughSealed, enoughDestroyed := 100+rand.Int64N(400), 20+rand.Int64N(60)
	for begun := time.Now(); broken.Load() == nil && time.Since(begun) < 30*time.Second; time.Sleep(time.Millisecond) {
		if sealed.Load() >= enoughSealed && destroyed.Load() >= enoughDestroyed {
			break
		}
	}
	dead.Store(true)
	end()
	cancel()
	work.Wait()
	if err := broken.Load(); err != nil {
		d.t.Fatal(*err)
	}
	return lives, unanswered
}

// verify checks everything that is known of the subjects, with clients that
// have seen nothing of it.
func (d *deployment) verify(lives []*life, pinned *receipt.Keys) {
	d.t.Helper()
	ctx := bounded(d.t, 2*time.Minute)
	c, err := sdk.Dial(ctx, d.keyd.target(), sdk.WithRevocations(false))
	if err != nil {
		d.t.Fatal(err)
	}
	defer c.Close()
	ledger := keydv1.NewLedgerServiceClient(c.Conn())
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(32)
	for _, l := range lives {
		g.Go(func() error {
			if l.blob == nil {
				// Not acknowledged: it may have a key or not; there is never
				// a second one.
				return l.sealAgain(ctx, c)
			}
			if l.asked && l.receipt == nil {
				done, err := c.DestroyKey(ctx, l.request())
				if err != nil {
					return fmt.Errorf("a request to destroy, repeated: %w", err)
				}
				l.receipt = done.Receipt
			}
			plain, err := c.Open(ctx, of("acme", l.subject), l.blob)
			if l.receipt == nil {
				if err != nil {
					return fmt.Errorf("an acknowledged key is lost: %w", err)
				}
				if !bytes.Equal(plain, l.plain) {
					return errors.New("it opens to something else")
				}
				return nil
			}
			if !errors.Is(err, sdk.ErrErased) {
				return fmt.Errorf("an acknowledged destroy is undone: open: %w", err)
			}
			if _, err := c.Seal(ctx, of("acme", l.subject), l.plain); !errors.Is(err, sdk.ErrErased) {
				return fmt.Errorf("an acknowledged destroy is undone: seal: %w", err)
			}
			return l.sameReceipt(ctx, c, ledger, pinned)
		})
	}
	if err := g.Wait(); err != nil {
		d.t.Fatal(err)
	}
}

func (l *life) sealAgain(ctx context.Context, c *sdk.Client) error {
	blob, err := c.Seal(ctx, of("acme", l.subject), l.plain)
	if err != nil {
		return fmt.Errorf("a first seal, repeated: %w", err)
	}
	l.blob = blob
	s, err := c.Describe(ctx, "acme", l.subject)
	if err != nil {
		return err
	}
	if len(s.Classes) != 1 || len(s.Classes[0].DeadKeyIDs) != 0 {
		return errors.New("a first seal, repeated, made a second key")
	}
	return nil
}

// sameReceipt checks that the receipt of the acknowledgement still verifies,
// that a repeated request is given the same, and that what keyd gives by
// request id begins with it: later stages may follow.
func (l *life) sameReceipt(ctx context.Context, c *sdk.Client, ledger keydv1.LedgerServiceClient, pinned *receipt.Keys) error {
	if err := l.verifies(pinned); err != nil {
		return err
	}
	res, err := ledger.GetReceipt(ctx, &keydv1.GetReceiptRequest{
		Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: l.request().RequestID},
	})
	if err != nil {
		return err
	}
	again, err := c.DestroyKey(ctx, l.request())
	if err != nil {
		return err
	}
	if !bytes.Equal(again.Receipt, l.receipt) || !sameFirst(res.Receipt, l.receipt) {
		return errors.New("the same request id has another receipt")
	}
	_, err = receipt.Verify(res.Receipt, pinned)
	return err
}

// sameFirst reports whether two receipts begin with one and the same entry.
func sameFirst(a, b []byte) bool {
	x, err1 := receipt.Parse(a)
	y, err2 := receipt.Parse(b)
	return err1 == nil && err2 == nil && reflect.DeepEqual(x[0], y[0])
}

// verifies checks that the receipt is of a destruction, and verifies offline.
func (l *life) verifies(pinned *receipt.Keys) error {
	v, err := receipt.Verify(l.receipt, pinned)
	if err != nil {
		return err
	}
	if len(v.Entries) != 1 || v.Entries[0].Statement.Kind != receipt.Destroyed {
		return errors.New("the receipt is not that of a destruction")
	}
	return nil
}

// extends checks that the ledger's checkpoint extends an older one.
func (d *deployment) extends(older []byte, pinned *receipt.Keys) (newer []byte) {
	d.t.Helper()
	ctx := d.t.Context()
	c, err := sdk.Dial(ctx, d.keyd.target())
	if err != nil {
		d.t.Fatal(err)
	}
	defer c.Close()
	ledger := keydv1.NewLedgerServiceClient(c.Conn())
	res, err := ledger.GetCheckpoint(ctx, &keydv1.GetCheckpointRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	if older == nil {
		return res.Checkpoint
	}
	from, err := pinned.Open(older)
	if err != nil {
		d.t.Fatal(err)
	}
	to, err := pinned.Open(res.Checkpoint)
	if err != nil {
		d.t.Fatal(err)
	}
	p, err := ledger.GetConsistencyProof(ctx, &keydv1.GetConsistencyProofRequest{OldSize: uint64(from.Size), NewSize: uint64(to.Size)})
	if err != nil {
		d.t.Fatal(err)
	}
	if err := receipt.VerifyConsistency(pinned, older, res.Checkpoint, p.Hashes); err != nil {
		d.t.Fatal(err)
	}
	return res.Checkpoint
}

// TestKilledWhileItInitialises kills keyd again and again while it makes its
// store, KMS file and anchor: it can always be started once more.
func TestKilledWhileItInitialises(t *testing.T) {
	for round := range 6 {
		dir := tempDir(t)
		d := &deployment{t: t, dir: dir, data: filepath.Join(dir, "keyd")}
		for kill := range 8 {
			k, err := launchKeyd(filepath.Join(bin, "keyd"), d.data)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(rand.N(time.Duration(20+15*kill) * time.Millisecond))
			if !k.alive() {
				t.Fatalf("round %d, start %d: keyd ended by itself:\n%s", round, kill, k.said())
			}
			k.kill()
		}
		d.start()
		d.tenant("acme", time.Minute)
		c := d.client()
		blob, err := c.Seal(t.Context(), of("acme", "somebody"), []byte("something"))
		if err != nil {
			t.Fatal(err)
		}
		d.restart()
		if _, err := d.client().Open(t.Context(), of("acme", "somebody"), blob); err != nil {
			t.Fatal(err)
		}
		d.keyd.kill()
		if t.Failed() {
			b, _ := os.ReadFile(d.keyd.stderr)
			t.Logf("%s", b)
		}
	}
}
