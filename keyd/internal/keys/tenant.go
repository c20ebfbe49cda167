package keys

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/keyd/internal/wrap"
	"lethe/proto/ident"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/receipt"
)

// CreateTenant makes a tenant: its KEK, its pseudonym key and its first
// classes. A name is never used twice.
func (k *Keys) CreateTenant(ctx context.Context, name string, classes []*keydv1.Class) ([]*keydv1.Class, error) {
	return k.RequestTenant(ctx, name, classes, "")
}

// RequestTenant is CreateTenant for a request with an id, if it has one: its
// repeat gets the same answer.
func (k *Keys) RequestTenant(ctx context.Context, name string, classes []*keydv1.Class, requestID string) ([]*keydv1.Class, error) {
	if err := ident.Tenant(name); err != nil {
		return nil, invalid("tenant", err)
	}
	if len(classes) == 0 {
		for _, c := range DefaultClasses {
			classes = append(classes, &keydv1.Class{Name: c.Name, BucketWidth: durationpb.New(c.Width), Lease: durationpb.New(DefaultLease)})
		}
	}
	if len(classes) > MaxClasses {
		return nil, invalid("classes", errors.New("a tenant has at most 64"))
	}
	for i, c := range classes {
		if err := checkClass(c); err != nil {
			return nil, err
		}
		for _, other := range classes[:i] {
			if other.Name == c.Name {
				return nil, invalid("classes", errors.New("a name stands twice"))
			}
		}
	}
	q, err := k.tenantRequest(name, classes, requestID)
	if err != nil {
		return nil, err
	}

	// A turn of the epoch in between only means to begin anew.
	for attempt := 0; ; attempt++ {
		made, err := k.createTenant(ctx, name, classes, q)
		if errors.Is(err, errTurned) && attempt < 5 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return publicClasses(made), nil
	}
}

// tenantRequest is what is remembered of a request for a tenant; nil if it has
// no id.
func (k *Keys) tenantRequest(name string, classes []*keydv1.Class, id string) (*request, error) {
	if id == "" {
		return nil, nil
	}
	if err := ident.RequestID(id); err != nil {
		return nil, invalid("request_id", err)
	}
	q := &request{
		kind: "create-tenant", tenant: name, id: id,
		keys: &tenantKeys{name: name, id: tenantID(name)}, mac: requestMAC(k.requestKey, name, id),
	}
	for i, c := range classes {
		// As a statement says it, but for the time.
		b, err := classSet(name, newClass(c, uint32(i)+1, time.Unix(0, 0)), time.Unix(0, 0)).Encode()
		if err != nil {
			return nil, invalid("classes", err)
		}
		q.extra = append(q.extra, b...)
	}
	q.digest = q.sum()
	return q, nil
}

// repeatTenant answers a request that was done before, as it was then, for as
// long as there is the tenant.
func (k *Keys) repeatTenant(ctx context.Context, q *request, classes int) ([]*storev1.Class, error) {
	var made []*storev1.Class
	o := &op{rows: q.rows(), check: func(r Reader, _ time.Time) (*plan, error) {
		row, err := q.earlier(r)
		if err != nil {
			return nil, err
		}
		if row == nil {
			return nil, errTurned
		}
		if _, err := activeTenant(r, q.tenant); err != nil {
			return nil, err
		}
		made = made[:0]
		for i := range uint64(classes) {
			s, err := statementAt(r, row.LedgerIndex+1+i)
			if err != nil {
				return nil, err
			}
			made = append(made, statedClass(s, row.LedgerIndex+1+i))
		}
		return repeat(row), nil
	}}
	return made, k.record(ctx, o)
}

