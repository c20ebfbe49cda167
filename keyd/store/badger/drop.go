package badger

import (
	"context"
	"errors"
)

// DropRange implements keys.Store.
func (s *Store) DropRange(ctx context.Context, prefix []byte) error {
	if len(prefix) == 0 {
		return errors.New("store: refusing to drop everything")
	}
	if err := ctx.Err(); err != nil {
		return ended(err)
	}
	if err := s.failed(); err != nil {
		return err
	}
	s.commitMu.Lock()
	defer s.commitMu.Unlock()
	if err := s.db.DropPrefix(badgerKey(string(prefix))); err != nil {
		return s.fail("dropping a range", err)
	}
	return nil
}
