package badger

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/dgraph-io/badger/v4/fb"
	"github.com/dgraph-io/badger/v4/pb"
	"github.com/dgraph-io/badger/v4/table"
	"github.com/dgraph-io/badger/v4/y"
	"github.com/dgraph-io/ristretto/v2/z"
	"google.golang.org/protobuf/proto"

	"lethe/keyd/internal/keys"
)

// Badger opens what it can: it deletes tables that a cut manifest does not
// list, ends a log at the first record that does not parse, makes a new
// manifest where there is none, and ends the process on some damage. A key
// store must not lose keys in silence, so the files are looked at first, under
// the lock. What a crash leaves behind is told from damage and passes.

// Names and versions of Badger's files.
const (
	manifestName    = "MANIFEST"
	manifestRewrite = "MANIFEST-REWRITE"
	registryName    = "KEYREGISTRY"
	discardName     = "DISCARD"
	manifestVersion = 8
	// layoutVersion is ours, of the rows' form in Badger; it is kept in the
	// manifest's header.
	layoutVersion = 1
)

func damaged(file, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", keys.ErrDamaged, file, fmt.Sprintf(format, args...))
}

// files is what the directory holds, by kind; numbers are file ids.
type files struct {
	manifest bool
	tables   map[uint64]bool
	logs     []uint64 // ascending
	foreign  []string
}

func (d *directory) list() (files, error) {
	f := files{tables: make(map[uint64]bool)}
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return f, err
	}
	for _, e := range entries {
		name := e.Name()
		base, ext, _ := strings.Cut(name, ".")
		if id, ok := logID(name); ok {
			f.logs = append(f.logs, id)
			continue
		}
		id, err := strconv.ParseUint(base, 10, 64)
		switch {
		case name == manifestName:
			f.manifest = true
		case ext == "sst" && err == nil:
			f.tables[id] = true
		case name == manifestRewrite, name == newestLogName, name == newestLogTemp, name == "LOCK", name == "lost+found",
			ext == "vlog", name == registryName, name == discardName, name == "REWRITE-"+registryName:
		default:
			f.foreign = append(f.foreign, name)
		}
	}
	slices.Sort(f.logs)
	return f, nil
}

func (d *directory) file(name string) string { return filepath.Join(d.path, name) }

func (d *directory) table(id uint64) string { return table.NewFilename(id, d.path) }

func (d *directory) log(id uint64) string { return d.file(fmt.Sprintf("%05d.mem", id)) }

// logID reads a log's name.
func logID(name string) (id uint64, ok bool) {
	base, ok := strings.CutSuffix(name, ".mem")
	if !ok {
		return 0, false
	}
	id, err := strconv.ParseUint(base, 10, 64)
	return id, err == nil
}

// inspect checks the files, then removes what a crash may have left that Badger
// does not open, and cuts off the commit that was under way. Where it refuses
// the store, nothing was changed.
func (d *directory) inspect(create bool) error {
	f, err := d.list()
	if err != nil {
		return fmt.Errorf("store directory: %w", err)
	}
	if !f.manifest && len(f.tables) == 0 && len(f.logs) == 0 {
		// The manifest is the first file that Badger makes.
		switch {
		case !create:
			return fmt.Errorf("no store in %s: %w", d.path, fs.ErrNotExist)
		case len(f.foreign) > 0:
			return fmt.Errorf("making a store in %s: it holds other files (%q)", d.path, f.foreign[0])
		}
		return nil
	}
	end, err := d.check(f)
	if err != nil {
		return err
	}
	if end.torn {
		// A log that is named is not cut, or the next look misses its end.
		if err := d.forgetNewestLog(); err != nil {
			return fmt.Errorf("store: %w", err)
		}
		if err := cut(d.log(end.log), end.at); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	return d.dropEmpty()
}

// check looks for damage in the files of a store, and changes nothing.
func (d *directory) check(f files) (logEnd, error) {
	if !f.manifest {
		return logEnd{}, damaged(d.file(manifestName), "is missing")
	}
	m, err := d.readManifest()
	if err != nil {
		return logEnd{}, err
	}
	if err := d.checkRegistry(); err != nil {
		return logEnd{}, err
	}
	if err := d.checkNewestLog(f.logs); err != nil {
		return logEnd{}, err
	}
	for id := range m.live {
		if err := checkTable(d.table(id)); err != nil {
			return logEnd{}, err
		}
	}
	if err := d.checkValueLogs(); err != nil {
		return logEnd{}, err
	}
	if f.logs, err = d.written(f.logs); err != nil {
		return logEnd{}, err
	}
	end, err := d.checkLogs(f.logs)
	if err != nil {
		return logEnd{}, err
	}
	return end, d.checkOrphans(f, m)
}

// written returns the logs that have any bytes. Badger makes a log and then
// sizes it, and empties it before it removes it: a crash in between leaves one
// without.
func (d *directory) written(logs []uint64) ([]uint64, error) {
	var some []uint64
	for _, id := range logs {
		info, err := os.Stat(d.log(id))
		if err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		if info.Size() != 0 {
			some = append(some, id)
		}
	}
	return some, nil
}

// checkValueLogs checks the headers of the value logs, which hold no values.
func (d *directory) checkValueLogs() error {
	names, err := filepath.Glob(d.file("*.vlog"))
	if err != nil {
		return err
	}
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			return fmt.Errorf("store: %w", err)
		}
		if info.Size() == 0 {
			continue // as with logs
		}
		if err := checkLogHeader(name); err != nil {
			return err
		}
	}
	return nil
}

