package keys

import "context"

// Duty does the background work in the test's own time, until nothing is left
// that can be done now.
func Duty(ctx context.Context, k *Keys) error {
	for {
		again, err := k.duties.step(ctx)
		if err != nil || !again {
			return err
		}
	}
}

// Materialise brings an expiring bucket whose grace is over to where its shares
// are kept, and no further.
func Materialise(ctx context.Context, k *Keys, tenant string, class uint32, bucket uint64) error {
	if err := k.duties.take(ctx); err != nil {
		return err
	}
	_, _, err := k.duties.moveBucket(ctx, tenant, tenantID(tenant), class, bucket, true)
	if err != nil {
		return err
	}
	return k.duties.keepShares(ctx, tenant, tenantID(tenant), class, bucket, k.now)
}

// WorkOnSubjects does what is due for subjects and tenants, once, as a holder of
// the duties does that believes its clock.
func WorkOnSubjects(ctx context.Context, k *Keys) error {
	_, err := k.duties.subjects(ctx, false, nil)
	return err
}

// MoveBuckets has the retention looked at, and nothing else.
func MoveBuckets(ctx context.Context, k *Keys) error {
	if err := k.duties.take(ctx); err != nil {
		return err
	}
	_, err := k.duties.expire(ctx, true)
	return err
}
