package ledger_test

import (
	"context"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/ledger"
	"lethe/sdk/receipt"
)

// TestModel drives a ledger, its anchor and its keeper through appends,
// restarts, faults, backups and restores, and holds them to what they promise:
//
//   - what was covered once is in the anchor for good;
//   - a store that lacks what the anchor holds is told so, with the count, and
//     the replay makes it whole;
//   - a store with another history is never taken for this one;
//   - whatever fails in between, the next try succeeds.
func TestModel(t *testing.T) {
	ctx := context.Background()
	rapid.Check(t, func(rt *rapid.T) {
		s, m, k := initialised(t)
		covered := uint64(2) // greatest size that a caller was told is covered
		type backup struct {
			rows rows
			head ledger.Head
		}
		backups := []backup{{s.backup(), s.head()}}
		fault := anchortest.None
		faultOn := ""
		m.Inject = func(_ context.Context, op string) anchortest.Fault {
			if op == faultOn {
				return fault
			}
			return anchortest.None
		}
		heal := func() { faultOn = "" }
		told := func(err error) {
			if err == nil {
				covered = max(covered, s.head().Size)
				if k.Anchored() != s.head().Size {
					rt.Fatalf("anchored %d of %d", k.Anchored(), s.head().Size)
				}
			} else if !errors.Is(err, ledger.ErrAnchorUnavailable) {
				rt.Fatalf("with a fault: %v", err)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"append": func(rt *rapid.T) { s.add(rapid.IntRange(1, 7).Draw(rt, "n")) },
			"advance": func(*rapid.T) {
				heal()
				told(k.Advance(ctx))
			},
			"advance with a fault": func(rt *rapid.T) {
				fault = rapid.SampledFrom([]anchortest.Fault{anchortest.Lost, anchortest.Persisted}).Draw(rt, "fault")
				faultOn = rapid.SampledFrom([]string{"newest", "put", "get"}).Draw(rt, "op")
				told(k.Advance(ctx))
			},
			"restart": func(rt *rapid.T) {
				k = newKeeper(t, s, m)
				if rapid.Bool().Draw(rt, "fault") {
					fault = rapid.SampledFrom([]anchortest.Fault{anchortest.Lost, anchortest.Persisted}).Draw(rt, "which")
					faultOn = rapid.SampledFrom([]string{"newest", "put", "get"}).Draw(rt, "op")
				} else {
					heal()
				}
				told(k.Check(ctx))
			},
			"backup": func(*rapid.T) { backups = append(backups, backup{s.backup(), s.head()}) },
			"restore": func(rt *rapid.T) {
				b := rapid.SampledFrom(backups).Draw(rt, "backup")
				s.restore(b.rows)
				k = newKeeper(t, s, m)
				heal()
				err := k.Check(ctx)
				newest, err2 := m.Newest(ctx)
				must(t, "Newest", err2)
				if b.head.Size >= newest.Size {
					told(err)
				} else {
					var behind *ledger.BehindError
					if !errors.As(err, &behind) || behind.Store != b.head.Size || behind.Anchor != newest.Size {
						rt.Fatalf("store of %d, anchor of %d: %v", b.head.Size, newest.Size, err)
					}
					if newest.Size < covered {
						rt.Fatalf("%d entries were covered, the anchor holds %d", covered, newest.Size)
					}
					replay(t, s, k)
					told(k.Check(ctx))
				}
				// Backups of entries that no anchor ever held are of another
				// history now.
				var same []backup
				for _, o := range backups {
					if o.head.Size <= s.head().Size {
						root, err := ledger.RootAt(s.r, o.head.Size)
						must(t, "RootAt", err)
						if root == o.head.Root {
							same = append(same, o)
						}
					}
				}
				backups = same
			},
			"fork": func(rt *rapid.T) {
				// A store that went its own way after some backup, below what
				// is covered.
				b := rapid.SampledFrom(backups).Draw(rt, "backup")
				heal()
				newest, err := m.Newest(ctx)
				must(t, "Newest", err)
				if b.head.Size >= newest.Size {
					return
				}
				f := newStore(t)
				f.restore(b.rows)
				f.add(rapid.IntRange(1, 9).Draw(rt, "n"))
				if err := newKeeper(t, f, m).Check(ctx); !errors.Is(err, ledger.ErrForked) {
					rt.Fatalf("a fork of %d entries since %d, upon %d: %v", f.head().Size, b.head.Size, newest.Size, err)
				}
			},
			"": func(*rapid.T) {
				newest, err := m.Clone().Newest(ctx)
				must(t, "Newest", err)
				if newest.Size < covered {
					rt.Fatalf("%d entries were covered, the anchor holds %d", covered, newest.Size)
				}
				if err := k.Err(); err != nil {
					rt.Fatalf("Err: %v", err)
				}
			},
		})
		heal()
		told(k.Check(ctx))
		must(t, "Audit", k.Audit(ctx))
		keys, sign := pinned(t, signer(t, 1)), signer(t, 1)
		for i := range s.head().Size {
			b, err := ledger.Receipt(s.r, sign, i)
			must(t, "Receipt", err)
			if _, err := receipt.Verify(b, keys); err != nil {
				rt.Fatalf("receipt of %d: %v", i, err)
			}
		}
	})
}
