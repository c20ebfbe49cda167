package sdk

import (
	"lethe/sdk/envelope"

	keydv1 "lethe/proto/keyd/v1"
)

// deadSet remembers what was revoked lately, so that the answer to a call that
// was under way then is neither used nor cached. Revocations are numbered as
// they arrive. When there are too many to remember, all calls under way since
// before the oldest one forgotten count as overtaken.
type deadSet struct {
	seq   uint64
	floor uint64 // calls that began before this number are overtaken
	limit int
	dead  map[deadKey]death
	order []deadKey // oldest first, from head on
	head  int
}

// deadKey is one of: a DEK; a bucket of a class; a subject whose destruction
// this client asked for.
type deadKey struct {
	tenant  string
	id      envelope.KeyID
	class   uint32
	bucket  uint64
	subject string
}

type death struct {
	seq     uint64
	outcome keydv1.Outcome
}

func newDeadSet(limit int) *deadSet {
	return &deadSet{limit: limit, dead: make(map[deadKey]death)}
}

func (d *deadSet) add(k deadKey, o keydv1.Outcome) {
	d.seq++
	if old, known := d.dead[k]; known {
		// A key does not come back to life.
		if final(old.outcome) {
			o = old.outcome
		}
	} else {
		if len(d.order)-d.head >= d.limit {
			d.floor = max(d.floor, d.dead[d.order[d.head]].seq)
			delete(d.dead, d.order[d.head])
			d.order[d.head] = deadKey{}
			if d.head++; d.head >= d.limit {
				d.order = append(d.order[:0:0], d.order[d.head:]...)
				d.head = 0
			}
		}
		d.order = append(d.order, k)
	}
	d.dead[k] = death{d.seq, o}
}

// overtake makes every call that is under way count as overtaken.
func (d *deadSet) overtake() {
	d.seq++
	d.floor = d.seq
}

// judge tells whether l, the answer to a call that began when d.seq was began,
// must not be used, and with which outcome if that is final.
func (d *deadSet) judge(l *lease, began uint64) (o keydv1.Outcome, refused bool) {
	refused = began < d.floor
	judge := func(k deadKey) {
		death, known := d.dead[k]
		if !known || k == (deadKey{tenant: l.key.tenant}) {
			return
		}
		refused = refused || death.seq > began
		if final(death.outcome) {
			refused = true
			// Keys that are left need no word from the dead; asked again, keyd
			// leaves those out.
			if o == keydv1.Outcome_OUTCOME_UNSPECIFIED && !l.survives() {
				o = death.outcome
			}
		}
	}
	for _, id := range l.keyIDs() {
		judge(deadKey{tenant: l.key.tenant, id: id})
	}
	judge(deadKey{tenant: l.key.tenant, class: uint32(l.classNumber), bucket: l.bucket})
	if l.key.policy == 0 {
		judge(deadKey{tenant: l.key.tenant, subject: l.key.subject})
	} else {
		for _, s := range l.key.subjects() {
			judge(deadKey{tenant: l.key.tenant, subject: s})
		}
	}
	return o, refused
}

// final reports whether a key of this outcome is dead for good, for everybody. A
// bucket that has expired is not: keyd goes on to lease its keys for those whom a
// legal hold covers.
func final(o keydv1.Outcome) bool { return o == keydv1.Outcome_OUTCOME_ERASED }
