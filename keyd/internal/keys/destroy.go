package keys

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"lethe/proto/ident"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
	"lethe/sdk/receipt"
)

// maxKeysPerSubject bounds the dead keys that a subject's row remembers, and
// with them the row's size. Only reinstated lives add to it.
const maxKeysPerSubject = 1024

// maxEntriesPerSubject bounds the ledger entries that a subject's row lists.
// Destructions are never refused for it.
const maxEntriesPerSubject = 4096

// Recorded is the answer to an operation that the ledger holds.
type Recorded struct {
	Receipt    []byte
	Index      uint64
	Repeated   bool // nothing was left to do: the entry is an earlier one's
	Generation uint32
	Living     uint32 // what was destroyed lives again, in this generation; zero: not so
	// Again: the request was answered before. State is what has become of what
	// it was about, and Binds says whether a hold of its id binds.
	Again     bool
	State     keydv1.SubjectState
	Binds     bool
	DrainedBy time.Time
	Due       time.Time // nothing is destroyed before
}

// request is what the operations on a subject have in common.
type request struct {
	kind         string // names the operation in the digest
	tenant       string
	subject      []byte // nil where the whole tenant is meant
	classes      []string
	ifGeneration uint32
	id, reason   string
	extra        []byte // whatever else tells two requests apart
	principal    string // who made it; no part of what tells two apart

	keys   *tenantKeys
	handle id16
	mac    []byte
	digest [32]byte
}

// prepare checks a request's fields and finds the subject's handle.
func (q *request) prepare(ctx context.Context, k *Keys) (err error) {
	if err := ident.Tenant(q.tenant); err != nil {
		return invalid("tenant", err)
	}
	if q.subject != nil {
		if err := ident.Subject(string(q.subject)); err != nil {
			return invalid("subject_id", err)
		}
	}
	if err := ident.RequestID(q.id); err != nil {
		return invalid("request_id", err)
	}
	if err := ident.Reason(q.reason); err != nil {
		return invalid("reason", err)
	}
	if len(q.classes) > MaxClasses {
		return invalid("classes", errors.New("too many"))
	}
	for _, c := range q.classes {
		if err := ident.Class(c); err != nil {
			return invalid("classes", err)
		}
	}
	q.principal = principalOf(ctx)
	q.ifGeneration = max(q.ifGeneration, 1) // zero means the first
	q.classes = slices.Compact(slices.Sorted(slices.Values(q.classes)))
	q.mac = requestMAC(k.requestKey, q.tenant, q.id)
	q.keys = &tenantKeys{name: q.tenant, id: tenantID(q.tenant)}
	if q.subject != nil {
		switch keys, err := k.ring.get(ctx, q.tenant); {
		case err == nil:
			q.keys, q.handle = keys, keys.handle(q.subject)
		case !is(err, keydv1.Outcome_OUTCOME_ERASED):
			return err
		default:
			if q.handle, err = k.handleThen(ctx, q.mac, err); err != nil {
				return err
			}
		}
	}
	q.digest = q.sum()
	return nil
}

// handleThen returns the handle of whom a request was about that was answered
// before its tenant was erased, with whose keys all handles went; if it was not,
// the error is tenantErased.
func (k *Keys) handleThen(ctx context.Context, mac []byte, tenantErased error) (handle id16, err error) {
	err = k.store.View(ctx, func(r Reader) error {
		row, err := readRequest(r, mac)
		if err != nil {
			return err
		}
		if row == nil {
			return tenantErased
		}
		s, err := statementAt(r, row.LedgerIndex)
		if err != nil {
			return err
		}
		if s.Handle == nil {
			return tenantErased
		}
		handle = id16(s.Handle)
		return nil
	})
	return handle, err
}

