package parts

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"lethe/keyd"
)

// Bounds of waiting for what may hang, as the file system of a network does.
const (
	// awaitLimit is after what time it is told what is waited for; it is told
	// again ever more seldom.
	awaitLimit = 5 * time.Second
	// closeLimit is how long the anchor may take to close.
	closeLimit = 5 * time.Second
)

// await runs fn, which may hang, until ctx is over. Then fn is left to itself,
// and the process is to end.
func await(ctx context.Context, log *slog.Logger, what string, fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	began := time.Now()
	for limit := awaitLimit; ; limit *= 2 {
		late := time.NewTimer(limit)
		select {
		case err := <-done:
			late.Stop()
			return err
		case <-ctx.Done():
			late.Stop()
			return fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		case <-late.C:
			log.Warn("waiting for what does not answer", "for", what, "since", began.UTC().Format(time.RFC3339))
		}
	}
}

// closeAnchor closes an anchor, or leaves that to the end of the process.
func closeAnchor(a keyd.Anchor) error {
	done := make(chan error, 1)
	go func() { done <- a.Close() }()
	limit := time.NewTimer(closeLimit)
	defer limit.Stop()
	select {
	case err := <-done:
		return err
	case <-limit.C:
		return fmt.Errorf("the anchor did not close in %v", closeLimit)
	}
}