// statedClass is the class that a statement set.
func statedClass(s *receipt.Statement, index uint64) *storev1.Class {
	return &storev1.Class{
		Name: s.Classes[0].Name, Number: s.Classes[0].Number,
		BucketWidthS: s.BucketWidthS, WidthFromS: s.WidthFromS,
		NextBucketWidthS: s.NextBucketWidthS, NextWidthFromS: s.NextWidthFromS,
		LeaseMs: s.LeaseMS, RetentionS: s.RetentionS, DenyOnly: s.EndAction == receipt.EndDeny,
		ApprovedBy: s.ApprovedBy, ChangedAt: index + 1,
	}
}

// errTurned: the epoch turned meanwhile.
var errTurned = fail(keydv1.Outcome_OUTCOME_CONFLICT, "the epoch turned meanwhile")

// freshKEK is a KEK that was made for a tenant, with its row.
type freshKEK struct {
	epoch uint32
	id    id16
	w     *wrap.Wrapper
	row   []byte
}

// newKEK makes a KEK and has the KMS wrap it.
func (k *Keys) newKEK(ctx context.Context, tenant string, epoch *storev1.Epoch) (*freshKEK, error) {
	key := newKey()
	defer clear(key)
	f := &freshKEK{epoch: epoch.Number, id: newID()}
	var err error
	if f.row, err = wrapKEK(ctx, k.kms, epoch.RootId, f.id, key, EncryptionContext{Tenant: tenant, Epoch: epoch.Number}); err != nil {
		return nil, err
	}
	f.w, err = wrap.New(key)
	return f, err
}

func (k *Keys) createTenant(ctx context.Context, name string, classes []*keydv1.Class, q *request) ([]*storev1.Class, error) {
	// What can be refused is refused before the KMS is asked.
	var es epochs
	var open, preparing *storev1.Epoch
	var before *storev1.Request
	err := k.store.View(ctx, func(r Reader) (err error) {
		if q != nil {
			if before, err = q.earlier(r); before != nil || err != nil {
				return err
			}
		}
		if es, err = readEpochs(r); err != nil {
			return err
		}
		if open, err = readEpoch(r, es.open); err != nil {
			return err
		}
		if es.preparing != 0 {
			if preparing, err = readEpoch(r, es.preparing); err != nil {
				return err
			}
		}
		return absentTenant(r, name)
	})
	if err != nil {
		return nil, err
	}
	if before != nil {
		return k.repeatTenant(ctx, q, len(classes))
	}
	kek, err := k.newKEK(ctx, name, open)
	if err != nil {
		return nil, err
	}
	// While the next epoch is being prepared, a tenant that is new has to have
	// its KEK of that too: whoever prepares it may have passed by already.
	var next *freshKEK
	if preparing != nil {
		if next, err = k.newKEK(ctx, name, preparing); err != nil {
			return nil, err
		}
	}
	id, pseudonym := tenantID(name), newKey()
	defer clear(pseudonym)
	pseudonymRowKey := wrappedPseudonymKey(kek.epoch, id)
	pseudonymRow, err := wrapRow(kek.w, kek.id, pseudonym, rowIdentity(pseudonymRowKey, kek.id))
	if err != nil {
		return nil, err
	}

	var made []*storev1.Class
	rows := []string{string(tenantKey(id))}
	if q != nil {
		rows = append(rows, q.rows()...)
	}
	o := &op{
		rows: rows,
		check: func(r Reader, now time.Time) (*plan, error) {
			if _, err := openEpoch(r); err != nil {
				return nil, err
			}
			if q != nil {
				switch before, err := q.earlier(r); {
				case err != nil:
					return nil, err
				case before != nil:
					return nil, errTurned // its repeat, which finds it
				}
			}
			switch now, err := readEpochs(r); {
			case err != nil:
				return nil, err
			case now.open != es.open, now.preparing != es.preparing:
				return nil, errTurned
			}
			if err := absentTenant(r, name); err != nil {
				return nil, err
			}
			row := &storev1.Tenant{
				Name: name, State: storev1.TenantState_TENANT_STATE_ACTIVE,
				KekId: kek.id[:], KekEpoch: kek.epoch,
				PseudonymCheck: pseudonymCheck(pseudonym, name),
				NextClass:      uint32(len(classes)) + 1,
			}
			if next != nil {
				row.NextKekId, row.NextKekEpoch = next.id[:], next.epoch
			}
			statements := []*receipt.Statement{{
				Kind: receipt.TenantCreated, Time: now, Tenant: name, PseudonymCheck: row.PseudonymCheck,
				Principal: principalOf(ctx),
			}}
			if q != nil {
				statements[0].Request = q.mac
			}
			made = made[:0]
			for i, c := range classes {
				row := newClass(c, uint32(i)+1, now)
				made = append(made, row)
				stated := classSet(name, row, now)
				stated.Principal = principalOf(ctx)
				statements = append(statements, stated)
			}
			return &plan{statements: statements, write: func(tx Tx, index uint64) error {
				for i, c := range made {
					c.ChangedAt = index + uint64(i) + 2 // after the tenant's own entry
					if err := putClass(tx, id, c); err != nil {
						return err
					}
				}
				for _, f := range []*freshKEK{kek, next} {
					if f == nil {
						continue
					}
					if err := tx.Put(wrappedKEKKey(f.epoch, id, f.id), f.row); err != nil {
						return err
					}
				}
				if err := putRow(tx, pseudonymRowKey, pseudonymRow); err != nil {
					return err
				}
				if q != nil {
					if err := q.remember(tx, index, now, false, 0); err != nil {
						return err
					}
				}
				return putRow(tx, tenantKey(id), row)
			}}, nil
		},
	}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	return made, nil
}