// sum is the digest of the request's own fields. A generation of zero means
// the first.
func (q *request) sum() [32]byte {
	parts := [][]byte{[]byte(q.kind), q.handle[:], binary.BigEndian.AppendUint32(nil, max(q.ifGeneration, 1)), []byte(q.reason), q.extra}
	for _, c := range q.classes {
		parts = append(parts, []byte(c))
	}
	return sha256.Sum256(envelope.Info("lethe/v1/request-digest", parts...))
}

// earlier finds what a request with this id did before; nil if there was none.
func (q *request) earlier(r Reader) (*storev1.Request, error) {
	var row storev1.Request
	switch err := getRow(r, requestKey(q.mac), &row); {
	case errors.Is(err, ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, err
	case string(row.Digest) != string(q.digest[:]):
		if same, err := q.isReplayed(r, &row); err != nil || same {
			return &row, err
		}
		return nil, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the request id was used for another request").with("field", "request_id")
	}
	return &row, nil
}

// remember writes the request's row.
func (q *request) remember(tx Tx, index uint64, now time.Time, already bool, generation uint32) error {
	return putRow(tx, requestKey(q.mac), &storev1.Request{
		Digest: q.digest[:], LedgerIndex: index, TimeMs: now.UnixMilli(),
		AlreadyDestroyed: already, Generation: generation,
	})
}

// rows are the rows by which operations on one subject, or of one request id,
// are kept apart.
func (q *request) rows() []string {
	rows := []string{string(requestKey(q.mac))}
	if q.subject != nil {
		rows = append(rows, string(subjectKey(q.keys.id, q.handle)))
	}
	return rows
}

// statement begins a statement about the request.
func (q *request) statement(kind receipt.Kind, now time.Time) *receipt.Statement {
	s := &receipt.Statement{
		Kind: kind, Tenant: q.tenant, Reason: q.reason, Request: q.mac, Time: now,
		Principal: q.principal,
	}
	if q.subject != nil {
		s.Handle = q.handle[:]
	}
	return s
}

// repeat is the plan for a request that was done before.
func repeat(row *storev1.Request) *plan {
	return &plan{index: row.LedgerIndex, write: func(Tx, uint64) error { return nil }}
}

// DestroyKey destroys a subject's keys, of the named classes or of the whole
// person, and fences what it destroyed; or schedules that.
func (k *Keys) DestroyKey(ctx context.Context, req *keydv1.DestroyKeyRequest) (*Recorded, error) {
	due, err := notBefore(req.NotBefore)
	if err != nil {
		return nil, err
	}
	q := &request{
		kind: "destroy", tenant: req.Tenant, subject: slices.Clip(append([]byte{}, req.SubjectId...)),
		classes: slices.Clone(req.Classes), ifGeneration: req.IfGeneration, id: req.RequestId, reason: req.Reason,
	}
	q.extra = destroyExtra(due, req.WaitForHolds)
	if err := q.prepare(ctx, k); err != nil {
		return nil, err
	}
	var already bool
	var living uint32
	o := &op{
		rows:   q.rows(),
		closes: string(subjectKey(q.keys.id, q.handle)),
		check: func(r Reader, now time.Time) (*plan, error) {
			row, err := q.earlier(r)
			if err != nil {
				return nil, err
			}
			if row != nil {
				already = row.AlreadyDestroyed
				if living, err = livingAgain(r, q); err != nil {
					return nil, err
				}
				return repeatDestroy(r, row)
			}
			p, err := k.planNowOrLater(r, q, due, now, req.WaitForHolds)
			if err == nil {
				already = len(p.statements) == 0
			}
			return p, err
		},
	}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	rec, err := k.recorded(ctx, o)
	if err != nil {
		return nil, err
	}
	rec.Repeated = already
	if rec.Due.IsZero() { // it is not only scheduled
		rec.Living = living
	}
	return rec, nil
}

// destroyExtra is what tells two requests to destroy the same apart.
func destroyExtra(due time.Time, waits bool) (extra []byte) {
	if !due.IsZero() {
		extra = binary.BigEndian.AppendUint64(extra, uint64(due.UnixMilli()))
	}
	if waits {
		extra = append(extra, 'w')
	}
	return extra
}

// splitExtra undoes destroyExtra, as far as what is due later goes.
func splitExtra(extra []byte) (due []byte, waits bool) {
	n := len(extra) &^ 7
	return extra[:n], len(extra) != n
}

// planNowOrLater destroys, or schedules what is due later or, if it waits for
// holds, what a hold forbids now.
func (k *Keys) planNowOrLater(r Reader, q *request, due, now time.Time, waits bool) (*plan, error) {
	if due.After(now) {
		return k.planSchedule(r, q, due, now, waits)
	}
	p, err := k.planDestroy(r, q, now)
	if waits && is(err, keydv1.Outcome_OUTCOME_HELD) {
		return k.planSchedule(r, q, now, now, waits)
	}
	return p, err
}

// stateNow returns what has become of what a request was about: the state of
// the person or, of the classes, of the one that is worst off, and the newest
// generation that lives; zero if none does.
func stateNow(r Reader, q *request, classes []uint32) (state storev1.LifeState, living uint32, err error) {
	const destroyed = storev1.LifeState_LIFE_STATE_DESTROYED
	if _, err := activeTenant(r, q.tenant); err != nil {
		if is(err, keydv1.Outcome_OUTCOME_ERASED) {
			return destroyed, 0, nil
		}
		return 0, 0, err
	}
	var subject storev1.Subject
	if err := getRow(r, subjectKey(q.keys.id, q.handle), &subject); err != nil && !errors.Is(err, ErrNotFound) {
		return 0, 0, err
	}
	switch {
	case subject.State == destroyed:
		return destroyed, 0, nil
	case len(classes) == 0:
		return subject.State, subject.Generation, nil
	case subject.State == storev1.LifeState_LIFE_STATE_SCHEDULED:
		state = subject.State
	}
	for _, number := range classes {
		if sc := classOf(&subject, number); sc != nil {
			state = max(state, sc.State)
			if sc.State != destroyed {
				living = max(living, sc.Generation)
			}
		}
	}
	return state, living, nil
}

// numbers are those of the classes that a request names.
func (q *request) numbers(r Reader) (numbers []uint32, err error) {
	for _, name := range q.classes {
		c, err := sharedClass(r, q.keys.id, name)
		if err != nil {
			return nil, err
		}
		numbers = append(numbers, c.Number)
	}
	return numbers, nil
}

// livingAgain returns the generation in which the targets of a request that was
// done before, or one of them, live after the one that it named; zero if none
// does.
func livingAgain(r Reader, q *request) (uint32, error) {
	classes, err := q.numbers(r)
	if err != nil {
		return 0, err
	}
	_, living, err := stateNow(r, q, classes)
	if living <= q.ifGeneration {
		living = 0
	}
	return living, err
}

// aim is what a destruction is to reach.
type aim struct {
	subject storev1.Subject
	// numbers and names of the classes; empty: the whole person.
	classes    map[uint32]string
	generation uint32
	tenant     *storev1.Tenant // shared
	// dead: all of it is destroyed, by several entries of which none is about
	// all. What is left to do is to state it, which no hold forbids.
	dead bool
}

// aimOf reads what a request is about. Where one entry destroyed all of it
// already it returns the plan that says so.
func aimOf(r Reader, q *request, now time.Time) (*aim, *plan, error) {
	tenant, err := sharedTenant(r, q.tenant)
	if err != nil {
		return nil, nil, err
	}
	a := &aim{classes: make(map[uint32]string, len(q.classes)), generation: max(q.ifGeneration, 1), tenant: tenant}
	for _, name := range q.classes {
		c, err := sharedClass(r, q.keys.id, name)
		if err != nil {
			return nil, nil, err
		}
		a.classes[c.Number] = name
	}
	err = getRow(r, subjectKey(q.keys.id, q.handle), &a.subject)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, nil, err
	}
	a.subject.Generation = max(a.subject.Generation, 1)
	by, dead, err := alreadyDestroyed(&a.subject, a.classes, a.generation)
	if err != nil {
		return nil, nil, err
	}
	if by != nil {
		return nil, &plan{index: *by, write: func(tx Tx, index uint64) error { return q.remember(tx, index, now, true, 0) }}, nil
	}
	a.dead = dead
	return a, nil, nil
}

