package main

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"lethe/sdk"
	"lethe/sdk/envelope"
)

// TestGuaranteeOneKeyForFiftyFirstSeals has fifty clients, each with a
// connection of its own, seal first for one subject at the same instant: there
// is one key, and every client opens every blob. G1, G7.
func TestGuaranteeOneKeyForFiftyFirstSeals(t *testing.T) {
	const clients, rounds = 50, 4
	d := deploy(t)
	d.tenant("acme", time.Minute)
	all := make([]*sdk.Client, clients)
	for i := range all {
		all[i] = d.client()
		if _, err := all[i].Describe(t.Context(), "acme", "nobody"); err != nil { // connects
			t.Fatal(err)
		}
	}
	for round := range rounds {
		who := of("acme", fmt.Sprint("subject ", round))
		plain, blobs := make([][]byte, clients), make([][]byte, clients)
		together(t, clients, func(i int) (err error) {
			plain[i] = random(64)
			blobs[i], err = all[i].Seal(t.Context(), who, plain[i])
			return err
		})
		ids := make(map[envelope.KeyID]bool)
		for _, b := range blobs {
			h, _, err := envelope.ParseHeader(b)
			if err != nil {
				t.Fatal(err)
			}
			for _, id := range h.Recipients {
				ids[id] = true
			}
		}
		if len(ids) != 1 {
			t.Fatalf("round %d: %d keys were made for one subject", round, len(ids))
		}
		together(t, clients, func(i int) error {
			for n, b := range blobs {
				got, err := all[i].Open(t.Context(), who, b)
				if err != nil {
					return err
				}
				if !bytes.Equal(got, plain[n]) {
					return errors.New("a blob opens to something else")
				}
			}
			return nil
		})
	}
}

// together calls fn n times at once.
func together(t testing.TB, n int, fn func(i int) error) {
	t.Helper()
	var ready, done sync.WaitGroup
	ready.Add(n)
	errs := make([]error, n)
	for i := range n {
		done.Go(func() {
			ready.Done()
			ready.Wait()
			errs[i] = fn(i)
		})
	}
	done.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestGuaranteeNoKeyAfterADestroyThatRacesFirstUse races a destroy with first
// seals, over and over: whichever comes first, no seal that begins after the
// acknowledgement gets a key, and what was sealed before it does not open. G2.
func TestGuaranteeNoKeyAfterADestroyThatRacesFirstUse(t *testing.T) {
	const rounds, sealers = 60, 6
	d := deploy(t)
	d.tenant("acme", time.Minute)
	clients := make([]*sdk.Client, sealers+2)
	for i := range clients {
		clients[i] = d.client()
		if _, err := clients[i].Describe(t.Context(), "acme", "nobody"); err != nil {
			t.Fatal(err)
		}
	}
	pinned := d.pinned()
	won, lost := 0, 0
	delay := time.Millisecond // of the destroy; found by trying
	for round := range rounds {
		who := of("acme", fmt.Sprint("subject ", round))
		blobs := make([][]byte, sealers)
		var receipt []byte
		together(t, sealers+1, func(i int) error {
			if i == sealers {
				time.Sleep(delay)
				done, err := clients[i].DestroyKey(t.Context(), destroyRequest("acme", who.Subject, "race "+who.Subject))
				if err != nil {
					return err
				}
				receipt = done.Receipt
				// A seal that begins now, in the client that knows.
				if _, err := clients[i].Seal(t.Context(), who, []byte("late")); !errors.Is(err, sdk.ErrErased) {
					return fmt.Errorf("a seal after the acknowledgement: %w", err)
				}
				return nil
			}
			var err error
			blobs[i], err = clients[i].Seal(t.Context(), who, []byte("early"))
			if errors.Is(err, sdk.ErrErased) {
				return nil
			}
			return err
		})
		early := 0
		for _, b := range blobs {
			if b == nil {
				lost++
				continue
			}
			won, early = won+1, early+1
			if _, err := clients[sealers+1].Open(t.Context(), who, b); !errors.Is(err, sdk.ErrErased) {
				t.Fatalf("round %d: a blob sealed before the destroy: %v", round, err)
			}
		}
		switch early {
		case 0:
			delay = min(2*delay, 200*time.Millisecond)
		case sealers:
			delay /= 2
		}
		if _, err := clients[sealers+1].Seal(t.Context(), who, []byte("late")); !errors.Is(err, sdk.ErrErased) {
			t.Fatalf("round %d: a seal after the acknowledgement: %v", round, err)
		}
		status, err := clients[0].Describe(t.Context(), "acme", who.Subject)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range status.Classes {
			if c.KeyID != (envelope.KeyID{}) {
				t.Fatalf("round %d: a key lives", round)
			}
		}
		l := &life{subject: who.Subject, receipt: receipt}
		if err := l.verifies(pinned); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d seals came first, %d the destroy", won, lost)
	if won == 0 || lost == 0 {
		t.Error("the race always went one way")
	}
}