func absentTenant(r Reader, name string) error {
	switch _, err := r.Get(tenantKey(tenantID(name))); {
	case err == nil:
		return fail(keydv1.Outcome_OUTCOME_CONFLICT, "the tenant's name is taken, or was once")
	case errors.Is(err, ErrNotFound):
		return nil
	default:
		return err
	}
}

// wrapKEK wraps a KEK under the root, proves that it unwraps, and encodes its row.
func wrapKEK(ctx context.Context, kms KMS, root string, id id16, kek []byte, ec EncryptionContext) ([]byte, error) {
	packed := packKEK(id, kek)
	defer clear(packed)
	c, err := kms.Wrap(ctx, root, packed, ec)
	if err != nil {
		return nil, unavailable("the KMS cannot wrap a KEK", err)
	}
	again, err := kms.Unwrap(ctx, root, c, ec)
	if err != nil {
		return nil, unavailable("the KMS cannot unwrap what it wrapped", err)
	}
	defer clear(again)
	if !bytes.Equal(again, packed) {
		return nil, unavailable("the KMS does not give back what it wrapped", nil)
	}
	return encode(&storev1.Wrapped{Ciphertext: c})
}

func checkClass(c *keydv1.Class) error {
	if err := ident.Class(c.GetName()); err != nil {
		return invalid("class", err)
	}
	for _, d := range []*durationpb.Duration{c.BucketWidth, c.Lease, c.Retention} {
		if d != nil && d.CheckValid() != nil {
			return invalid("class", errors.New("a duration is not valid"))
		}
	}
	width, lease := c.BucketWidth.AsDuration(), c.Lease.AsDuration()
	switch {
	case width < MinBucketWidth || width > MaxBucketWidth || width%time.Second != 0:
		return invalid("bucket_width", errors.New("one hour to 366 days, in whole seconds"))
	case lease < 0 || lease > MaxLease || lease%time.Millisecond != 0:
		return invalid("lease", errors.New("0 to one hour, in whole milliseconds"))
	}
	return checkRetention(c)
}

// maxRetention is the longest retention that can be counted.
const maxRetention = 100 * 366 * 24 * time.Hour