// heldBy refuses a destruction while a hold binds.
func (k *Keys) heldBy(a *aim, now time.Time) error {
	if a.dead {
		return nil
	}
	if h := k.holding(a.tenant.Holds, now); h != nil {
		return held(h)
	}
	if h := k.holding(a.subject.Holds, now); h != nil {
		return held(h)
	}
	return nil
}

// targets returns the entries of the classes that are not destroyed yet,
// making those that the subject has not used, and the public names of all that
// are aimed at, both in ascending order of their numbers. For a whole person it
// names none.
func (a *aim) targets() (classes []*storev1.SubjectClass, named []receipt.Class) {
	if len(a.classes) == 0 {
		for _, sc := range a.subject.Classes {
			if sc.State != storev1.LifeState_LIFE_STATE_DESTROYED {
				classes = append(classes, sc)
			}
		}
	}
	for number, name := range a.classes {
		sc := classOf(&a.subject, number)
		if sc == nil {
			sc = &storev1.SubjectClass{ClassNumber: number, Generation: lifeOf(&a.subject)}
			a.subject.Classes = append(a.subject.Classes, sc)
		}
		if sc.State != storev1.LifeState_LIFE_STATE_DESTROYED {
			classes = append(classes, sc)
		}
		named = append(named, receipt.Class{Name: name, Number: number})
	}
	slices.SortFunc(named, func(a, b receipt.Class) int { return int(a.Number) - int(b.Number) })
	slices.SortFunc(classes, func(a, b *storev1.SubjectClass) int { return int(a.ClassNumber) - int(b.ClassNumber) })
	return classes, named
}

