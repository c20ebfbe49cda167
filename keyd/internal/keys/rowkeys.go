package keys

import (
	"encoding/binary"

	"google.golang.org/protobuf/proto"
)

// Keys of rows. The first byte is the kind; the rest is of fixed length, so no
// key is a prefix of another. The ledger's rows begin with 'L' and are its own.
//
//	M                                       storev1.Meta
//	E epoch:4                               storev1.Epoch
//	T tenant:16                             storev1.Tenant
//	C tenant:16 class name hash:16          storev1.Class
//	c tenant:16 class number:2              the class's name hash
//	S tenant:16 handle:16                   storev1.Subject
//	K key id:16                             storev1.KeyOwner
//	B tenant:16 class number:2 start:8      storev1.Bucket
//	R request hmac:32                       storev1.Request
//	I tenant:16 ledger index:8              empty
//	N ledger index:8                        the index of the later entry about it
//	D due:8 tenant:16 handle:16             empty: a destruction is scheduled
//	J tenant:16 handle:16                   storev1.HeldSubject
//	j tenant:16                             storev1.Holders
//	m tenant:16                             storev1.Materialising
//	Z tenant:16                             storev1.Sweep
//	A keyd:16                               storev1.Heartbeat
//	U                                       storev1.Duty
//	e epoch:4                               storev1.Rewrap
//	w epoch:4 K tenant:16 kek id:16         storev1.Wrapped, under the root
//	w epoch:4 P tenant:16                   storev1.Wrapped, the pseudonym key
//	w epoch:4 S name:16                     storev1.Wrapped, a secret of keyd's own
//	w epoch:4 B tenant:16 class:2 start:8   storev1.Wrapped, a bucket key
//	w epoch:4 D tenant:16 handle:16 id:16   storev1.Wrapped, a DEK
//	w epoch:4 H tenant:16 handle:16 class:2 start:8 id:16
//	                                        storev1.Wrapped, a held subject's share
//
// Wrapped rows are keyed by epoch first, so that a drained epoch is dropped as
// one range.

// id16 is a random or derived identifier of 16 bytes: a tenant, a handle, a
// key id, a KEK id.
type id16 = [16]byte

// systemTenant stands for keyd itself where a tenant is called for. No tenant
// name hashes to it but by breaking SHA-256.
var systemTenant id16

func metaKey() []byte { return []byte{'M'} }

func epochKey(epoch uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte{'E'}, epoch)
}

func rewrapKey(epoch uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte{'e'}, epoch)
}

func heartbeatKey(keyd id16) []byte { return append([]byte{'A'}, keyd[:]...) }

func dutyKey() []byte { return []byte{'U'} }

func laterKey(index uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{'N'}, index)
}

func dueKey(dueMs int64, t, handle id16) []byte {
	b := binary.BigEndian.AppendUint64([]byte{'D'}, uint64(dueMs))
	return append(append(b, t[:]...), handle[:]...)
}

func heldKey(t, handle id16) []byte {
	return append(append([]byte{'J'}, t[:]...), handle[:]...)
}

func holdersKey(t id16) []byte { return append([]byte{'j'}, t[:]...) }

func materialisingKey(t id16) []byte { return append([]byte{'m'}, t[:]...) }

func sweepKey(t id16) []byte { return append([]byte{'Z'}, t[:]...) }

func tenantKey(t id16) []byte { return append([]byte{'T'}, t[:]...) }

func classKey(t, nameHash id16) []byte {
	return append(append([]byte{'C'}, t[:]...), nameHash[:]...)
}

func classNumberKey(t id16, number uint32) []byte {
	return binary.BigEndian.AppendUint16(append([]byte{'c'}, t[:]...), uint16(number))
}

func subjectKey(t, handle id16) []byte {
	b := make([]byte, 0, 33)
	return append(append(append(b, 'S'), t[:]...), handle[:]...)
}

func ownerKey(keyID []byte) []byte { return append([]byte{'K'}, keyID...) }

func bucketKey(t id16, class uint32, start uint64) []byte {
	b := append([]byte{'B'}, t[:]...)
	b = binary.BigEndian.AppendUint16(b, uint16(class))
	return binary.BigEndian.AppendUint64(b, start)
}

func requestKey(mac []byte) []byte { return append([]byte{'R'}, mac...) }

func receiptIndexKey(t id16, index uint64) []byte {
	return binary.BigEndian.AppendUint64(append([]byte{'I'}, t[:]...), index)
}

// wrappedPrefix begins the key of every wrapped row of an epoch.
func wrappedPrefix(epoch uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte{'w'}, epoch)
}

func wrappedKey(epoch uint32, kind byte, capacity int) []byte {
	b := make([]byte, 0, 6+capacity)
	return append(binary.BigEndian.AppendUint32(append(b, 'w'), epoch), kind)
}

func wrappedKEKKey(epoch uint32, t, kek id16) []byte {
	return append(append(wrappedKey(epoch, 'K', 32), t[:]...), kek[:]...)
}

func wrappedPseudonymKey(epoch uint32, t id16) []byte {
	return append(wrappedKey(epoch, 'P', 16), t[:]...)
}

func wrappedSecretKey(epoch uint32, name id16) []byte {
	return append(wrappedKey(epoch, 'S', 16), name[:]...)
}

func wrappedBucketKey(epoch uint32, t id16, class uint32, start uint64) []byte {
	b := append(wrappedKey(epoch, 'B', 26), t[:]...)
	b = binary.BigEndian.AppendUint16(b, uint16(class))
	return binary.BigEndian.AppendUint64(b, start)
}

func wrappedDEKKey(epoch uint32, t, handle id16, keyID []byte) []byte {
	b := append(wrappedKey(epoch, 'D', 48), t[:]...)
	return append(append(b, handle[:]...), keyID...)
}

func wrappedShareKey(epoch uint32, t, handle id16, class uint32, start uint64, keyID []byte) []byte {
	b := append(wrappedKey(epoch, 'H', 58), t[:]...)
	b = binary.BigEndian.AppendUint16(append(b, handle[:]...), uint16(class))
	return append(binary.BigEndian.AppendUint64(b, start), keyID...)
}

// getRow reads a row into m. A missing row is ErrNotFound.
func getRow(r Reader, key []byte, m proto.Message) error {
	b, err := r.Get(key)
	if err != nil {
		return err
	}
	return decode(b, m)
}

func putRow(tx Tx, key []byte, m proto.Message) error {
	b, err := encode(m)
	if err != nil {
		return err
	}
	return tx.Put(key, b)
}

func decode(b []byte, m proto.Message) error {
	if err := proto.Unmarshal(b, m); err != nil {
		return damaged("a row does not parse", err)
	}
	return nil
}

func encode(m proto.Message) ([]byte, error) { return proto.Marshal(m) }
