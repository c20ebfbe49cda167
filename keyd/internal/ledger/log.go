package ledger

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"golang.org/x/mod/sumdb/tlog"
	"google.golang.org/protobuf/proto"

	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// Reader reads one snapshot of the store. Get fails when there is no such row.
type Reader interface {
	Get(key []byte) ([]byte, error)
}

// Tx is a Reader that also writes. Get sees the transaction's own writes.
type Tx interface {
	Reader
	Put(key, value []byte) error
}

// Prefix begins the key of every row of the ledger, and of no other row.
const Prefix = 'L'

// MaxSize is the greatest number of entries in a ledger: fifteen digits.
const MaxSize = 999_999_999_999_999

// After the prefix: one byte for the kind of row, so that no key is a prefix of
// another, then the number in eight bytes, big-endian.
const (
	rowHead  = 'H' // LedgerHead
	rowHash  = 'h' // by tlog's stored hash index: 32 bytes
	rowEntry = 's' // by entry index: LedgerEntry
)

var headKey = []byte{Prefix, rowHead}

func rowKey(kind byte, n uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{Prefix, kind}, n)
}

// ErrDamaged: rows of the ledger contradict each other.
var ErrDamaged = errors.New("ledger is damaged")

// ErrSize: a size or an index beyond the ledger.
var ErrSize = errors.New("beyond the ledger")

// Head is the newest state of the ledger's tree.
type Head struct {
	Size uint64
	// Root is the RFC 6962 tree hash.
	Root [32]byte
	// Time is that of the newest append, in whole milliseconds; it never goes
	// back. The zero time when nothing was appended.
	Time time.Time
}

// Create writes the head of an empty ledger. It does not look for an existing
// one: that is for the caller, who knows whether the store is new.
func Create(tx Tx) error {
	root, err := tlog.TreeHash(0, nil)
	if err != nil {
		return err
	}
	return putHead(tx, Head{Root: root})
}

// ReadHead returns the head. Where the ledger was never created, it returns
// the store's error for a missing row.
func ReadHead(r Reader) (Head, error) {
	b, err := r.Get(headKey)
	if err != nil {
		return Head{}, fmt.Errorf("ledger head: %w", err)
	}
	var row storev1.LedgerHead
	if err := proto.Unmarshal(b, &row); err != nil || len(row.Root) != tlog.HashSize || row.Size > MaxSize {
		return Head{}, fmt.Errorf("%w: head", ErrDamaged)
	}
	h := Head{Size: row.Size, Root: [32]byte(row.Root)}
	if row.TimeMs != 0 {
		h.Time = time.UnixMilli(row.TimeMs).UTC()
	}
	return h, nil
}

func putHead(tx Tx, h Head) error {
	row := &storev1.LedgerHead{Size: h.Size, Root: h.Root[:]}
	if !h.Time.IsZero() {
		row.TimeMs = h.Time.UnixMilli()
	}
	b, err := proto.Marshal(row)
	if err != nil {
		return err
	}
	return tx.Put(headKey, b)
}

// Group is what one Append added, and all it takes to make receipts of it without
// the store. It is immutable.
type Group struct {
	// First is the index of the first entry.
	First uint64
	// Head is the ledger's head after the append.
	Head Head

	entries []Entry
	hashes  map[int64]tlog.Hash // by stored hash index: those of proofs in Head's tree
}

// Append adds statements as one group. Salts are drawn anew at each call. It
// reads and writes the head row, which every append conflicts on: call it last in
// a transaction, and once.
func Append(tx Tx, now time.Time, statements []*receipt.Statement) (*Group, error) {
	if len(statements) == 0 {
		return nil, errors.New("ledger: nothing to append")
	}
	entries := make([]Entry, len(statements))
	for i, s := range statements {
		b, err := s.Encode()
		if err != nil {
			return nil, fmt.Errorf("ledger: statement %d of %d: %w", i, len(statements), err)
		}
		salt := make([]byte, receipt.SaltSize)
		rand.Read(salt) // never fails
		entries[i] = Entry{Salt: salt, Statement: b}
	}
	head, err := ReadHead(tx)
	if err != nil {
		return nil, err
	}
	for i := range entries {
		entries[i].TreeSize = head.Size + uint64(len(entries))
	}
	g := &Group{First: head.Size, entries: entries}
	g.Head, g.hashes, err = extend(tx, head, now, entries)
	return g, err
}

