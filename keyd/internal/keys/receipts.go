package keys

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"

	"lethe/keyd/internal/ledger"
	"lethe/proto/ident"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// statementAt reads the statement of an entry.
func statementAt(r Reader, index uint64) (*receipt.Statement, error) {
	e, err := ledger.ReadEntry(r, index)
	if err != nil {
		return nil, damaged("a ledger entry cannot be read", err)
	}
	s, err := receipt.ParseStatement(e.Statement)
	if err != nil {
		return nil, damaged("a ledger entry does not parse", err)
	}
	return s, nil
}

// recorded builds the answer to an operation whose entry the anchor covers: of
// the entry, and of the one that it led to if the operation's plan has one.
func (k *Keys) recorded(ctx context.Context, o *op) (*Recorded, error) {
	if o.group != nil { // it was just logged
		s := o.plan.statements[0]
		b, err := o.group.Receipt(k.signer, o.index)
		return &Recorded{Index: o.index, Receipt: b, DrainedBy: s.DrainedBy, Due: s.Due}, err
	}
	rec := &Recorded{Index: o.index}
	err := k.store.View(ctx, func(r Reader) error {
		var later []uint64
		if o.plan != nil && o.plan.later != nil {
			rec.Index = *o.plan.later
			later = append(later, rec.Index)
		}
		s, err := statementAt(r, rec.Index)
		if err != nil {
			return err
		}
		rec.DrainedBy, rec.Due = s.DrainedBy, s.Due
		rec.Receipt, err = ledger.Receipt(r, k.signer, o.index, later...)
		return err
	})
	return rec, err
}

// furthest builds the receipt of an entry with the later ones that say how far
// what it is about has come: what a scheduled destruction led to, and the end of
// the newest epoch that a destruction knew.
func (k *Keys) furthest(ctx context.Context, o *op) (*Recorded, error) {
	rec := &Recorded{Index: o.index}
	err := k.store.View(ctx, func(r Reader) error {
		s, err := statementAt(r, o.index)
		if err != nil {
			return err
		}
		first := o.index
		var later []uint64
		switch s.Kind {
		case receipt.Scheduled:
			next, ok, err := ledTo(r, o.index, s.Tenant)
			if err != nil {
				return err
			}
			if ok {
				e, err := ledger.ReadEntry(r, next)
				if err != nil {
					return damaged("a ledger entry cannot be read", err)
				}
				if e.TreeSize > k.keeper.Anchored() {
					break
				}
				later = append(later, next)
				rec.Index = next
				if s, err = statementAt(r, next); err != nil {
					return err
				}
			}
		case receipt.Cancelled:
			// A cancellation means nothing without what it calls off.
			first, later = *s.Of, []uint64{o.index}
		}
		rec.DrainedBy, rec.Due = s.DrainedBy, s.Due
		if s.Kind == receipt.Destroyed || s.Kind == receipt.Expired {
			ends, err := k.stages(r, rec.Index, s.Epoch)
			if err != nil {
				return err
			}
			later = append(later, ends...)
		}
		rec.Receipt, err = ledger.Receipt(r, k.signer, first, later...)
		return err
	})
	return rec, err
}

// stages returns the ledger indexes, ascending, of the entries about an epoch
// that end what was destroyed in it at index, as far as the anchor covers them.
func (k *Keys) stages(r Reader, index uint64, number uint32) ([]uint64, error) {
	epoch, err := readEpoch(r, number)
	if err != nil {
		return nil, err
	}
	marks := []uint64{epoch.SanitisedAt, epoch.CancelledAt, epoch.ClosedAt}
	if epoch.CancelledAt != 0 && epoch.RetiringAt > epoch.CancelledAt {
		marks = append(marks, epoch.RetiringAt)
	}
	slices.Sort(marks)
	var later []uint64
	for _, m := range marks {
		if m == 0 || m-1 <= index {
			continue
		}
		e, err := ledger.ReadEntry(r, m-1)
		if err != nil {
			return nil, damaged("a ledger entry cannot be read", err)
		}
		if e.TreeSize <= k.keeper.Anchored() {
			later = append(later, m-1)
		}
	}
	return later, nil
}

// VerifierKeys are the keys that sign checkpoints, oldest first.
func (k *Keys) VerifierKeys() []string { return []string{k.signer.VerifierKey()} }

// Checkpoint is the newest checkpoint that the anchor covers.
func (k *Keys) Checkpoint(ctx context.Context) ([]byte, error) {
	var out []byte
	size := k.keeper.Anchored() // before the snapshot, which then holds as much
	err := k.store.View(ctx, func(r Reader) error {
		root, err := ledger.RootAt(r, size)
		if err != nil {
			return err
		}
		out, err = k.signer.Checkpoint(size, root)
		return err
	})
	return out, err
}

