package keys

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// A store that was put back from a backup, or from a copy, lacks what was
// logged since. The mirror beside the anchor has it. Replay runs each statement
// through the code that first made it, on the rows of the older store, and
// appends it with the salt that it had, so that the ledger comes out as it was
// and every receipt verifies again.
//
// Keys are in no statement. Those that the older store lacks are lost, and what
// was sealed under them is unknown to it, not erased. Replay sees to it that no
// key is ever made anew under their names:
//
//   - key ids are random, and those that a statement names as dead are dead;
//   - a tenant that the older store lacks is lost, and its name stays taken;
//   - buckets are named by when they begin, so where the running bucket of a
//     class is not in the older store, its class begins a new one.

// Errors of Open and Replay about a store that was put back.
var (
	// ErrReplayPending: the store was restored from a backup and what it lacks
	// was not replayed, or not to the end.
	ErrReplayPending = errors.New("the key store was restored from a backup and must be replayed before it serves")
	// ErrRootDestroyed: the root over the store's keys is destroyed. Nothing
	// opens them any more.
	ErrRootDestroyed = errors.New("the root over the key store's keys is destroyed")
	// ErrRootRetiring: the root over the store's keys is disabled or about to
	// be destroyed, and whoever replays must want that called off.
	ErrRootRetiring = errors.New("the root over the key store's keys is being retired")
	// ErrReplay: a statement does not follow from the store.
	ErrReplay = errors.New("the ledger cannot be replayed upon this key store")
)

// replayBatch is how many entries share a transaction, beside what completes
// the group that the last of them is from.
const replayBatch = 256

// ReplayOptions say how to replay.
type ReplayOptions struct {
	// CallOff allows to call off the destruction of a root that the store's
	// keys are still wrapped by, and to enable it.
	CallOff bool
	// Progress, unless nil, is called after each transaction.
	Progress func(done, total uint64)
	// Waits, unless nil, is told for how long it waits until a keyd that may
	// still serve has seen that it was taken over from.
	Waits func(time.Duration)
}

// Replayed is what Replay did.
type Replayed struct {
	// From and To are the sizes of the ledger before, and as the anchor had it.
	From, To uint64
	// Missing counts the replayed statements by kind.
	Missing map[receipt.Kind]uint64
	// LostTenants are those whose keys the store lacks, of this replay.
	LostTenants []string
	// NewBuckets counts the classes that began a new bucket.
	NewBuckets int
	// Epoch is the open epoch, and Draining the one from which keys are still
	// to be carried over; zero: none.
	Epoch, Draining uint32
	// CalledOff are the epochs the destruction of whose roots was called off.
	CalledOff []uint32
	// Kept are the past epochs whose roots are kept, until an operator resumes
	// their retirement.
	Kept []uint32
	// CopyServed: a copy of the store has served since this one did, or the
	// anchor is older than the store.
	CopyServed bool
}

// MarkRestored marks a store that was made from a backup, before it is put in
// its place: it does not serve until it was replayed.
func MarkRestored(ctx context.Context, store Store, backupTime time.Time) error {
	return store.Update(ctx, func(tx Tx) error {
		var meta storev1.Meta
		if err := getRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		head, err := ledger.ReadHead(tx)
		if err != nil {
			return err
		}
		meta.Restore = &storev1.Restore{Pending: true, BackupMs: backupTime.UnixMilli(), FromSize: head.Size}
		return putRow(tx, metaKey(), &meta)
	})
}