// reached returns the entries of all classes that are aimed at, dead ones too.
func (a *aim) reached() []*storev1.SubjectClass {
	if len(a.classes) == 0 {
		return a.subject.Classes
	}
	var reached []*storev1.SubjectClass
	for _, sc := range a.subject.Classes {
		if _, ok := a.classes[sc.ClassNumber]; ok {
			reached = append(reached, sc)
		}
	}
	return reached
}

// drained is by when nobody holds a key that died here before.
func (a *aim) drained() time.Time {
	var by int64
	for _, sc := range a.reached() {
		by = max(by, sc.DrainedMs)
	}
	return time.UnixMilli(by).UTC()
}

// existed says whether there is or was a key in the life that is aimed at.
func (a *aim) existed(r Reader) (bool, error) {
	life := a.generation
	if len(a.classes) == 0 {
		life = lifeOf(&a.subject)
	}
	for _, sc := range a.reached() {
		if len(sc.KeyId) != 0 {
			return true, nil
		}
		if len(sc.DeadKeyIds) == 0 {
			continue
		}
		var owner storev1.KeyOwner
		if err := getRow(r, ownerKey(sc.DeadKeyIds[len(sc.DeadKeyIds)-1]), &owner); err != nil {
			return false, damaged("a dead key has no owner", err)
		}
		if owner.Generation >= life {
			return true, nil
		}
	}
	return false, nil
}

func (a *aim) scope() receipt.Scope {
	if len(a.classes) == 0 {
		return receipt.ScopePerson
	}
	return receipt.ScopeClasses
}

func (k *Keys) planDestroy(r Reader, q *request, now time.Time) (*plan, error) {
	a, p, err := aimOf(r, q, now)
	if p != nil || err != nil {
		return p, err
	}
	if err := k.heldBy(a, now); err != nil {
		return nil, err
	}
	return k.planKill(r, q, a, nil, now, func(tx Tx, index uint64) error { return q.remember(tx, index, now, false, 0) })
}

