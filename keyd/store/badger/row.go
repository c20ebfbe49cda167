package badger

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"lethe/keyd/internal/keys"
)

// A row in Badger has a prefix before its key, because Badger keeps keys that
// begin with "!badger!" for itself, and before its value the CRC-32C of key and
// value, because Badger answers "not found" where a block of a running store
// fails its checksum, and ends a compaction's input there. Its own checks are
// therefore off; blocks are checked by Open and Verify, rows by every read.
const (
	rowPrefix = 'r'
	sumLen    = crc32.Size
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

func badgerKey(key string) []byte {
	k := make([]byte, 0, 1+len(key))
	return append(append(k, rowPrefix), key...)
}

// badgerValue is the value to store under a Badger key.
func badgerValue(key, value []byte) []byte {
	v := make([]byte, 0, sumLen+len(value))
	v = binary.BigEndian.AppendUint32(v, rowSum(key, value))
	return append(v, value...)
}

// rowValue returns the row's value within what is stored under a Badger key.
func rowValue(key, stored []byte) ([]byte, error) {
	if len(stored) < sumLen || binary.BigEndian.Uint32(stored) != rowSum(key, stored[sumLen:]) {
		return nil, fmt.Errorf("%w: a row fails its checksum", keys.ErrDamaged)
	}
	return stored[sumLen:], nil
}

func rowSum(key, value []byte) uint32 {
	return crc32.Update(crc32.Checksum(key, crcTable), crcTable, value)
}

// txnOverhead is more than what Badger counts for a transaction without rows.
const txnOverhead = 64

// charge is what a row counts in a Badger transaction, in bytes.
func charge(key string, value []byte) int64 {
	return int64(1+len(key)+sumLen+len(value)) + 12
}
