package envelope

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
)

const (
	// KeySize is the size of a blob key in bytes.
	KeySize = 32
	// KeyIDSize is the size of a key id in bytes.
	KeyIDSize = 16
	// MaxRecipients is the most keys that one blob can be sealed under.
	MaxRecipients = 64
)

// KeyID names a key. It is random, and public.
type KeyID [KeyIDSize]byte

// String returns the id in lower-case hexadecimal.
func (id KeyID) String() string { return hex.EncodeToString(id[:]) }

// Key is a blob key: it opens the blobs of one subject, class and bucket.
// It prints without its secret.
type Key struct {
	ID     KeyID
	Class  uint16        // the class's number
	Bucket uint64        // start of the bucket, Unix seconds
	Secret [KeySize]byte `json:"-"`
}

// Wipe zeroes the secret.
func (k *Key) Wipe() { clear(k.Secret[:]) }

// Format prints the key without its secret, whatever the verb.
func (k Key) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "envelope.Key{ID:%s Class:%d Bucket:%d}", k.ID, k.Class, k.Bucket)
}

// ordered returns keys in the order of a header, ascending by id. It fails
// with ErrInvalidRecipients unless there are lo to MaxRecipients of them, of
// distinct ids, one class and one bucket.
func ordered(keys []*Key, lo int) ([]*Key, error) {
	if len(keys) < lo || len(keys) > MaxRecipients || slices.Contains(keys, nil) {
		return nil, ErrInvalidRecipients
	}
	sorted := slices.SortedFunc(slices.Values(keys), func(a, b *Key) int {
		return bytes.Compare(a.ID[:], b.ID[:])
	})
	for i, k := range sorted[1:] {
		if k.ID == sorted[i].ID || k.Class != sorted[0].Class || k.Bucket != sorted[0].Bucket {
			return nil, ErrInvalidRecipients
		}
	}
	return sorted, nil
}