// planKill destroys what a aims at. due are the scheduled destructions that
// are thereby carried out; others that it makes pointless end too. after writes
// what else there is to write.
func (k *Keys) planKill(r Reader, q *request, a *aim, due []*storev1.Schedule, now time.Time, after func(Tx, uint64) error) (*plan, error) {
	es, err := readEpochs(r)
	if err != nil {
		return nil, err
	}
	epoch, err := readEpoch(r, es.open)
	if err != nil {
		return nil, err
	}
	s := q.statement(receipt.Destroyed, now)
	s.Epoch, s.Generation, s.Scope = epoch.Number, a.generation, a.scope()
	s.FinalBy, s.FinalBasis = k.finality(epoch, now)
	s.Anchor, _ = k.anchor.Domain()
	classes, named := a.targets()
	s.Classes = named

	// The longest lease under which a client may hold a key that dies here.
	var lease time.Duration
	var doomed [][]byte // keys of the wrapped rows to overwrite
	for _, sc := range classes {
		if len(sc.KeyId) == 0 {
			continue
		}
		s.DeadKeys = append(s.DeadKeys, receipt.DeadKey{ClassNumber: sc.ClassNumber, Generation: sc.Generation, KeyID: id16(sc.KeyId)})
		class, err := classByNumber(r, q.keys.id, sc.ClassNumber)
		if err != nil {
			return nil, err
		}
		lease = max(lease, k.longestLease(class, now))
		rows, err := wrappedDEKRows(r, es, q.keys.id, q.handle, sc.KeyId)
		if err != nil {
			return nil, err
		}
		doomed = append(doomed, rows...)
	}
	existed, err := a.existed(r)
	switch {
	case err != nil:
		return nil, err
	case existed:
		s.Existed = receipt.ExistedYes
	case es.restoredMs != 0:
		s.Existed = receipt.ExistedUnknown
	default:
		s.Existed = receipt.ExistedNo
	}
	s.DrainedBy = latest(a.drained(), k.drainedBy(es, now, lease))
	subject := &a.subject
	ended := endedSchedules(subject, a.classes)
	if len(due) == 0 && len(ended) != 0 {
		due = ended[:1] // an entry can be about one earlier entry
	}
	if len(due) != 0 {
		s.Of = &due[0].LedgerIndex
	}

	return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
		for _, sc := range classes {
			sc.State = storev1.LifeState_LIFE_STATE_DESTROYED
			sc.DestroyedAt = index + 1
			if len(sc.KeyId) != 0 {
				sc.DeadKeyIds = append(sc.DeadKeyIds, sc.KeyId)
				sc.KeyId = nil
				sc.DrainedMs = s.DrainedBy.UnixMilli()
			}
		}
		for _, c := range named { // those that were dead are in this statement too
			classOf(subject, c.Number).DestroyedAt = index + 1
		}
		if s.Scope == receipt.ScopePerson {
			subject.State = storev1.LifeState_LIFE_STATE_DESTROYED
			subject.DestroyedAt = index + 1
			if len(subject.Holds) != 0 { // none binds; a tombstone holds nothing else
				subject.Holds = nil
				if err := noteHolds(tx, q.keys.id, q.handle, nil); err != nil {
					return err
				}
			}
		}
		if err := unschedule(tx, q.keys.id, q.handle, subject, append(ended, due...)); err != nil {
			return err
		}
		for _, e := range ended {
			if s.Of != nil && e.LedgerIndex == *s.Of {
				continue
			}
			if s.Scope == receipt.ScopePerson { // it is about all of them
				if err := putLater(tx, e.LedgerIndex, index); err != nil {
					return err
				}
			} else if err := settleRequest(tx, e.Request, index); err != nil {
				return err
			}
		}
		if s.Of != nil {
			if err := putLater(tx, *s.Of, index); err != nil {
				return err
			}
		}
		subject.LedgerIndexes = append(subject.LedgerIndexes, index)
		if err := putRow(tx, subjectKey(q.keys.id, q.handle), subject); err != nil {
			return err
		}
		for _, row := range doomed {
			if err := putRow(tx, row, &storev1.Wrapped{Dead: true}); err != nil {
				return err
			}
		}
		return after(tx, index)
	}}, nil
}

