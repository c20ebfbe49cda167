package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lethe/sdk"
)

// TestGuaranteeLeaseOutlivesKeydAndNoMore kills keyd: clients that hold a lease
// go on until it ends, and then find keyd unavailable, never anybody erased,
// and never a plaintext. G3, G8.
func TestGuaranteeLeaseOutlivesKeydAndNoMore(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	d := deploy(t)
	d.tenant("acme", lease)
	c := d.client()
	who := of("acme", "somebody")
	leased := time.Now()
	blob, err := c.Seal(t.Context(), who, []byte("something"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Open(t.Context(), who, blob); err != nil {
		t.Fatal(err)
	}
	d.keyd.kill()
	killed := time.Now()

	// What was leased goes on; what was not, does not.
	sealed, err := c.Seal(t.Context(), who, []byte("something else"))
	if err != nil && time.Since(leased) < lease/2 {
		t.Errorf("a seal under a lease, keyd down: %v", err)
	}
	if _, err := c.Open(t.Context(), who, blob); err != nil && time.Since(leased) < lease/2 {
		t.Errorf("an open under a lease, keyd down: %v", err)
	}
	short := bounded(t, time.Second)
	if b, err := c.Seal(short, of("acme", "somebody else"), []byte("something")); !errors.Is(err, sdk.ErrUnavailable) || b != nil {
		t.Errorf("a seal without a lease, keyd down: %v", err)
	}
	if _, err := d.client().Open(bounded(t, time.Second), who, blob); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("an open without a lease, keyd down: %v", err)
	}
	var opened int
	for {
		begun := time.Now()
		plain, err := c.Open(bounded(t, time.Second), who, blob)
		if err != nil {
			if !errors.Is(err, sdk.ErrUnavailable) || errors.Is(err, sdk.ErrErased) || plain != nil {
				t.Fatalf("keyd down, the lease over: %v", err)
			}
			break
		}
		// The lease was asked for before the kill.
		if begun.Sub(killed) > lease {
			t.Fatalf("it opens %v after keyd went, with a lease of %v", begun.Sub(killed), lease)
		}
		opened++
		time.Sleep(5 * time.Millisecond)
	}
	if b, err := c.Seal(bounded(t, time.Second), who, []byte("something")); !errors.Is(err, sdk.ErrUnavailable) || b != nil {
		t.Errorf("a seal, keyd down, the lease over: %v %q", err, b)
	}
	t.Logf("%d opens in the %v that the lease lasted", opened, time.Since(killed).Round(time.Millisecond))

	d.start()
	for _, b := range [][]byte{blob, sealed} {
		if b == nil {
			continue
		}
		if err := eventually(t, func(ctx context.Context) error { _, err := c.Open(ctx, who, b); return err }); err != nil {
			t.Errorf("keyd is back: %v", err)
		}
	}
}

// eventually calls fn until it is no longer told that keyd is unavailable.
func eventually(t testing.TB, fn func(context.Context) error) error {
	t.Helper()
	ctx := bounded(t, 20*time.Second)
	for {
		err := fn(ctx)
		if !errors.Is(err, sdk.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestGuaranteePlainSpeechWhenKeydIsFrozen stops keyd without ending it, so
// that connections stay and nothing answers: calls end with their contexts, as
// unavailable. Calls under way when it is killed end too. G8.
func TestGuaranteePlainSpeechWhenKeydIsFrozen(t *testing.T) {
	t.Parallel()
	d := deploy(t)
	d.tenant("acme", time.Minute)
	c := d.client()
	if _, err := c.Seal(t.Context(), of("acme", "somebody"), nil); err != nil {
		t.Fatal(err)
	}
	if err := d.keyd.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for pid := strconv.Itoa(d.keyd.cmd.Process.Pid); ; { // the signal takes a while to reach every thread
		if states, err := exec.Command("ps", "-L", "-o", "state=", "-p", pid).Output(); err != nil {
			t.Fatal(err)
		} else if strings.Trim(string(states), "T\n ") == "" {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	ctx := bounded(t, 500*time.Millisecond)
	if b, err := c.Seal(ctx, of("acme", "another"), []byte("something")); !errors.Is(err, sdk.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) || b != nil {
		t.Errorf("a seal, keyd frozen: %v", err)
	}
	if _, err := c.DestroyKey(ctx, destroyRequest("acme", "another", "frozen")); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("a destroy, keyd frozen: %v", err)
	}
	var calls sync.WaitGroup
	ended := make(chan error, 20)
	long := bounded(t, 30*time.Second)
	for i := range 20 {
		calls.Go(func() {
			_, err := c.Seal(long, of("acme", fmt.Sprint("waiting ", i)), []byte("something"))
			ended <- err
		})
	}
	time.Sleep(200 * time.Millisecond)
	d.keyd.kill()
	calls.Wait()
	close(ended)
	for err := range ended {
		if !errors.Is(err, sdk.ErrUnavailable) {
			t.Errorf("a call under way when keyd was killed: %v", err)
		}
	}
	if long.Err() != nil {
		t.Error("calls under way did not end when keyd was killed")
	}
	// What the frozen keyd was asked, and did or did not do, can be asked again.
	d.start()
	if _, err := c.DestroyKey(bounded(t, 20*time.Second), destroyRequest("acme", "another", "frozen")); err != nil {
		t.Error(err)
	}
	for i := range 20 {
		if err := eventually(t, func(ctx context.Context) error {
			_, err := c.Seal(ctx, of("acme", fmt.Sprint("waiting ", i)), nil)
			return err
		}); err != nil {
			t.Error(err)
		}
	}
}

// TestGuaranteeDrained destroys a subject whose key clients hold: the ones that
// revocations reach stop, those that they do not reach stop when their leases
// end, and all of them no later than the receipt says. Streams too. G3.
func TestGuaranteeDrained(t *testing.T) {
	t.Parallel()
	const lease = 4 * time.Second
	d := deploy(t)
	d.tenant("acme", lease)
	relayed, err := startRelay(filepath.Join(d.dir, "relay.sock"), d.keyd.target())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(relayed.close)
	who, bystander := of("acme", "somebody"), of("acme", "somebody else")
	first := d.client()
	blob, err := first.Seal(t.Context(), who, []byte("something"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := first.Seal(t.Context(), bystander, []byte("something"))
	if err != nil {
		t.Fatal(err)
	}
	var stream bytes.Buffer
	w, err := first.SealWriter(t.Context(), who, &stream)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(random(6 << 20)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}

	type holder struct {
		name   string
		client *sdk.Client
	}
	behind, err := sdk.Dial(t.Context(), relayed.target())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { behind.Close() })
	holders := []holder{
		{"a client that listens", d.client()},
		{"a client that does not listen", d.client(sdk.WithRevocations(false))},
		{"a client whose stream is mute", behind},
	}
	readers := make([]*sdk.Reader, len(holders))
	for i, h := range holders {
		for _, b := range []struct {
			t    sdk.Target
			blob []byte
		}{{who, blob}, {bystander, other}} {
			if _, err := h.client.Open(t.Context(), b.t, b.blob); err != nil {
				t.Fatalf("%s: %v", h.name, err)
			}
		}
		if readers[i], err = h.client.OpenReader(t.Context(), who, bytes.NewReader(stream.Bytes())); err != nil {
			t.Fatalf("%s: %v", h.name, err)
		}
		t.Cleanup(func() { readers[i].Close() })
		if _, err := readers[i].Read(make([]byte, 1000)); err != nil {
			t.Fatalf("%s: %v", h.name, err)
		}
	}
	relayed.cut.Store(true)
	asked := time.Now()
	done, err := d.client().DestroyKey(t.Context(), destroyRequest("acme", who.Subject, "request"))
	if err != nil {
		t.Fatal(err)
	}
	acknowledged := time.Now()
	if done.DrainedBy.Before(asked.Add(lease)) || done.DrainedBy.After(acknowledged.Add(lease+30*time.Second)) {
		t.Errorf("drained by %v after the request, with a lease of %v", done.DrainedBy.Sub(asked), lease)
	}
	var wait sync.WaitGroup
	for i, h := range holders {
		wait.Go(func() {
			opens := 0
			for {
				begun := time.Now()
				_, err := h.client.Open(t.Context(), who, blob)
				if err == nil {
					if begun.After(done.DrainedBy) {
						t.Errorf("%s opens after the instant that the receipt states", h.name)
						return
					}
					opens++
					time.Sleep(2 * time.Millisecond)
					continue
				}
				if !errors.Is(err, sdk.ErrErased) {
					t.Errorf("%s: %v", h.name, err)
				}
				break
			}
			stopped := time.Since(acknowledged)
			t.Logf("%s opened %d times more, for %v", h.name, opens, stopped.Round(time.Millisecond))
			// A reader that began before stops, too, and without a clean end.
			n, err := readers[i].WriteTo(&bytes.Buffer{})
			if errors.Is(err, sdk.ErrUnavailable) {
				// keyd's refusal to renew its lease came after the end of it.
				_, err = h.client.OpenReader(t.Context(), who, bytes.NewReader(stream.Bytes()))
			}
			if err == nil || n >= 6<<20 {
				t.Errorf("%s reads its stream to the end", h.name)
			} else if !errors.Is(err, sdk.ErrErased) {
				t.Errorf("%s, its stream: %v", h.name, err)
			}
			if _, err := h.client.Open(t.Context(), bystander, other); err != nil {
				t.Errorf("%s, another subject: %v", h.name, err)
			}
		})
	}
	wait.Wait()
	if !relayed.awaitSwallowed() {
		t.Error("nothing was pushed to the relay")
	}
}

// TestGuaranteeDrainedByPush destroys a subject whose key clients may keep for
// an hour: the revocation that is pushed stops them all long before, through a
// restart of keyd too. G3.
func TestGuaranteeDrainedByPush(t *testing.T) {
	t.Parallel()
	const clients = 20
	d := deploy(t)
	d.tenant("acme", time.Hour)
	pinned := d.pinned()
	bystander := of("acme", "somebody else")
	holders := make([]*sdk.Client, clients)
	for i := range holders {
		holders[i] = d.client()
	}
	other, err := holders[0].Seal(t.Context(), bystander, []byte("something"))
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		who := of("acme", fmt.Sprint("subject ", round))
		blob, err := holders[0].Seal(t.Context(), who, []byte("something"))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range holders {
			for _, b := range []struct {
				t    sdk.Target
				blob []byte
			}{{who, blob}, {bystander, other}} {
				if err := eventually(t, func(ctx context.Context) error { _, err := c.Open(ctx, b.t, b.blob); return err }); err != nil {
					t.Fatal(err)
				}
			}
		}
		if round == 2 {
			// The streams are down when it happens, and catch up.
			d.restart()
		}
		done, err := d.client().DestroyKey(t.Context(), destroyRequest("acme", who.Subject, who.Subject))
		if err != nil {
			t.Fatal(err)
		}
		if until := time.Until(done.DrainedBy); until < 50*time.Minute {
			t.Errorf("the receipt promises %v, with leases of an hour", until)
		}
		l := &life{subject: who.Subject, receipt: done.Receipt}
		if err := l.verifies(pinned); err != nil {
			t.Error(err)
		}
		patience := bounded(t, 30*time.Second)
		for i, c := range holders {
			for {
				_, err := c.Open(patience, who, blob)
				if errors.Is(err, sdk.ErrErased) {
					break
				}
				if err != nil && !errors.Is(err, sdk.ErrUnavailable) || patience.Err() != nil {
					t.Fatalf("round %d, client %d: %v", round, i, err)
				}
				time.Sleep(time.Millisecond)
			}
			if _, err := c.Open(t.Context(), bystander, other); err != nil {
				t.Errorf("round %d, client %d, another subject: %v", round, i, err)
			}
		}
	}
}
