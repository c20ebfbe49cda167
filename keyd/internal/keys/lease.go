package keys

import (
	"bytes"
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/proto/ident"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

// MaxBatch is the number of queries that one GetBlobKeys may hold.
const MaxBatch = 256

// Result is one query's answer: a key or an error.
type Result struct {
	Key *keydv1.BlobKey
	Err error
	// Recipient is the key id that was found to be the subject's, for a query
	// that named none.
	Recipient []byte
}

// query is a BlobKeyQuery on its way.
type query struct {
	*keydv1.BlobKeyQuery
	tenant *tenantKeys
	handle id16
	// among are the key ids of which a query that names none wants its
	// subject's, and found is that one.
	among [][]byte
	found []byte

	// What a pass over the store found missing, to be got before the next pass.
	needKEK    id16
	needEpoch  uint32
	needDEK    bool // the subject's first use of this class
	needBucket bool // the first use of this bucket

	result Result
	done   bool
}

// errAgain ends a pass over one query whose needs must be met first.
var errAgain = errors.New("again")

// BlobKeys answers each query from one snapshot of the store, after making the
// DEKs and bucket keys that a seal finds missing.
func (k *Keys) BlobKeys(ctx context.Context, queries []*keydv1.BlobKeyQuery) ([]Result, error) {
	return k.BlobKeysAmong(ctx, queries, nil, nil)
}

// BlobKeysAmong is BlobKeys for queries of which some name no key id: they want
// that of recipients, which is not empty then, that is their subject's. refused
// is nil, or has an error for each query that must not be answered: nothing is
// looked up for it.
func (k *Keys) BlobKeysAmong(ctx context.Context, queries []*keydv1.BlobKeyQuery, recipients [][]byte, refused []error) ([]Result, error) {
	if n := len(queries); n == 0 || n > MaxBatch {
		return nil, invalid("queries", errors.New("a call has 1 to 256 queries"))
	}
	if err := checkRecipients(queries, recipients); err != nil {
		return nil, err
	}
	qs := make([]query, len(queries))
	for i, q := range queries {
		qs[i].BlobKeyQuery, qs[i].among = q, recipients
		if refused != nil && refused[i] != nil {
			qs[i].finish(nil, refused[i])
			continue
		}
		if err := qs[i].prepare(ctx, k); err != nil {
			qs[i].finish(nil, err)
		}
	}
	// First use takes two passes more (a DEK, a bucket and a KEK are made or
	// loaded between them); each turn of an epoch meanwhile may cost another two.
	for pass := 0; pass < 8; pass++ {
		if err := k.pass(ctx, qs); err != nil {
			return nil, err
		}
		if !k.meetNeeds(ctx, qs) {
			break
		}
	}
	telling, cancel := context.WithTimeout(ctx, tellLimit) // of all together
	defer cancel()
	for i := range qs {
		qs[i].result.Err = k.Told(telling, qs[i].result.Err)
	}
	// What was read must have been the store's last word at some time in the
	// reach of a heartbeat; so this comes last, after all that waits.
	if err := k.mayIssue(ctx); err != nil {
		return nil, err
	}
	results := make([]Result, len(qs))
	for i := range qs {
		if !qs[i].done {
			qs[i].finish(nil, fail(keydv1.Outcome_OUTCOME_CONFLICT, "the subject keeps changing"))
		}
		results[i] = qs[i].result
	}
	return results, nil
}

func (q *query) finish(key *keydv1.BlobKey, err error) {
	q.result, q.done = Result{Key: key, Err: err, Recipient: q.found}, true
}

func (q *query) prepare(ctx context.Context, k *Keys) error {
	if err := checkSubject(q.Tenant, q.SubjectId); err != nil {
		return err
	}
	if err := ident.Class(q.Class); err != nil {
		return invalid("class", err)
	}
	switch q.Purpose {
	case keydv1.Purpose_PURPOSE_SEAL:
		if len(q.KeyId) != 0 || q.ClassNumber != 0 || q.Bucket != 0 {
			return invalid("key_id", errors.New("a seal names no key, class number or bucket"))
		}
		if q.SealFrom > uint64(k.now().Add(MaxLease).Unix()) {
			return invalid("seal_from", errors.New("is more than an hour ahead"))
		}
	case keydv1.Purpose_PURPOSE_OPEN:
		if len(q.KeyId) != len(id16{}) && (len(q.KeyId) != 0 || len(q.among) == 0) {
			return invalid("key_id", errors.New("a key id has 16 bytes"))
		}
		if q.SealFrom != 0 {
			return invalid("seal_from", errors.New("is for sealing"))
		}
	default:
		return invalid("purpose", errors.New("seal or open"))
	}
	t, err := k.ring.get(ctx, q.Tenant)
	if err != nil {
		return err
	}
	q.tenant, q.handle = t, t.handle(q.SubjectId)
	return nil
}

// sealTime is the time whose bucket a seal is for: now or, for who asks ahead,
// later.
func (q *query) sealTime(now time.Time) time.Time {
	return latest(now, time.Unix(int64(q.SealFrom), 0))
}

// pass reads one snapshot. Leases for a subject or tenant that is just being
// destroyed wait for the outcome, so that none is issued between the time that
// its statement tells and the commit.
func (k *Keys) pass(ctx context.Context, qs []query) error {
	for i := range qs {
		if !qs[i].done {
			if err := k.closing.wait(ctx, subjectKey(qs[i].tenant.id, qs[i].handle), tenantKey(qs[i].tenant.id)); err != nil {
				return err
			}
		}
	}
	size := k.keeper.Anchored() // before the snapshot, which then holds as much
	now := k.now()
	return k.store.View(ctx, func(r Reader) error {
		es, err := readEpochs(r)
		if err != nil {
			return err
		}
		var b batch
		defer b.forget()
		for i := range qs {
			q := &qs[i]
			if q.done {
				continue
			}
			key, err := k.lease(r, es, &b, q, now)
			if errors.Is(err, errAgain) {
				continue
			}
			if err == nil {
				key.LedgerSize = size
			}
			q.finish(key, err)
		}
		return nil
	})
}

// lease answers one query from the snapshot, or notes what it needs.
func (k *Keys) lease(r Reader, es epochs, b *batch, q *query, now time.Time) (*keydv1.BlobKey, error) {
	t := q.tenant
	tenant, err := b.activeTenant(r, t.name)
	if err != nil {
		return nil, err
	}
	var subject storev1.Subject
	switch err := getRow(r, subjectKey(t.id, q.handle), &subject); {
	case errors.Is(err, ErrNotFound):
	case err != nil:
		return nil, err
	}
	class, err := b.readClass(r, t.id, q.Class)
	if err != nil {
		return nil, err
	}

	var keyID []byte
	var generation uint32
	var start, end int64
	if q.Purpose == keydv1.Purpose_PURPOSE_SEAL {
		sc, err := sealable(&subject, class.Number)
		if err != nil {
			return nil, err
		}
		if sc == nil || len(sc.KeyId) == 0 {
			q.needDEK = true
		} else {
			keyID, generation = sc.KeyId, sc.Generation
		}
		start, end = bucketAt(class, q.sealTime(now))
	} else {
		wanted := q.KeyId
		if len(wanted) == 0 {
			if q.found, err = recipientOf(r, &subject, q.among); err != nil {
				return nil, err
			}
			wanted = q.found
		}
		sc, err := openable(r, t.id, q.handle, &subject, wanted)
		if err != nil {
			return nil, err
		}
		if sc.ClassNumber != class.Number || q.ClassNumber != class.Number {
			return nil, fail(keydv1.Outcome_OUTCOME_WRONG_SUBJECT, "the blob is of another class than the one named").with("field", "class")
		}
		keyID, generation = sc.KeyId, sc.Generation
		start = int64(q.Bucket)
	}

	bucket, err := b.readBucket(r, t.id, class.Number, uint64(start))
	switch {
	case errors.Is(err, ErrNotFound):
		if q.Purpose == keydv1.Purpose_PURPOSE_OPEN {
			return nil, unknown("the blob's bucket")
		}
		q.needBucket = true
	case err != nil:
		return nil, err
	default:
		end = bucket.EndS
	}
	if q.needDEK || q.needBucket {
		return nil, errAgain
	}
	// A hold outlives the retention: what was kept for it opens.
	heldNow := k.holding(tenant.Holds, now) != nil || k.holding(subject.Holds, now) != nil
	if expired(class, bucket, now) && !heldNow {
		if k.clockDoubted(now) && bucket.State != storev1.BucketState_BUCKET_STATE_DEAD {
			return nil, unavailable("whether the retention has ended is not known", ErrClock)
		}
		return nil, errExpired
	}

	share, err := b.share(r, es, q, class.Number, keyID)
	if err != nil {
		return nil, err
	}
	defer clear(share)
	dek, err := readKey(r, es, t, q, func(e uint32) []byte { return wrappedDEKKey(e, t.id, q.handle, keyID) },
		func(rowKey []byte, kek id16) []byte { return dekIdentity(rowKey, kek, class.Number, generation) })
	if errors.Is(err, ErrNotFound) {
		return nil, damaged("a live subject has no key", err)
	}
	if err != nil {
		return nil, err
	}
	defer clear(dek)
	key, err := blobKey(dek, share, t.name, class.Number, uint64(start), keyID)
	if err != nil {
		return nil, err
	}
	lease := time.Duration(class.LeaseMs) * time.Millisecond
	if due := dueOf(class, bucket); !due.IsZero() && !heldNow {
		lease = min(lease, due.Sub(now)) // so none is out when the retention ends
	}
	out := &keydv1.BlobKey{
		KeyId: keyID, ClassNumber: class.Number,
		Bucket: uint64(start), BucketEnd: uint64(end),
		Key: key, Lease: durationpb.New(lease),
		Generation: generation,
	}
	if begins := time.Unix(start, 0); q.SealFrom != 0 && begins.After(now) {
		out.StartsIn = durationpb.New(begins.Sub(now))
	}
	return out, nil
}

// readKey reads a wrapped row and unwraps it, or notes the KEK that it needs.
// A row that is missing or dead is ErrNotFound.
func readKey(r Reader, es epochs, t *tenantKeys, q *query, key func(epoch uint32) []byte, identity func(rowKey []byte, kek id16) []byte) ([]byte, error) {
	var row storev1.Wrapped
	rowKey, err := getWrapped(r, es, key, &row)
	if err != nil {
		return nil, err
	}
	if row.Dead {
		return nil, ErrNotFound
	}
	kek := t.wrapper(id16(row.KekId))
	if kek == nil {
		q.needKEK, q.needEpoch = id16(row.KekId), epochOf(rowKey)
		return nil, errAgain
	}
	secret, err := kek.Unwrap(row.Ciphertext, identity(rowKey, id16(row.KekId)))
	if err != nil {
		return nil, damaged("a wrapped key does not open", err)
	}
	return secret, nil
}

// sealable returns the subject's entry for a class, nil if it has none yet, or
// why nothing can be sealed.
func sealable(s *storev1.Subject, class uint32) (*storev1.SubjectClass, error) {
	sc := classOf(s, class)
	switch {
	case s.State == storev1.LifeState_LIFE_STATE_DESTROYED:
		return nil, erased("the subject", s.DestroyedAt)
	case sc.GetState() == storev1.LifeState_LIFE_STATE_DESTROYED:
		return nil, erased("this class of the subject", sc.DestroyedAt)
	case s.State == storev1.LifeState_LIFE_STATE_SCHEDULED, sc.GetState() == storev1.LifeState_LIFE_STATE_SCHEDULED:
		return nil, errPending
	}
	return sc, nil
}

// errPending: what is scheduled is refused already.
var errPending = fail(keydv1.Outcome_OUTCOME_PENDING_ERASURE, "the subject, or this class of it, is about to be erased")

// openable finds the live key with the id that a blob names, or says what has
// become of it: whose it is comes before what its state is.
func openable(r Reader, tenant, handle id16, s *storev1.Subject, keyID []byte) (*storev1.SubjectClass, error) {
	for _, sc := range s.Classes {
		if bytes.Equal(sc.KeyId, keyID) {
			if s.State == storev1.LifeState_LIFE_STATE_SCHEDULED || sc.State == storev1.LifeState_LIFE_STATE_SCHEDULED {
				return nil, errPending
			}
			return sc, nil
		}
		for _, dead := range sc.DeadKeyIds {
			if bytes.Equal(dead, keyID) {
				return nil, erased("the key", newest(s))
			}
		}
	}
	var owner storev1.KeyOwner
	switch err := getRow(r, ownerKey(keyID), &owner); {
	case errors.Is(err, ErrNotFound):
		return nil, unknown("the blob's key")
	case err != nil:
		return nil, err
	case !bytes.Equal(owner.Tenant, tenant[:]) || !bytes.Equal(owner.Handle, handle[:]):
		return nil, fail(keydv1.Outcome_OUTCOME_WRONG_SUBJECT, "the blob belongs to another subject than the one named")
	}
	return nil, damaged("a subject has lost a key that was its own", nil)
}

// meetNeeds loads and makes what the last pass missed. It reports whether
// another pass is worth while.
func (k *Keys) meetNeeds(ctx context.Context, qs []query) bool {
	var make []*query
	again := false
	for i := range qs {
		q := &qs[i]
		if q.done {
			continue
		}
		if q.needEpoch != 0 {
			if _, err := k.ring.kek(ctx, q.tenant, q.needKEK, q.needEpoch); err != nil && k.stillRead(ctx, q.needEpoch) {
				q.finish(nil, err)
				continue
			}
			q.needEpoch = 0
		}
		if q.needDEK || q.needBucket {
			make = append(make, q)
		}
		again = true
	}
	if len(make) != 0 {
		k.firstUse(ctx, make)
	}
	return again
}

// stillRead says whether rows of an epoch are read. One that has drained since
// is no longer asked for by the next pass.
func (k *Keys) stillRead(ctx context.Context, epoch uint32) bool {
	var es epochs
	err := k.store.View(ctx, func(r Reader) (err error) {
		es, err = readEpochs(r)
		return err
	})
	return err != nil || es.needs(epoch)
}

// firstUse makes DEKs and bucket keys, create-if-absent. It only finishes
// queries that fail: what was made is leased by the next pass, from the store.
func (k *Keys) firstUse(ctx context.Context, qs []*query) {
	type made struct {
		dek, bucket []byte
		keyID       id16
	}
	fresh := make([]made, len(qs))
	for i, q := range qs {
		if q.needDEK {
			fresh[i].dek, fresh[i].keyID = newKey(), newID()
		}
		if q.needBucket {
			fresh[i].bucket = newKey()
		}
	}
	defer func() {
		for i := range fresh {
			clear(fresh[i].dek)
			clear(fresh[i].bucket)
		}
	}()
	errs := make([]error, len(qs))
	err := k.update(ctx, func(tx Tx) error {
		now := k.now()
		for i, q := range qs {
			f := &fresh[i]
			q.needEpoch = 0
			errs[i] = k.create(tx, q, now, f.dek, f.keyID, f.bucket)
			var outcome *Error
			if errs[i] != nil && !errors.Is(errs[i], errAgain) && !errors.As(errs[i], &outcome) {
				return errs[i] // the transaction itself failed, perhaps half way
			}
		}
		return nil
	})
	for i, q := range qs {
		switch {
		case err != nil:
			q.finish(nil, err)
		case errs[i] != nil && !errors.Is(errs[i], errAgain):
			q.finish(nil, errs[i])
		default:
			q.needDEK, q.needBucket = false, false
		}
	}
}

// create writes one query's rows. It checks everything before it writes
// anything. Losing a race is no error: the next pass finds the winner's key.
func (k *Keys) create(tx Tx, q *query, now time.Time, dek []byte, keyID id16, bucketSecret []byte) error {
	t := q.tenant
	epoch, err := openEpoch(tx)
	if err != nil {
		return err
	}
	tenant, err := sharedTenant(tx, t.name)
	if err != nil {
		return err
	}
	class, err := sharedClass(tx, t.id, q.Class)
	if err != nil {
		return err
	}
	kek, ok := kekFor(tenant, epoch.Number)
	if !ok {
		return damaged("a tenant has no KEK of the open epoch", nil)
	}
	held := t.wrapper(kek)
	if held == nil {
		q.needKEK, q.needEpoch = kek, epoch.Number
		return errAgain
	}
	w := held.Wrapper

	var subject storev1.Subject
	err = getRow(tx, subjectKey(t.id, q.handle), &subject)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	sc, err := sealable(&subject, class.Number)
	if err != nil {
		return err
	}
	var dekRow, bucketRow *storev1.Wrapped
	var dekRowKey, bucketRowKey []byte
	var start, end int64
	if dek != nil && (sc == nil || len(sc.KeyId) == 0) {
		generation := lifeOf(&subject)
		if sc != nil {
			generation = sc.Generation
		}
		dekRowKey = wrappedDEKKey(epoch.Number, t.id, q.handle, keyID[:])
		if dekRow, err = wrapRow(w, kek, dek, dekIdentity(dekRowKey, kek, class.Number, generation)); err != nil {
			return err
		}
		if sc == nil {
			sc = &storev1.SubjectClass{ClassNumber: class.Number, Generation: generation}
			subject.Classes = append(subject.Classes, sc)
		}
		subject.Generation = max(subject.Generation, 1)
		if subject.State == storev1.LifeState_LIFE_STATE_UNSPECIFIED {
			subject.State = storev1.LifeState_LIFE_STATE_ACTIVE
		}
		sc.State, sc.KeyId = storev1.LifeState_LIFE_STATE_ACTIVE, keyID[:]
	}
	if bucketSecret != nil {
		start, end = bucketAt(class, q.sealTime(now))
		var b storev1.Bucket
		err := getRow(tx, bucketKey(t.id, class.Number, uint64(start)), &b)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		if err != nil {
			bucketRowKey = wrappedBucketKey(epoch.Number, t.id, class.Number, uint64(start))
			if bucketRow, err = wrapRow(w, kek, bucketSecret, rowIdentity(bucketRowKey, kek)); err != nil {
				return err
			}
		}
	}

	if dekRow != nil {
		if err := putRow(tx, dekRowKey, dekRow); err != nil {
			return err
		}
		if err := putRow(tx, subjectKey(t.id, q.handle), &subject); err != nil {
			return err
		}
		owner := &storev1.KeyOwner{Tenant: t.id[:], Handle: q.handle[:], ClassNumber: class.Number, Generation: sc.Generation}
		if err := putRow(tx, ownerKey(keyID[:]), owner); err != nil {
			return err
		}
	}
	if bucketRow != nil {
		if err := putRow(tx, bucketRowKey, bucketRow); err != nil {
			return err
		}
		b := &storev1.Bucket{State: storev1.BucketState_BUCKET_STATE_LIVE, StartS: start, EndS: end}
		return putRow(tx, bucketKey(t.id, class.Number, uint64(start)), b)
	}
	return nil
}

// checkSubject checks the two ids that nearly every call has.
func checkSubject(tenant string, subject []byte) error {
	if err := ident.Tenant(tenant); err != nil {
		return invalid("tenant", err)
	}
	if err := ident.Subject(string(subject)); err != nil {
		return invalid("subject_id", err)
	}
	return nil
}