func checkRetention(c *keydv1.Class) error {
	if c.ApprovedBy != "" && ident.Reason(c.ApprovedBy) != nil {
		return invalid("approved_by", errors.New("a code of 1-64 bytes of [a-z0-9._-]"))
	}
	if _, known := keydv1.EndAction_name[int32(c.EndAction)]; !known {
		return invalid("end_action", errors.New("is not known"))
	}
	if c.Retention == nil {
		if c.EndAction != keydv1.EndAction_END_ACTION_UNSPECIFIED {
			return invalid("end_action", errors.New("means nothing without a retention"))
		}
		return nil
	}
	switch r := c.Retention.AsDuration(); {
	case r <= 0 || r > maxRetention || r%time.Second != 0:
		return invalid("retention", errors.New("1 s to 100 years, in whole seconds"))
	case c.ApprovedBy == "":
		return invalid("approved_by", errors.New("a retention needs it"))
	}
	return nil
}

// setRetention takes over what a request says of the end of the data.
func setRetention(row *storev1.Class, c *keydv1.Class, now time.Time) {
	setEnd(row, int64(c.Retention.AsDuration()/time.Second), c.EndAction == keydv1.EndAction_END_ACTION_DENY, now)
	row.ApprovedBy = c.ApprovedBy
}

// setEnd changes when the data ends, and whether its key is kept then.
func setEnd(row *storev1.Class, retentionS int64, denyOnly bool, now time.Time) {
	if retentionS != row.RetentionS || denyOnly != row.DenyOnly {
		row.RetentionS, row.DenyOnly, row.EndSetMs = retentionS, denyOnly, now.UnixMilli()
	}
}

func newClass(c *keydv1.Class, number uint32, now time.Time) *storev1.Class {
	width := int64(c.BucketWidth.AsDuration() / time.Second)
	row := &storev1.Class{
		Name: c.Name, Number: number, BucketWidthS: width, LeaseMs: c.Lease.AsDuration().Milliseconds(),
		WidthFromS: now.Unix() / width * width,
	}
	setRetention(row, c, now)
	return row
}

func putClass(tx Tx, tenant id16, c *storev1.Class) error {
	h := classHash(c.Name)
	if err := tx.Put(classNumberKey(tenant, c.Number), h[:]); err != nil {
		return err
	}
	return putRow(tx, classKey(tenant, h), c)
}

func classSet(tenant string, c *storev1.Class, now time.Time) *receipt.Statement {
	s := &receipt.Statement{
		Kind: receipt.ClassSet, Time: now, Tenant: tenant,
		Classes:      []receipt.Class{{Name: c.Name, Number: c.Number}},
		BucketWidthS: c.BucketWidthS, WidthFromS: c.WidthFromS,
		NextBucketWidthS: c.NextBucketWidthS, NextWidthFromS: c.NextWidthFromS,
		LeaseMS: c.LeaseMs, RetentionS: c.RetentionS, ApprovedBy: c.ApprovedBy,
	}
	if c.RetentionS != 0 {
		s.EndAction = receipt.EndDestroy
		if c.DenyOnly {
			s.EndAction = receipt.EndDeny
		}
	}
	return s
}

// publicClass shows the width that holds from the next bucket on.
func publicClass(c *storev1.Class) *keydv1.Class {
	width := c.BucketWidthS
	if c.NextBucketWidthS != 0 {
		width = c.NextBucketWidthS
	}
	out := &keydv1.Class{
		Name: c.Name, Number: c.Number,
		BucketWidth: durationpb.New(time.Duration(width) * time.Second),
		Lease:       durationpb.New(time.Duration(c.LeaseMs) * time.Millisecond),
		ApprovedBy:  c.ApprovedBy,
	}
	if c.ChangedAt != 0 {
		out.LedgerIndex = c.ChangedAt - 1
	}
	if c.RetentionS != 0 {
		out.Retention = durationpb.New(time.Duration(c.RetentionS) * time.Second)
		out.EndAction = keydv1.EndAction_END_ACTION_DESTROY
		if c.DenyOnly {
			out.EndAction = keydv1.EndAction_END_ACTION_DENY
		}
	}
	return out
}

