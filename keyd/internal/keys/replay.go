package keys

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
// to serve. Nothing else may have the store open. It refuses, before it changes
// anything, a store whose root is destroyed (ErrRootDestroyed) and, without
// CallOff, one whose root is being retired (ErrRootRetiring). What it does is
// in transactions that each leave the store behind its anchor or whole, so when
// it fails or dies it is run again.
func Replay(ctx context.Context, cfg Config, o ReplayOptions) (*Replayed, error) {
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
	p := &replay{k: k, o: o, done: &Replayed{Missing: make(map[receipt.Kind]uint64)}}
	if err := p.checkRoots(ctx); err != nil {
		return nil, err
	}
	if err := k.loadSecrets(ctx); err != nil {
		return nil, err
	}
	defer clear(k.requestKey)
	switch err := k.startLedger(ctx); {
	case errors.Is(err, ledger.ErrBehind):
		if err := p.run(ctx); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case !meta.Restore.GetPending():
		p.done.From, p.done.To = k.LedgerSize(), k.LedgerSize()
		p.done.Epoch, p.done.Draining = meta.Epoch, meta.Draining
		return p.done, nil
	default:
		p.done.From, p.done.To = k.LedgerSize(), k.LedgerSize()
	}
	return p.done, p.finish(ctx)
}

// replay is one run of Replay.
type replay struct {
	k    *Keys
	o    ReplayOptions
	done *Replayed
}

