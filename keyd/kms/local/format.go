package local

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"
	"time"

	"github.com/tink-crypto/tink-go/v2/tink"

	"lethe/keyd/internal/keys"
)

// The file, version 1. Integers are big-endian, times are Unix milliseconds.
//
//	header  8 magic
//	        2 version
//	        1 kind of secret: 1 keyfile, 2 passphrase
//	        4 Argon2id passes, 4 memory in KiB, 1 lanes; zero for a keyfile
//	       32 salt, which also tells this file from any other
//	       32 check value of the secret
//	        4 length of the body
//	body      X-AES-GCM(body key, state, associated data = header)
//	       32 SHA-256 of all that precedes, so that damage is told from a wrong secret
//
//	state   8 sequence number, one more with every version of the file
//	        4 number of roots, which follow in ascending order of their ids
//	root    1 length of the id, the id
//	        4 epoch
//	        1 state: 1 enabled, 2 disabled, 3 pending, 4 destroyed
//	        8 created
//	        8 when the waiting period ends; zero unless pending or destroyed
//	        8 when the key was removed; zero unless destroyed
//	       32 key; absent when destroyed
const (
	magic         = "\x93lethe\r\n"
	formatVersion = 1
	saltSize      = 32
	checkSize     = 32
	headerSize    = len(magic) + 2 + 1 + 9 + saltSize + checkSize + 4
	sumSize       = sha256.Size
	maxIDSize     = 255
	minRoot       = 1 + 1 + 4 + 1 + 3*8
	keySize       = 32

	// maxRoots is the most a file holds, tombstones counted: one an hour for
	// seven years. maxFile follows from it, and bounds what is read.
	maxRoots = 1 << 16
	maxFile  = 16 << 20
)

const (
	secretKeyfile    = 1
	secretPassphrase = 2
)

// header is the readable part of the file. It never changes while the file lives.
type header struct {
	kind  uint8
	cost  argon2Cost
	salt  [saltSize]byte
	check [checkSize]byte
}

// encode returns the header in front of a body of n bytes.
func (h header) encode(n int) []byte {
	b := make([]byte, 0, headerSize)
	b = append(b, magic...)
	b = binary.BigEndian.AppendUint16(b, formatVersion)
	b = append(b, h.kind)
	b = binary.BigEndian.AppendUint32(b, h.cost.passes)
	b = binary.BigEndian.AppendUint32(b, h.cost.memory)
	b = append(b, h.cost.lanes)
	b = append(b, h.salt[:]...)
	b = append(b, h.check[:]...)
	return binary.BigEndian.AppendUint32(b, uint32(n))
}

// parseFile checks all of the file that can be checked without the secret.
// body is a part of data.
func parseFile(data []byte) (h header, body []byte, err error) {
	damaged := func(what string) (header, []byte, error) {
		return header{}, nil, fmt.Errorf("%w: %s", ErrDamaged, what)
	}
	if !bytes.HasPrefix(data, []byte(magic)) {
		return damaged("it does not begin as a root file")
	}
	b := data[len(magic):]
	if len(b) < 2 {
		return damaged("it is truncated")
	}
	if v := binary.BigEndian.Uint16(b); v > formatVersion {
		return header{}, nil, fmt.Errorf("%w: %d", ErrNewerVersion, v)
	} else if v != formatVersion {
		return damaged("it has no version")
	}
	if len(data) < headerSize+aeadOverhead+sumSize {
		return damaged("it is truncated")
	}
	end := len(data) - sumSize
	if sha256.Sum256(data[:end]) != [sumSize]byte(data[end:]) {
		return damaged("its checksum does not match")
	}
	h.kind = b[2]
	h.cost.passes = binary.BigEndian.Uint32(b[3:])
	h.cost.memory = binary.BigEndian.Uint32(b[7:])
	h.cost.lanes = b[11]
	b = b[12:]
	copy(h.salt[:], b)
	copy(h.check[:], b[saltSize:])
	n := binary.BigEndian.Uint32(b[saltSize+checkSize:])
	switch h.kind {
	case secretKeyfile:
		if h.cost != (argon2Cost{}) {
			return damaged("it has passphrase parameters beside a keyfile")
		}
	case secretPassphrase:
		if !h.cost.sane() {
			return damaged("its passphrase parameters are out of bounds")
		}
	default:
		return damaged("its kind of secret is not known")
	}
	if int64(n) != int64(end-headerSize) {
		return damaged("its length is wrong")
	}
	return h, data[headerSize:end], nil
}

// state is what the file holds.
type state struct {
	seq   uint64
	roots []*root // ascending ids
}

type root struct {
	id                            string
	epoch                         uint32
	state                         keys.RootState
	created, destroyAt, destroyed int64
	key                           [keySize]byte
	aead                          tink.AEAD // nil when destroyed
}

// due tells whether the root's waiting period has ended and its key is still there.
func (r *root) due(now time.Time) bool {
	return r.state == keys.RootPending && now.UnixMilli() >= r.destroyAt
}