// Replay appends entries that the store lost, as the mirror kept them: with
// their salts, so that the tree comes out as it was. entries must be those that
// follow the ledger's newest, in order. Like Append it is called last in a
// transaction, and once.
func Replay(tx Tx, entries []Entry) (Head, error) {
	head, err := ReadHead(tx)
	if err != nil {
		return Head{}, err
	}
	var now time.Time
	for i, e := range entries {
		s, err := receipt.ParseStatement(e.Statement)
		if err != nil {
			return Head{}, fmt.Errorf("ledger: entry %d of %d: %w", i, len(entries), err)
		}
		if len(e.Salt) != receipt.SaltSize || e.TreeSize <= head.Size+uint64(i) || e.TreeSize > MaxSize {
			return Head{}, fmt.Errorf("ledger: entry %d of %d does not follow", i, len(entries))
		}
		if s.Time.After(now) {
			now = s.Time
		}
	}
	head, _, err = extend(tx, head, now, entries)
	return head, err
}

// extend writes the rows of entries that follow head, and the new head. It
// returns the new hashes too, with those of head's tree that proofs of the new
// entries need: its frontier.
func extend(tx Tx, head Head, now time.Time, entries []Entry) (Head, map[int64]tlog.Hash, error) {
	size := head.Size + uint64(len(entries))
	if size > MaxSize {
		return Head{}, nil, fmt.Errorf("%w: it is full", ErrSize)
	}
	known := make(map[int64]tlog.Hash, 2*len(entries)+bits.Len64(size))
	indexes := frontierIndexes(head.Size)
	old, err := readHashes(tx, indexes)
	if err != nil {
		return Head{}, nil, err
	}
	for i, x := range indexes {
		known[x] = old[i]
	}
	hashes := knownHashes(known)
	for i, e := range entries {
		n := head.Size + uint64(i)
		row, err := proto.Marshal(&storev1.LedgerEntry{Salt: e.Salt, Statement: e.Statement, TreeSize: e.TreeSize})
		if err != nil {
			return Head{}, nil, err
		}
		if err := tx.Put(rowKey(rowEntry, n), row); err != nil {
			return Head{}, nil, err
		}
		stored, err := tlog.StoredHashesForRecordHash(int64(n), receipt.LeafHash(e.Salt, e.Statement), hashes)
		if err != nil {
			return Head{}, nil, err
		}
		at := tlog.StoredHashIndex(0, int64(n))
		for j, h := range stored {
			known[at+int64(j)] = h
			if err := tx.Put(rowKey(rowHash, uint64(at)+uint64(j)), h[:]); err != nil {
				return Head{}, nil, err
			}
		}
	}
	root, err := tlog.TreeHash(int64(size), hashes)
	if err != nil {
		return Head{}, nil, err
	}
	now = time.UnixMilli(now.UnixMilli()).UTC()
	if head.Time.After(now) {
		now = head.Time
	}
	head = Head{Size: size, Root: root, Time: now}
	return head, known, putHead(tx, head)
}

// ReadEntry returns the entry of an index. Where there is none, it returns the
// store's error for a missing row.
func ReadEntry(r Reader, index uint64) (Entry, error) {
	b, err := r.Get(rowKey(rowEntry, index))
	if err != nil {
		return Entry{}, fmt.Errorf("ledger entry %d: %w", index, err)
	}
	var row storev1.LedgerEntry
	if err := proto.Unmarshal(b, &row); err != nil || len(row.Salt) != receipt.SaltSize ||
		row.TreeSize <= index || row.TreeSize > MaxSize {
		return Entry{}, fmt.Errorf("%w: entry %d", ErrDamaged, index)
	}
	return Entry{Salt: row.Salt, Statement: row.Statement, TreeSize: row.TreeSize}, nil
}

// RootAt returns the root of the tree of the first size entries. Beyond the
// ledger it returns ErrSize.
func RootAt(r Reader, size uint64) ([32]byte, error) {
	if err := within(r, size); err != nil {
		return [32]byte{}, err
	}
	return tlog.TreeHash(int64(size), hashReader(r))
}