// Replay brings a store that is behind its anchor up to it, and makes it ready
// to serve. Nothing else may have the store open; a keyd that serves a copy is
// taken over from, as by a start. It refuses, before it changes anything, a store
// whose root is destroyed (ErrRootDestroyed) and, without CallOff, one whose root
// is being retired (ErrRootRetiring). What it does is in transactions after each
// of which the store serves only once it was replayed, so when it fails or dies
// it is run again.
func Replay(ctx context.Context, cfg Config, o ReplayOptions) (*Replayed, error) {
	// That the store is behind is what it is here for.
	cfg.Log = nil
	k := newKeys(cfg)
	defer k.ring.close()
	meta, err := k.readMeta(ctx)
	if errors.Is(err, ErrNotFound) {
		return nil, ErrNotInitialised
	}
	if err != nil {
		return nil, err
	}
	if meta.FormatLevel > FormatLevel {
		return nil, fmt.Errorf("%w: level %d, this version knows %d", ErrFormat, meta.FormatLevel, FormatLevel)
	}
	k.meta = meta
	if err := k.checkKMS(ctx); err != nil {
		return nil, err
	}
	p := &replay{k: k, o: o, done: &Replayed{Missing: make(map[receipt.Kind]uint64)}, loaded: make(map[string]*tenantKeys)}
	if err := p.checkRoots(ctx); err != nil {
		return nil, err
	}
	if err := k.loadSecrets(ctx); err != nil {
		return nil, err
	}
	defer clear(k.requestKey)
	err = k.startLedger(ctx)
	p.done.CopyServed = errors.Is(err, ErrCopyServed)
	switch {
	case err == nil && !meta.Restore.GetPending():
		p.done.From, p.done.To = k.LedgerSize(), k.LedgerSize()
		p.done.Epoch, p.done.Draining = meta.Epoch, meta.Draining
		return p.done, nil
	case err != nil && !errors.Is(err, ledger.ErrBehind):
		return nil, k.explain(ctx, err)
	case err != nil && !p.done.CopyServed:
		// Who cannot be replayed drives nobody out.
		if err := p.count(ctx, err); err != nil {
			return nil, err
		}
	}
	k.term.adopts, k.term.waits = true, o.Waits
	defer k.endTerm()
	if err := k.takeOver(ctx); err != nil && !errors.Is(err, ledger.ErrBehind) {
		return nil, err
	}
	switch err := k.compareLedger(ctx); {
	case err == nil:
		p.done.From, p.done.To = k.LedgerSize(), k.LedgerSize()
	case errors.Is(err, ledger.ErrBehind):
		if err := p.run(ctx, err); err != nil {
			return nil, err
		}
	default:
		return nil, err
	}
	return p.done, p.finish(ctx)
}

// replay is one run of Replay.
type replay struct {
	k    *Keys
	o    ReplayOptions
	done *Replayed
	// missing is what the store lacks; nil before it was counted.
	missing *missing
	// loaded are the keys of tenants that statements needed.
	loaded map[string]*tenantKeys
}

// item is an entry to replay.
type item struct {
	index uint64
	entry ledger.Entry
	s     *receipt.Statement
	// calledOff: a replay stated this, which called off the destruction of a root
	// to carry over what is under it, and not an operator who keeps it.
	calledOff bool
}

// markCalledOff marks the cancellations in a batch in whose group the epoch
// drains anew: nothing but a replay states the two at once.
func markCalledOff(batch []item) {
	for i := range batch[1:] {
		a, b := &batch[i], &batch[i+1]
		a.calledOff = a.s.Kind == receipt.EpochCancelled && b.s.Kind == receipt.EpochDraining &&
			a.s.Epoch == b.s.Epoch && a.entry.TreeSize == b.entry.TreeSize
	}
}

// count counts what the store lacks, unless it did already, and refuses a store
// whose root the ledger calls destroyed.
func (p *replay) count(ctx context.Context, behind error) error {
	var b *ledger.BehindError
	if p.missing != nil && errors.As(behind, &b) && b.Anchor == p.missing.to {
		return nil
	}
	m, err := p.k.countMissing(ctx)
	if err != nil {
		return err
	}
	p.missing = m
	return p.checkClosed(ctx, m)
}

// run replays all entries that the store lacks.
func (p *replay) run(ctx context.Context, behind error) error {
	k := p.k
	// What the keyd before logged while it was taken over from is missing too.
	if err := p.count(ctx, behind); err != nil {
		return err
	}
	p.done.Missing = p.missing.kinds
	p.done.From, p.done.To = p.missing.from, p.missing.to
	var batch []item
	err := k.keeper.Missing(ctx, func(index uint64, e ledger.Entry) error {
		s, err := receipt.ParseStatement(e.Statement)
		if err != nil {
			return fmt.Errorf("%w: entry %d: %w", ErrReplay, index, err)
		}
		if s.Kind == receipt.Expired {
			// Whoever is held by now keeps a share.
			if len(batch) != 0 {
				if err := p.commit(ctx, batch); err != nil {
					return err
				}
				batch = batch[:0]
			}
			if err := p.keepShares(ctx, s); err != nil {
				return err
			}
		}
		batch = append(batch, item{index: index, entry: e, s: s})
		if len(batch) < replayBatch || e.TreeSize > index+1 {
			return nil
		}
		err = p.commit(ctx, batch)
		batch = batch[:0]
		return err
	})
	if err == nil && len(batch) != 0 {
		err = p.commit(ctx, batch)
	}
	if err != nil {
		return err
	}
	// Now the two must be the same.
	return k.keeper.Check(ctx)
}

