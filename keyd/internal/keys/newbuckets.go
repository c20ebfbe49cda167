package keys

import (
	"context"
	"errors"
	"slices"
	"time"

	"lethe/keyd/internal/ledger"
	storev1 "lethe/proto/keyd/store/v1"
	"lethe/sdk/receipt"
)

// newBuckets begins a new bucket for every class whose running one the store
// lacks, or the next one if somebody may have asked ahead for it. It may have
// existed, and its key is lost: were one made anew under its name, blobs of the
// lost one would seem corrupt.
func (p *replay) newBuckets(ctx context.Context) error {
	type place struct {
		tenant string
		class  uint32
	}
	var stale []place
	k := p.k
	var head ledger.Head
	err := k.store.View(ctx, func(r Reader) (err error) {
		head, err = ledger.ReadHead(r)
		return err
	})
	if err != nil {
		return err
	}
	// Nothing was sealed later than this, by any keyd's clock.
	at := latest(k.now(), head.Time).Add(k.cfg.SkewAllowance + time.Second)
	err = k.scanAll(ctx, []byte{'T'}, nil, func(r Reader, key, value []byte) error {
		var t storev1.Tenant
		if err := decode(value, &t); err != nil {
			return err
		}
		if t.State != storev1.TenantState_TENANT_STATE_ACTIVE || t.Name == "" {
			return nil
		}
		for n := uint32(1); n < t.NextClass; n++ {
			c, err := classByNumber(r, id16(key[1:]), n)
			if err != nil {
				return err
			}
			missing, err := lacksBucket(r, id16(key[1:]), c, at)
			if err != nil {
				return err
			}
			ahead, err := lacksBucket(r, id16(key[1:]), c, at.Add(MaxLease))
			if err != nil {
				return err
			}
			if missing || ahead {
				stale = append(stale, place{t.Name, n})
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for group := range slices.Chunk(stale, maxGroup) {
		ops := make([]*op, len(group))
		for i, c := range group {
			ops[i] = &op{ctx: ctx, done: make(chan struct{}), check: func(r Reader, now time.Time) (*plan, error) {
				row, err := classByNumber(r, tenantID(c.tenant), c.class)
				if err != nil {
					return nil, err
				}
				beginBucket(row, at)
				return &plan{statements: []*receipt.Statement{classSet(c.tenant, row, now)}, write: func(tx Tx, index uint64) error {
					row.ChangedAt = index + 1
					return putClass(tx, tenantID(c.tenant), row)
				}}, nil
			}}
		}
		k.runGroup(ctx, ops)
		for _, o := range ops {
			if o.err != nil {
				return o.err
			}
		}
	}
	p.done.NewBuckets = len(stale)
	return nil
}

// lacksBucket says whether the class's bucket that runs at that time is not in
// the store.
func lacksBucket(r Reader, tenant id16, c *storev1.Class, at time.Time) (bool, error) {
	start, _ := bucketAt(c, at)
	switch _, err := r.Get(bucketKey(tenant, c.Number, uint64(start))); {
	case err == nil:
		return false, nil
	case errors.Is(err, ErrNotFound):
		return true, nil
	default:
		return false, err
	}
}

// beginBucket has the class's grid begin at a time that no bucket began at.
func beginBucket(c *storev1.Class, at time.Time) {
	from := at.Unix()
	if c.NextBucketWidthS != 0 && from >= c.NextWidthFromS {
		c.BucketWidthS, c.NextBucketWidthS, c.NextWidthFromS = c.NextBucketWidthS, 0, 0
	}
	c.WidthFromS = from
	if c.NextBucketWidthS != 0 {
		c.NextWidthFromS = from + c.BucketWidthS
	}
}