// Consistency returns the proof, in the order of RFC 6962 section 2.1.2, that
// the tree of size older is a prefix of the tree of size newer. The proof from
// the empty tree is empty.
func Consistency(r Reader, older, newer uint64) ([][]byte, error) {
	if err := within(r, newer); err != nil {
		return nil, err
	}
	if older > newer {
		return nil, fmt.Errorf("%w: the older size is the greater", ErrSize)
	}
	if older == 0 {
		return nil, nil
	}
	p, err := tlog.ProveTree(int64(newer), int64(older), hashReader(r))
	if err != nil {
		return nil, err
	}
	out := make([][]byte, len(p))
	for i := range p {
		out[i] = p[i][:]
	}
	return out, nil
}

// Receipt returns the receipt for the entry of index, and of later ones that
// are about it, in ascending order. Each entry is proven in the tree that its
// own append made, so that with the same signer the same bytes come out at any
// time. Whether the anchor covers that tree is for the caller to know first.
func Receipt(r Reader, s *Signer, index uint64, later ...uint64) ([]byte, error) {
	var entries []receipt.Entry
	for _, n := range append([]uint64{index}, later...) {
		e, err := ReadEntry(r, n)
		if err != nil {
			return nil, err
		}
		hashes := hashReader(r)
		root, err := tlog.TreeHash(int64(e.TreeSize), hashes)
		if err != nil {
			return nil, fmt.Errorf("ledger entry %d: %w", n, err)
		}
		proven, err := prove(e, n, root, hashes, s)
		if err != nil {
			return nil, err
		}
		entries = append(entries, proven)
	}
	return receipt.Encode(entries...)
}

// Receipt is the receipt for the entry of index, which is one of the group's.
func (g *Group) Receipt(s *Signer, index uint64) ([]byte, error) {
	if index < g.First || index >= g.Head.Size {
		return nil, fmt.Errorf("%w: entry %d is not of the group", ErrSize, index)
	}
	proven, err := prove(g.entries[index-g.First], index, g.Head.Root, knownHashes(g.hashes), s)
	if err != nil {
		return nil, err
	}
	return receipt.Encode(proven)
}

// prove proves the entry of index in the tree that its append made.
func prove(e Entry, index uint64, root tlog.Hash, hashes tlog.HashReader, s *Signer) (receipt.Entry, error) {
	p, err := tlog.ProveRecord(int64(e.TreeSize), int64(index), hashes)
	if err != nil {
		return receipt.Entry{}, fmt.Errorf("ledger entry %d: %w", index, err)
	}
	if tlog.CheckRecord(p, int64(e.TreeSize), root, int64(index), receipt.LeafHash(e.Salt, e.Statement)) != nil {
		return receipt.Entry{}, fmt.Errorf("%w: entry %d is not in its tree", ErrDamaged, index)
	}
	c, err := s.Checkpoint(e.TreeSize, root)
	if err != nil {
		return receipt.Entry{}, err
	}
	proof := receipt.Proof{Index: index, Checkpoint: c}
	for _, h := range p {
		proof.Hashes = append(proof.Hashes, h)
	}
	return receipt.Entry{Statement: e.Statement, Salt: e.Salt, Proof: proof}, nil
}

// within returns ErrSize unless the ledger has size entries.
func within(r Reader, size uint64) error {
	h, err := ReadHead(r)
	if err != nil {
		return err
	}
	if size > h.Size {
		return fmt.Errorf("%w: %d of %d entries", ErrSize, size, h.Size)
	}
	return nil
}

func hashReader(r Reader) tlog.HashReader {
	return tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) { return readHashes(r, indexes) })
}

// knownHashes reads hashes that are all known.
func knownHashes(known map[int64]tlog.Hash) tlog.HashReader {
	return tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		out := make([]tlog.Hash, len(indexes))
		for i, x := range indexes {
			h, ok := known[x]
			if !ok {
				return nil, fmt.Errorf("ledger hash %d is not at hand", x)
			}
			out[i] = h
		}
		return out, nil
	})
}

func readHashes(r Reader, indexes []int64) ([]tlog.Hash, error) {
	out := make([]tlog.Hash, len(indexes))
	for i, x := range indexes {
		b, err := r.Get(rowKey(rowHash, uint64(x)))
		if err != nil {
			return nil, fmt.Errorf("ledger hash %d: %w", x, err)
		}
		if len(b) != tlog.HashSize {
			return nil, fmt.Errorf("%w: hash %d", ErrDamaged, x)
		}
		copy(out[i][:], b)
	}
	return out, nil
}
