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

// hash mixes hashes of the strings, which alone tell most keys apart, with the
// rest. It is several times as fast as maphash.Comparable.
func (t *table) hash(k *leaseKey) uint64 {
	h := maphash.String(t.seed, k.subject)
	h = h*31 + maphash.String(t.seed, k.class)
	h = h*31 + maphash.String(t.seed, k.tenant)
	h = h*31 + binary.LittleEndian.Uint64(k.id[:]) + k.bucket
	return h*31 + uint64(k.purpose) + uint64(k.policy)<<8 + uint64(k.classNumber)<<16
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
