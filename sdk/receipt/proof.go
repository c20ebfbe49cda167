package receipt

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/tlog"
)

// SaltSize is the size in bytes of the salt that hides a statement in its leaf.
const SaltSize = 32

// ErrProof: the proof does not lead from the statement to the signed root.
var ErrProof = errors.New("proof does not hold")

// proofHeader is the first line of a C2SP tlog-proof.
const proofHeader = "c2sp.org/tlog-proof@v1\n"

// maxProofHashes is the length of the longest path in a tree below maxSize.
const maxProofHashes = 60

// LeafHash returns the RFC 6962 leaf hash of an entry, whose record is the 32
// bytes SHA-256(salt ‖ statement). salt must have SaltSize bytes: its fixed
// size is what keeps the two apart.
func LeafHash(salt, statement []byte) [32]byte {
	h := sha256.New()
	h.Write(salt)
	h.Write(statement)
	return tlog.RecordHash(h.Sum(nil))
}

// Proof is an inclusion proof in the form of C2SP tlog-proof, without extra data.
type Proof struct {
	// Index of the entry, from zero.
	Index uint64
	// Hashes of RFC 6962 section 2.1.1, from the leaf's sibling upwards.
	Hashes [][32]byte
	// Checkpoint is the signed checkpoint of the tree that it leads to.
	Checkpoint []byte
}

// Encode returns the proof's text.
func (p *Proof) Encode() []byte {
	const hashLine = 45 // in base64, and a newline
	b := make([]byte, 0, len(proofHeader)+len("index ")+22+len(p.Hashes)*hashLine+len(p.Checkpoint))
	b = append(b, proofHeader+"index "...)
	b = append(strconv.AppendUint(b, p.Index, 10), '\n')
	for _, h := range p.Hashes {
		b = base64.StdEncoding.AppendEncode(b, h[:])
		b = append(b, '\n')
	}
	b = append(b, '\n')
	return append(b, p.Checkpoint...)
}

// check refuses a proof that ParseProof would not parse, but for its checkpoint.
func (p *Proof) check() error {
	if p.Index >= maxSize || len(p.Hashes) > maxProofHashes {
		return fmt.Errorf("%w proof: its bounds", ErrMalformed)
	}
	return nil
}

// ParseProof parses what Encode returned and nothing else; extra data, which
// nothing authenticates, is refused. It verifies nothing. Its errors wrap
// ErrMalformed.
func ParseProof(text []byte) (*Proof, error) {
	bad := func(what string) (*Proof, error) {
		return nil, fmt.Errorf("%w proof: %s", ErrMalformed, what)
	}
	rest, ok := strings.CutPrefix(string(text), proofHeader+"index ")
	if !ok {
		return bad("header")
	}
	head, checkpoint, ok := strings.Cut(rest, "\n\n")
	if !ok {
		return bad("no checkpoint")
	}
	lines := strings.Split(head, "\n")
	if len(lines)-1 > maxProofHashes {
		return bad("too many hashes")
	}
	p := &Proof{Checkpoint: []byte(checkpoint)}
	var err error
	if p.Index, err = strconv.ParseUint(lines[0], 10, 64); err != nil || p.Index >= maxSize {
		return bad("index")
	}
	for _, l := range lines[1:] {
		h, err := parseHash(l)
		if err != nil {
			return bad("hash")
		}
		p.Hashes = append(p.Hashes, h)
	}
	if !bytes.Equal(p.Encode(), text) {
		return bad("not in canonical form")
	}
	return p, nil
}

// verify checks that the leaf is in the tree of c.
func (p *Proof) verify(leaf [32]byte, c Checkpoint) error {
	hashes := make(tlog.RecordProof, len(p.Hashes))
	for i, h := range p.Hashes {
		hashes[i] = h
	}
	if tlog.CheckRecord(hashes, int64(c.Size), c.Root, int64(p.Index), leaf) != nil {
		return fmt.Errorf("inclusion %w", ErrProof)
	}
	return nil
}
