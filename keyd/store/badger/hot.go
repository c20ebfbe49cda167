package badger

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// hotRows keeps the stored rows that were read last, since a few of them (the
// epoch's, a tenant's, a class's, a bucket's) are read by nearly every call, and
// Badger takes microseconds for each. It is exact: a reader is given what its
// own snapshot holds, or nothing.
//
// That rests on there being one committer, in this process. A row goes in only
// if nothing was committed since the reader's snapshot, and is taken out before
// a commit of the same row can be seen by anybody; so a row that is in has not
// changed between the snapshot that it was read from and the newest one.
type hotRows struct {
	seed  maphash.Seed
	slots [hotSlots]atomic.Pointer[hotRow]
	// asked is the hash of the row that was offered last to each slot. A row
	// goes in when it is offered twice in a row: those of single subjects,
	// which pass through, mostly are not, and push no hot one out.
	asked [hotSlots]atomic.Uint64

	mu    sync.Mutex // of those who change slots
	newer uint64     // the newest commit's timestamp
	drops atomic.Uint64
}

const (
	hotSlots = 2048 // a power of two
	// hotBytes bounds a row's value, and all of them to 8 MiB.
	hotBytes = 4 << 10
)

// hotRow is immutable.
type hotRow struct {
	key, value []byte
	ts         uint64 // of the snapshot that it was read from
}

func (h *hotRows) init(ts uint64) {
	h.seed = maphash.MakeSeed()
	h.newer = ts
}

func (h *hotRows) hash(key []byte) uint64 { return maphash.Bytes(h.seed, key) }

// get returns the value that key has in the snapshot of ts. It is not the
// caller's to change.
func (h *hotRows) get(key []byte, ts uint64) ([]byte, bool) {
	row := h.slots[h.hash(key)%hotSlots].Load()
	if row == nil || row.ts > ts || string(row.key) != string(key) {
		return nil, false
	}
	return row.value, true
}

// put offers a row that was read from the snapshot of ts, by one who began to
// read when there had been so many drops.
func (h *hotRows) put(key, value []byte, ts, drops uint64) {
	hash := h.hash(key)
	if len(value) > hotBytes || h.asked[hash%hotSlots].Swap(hash) != hash {
		return
	}
	row := &hotRow{key: append([]byte(nil), key...), value: append([]byte(nil), value...), ts: ts}
	h.mu.Lock()
	defer h.mu.Unlock()
	if ts >= h.newer && drops == h.drops.Load() {
		h.slots[hash%hotSlots].Store(row)
	}
}

// commit takes the rows of a commit out. It is called before any reader can be
// given the commit's timestamp.
func (h *hotRows) commit(keys [][]byte, ts uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.newer = ts
	for _, k := range keys {
		h.slots[h.hash(k)%hotSlots].Store(nil)
	}
}

// drop takes all rows out. It is called before rows are dropped, which is no
// commit, and again after it.
func (h *hotRows) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drops.Add(1)
	for i := range h.slots {
		h.slots[i].Store(nil)
	}
}
