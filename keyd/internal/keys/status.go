package keys

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

// Status tells how keyd is. It answers also when much is wrong.
func (k *Keys) Status(ctx context.Context) *keydv1.GetStatusResponse {
	s := &keydv1.GetStatusResponse{
		Incarnation: k.meta.Incarnation, FormatLevel: k.meta.FormatLevel,
		AnchoredSize: k.keeper.Anchored(),
	}
	var epoch *storev1.Epoch
	var meta storev1.Meta
	err := k.store.View(ctx, func(r Reader) (err error) {
		if err := getRow(r, metaKey(), &meta); err != nil {
			return err
		}
		if epoch, err = openEpoch(r); err != nil {
			return err
		}
		head, err := ledger.ReadHead(r)
		s.LedgerSize = head.Size
		return err
	})
	if err == nil {
		s.Epoch = epoch.Number
		s.EpochPlannedEnd = timestamppb.New(time.UnixMilli(epoch.PlannedEndMs))
		err = k.store.Check(ctx)
	}
	add := func(name string, err error, detail string) {
		c := &keydv1.ComponentStatus{Name: name, Healthy: err == nil, Detail: detail}
		if err != nil {
			c.Detail = err.Error()
		}
		s.Components = append(s.Components, c)
	}
	add("store", err, "takes writes"+restored(meta.Restore))
	add("kms", k.kmsHealth(), k.kms.Kind())
	code, where := k.anchor.Domain()
	anchorErr := k.Serving()
	if anchorErr == nil {
		anchorErr = k.keeper.Last()
	}
	add("anchor", anchorErr, code+": "+where)
	detail, err := k.epochHealth(ctx)
	add("epochs", err, detail+k.setBack())
	return s
}

// setBack says by how much drained_by is later because the clock was set back.
func (k *Keys) setBack() string {
	now := k.now()
	_, to := k.bounds(now)
	by := to.Sub(now).Round(time.Second)
	if by < time.Minute {
		return ""
	}
	return fmt.Sprintf("; the clock was set back: drained_by is %v later for it, until lethe epoch confirm-clock", by)
}

// restored says of a store that was put back what that means for whoever looks
// for a key: what was first used between the backup and the restore is lost.
func restored(r *storev1.Restore) string {
	if r == nil || r.DoneMs == 0 {
		return ""
	}
	at := func(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }
	from := "an older copy of itself"
	if r.BackupMs != 0 {
		from = "a backup of " + at(r.BackupMs)
	}
	return "; restored at " + at(r.DoneMs) + " from " + from + ": keys that were first used in between are lost, and unknown"
}

// Serving returns why keyd must not serve, or nil: its history and the
// anchor's are not the same any more.
func (k *Keys) Serving() error {
	if err := k.mirrorErr.Load(); err != nil {
		return *err
	}
	return k.keeper.Err()
}

// LedgerSize is the number of entries in the ledger, as this process last saw it.
func (k *Keys) LedgerSize() uint64 { return k.ledgerSize.Load() }

// AnchoredSize is the number of entries that the anchor covers.
func (k *Keys) AnchoredSize() uint64 { return k.keeper.Anchored() }
