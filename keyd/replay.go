package keyd

import (
	"context"
	"fmt"
	"time"

	"lethe/keyd/backup"
	"lethe/keyd/internal/keys"
)

// ReplayOptions say how to replay.
type ReplayOptions = keys.ReplayOptions

// Replayed is what a replay did.
type Replayed = keys.Replayed

// Replay brings a store that was put back up to what its anchor remembers: the
// destructions, holds, reinstatements, class settings, tenants and epochs that
// were logged since. Nothing else may have the store open. It is run again
// when it fails or dies.
//
// Its errors wrap ErrRootDestroyed and ErrRootRetiring, after which nothing was
// changed, ErrForked, ErrAnchorMissing, ErrAnchorDamaged, ErrReplay and those
// of the parts.
func Replay(ctx context.Context, cfg Config, o ReplayOptions) (*Replayed, error) {
	cfg.setDefaults()
	done, err := keys.Replay(ctx, cfg.keys(), o)
	if err != nil {
		return nil, fmt.Errorf("keyd: %w", err)
	}
	return done, nil
}

// MarkRestored marks a store that was made from a backup of then, before it is
// put in its place: it refuses to serve until it was replayed.
func MarkRestored(ctx context.Context, s Store, backup time.Time) error {
	return keys.MarkRestored(ctx, s, backup)
}

// CheckBackup refuses the backup of a store of another kind, or of rows that
// this version cannot read (ErrFormat).
func CheckBackup(h backup.Header, kind string) error { return keys.CheckBackup(h, kind) }
