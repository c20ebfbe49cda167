package keys

import (
	"errors"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
)

// An epoch is the lifetime of one root:
//
//	preparing  the root exists; tenants get their KEKs; nothing else is wrapped
//	open       every new key is wrapped under it
//	draining   keys are carried over to the next epoch; reads look under both
//	drained    nothing reads it; its rows are dropped, its root is disabled
//	retiring   the KMS has a date for the root's destruction
//	closed     the root is destroyed
//
// At most one epoch is preparing and one draining at any time, and never both.

// epochs are the numbers of the epochs under which there may be wrapped rows;
// zero: there is none.
type epochs struct {
	open, draining, preparing uint32
	// restoredMs is when the store was last put back and replayed; zero: never.
	restoredMs int64
}

// readEpochs reads the row that every turn changes. A transaction that reads
// it conflicts with the turn.
func readEpochs(r Reader) (epochs, error) {
	meta, err := getShared(&sharedMetas, r, metaKey())
	if err != nil {
		return epochs{}, damaged("the store's own row cannot be read", err)
	}
	return epochs{open: meta.Epoch, draining: meta.Draining, preparing: meta.Preparing, restoredMs: meta.Restore.GetDoneMs()}, nil
}

// read returns the epochs whose rows are read, the newest first.
func (e epochs) read() []uint32 {
	if e.draining != 0 {
		return []uint32{e.open, e.draining}
	}
	return []uint32{e.open}
}

// oldest is the oldest epoch of which a KEK is needed.
func (e epochs) oldest() uint32 {
	if e.draining != 0 {
		return e.draining
	}
	return e.open
}

// needs says whether KEKs of an epoch are needed.
func (e epochs) needs(epoch uint32) bool {
	return epoch != 0 && (epoch == e.open || epoch == e.draining || epoch == e.preparing)
}

// openEpoch returns the epoch under which keys are wrapped now. Reading its
// row makes the transaction conflict with the epoch's turning, so that nothing
// is wrapped under an epoch that drains.
func openEpoch(r Reader) (*storev1.Epoch, error) {
	e, err := readEpochs(r)
	if err != nil {
		return nil, err
	}
	return readEpoch(r, e.open)
}

func readEpoch(r Reader, number uint32) (*storev1.Epoch, error) {
	var e storev1.Epoch
	if err := getRow(r, epochKey(number), &e); err != nil {
		return nil, damaged("an epoch's row cannot be read", err)
	}
	if e.Number != number {
		return nil, damaged("an epoch's row has another number", nil)
	}
	return &e, nil
}

// allEpochs returns every epoch's row, the oldest first.
func allEpochs(r Reader) ([]*storev1.Epoch, error) {
	var rows []*storev1.Epoch
	var bad error
	err := r.Scan([]byte{'E'}, nil, func(_, value []byte) bool {
		e := new(storev1.Epoch)
		bad = decode(value, e)
		rows = append(rows, e)
		return bad == nil
	})
	return rows, errors.Join(err, bad)
}

// kekFor returns the id of a tenant's KEK of an epoch.
func kekFor(t *storev1.Tenant, epoch uint32) (id id16, ok bool) {
	var b []byte
	switch epoch {
	case t.KekEpoch:
		b = t.KekId
	case t.NextKekEpoch:
		b = t.NextKekId
	}
	if len(b) != len(id) {
		return id, false
	}
	return id16(b), true
}

// getWrapped reads a wrapped row that lies under the open epoch or, until it is
// carried over, under the one that drains; it returns the row's key.
func getWrapped(r Reader, e epochs, key func(epoch uint32) []byte, row *storev1.Wrapped) (k []byte, err error) {
	for _, epoch := range e.read() {
		k = key(epoch)
		if err = getRow(r, k, row); !errors.Is(err, ErrNotFound) {
			break
		}
	}
	return k, err
}

// soak is how long a root stays disabled before its destruction is scheduled.
// Every KEK of its epoch that a keyd may hold, partitioned or not, has lapsed
// by then.
func (c *Config) soak() time.Duration { return max(c.Soak, c.KEKLease) }

// endOf is how long after an epoch's end its root is destroyed, as planned.
func (k *Keys) endOf() time.Duration {
	return k.cfg.DrainBudget + k.cfg.soak() + k.kms.Waiting()
}

// finality returns what a destruction in the open epoch states: when no copy
// of the key store can bring its keys back any more, and how far that reaches.
func (k *Keys) finality(epoch *storev1.Epoch, now time.Time) (by time.Time, basis string) {
	end := time.UnixMilli(epoch.PlannedEndMs)
	by = end.Add(k.endOf())
	if epoch.FinalByMs != 0 {
		by = time.UnixMilli(epoch.FinalByMs)
	}
	if end.Before(now) { // it should have turned, and can at once
		by = latest(by, now.Add(k.endOf()))
	}
	return by.Truncate(time.Millisecond), k.kms.FinalBasis()
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
