package ledger

import (
	"crypto/ed25519"
	"encoding/hex"
	"fmt"
	"slices"
	"sync/atomic"

	"golang.org/x/mod/sumdb/note"

	"lethe/sdk/receipt"
)

// Origin returns the origin line of the ledger of a store: the name of its
// checkpoints and of its keys.
func Origin(incarnation [16]byte) string {
	return "lethe/" + hex.EncodeToString(incarnation[:])
}

// Signer signs checkpoints with Ed25519, which makes the same signature of the
// same text each time. It is safe for concurrent use.
type Signer struct {
	origin string
	vkey   string
	note   noteSigner
	last   atomic.Pointer[signed]
}

// signed is a checkpoint that was signed. It is immutable.
type signed struct {
	size       uint64
	root       [32]byte
	checkpoint []byte
}

// NewSigner makes the signer of a 32-byte Ed25519 seed (RFC 8032). The seed is
// copied.
func NewSigner(seed []byte, origin string) (*Signer, error) {
	if len(seed) != ed25519.SeedSize {
		return nil, fmt.Errorf("ledger key: seed is not %d bytes", ed25519.SeedSize)
	}
	key := ed25519.NewKeyFromSeed(seed)
	vkey, err := note.NewEd25519VerifierKey(origin, key.Public().(ed25519.PublicKey))
	if err != nil {
		return nil, err
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		return nil, fmt.Errorf("ledger key: origin cannot be the name of a key: %w", err)
	}
	return &Signer{origin: origin, vkey: vkey, note: noteSigner{name: origin, hash: v.KeyHash(), key: key}}, nil
}

// Origin returns the ledger's origin line.
func (s *Signer) Origin() string { return s.origin }

// VerifierKey returns the public key in the form of C2SP signed-note.
func (s *Signer) VerifierKey() string { return s.vkey }

// Checkpoint returns the signed checkpoint of a tree, in the form of C2SP
// tlog-checkpoint. Signing a tree that is no prefix of every other tree ever
// signed destroys the ledger's worth; the caller passes only roots of its store.
//
// The newest one is kept: all receipts of one group are of one tree.
func (s *Signer) Checkpoint(size uint64, root [32]byte) ([]byte, error) {
	if last := s.last.Load(); last != nil && last.size == size && last.root == root {
		return slices.Clone(last.checkpoint), nil
	}
	c := receipt.Checkpoint{Origin: s.origin, Size: size, Root: root}
	b, err := note.Sign(&note.Note{Text: c.Text()}, s.note)
	if err != nil {
		return nil, err
	}
	s.last.Store(&signed{size, root, slices.Clone(b)})
	return b, nil
}

// noteSigner is a note.Signer that never spells out the private key.
type noteSigner struct {
	name string
	hash uint32
	key  ed25519.PrivateKey
}

func (s noteSigner) Name() string                    { return s.name }
func (s noteSigner) KeyHash() uint32                 { return s.hash }
func (s noteSigner) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(s.key, msg), nil }
