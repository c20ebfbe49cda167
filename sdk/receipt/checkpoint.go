package receipt

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// maxSize bounds the size of a tree; the arithmetic of package tlog holds below it.
const maxSize = 1 << 60

// maxCheckpoint bounds a checkpoint in bytes.
const maxCheckpoint = 8 << 10

// ErrSignature: a checkpoint bears no signature of a pinned key, or a signature
// that no pinned key made.
var ErrSignature = errors.New("not signed by a pinned key")

// Checkpoint is the head of a ledger's tree: C2SP tlog-checkpoint without
// extension lines.
type Checkpoint struct {
	// Origin names the ledger.
	Origin string
	// Size is the number of entries, below 2^60.
	Size uint64
	// Root is the RFC 6962 tree hash.
	Root [32]byte
}

// Text returns the text that is signed: three lines.
func (c Checkpoint) Text() string {
	return c.Origin + "\n" + strconv.FormatUint(c.Size, 10) + "\n" + base64.StdEncoding.EncodeToString(c.Root[:]) + "\n"
}

// ParseCheckpoint reads the text of a signed checkpoint WITHOUT verifying its
// signatures; see Keys.Open. Its errors wrap ErrMalformed.
func ParseCheckpoint(signed []byte) (Checkpoint, error) {
	bad := func(what string) (Checkpoint, error) {
		return Checkpoint{}, fmt.Errorf("%w checkpoint: %s", ErrMalformed, what)
	}
	if len(signed) > maxCheckpoint {
		return bad("too large")
	}
	text, _, ok := bytes.Cut(signed, []byte("\n\n"))
	if !ok {
		return bad("no signatures")
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) != 3 {
		return bad("not three lines")
	}
	origin := lines[0]
	// A key's name is its log's origin, so the rules for names hold for both.
	if origin == "" || len(origin) > 256 || !isPrintable(origin) || strings.ContainsAny(origin, " +") {
		return bad("origin")
	}
	size, err := strconv.ParseUint(lines[1], 10, 64)
	if err != nil || size >= maxSize || strconv.FormatUint(size, 10) != lines[1] {
		return bad("size")
	}
	root, err := parseHash(lines[2])
	if err != nil {
		return bad("root hash")
	}
	return Checkpoint{Origin: origin, Size: size, Root: root}, nil
}

// Keys is a set of pinned verifier keys: all that a verifier trusts. It is
// safe for concurrent use.
type Keys struct{ list note.Verifiers }

// PinKeys parses verifier keys in the form of C2SP signed-note (Ed25519), as
// they came through a channel that the verifier trusts. A ledger whose key was
// rotated has several, all under its origin as name. Its errors wrap
// ErrMalformed.
func PinKeys(verifierKeys ...string) (*Keys, error) {
	if len(verifierKeys) == 0 {
		return nil, fmt.Errorf("%w: no verifier key", ErrMalformed)
	}
	list := make([]note.Verifier, 0, len(verifierKeys))
	seen := make(map[string]bool)
	for _, v := range verifierKeys {
		k, err := parseVerifierKey(v)
		if err != nil {
			return nil, err
		}
		if !seen[v] {
			seen[v] = true
			list = append(list, k)
		}
	}
	return &Keys{list: note.VerifierList(list...)}, nil
}

// Open verifies a signed checkpoint. Every signature on it must be that of a
// pinned key whose name is the checkpoint's origin: stricter than C2SP
// signed-note, which ignores the unknown, because what is not verified here
// could be changed unnoticed. Its errors wrap ErrMalformed or ErrSignature.
func (k *Keys) Open(signed []byte) (Checkpoint, error) {
	c, _, err := k.open(signed)
	return c, err
}

