package badger

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/pb"
	"github.com/dgraph-io/ristretto/v2/z"
	"google.golang.org/protobuf/proto"

	"lethe/keyd/internal/keys"
)

// Kind names this kind of store in backup files.
const Kind = "badger"

// Kind returns the constant of that name.
func (s *Store) Kind() string { return Kind }

// Backup implements keys.Store. It writes Badger's backup format: lists of rows
// as protobuf, each after its length. The format has no checksum and no end
// mark, so the caller frames it; Restore takes a stream that was cut between
// two lists for a whole one. Badger's own backup has the older versions of rows
// too, as long as no compaction has come by: keys that were overwritten.
func (s *Store) Backup(ctx context.Context, w io.Writer) error {
	snap, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer s.snaps.end(snap)
	out := &backupWriter{ctx: ctx, w: w}
	stream := s.db.NewStreamAt(snap.ts)
	stream.NumGo = 2
	stream.KeyToList = newestVersion
	stream.Send = func(buf *z.Buffer) error {
		list, err := badger.BufferToKVList(buf)
		if err != nil {
			return err
		}
		b, err := proto.Marshal(list)
		if err != nil {
			return err
		}
		if err := binary.Write(out, binary.LittleEndian, uint64(len(b))); err != nil {
			return err
		}
		_, err = out.Write(b)
		return err
	}
	if err := stream.Orchestrate(ctx); err != nil {
		switch {
		case out.err != nil:
			return out.err
		case ctx.Err() != nil:
			return ended(ctx.Err())
		}
		return readError(err)
	}
	return nil
}

// newestVersion is the row that an iterator over all versions has come to, of
// which it is at the newest; nothing if it is deleted.
func newestVersion(key []byte, it *badger.Iterator) (*pb.KVList, error) {
	item := it.Item()
	if item.IsDeletedOrExpired() {
		return new(pb.KVList), nil
	}
	value, err := item.ValueCopy(nil)
	if err != nil {
		return nil, err
	}
	return &pb.KVList{Kv: []*pb.KV{{Key: key, Value: value, Version: item.Version()}}}, nil
}

// backupWriter ends a backup with its context, and keeps the writer's error,
// which Badger does not pass on whole.
type backupWriter struct {
	ctx context.Context
	w   io.Writer
	err error
}

func (b *backupWriter) Write(p []byte) (n int, err error) {
	if err = b.ctx.Err(); err != nil {
		err = ended(err)
	} else {
		n, err = b.w.Write(p)
	}
	if err != nil {
		b.err = err
	}
	return n, err
}

// maxBackupList is more than Backup puts into a list, in bytes.
const maxBackupList = 256 << 20

// Restore makes a store in dir, which must not exist, of what Backup wrote. The
// store is there whole, durably, or not at all.
func Restore(ctx context.Context, dir string, r io.Reader) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("restoring a store: %w", err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("restoring a store: %s: %w", dir, fs.ErrExist)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return fmt.Errorf("restoring a store: %w", err)
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".restoring-")
	if err != nil {
		return fmt.Errorf("restoring a store: %w", err)
	}
	defer os.RemoveAll(temp)
	s, err := Open(Options{Dir: temp, Create: true})
	if err != nil {
		return err
	}
	if err := errors.Join(s.load(ctx, r), s.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp, dir); err != nil {
		return fmt.Errorf("restoring a store: %w", err)
	}
	if err := syncFile(filepath.Dir(dir)); err != nil {
		return fmt.Errorf("restoring a store: %w", err)
	}
	return nil
}

// load writes a backup into an empty store.
func (s *Store) load(ctx context.Context, r io.Reader) error {
	in := bufio.NewReader(r)
	loader := s.db.NewKVLoader(4)
	for {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		if err := s.room(s.maxBytes); err != nil {
			return err
		}
		var size uint64
		err := binary.Read(in, binary.LittleEndian, &size)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading a backup: %w", err)
		}
		if size > maxBackupList {
			return fmt.Errorf("%w: the backup is not one", keys.ErrDamaged)
		}
		b, err := io.ReadAll(io.LimitReader(in, int64(size)))
		if err == nil && uint64(len(b)) < size {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("reading a backup: %w", err)
		}
		var list pb.KVList
		if proto.Unmarshal(b, &list) != nil {
			return fmt.Errorf("%w: the backup is not one", keys.ErrDamaged)
		}
		for _, kv := range list.Kv {
			if len(kv.Key) < 2 || kv.Key[0] != rowPrefix || len(kv.Key) > 1+MaxKey || len(kv.Value) > MaxValue {
				return fmt.Errorf("%w: the backup holds what is no row", keys.ErrDamaged)
			}
			if err := loader.Set(kv); err != nil {
				return s.fail("restoring", err)
			}
		}
	}
	if err := loader.Finish(); err != nil {
		return s.fail("restoring", err)
	}
	return nil
}
