package keys

import (
	"context"
	"slices"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

const (
	// revocationBatch is the number of ledger entries that one call reads.
	revocationBatch = 1000
	// maxRevocationGap is how far behind a cursor may be before its owner is
	// told to drop everything instead.
	maxRevocationGap = 100_000
)

// Revocations tells which keys of the tenants died in the ledger from cursor
// on, as far as the anchor covers it. The ledger itself is what a client resumes from, so nothing is missed
// between two streams, nor across a restart. A cursor of zero begins now. When
// reset is set the caller cannot know what it missed. more says that the next
// call has something to tell at once.
func (k *Keys) Revocations(ctx context.Context, tenants []string, cursor uint64) (revoked []*keydv1.Revocation, next uint64, reset, more bool, err error) {
	// No client acts for good on, or goes on from, what may be lost with the store.
	size := k.keeper.Anchored() // before the snapshot, which then holds as much
	err = k.store.View(ctx, func(r Reader) error {
		switch {
		case cursor == 0:
			next = size
			return nil
		case cursor > size, size-cursor > maxRevocationGap:
			next, reset = size, true
			return nil
		}
		next = min(size, cursor+revocationBatch)
		more = next < size
		for i := cursor; i < next; i++ {
			e, err := ledger.ReadEntry(r, i)
			if err != nil {
				return damaged("a ledger entry cannot be read", err)
			}
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				return damaged("a ledger entry does not parse", err)
			}
			if !slices.Contains(tenants, s.Tenant) {
				continue
			}
			switch {
			case s.Kind == receipt.Scheduled:
				pending, err := pendingKeys(r, s)
				if err != nil {
					return err
				}
				revoked = append(revoked, pending...)
			case s.Kind == receipt.Destroyed && s.Scope == receipt.ScopeTenant:
				revoked = append(revoked, &keydv1.Revocation{Tenant: s.Tenant, Outcome: keydv1.Outcome_OUTCOME_ERASED})
			case s.Kind == receipt.Expired:
				revoked = append(revoked, &keydv1.Revocation{
					Tenant: s.Tenant, ClassNumber: s.Classes[0].Number, Bucket: uint64(s.BucketStartS),
					Outcome: keydv1.Outcome_OUTCOME_EXPIRED,
				})
			}
			for _, d := range s.DeadKeys {
				revoked = append(revoked, &keydv1.Revocation{
					Tenant: s.Tenant, KeyId: slices.Clone(d.KeyID[:]), ClassNumber: d.ClassNumber,
					Outcome: keydv1.Outcome_OUTCOME_ERASED,
				})
			}
		}
		return nil
	})
	return revoked, next, reset, more, err
}

// pendingKeys are the keys that a scheduled destruction refuses, as they are
// now: one that was cancelled meanwhile costs its holders a question.
func pendingKeys(r Reader, s *receipt.Statement) ([]*keydv1.Revocation, error) {
	var subject storev1.Subject
	if err := getRow(r, subjectKey(tenantID(s.Tenant), id16(s.Handle)), &subject); err != nil {
		return nil, damaged("a scheduled subject has no row", err)
	}
	var pending []*keydv1.Revocation
	for _, sc := range subject.Classes {
		if len(sc.KeyId) != 0 && (subject.State == storev1.LifeState_LIFE_STATE_SCHEDULED || sc.State == storev1.LifeState_LIFE_STATE_SCHEDULED) {
			pending = append(pending, &keydv1.Revocation{
				Tenant: s.Tenant, KeyId: sc.KeyId, ClassNumber: sc.ClassNumber, Outcome: keydv1.Outcome_OUTCOME_PENDING_ERASURE,
			})
		}
	}
	return pending, nil
}

// Changed returns a channel that is closed when the anchor covers more of the
// ledger, or may. Get it before Revocations.
func (k *Keys) Changed() <-chan struct{} {
	_, changed := k.keeper.Covers(0)
	return changed
}
