package keys

import "context"

// What the tests need to see: they stand outside, because the store imports
// this package.
var (
	BucketAt     = bucketAt
	LongestLease = longestLease
	SetLease     = setLease
	SetWidth     = setWidth
	NextGroup    = nextGroup
)

// Op is an operation of the group loop.
type Op = op

// NewOp makes an operation that has only what nextGroup looks at.
func NewOp(ctx context.Context, alone bool, rows ...string) *Op {
	return &op{ctx: ctx, alone: alone, rows: rows, done: make(chan struct{})}
}

// OpErr is the error that an operation ended with.
func OpErr(o *Op) error { return o.err }

// OpRows are the rows of an operation.
func OpRows(o *Op) []string { return o.rows }
