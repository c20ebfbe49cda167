package sdk

import (
	"math/rand/v2"
	"weak"

	"lethe/sdk/envelope"
)

// idKey names a DEK. A tenant's key ids are its own.
type idKey struct {
	tenant string
	id     envelope.KeyID
}

// registry knows every lease whose key may still be in memory. It holds those
// in the table and those of open streams; a lease that was evicted is only
// watched, so that it can be wiped if it must, while the operations that have
// it keep it, and the collector takes and wipes it after the last of them.
// Client.mu guards it; the table is read without.
type registry struct {
	table      *table
	held       []*lease
	byID       map[idKey][]weak.Pointer[lease]
	mapped     int   // leases in the table
	ahead      int   // leases of next buckets
	bytes      int64 // of both
	maxEntries int
	maxBytes   int64
}

// What a lease is counted for beside its identifiers: the derived keys, and
// for opening those of a few sealers.
const (
	sealerCost = 4 << 10
	openerCost = 16 << 10
	memberCost = 256 // of a lease of several keys, each
)

func (l *lease) cost() int64 {
	n := int64(sealerCost)
	if l.opener != nil {
		n = openerCost
	}
	return n + int64(len(l.ids))*memberCost + int64(len(l.key.tenant)+len(l.key.subject)+len(l.key.class))
}

func newRegistry(maxEntries int, maxBytes int64) *registry {
	return &registry{
		table:      newTable(maxEntries),
		byID:       make(map[idKey][]weak.Pointer[lease]),
		maxEntries: maxEntries,
		maxBytes:   maxBytes,
	}
}

// watch makes a lease known that is not to be held.
func (r *registry) watch(l *lease) {
	l.place = -1
	for _, id := range l.keyIDs() {
		k := idKey{l.key.tenant, id}
		r.byID[k] = append(r.byID[k], weak.Make(l))
	}
}

// admit makes l known and puts it in the table.
func (r *registry) admit(l *lease) {
	r.watch(l)
	r.install(l)
}

// install puts l in the table, in the place of an older one, and makes room
// for it.
func (r *registry) install(l *lease) {
	if old := r.table.get(&l.key); old != nil {
		r.unmap(old)
	}
	for r.mapped > 0 && (r.mapped+r.ahead >= r.maxEntries || r.bytes+l.cost() > r.maxBytes) {
		r.unmap(r.victim())
	}
	r.table.put(l)
	l.mapped = true
	r.mapped++
	r.bytes += l.cost()
	r.hold(l)
}

// follow makes next the lease that will take l's place, unless there is no room
// for it: nothing is given up for what is not needed yet.
func (r *registry) follow(l, next *lease) bool {
	if !l.mapped || r.mapped+r.ahead >= r.maxEntries || r.bytes+next.cost() > r.maxBytes {
		return false
	}
	r.watch(next)
	l.next = next
	r.ahead++
	r.bytes += next.cost()
	return true
}

// part undoes follow, and returns what was to take l's place.
func (r *registry) part(l *lease) *lease {
	next := l.next
	if next != nil {
		l.next = nil
		r.ahead--
		r.bytes -= next.cost()
	}
	return next
}

// victim chooses among a few leases of the table the one that was used least
// lately. There is at least one.
func (r *registry) victim() *lease {
	var v *lease
	start := rand.IntN(len(r.held))
	for i, tries := 0, 0; i < len(r.held) && tries < 8; i++ {
		l := r.held[(start+i)%len(r.held)]
		if !l.mapped {
			continue
		}
		tries++
		if v == nil || l.lastUse.Load() < v.lastUse.Load() {
			v = l
		}
	}
	return v
}

// unmap takes l out of the table. Who has it keeps it.
func (r *registry) unmap(l *lease) {
	if !l.mapped {
		return
	}
	r.table.remove(l)
	l.mapped = false
	r.mapped--
	r.bytes -= l.cost()
	if next := r.part(l); next != nil {
		next.end(errDropped)
	}
	if l.streams == 0 {
		r.release(l)
	}
}

func (r *registry) hold(l *lease) {
	if l.place < 0 {
		l.place = len(r.held)
		r.held = append(r.held, l)
	}
}

func (r *registry) release(l *lease) {
	if l.place < 0 {
		return
	}
	last := len(r.held) - 1
	r.held[l.place] = r.held[last]
	r.held[l.place].place = l.place
	r.held[last] = nil
	r.held = r.held[:last]
	l.place = -1
}

// drop ends l, wipes it and forgets it.
func (r *registry) drop(l *lease, why error) {
	l.end(why)
	r.unmap(l)
	r.release(l)
}

// each calls fn for every lease that is still in memory, and forgets those
// that are not, or that have ended.
func (r *registry) each(fn func(*lease)) {
	for k := range r.byID {
		r.eachOf(k, func(l *lease) {
			if l.id == k.id { // once for a lease of several keys
				fn(l)
			}
		})
	}
}

// eachOf is each for the leases of one key id.
func (r *registry) eachOf(k idKey, fn func(*lease)) {
	all := r.byID[k]
	kept := all[:0]
	for _, p := range all {
		l := p.Value()
		if l == nil {
			continue
		}
		fn(l)
		if l.ended.Load() == nil {
			kept = append(kept, p)
		}
	}
	clear(all[len(kept):])
	if len(kept) == 0 {
		delete(r.byID, k)
	} else {
		r.byID[k] = kept
	}
}
