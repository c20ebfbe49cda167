package keys

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

var publicEpochStates = map[storev1.EpochState]keydv1.EpochState{
	storev1.EpochState_EPOCH_STATE_PREPARING: keydv1.EpochState_EPOCH_STATE_PREPARING,
	storev1.EpochState_EPOCH_STATE_OPEN:      keydv1.EpochState_EPOCH_STATE_OPEN,
	storev1.EpochState_EPOCH_STATE_DRAINING:  keydv1.EpochState_EPOCH_STATE_DRAINING,
	storev1.EpochState_EPOCH_STATE_DRAINED:   keydv1.EpochState_EPOCH_STATE_DRAINED,
	storev1.EpochState_EPOCH_STATE_RETIRING:  keydv1.EpochState_EPOCH_STATE_RETIRING,
	storev1.EpochState_EPOCH_STATE_CLOSED:    keydv1.EpochState_EPOCH_STATE_CLOSED,
	storev1.EpochState_EPOCH_STATE_ABANDONED: keydv1.EpochState_EPOCH_STATE_ABANDONED,
}

// waitsForKeeper is what an epoch waits for whose root is kept.
const waitsForKeeper = "an operator, who keeps its root, to say 'lethe epoch resume'"

// Epochs tells of every epoch how far it has come, the oldest first, and why
// the background work of this keyd does not go on, if it does not.
func (k *Keys) Epochs(ctx context.Context) (epochs []*keydv1.Epoch, problem string, err error) {
	at := func(ms int64) *timestamppb.Timestamp {
		if ms == 0 {
			return nil
		}
		return timestamppb.New(time.UnixMilli(ms))
	}
	now := k.now()
	d := k.duties
	if err := d.problems(); err != nil {
		problem = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	d.mu.Lock()
	waiting := make(map[uint32]string, len(d.waiting))
	for n, w := range d.waiting {
		waiting[n] = w
	}
	d.mu.Unlock()
	err = k.store.View(ctx, func(r Reader) error {
		rows, err := allEpochs(r)
		if err != nil {
			return err
		}
		for _, e := range rows {
			// The duties may not have come by since it was kept, or resumed.
			switch {
			case e.Kept && e.State == storev1.EpochState_EPOCH_STATE_DRAINED && e.DroppedMs != 0:
				waiting[e.Number] = waitsForKeeper
			case waiting[e.Number] == waitsForKeeper:
				delete(waiting, e.Number)
			}
			out := &keydv1.Epoch{
				Number: e.Number, State: publicEpochStates[e.State], RootId: e.RootId, KmsKind: e.KmsKind,
				Opened: at(e.OpenedMs), PlannedEnd: at(e.PlannedEndMs), FinalBy: at(e.FinalByMs),
				Draining: at(e.DrainingMs), Drained: at(e.DrainedMs), RootDisabled: at(e.DisabledMs),
				Retiring: at(e.RetiringMs), Due: at(e.DestroyAtMs), Closed: at(e.ClosedMs),
				Late: late(e, now), Kept: e.Kept, TurnRequested: e.TurnRequested, WaitingFor: waiting[e.Number],
			}
			if e.SanitisedAt != 0 {
				out.Sanitised = at(e.DroppedMs)
			}
			var p storev1.Rewrap
			switch err := getRow(r, rewrapKey(e.Number), &p); {
			case err == nil:
				out.RowsTotal, out.RowsRewrapped, out.RowsDead, out.RowsDamaged = p.Total, p.Rewrapped, p.Dead, p.Damaged
				if e.State == storev1.EpochState_EPOCH_STATE_DRAINING {
					out.Eta = eta(&p)
				}
			case !errors.Is(err, ErrNotFound):
				return err
			}
			epochs = append(epochs, out)
		}
		return nil
	})
	return epochs, problem, err
}

// late says that receipts have stated a time that has passed.
func late(e *storev1.Epoch, now time.Time) bool {
	switch e.State {
	case storev1.EpochState_EPOCH_STATE_CLOSED, storev1.EpochState_EPOCH_STATE_ABANDONED, storev1.EpochState_EPOCH_STATE_PREPARING:
		return false
	}
	return e.FinalByMs != 0 && now.UnixMilli() > e.FinalByMs
}

// eta estimates from the speed so far; nil while there is none.
func eta(p *storev1.Rewrap) *durationpb.Duration {
	done, took := p.Rewrapped+p.Dead+p.Damaged, p.UpdatedMs-p.StartedMs
	switch {
	case p.Done || done >= p.Total:
		return durationpb.New(0)
	case done == 0 || took <= 0:
		return nil
	}
	left := float64(took) / float64(done) * float64(p.Total-done)
	return durationpb.New(time.Duration(left) * time.Millisecond)
}

// EpochGauges are what metrics tell of the epochs.
type EpochGauges struct {
	// Open is the number of the open epoch.
	Open uint32
	// Unclosed counts the past epochs whose root is not destroyed yet, and Late
	// those, the open one included, whose final_by has passed.
	Unclosed, Late int
	// Rows of the epoch that drains, and those that were dealt with.
	Rows, RowsDone uint64
}

// EpochGauges reads the epochs' rows.
func (k *Keys) EpochGauges(ctx context.Context) (g EpochGauges, err error) {
	now := k.now()
	err = k.store.View(ctx, func(r Reader) error {
		rows, err := allEpochs(r)
		if err != nil {
			return err
		}
		for _, e := range rows {
			if late(e, now) {
				g.Late++
			}
			switch e.State {
			case storev1.EpochState_EPOCH_STATE_OPEN:
				g.Open = e.Number
			case storev1.EpochState_EPOCH_STATE_DRAINING:
				g.Unclosed++
				var p storev1.Rewrap
				if err := getRow(r, rewrapKey(e.Number), &p); err != nil && !errors.Is(err, ErrNotFound) {
					return err
				}
				g.Rows, g.RowsDone = p.Total, p.Rewrapped+p.Dead+p.Damaged
			case storev1.EpochState_EPOCH_STATE_DRAINED, storev1.EpochState_EPOCH_STATE_RETIRING:
				g.Unclosed++
			}
		}
		return nil
	})
	return g, err
}

// epochHealth is nil while the epochs go their way.
func (k *Keys) epochHealth(ctx context.Context) (detail string, err error) {
	rows, problem, err := k.Epochs(ctx)
	if err != nil {
		return "", err
	}
	var wrong []string
	if problem != "" {
		wrong = append(wrong, problem)
	}
	for _, e := range rows {
		if e.Late {
			wrong = append(wrong, fmt.Sprintf("epoch %d is not closed although receipts state %s", e.Number, e.FinalBy.AsTime().Format(time.RFC3339)))
		}
		if e.Kept {
			wrong = append(wrong, fmt.Sprintf("the root of epoch %d is kept: what was destroyed in it does not become final before 'lethe epoch resume %[1]d'", e.Number))
		}
		if e.RowsDamaged != 0 && e.State == keydv1.EpochState_EPOCH_STATE_DRAINING {
			wrong = append(wrong, fmt.Sprintf("%d damaged rows keep epoch %d from draining", e.RowsDamaged, e.Number))
		}
		if e.State == keydv1.EpochState_EPOCH_STATE_OPEN {
			detail = fmt.Sprintf("epoch %d is open until %s", e.Number, e.PlannedEnd.AsTime().Format(time.RFC3339))
		}
	}
	if len(wrong) != 0 {
		return "", errors.New(strings.Join(wrong, "; "))
	}
	return detail, nil
}