// alreadyDestroyed says whether all targets of a request are destroyed, and by
// which entry if one is about all of them. It is an error if the request means
// another generation than the one that lives, or lived last.
func alreadyDestroyed(s *storev1.Subject, named map[uint32]string, wanted uint32) (by *uint64, dead bool, err error) {
	fenced := s.State == storev1.LifeState_LIFE_STATE_DESTROYED
	if len(named) == 0 && s.Generation != wanted {
		return nil, false, otherGeneration(s.Generation, fenced)
	}
	var entries []uint64 // plus one; zero: not destroyed
	for number := range named {
		generation, at := lifeOf(s), uint64(0)
		if sc := classOf(s, number); sc != nil {
			generation = sc.Generation
			if sc.State == storev1.LifeState_LIFE_STATE_DESTROYED {
				at = sc.DestroyedAt
			}
		}
		if generation != wanted {
			return nil, false, otherGeneration(generation, fenced || at != 0)
		}
		if at == 0 && fenced {
			at = s.DestroyedAt // the fence covers a class that never had a key
		}
		entries = append(entries, at)
	}
	slices.Sort(entries)
	entries = slices.Compact(entries)
	switch {
	case len(entries) == 1 && entries[0] != 0:
		at := entries[0] - 1
		return &at, true, nil
	case fenced: // which is about every class
		at := s.DestroyedAt - 1
		return &at, true, nil
	}
	return nil, len(entries) != 0 && entries[0] != 0, nil
}

// lifeOf is the generation of a class that the subject has not used yet.
func lifeOf(s *storev1.Subject) uint32 { return max(s.Life, 1) }

// otherGeneration is about a request that names another generation than the
// newest.
func otherGeneration(newest uint32, destroyed bool) error {
	what := "the subject lives in generation %d, which the request does not name"
	if destroyed {
		what = "the newest generation is %d, which is destroyed, and which the request does not name"
	}
	return fail(keydv1.Outcome_OUTCOME_CONFLICT, what, newest).with("generation", itoa(uint64(newest)))
}

func held(h *storev1.Hold) error {
	return fail(keydv1.Outcome_OUTCOME_HELD, "a legal hold forbids it").with("hold", h.Id)
}

// is says whether an error is of an outcome.
func is(err error, o keydv1.Outcome) bool {
	var outcome *Error
	return errors.As(err, &outcome) && outcome.Outcome == o
}

// wrappedDEKRows finds every row that holds a DEK: while an epoch drains there
// may be one under each of two epochs.
func wrappedDEKRows(r Reader, es epochs, tenant, handle id16, keyID []byte) ([][]byte, error) {
	var found [][]byte
	for _, e := range es.read() {
		key := wrappedDEKKey(e, tenant, handle, keyID)
		switch _, err := r.Get(key); {
		case err == nil:
			found = append(found, key)
		case !errors.Is(err, ErrNotFound):
			return nil, err
		}
	}
	if len(found) == 0 {
		return nil, damaged("a live subject has no key", nil)
	}
	return found, nil
}

