package main

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// TestStopsCleanly asks keyd to stop while calls are under way and streams are
// open: it ends in time with exit code 0, and what it acknowledged holds.
func TestStopsCleanly(t *testing.T) {
	for i, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(signal.String(), func(t *testing.T) {
			d := deploy(t)
			d.tenant("acme", time.Minute)
			pinned := d.pinned()
			watcher, err := keydv1.NewKeyServiceClient(d.conn()).WatchRevocations(t.Context(), &keydv1.WatchRevocationsRequest{Tenants: []string{"acme"}})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := watcher.Recv(); err != nil {
				t.Fatal(err)
			}
			lives, unanswered := d.work(i, 4, 24, func() {
				if err := d.keyd.cmd.Process.Signal(signal); err != nil {
					t.Error(err)
				}
				select {
				case <-d.keyd.exited:
				case <-time.After(30 * time.Second):
					t.Error("it does not stop")
					d.keyd.kill()
				}
			})
			if d.keyd.err != nil {
				t.Errorf("it ended with %v", d.keyd.err)
			}
			t.Logf("%d subjects; %d calls refused while it stopped", len(lives), unanswered)
			for err == nil {
				_, err = watcher.Recv()
			}
			d.start()
			d.verify(lives, pinned)
		})
	}
}

// TestKeepsNothingOfGoneClients has hundreds of clients come, watch and go:
// keyd keeps neither their descriptors nor their goroutines.
func TestKeepsNothingOfGoneClients(t *testing.T) {
	metrics := freeAddress(t)
	d := deploy(t, "--metrics", metrics)
	d.tenant("acme", time.Minute)
	d.sample(metrics) // opens the connection by which samples come
	before := d.settled(metrics, d.sample(metrics))
	for round := range 4 {
		clients := make([]*sdk.Client, 100)
		var work sync.WaitGroup
		errs := make([]error, len(clients))
		for i := range clients {
			work.Go(func() {
				c, err := sdk.Dial(t.Context(), d.keyd.target())
				if err != nil {
					errs[i] = err
					return
				}
				clients[i] = c
				_, errs[i] = c.Seal(t.Context(), of("acme", fmt.Sprint("subject ", round, i)), nil)
			})
		}
		work.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		during := d.sample(metrics)
		if during.descriptors < before.descriptors+len(clients)-5 {
			t.Errorf("%v with %d clients, %v without: they were not seen", during, len(clients), before)
		}
		for _, c := range clients {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	after := d.settled(metrics, before)
	if after.descriptors > before.descriptors+5 || after.goroutines > before.goroutines+5 {
		t.Errorf("%v before, %v after 400 clients", before, after)
	}
}
