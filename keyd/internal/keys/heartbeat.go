package keys

import (
	"context"
	"errors"
	"sync"
	"time"

	storev1 "lethe/proto/keyd/store/v1"
)

// A keyd shows that it lives by a row of its own, which it writes every
// beatEvery. One that has not managed to for beatLimit issues no keys until it
// does: it may be cut off, and what it reads may not be the last word. Others
// take a keyd for gone whose row has not changed for beatLapse, by their own
// clock; beatLapse is long enough that it has stopped issuing by then.
const (
	beatEvery = 3 * time.Second
	beatLimit = 15 * time.Second
	beatLapse = 30 * time.Second
	// beatTimeout bounds one attempt to write the row.
	beatTimeout = 5 * time.Second
)

// pulse is this keyd's own heartbeat.
type pulse struct {
	id id16

	mu    sync.Mutex
	beat  uint64
	since time.Time // from before the newest beat was begun
}

func (p *pulse) fresh(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.freshLocked(now)
}

// freshLocked counts by the wall clock too: the other one stands still while
// the machine is suspended.
func (p *pulse) freshLocked(now time.Time) bool {
	age := max(now.Sub(p.since), now.Round(0).Sub(p.since.Round(0)))
	return !p.since.IsZero() && age <= beatLimit
}

// beat writes this keyd's row. With it go the epoch that it has seen, and that
// it has dropped the KEKs of those before.
func (k *Keys) beat(ctx context.Context) error {
	k.pulse.mu.Lock()
	defer k.pulse.mu.Unlock()
	return k.beatLocked(ctx)
}

func (k *Keys) beatLocked(ctx context.Context) error {
	began := k.clock()
	if !k.pulse.since.IsZero() && !k.pulse.freshLocked(began) {
		// It stood still, with its machine maybe, for as long as another one that
		// takes over waits. The anchor knows whether there is one.
		if err := k.keeper.Check(ctx); err != nil {
			return err
		}
	}
	var es epochs
	err := k.store.View(ctx, func(r Reader) (err error) {
		es, err = readEpochs(r)
		return err
	})
	if err != nil {
		return err
	}
	k.ring.dropBelow(es.oldest())
	err = k.update(ctx, func(tx Tx) error {
		now, err := readEpochs(tx)
		if err != nil {
			return err
		}
		return putRow(tx, heartbeatKey(k.pulse.id), &storev1.Heartbeat{
			Beat: k.pulse.beat + 1, Epoch: now.open, Oldest: es.oldest(), TimeMs: began.UnixMilli(), ReckonedMs: k.reckonedMs(),
		})
	})
	if err == nil {
		k.pulse.beat++
	}
	if err == nil || errors.Is(err, ErrFull) {
		// A store that says it is full is there, and answers.
		k.pulse.since = began
	}
	return err
}

// mayIssue returns nil if this keyd's heartbeat is fresh, or could be made so.
func (k *Keys) mayIssue(ctx context.Context) error {
	if k.pulse.fresh(k.clock()) {
		return nil
	}
	k.pulse.mu.Lock()
	defer k.pulse.mu.Unlock()
	if k.pulse.freshLocked(k.clock()) {
		return nil // somebody else has just done it
	}
	ctx, cancel := context.WithTimeout(ctx, beatTimeout)
	defer cancel()
	if err := k.beatLocked(ctx); err != nil && !errors.Is(err, ErrFull) {
		return unavailable("keyd has lost touch with its store, or stood still and does not reach its anchor", err)
	}
	return nil
}

// beatLoop keeps the heartbeat, and the keyring clear of what has lapsed.
func (k *Keys) beatLoop(ctx context.Context) {
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	for {
		attempt, cancel := context.WithTimeout(ctx, beatTimeout)
		if err := k.beat(attempt); err != nil && ctx.Err() == nil {
			k.log.Warn("heartbeat not written", "error", err)
		} else if k.term.wanted {
			k.enterWanted(attempt)
		}
		cancel()
		k.ring.sweep()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// buryOthers removes the rows of keyds that can no longer be: when this one
// has the store for itself, nobody is waited for who was killed.
func (k *Keys) buryOthers(ctx context.Context) error {
	if !k.exclusive() {
		return nil
	}
	var others []peer
	err := k.store.View(ctx, func(r Reader) (err error) {
		others, err = k.duties.peers.look(r, k.pulse.id, k.clock())
		return err
	})
	if err != nil || len(others) == 0 {
		return err
	}
	return k.update(ctx, func(tx Tx) error {
		for _, p := range others {
			if err := tx.Delete(heartbeatKey(p.id)); err != nil {
				return err
			}
		}
		return nil
	})
}

// leave removes this keyd's row, so that nobody waits for it, and notes what the
// time was by then.
func (k *Keys) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := k.update(ctx, func(tx Tx) error {
		if err := tx.Delete(heartbeatKey(k.pulse.id)); err != nil {
			return err
		}
		var duty storev1.Duty
		err := getRow(tx, dutyKey(), &duty)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		duty.ClockMs = max(duty.ClockMs, k.believed.Load())
		duty.ReckonedMs = k.reckonedMs()
		return putRow(tx, dutyKey(), &duty)
	})
	if err != nil {
		k.log.Debug("heartbeat not removed; it lapses", "error", err)
	}
}

// peer is another keyd, as its row says.
type peer struct {
	id     id16
	row    *storev1.Heartbeat
	lapsed bool
}

// peers watches the rows of the others. Their clocks are not trusted: what
// counts is for how long a row was not seen to change.
type peers struct {
	mu   sync.Mutex
	seen map[id16]sighting
}

type sighting struct {
	beat uint64
	at   time.Time
}

// look returns all keyds but self that have a row.
func (p *peers) look(r Reader, self id16, now time.Time) ([]peer, error) {
	var found []peer
	var bad error
	prefix := []byte{'A'}
	err := r.Scan(prefix, nil, func(key, value []byte) bool {
		row := new(storev1.Heartbeat)
		if bad = decode(value, row); bad != nil {
			return false
		}
		if id := id16(key[len(prefix):]); id != self {
			found = append(found, peer{id: id, row: row})
		}
		return true
	})
	if err := errors.Join(err, bad); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := make(map[id16]sighting, len(found))
	for i := range found {
		f := &found[i]
		s, ok := p.seen[f.id]
		if !ok || s.beat != f.row.Beat {
			s = sighting{f.row.Beat, now}
		}
		seen[f.id] = s
		f.lapsed = now.Sub(s.at) > beatLapse
	}
	p.seen = seen
	return found, nil
}
