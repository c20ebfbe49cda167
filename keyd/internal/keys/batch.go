package keys

import (
	"errors"

	storev1 "lethe/proto/keyd/store/v1"
)

// batch is what one query of a batch has read that the next one mostly needs
// too. It is of one snapshot, and is forgotten with it. Nothing in it is one
// subject's.
type batch struct {
	tenant *storev1.Tenant
	class  *storev1.Class  // of tenant
	bucket *storev1.Bucket // of class, which begins at start
	start  uint64
	shares []byte // sharesSecret of bucket's key; nil until it is needed
}

func (b *batch) forget() {
	clear(b.shares)
	*b = batch{}
}

func (b *batch) activeTenant(r Reader, name string) (*storev1.Tenant, error) {
	if b.tenant == nil || b.tenant.Name != name {
		b.forget()
		var err error
		if b.tenant, err = sharedTenant(r, name); err != nil {
			return nil, err
		}
	}
	return b.tenant, nil
}

// readClass reads a class of the tenant that was read last.
func (b *batch) readClass(r Reader, tenant id16, name string) (*storev1.Class, error) {
	if b.class == nil || b.class.Name != name {
		class, err := sharedClass(r, tenant, name)
		if err != nil {
			return nil, err
		}
		of := b.tenant
		b.forget()
		b.tenant, b.class = of, class
	}
	return b.class, nil
}

// readBucket reads a bucket of the class that was read last. A missing row is
// ErrNotFound.
func (b *batch) readBucket(r Reader, tenant id16, class uint32, start uint64) (*storev1.Bucket, error) {
	if b.bucket == nil || b.start != start {
		bucket, err := getShared(&sharedBuckets, r, bucketKey(tenant, class, start))
		if err != nil {
			return nil, err
		}
		clear(b.shares)
		b.bucket, b.start, b.shares = bucket, start, nil
	}
	return b.bucket, nil
}

// share derives the part in the blob key of the bucket that was read last, or
// reads what was kept of it for a held subject.
func (b *batch) share(r Reader, es epochs, q *query, class uint32, keyID []byte) ([]byte, error) {
	t := q.tenant
	if b.bucket.State == storev1.BucketState_BUCKET_STATE_DEAD {
		share, err := readKey(r, es, t, q, func(e uint32) []byte {
			return wrappedShareKey(e, t.id, q.handle, class, b.start, keyID)
		}, rowIdentity)
		if errors.Is(err, ErrNotFound) {
			return nil, errExpired // the hold came too late
		}
		return share, err
	}
	if b.shares == nil {
		key, err := readKey(r, es, t, q, func(e uint32) []byte { return wrappedBucketKey(e, t.id, class, b.start) }, rowIdentity)
		if errors.Is(err, ErrNotFound) {
			return nil, damaged("a live bucket has no key", err)
		}
		if err != nil {
			return nil, err
		}
		defer clear(key)
		if b.shares, err = sharesSecret(key); err != nil {
			return nil, err
		}
	}
	return shareFrom(b.shares, t.name, class, b.start, keyID)
}
