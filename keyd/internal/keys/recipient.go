package keys

import (
	"bytes"
	"context"
	"errors"
	"slices"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// checkRecipients checks the key ids of a blob for several subjects, as its
// header has them.
func checkRecipients(queries []*keydv1.BlobKeyQuery, recipients [][]byte) error {
	if len(recipients) == 0 {
		return nil
	}
	if len(recipients) < 2 || len(recipients) > envelope.MaxRecipients {
		return invalid("recipients", errors.New("a blob for several subjects has 2 to 64"))
	}
	for i, id := range recipients {
		if len(id) != len(id16{}) {
			return invalid("recipients", errors.New("a key id has 16 bytes"))
		}
		if i > 0 && bytes.Compare(recipients[i-1], id) >= 0 {
			return invalid("recipients", errors.New("key ids are strictly ascending"))
		}
	}
	for _, q := range queries {
		if q.GetTenant() != queries[0].GetTenant() {
			return invalid("tenant", errors.New("the recipients of a blob are of one tenant"))
		}
	}
	return nil
}

// recipientOf returns the key id among recipients that is or was the subject's,
// a live one before a dead one. A subject who is none of them is told so,
// whatever has become of those who are.
func recipientOf(r Reader, s *storev1.Subject, recipients [][]byte) ([]byte, error) {
	var dead []byte
	for _, sc := range s.Classes {
		if _, is := slices.BinarySearchFunc(recipients, sc.KeyId, bytes.Compare); is {
			return sc.KeyId, nil
		}
		for _, id := range sc.DeadKeyIds {
			if _, is := slices.BinarySearchFunc(recipients, id, bytes.Compare); is {
				dead = id
			}
		}
	}
	if dead != nil {
		return dead, nil
	}
	for _, id := range recipients {
		switch err := getRow(r, ownerKey(id), &storev1.KeyOwner{}); {
		case err == nil:
			return nil, fail(keydv1.Outcome_OUTCOME_WRONG_SUBJECT, "the blob belongs to other subjects than the one named")
		case !errors.Is(err, ErrNotFound):
			return nil, err
		}
	}
	return nil, unknown("the blob's keys")
}

// Recipients tells what has become of each of a blob's recipients.
func (k *Keys) Recipients(ctx context.Context, tenant string, recipients [][]byte) ([]*keydv1.Recipient, error) {
	t, err := k.ring.get(ctx, tenant)
	if err != nil {
		return nil, err
	}
	states := make([]*keydv1.Recipient, len(recipients))
	gone := make([]error, len(recipients))
	err = k.store.View(ctx, func(r Reader) error {
		for i, id := range recipients {
			var err error
			if states[i], gone[i], err = stateOf(r, t, id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	telling, cancel := context.WithTimeout(ctx, tellLimit)
	defer cancel()
	for i := range states {
		var told *Error
		if errors.As(k.Told(telling, gone[i]), &told) {
			states[i].Outcome = told.Outcome
		}
	}
	return states, nil
}

// stateOf returns a recipient and, where its key cannot be had, why.
func stateOf(r Reader, t *tenantKeys, id []byte) (_ *keydv1.Recipient, gone, _ error) {
	var owner storev1.KeyOwner
	switch err := getRow(r, ownerKey(id), &owner); {
	case errors.Is(err, ErrNotFound), err == nil && !bytes.Equal(owner.Tenant, t.id[:]):
		return &keydv1.Recipient{}, unknown("the key"), nil
	case err != nil:
		return nil, nil, err
	}
	var subject storev1.Subject
	handle := id16(owner.Handle)
	if err := getRow(r, subjectKey(t.id, handle), &subject); err != nil {
		return nil, nil, damaged("a key's subject cannot be read", err)
	}
	_, gone = openable(r, t.id, handle, &subject, id)
	if gone != nil && !errors.As(gone, new(*Error)) {
		return nil, nil, gone
	}
	return &keydv1.Recipient{Handle: owner.Handle}, gone, nil
}