func (k *Keys) open(signed []byte) (Checkpoint, []string, error) {
	c, err := ParseCheckpoint(signed)
	if err != nil {
		return Checkpoint{}, nil, err
	}
	if k == nil {
		return Checkpoint{}, nil, fmt.Errorf("checkpoint %w: none is pinned", ErrSignature)
	}
	n, err := note.Open(signed, k.list)
	var unverified *note.UnverifiedNoteError
	var invalid *note.InvalidSignatureError
	switch {
	case errors.As(err, &unverified):
		return Checkpoint{}, nil, fmt.Errorf("checkpoint %w: its key is unknown", ErrSignature)
	case errors.As(err, &invalid):
		return Checkpoint{}, nil, fmt.Errorf("checkpoint %w: the signature is not of this text", ErrSignature)
	case err != nil:
		return Checkpoint{}, nil, fmt.Errorf("%w checkpoint: %w", ErrMalformed, err)
	}
	if len(n.UnverifiedSigs) > 0 {
		return Checkpoint{}, nil, fmt.Errorf("checkpoint %w: one more signature, of an unknown key", ErrSignature)
	}
	// note.Open decodes base64 leniently and skips repeated signatures.
	again := c.Text() + "\n"
	signers := make([]string, 0, len(n.Sigs))
	for _, s := range n.Sigs {
		if s.Name != c.Origin {
			return Checkpoint{}, nil, fmt.Errorf("checkpoint %w: the key is of another ledger", ErrSignature)
		}
		raw, err := base64.StdEncoding.Strict().DecodeString(s.Base64)
		if err != nil || len(raw) != 4+ed25519.SignatureSize {
			return Checkpoint{}, nil, fmt.Errorf("%w checkpoint: signature", ErrMalformed)
		}
		again += "— " + s.Name + " " + base64.StdEncoding.EncodeToString(raw) + "\n"
		signers = append(signers, fmt.Sprintf("%s+%08x", s.Name, s.Hash))
	}
	if again != string(signed) {
		return Checkpoint{}, nil, fmt.Errorf("%w checkpoint: not in canonical form", ErrMalformed)
	}
	return c, signers, nil
}

// VerifyConsistency verifies that the older checkpoint's tree is a prefix of
// the newer one's: that nothing was taken out or changed in between. proof is
// in the order of RFC 6962 section 2.1.2. Its errors wrap ErrMalformed,
// ErrSignature, ErrMismatch (two ledgers, or two roots of one size) or ErrProof.
func VerifyConsistency(pinned *Keys, older, newer []byte, proof [][]byte) error {
	a, err := pinned.Open(older)
	if err != nil {
		return err
	}
	b, err := pinned.Open(newer)
	if err != nil {
		return err
	}
	if a.Origin != b.Origin {
		return fmt.Errorf("%w: checkpoints of two ledgers", ErrMismatch)
	}
	if a.Size > b.Size {
		return fmt.Errorf("%w: the older checkpoint is the larger", ErrMismatch)
	}
	if a.Size == b.Size && a.Root != b.Root {
		return fmt.Errorf("%w: two roots of one size", ErrMismatch)
	}
	hashes := make(tlog.TreeProof, len(proof))
	for i, h := range proof {
		if len(h) != tlog.HashSize {
			return fmt.Errorf("%w consistency proof: a hash is not 32 bytes", ErrMalformed)
		}
		copy(hashes[i][:], h)
	}
	if a.Size == 0 {
		// Of the empty tree, which RFC 6962 gives no proof for.
		empty, _ := tlog.TreeHash(0, nil)
		if a.Root != empty || b.Size == 0 && b.Root != empty || len(proof) != 0 {
			return fmt.Errorf("consistency %w", ErrProof)
		}
		return nil
	}
	if err := tlog.CheckTree(hashes, int64(b.Size), b.Root, int64(a.Size), a.Root); err != nil {
		return fmt.Errorf("consistency %w", ErrProof)
	}
	return nil
}

// respellVerifierKey decodes and encodes a key that note.NewVerifier accepted.
func respellVerifierKey(v string) (string, error) {
	name, rest, _ := strings.Cut(v, "+")
	_, key64, _ := strings.Cut(rest, "+")
	key, err := base64.StdEncoding.DecodeString(key64)
	if err != nil || len(key) != 1+ed25519.PublicKeySize {
		return "", fmt.Errorf("%w verifier key", ErrMalformed)
	}
	return note.NewEd25519VerifierKey(name, key[1:])
}

func parseHash(s string) (h [32]byte, err error) {
	b, err := base64.StdEncoding.Strict().DecodeString(s)
	if err != nil || len(b) != len(h) || base64.StdEncoding.EncodeToString(b) != s {
		return h, fmt.Errorf("%w hash", ErrMalformed)
	}
	copy(h[:], b)
	return h, nil
}
