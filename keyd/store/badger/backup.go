package badger

import (
	"context"
	"io"
)

// Backup implements keys.Store, in Badger's backup format, which has no
// checksums: the caller frames it.
func (s *Store) Backup(ctx context.Context, w io.Writer) error {
	ts, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer s.snaps.end(ts)
	stream := s.db.NewStreamAt(ts)
	_, err = stream.Backup(&ctxWriter{ctx, w}, 0)
	return err
}

type ctxWriter struct {
	ctx context.Context
	w   io.Writer
}

func (c *ctxWriter) Write(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, ended(err)
	}
	return c.w.Write(p)
}
