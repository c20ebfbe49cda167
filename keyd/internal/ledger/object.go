package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"lethe/sdk/receipt"
)

// Bounds of an object. Writers stay far below them.
const (
	maxObjectEntries = 1 << 14
	maxCheckpoint    = 8 << 10
	// MaxObject is the greatest size of an encoded object in bytes.
	MaxObject = 16 << 20
)

// objectMagic begins an encoded object, with the version of the encoding.
const objectMagic = "\x89lethe-anchor\x00\x01"

// Check reports whether o is well formed: it wraps ErrAnchorDamaged if not. It
// verifies neither signatures nor hashes. It returns the checkpoint.
func (o Object) Check() (receipt.Checkpoint, error) {
	bad := func(what string) (receipt.Checkpoint, error) {
		return receipt.Checkpoint{}, fmt.Errorf("%w: object of size %d: %s", ErrAnchorDamaged, o.Size, what)
	}
	if o.From >= o.Size || o.Size > MaxSize || o.Size-o.From > maxObjectEntries {
		return bad("its bounds")
	}
	if uint64(len(o.Entries)) != o.Size-o.From {
		return bad("the number of its entries")
	}
	for i, e := range o.Entries {
		if len(e.Salt) != receipt.SaltSize || len(e.Statement) == 0 || len(e.Statement) > receipt.MaxStatement ||
			e.TreeSize <= o.From+uint64(i) || e.TreeSize > MaxSize {
			return bad("an entry")
		}
	}
	c, err := receipt.ParseCheckpoint(o.Checkpoint)
	if err != nil || c.Size != o.Size {
		return bad("its checkpoint")
	}
	return c, nil
}

// SameHistory reports whether the checkpoints of a and b have the same text.
// Both must be well formed.
func SameHistory(a, b Object) bool {
	c, err1 := receipt.ParseCheckpoint(a.Checkpoint)
	d, err2 := receipt.ParseCheckpoint(b.Checkpoint)
	return err1 == nil && err2 == nil && c == d
}

// Contradicts reports whether a and b have another entry at one index.
func Contradicts(a, b Object) bool {
	for i := max(a.From, b.From); i < min(a.Size, b.Size); i++ {
		x, y := a.Entries[i-a.From], b.Entries[i-b.From]
		if !bytes.Equal(x.Salt, y.Salt) || !bytes.Equal(x.Statement, y.Statement) {
			return true
		}
	}
	return false
}

// Encode returns the object's bytes: magic, From and Size (8 bytes each,
// big-endian as all numbers here), the checkpoint with its length (4), then
// each entry: TreeSize (8), salt (32), statement with its length (4); at the
// end the SHA-256 of all before it, so that truncation and edits show.
func (o Object) Encode() ([]byte, error) {
	if _, err := o.Check(); err != nil {
		return nil, err
	}
	b := []byte(objectMagic)
	b = binary.BigEndian.AppendUint64(b, o.From)
	b = binary.BigEndian.AppendUint64(b, o.Size)
	b = binary.BigEndian.AppendUint32(b, uint32(len(o.Checkpoint)))
	b = append(b, o.Checkpoint...)
	for _, e := range o.Entries {
		b = binary.BigEndian.AppendUint64(b, e.TreeSize)
		b = append(b, e.Salt...)
		b = binary.BigEndian.AppendUint32(b, uint32(len(e.Statement)))
		b = append(b, e.Statement...)
	}
	sum := sha256.Sum256(b)
	b = append(b, sum[:]...)
	if len(b) > MaxObject {
		return nil, fmt.Errorf("%w: object of size %d: larger than %d bytes", ErrAnchorDamaged, o.Size, MaxObject)
	}
	return b, nil
}

// DecodeObject decodes what Encode returned, and nothing else. Its errors wrap
// ErrAnchorDamaged. It keeps parts of b.
func DecodeObject(b []byte) (Object, error) {
	bad := func(what string) (Object, error) {
		return Object{}, fmt.Errorf("%w: %s", ErrAnchorDamaged, what)
	}
	if len(b) > MaxObject || len(b) < len(objectMagic)+sha256.Size {
		return bad("an object of an impossible length")
	}
	body, sum := b[:len(b)-sha256.Size], b[len(b)-sha256.Size:]
	if want := sha256.Sum256(body); !bytes.Equal(want[:], sum) {
		return bad("an object fails its checksum")
	}
	c := cursor{rest: body}
	if string(c.bytes(len(objectMagic))) != objectMagic {
		return bad("an object of unknown form or version")
	}
	o := Object{From: c.uint64(), Size: c.uint64()}
	if o.From >= o.Size || o.Size-o.From > maxObjectEntries {
		return bad("an object with impossible bounds")
	}
	o.Checkpoint = c.sized(maxCheckpoint)
	for i := o.From; i < o.Size && !c.short; i++ {
		o.Entries = append(o.Entries, Entry{
			TreeSize:  c.uint64(),
			Salt:      c.bytes(receipt.SaltSize),
			Statement: c.sized(receipt.MaxStatement),
		})
	}
	if c.short || len(c.rest) > 0 {
		return bad("an object of the wrong length")
	}
	if _, err := o.Check(); err != nil {
		return Object{}, err
	}
	return o, nil
}

// cursor reads from the front of rest; once it runs short it returns zeros.
type cursor struct {
	rest  []byte
	short bool
}

func (c *cursor) bytes(n int) []byte {
	if c.short || n > len(c.rest) {
		c.short = true
		return nil
	}
	b := c.rest[:n:n]
	c.rest = c.rest[n:]
	return b
}

func (c *cursor) uint64() uint64 {
	if b := c.bytes(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (c *cursor) sized(limit int) []byte {
	b := c.bytes(4)
	if b == nil {
		return nil
	}
	n := binary.BigEndian.Uint32(b)
	if n > uint32(limit) {
		c.short = true
		return nil
	}
	return c.bytes(int(n))
}
