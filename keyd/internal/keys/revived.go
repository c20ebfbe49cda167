package keys

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
)

// The root of a closed epoch is gone for ever, unless whoever keeps the KMS puts
// a copy of it back: an old roots file, say. Then receipts call final what is
// not. keyd cannot keep anybody from that, but it looks, and says so.

const (
	// revivedEvery is how often the KMS is asked for the roots of closed epochs.
	revivedEvery = 10 * time.Minute
	// revivedEpochs is for how many, the newest.
	revivedEpochs = 4
)

// lookForRevived asks the KMS for the roots of the newest closed epochs, and for
// those that it has found before. Only its word that a root is there counts: an
// error is neither one nor the other, and leaves what was known.
func (d *duties) lookForRevived(ctx context.Context, all []*storev1.Epoch) {
	k := d.k
	now := k.now()
	if now.Sub(d.revivedAt).Abs() < revivedEvery {
		return
	}
	d.revivedAt = now
	asked := 0
	for _, e := range slices.Backward(all) {
		if e.State != storev1.EpochState_EPOCH_STATE_CLOSED || e.KmsKind != k.kms.Kind() {
			continue
		}
		if asked++; asked > revivedEpochs && !d.isRevived(e.Number) {
			continue
		}
		call, cancel := context.WithTimeout(ctx, kmsTimeout)
		root, err := k.kms.Describe(call, e.RootId)
		cancel()
		if err != nil {
			if errors.Is(err, ErrKMSUnavailable) {
				break
			}
			continue
		}
		d.noteRevived(e.Number, root.State == RootEnabled || root.State == RootDisabled || root.State == RootPending)
	}
}

func (d *duties) isRevived(number uint32) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Contains(d.revived, number)
}

// noteRevived notes whether the root of a closed epoch is there.
func (d *duties) noteRevived(number uint32, there bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	at, known := slices.BinarySearch(d.revived, number)
	switch {
	case there && !known:
		d.revived = slices.Insert(d.revived, at, number)
		d.k.log.Error("the root of a closed epoch exists again in the KMS: what receipts call final is not", "epoch", number)
	case !there && known:
		d.revived = slices.Delete(d.revived, at, at+1)
		d.k.log.Info("the root of a closed epoch is destroyed again", "epoch", number)
	}
}

// kmsHealth says what is wrong with the KMS, nil if nothing is.
func (k *Keys) kmsHealth() error {
	var wrong []string
	if err := k.ring.health(); err != nil {
		wrong = append(wrong, err.Error())
	}
	d := k.duties
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range d.revived {
		wrong = append(wrong, fmt.Sprintf("the root of closed epoch %d exists again in the KMS: a copy was put back; what receipts call final is not, until it is destroyed", n))
	}
	if len(wrong) != 0 {
		return errors.New(strings.Join(wrong, "; "))
	}
	return nil
}