// commit replays a batch in one transaction; in halves where it is too large.
func (p *replay) commit(ctx context.Context, batch []item) error {
	k := p.k
	markCalledOff(batch)
	for _, it := range batch {
		if err := p.loadKeys(ctx, it.s); err != nil {
			return err
		}
	}
	var head ledger.Head
	err := k.update(ctx, func(tx Tx) error {
		now, err := ledger.ReadHead(tx)
		if err != nil {
			return err
		}
		if now.Size != batch[0].index {
			return fmt.Errorf("%w: it has %d entries, and %d was to come next", ErrReplay, now.Size, batch[0].index)
		}
		if _, err := p.begin(tx); err != nil {
			return err
		}
		entries := make([]ledger.Entry, len(batch))
		for i, it := range batch {
			if err := p.apply(tx, it); err != nil {
				return fmt.Errorf("entry %d, %s: %w", it.index, it.s.Kind, err)
			}
			entries[i] = it.entry
		}
		if head, err = ledger.Replay(tx, entries); err != nil {
			return err
		}
		// The clock is believed as far as what was logged before the replay.
		var duty storev1.Duty
		if err := getRow(tx, dutyKey(), &duty); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		duty.ClockMs = max(duty.ClockMs, head.Time.UnixMilli())
		return putRow(tx, dutyKey(), &duty)
	})
	if errors.Is(err, ErrTooLarge) && len(batch) > 1 {
		half := len(batch) / 2
		if err := p.commit(ctx, batch[:half]); err != nil {
			return err
		}
		return p.commit(ctx, batch[half:])
	}
	if err != nil {
		return err
	}
	k.ledgerSize.Store(head.Size)
	k.lastStated.Store(head.Time.UnixMilli())
	for _, it := range batch {
		if it.s.Kind == receipt.TenantCreated {
			p.done.LostTenants = append(p.done.LostTenants, it.s.Tenant)
		}
	}
	if p.o.Progress != nil {
		p.o.Progress(head.Size-p.done.From, p.done.To-p.done.From)
	}
	return nil
}

// begin marks the store as one that is being replayed.
func (p *replay) begin(tx Tx) (*storev1.Meta, error) {
	meta := new(storev1.Meta)
	if err := getRow(tx, metaKey(), meta); err != nil {
		return nil, err
	}
	if err := beginReplay(tx, meta); err != nil {
		return nil, err
	}
	return meta, putRow(tx, metaKey(), meta)
}

// beginReplay marks a store's row as that of one that is being replayed.
func beginReplay(r Reader, meta *storev1.Meta) error {
	if meta.Restore.GetPending() {
		return nil
	}
	head, err := ledger.ReadHead(r)
	if err != nil {
		return err
	}
	meta.Restore = &storev1.Restore{Pending: true, FromSize: head.Size}
	return nil
}

// finish makes a store that has all entries ready to serve.
func (p *replay) finish(ctx context.Context) error {
	k := p.k
	if err := p.settleEpochs(ctx); err != nil {
		return err
	}
	if err := p.dropUnread(ctx); err != nil {
		return err
	}
	if err := p.newBuckets(ctx); err != nil {
		return err
	}
	now := k.now()
	err := k.update(ctx, func(tx Tx) error {
		var meta storev1.Meta
		if err := getRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		head, err := ledger.ReadHead(tx)
		if err != nil {
			return err
		}
		p.done.Epoch, p.done.Draining, p.done.Kept = meta.Epoch, meta.Draining, nil
		all, err := allEpochs(tx)
		if err != nil {
			return err
		}
		for _, e := range all {
			if e.Kept && e.State != storev1.EpochState_EPOCH_STATE_CLOSED {
				p.done.Kept = append(p.done.Kept, e.Number)
			}
		}
		r := &storev1.Restore{DoneMs: now.UnixMilli(), FromSize: meta.Restore.GetFromSize(), ToSize: head.Size, BackupMs: meta.Restore.GetBackupMs()}
		meta.Restore = r
		if err := putRow(tx, metaKey(), &meta); err != nil {
			return err
		}
		// The keyds of the older store are gone.
		var beats [][]byte
		if err := tx.Scan([]byte{'A'}, nil, func(key, _ []byte) bool {
			beats = append(beats, bytes.Clone(key))
			return true
		}); err != nil {
			return err
		}
		for _, key := range beats {
			if err := tx.Delete(key); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return k.keeper.Check(ctx)
}
