package badger

import (
	"bytes"
	"hash/maphash"
	"sync/atomic"
)

// rowCache keeps rows that were read from one snapshot, for the other readers
// of that snapshot: a few rows (the epoch's, a tenant's, a class's, a bucket's)
// are read by nearly every call, and Badger takes microseconds for each. It
// begins with those of the commit that made the snapshot: whoever waited for it
// reads them next.
//
// A snapshot does not change, so no row is ever taken out as outdated: readers
// of a newer snapshot have another cache. See snapshots.
type rowCache [1 << 10]atomic.Pointer[cachedRow]

// cachedRow is immutable.
type cachedRow struct{ key, value []byte }

// maxCachedValue bounds the rows of a cache to 4 MiB.
const maxCachedValue = 4 << 10

var rowCacheSeed = maphash.MakeSeed()

// cacheOf returns the cache of a snapshot in which these rows are the newest.
func cacheOf(written map[string]write) *rowCache {
	c := new(rowCache)
	for k, w := range written {
		if !w.deleted && len(w.value) <= maxCachedValue {
			key := badgerKey(k)
			c.slot(key).Store(&cachedRow{key, w.value})
		}
	}
	return c
}

func (c *rowCache) slot(key []byte) *atomic.Pointer[cachedRow] {
	return &c[maphash.Bytes(rowCacheSeed, key)%uint64(len(c))]
}

// get returns a copy of the value of a row that is in c.
func (c *rowCache) get(key []byte) ([]byte, bool) {
	row := c.slot(key).Load()
	if row == nil || !bytes.Equal(row.key, key) {
		return nil, false
	}
	return append([]byte{}, row.value...), true
}

// put adds a row in the place of another: the rows of single subjects, which
// pass through, seldom meet the place of one that is read all the time.
func (c *rowCache) put(key, value []byte) {
	if len(value) <= maxCachedValue {
		c.slot(key).Store(&cachedRow{bytes.Clone(key), bytes.Clone(value)})
	}
}
