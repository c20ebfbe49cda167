package sdk

import (
	"encoding/binary"
	"slices"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// A set is several subjects of one tenant and class. What is sealed for it and
// opened for it needs several keys, which are leased by one call and make one
// lease: it has one end, one place in the cache, and one sealer or opener. It
// is renewed, evicted and revoked as any other, except that an opener of the
// policy Any lives on with the keys that are left.

// member is one recipient of a lease of several keys.
type member struct {
	place   int // in the set, or -1 for one that the caller did not name
	id      envelope.KeyID
	handle  [16]byte
	outcome keydv1.Outcome // unspecified while the key can be had
}

// held reports whether the member's key is the lease's.
func (m *member) held() bool {
	return m.place >= 0 && m.outcome == keydv1.Outcome_OUTCOME_UNSPECIFIED
}

// setError is why a lease of several keys could not be had, or has ended.
type setError struct {
	err     *Error
	members []member
}

func (e *setError) Error() string { return e.err.Error() }
func (e *setError) Unwrap() error { return e.err }

// errSplit: the keys are of different buckets, one of which has just begun.
var errSplit = unavailable("keys of different buckets")

// encodeSet is what leaseKey.subject is for several: the subjects, in ascending
// order and none twice, and, to open, the key ids of the blob's header.
func encodeSet(subjects []string, ids []envelope.KeyID) string {
	n := 1 + len(ids)*envelope.KeyIDSize
	for _, s := range subjects {
		n += 2 + len(s)
	}
	b := append(make([]byte, 0, n), byte(len(subjects)))
	for _, s := range subjects {
		b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
		b = append(b, s...)
	}
	for i := range ids {
		b = append(b, ids[i][:]...)
	}
	return string(b)
}

func (k *leaseKey) decodeSet() (subjects []string, ids []envelope.KeyID) {
	s := k.subject
	subjects = make([]string, s[0])
	s = s[1:]
	for i := range subjects {
		n := int(s[0])<<8 | int(s[1])
		subjects[i], s = s[2:2+n], s[2+n:]
	}
	for len(s) > 0 {
		ids = append(ids, envelope.KeyID([]byte(s[:envelope.KeyIDSize])))
		s = s[envelope.KeyIDSize:]
	}
	return subjects, ids
}

func (k *leaseKey) subjects() []string {
	subjects, _ := k.decodeSet()
	return subjects
}

// setRequest asks for the keys of a set: a query each, and to open the ids of
// the blob, of which keyd finds each subject's.
func (k *leaseKey) setRequest() *keydv1.GetBlobKeysRequest {
	subjects, ids := k.decodeSet()
	req := &keydv1.GetBlobKeysRequest{}
	for _, s := range subjects {
		q := &keydv1.BlobKeyQuery{Tenant: k.tenant, SubjectId: []byte(s), Class: k.class, Purpose: k.purpose}
		if k.purpose == keydv1.Purpose_PURPOSE_OPEN {
			q.ClassNumber, q.Bucket = uint32(k.classNumber), k.bucket
		}
		req.Queries = append(req.Queries, q)
	}
	for i := range ids {
		req.Recipients = append(req.Recipients, ids[i][:])
	}
	return req
}

// keyIDs returns the ids of the keys that were granted.
func (l *lease) keyIDs() []envelope.KeyID {
	if l.key.policy == 0 {
		return []envelope.KeyID{l.id}
	}
	return l.ids
}

// survives reports whether the lease outlives a key of it.
func (l *lease) survives() bool { return l.key.policy == Any && l.opener != nil }

// grantSet is grant for several keys. Whom the blob is not for is told before
// what has become of those whom it is for.
func (c *Client) grantSet(k *leaseKey, resp *keydv1.GetBlobKeysResponse, wall time.Time, boot time.Duration) (*lease, error) {
	results := resp.GetResults()
	defer func() {
		for _, r := range results {
			clear(r.GetKey().GetKey())
		}
	}()
	members, got, failed, err := k.readSet(resp)
	if err != nil {
		return nil, err
	}
	if failed := worst(failed, k.policy == All || k.purpose == keydv1.Purpose_PURPOSE_SEAL, len(got)); failed != nil {
		return nil, &setError{failed, members}
	}

	first := got[0]
	d, once := term(first)
	keys := make([]*envelope.Key, len(got))
	defer func() {
		for _, key := range keys {
			if key != nil {
				key.Wipe()
			}
		}
	}()
	size := first.GetLedgerSize()
	for i, b := range got {
		if b.GetClassNumber() != first.GetClassNumber() || b.GetBucket() != first.GetBucket() {
			return nil, errSplit
		}
		if di, oi := term(b); di < d || oi {
			d, once = min(d, di), once || oi
		}
		size = min(size, b.GetLedgerSize())
		keys[i] = &envelope.Key{
			ID: envelope.KeyID(b.GetKeyId()), Class: uint16(b.GetClassNumber()), Bucket: b.GetBucket(),
			Secret: [envelope.KeySize]byte(b.GetKey()),
		}
	}
	l := c.newLease(k, first, once, wall)
	l.ledgerSize = size
	for _, key := range keys {
		l.ids = append(l.ids, key.ID)
	}
	slices.SortFunc(l.ids, func(a, b envelope.KeyID) int { return slices.Compare(a[:], b[:]) })
	l.id = l.ids[0]
	l.members.Store(&members)
	l.extend(wall, boot, d)
	l.lastUse.Store(int64(boot))
	l.renewAt = renewalTime(boot, d)
	l.planNext(wall.UnixNano(), boot, d)
	if k.purpose == keydv1.Purpose_PURPOSE_SEAL {
		l.sealer, err = envelope.NewMultiSealer(k.policy, keys, envelope.Options{Check: l.check})
	} else {
		l.opener, err = envelope.NewMultiOpener(k.policy, keys, envelope.Options{Check: l.check})
	}
	if err != nil {
		return nil, malformed("two subjects with one key")
	}
	return l, nil
}

// readSet reads keyd's answer for a set: what is known of each recipient, the
// keys that were granted, and the failures, by place in the set.
func (k *leaseKey) readSet(resp *keydv1.GetBlobKeysResponse) (members []member, got []*keydv1.BlobKey, failed []*Error, err error) {
	_, ids := k.decodeSet()
	results, told := resp.GetResults(), resp.GetRecipients()
	failed = make([]*Error, len(results))
	members = make([]member, len(results), len(results)+len(ids))
	named := make(map[envelope.KeyID]int, len(results))
	astray := false
	for i, r := range results {
		m := &members[i]
		m.place = i
		f, b := r.GetFailure(), r.GetKey()
		switch {
		case f != nil:
			failed[i] = fromFailure(f)
			if m.outcome = failed[i].Outcome; m.outcome == keydv1.Outcome_OUTCOME_UNSPECIFIED {
				return nil, nil, nil, failed[i]
			}
			astray = astray || misnamed(m.outcome)
		case b == nil:
			return nil, nil, nil, malformed("a result that is neither key nor failure")
		case len(b.GetKeyId()) != envelope.KeyIDSize, len(b.GetKey()) != envelope.KeySize, b.GetClassNumber() > 0xffff:
			return nil, nil, nil, malformed("a field of a wrong size")
		default:
			m.id = envelope.KeyID(b.GetKeyId())
			got = append(got, b)
		}
		if k.purpose != keydv1.Purpose_PURPOSE_OPEN {
			continue
		}
		if b != nil && (!slices.Contains(ids, m.id) || uint16(b.GetClassNumber()) != k.classNumber || b.GetBucket() != k.bucket ||
			!slices.Equal(r.GetKeyId(), b.GetKeyId())) {
			return nil, nil, nil, malformed("another key than was asked for")
		}
		if id := r.GetKeyId(); len(id) == envelope.KeyIDSize {
			m.id = envelope.KeyID(id)
			named[m.id] = i
		}
	}
	if k.purpose != keydv1.Purpose_PURPOSE_OPEN || astray || len(told) == 0 {
		return members, got, failed, nil
	}
	if len(told) != len(ids) {
		return nil, nil, nil, malformed("not one state a recipient")
	}
	for i, r := range told {
		at, is := named[ids[i]]
		if !is {
			members = append(members, member{place: -1, id: ids[i], outcome: r.GetOutcome()})
			at = len(members) - 1
		}
		copy(members[at].handle[:], r.GetHandle())
	}
	return members, got, failed, nil
}

// misnamed reports whether an outcome says that whom the caller named is not
// whom the blob is for, or not his to name.
func misnamed(o keydv1.Outcome) bool { return slices.Contains(misnaming, o) }

// In order of precedence.
var (
	misnaming = []keydv1.Outcome{
		keydv1.Outcome_OUTCOME_WRONG_SUBJECT, keydv1.Outcome_OUTCOME_INVALID_ARGUMENT,
		keydv1.Outcome_OUTCOME_DENIED, keydv1.Outcome_OUTCOME_UNKNOWN,
	}
	ending = []keydv1.Outcome{
		keydv1.Outcome_OUTCOME_ERASED, keydv1.Outcome_OUTCOME_EXPIRED, keydv1.Outcome_OUTCOME_PENDING_ERASURE,
	}
)

// worst returns the failure that decides, or nil. If all keys are needed it is
// the most final one, for what is dead for one is dead. If one key would have
// done and none was granted, it is the least final, so that what may open later
// is not called dead.
func worst(failed []*Error, all bool, granted int) *Error {
	pick := func(outcomes ...keydv1.Outcome) *Error {
		for _, o := range outcomes {
			for _, f := range failed {
				if f != nil && f.Outcome == o {
					return f
				}
			}
		}
		return nil
	}
	if f := pick(misnaming...); f != nil {
		return f
	}
	if !all && granted > 0 {
		return nil
	}
	rest := func() *Error {
		for _, f := range failed {
			if f != nil && !slices.Contains(ending, f.Outcome) {
				return f
			}
		}
		return nil
	}
	if all {
		if f := pick(ending...); f != nil {
			return f
		}
		return rest()
	}
	if f := rest(); f != nil {
		return f
	}
	return pick(keydv1.Outcome_OUTCOME_PENDING_ERASURE, keydv1.Outcome_OUTCOME_EXPIRED, keydv1.Outcome_OUTCOME_ERASED)
}

// sentence is err with the members of l that are dead.
func (d *deadSet) sentence(l *lease, err *Error) error {
	if l.key.policy == 0 {
		return err
	}
	members := slices.Clone(*l.members.Load())
	for i := range members {
		if death, known := d.dead[deadKey{tenant: l.key.tenant, id: members[i].id}]; known && members[i].held() {
			members[i].outcome = death.outcome
		}
	}
	return &setError{err, members}
}

// lose takes the key with this id from l, and ends l unless it can do without.
// Client.mu is held.
func (c *Client) lose(l *lease, id envelope.KeyID, why *Error) {
	if l.key.policy == 0 {
		c.registry.drop(l, why)
		return
	}
	members := slices.Clone(*l.members.Load())
	left := false
	for i := range members {
		if m := &members[i]; m.id == id && m.outcome != keydv1.Outcome_OUTCOME_ERASED {
			if m.outcome = why.Outcome; m.outcome == keydv1.Outcome_OUTCOME_UNSPECIFIED {
				m.outcome = keydv1.Outcome_OUTCOME_UNAVAILABLE
			}
		}
		left = left || members[i].held()
	}
	l.members.Store(&members)
	if !left || !l.survives() {
		c.registry.drop(l, &setError{why, members})
		return
	}
	l.opener.Forget(id)
	if !final(why.Outcome) {
		// It may be had again: whoever opens next asks.
		c.registry.unmap(l)
	}
}

// loseSubject is lose for a subject whom this client has asked to be erased.
// Client.mu is held.
func (c *Client) loseSubject(l *lease, place int) {
	if !l.survives() {
		c.registry.drop(l, errDropped)
		return
	}
	for _, m := range *l.members.Load() {
		if m.place == place && m.held() {
			c.lose(l, m.id, &Error{Outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE, Message: "the key was dropped"})
		}
	}
}

// renewSet is renew for a lease of several keys.
func (c *Client) renewSet(l *lease) {
	wall, boot := c.clock.Now()
	c.mu.Lock()
	began := c.dead.seq
	k := l.renewal(wall.UnixNano())
	c.mu.Unlock()
	if k.purpose != l.key.purpose {
		k.subject = encodeSet(l.key.subjects(), l.ids)
		k.policy = All
	}
	var fresh *lease
	resp, err := c.ask(c.ctx, k.request())
	if err == ErrClosed {
		return
	}
	if err == nil {
		fresh, err = c.grantSet(k, resp, wall, boot)
	} else {
		c.log.Warn("renewing leases failed", "leases", 1, "outcome", words(OutcomeOf(err)))
	}
	c.mu.Lock()
	l.renewing = false
	defer c.mu.Unlock()
	defer c.watchOver(l)
	if err != nil {
		if refusal(err) && !(k.purpose != l.key.purpose && OutcomeOf(err) == keydv1.Outcome_OUTCOME_DENIED) {
			c.registry.drop(l, err)
		}
		return
	}
	if _, refused := c.dead.judge(fresh, began); refused || c.closed {
		fresh.end(errDropped)
		return
	}
	lost, gained := l.compare(fresh)
	if fresh.bucket != l.bucket || fresh.classNumber != l.classNumber || !l.survives() && (lost || gained) {
		// The next bucket, or the next life of somebody who was erased.
		if slices.Equal(fresh.ids, l.ids) {
			l.bucketOver = true
			if !l.mapped {
				fresh.end(errDropped)
				return
			}
		} else {
			c.registry.drop(l, errDropped)
		}
		c.admitRenewed(fresh)
		return
	}
	for _, m := range *fresh.members.Load() {
		if !m.held() && slices.Contains(l.ids, m.id) {
			c.lose(l, m.id, &Error{Outcome: m.outcome, Message: "the key is no longer leased"})
		}
	}
	if l.ended.Load() != nil {
		fresh.end(errDropped)
		return
	}
	if !fresh.once || l.once {
		// The ends of fresh are those that l gets.
		l.wallEnd.Store(max(l.wallEnd.Load(), fresh.wallEnd.Load()))
		l.bootEnd.Store(max(l.bootEnd.Load(), fresh.bootEnd.Load()))
		l.renewAt, l.nextAt = fresh.renewAt, fresh.nextAt
	}
	if gained && l.mapped {
		c.registry.unmap(l)
		c.admitRenewed(fresh)
		return
	}
	fresh.end(errDropped)
}

// admitRenewed caches a lease that a renewal brought. Client.mu is held.
func (c *Client) admitRenewed(fresh *lease) {
	if fresh.once {
		fresh.end(errDropped)
		return
	}
	c.registry.admit(fresh)
	c.watchOver(fresh)
}

// compare tells whether fresh lacks a key that l has, and has one that l lacks.
func (l *lease) compare(fresh *lease) (lost, gained bool) {
	var have []envelope.KeyID
	for _, m := range *l.members.Load() {
		if m.held() {
			have = append(have, m.id)
			lost = lost || !slices.Contains(fresh.ids, m.id)
		}
	}
	for _, id := range fresh.ids {
		gained = gained || !slices.Contains(have, id)
	}
	return lost, gained
}
