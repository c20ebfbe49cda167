package main

import (
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
)

// epochs asks keyd how its epochs are.
func (d *deployment) epochs() []*keydv1.Epoch {
	d.t.Helper()
	res, err := keydv1.NewAdminServiceClient(d.conn()).GetEpochs(d.t.Context(), &keydv1.GetEpochsRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	return res.Epochs
}

// TestKilledWhileEpochsTurn kills keyd in the middle of creates and destroys
// while its epochs turn, drain, retire and close: nobody is lost, nobody comes
// back, every epoch closes, and the receipts end final. G2, G4.
func TestKilledWhileEpochsTurn(t *testing.T) {
	const cycles, clients, workers = 10, 4, 32
	d := deploy(t, "--kek-lease", "500ms", "--soak", "500ms", "--root-waiting", "500ms", "--rewrap-rate", "3000")
	d.tenant("acme", time.Minute)
	pinned := d.pinned()
	var lives []*life
	states := make(map[keydv1.EpochState]int) // in which keyd was killed
	for cycle := range cycles {
		admin := keydv1.NewAdminServiceClient(d.conn())
		if _, err := admin.TurnEpoch(t.Context(), &keydv1.TurnEpochRequest{}); err != nil {
			t.Fatal(err)
		}
		begun, _ := d.work(cycle, clients, workers, func() {
			time.Sleep(time.Duration(cycle) * 150 * time.Millisecond)
			for _, e := range d.epochs() {
				states[e.State]++
			}
			d.keyd.kill()
		})
		lives = append(lives, begun...)
		d.start()
		d.verify(begun, pinned)
	}
	t.Logf("keyd was killed while epochs were %v", states)
	if states[keydv1.EpochState_EPOCH_STATE_CLOSED] == 0 || len(states) < 4 {
		t.Error("too little happened to show anything")
	}
	deadline := time.Now().Add(2 * time.Minute)
	for {
		all := d.epochs()
		left := 0
		for _, e := range all {
			if e.State != keydv1.EpochState_EPOCH_STATE_CLOSED {
				left++
			}
			if e.RowsDamaged != 0 {
				t.Fatalf("damaged: %v", e)
			}
		}
		if left == 1 && len(all) > cycles/2 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the epochs do not close: %v", all)
		}
		time.Sleep(100 * time.Millisecond)
	}
	d.verify(lives, pinned)
	// The first destruction that was acknowledged, in an epoch long closed.
	for _, l := range lives {
		if l.receipt == nil {
			continue
		}
		d.final(l, pinned)
		break
	}
}
