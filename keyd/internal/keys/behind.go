package keys

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

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

// BehindError says what a store that is behind its anchor lacks. It is
// ledger.ErrBehind.
type BehindError struct {
	*ledger.BehindError
	// Kinds counts the missing statements.
	Kinds map[receipt.Kind]uint64
}

func (e *BehindError) Error() string {
	return fmt.Sprintf("%v: it has %d of %d entries, and lacks %s; it must be replayed before it serves",
		ledger.ErrBehind, e.Store, e.Anchor, describeKinds(e.Kinds))
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

// explain says what a store lacks that is behind its anchor, and how one came to
// have another history.
func (k *Keys) explain(ctx context.Context, cause error) error {
	if errors.Is(cause, ledger.ErrDiverged) {
		newest, err := k.anchor.Enter(ctx, ledger.Term{})
		if err == nil && errors.Is(k.follows(ctx, newest), ErrCopyServed) {
			return ErrOvertaken
		}
		return cause
	}
	var behind *ledger.BehindError
	if !errors.As(cause, &behind) {
		return cause
	}
	m, err := k.countMissing(ctx)
	if err != nil {
		return errors.Join(cause, err)
	}
	says := &BehindError{behind, m.kinds}
	if err := (&replay{k: k}).checkClosed(ctx, m); errors.Is(err, ErrRootDestroyed) {
		return fmt.Errorf("%w; but a replay will refuse it: %w", says, err)
	}
	return says
}
