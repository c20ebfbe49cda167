package sdk

import (
	"errors"
	"math"
	"sync/atomic"
	"time"

	"lethe/sdk/envelope"
)

const (
	// maxLease bounds every lease, whatever keyd says.
	maxLease = time.Hour
	// onceAllowance is how long the one operation that a lease of zero allows
	// may take, counted like a lease. drained_by counts it.
	onceAllowance = 5 * time.Second
	// useGrain is how precisely the time of the last use is kept.
	useGrain = int64(time.Second)
)

// Why a lease ended, beside an *Error with the outcome that keyd told.
var (
	errLapsed  = errors.New("lease is over")
	errDropped = errors.New("key was dropped")
)

// lease is one blob key that keyd has lent, and all that was derived from it.
type lease struct {
	key         leaseKey
	id          envelope.KeyID
	classNumber uint16
	bucket      uint64
	// ledgerSize is the size of the ledger that the anchor covered when the lease
	// was issued.
	ledgerSize uint64
	// once: for one operation, never found in the table.
	once bool
	// sealEnd is the wall clock's time, in Unix nanoseconds, from which on no
	// blob is begun under this key.
	sealEnd int64
	// begins is when sealing may begin, where the key was asked for ahead: the
	// bucket's start by the wall clock, and the boot time of it by keyd's.
	begins struct {
		wall int64
		boot time.Duration
	}
	clock Clock

	// One of them, by the key's purpose.
	sealer *envelope.Sealer
	opener *envelope.Opener

	// Of a lease of several keys: the ids of those that were granted, of which
	// id is the first, and what is known of all recipients.
	ids     []envelope.KeyID
	members atomic.Pointer[[]member]

	// When the lease is over. They only grow.
	wallEnd atomic.Int64 // Unix nanoseconds
	bootEnd atomic.Int64
	ended   atomic.Pointer[error] // why it is over for good
	// found says that the lease was found in the table since it was granted
	// or renewed: it is hot.
	found   atomic.Bool
	lastUse atomic.Int64 // boot time, kept to useGrain

	// Guarded by Client.mu.
	mapped     bool // in the table
	place      int  // in registry.held, or -1
	streams    int  // open readers and writers
	bucketOver bool // keyd said that the next bucket runs
	renewing   bool
	renewAt    time.Duration // boot time
	// next is the lease of the next bucket, got ahead, that takes the place of
	// this one when that bucket begins; nextAt is when to ask for it.
	next   *lease
	asking bool
	nextAt time.Duration // boot time; never: not at all
}

// check is called before the key is used, before a plaintext is released, and
// at each turn of a stream.
func (l *lease) check() error {
	_, err := l.now()
	return err
}

// checkSeal is check for one who begins to seal.
func (l *lease) checkSeal() error {
	wall, err := l.now()
	if err == nil && wall >= l.sealEnd {
		err = errLapsed
	}
	return err
}

func (l *lease) now() (wall int64, err error) {
	if why := l.ended.Load(); why != nil {
		return 0, *why
	}
	t, b := l.clock.Now()
	wall, boot := t.UnixNano(), int64(b)
	if l.over(wall, boot) {
		return wall, errLapsed
	}
	// Not written each time: goroutines that share the lease would fight for
	// its memory.
	if boot-l.lastUse.Load() > useGrain {
		l.lastUse.Store(boot)
	}
	return wall, nil
}

func (l *lease) over(wall, boot int64) bool {
	return wall >= l.wallEnd.Load() || boot >= l.bootEnd.Load()
}

// extend moves the end to d after the instant at which the lease was asked
// for. It never shortens a lease.
func (l *lease) extend(wall time.Time, boot, d time.Duration) {
	l.wallEnd.Store(max(l.wallEnd.Load(), wall.Add(d).UnixNano()))
	l.bootEnd.Store(max(l.bootEnd.Load(), int64(boot+d)))
}

// end ends the lease for good, wipes the key, and leaves why as the error of
// those who use it now.
func (l *lease) end(why error) {
	l.ended.CompareAndSwap(nil, &why)
	if l.sealer != nil {
		l.sealer.Wipe()
	}
	if l.opener != nil {
		l.opener.Wipe()
	}
}

// hot finds out whether the lease is in use, and thus worth renewing.
func (l *lease) hot() bool { return l.streams > 0 || l.found.Load() }

// markFound notes that the lease was found in the table.
func (l *lease) markFound() {
	if !l.found.Load() {
		l.found.Store(true)
	}
}

const never = math.MaxInt64
