package keys

import (
	"bytes"
	"context"
	"encoding/binary"

	"lethe/keyd/internal/wrap"
	storev1 "lethe/proto/keyd/store/v1"
)

// Files are the files of a store that nobody has open.
type Files interface {
	// Names returns the name of each file.
	Names() []string
	// Bytes returns what a file holds.
	Bytes(name string) ([]byte, error)
	// Rows calls fn for every copy of every row that the files' own order
	// tells, also of rows that newer ones hide. unread are the files that
	// should have such an order and do not.
	Rows(fn func(key, value []byte)) (unread []string, err error)
}

// Residue is a copy of a destroyed person's wrapped key in a file of a store.
type Residue struct {
	File   string
	Offset int64 // of the wrapped key's row value, in bytes
	// Epoch is that of the root over the key; zero if the bytes around it do
	// not tell.
	Epoch uint32
	// Closed: that root is destroyed, so that the copy opens nothing.
	Closed bool
	KeyID  [16]byte
	// Share: it is the copy of a share that a hold had kept, which opens
	// nothing without the DEK.
	Share bool
}

// ResidueReport is what FindResidue found.
type ResidueReport struct {
	Residue []Residue // by file and offset
	// Dead is how many key ids were looked for; Files and Bytes are what was
	// looked at.
	Dead, Files int
	Bytes       int64
	// Unread are the files whose rows cannot be told from each other because
	// they are damaged. Their bytes were looked at all the same, but a key id
	// of which a table keeps only a part would be missed, and what only they
	// say of who is dead.
	Unread []string
}

// residueSearch is one FindResidue.
type residueSearch struct {
	dead   map[id16]bool
	fenced map[id16]bool // tenants
	closed map[uint32]bool
	// copies are the wrapped keys that rows were found to hold.
	copies map[string]Residue
}

// FindResidue looks in every byte of a store's files for wrapped DEKs whose key
// ids are dead: those that any copy of a subject's row calls dead, which no
// later one ever calls alive, those of erased tenants, and those named. It sees
// the files as the file system shows them: not the blocks that files were freed
// from, nor copies of the directory, snapshots and backups.
func FindResidue(ctx context.Context, files Files, named [][16]byte) (*ResidueReport, error) {
	s := &residueSearch{dead: map[id16]bool{}, fenced: map[id16]bool{}, closed: map[uint32]bool{}, copies: map[string]Residue{}}
	for _, id := range named {
		s.dead[id] = true
	}
	unread, err := files.Rows(s.learn)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := files.Rows(s.collect); err != nil {
		return nil, err
	}
	report := &ResidueReport{Dead: len(s.dead), Unread: unread}
	for _, name := range files.Names() {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		b, err := files.Bytes(name)
		if err != nil {
			return nil, err
		}
		report.Files++
		report.Bytes += int64(len(b))
		for at := range wrappedIn(b) {
			if r, ok := s.judge(b, at); ok {
				r.File, r.Offset, r.Closed = name, int64(at), s.closed[r.Epoch]
				report.Residue = append(report.Residue, r)
			}
		}
	}
	return report, nil
}

// learn takes from a copy of a row what it says of who is dead.
func (s *residueSearch) learn(key, value []byte) {
	switch {
	case len(key) == 33 && key[0] == 'S':
		var row storev1.Subject
		if decode(value, &row) != nil {
			return
		}
		for _, c := range row.Classes {
			for _, id := range c.DeadKeyIds {
				if len(id) == len(id16{}) {
					s.dead[id16(id)] = true
				}
			}
		}
	case len(key) == 17 && key[0] == 'T':
		var row storev1.Tenant
		if decode(value, &row) == nil && row.State == storev1.TenantState_TENANT_STATE_FENCED {
			s.fenced[id16(key[1:])] = true
		}
	case len(key) == 5 && key[0] == 'E':
		var row storev1.Epoch
		if decode(value, &row) == nil && row.State == storev1.EpochState_EPOCH_STATE_CLOSED {
			s.closed[row.Number] = true
		}
	}
}

// collect keeps the wrapped keys of dead key ids.
func (s *residueSearch) collect(key, value []byte) {
	r, tenant, ok := parseWrappedKey(key)
	if !ok || !s.dead[r.KeyID] && !s.fenced[tenant] {
		return
	}
	var w storev1.Wrapped
	if decode(value, &w) == nil && len(w.Ciphertext) != 0 {
		s.copies[string(w.Ciphertext)] = r
	}
}

// parseWrappedKey parses the key of a DEK's or a share's row.
func parseWrappedKey(key []byte) (r Residue, tenant id16, ok bool) {
	switch {
	case len(key) < 6 || key[0] != 'w':
		return r, tenant, false
	case key[5] == 'D' && len(key) == dekRowKey:
	case key[5] == 'H' && len(key) == shareRowKey:
		r.Share = true
	default:
		return r, tenant, false
	}
	r.Epoch = binary.BigEndian.Uint32(key[1:])
	r.KeyID = id16(key[len(key)-16:])
	return r, id16(key[6:22]), true
}

// Of rows, in bytes.
const (
	dekRowKey   = 6 + 48
	shareRowKey = 6 + 58
	// A Wrapped as it is encoded: tag and length of the KEK's id, that id, tag
	// and length of the ciphertext.
	wrappedHead = 2 + 16 + 2
	// betweenMost is more than a store puts between a row's key and its value.
	betweenMost = 32
)

// wrappedIn yields the offsets in b at which an encoded Wrapped with a
// ciphertext may stand. A KeyOwner looks the same, but its second field is
// shorter than any ciphertext.
func wrappedIn(b []byte) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for at := 0; ; at++ {
			n := bytes.Index(b[at:], []byte{0x0a, 16})
			if n < 0 {
				return
			}
			at += n
			if at+wrappedHead >= len(b) {
				return
			}
			if b[at+18] != 0x12 || b[at+19] < wrap.Overhead || b[at+19] > 127 || at+wrappedHead+int(b[at+19]) > len(b) {
				continue
			}
			if !yield(at) {
				return
			}
		}
	}
}

// judge says of what stands at an offset in a file whether it is residue.
func (s *residueSearch) judge(b []byte, at int) (Residue, bool) {
	ciphertext := b[at+wrappedHead : at+wrappedHead+int(b[at+19])]
	if r, ok := s.copies[string(ciphertext)]; ok {
		return r, true
	}
	// No row that can be told: one in a log's free space, in a commit that was
	// never whole, or in a damaged table. Its key stands before it.
	for end := at; end >= max(16, at-betweenMost); end-- {
		for _, n := range []int{dekRowKey, shareRowKey} {
			if end < n {
				continue
			}
			if r, tenant, ok := parseWrappedKey(b[end-n : end]); ok && (s.dead[r.KeyID] || s.fenced[tenant]) {
				return r, true
			}
		}
		// A table keeps only the part of a key in which it differs.
		if id := id16(b[end-16 : end]); s.dead[id] {
			return Residue{KeyID: id}, true
		}
	}
	return Residue{}, false
}