// Reinstate begins the next generation of what was destroyed.
func (k *Keys) Reinstate(ctx context.Context, req *keydv1.ReinstateRequest) (*Recorded, error) {
	q := &request{
		kind: "reinstate", tenant: req.Tenant, subject: append([]byte{}, req.SubjectId...),
		classes: slices.Clone(req.Classes), ifGeneration: req.IfGeneration, id: req.RequestId, reason: req.Reason,
	}
	if err := q.prepare(ctx, k); err != nil {
		return nil, err
	}
	var generation uint32
	var again bool
	o := &op{
		rows: q.rows(),
		check: func(r Reader, now time.Time) (*plan, error) {
			row, err := q.earlier(r)
			if err != nil {
				return nil, err
			}
			if again = row != nil; again {
				generation = row.Generation
				return repeat(row), nil
			}
			p, next, err := planReinstate(r, q, now)
			generation = next
			return p, err
		},
	}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	rec, err := k.recorded(ctx, o)
	if err != nil {
		return nil, err
	}
	rec.Generation, rec.Again = generation, again
	err = k.store.View(ctx, func(r Reader) error {
		classes, err := q.numbers(r)
		if err != nil {
			return err
		}
		state, living, err := stateNow(r, q, classes)
		rec.State, rec.Living = publicState(state), living
		return err
	})
	return rec, err
}

func planReinstate(r Reader, q *request, now time.Time) (*plan, uint32, error) {
	if _, err := openEpoch(r); err != nil {
		return nil, 0, err
	}
	if _, err := activeTenant(r, q.tenant); err != nil {
		return nil, 0, err
	}
	var subject storev1.Subject
	if err := getRow(r, subjectKey(q.keys.id, q.handle), &subject); err != nil {
		if errors.Is(err, ErrNotFound) {
			return nil, 0, unknown("the subject")
		}
		return nil, 0, err
	}
	wanted := max(q.ifGeneration, 1)
	dead := subject.State == storev1.LifeState_LIFE_STATE_DESTROYED
	next := subject.Generation + 1
	s := q.statement(receipt.Reinstated, now)
	s.Generation = next
	var classes []*storev1.SubjectClass
	var keys int
	for _, sc := range subject.Classes {
		keys += len(sc.DeadKeyIds)
	}
	if keys >= maxKeysPerSubject || len(subject.LedgerIndexes) >= maxEntriesPerSubject {
		return nil, 0, fail(keydv1.Outcome_OUTCOME_EXHAUSTED, "the subject has been reinstated too often")
	}
	if len(q.classes) == 0 {
		if !dead {
			return nil, 0, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the subject is not destroyed")
		}
		if subject.Generation != wanted {
			return nil, 0, otherGeneration(subject.Generation, true)
		}
		s.Scope = receipt.ScopePerson
		classes = subject.Classes
	} else {
		if dead {
			return nil, 0, erased("the subject as a whole, which must be reinstated first; it", subject.DestroyedAt)
		}
		s.Scope = receipt.ScopeClasses
		for _, name := range q.classes {
			c, err := sharedClass(r, q.keys.id, name)
			if err != nil {
				return nil, 0, err
			}
			sc := classOf(&subject, c.Number)
			if sc == nil || sc.State != storev1.LifeState_LIFE_STATE_DESTROYED {
				return nil, 0, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the class is not destroyed").with("field", "classes")
			}
			if sc.Generation != wanted {
				return nil, 0, otherGeneration(sc.Generation, true)
			}
			if scheduledFor(&subject, c.Number) {
				return nil, 0, errPending // it would reach the new life, too
			}
			classes = append(classes, sc)
			s.Classes = append(s.Classes, receipt.Class{Name: name, Number: c.Number})
		}
		slices.SortFunc(s.Classes, func(a, b receipt.Class) int { return int(a.Number) - int(b.Number) })
	}
	return &plan{statements: []*receipt.Statement{s}, write: func(tx Tx, index uint64) error {
		subject.Generation = next
		if s.Scope == receipt.ScopePerson {
			subject.State = storev1.LifeState_LIFE_STATE_ACTIVE
			subject.Life = next
		}
		for _, sc := range classes {
			sc.State = storev1.LifeState_LIFE_STATE_UNSPECIFIED
			sc.Generation = next
		}
		subject.LedgerIndexes = append(subject.LedgerIndexes, index)
		if err := putRow(tx, subjectKey(q.keys.id, q.handle), &subject); err != nil {
			return err
		}
		return q.remember(tx, index, now, false, next)
	}}, next, nil
}
