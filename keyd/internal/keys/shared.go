package keys

import (
	"bytes"
	"hash/maphash"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	storev1 "lethe/proto/keyd/store/v1"
)

// shared keeps parsed rows of one kind, found by their bytes: a few rows (the
// store's own, a tenant's, a class's, a bucket's) are read by nearly every call
// and change seldom, and parsing them takes longer than reading. Whoever asks
// has read the row from his snapshot, so what is found is never outdated.
type shared[M any] [64]atomic.Pointer[parsed[M]]

// parsed is immutable.
type parsed[M any] struct {
	row     []byte
	message *M
}

var (
	sharedMetas   shared[storev1.Meta]
	sharedTenants shared[storev1.Tenant]
	sharedClasses shared[storev1.Class]
	sharedBuckets shared[storev1.Bucket]
	sharedSeed    = maphash.MakeSeed()
)

// maxSharedRow bounds the rows that are kept of one kind to 256 KiB.
const maxSharedRow = 4 << 10

// getShared is getRow for those who do not change what they get, which others
// read at the same time.
func getShared[M any, P interface {
	*M
	proto.Message
}](s *shared[M], r Reader, key []byte) (P, error) {
	row, err := r.Get(key)
	if err != nil {
		return nil, err
	}
	place := &s[maphash.Bytes(sharedSeed, row)%uint64(len(s))]
	if p := place.Load(); p != nil && bytes.Equal(p.row, row) {
		return p.message, nil
	}
	m := new(M)
	if err := decode(row, P(m)); err != nil {
		return nil, err
	}
	if len(row) <= maxSharedRow {
		place.Store(&parsed[M]{row, m})
	}
	return m, nil
}
