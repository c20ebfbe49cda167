package envelope

import (
	"cmp"
	"encoding/binary"
	"slices"
)

// Limits of a bound context.
const (
	MaxContextPairs = 16
	MaxContextName  = 64   // bytes, at least 1
	MaxContextValue = 1024 // bytes
)

// Context is a bound context: what must be said again to open a blob that was
// sealed with it, such as the row key the blob is stored under. The zero
// Context is none, and costs nothing. A Context is immutable.
type Context struct {
	encoded []byte
}

// Pair is one name and value of a bound context. Both are taken byte for byte.
type Pair struct {
	Name, Value string
}

// NewContext makes a bound context of pairs, whose order is of no matter.
// No pairs make the zero Context. It fails with ErrInvalidContext.
func NewContext(pairs ...Pair) (Context, error) {
	if len(pairs) == 0 {
		return Context{}, nil
	}
	if len(pairs) > MaxContextPairs {
		return Context{}, ErrInvalidContext
	}
	sorted := slices.SortedFunc(slices.Values(pairs), func(a, b Pair) int {
		return cmp.Compare(a.Name, b.Name)
	})
	enc := []byte{byte(len(sorted))}
	for i, p := range sorted {
		if len(p.Name) < 1 || len(p.Name) > MaxContextName || len(p.Value) > MaxContextValue ||
			i > 0 && p.Name == sorted[i-1].Name {
			return Context{}, ErrInvalidContext
		}
		enc = append(enc, byte(len(p.Name)))
		enc = append(enc, p.Name...)
		enc = binary.BigEndian.AppendUint16(enc, uint16(len(p.Value)))
		enc = append(enc, p.Value...)
	}
	return Context{encoded: enc}, nil
}

// IsZero reports whether c is no context.
func (c Context) IsZero() bool { return len(c.encoded) == 0 }
