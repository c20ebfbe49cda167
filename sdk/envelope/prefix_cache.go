package envelope

import (
	"crypto/cipher"
	"encoding/binary"
	"math/rand/v2"
	"sync/atomic"
)

// prefixCache keeps the derived keys of the XAES prefixes that were seen more
// than once lately, a bounded number of them. It takes no lock: what is looked
// up stays usable after it was evicted. Only prefixes of authentic blobs go in.
type prefixCache struct {
	slots [cacheSets * cacheWays]atomic.Pointer[cachedPrefix]
	seen  [cacheSeen]atomic.Uint32 // parts of prefixes that are not in slots
}

const (
	cacheSets = 16
	cacheWays = 4
	cacheSeen = 64
)

type cachedPrefix struct {
	bytes [xaesPrefixSize]byte
	aead  cipher.AEAD
}

// set returns the slots that may hold a prefix. Prefixes are random, so their
// own bits choose; one who chooses them badly slows down nobody but himself.
func (c *prefixCache) set(pre *[xaesPrefixSize]byte) []atomic.Pointer[cachedPrefix] {
	i := binary.BigEndian.Uint32(pre[:]) % cacheSets * cacheWays
	return c.slots[i : i+cacheWays]
}

func (c *prefixCache) get(pre *[xaesPrefixSize]byte) cipher.AEAD {
	set := c.set(pre)
	for i := range set {
		if p := set[i].Load(); p != nil && p.bytes == *pre {
			return p.aead
		}
	}
	return nil
}

// put keeps a derived key if its prefix was put before, not long ago: a key that
// is never asked for again costs a tenth of a cold Open to keep.
func (c *prefixCache) put(pre *[xaesPrefixSize]byte, aead cipher.AEAD) {
	seen, tag := &c.seen[pre[7]%cacheSeen], binary.BigEndian.Uint32(pre[8:])
	if seen.Load() != tag {
		// By chance, or two that share a place and come by turns would never
		// find their tags.
		if rand.Uint32()%2 == 0 {
			seen.Store(tag)
		}
		return
	}
	set := c.set(pre)
	at := rand.IntN(cacheWays)
	for i := range set {
		if set[i].Load() == nil {
			at = i
			break
		}
	}
	set[at].Store(&cachedPrefix{bytes: *pre, aead: aead})
}

func (c *prefixCache) drop() {
	for i := range c.slots {
		c.slots[i].Store(nil)
	}
	for i := range c.seen {
		c.seen[i].Store(0)
	}
}
