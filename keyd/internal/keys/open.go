package keys

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"lethe/internal/boottime"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/internal/wrap"
	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// Names of the secrets that are keyd's own, wrapped by the system KEK.
var (
	ledgerKeyName  = nameHash("lethe/v1/secret", "ledger-signing-key")
	requestKeyName = nameHash("lethe/v1/secret", "request-key")
)

// Open serves the key store, after comparing it with the anchor: a store that
// is behind its anchor, or has another history, is refused.
func Open(ctx context.Context, cfg Config) (*Keys, error) {
	k := newKeys(cfg)
	meta, err := k.readMeta(ctx)
	if errors.Is(err, ErrNotFound) {
		if err := k.initialise(ctx); err != nil {
			return nil, err
		}
		meta, err = k.readMeta(ctx)
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
	if err := k.loadSecrets(ctx); err != nil {
		return nil, k.explainRoot(ctx, err)
	}
	if err := k.startLedger(ctx); err != nil {
		return nil, k.explain(ctx, err)
	}
	if meta.Restore.GetPending() {
		return nil, ErrReplayPending
	}
	if err := k.takeOver(ctx); err != nil {
		k.endTerm()
		return nil, k.explain(ctx, err)
	}
	// A full store still serves what it holds. The others' rows tell what the time
	// was until this one's does.
	if err := k.beat(ctx); err != nil && !errors.Is(err, ErrFull) {
		k.endTerm()
		return nil, err
	}
	if err := k.buryOthers(ctx); err != nil && !errors.Is(err, ErrFull) {
		k.endTerm()
		return nil, err
	}
	loop, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	if cfg.DutyInterval >= 0 {
		k.wg.Go(func() { k.beatLoop(loop) })
		k.wg.Go(func() { k.duties.run(loop) })
	}
	k.wg.Go(func() { k.groupLoop(loop) })
	if k.keeper.Anchored() > auditAtOnce {
		k.wg.Go(func() { k.auditMirror(loop) })
	}
	k.wg.Go(func() {
		if err := k.keeper.Run(loop); err != nil && loop.Err() == nil {
			k.log.Error("the anchor and the store have different histories; keyd stops serving", "error", err)
		}
	})
	return k, nil
}

// newKeys makes Keys that do nothing yet.
func newKeys(cfg Config) *Keys {
	switch start := time.Now(); {
	case cfg.Uptime != nil:
	case cfg.Clock != nil:
		cfg.Uptime = func() time.Duration { return cfg.Clock().Sub(start) }
	default:
		cfg.Uptime = func() time.Duration { return boottime.Read(time.Since(start)) }
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.DrainBudget = cfg.DrainBudget.Truncate(time.Millisecond)
	cfg.EpochLength = cfg.EpochLength.Truncate(time.Millisecond)
	cfg.SkewAllowance = cfg.SkewAllowance.Truncate(time.Millisecond)
	k := &Keys{
		store: cfg.Store, kms: cfg.KMS, anchor: ledger.Interrupt(cfg.Anchor, cfg.Log), clock: cfg.Clock, uptime: cfg.Uptime, log: cfg.Log, cfg: cfg,
		ring: newKeyring(cfg.Store, cfg.KMS, cfg.Clock, cfg.KEKLease),
		ops:  make(chan *op), stopped: make(chan struct{}),
	}
	k.pulse.id = newID()
	k.duties = newDuties(k)
	k.reckon(k.now())
	return k
}

func (k *Keys) readMeta(ctx context.Context) (*storev1.Meta, error) {
	var meta storev1.Meta
	err := k.store.View(ctx, func(r Reader) error { return getRow(r, metaKey(), &meta) })
	return &meta, err
}

// initialise makes an empty store into a key store: the first epoch with its
// root, the system KEK, keyd's own secrets, and the ledger's first entry, all
// in one transaction. One that fails is repeated, and finds the root that was
// made for it.
func (k *Keys) initialise(ctx context.Context) error {
	if !k.cfg.Initialise {
		return ErrNotInitialised
	}
	switch _, err := k.anchor.Newest(ctx); {
	case err == nil:
		return fmt.Errorf("%w: the store is empty and the anchor is not", ErrOtherAnchor)
	case !errors.Is(err, ledger.ErrNoObject):
		return err
	}
	const epoch = 1
	root, err := k.createRoot(ctx, epoch, func(Reader) error { return nil })
	if err != nil {
		return err
	}
	incarnation, kekID, kek, seed, requestKey := newID(), newID(), newKey(), newKey(), newKey()
	defer func() {
		clear(kek)
		clear(seed)
		clear(requestKey)
	}()
	wrappedKEK, err := wrapKEK(ctx, k.kms, root, kekID, kek, EncryptionContext{Epoch: epoch})
	if err != nil {
		return err
	}
	w, err := wrap.New(kek)
	if err != nil {
		return err
	}
	secrets := make(map[id16]*storev1.Wrapped, 2)
	for name, secret := range map[id16][]byte{ledgerKeyName: seed, requestKeyName: requestKey} {
		if secrets[name], err = wrapRow(w, kekID, secret, rowIdentity(wrappedSecretKey(epoch, name), kekID)); err != nil {
			return err
		}
	}
	return k.update(ctx, func(tx Tx) error {
		switch _, err := tx.Get(metaKey()); {
		case err == nil:
			return nil // another keyd was first; its root and secrets are the store's
		case !errors.Is(err, ErrNotFound):
			return err
		}
		now := k.now()
		end := now.Add(k.cfg.EpochLength)
		opened := receipt.Statement{
			Kind: receipt.EpochOpened, Time: now, Epoch: epoch,
			KMS: k.kms.Kind(), Root: root, PlannedEnd: end,
		}
		if err := ledger.Create(tx); err != nil {
			return err
		}
		if _, err := ledger.Append(tx, now, []*receipt.Statement{&opened}); err != nil {
			return err
		}
		for name, row := range secrets {
			if err := putRow(tx, wrappedSecretKey(epoch, name), row); err != nil {
				return err
			}
		}
		if err := tx.Put(wrappedKEKKey(epoch, systemTenant, kekID), wrappedKEK); err != nil {
			return err
		}
		if err := putRow(tx, tenantKey(systemTenant), &storev1.Tenant{
			State: storev1.TenantState_TENANT_STATE_ACTIVE, KekId: kekID[:], KekEpoch: epoch,
		}); err != nil {
			return err
		}
		if err := putRow(tx, epochKey(epoch), &storev1.Epoch{
			Number: epoch, State: storev1.EpochState_EPOCH_STATE_OPEN, RootId: root, KmsKind: k.kms.Kind(),
			OpenedMs: now.UnixMilli(), PlannedEndMs: end.UnixMilli(),
			FinalByMs: end.Add(k.endOf()).UnixMilli(),
		}); err != nil {
			return err
		}
		return putRow(tx, metaKey(), &storev1.Meta{
			FormatLevel: FormatLevel, Incarnation: incarnation[:],
			Origin: ledger.Origin(incarnation), Epoch: epoch,
		})
	})
}

// secret reads one of keyd's own secrets.
func (k *Keys) secret(ctx context.Context, name id16) ([]byte, error) {
	system, err := k.ring.get(ctx, "")
	if err != nil {
		return nil, err
	}
	var row storev1.Wrapped
	var rowKey []byte
	err = k.store.View(ctx, func(r Reader) error {
		es, err := readEpochs(r)
		if err != nil {
			return err
		}
		rowKey, err = getWrapped(r, es, func(e uint32) []byte { return wrappedSecretKey(e, name) }, &row)
		return err
	})
	if err != nil {
		return nil, damaged("keyd's own secrets cannot be read", err)
	}
	w, err := k.ring.kek(ctx, system, id16(row.KekId), epochOf(rowKey))
	if err != nil {
		return nil, err
	}
	secret, err := w.Unwrap(row.Ciphertext, rowIdentity(rowKey, id16(row.KekId)))
	if err != nil {
		return nil, damaged("keyd's own secrets do not open", err)
	}
	return secret, nil
}

func (k *Keys) loadSecrets(ctx context.Context) error {
	seed, err := k.secret(ctx, ledgerKeyName)
	if err != nil {
		return err
	}
	defer clear(seed)
	if k.signer, err = ledger.NewSigner(seed, k.meta.Origin); err != nil {
		return err
	}
	k.requestKey, err = k.secret(ctx, requestKeyName)
	return err
}

// startLedger compares the store with the anchor and, where the anchor is
// behind, brings it up: a crash between a commit and the anchor leaves that.
func (k *Keys) startLedger(ctx context.Context) (err error) {
	k.keeper, err = ledger.NewKeeper(ledger.KeeperOptions{
		View: func(ctx context.Context, fn func(ledger.Reader) error) error {
			return k.store.View(ctx, func(r Reader) error { return fn(r) })
		},
		Anchor: k.anchor, Signer: k.signer, Follows: k.follows, Logger: k.log, CheckEvery: anchorCheckInterval,
	})
	if err != nil {
		return err
	}
	if k.cfg.Initialise {
		// Also where a crash came between the first commit and the anchor.
		if _, err := k.anchor.Newest(ctx); errors.Is(err, ledger.ErrNoObject) {
			if err := k.keeper.Initialise(ctx); err != nil {
				return err
			}
		}
	}
	return k.compareLedger(ctx)
}

// compareLedger compares the store with the anchor, and reads how far it is.
func (k *Keys) compareLedger(ctx context.Context) error {
	if err := k.keeper.Check(ctx); err != nil {
		return err
	}
	if k.keeper.Anchored() <= auditAtOnce {
		if err := k.keeper.Audit(ctx); err != nil {
			return err
		}
	}
	return k.store.View(ctx, func(r Reader) error {
		head, err := ledger.ReadHead(r)
		if err != nil {
			return err
		}
		k.ledgerSize.Store(head.Size)
		k.lastStated.Store(head.Time.UnixMilli())
		var duty storev1.Duty
		if err := getRow(r, dutyKey(), &duty); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		if duty.ClockMs == 0 {
			k.believed.Store(0)
			k.reckon(k.now())
			return nil
		}
		believed, reckoned := duty.ClockMs, duty.ReckonedMs
		// A keyd that was killed has shown since that it lived. What is farther
		// ahead than a clock is believed is no reading of a clock.
		most := duty.ClockMs + clockBound.Milliseconds()
		err = r.Scan([]byte{'A'}, nil, func(_, value []byte) bool {
			var beat storev1.Heartbeat
			if decode(value, &beat) == nil {
				if beat.TimeMs <= most {
					believed = max(believed, beat.TimeMs)
				}
				reckoned = max(reckoned, beat.ReckonedMs)
			}
			return true
		})
		if err != nil {
			return err
		}
		k.believed.Store(believed)
		k.reckon(time.UnixMilli(max(believed, min(reckoned, most))))
		return nil
	})
}

// auditAtOnce is the size of a ledger up to which its whole mirror is read
// before keyd serves. A larger one is read while it does.
const auditAtOnce = 2048

// auditMirror reads the anchor's whole mirror, and has keyd stop serving if it
// is not the ledger's: a restore would replay it.
func (k *Keys) auditMirror(ctx context.Context) {
	for {
		err := k.keeper.Audit(ctx)
		switch {
		case err == nil || ctx.Err() != nil:
			return
		case !errors.Is(err, ledger.ErrAnchorUnavailable):
			k.log.Error("the anchor's mirror is not the ledger's; keyd stops serving", "error", err)
			k.mirrorErr.Store(&err)
			return
		}
		select {
		case <-time.After(anchorCheckInterval):
		case <-ctx.Done():
			return
		}
	}
}
