package keys

import (
	"context"
	"slices"

	"lethe/keyd/internal/ledger"
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
// on. The ledger itself is what a client resumes from, so nothing is missed
// between two streams, nor across a restart. A cursor of zero begins now. When
// reset is set the caller cannot know what it missed. more says that the next
// call has something to tell at once.
func (k *Keys) Revocations(ctx context.Context, tenants []string, cursor uint64) (revoked []*keydv1.Revocation, next uint64, reset, more bool, err error) {
	err = k.store.View(ctx, func(r Reader) error {
		head, err := ledger.ReadHead(r)
		if err != nil {
			return err
		}
		switch {
		case cursor == 0:
			next = head.Size
			return nil
		case cursor > head.Size, head.Size-cursor > maxRevocationGap:
			next, reset = head.Size, true
			return nil
		}
		next = min(head.Size, cursor+revocationBatch)
		more = next < head.Size
		for i := cursor; i < next; i++ {
			e, err := ledger.ReadEntry(r, i)
			if err != nil {
				return damaged("a ledger entry cannot be read", err)
			}
			s, err := receipt.ParseStatement(e.Statement)
			if err != nil {
				return damaged("a ledger entry does not parse", err)
			}
			if s.Kind != receipt.Destroyed || !slices.Contains(tenants, s.Tenant) {
				continue
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

// Changed returns a channel that is closed when the ledger grows next. Get it
// before Revocations.
func (k *Keys) Changed() <-chan struct{} { return k.changed.next() }