func publicClasses(rows []*storev1.Class) []*keydv1.Class {
	out := make([]*keydv1.Class, len(rows))
	for i, c := range rows {
		out[i] = publicClass(c)
	}
	return out
}

// PutClass makes a class, or changes its policy.
func (k *Keys) PutClass(ctx context.Context, tenant string, c *keydv1.Class) (*keydv1.Class, error) {
	if err := ident.Tenant(tenant); err != nil {
		return nil, invalid("tenant", err)
	}
	if err := checkClass(c); err != nil {
		return nil, err
	}
	var row *storev1.Class
	o := &op{alone: true, check: func(r Reader, now time.Time) (*plan, error) {
		if _, err := openEpoch(r); err != nil {
			return nil, err
		}
		t, err := activeTenant(r, tenant)
		if err != nil {
			return nil, err
		}
		id := tenantID(tenant)
		row = new(storev1.Class)
		switch err := getRow(r, classKey(id, classHash(c.Name)), row); {
		case errors.Is(err, ErrNotFound):
			if t.NextClass > MaxClasses {
				return nil, fail(keydv1.Outcome_OUTCOME_EXHAUSTED, "a tenant has at most 64 classes")
			}
			row = newClass(c, t.NextClass, now)
			t.NextClass++
		case err != nil:
			return nil, err
		default:
			before := proto.CloneOf(row)
			from, to := k.bounds(now)
			setLease(row, c.Lease.AsDuration().Milliseconds(), from, to)
			next, err := nextBucket(r, id, row, now)
			if err != nil {
				return nil, err
			}
			if err := setWidth(row, int64(c.BucketWidth.AsDuration()/time.Second), now, next); err != nil {
				return nil, err
			}
			setRetention(row, c, now)
			if proto.Equal(before, row) && row.ChangedAt != 0 {
				// Nothing new, such as a repeat: the entry is there.
				return &plan{index: row.ChangedAt - 1, write: func(Tx, uint64) error { return nil }}, nil
			}
		}
		stated := classSet(tenant, row, now)
		stated.Principal = principalOf(ctx)
		return &plan{statements: []*receipt.Statement{stated}, write: func(tx Tx, index uint64) error {
			row.ChangedAt = index + 1
			if err := putClass(tx, id, row); err != nil {
				return err
			}
			return putRow(tx, tenantKey(id), t)
		}}, nil
	}}
	if err := k.record(ctx, o); err != nil {
		return nil, err
	}
	return publicClass(row), nil
}

// Classes lists a tenant's classes by number.
func (k *Keys) Classes(ctx context.Context, tenant string) ([]*keydv1.Class, error) {
	if err := ident.Tenant(tenant); err != nil {
		return nil, invalid("tenant", err)
	}
	var rows []*storev1.Class
	err := k.store.View(ctx, func(r Reader) error {
		t, err := activeTenant(r, tenant)
		if err != nil {
			return err
		}
		for n := uint32(1); n < t.NextClass; n++ {
			c, err := classByNumber(r, tenantID(tenant), n)
			if err != nil {
				return err
			}
			rows = append(rows, c)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return publicClasses(rows), nil
}

// Tenants lists up to limit names in the order of their rows, which says
// nothing; after is the last name of the page before.
func (k *Keys) Tenants(ctx context.Context, after string, limit int) ([]string, error) {
	var names []string
	var from []byte
	if after != "" {
		if err := ident.Tenant(after); err != nil {
			return nil, invalid("page_token", err)
		}
		from = tenantKey(tenantID(after))
	}
	err := k.store.View(ctx, func(r Reader) error {
		var bad error
		err := r.Scan([]byte{'T'}, from, func(_, value []byte) bool {
			var t storev1.Tenant
			if bad = decode(value, &t); bad != nil {
				return false
			}
			if t.Name != "" { // not keyd's own
				names = append(names, t.Name)
			}
			return len(names) < limit
		})
		return errors.Join(err, bad)
	})
	return slices.Clip(names), err
}
