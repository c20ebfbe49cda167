package ledger

import (
	"fmt"
	"math/bits"

	"golang.org/x/mod/sumdb/tlog"

	"lethe/sdk/receipt"
)

// frontier is what must be known of a tree to extend it: the roots of the
// perfect subtrees that it is made of, the largest first.
type frontier struct {
	size  uint64
	roots []tlog.Hash
}

// readFrontier reads the frontier of the tree of the first size entries.
func readFrontier(r Reader, size uint64) (frontier, error) {
	roots, err := readHashes(r, frontierIndexes(size))
	return frontier{size: size, roots: roots}, err
}

// frontierIndexes returns where the roots of that frontier are stored.
func frontierIndexes(size uint64) (indexes []int64) {
	var lo uint64
	for level := bits.Len64(size) - 1; level >= 0; level-- {
		if size>>level&1 == 1 {
			indexes = append(indexes, tlog.StoredHashIndex(level, int64(lo>>level)))
			lo += 1 << level
		}
	}
	return indexes
}

// add extends the tree by a leaf.
func (f *frontier) add(leaf tlog.Hash) {
	f.roots = append(f.roots, leaf)
	for n := f.size; n&1 == 1; n >>= 1 {
		last := len(f.roots) - 1
		f.roots[last-1] = tlog.NodeHash(f.roots[last-1], f.roots[last])
		f.roots = f.roots[:last]
	}
	f.size++
}

// root returns the root of the tree.
func (f *frontier) root() tlog.Hash {
	if f.size == 0 {
		empty, _ := tlog.TreeHash(0, nil)
		return empty
	}
	h := f.roots[len(f.roots)-1]
	for i := len(f.roots) - 2; i >= 0; i-- {
		h = tlog.NodeHash(f.roots[i], h)
	}
	return h
}

// extend adds the entries of o that the tree lacks and reports whether the
// root is then that of o's checkpoint, which the caller has verified. o must
// hold the entry of index f.size.
func (f *frontier) extend(o Object, c receipt.Checkpoint) (bool, error) {
	if o.From > f.size || o.Size <= f.size {
		return false, fmt.Errorf("%w: entries %d to %d are in no object", ErrAnchorDamaged, f.size, o.From)
	}
	for _, e := range o.Entries[f.size-o.From:] {
		f.add(receipt.LeafHash(e.Salt, e.Statement))
	}
	return [32]byte(f.root()) == c.Root, nil
}
