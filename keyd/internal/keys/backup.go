package keys

import (
	"context"
	"errors"
	"io"

	"lethe/keyd/backup"
	"lethe/keyd/internal/ledger"
)

// Backup writes a backup file: a copy of the store as of some instant during
// the call. Reads and writes go on. It holds wrapped keys only.
func (k *Keys) Backup(ctx context.Context, w io.Writer) error {
	h := backup.Header{
		FormatLevel: k.meta.FormatLevel, Incarnation: [16]byte(k.meta.Incarnation),
		Created: k.now(), Store: storeKind(k.store),
	}
	err := k.store.View(ctx, func(r Reader) error {
		es, err := readEpochs(r)
		if err != nil {
			return err
		}
		head, err := ledger.ReadHead(r)
		h.Epoch, h.LedgerSize = es.open, head.Size
		return err
	})
	if err != nil {
		return err
	}
	out, err := backup.NewWriter(w, h)
	if err != nil {
		return err
	}
	if err := k.store.Backup(ctx, out); err != nil {
		return err
	}
	return out.Close()
}

// storeKind names the kind of store that a backup's data are of.
func storeKind(s Store) string {
	if s, ok := s.(interface{ Kind() string }); ok {
		return s.Kind()
	}
	return "other"
}

// CheckBackup refuses a backup of another kind of store, or one whose rows a
// newer version wrote.
func CheckBackup(h backup.Header, kind string) error {
	if h.Store != kind {
		return errors.New("the backup is of a store of kind " + h.Store)
	}
	if h.FormatLevel > FormatLevel {
		return ErrFormat
	}
	return nil
}
