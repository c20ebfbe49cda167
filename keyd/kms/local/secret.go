package local

import (
	"bytes"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tink-crypto/tink-go/v2/tink"
	"golang.org/x/crypto/argon2"
)

// argon2Cost is the cost of Argon2id (RFC 9106).
type argon2Cost struct {
	passes uint32
	memory uint32 // KiB
	lanes  uint8
}

// defaultArgon2 is the second recommendation of RFC 9106, section 4.
var defaultArgon2 = argon2Cost{passes: 3, memory: 64 << 10, lanes: 4}

// sane bounds what a file can make Open spend, and refuses a file that was
// made cheap to guess. The floor is a memory of 19 MiB with one pass more than
// one, OWASP's least; the cap is 512 MiB, and sixteen passes over 64 MiB.
func (c argon2Cost) sane() bool {
	return c.memory >= 19<<10 && c.memory <= 512<<10 &&
		c.passes >= 2 && uint64(c.passes)*uint64(c.memory) <= 1<<20 &&
		c.lanes >= 1 && c.lanes <= 16
}

// rawSecret is what the operator gave: one of the two.
type rawSecret struct {
	key        []byte
	passphrase []byte
}

// newHeader makes the header of a new file; its check value is still missing.
func (raw rawSecret) newHeader(cost argon2Cost) header {
	h := header{kind: secretKeyfile}
	if raw.key == nil {
		h.kind, h.cost = secretPassphrase, cost
	}
	rand.Read(h.salt[:])
	return h
}

// secret is what is derived from the operator's secret for one file.
type secret struct {
	body  tink.AEAD
	check [checkSize]byte
}

// derive derives the keys of a file with header h. They are the right ones if
// their check value is the header's.
func (raw rawSecret) derive(h header) (s secret, err error) {
	var ikm []byte
	switch {
	case h.kind == secretKeyfile && raw.key != nil:
		ikm = raw.key
	case h.kind == secretPassphrase && raw.key == nil:
		ikm = argon2.IDKey(raw.passphrase, h.salt[:], h.cost.passes, h.cost.memory, h.cost.lanes, 32)
		defer clear(ikm)
	case h.kind == secretKeyfile:
		return secret{}, fmt.Errorf("%w: the root file is protected by a keyfile", ErrWrongSecret)
	default:
		return secret{}, fmt.Errorf("%w: the root file is protected by a passphrase", ErrWrongSecret)
	}
	check, err := hkdf.Key(sha256.New, ikm, h.salt[:], "lethe/v1/local-kms/check", checkSize)
	if err != nil {
		return secret{}, err
	}
	copy(s.check[:], check)
	key, err := hkdf.Key(sha256.New, ikm, h.salt[:], "lethe/v1/local-kms/body", keySize)
	if err != nil {
		return secret{}, err
	}
	defer clear(key)
	s.body, err = newAEAD(key)
	return s, err
}

// seal encodes a whole file.
func (s secret) seal(h header, st *state) ([]byte, error) {
	plain := st.encode()
	defer clear(plain)
	head := h.encode(len(plain) + aeadOverhead)
	body, err := s.body.Encrypt(plain, head)
	if err != nil {
		return nil, err
	}
	data := append(head, body...)
	sum := sha256.Sum256(data)
	data = append(data, sum[:]...)
	if len(data) > maxFile {
		return nil, errors.New("the root file is full")
	}
	return data, nil
}

// open decrypts and decodes the body of a file.
func (s secret) open(h header, body []byte) (*state, error) {
	plain, err := s.body.Decrypt(body, h.encode(len(body)))
	if err != nil {
		return nil, fmt.Errorf("%w: it was edited", ErrDamaged)
	}
	defer clear(plain)
	return decodeState(plain)
}

// A keyfile is one line: the prefix and 32 bytes in lower-case hexadecimal.
const (
	keyfilePrefix = "lethe-keyfile-v1:"
	keyfileSize   = len(keyfilePrefix) + 2*keySize + 1
)

// GenerateKeyfile writes a new keyfile, readable by this user alone, and syncs
// it. It fails with fs.ErrExist when path exists, and with ErrUnsafe when
// others could replace it there. Whoever finds the file finds it whole: others
// may look for it at the same time, and a crash leaves no half of one.
func GenerateKeyfile(path string) (err error) {
	dir, err := safeDir(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("keyfile: %w", err)
	}
	path = filepath.Join(dir, filepath.Base(path))
	key := make([]byte, keySize)
	rand.Read(key)
	line := make([]byte, 0, keyfileSize)
	line = append(line, keyfilePrefix...)
	line = hex.AppendEncode(line, key)
	line = append(line, '\n')
	defer clear(key)
	defer clear(line)
	f, err := os.CreateTemp(dir, filepath.Base(path)+".new-*")
	if err != nil {
		return fmt.Errorf("keyfile: %w", err)
	}
	_, err = f.Write(line)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Link(f.Name(), path)
	}
	made := err == nil
	err = errors.Join(err, os.Remove(f.Name()))
	if made {
		err = errors.Join(err, syncDir(path))
	}
	if err != nil {
		return fmt.Errorf("keyfile: %w", err)
	}
	return nil
}

func readKeyfile(path string) ([]byte, error) {
	dir, err := safeDir(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("keyfile: %w", err)
	}
	f, err := openPrivate(filepath.Join(dir, filepath.Base(path)), os.O_RDONLY)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("keyfile: %w", err)
		}
		return nil, err
	}
	defer f.Close()
	line, err := readAll(f, int64(keyfileSize))
	defer clear(line)
	if err != nil {
		return nil, fmt.Errorf("keyfile %s: %w", path, err)
	}
	text, ok := bytes.CutPrefix(line, []byte(keyfilePrefix))
	digits, end := bytes.CutSuffix(text, []byte("\n"))
	key := make([]byte, keySize)
	if !ok || !end || len(digits) != 2*keySize || bytes.ContainsAny(digits, "ABCDEF") {
		return nil, fmt.Errorf("%w: %s", ErrBadKeyfile, path)
	}
	if _, err := hex.Decode(key, digits); err != nil {
		return nil, fmt.Errorf("%w: %s", ErrBadKeyfile, path)
	}
	return key, nil
}