// dropEmpty removes logs of no bytes, over which Badger refuses to open. It
// also removes a list of garbage in value logs that is not whole; it is
// advisory, and there are no values in them.
func (d *directory) dropEmpty() error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		ext := filepath.Ext(e.Name())
		empty := info.Size() == 0 && (ext == ".mem" || ext == ".vlog")
		if empty || e.Name() == discardName && (info.Size() == 0 || info.Size()%16 != 0) {
			if err := os.Remove(d.file(e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// manifest is what MANIFEST says.
type manifest struct {
	live map[uint64]bool // tables of the store
	last uint64          // highest table id that it mentions
}

// readManifest reads MANIFEST: 4 bytes "Bdgr", 2 bytes of our version, 2 of
// Badger's, then records of 4 bytes length, 4 bytes CRC-32C, a ManifestChangeSet.
// The last record may be cut: it was being written.
func (d *directory) readManifest() (manifest, error) {
	name := d.file(manifestName)
	m := manifest{live: make(map[uint64]bool)}
	b, err := os.ReadFile(name)
	if err != nil {
		return m, fmt.Errorf("store: %w", err)
	}
	if len(b) < 8 || string(b[:4]) != "Bdgr" {
		return m, damaged(name, "has a bad header")
	}
	ours, theirs := binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint16(b[6:])
	switch {
	case ours > layoutVersion || theirs > manifestVersion:
		return m, fmt.Errorf("%w: %s has version %d.%d, this program knows %d.%d",
			keys.ErrNewerVersion, name, theirs, ours, manifestVersion, layoutVersion)
	case ours != layoutVersion || theirs != manifestVersion:
		return m, damaged(name, "has version %d.%d, which no release wrote", theirs, ours)
	}
	for b = b[8:]; len(b) >= 8; {
		n, sum := int64(binary.BigEndian.Uint32(b)), binary.BigEndian.Uint32(b[4:])
		if n > int64(len(b)-8) {
			break
		}
		record := b[8 : 8+n]
		b = b[8+n:]
		var set pb.ManifestChangeSet
		if crc32.Checksum(record, crcTable) != sum || proto.Unmarshal(record, &set) != nil {
			return m, damaged(name, "a record fails its checksum")
		}
		for _, c := range set.Changes {
			m.last = max(m.last, c.Id)
			if c.Op == pb.ManifestChange_CREATE {
				m.live[c.Id] = true
			} else {
				delete(m.live, c.Id)
			}
		}
	}
	return m, nil
}

// checkRegistry checks KEYREGISTRY, which without encryption holds 16 random
// bytes and a fixed text.
func (d *directory) checkRegistry() error {
	b, err := os.ReadFile(d.file(registryName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // made after the manifest
	}
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if len(b) != 28 || string(b[16:]) != "Hello Badger" {
		return damaged(d.file(registryName), "is garbled")
	}
	return nil
}

// checkTable checks a table, which is blocks and their index. Each block and
// the index ends with its checksum and that one's length; before those of the
// index stands its own length.
func checkTable(name string) error {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return damaged(name, "is missing, and %s lists it", manifestName)
	}
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	b, sum, ok := cutSum(b)
	if !ok {
		return damaged(name, "the index has no checksum")
	}
	b, index, ok := cutSized(b)
	if !ok || y.VerifyChecksum(index, sum) != nil {
		return damaged(name, "the index fails its checksum")
	}
	blocks := fb.GetRootAsTableIndex(index, 0)
	for i := range blocks.OffsetsLength() {
		var at fb.BlockOffset
		blocks.Offsets(&at, i)
		from, n := uint64(at.Offset()), uint64(at.Len())
		if from+n > uint64(len(b)) {
			return damaged(name, "block %d is missing", i)
		}
		block, sum, ok := cutSum(b[from : from+n])
		if !ok || y.VerifyChecksum(block, sum) != nil {
			return damaged(name, "block %d fails its checksum", i)
		}
	}
	return nil
}

// cutSized cuts bytes off the end of b, which their length follows.
func cutSized(b []byte) (rest, last []byte, ok bool) {
	if len(b) < 4 {
		return nil, nil, false
	}
	b, size := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	if uint64(size) > uint64(len(b)) {
		return nil, nil, false
	}
	at := len(b) - int(size)
	return b[:at], b[at:], true
}

func cutSum(b []byte) (rest []byte, sum *pb.Checksum, ok bool) {
	rest, b, ok = cutSized(b)
	sum = new(pb.Checksum)
	return rest, sum, ok && len(b) > 0 && proto.Unmarshal(b, sum) == nil
}

// Verify checks every table of the store against its checksums, as Open does.
// It reads all of it. When one fails, the store stops.
func (s *Store) Verify(ctx context.Context) error {
	snap, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer s.snaps.end(snap)
	for _, t := range s.db.Tables() {
		if err := ctx.Err(); err != nil {
			return ended(err)
		}
		name := s.dir.table(t.ID)
		err := checkTable(name)
		if errors.Is(err, keys.ErrDamaged) {
			if _, gone := os.Stat(name); errors.Is(gone, fs.ErrNotExist) {
				continue // compacted meanwhile
			}
			s.stop("verifying", err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// logEnd is where the whole commits of the newest log end; torn: behind them is
// one that is not whole.
type logEnd struct {
	log  uint64
	at   int64
	torn bool
}

// checkLogs checks the write-ahead logs. Commits are synced one by one and
// numbered without gaps, so only the newest log may end in a commit that is not
// whole, the one under way in a crash, which Badger would cut off. Anything
// else that does not parse had been acknowledged. A log is sized when it is
// made, and is never filled to its end, so one that ends within a commit and
// not in zeros is no work of a crash either.
//
// That the last acknowledged commit itself has rotten cannot be told from a
// commit that was under way.
func (d *directory) checkLogs(ids []uint64) (end logEnd, err error) {
	var last uint64 // newest commit
	for i, id := range ids {
		name := d.log(id)
		if err := checkLogHeader(name); err != nil {
			return end, err
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return end, fmt.Errorf("store: %w", err)
		}
		whole, gap := readLog(b, &last, nil)
		used := len(bytes.TrimRight(b, "\x00"))
		end = logEnd{log: id, at: int64(whole), torn: used > whole}
		switch {
		case gap:
			return end, damaged(name, "commits are missing")
		case !end.torn:
		case i < len(ids)-1, bytes.Count(b[whole:], []byte(commitKey)) > 1:
			return end, damaged(name, "a record fails its checksum")
		case len(b)-used < logSlack:
			return end, damaged(name, "its end is missing")
		}
	}
	return end, nil
}

func cut(name string, size int64) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Sync(), f.Close())
}

// Of a log: what precedes the records, and the marks of a record.
const (
	logHeader    = 20 // 8 bytes key id, 0 without encryption; 12 of IV
	maxRecord    = 22 // a record's header, at most
	inCommit     = 1 << 6
	endOfCommit  = 1 << 7
	commitKey    = "!badger!txn"
	timestampLen = 8
	// logSlack is less than what is always free at the end of a log.
	logSlack = memTableSize / 4
)

func checkLogHeader(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	defer f.Close()
	var h [logHeader]byte
	if _, err := f.ReadAt(h[:], 0); err != nil || binary.BigEndian.Uint64(h[:]) != 0 {
		return damaged(name, "has a bad header")
	}
	return nil
}

// readLog walks the whole commits of a log and returns where the last one ends.
// It calls row, unless nil, with each row's key (with Badger's timestamp) and
// stored value. last is the newest commit before the log, or 0; gap is set where
// one is missing.
//
// A record is 1 byte of marks, 1 free, then as varints the lengths of key and
// value and an expiry, then key, value and their CRC-32C, big endian.
func readLog(b []byte, last *uint64, row func(key, stored []byte)) (end int, gap bool) {
	end = logHeader
	var rows [][2][]byte
	for at := end; ; {
		marks, key, value, n := readRecord(b[at:])
		if n == 0 || len(key) <= timestampLen {
			return end, false
		}
		at += n
		ts := math.MaxUint64 - binary.BigEndian.Uint64(key[len(key)-timestampLen:])
		switch {
		case marks&inCommit != 0:
			if row != nil {
				rows = append(rows, [2][]byte{key, value})
			}
		case marks&endOfCommit != 0:
			if n, err := strconv.ParseUint(string(value), 10, 64); err != nil || n != ts {
				return end, false
			}
			if *last != 0 && ts != *last+1 {
				return end, true
			}
			*last = ts
			end = at
			for _, k := range rows {
				row(k[0], k[1])
			}
			rows = rows[:0]
		default: // a row of a restored backup, a commit of its own
			end = at
			if row != nil {
				row(key, value)
			}
		}
	}
}

// readRecord returns the first record of b and its length, or 0 if there is
// none that is whole.
func readRecord(b []byte) (marks byte, key, value []byte, n int) {
	if len(b) < 2 {
		return 0, nil, nil, 0
	}
	n = 2
	var field [3]uint64
	for i := range field {
		v, k := binary.Uvarint(b[n:min(len(b), maxRecord)])
		if k <= 0 {
			return 0, nil, nil, 0
		}
		field[i], n = v, n+k
	}
	klen, vlen := field[0], field[1]
	if klen > math.MaxUint16 || vlen > math.MaxUint32 || uint64(len(b)-n) < klen+vlen+crc32.Size {
		return 0, nil, nil, 0
	}
	key = b[n : n+int(klen)]
	n += int(klen)
	value = b[n : n+int(vlen)]
	n += int(vlen)
	if crc32.Checksum(b[:n], crcTable) != binary.BigEndian.Uint32(b[n:]) {
		return 0, nil, nil, 0
	}
	return b[0], key, value, n + crc32.Size
}

// checkOrphans looks at tables newer than anything in the manifest, which
// Badger would delete. A crash while one was made leaves it beside what it was
// made from. If its rows are nowhere else, the manifest has lost its end.
func (d *directory) checkOrphans(f files, m manifest) error {
	for id := range f.tables {
		if m.live[id] || id <= m.last || checkTable(d.table(id)) != nil {
			continue
		}
		first, err := firstKey(d.table(id))
		if err != nil {
			return err
		}
		found, err := d.holds(first, f.logs, m.live)
		if err != nil {
			return err
		}
		if !found {
			return damaged(d.file(manifestName), "its end is missing: it does not list table %d", id)
		}
	}
	return nil
}

// holds says whether a log or a listed table has the row, of this very commit.
func (d *directory) holds(key []byte, logs []uint64, live map[uint64]bool) (found bool, err error) {
	for _, id := range logs {
		b, err := os.ReadFile(d.log(id))
		if err != nil {
			return false, fmt.Errorf("store: %w", err)
		}
		var last uint64
		readLog(b, &last, func(k, _ []byte) { found = found || bytes.Equal(k, key) })
	}
	for id := range live {
		if found {
			break
		}
		err = withTable(d.table(id), func(t *table.Table) {
			it := t.NewIterator(table.NOCACHE)
			defer it.Close()
			it.Seek(key)
			found = it.Valid() && bytes.Equal(it.Key(), key)
		})
		if err != nil {
			return false, err
		}
	}
	return found, nil
}

func firstKey(name string) (key []byte, err error) {
	err = withTable(name, func(t *table.Table) { key = slices.Clone(t.Smallest()) })
	return key, err
}

// withTable opens a table that checkTable has passed.
func withTable(name string, fn func(*table.Table)) (err error) {
	defer func() {
		if recover() != nil {
			err = damaged(name, "cannot be read")
		}
	}()
	mf, err := z.OpenMmapFile(name, os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("store: %w", redact(err))
	}
	t, err := table.OpenTable(mf, table.Options{ReadOnly: true})
	if err != nil {
		return damaged(name, "cannot be read")
	}
	defer t.Close(-1)
	fn(t)
	return nil
}
