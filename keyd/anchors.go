package keyd

import (
	"log/slog"
	"sync"

	"lethe/keyd/internal/ledger"
)

// interruptibleAnchors are anchors whose calls return when their caller is gone
// or keyd stops, also where their file system hangs.
type interruptibleAnchors struct {
	Anchors
	log *slog.Logger

	mu     sync.Mutex
	byName map[string]*ledger.Interruptible
}

func interruptible(a Anchors, log *slog.Logger) *interruptibleAnchors {
	return &interruptibleAnchors{Anchors: a, log: log, byName: make(map[string]*ledger.Interruptible)}
}

// Anchor implements Anchors.
func (i *interruptibleAnchors) Anchor(name string, create bool) (ledger.Anchor, error) {
	i.mu.Lock()
	known := i.byName[name]
	i.mu.Unlock()
	if known != nil {
		return known, nil
	}
	a, err := i.Anchors.Anchor(name, create)
	if err != nil {
		return nil, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.byName[name] == nil {
		i.byName[name] = ledger.Interrupt(a, i.log)
	}
	return i.byName[name], nil
}
