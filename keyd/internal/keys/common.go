package keys

import (
	"errors"

	storev1 "lethe/proto/keyd/store/v1"
)

// common is what one query of a batch has read that the next one mostly needs
// too. It is of one snapshot, and is forgotten with it. Nothing in it is one
// subject's.
type common struct {
	tenant *storev1.Tenant
	class  *storev1.Class  // of tenant
	bucket *storev1.Bucket // of class, which begins at start
	start  uint64
	shares []byte // sharesSecret of bucket's key; nil until it is needed
}

func (c *common) forget() {
	clear(c.shares)
	*c = common{}
}

func (c *common) activeTenant(r Reader, name string) (*storev1.Tenant, error) {
	if c.tenant == nil || c.tenant.Name != name {
		c.forget()
		var err error
		if c.tenant, err = activeTenant(r, name); err != nil {
			return nil, err
		}
	}
	return c.tenant, nil
}

// readClass reads a class of the tenant that was read last.
func (c *common) readClass(r Reader, tenant id16, name string) (*storev1.Class, error) {
	if c.class == nil || c.class.Name != name {
		class, err := readClass(r, tenant, name)
		if err != nil {
			return nil, err
		}
		of := c.tenant
		c.forget()
		c.tenant, c.class = of, class
	}
	return c.class, nil
}

// readBucket reads a bucket of the class that was read last. A missing row is
// ErrNotFound.
func (c *common) readBucket(r Reader, tenant id16, class uint32, start uint64) (*storev1.Bucket, error) {
	if c.bucket == nil || c.start != start {
		bucket := new(storev1.Bucket)
		if err := getRow(r, bucketKey(tenant, class, start), bucket); err != nil {
			return nil, err
		}
		clear(c.shares)
		c.bucket, c.start, c.shares = bucket, start, nil
	}
	return c.bucket, nil
}

// share derives the part in the blob key of the bucket that was read last, or
// reads what was kept of it for a held subject.
func (c *common) share(r Reader, es epochs, q *query, class uint32, keyID []byte) ([]byte, error) {
	t := q.tenant
	if c.bucket.State == storev1.BucketState_BUCKET_STATE_DEAD {
		share, err := readKey(r, es, t, q, func(e uint32) []byte {
			return wrappedShareKey(e, t.id, q.handle, class, c.start, keyID)
		}, rowIdentity)
		if errors.Is(err, ErrNotFound) {
			return nil, errExpired // the hold came too late
		}
		return share, err
	}
	if c.shares == nil {
		key, err := readKey(r, es, t, q, func(e uint32) []byte { return wrappedBucketKey(e, t.id, class, c.start) }, rowIdentity)
		if errors.Is(err, ErrNotFound) {
			return nil, damaged("a live bucket has no key", err)
		}
		if err != nil {
			return nil, err
		}
		defer clear(key)
		if c.shares, err = sharesSecret(key); err != nil {
			return nil, err
		}
	}
	return shareFrom(c.shares, t.name, class, c.start, keyID)
}