func (st *state) find(id string) *root {
	i := sort.Search(len(st.roots), func(i int) bool { return st.roots[i].id >= id })
	if i < len(st.roots) && st.roots[i].id == id {
		return st.roots[i]
	}
	return nil
}

func (st *state) add(r *root) {
	i := sort.Search(len(st.roots), func(i int) bool { return st.roots[i].id >= r.id })
	st.roots = append(st.roots, nil)
	copy(st.roots[i+1:], st.roots[i:])
	st.roots[i] = r
}

// destroyDue wipes the keys of the roots that are due.
func (st *state) destroyDue(now time.Time) (changed bool) {
	for _, r := range st.roots {
		if r.due(now) {
			r.state, r.destroyed, r.aead = keys.RootDestroyed, now.UnixMilli(), nil
			clear(r.key[:])
			changed = true
		}
	}
	return changed
}

func (st *state) clone() *state {
	c := &state{seq: st.seq, roots: make([]*root, len(st.roots), len(st.roots)+1)}
	for i, r := range st.roots {
		copied := *r
		c.roots[i] = &copied
	}
	return c
}

func (st *state) wipe() {
	for _, r := range st.roots {
		clear(r.key[:])
		r.aead = nil
	}
}

func (st *state) encode() []byte {
	// Exactly sized, so that no growing leaves copies of the keys behind.
	n := 8 + 4
	for _, r := range st.roots {
		n += minRoot - 1 + len(r.id)
		if r.state != keys.RootDestroyed {
			n += keySize
		}
	}
	b := make([]byte, 0, n)
	b = binary.BigEndian.AppendUint64(b, st.seq)
	b = binary.BigEndian.AppendUint32(b, uint32(len(st.roots)))
	for _, r := range st.roots {
		b = append(b, byte(len(r.id)))
		b = append(b, r.id...)
		b = binary.BigEndian.AppendUint32(b, r.epoch)
		b = append(b, byte(r.state))
		b = binary.BigEndian.AppendUint64(b, uint64(r.created))
		b = binary.BigEndian.AppendUint64(b, uint64(r.destroyAt))
		b = binary.BigEndian.AppendUint64(b, uint64(r.destroyed))
		if r.state != keys.RootDestroyed {
			b = append(b, r.key[:]...)
		}
	}
	return b
}

// decodeState accepts only what encode writes. It copies the keys out of b.
func decodeState(b []byte) (_ *state, err error) {
	damaged := func(what string) (*state, error) {
		return nil, fmt.Errorf("%w: %s", ErrDamaged, what)
	}
	if len(b) < 12 {
		return damaged("its state is truncated")
	}
	st := &state{seq: binary.BigEndian.Uint64(b)}
	n := binary.BigEndian.Uint32(b[8:])
	b = b[12:]
	if n > maxRoots || int64(n)*minRoot > int64(len(b)) {
		return damaged("it has more roots than bytes")
	}
	defer func() {
		if err != nil {
			st.wipe()
		}
	}()
	st.roots = make([]*root, 0, n)
	last := ""
	for range n {
		if len(b) < minRoot {
			return damaged("a root is truncated")
		}
		idSize := int(b[0])
		if idSize == 0 || len(b) < minRoot-1+idSize {
			return damaged("a root's id is truncated")
		}
		r := &root{id: string(b[1 : 1+idSize])}
		b = b[1+idSize:]
		r.epoch = binary.BigEndian.Uint32(b)
		r.state = keys.RootState(b[4])
		r.created = int64(binary.BigEndian.Uint64(b[5:]))
		r.destroyAt = int64(binary.BigEndian.Uint64(b[13:]))
		r.destroyed = int64(binary.BigEndian.Uint64(b[21:]))
		b = b[29:]
		if r.id <= last {
			return damaged("its roots are not in order")
		}
		last = r.id
		for _, c := range []byte(r.id) {
			if c <= ' ' || c > '~' {
				return damaged("a root's id is not printable")
			}
		}
		wantDate, wantKey := false, true
		switch r.state {
		case keys.RootEnabled, keys.RootDisabled:
		case keys.RootPending:
			wantDate = true
		case keys.RootDestroyed:
			wantDate, wantKey = true, false
		default:
			return damaged("a root's state is not known")
		}
		if r.created <= 0 || r.destroyAt < 0 || r.destroyed < 0 ||
			wantDate != (r.destroyAt != 0) || wantKey != (r.destroyed == 0) {
			return damaged("a root's dates do not fit its state")
		}
		if wantKey {
			if len(b) < keySize {
				return damaged("a root's key is truncated")
			}
			copy(r.key[:], b)
			b = b[keySize:]
			if r.aead, err = newAEAD(r.key[:]); err != nil {
				return nil, err
			}
		}
		st.roots = append(st.roots, r)
	}
	if len(b) != 0 {
		return damaged("bytes follow its last root")
	}
	return st, nil
}