// checkRoots finds out whether the store's keys can be opened, before anything
// is changed.
func (p *replay) checkRoots(ctx context.Context) error {
	k := p.k
	needed, err := p.neededEpochs(ctx)
	if err != nil {
		return err
	}
	var off []*storev1.Epoch
	for _, e := range needed {
		root, err := k.describe(ctx, e)
		if err != nil {
			return err
		}
		switch root.State {
		case RootEnabled:
		case RootDestroyed:
			return rootDestroyed(e)
		case RootPending:
			if !p.o.CallOff {
				return fmt.Errorf("%w: the root of epoch %d is destroyed at %s unless that is called off", ErrRootRetiring, e.Number, root.DestroyAt.UTC().Format(time.RFC3339))
			}
			off = append(off, e)
		case RootDisabled:
			if !p.o.CallOff {
				return fmt.Errorf("%w: the root of epoch %d is disabled", ErrRootRetiring, e.Number)
			}
			off = append(off, e)
		default:
			return unavailable("the KMS describes a root in a state that is not known", nil)
		}
	}
	// What the ledger says counts too: a root that it calls destroyed and that
	// is there was put back, and what it opened is promised to stay closed.
	// That needs the ledger's key, and so the root; see run.
	for _, e := range off {
		if err := p.callOff(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// callOff has the KMS keep a root, after noting that it is this that calls its
// destruction off, and not an operator who wants to keep it.
func (p *replay) callOff(ctx context.Context, e *storev1.Epoch) error {
	k := p.k
	err := k.update(ctx, func(tx Tx) error {
		head, err := ledger.ReadHead(tx)
		if err != nil {
			return err
		}
		meta, err := p.begin(tx, head.Size)
		if err != nil || slices.Contains(meta.Restore.CalledOff, e.Number) {
			return err
		}
		meta.Restore.CalledOff = append(meta.Restore.CalledOff, e.Number)
		return putRow(tx, metaKey(), meta)
	})
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	if err := k.kms.Cancel(call, e.RootId); err != nil {
		return unavailable("the KMS did not call off the root's destruction", err)
	}
	p.done.CalledOff = append(p.done.CalledOff, e.Number)
	return nil
}

func (k *Keys) describe(ctx context.Context, e *storev1.Epoch) (Root, error) {
	ctx, cancel := context.WithTimeout(ctx, kmsTimeout)
	defer cancel()
	root, err := k.kms.Describe(ctx, e.RootId)
	if errors.Is(err, ErrRootUnknown) {
		return root, fmt.Errorf("%w: it is not the KMS of this key store, or has lost the root of epoch %d", err, e.Number)
	}
	return root, err
}

func rootDestroyed(e *storev1.Epoch) error {
	return fmt.Errorf("%w: they are of epoch %d, which is closed, and nothing can open them; a backup that was taken after its end is needed", ErrRootDestroyed, e.Number)
}

// explainRoot says of a failure to open keyd's own secrets whether it is for
// ever.
func (k *Keys) explainRoot(ctx context.Context, cause error) error {
	if !errors.Is(cause, ErrRootNotUsable) && !errors.Is(cause, errRootGone) {
		return cause
	}
	p := &replay{k: k, done: new(Replayed)}
	if err := p.checkRoots(ctx); errors.Is(err, ErrRootDestroyed) || errors.Is(err, ErrRootRetiring) {
		return err
	}
	return cause
}

// neededEpochs returns the rows of the epochs under which the store has live
// keys, the newest first.
func (p *replay) neededEpochs(ctx context.Context) ([]*storev1.Epoch, error) {
	var es epochs
	var needed []*storev1.Epoch
	err := p.k.store.View(ctx, func(r Reader) (err error) {
		if es, err = readEpochs(r); err != nil {
			return err
		}
		for _, n := range es.read() {
			e, err := readEpoch(r, n)
			if err != nil {
				return err
			}
			needed = append(needed, e)
		}
		return nil
	})
	if err != nil || es.draining == 0 {
		return needed, err
	}
	left, err := p.uncarried(ctx, es.draining, es.open)
	if !left {
		needed = needed[:1]
	}
	return needed, err
}

var errFound = errors.New("found")

// uncarried says whether there is a live key under one epoch and not under
// another.
func (p *replay) uncarried(ctx context.Context, from, to uint32) (bool, error) {
	for _, kind := range carriedKinds {
		err := p.k.scanAll(ctx, wrappedKey(from, kind, 0), nil, func(r Reader, key, value []byte) error {
			var w storev1.Wrapped
			if err := decode(value, &w); err != nil {
				return err
			}
			if w.Dead {
				return nil
			}
			switch _, err := r.Get(rekey(key, to)); {
			case errors.Is(err, ErrNotFound):
				return errFound
			default:
				return err
			}
		})
		if errors.Is(err, errFound) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

// item is an entry to replay.
type item struct {
	index uint64
	entry ledger.Entry
	s     *receipt.Statement
}

// run replays all entries that the store lacks.
func (p *replay) run(ctx context.Context) error {
	k := p.k
	missing, err := k.countMissing(ctx)
	if err != nil {
		return err
	}
	if err := p.checkClosed(ctx, missing); err != nil {
		return err
	}
	p.done.Missing = missing.kinds
	p.done.From, p.done.To = missing.from, missing.to
	var batch []item
	err = k.keeper.Missing(ctx, func(index uint64, e ledger.Entry) error {
		s, err := receipt.ParseStatement(e.Statement)
		if err != nil {
			return fmt.Errorf("%w: entry %d: %w", ErrReplay, index, err)
		}
		batch = append(batch, item{index, e, s})
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

// missing is what a store lacks.
type missing struct {
	from, to uint64
	kinds    map[receipt.Kind]uint64
	closed   []uint32 // epochs
}

// countMissing verifies all that the store lacks, and counts it.
func (k *Keys) countMissing(ctx context.Context) (*missing, error) {
	m := &missing{kinds: make(map[receipt.Kind]uint64)}
	err := k.keeper.Missing(ctx, func(index uint64, e ledger.Entry) error {
		s, err := receipt.ParseStatement(e.Statement)
		if err != nil {
			return fmt.Errorf("%w: entry %d: %w", ErrReplay, index, err)
		}
		if m.to == 0 {
			m.from = index
		}
		m.to = index + 1
		m.kinds[s.Kind]++
		if s.Kind == receipt.EpochClosed {
			m.closed = append(m.closed, s.Epoch)
		}
		return nil
	})
	return m, err
}

// checkClosed refuses a store whose root the ledger calls destroyed.
func (p *replay) checkClosed(ctx context.Context, m *missing) error {
	needed, err := p.neededEpochs(ctx)
	if err != nil {
		return err
	}
	for _, e := range needed {
		if slices.Contains(m.closed, e.Number) {
			return rootDestroyed(e)
		}
	}
	return nil
}

// BehindError says what a store that is behind its anchor lacks. It is
// ledger.ErrBehind.
type BehindError struct {
	*ledger.BehindError
	// Kinds counts the missing statements.
	Kinds map[receipt.Kind]uint64
}

func (e *BehindError) Error() string {
	return fmt.Sprintf("%v: %s; it must be replayed before it serves", e.BehindError, describeKinds(e.Kinds))
}

func (e *BehindError) Unwrap() error { return e.BehindError }

// words say what the statements of a kind are, one and several.
var words = map[receipt.Kind][2]string{
	receipt.Destroyed:      {"destruction", "destructions"},
	receipt.Scheduled:      {"scheduled destruction", "scheduled destructions"},
	receipt.Cancelled:      {"cancelled destruction", "cancelled destructions"},
	receipt.Reinstated:     {"reinstatement", "reinstatements"},
	receipt.HoldPlaced:     {"hold placed", "holds placed"},
	receipt.HoldReleased:   {"hold released", "holds released"},
	receipt.Expired:        {"expired bucket", "expired buckets"},
	receipt.TenantCreated:  {"new tenant", "new tenants"},
	receipt.ClassSet:       {"class setting", "class settings"},
	receipt.EpochOpened:    {"epoch opened", "epochs opened"},
	receipt.EpochDraining:  {"epoch draining", "epochs draining"},
	receipt.EpochDrained:   {"epoch drained", "epochs drained"},
	receipt.EpochRetiring:  {"epoch retiring", "epochs retiring"},
	receipt.EpochCancelled: {"root kept", "roots kept"},
	receipt.EpochClosed:    {"epoch closed", "epochs closed"},
	receipt.Sanitised:      {"epoch sanitised", "epochs sanitised"},
	receipt.LedgerKey:      {"ledger key", "ledger keys"},
}

// kindOrder is the order in which they are told: what matters to people first.
var kindOrder = []receipt.Kind{
	receipt.Destroyed, receipt.Scheduled, receipt.Cancelled, receipt.Reinstated, receipt.HoldPlaced, receipt.HoldReleased,
	receipt.Expired, receipt.TenantCreated, receipt.ClassSet, receipt.EpochOpened, receipt.EpochDraining, receipt.EpochDrained,
	receipt.Sanitised, receipt.EpochRetiring, receipt.EpochCancelled, receipt.EpochClosed, receipt.LedgerKey,
}

func describeKinds(kinds map[receipt.Kind]uint64) string {
	var parts []string
	for _, k := range kindOrder {
		switch n := kinds[k]; n {
		case 0:
		case 1:
			parts = append(parts, "1 "+words[k][0])
		default:
			parts = append(parts, fmt.Sprintf("%d %s", n, words[k][1]))
		}
	}
	return strings.Join(parts, ", ")
}

// Kinds lists what was replayed, in words.
func (r *Replayed) Kinds() string { return describeKinds(r.Missing) }

// explainBehind says what a store lacks that is behind its anchor.
func (k *Keys) explainBehind(ctx context.Context, cause error) error {
	var behind *ledger.BehindError
	if !errors.As(cause, &behind) {
		return cause
	}
	m, err := k.countMissing(ctx)
	if err != nil {
		return errors.Join(cause, err)
	}
	return &BehindError{behind, m.kinds}
}

// commit replays a batch in one transaction; in halves where it is too large.
func (p *replay) commit(ctx context.Context, batch []item) error {
	k := p.k
	var head ledger.Head
	err := k.update(ctx, func(tx Tx) error {
		now, err := ledger.ReadHead(tx)
		if err != nil {
			return err
		}
		if now.Size != batch[0].index {
			return fmt.Errorf("%w: it has %d entries, and %d was to come next", ErrReplay, now.Size, batch[0].index)
		}
		if _, err := p.begin(tx, now.Size); err != nil {
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
func (p *replay) begin(tx Tx, size uint64) (*storev1.Meta, error) {
	meta := new(storev1.Meta)
	if err := getRow(tx, metaKey(), meta); err != nil {
		return nil, err
	}
	if meta.Restore.GetPending() {
		return meta, nil
	}
	meta.Restore = &storev1.Restore{Pending: true, FromSize: size}
	return meta, putRow(tx, metaKey(), meta)
}

// apply makes the rows what the statement made them.
func (p *replay) apply(tx Tx, it item) error {
	s := it.s
	if s.Tenant != "" {
		if err := tx.Put(receiptIndexKey(tenantID(s.Tenant), it.index), nil); err != nil {
			return err
		}
	}
	switch s.Kind {
	case receipt.TenantCreated:
		return p.tenantCreated(tx, s)
	case receipt.ClassSet:
		return p.classSet(tx, s)
	case receipt.Destroyed, receipt.Reinstated, receipt.HoldPlaced, receipt.HoldReleased:
		return p.subjectChanged(tx, it)
	case receipt.EpochOpened, receipt.EpochDraining, receipt.EpochDrained, receipt.Sanitised,
		receipt.EpochRetiring, receipt.EpochCancelled, receipt.EpochClosed:
		return p.epochChanged(tx, it)
	}
	return fmt.Errorf("%w: this version does not know how", ErrReplay)
}

// tenantCreated keeps a name from being used again. Its keys are lost: had the
// store had them, it would have had the statement.
func (p *replay) tenantCreated(tx Tx, s *receipt.Statement) error {
	if err := absentTenant(tx, s.Tenant); err != nil {
		return err
	}
	return putRow(tx, tenantKey(tenantID(s.Tenant)), &storev1.Tenant{
		Name: s.Tenant, State: storev1.TenantState_TENANT_STATE_LOST, PseudonymCheck: s.PseudonymCheck, NextClass: 1,
	})
}

func (p *replay) classSet(tx Tx, s *receipt.Statement) error {
	id, stated := tenantID(s.Tenant), s.Classes[0]
	var t storev1.Tenant
	if err := getRow(tx, tenantKey(id), &t); err != nil {
		return err
	}
	row := new(storev1.Class)
	switch err := getRow(tx, classKey(id, classHash(stated.Name)), row); {
	case errors.Is(err, ErrNotFound):
		row.Name, row.Number, row.LeaseMs = stated.Name, stated.Number, s.LeaseMS
	case err != nil:
		return err
	case row.Number != stated.Number:
		return fmt.Errorf("%w: the class has another number", ErrReplay)
	}
	setLease(row, s.LeaseMS, s.Time)
	row.RetentionS = s.RetentionS
	row.BucketWidthS, row.WidthFromS = s.BucketWidthS, s.WidthFromS
	row.NextBucketWidthS, row.NextWidthFromS = s.NextBucketWidthS, s.NextWidthFromS
	if err := putClass(tx, id, row); err != nil {
		return err
	}
	if t.NextClass > stated.Number {
		return nil
	}
	t.NextClass = stated.Number + 1
	return putRow(tx, tenantKey(id), &t)
}

// subjectChanged makes the request that the statement answered once more, and
// sees whether it comes to the same.
func (p *replay) subjectChanged(tx Tx, it item) error {
	s := it.s
	var tenant storev1.Tenant
	if err := getRow(tx, tenantKey(tenantID(s.Tenant)), &tenant); err != nil {
		return err
	}
	q := &request{
		tenant: s.Tenant, reason: s.Reason, mac: s.Request,
		keys: &tenantKeys{name: s.Tenant, id: tenantID(s.Tenant)},
	}
	if s.Handle != nil {
		q.subject, q.handle = []byte{}, id16(s.Handle)
	}
	for _, c := range s.Classes {
		q.classes = append(q.classes, c.Name)
	}
	slices.Sort(q.classes)
	if tenant.State == storev1.TenantState_TENANT_STATE_LOST {
		return p.ofLost(tx, it, q)
	}

	var made *plan
	var err error
	switch s.Kind {
	case receipt.Destroyed:
		q.kind, q.ifGeneration = "destroy", s.Generation
		q.digest = q.sum()
		if err := p.loseKeys(tx, s, q); err != nil {
			return err
		}
		made, err = p.k.planDestroy(tx, q, s.Time)
	case receipt.Reinstated:
		q.kind = "reinstate"
		if q.ifGeneration, err = p.reinstatedFrom(tx, s, q); err != nil {
			return err
		}
		q.digest = q.sum()
		made, _, err = planReinstate(tx, q, s.Time)
	case receipt.HoldPlaced:
		q.kind, q.extra = "place-hold", holdExtra(s.Hold, s.HoldEnd)
		q.digest = q.sum()
		made, err = p.k.planHold(tx, q, s.Kind, s.Time, placing(s.Hold, s.Reason, s.HoldEnd))
	case receipt.HoldReleased:
		q.kind, q.extra = "release-hold", holdExtra(s.Hold, time.Time{})
		q.digest = q.sum()
		made, err = p.k.planHold(tx, q, s.Kind, s.Time, releasing(s.Hold))
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReplay, err)
	}
	if err := sameEffect(made, s); err != nil {
		return err
	}
	if err := made.write(tx, it.index); err != nil {
		return err
	}
	return markReplayed(tx, q)
}

// sameEffect compares what was planned with what was stated. What a statement
// says beside its effect (dates, which depend on settings, the anchor, the
// epoch) is taken as stated.
func sameEffect(made *plan, s *receipt.Statement) error {
	if len(made.statements) != 1 {
		return fmt.Errorf("%w: nothing was left to do", ErrReplay)
	}
	again := *made.statements[0]
	again.DrainedBy, again.FinalBy, again.FinalBasis = s.DrainedBy, s.FinalBy, s.FinalBasis
	again.Epoch, again.Anchor, again.Of = s.Epoch, s.Anchor, s.Of
	if len(again.DeadKeys) == 0 {
		again.Existed = s.Existed
	}
	a, err := again.Encode()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReplay, err)
	}
	b, err := s.Encode()
	if err != nil {
		return err
	}
	if !bytes.Equal(a, b) {
		return fmt.Errorf("%w: it would come to something else", ErrReplay)
	}
	return nil
}

// markReplayed notes in a request's row that its digest is of the statement.
func markReplayed(tx Tx, q *request) error {
	if len(q.mac) == 0 {
		return nil
	}
	var row storev1.Request
	if err := getRow(tx, requestKey(q.mac), &row); err != nil {
		return err
	}
	row.FromLedger = true
	return putRow(tx, requestKey(q.mac), &row)
}

// isReplayed says whether a request is the one that a replayed row is of. Its
// statement names the classes that were destroyed; the request may have named
// others besides, which were destroyed already.
func (q *request) isReplayed(r Reader, row *storev1.Request) (bool, error) {
	if !row.FromLedger || len(q.classes) == 0 {
		return false, nil
	}
	e, err := ledger.ReadEntry(r, row.LedgerIndex)
	if err != nil {
		return false, err
	}
	s, err := receipt.ParseStatement(e.Statement)
	if err != nil {
		return false, damaged("a ledger entry does not parse", err)
	}
	first := *q
	first.classes = nil
	for _, c := range s.Classes {
		if !slices.Contains(q.classes, c.Name) {
			return false, nil
		}
		first.classes = append(first.classes, c.Name)
	}
	slices.Sort(first.classes)
	sum := first.sum()
	return len(first.classes) != 0 && bytes.Equal(row.Digest, sum[:]), nil
}

// loseKeys puts the keys that a statement destroyed and that this store never
// had into the subject's row, as keys without a wrapped row: so they are
// destroyed as others are, and their ids are dead.
func (p *replay) loseKeys(tx Tx, s *receipt.Statement, q *request) error {
	if len(s.DeadKeys) == 0 {
		return nil
	}
	es, err := readEpochs(tx)
	if err != nil {
		return err
	}
	var subject storev1.Subject
	if err := getRow(tx, subjectKey(q.keys.id, q.handle), &subject); err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	changed := false
	for _, d := range s.DeadKeys {
		sc := classOf(&subject, d.ClassNumber)
		switch {
		case sc == nil:
			sc = &storev1.SubjectClass{ClassNumber: d.ClassNumber}
			subject.Classes = append(subject.Classes, sc)
		case bytes.Equal(sc.KeyId, d.KeyID[:]):
			continue
		case len(sc.KeyId) != 0:
			return fmt.Errorf("%w: another key lives in the place of the one that was destroyed", ErrReplay)
		}
		sc.State, sc.Generation, sc.KeyId = storev1.LifeState_LIFE_STATE_ACTIVE, d.Generation, bytes.Clone(d.KeyID[:])
		if err := putRow(tx, wrappedDEKKey(es.open, q.keys.id, q.handle, d.KeyID[:]), &storev1.Wrapped{Dead: true}); err != nil {
			return err
		}
		if err := putOwner(tx, q, d); err != nil {
			return err
		}
		changed = true
	}
	if !changed {
		return nil
	}
	subject.Generation = max(subject.Generation, 1)
	if subject.State == storev1.LifeState_LIFE_STATE_UNSPECIFIED {
		subject.State = storev1.LifeState_LIFE_STATE_ACTIVE
	}
	return putRow(tx, subjectKey(q.keys.id, q.handle), &subject)
}

// putOwner remembers whose a dead key was, so that a stranger's blob is told
// apart from an unknown one.
func putOwner(tx Tx, q *request, d receipt.DeadKey) error {
	return putRow(tx, ownerKey(d.KeyID[:]), &storev1.KeyOwner{
		Tenant: q.keys.id[:], Handle: q.handle[:], ClassNumber: d.ClassNumber, Generation: d.Generation,
	})
}

// reinstatedFrom is the generation whose end a reinstatement named.
func (p *replay) reinstatedFrom(r Reader, s *receipt.Statement, q *request) (uint32, error) {
	if s.Scope == receipt.ScopePerson {
		return s.Generation - 1, nil
	}
	var subject storev1.Subject
	if err := getRow(r, subjectKey(q.keys.id, q.handle), &subject); err != nil {
		return 0, err
	}
	sc := classOf(&subject, s.Classes[0].Number)
	if sc == nil {
		return 0, fmt.Errorf("%w: the class was never used", ErrReplay)
	}
	return sc.Generation, nil
}

// ofLost keeps what is known of the subject of a lost tenant: whose the dead
// keys were and which request it was. Its handle can never be made again.
func (p *replay) ofLost(tx Tx, it item, q *request) error {
	for _, d := range it.s.DeadKeys {
		if err := putOwner(tx, q, d); err != nil {
			return err
		}
	}
	if len(q.mac) == 0 {
		return nil
	}
	if err := q.remember(tx, it.index, it.s.Time, false, 0); err != nil {
		return err
	}
	return markReplayed(tx, q)
}

// epochChanged changes an epoch's row as the statement says. Which epoch keys
// are read from is another matter, and stays as the store has it; see settle.
func (p *replay) epochChanged(tx Tx, it item) error {
	s := it.s
	row := new(storev1.Epoch)
	err := getRow(tx, epochKey(s.Epoch), row)
	if err != nil && (!errors.Is(err, ErrNotFound) || s.Kind != receipt.EpochOpened) {
		return fmt.Errorf("%w: an epoch that never opened: %w", ErrReplay, err)
	}
	ms := s.Time.UnixMilli()
	switch s.Kind {
	case receipt.EpochOpened:
		row.Number, row.State, row.RootId, row.KmsKind = s.Epoch, storev1.EpochState_EPOCH_STATE_OPEN, s.Root, s.KMS
		row.OpenedMs, row.PlannedEndMs = ms, s.PlannedEnd.UnixMilli()
		row.FinalByMs = s.PlannedEnd.Add(p.k.endOf()).UnixMilli()
	case receipt.EpochDraining:
		row.State, row.DrainingMs, row.TurnRequested = storev1.EpochState_EPOCH_STATE_DRAINING, ms, false
	case receipt.EpochDrained:
		row.State, row.DrainedMs = storev1.EpochState_EPOCH_STATE_DRAINED, ms
	case receipt.Sanitised:
		row.DroppedMs, row.SanitisedAt = ms, it.index+1
	case receipt.EpochRetiring:
		row.State, row.RetiringMs, row.DestroyAtMs = storev1.EpochState_EPOCH_STATE_RETIRING, ms, s.Due.UnixMilli()
		row.Kept, row.RetiringAt = false, it.index+1
	case receipt.EpochCancelled:
		row.State, row.Kept = storev1.EpochState_EPOCH_STATE_DRAINED, true
		row.DisabledMs, row.RetiringMs, row.DestroyAtMs = 0, 0, 0
		row.CancelledAt = it.index + 1
	case receipt.EpochClosed:
		row.State, row.ClosedMs, row.ClosedAt = storev1.EpochState_EPOCH_STATE_CLOSED, ms, it.index+1
	}
	return putRow(tx, epochKey(s.Epoch), row)
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
		p.done.Epoch, p.done.Draining = meta.Epoch, meta.Draining
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

// newBuckets begins a new bucket for every class whose running one the store
// lacks. It may have existed, and its key is lost: were one made anew under its
// name, blobs of the lost one would seem corrupt.
func (p *replay) newBuckets(ctx context.Context) error {
	type place struct {
		tenant string
		class  uint32
	}
	var stale []place
	k := p.k
	var head ledger.Head
	err := k.store.View(ctx, func(r Reader) (err error) {
		head, err = ledger.ReadHead(r)
		return err
	})
	if err != nil {
		return err
	}
	// Nothing was sealed later than this, by any keyd's clock.
	at := latest(k.now(), head.Time).Add(k.cfg.SkewAllowance + time.Second)
	err = k.scanAll(ctx, []byte{'T'}, nil, func(r Reader, key, value []byte) error {
		var t storev1.Tenant
		if err := decode(value, &t); err != nil {
			return err
		}
		if t.State != storev1.TenantState_TENANT_STATE_ACTIVE || t.Name == "" {
			return nil
		}
		for n := uint32(1); n < t.NextClass; n++ {
			c, err := classByNumber(r, id16(key[1:]), n)
			if err != nil {
				return err
			}
			missing, err := lacksBucket(r, id16(key[1:]), c, at)
			if err != nil {
				return err
			}
			if missing {
				stale = append(stale, place{t.Name, n})
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for group := range slices.Chunk(stale, maxGroup) {
		ops := make([]*op, len(group))
		for i, c := range group {
			ops[i] = &op{ctx: ctx, done: make(chan struct{}), check: func(r Reader, now time.Time) (*plan, error) {
				row, err := classByNumber(r, tenantID(c.tenant), c.class)
				if err != nil {
					return nil, err
				}
				beginBucket(row, at)
				return &plan{statements: []*receipt.Statement{classSet(c.tenant, row, now)}, write: func(tx Tx, _ uint64) error {
					return putClass(tx, tenantID(c.tenant), row)
				}}, nil
			}}
		}
		k.runGroup(ctx, ops)
		for _, o := range ops {
			if o.err != nil {
				return o.err
			}
		}
	}
	p.done.NewBuckets = len(stale)
	return nil
}

// lacksBucket says whether the class's bucket that runs at that time is not in
// the store.
func lacksBucket(r Reader, tenant id16, c *storev1.Class, at time.Time) (bool, error) {
	start, _ := bucketAt(c, at)
	switch _, err := r.Get(bucketKey(tenant, c.Number, uint64(start))); {
	case err == nil:
		return false, nil
	case errors.Is(err, ErrNotFound):
		return true, nil
	default:
		return false, err
	}
}

// beginBucket has the class's grid begin at a time that no bucket began at.
func beginBucket(c *storev1.Class, at time.Time) {
	from := at.Unix()
	if c.NextBucketWidthS != 0 && from >= c.NextWidthFromS {
		c.BucketWidthS, c.NextBucketWidthS, c.NextWidthFromS = c.NextBucketWidthS, 0, 0
	}
	c.WidthFromS = from
	if c.NextBucketWidthS != 0 {
		c.NextWidthFromS = from + c.BucketWidthS
	}
}