// Consistency proves that the tree of size older is a prefix of that of newer.
func (k *Keys) Consistency(ctx context.Context, older, newer uint64) ([][]byte, error) {
	if older > newer {
		return nil, invalid("old_size", errors.New("is greater than new_size"))
	}
	if newer > k.keeper.Anchored() {
		return nil, invalid("new_size", errors.New("is beyond the newest checkpoint"))
	}
	var proof [][]byte
	err := k.store.View(ctx, func(r Reader) (err error) {
		proof, err = ledger.Consistency(r, older, newer)
		return err
	})
	return proof, err
}

// GetReceipt finds an entry of a tenant by request id, by ledger index or, the
// newest, by subject, and returns its receipt, with the furthest stage that
// there is.
func (k *Keys) GetReceipt(ctx context.Context, req *keydv1.GetReceiptRequest) (*Recorded, error) {
	if err := ident.Tenant(req.Tenant); err != nil {
		return nil, invalid("tenant", err)
	}
	id := tenantID(req.Tenant)
	var find func(r Reader) (uint64, error)
	switch by := req.By.(type) {
	case *keydv1.GetReceiptRequest_RequestId:
		if err := ident.RequestID(by.RequestId); err != nil {
			return nil, invalid("request_id", err)
		}
		mac := requestMAC(k.requestKey, req.Tenant, by.RequestId)
		find = func(r Reader) (uint64, error) {
			var row storev1.Request
			err := getRow(r, requestKey(mac), &row)
			return row.LedgerIndex, err
		}
	case *keydv1.GetReceiptRequest_SubjectId:
		if err := ident.Subject(by.SubjectId); err != nil {
			return nil, invalid("subject_id", err)
		}
		t, err := k.ring.get(ctx, req.Tenant)
		if err != nil {
			return nil, err
		}
		handle := t.handle(by.SubjectId)
		find = func(r Reader) (uint64, error) {
			var s storev1.Subject
			if err := getRow(r, subjectKey(id, handle), &s); err != nil {
				return 0, err
			}
			if len(s.LedgerIndexes) == 0 {
				return 0, ErrNotFound
			}
			return s.LedgerIndexes[len(s.LedgerIndexes)-1], nil
		}
	case *keydv1.GetReceiptRequest_LedgerIndex:
		find = func(r Reader) (uint64, error) {
			_, err := r.Get(receiptIndexKey(id, by.LedgerIndex))
			return by.LedgerIndex, err
		}
	default:
		return nil, invalid("by", errors.New("a request id, a ledger index or a subject"))
	}
	o := new(op)
	err := k.store.View(ctx, func(r Reader) (err error) {
		if o.index, err = find(r); errors.Is(err, ErrNotFound) {
			return unknown("the receipt")
		}
		if err != nil {
			return err
		}
		e, err := ledger.ReadEntry(r, o.index)
		o.size = e.TreeSize
		return err
	})
	if err != nil {
		return nil, err
	}
	// A crash may have left an entry that the anchor does not cover yet.
	if err := k.waitAnchored(ctx, o.size); err != nil {
		return nil, err
	}
	return k.furthest(ctx, o)
}

// ListReceipts lists up to limit of a tenant's entries, oldest first, from the
// index on that from gives; all of them, or those about one subject. next is
// the index to go on from, or zero.
func (k *Keys) ListReceipts(ctx context.Context, tenant string, subject []byte, from uint64, limit int) (entries []*keydv1.ReceiptEntry, next uint64, err error) {
	if err := ident.Tenant(tenant); err != nil {
		return nil, 0, invalid("tenant", err)
	}
	if len(subject) != 0 {
		if err := ident.Subject(subject); err != nil {
			return nil, 0, invalid("subject_id", err)
		}
	}
	id := tenantID(tenant)
	var handle id16
	if len(subject) != 0 {
		t, err := k.ring.get(ctx, tenant)
		if err != nil {
			return nil, 0, err
		}
		handle = t.handle(subject)
	}
	err = k.store.View(ctx, func(r Reader) error {
		if _, err := r.Get(tenantKey(id)); err != nil {
			if errors.Is(err, ErrNotFound) {
				return unknown("the tenant")
			}
			return err
		}
		var indexes []uint64
		if len(subject) != 0 {
			var s storev1.Subject
			if err := getRow(r, subjectKey(id, handle), &s); err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
			for _, i := range s.LedgerIndexes {
				if i >= from && len(indexes) <= limit {
					indexes = append(indexes, i)
				}
			}
		} else {
			var after []byte
			if from > 0 {
				after = receiptIndexKey(id, from-1)
			}
			prefix := append([]byte{'I'}, id[:]...)
			err := r.Scan(prefix, after, func(key, _ []byte) bool {
				indexes = append(indexes, binary.BigEndian.Uint64(key[len(prefix):]))
				return len(indexes) <= limit
			})
			if err != nil {
				return err
			}
		}
		if len(indexes) > limit {
			next = indexes[limit]
			indexes = indexes[:limit]
		}
		for _, i := range indexes {
			e, err := ledger.ReadEntry(r, i)
			if err != nil {
				return damaged("a ledger entry cannot be read", err)
			}
			entries = append(entries, &keydv1.ReceiptEntry{LedgerIndex: i, Statement: e.Statement})
		}
		return nil
	})
	return entries, next, err
}
