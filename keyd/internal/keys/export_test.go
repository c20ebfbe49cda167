package keys

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	storev1 "lethe/proto/keyd/store/v1"
)

// What the tests need to see: they stand outside, because the store imports
// this package.
var (
	BucketAt     = bucketAt
	LongestLease = longestLease
	SetLease     = func(c *storev1.Class, leaseMs int64, now time.Time) { setLease(c, leaseMs, now, now) }
	SetWidth     = setWidth
	NextGroup    = nextGroup
)

// MaxGroup is how many operations fill a group.
const MaxGroup = maxGroup

// Op is an operation of the group loop.
type Op = op

// NewOp makes an operation that has only what nextGroup looks at.
func NewOp(ctx context.Context, alone bool, rows ...string) *Op {
	return &op{ctx: ctx, alone: alone, rows: rows, done: make(chan struct{})}
}

// Gather is what the group loop does before it forms a group.
func (k *Keys) Gather(ctx context.Context, waiting []*Op) []*Op { return k.gather(ctx, waiting) }

// OpErr is the error that an operation ended with.
func OpErr(o *Op) error { return o.err }

// OpRows are the rows of an operation.
func OpRows(o *Op) []string { return o.rows }

// StepDuties does one piece of the background work.
func (k *Keys) StepDuties(ctx context.Context) (again bool, err error) { return k.duties.step(ctx) }

// TakeDuties makes k the holder of the duties, as if the other had lapsed.
func (k *Keys) TakeDuties(ctx context.Context) error { return k.duties.take(ctx) }

// Beat writes k's heartbeat.
func (k *Keys) Beat(ctx context.Context) error { return k.beat(ctx) }

// DropKEKs is what the ring does when it finds the root of an epoch disabled.
func (k *Keys) DropKEKs(epoch uint32) { k.ring.drop(epoch) }

// HeldKEKs counts the KEKs of an epoch that k holds.
func (k *Keys) HeldKEKs(epoch uint32) (n int) {
	k.ring.mu.Lock()
	defer k.ring.mu.Unlock()
	for _, t := range k.ring.tenants {
		t.mu.Lock()
		for _, w := range t.keks {
			if w.epoch == epoch {
				n++
			}
		}
		t.mu.Unlock()
	}
	return n
}

// Loads counts the loads of KEKs that are under way.
func (k *Keys) Loads() int {
	k.ring.mu.Lock()
	defer k.ring.mu.Unlock()
	return len(k.ring.flights) + len(k.ring.keks)
}

// Bounds of heartbeats.
const (
	BeatLimit = beatLimit
	BeatLapse = beatLapse
)

// CheckShared returns an error if a parsed row that is shared was changed.
func CheckShared() error {
	return errors.Join(checkShared(&sharedMetas), checkShared(&sharedTenants), checkShared(&sharedClasses), checkShared(&sharedBuckets))
}

func checkShared[M any, P interface {
	*M
	proto.Message
}](s *shared[M]) (err error) {
	for i := range s {
		p := s[i].Load()
		if p == nil {
			continue
		}
		if m := P(new(M)); proto.Unmarshal(p.row, m) != nil || !proto.Equal(m, P(p.message)) {
			err = errors.Join(err, fmt.Errorf("a shared %T was changed", m))
		}
	}
	return err
}
