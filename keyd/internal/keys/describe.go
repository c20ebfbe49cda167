package keys

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }

// DescribeSubject tells a subject's state. A subject that was never seen is
// absent, which is not an error and proves nothing.
func (k *Keys) DescribeSubject(ctx context.Context, tenant string, subject []byte) (*keydv1.DescribeSubjectResponse, error) {
	if err := checkSubject(tenant, subject); err != nil {
		return nil, err
	}
	t, err := k.ring.get(ctx, tenant)
	if err != nil {
		return nil, err
	}
	handle := t.handle(subject)
	res := &keydv1.DescribeSubjectResponse{Handle: handle[:]}
	var told uint64 // entries of the ledger that tell of a destruction
	err = k.store.View(ctx, func(r Reader) error {
		row, err := activeTenant(r, tenant)
		if err != nil {
			return err
		}
		now := k.now()
		for _, h := range row.Holds {
			if binding([]*storev1.Hold{h}, now) != nil {
				res.Holds = append(res.Holds, h.Id)
			}
		}
		var s storev1.Subject
		err = getRow(r, subjectKey(t.id, handle), &s)
		if errors.Is(err, ErrNotFound) {
			res.State = keydv1.SubjectState_SUBJECT_STATE_ABSENT
			return nil
		}
		if err != nil {
			return err
		}
		res.State, res.Generation = publicState(s.State), s.Generation
		res.LedgerIndexes = s.LedgerIndexes
		if s.State == storev1.LifeState_LIFE_STATE_DESTROYED {
			told = newest(&s)
		}
		for _, e := range s.Schedules {
			out := &keydv1.ScheduledDestruction{Due: timestamppb.New(time.UnixMilli(e.DueMs)), LedgerIndex: e.LedgerIndex}
			for _, n := range e.Classes {
				c, err := classByNumber(r, t.id, n)
				if err != nil {
					return err
				}
				out.Classes = append(out.Classes, c.Name)
			}
			res.Scheduled = append(res.Scheduled, out)
		}
		slices.SortFunc(res.Scheduled, func(a, b *keydv1.ScheduledDestruction) int { return a.Due.AsTime().Compare(b.Due.AsTime()) })
		for _, h := range s.Holds {
			if binding([]*storev1.Hold{h}, now) != nil {
				res.Holds = append(res.Holds, h.Id)
			}
		}
		for _, sc := range s.Classes {
			c, err := classByNumber(r, t.id, sc.ClassNumber)
			if err != nil {
				return err
			}
			state := sc.State
			if s.State == storev1.LifeState_LIFE_STATE_DESTROYED {
				state = s.State
			}
			if state == storev1.LifeState_LIFE_STATE_DESTROYED {
				told = newest(&s)
			}
			res.Classes = append(res.Classes, &keydv1.ClassState{
				Class: c.Name, State: publicState(state), Generation: sc.Generation,
				KeyId: sc.KeyId, DeadKeyIds: sc.DeadKeyIds,
			})
		}
		return nil
	})
	if err == nil {
		err = k.tell(ctx, told)
	}
	if err != nil {
		return nil, err
	}
	return res, nil
}

func publicState(s storev1.LifeState) keydv1.SubjectState {
	switch s {
	case storev1.LifeState_LIFE_STATE_ACTIVE:
		return keydv1.SubjectState_SUBJECT_STATE_ACTIVE
	case storev1.LifeState_LIFE_STATE_SCHEDULED:
		return keydv1.SubjectState_SUBJECT_STATE_SCHEDULED
	case storev1.LifeState_LIFE_STATE_DESTROYED:
		return keydv1.SubjectState_SUBJECT_STATE_DESTROYED
	}
	return keydv1.SubjectState_SUBJECT_STATE_ABSENT
}
