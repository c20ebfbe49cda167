package sdk

import (
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"strings"
	"sync/atomic"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// leaseKey is what a key is asked for, and what its lease is found by. The
// subject is part of it, so that a key leased for one subject is never found
// for another, whatever a blob's header says.
type leaseKey struct {
	tenant, subject, class string
	purpose                keydv1.Purpose
	// policy is zero for a key of one subject. Otherwise the lease is of
	// several keys, and subject is an encoded set; see encodeSet.
	policy Policy
	// For opening, as in the blob's header.
	id          envelope.KeyID
	classNumber uint16
	bucket      uint64
}

// owned returns k with strings of its own, since a caller may change the
// memory behind those that it passed once its call has returned.
func (k *leaseKey) owned() leaseKey {
	o := *k
	o.tenant, o.subject, o.class = strings.Clone(k.tenant), strings.Clone(k.subject), strings.Clone(k.class)
	return o
}

// table finds leases by key. Looking up takes no lock and shares no written
// memory; changes are made by one goroutine at a time.
type table struct {
	seed    maphash.Seed
	buckets []atomic.Pointer[node] // a power of two of them
}

// node is a link of a bucket's chain. It does not change once it is reachable,
// but for next.
type node struct {
	hash  uint64
	lease *lease
	next  atomic.Pointer[node]
}

func newTable(entries int) *table {
	return &table{
		seed:    maphash.MakeSeed(),
		buckets: make([]atomic.Pointer[node], 1<<bits.Len(uint(max(entries, 16)-1))),
	}
}

func (t *table) bucket(hash uint64) *atomic.Pointer[node] {
	return &t.buckets[hash&uint64(len(t.buckets)-1)]
}

// hash is what a lookup costs, so it takes in no more than tells most keys
// apart. A key to open is told by its id, which keyd drew at random, and its
// bucket; one to seal by subject and tenant, for a subject has few classes.
func (t *table) hash(k *leaseKey) uint64 {
	if k.policy == 0 && k.purpose == keydv1.Purpose_PURPOSE_OPEN {
		return fold(binary.LittleEndian.Uint64(k.id[:]), binary.LittleEndian.Uint64(k.id[8:])^k.bucket)
	}
	h := fold(maphash.String(t.seed, k.subject), maphash.String(t.seed, k.tenant)^uint64(len(k.class)))
	return fold(h, k.bucket^uint64(k.purpose)<<32)
}

// fold mixes a and b, so that every bit of the result depends on all of them.
func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xc2b2ae3d27d4eb4f)
	return hi ^ lo
}

// get returns the lease of k, or nil.
func (t *table) get(k *leaseKey) *lease {
	hash := t.hash(k)
	for n := t.bucket(hash).Load(); n != nil; n = n.next.Load() {
		if n.hash == hash && n.lease.key == *k {
			return n.lease
		}
	}
	return nil
}

// put adds l, whose key is not in the table.
func (t *table) put(l *lease) {
	n := &node{hash: t.hash(&l.key), lease: l}
	head := t.bucket(n.hash)
	n.next.Store(head.Load())
	head.Store(n)
}

// remove takes l out. A reader that stands on its node still finds the rest of
// the chain.
func (t *table) remove(l *lease) {
	at := t.bucket(t.hash(&l.key))
	for n := at.Load(); n != nil; n = at.Load() {
		if n.lease == l {
			at.Store(n.next.Load())
			return
		}
		at = &n.next
	}
}
