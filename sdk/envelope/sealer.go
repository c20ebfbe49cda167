package envelope

import (
	"crypto/cipher"
	"crypto/rand"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// MaxPlaintext is the most bytes that can be sealed in one piece: 1 GiB.
// Larger data is sealed as a stream.
const MaxPlaintext = 1 << 30

// A prefix serves at most 2^20 blobs and 64 GiB, so that random GCM nonces
// under one derived key collide with a probability below 2^-56. Both limits
// are kept by one count: a blob costs one, and one more for every 64 KiB.
const (
	prefixBudget = 1 << 20
	costShift    = 16
)

// Sealer seals blobs. It is safe for concurrent use.
//
// A Sealer that is dropped without Wipe finishes what it is doing, and its
// secrets are zeroed by the runtime some time afterwards.
type Sealer struct {
	keyset
	current atomic.Pointer[prefix] // Single and All
	renew   sync.Mutex
}

// prefix is a derived key in use for sealing.
type prefix struct {
	bytes [xaesPrefixSize]byte
	aead  cipher.AEAD
	used  atomic.Int64
}

// NewSealer makes a sealer under one key. The key is not used after the call
// returns, and can be wiped.
func NewSealer(key *Key, opts Options) (*Sealer, error) {
	return newSealer(Single, []*Key{key}, 1, opts)
}

// NewMultiSealer makes a sealer under 2 to MaxRecipients keys of one class and
// bucket, for the policy All or Any. The order of the keys is of no matter.
// They are not used after the call returns, and can be wiped. It fails with
// ErrInvalidRecipients.
func NewMultiSealer(policy Policy, keys []*Key, opts Options) (*Sealer, error) {
	if policy != All && policy != Any {
		return nil, ErrInvalidRecipients
	}
	return newSealer(policy, keys, 2, opts)
}

func newSealer(policy Policy, keys []*Key, lo int, opts Options) (*Sealer, error) {
	ks, err := newKeyset(policy, keys, lo, opts)
	if err != nil {
		return nil, err
	}
	s := &Sealer{keyset: ks}
	runtime.AddCleanup(s, (*material).wipe, s.m)
	return s, nil
}

// Wipe zeroes the sealer's secrets. What is sealed afterwards fails with
// ErrWiped, and so do streams at their next turn; a Seal under way either
// fails with ErrWiped or returns a good blob. Go's own AES and HMAC states
// cannot be zeroed: they are left to the garbage collector.
func (s *Sealer) Wipe() {
	s.m.wipe()
	s.current.Store(nil)
}

// Overhead returns how many bytes longer than its plaintext a one-shot blob
// of this sealer is.
func (s *Sealer) Overhead(bound Context) int {
	n := sizeOf(s.policy, len(s.header.Recipients)) + xaesNonceSize + tagSize
	if !bound.IsZero() {
		n += contextTagSize
	}
	return n
}

// Append seals plaintext in one piece and appends the blob to dst. It does
// not allocate when dst has room for Overhead more bytes than plaintext,
// except under the policy Any, where every blob has a content key of its own.
// plaintext must not overlap dst's unused capacity. It fails with ErrTooLarge,
// ErrWiped or the error of Options.Check; dst is then returned as it was.
func (s *Sealer) Append(dst, plaintext []byte, bound Context) ([]byte, error) {
	defer runtime.KeepAlive(s)
	if len(plaintext) > MaxPlaintext {
		return dst, ErrTooLarge
	}
	if err := s.admit(); err != nil {
		return dst, err
	}
	if s.policy == Any {
		return s.appendAny(dst, plaintext, bound)
	}
	p, err := s.take(len(plaintext))
	if err != nil {
		return dst, err
	}
	h := s.encoded[OneShot][flag(!bound.IsZero())]
	blob, l := sealOneShot(dst, plaintext, bound, h, &p.bytes, p.aead)
	if l.tag != nil {
		if err := s.m.tag((*[contextTagSize]byte)(l.tag), OneShot, l.nonce, bound); err != nil {
			return dst, err
		}
	}
	return blob, nil
}

// layout is where a one-shot blob's parts lie that are not yet filled in.
type layout struct {
	tag   []byte // nil without context
	nonce []byte
}

// sealOneShot appends a blob to dst, all but its context tag.
func sealOneShot(dst, plaintext []byte, bound Context, h *encodedHeader, pre *[xaesPrefixSize]byte, aead cipher.AEAD) ([]byte, layout) {
	start := len(dst)
	body := start + len(h.raw)
	if !bound.IsZero() {
		body += contextTagSize
	}
	dst = slices.Grow(dst, body-start+xaesNonceSize+len(plaintext)+tagSize)
	// The AEAD comes first: it alone minds where plaintext lies.
	blob := aead.Seal(dst[:body+xaesPrefixSize], nil, plaintext, h.hash[:])
	copy(blob[start:], h.raw)
	copy(blob[body:], pre[:])
	l := layout{nonce: blob[body : body+xaesNonceSize]}
	if !bound.IsZero() {
		l.tag = blob[body-contextTagSize : body]
	}
	return blob, l
}

// take returns the prefix to seal n bytes under, and counts them.
func (s *Sealer) take(n int) (*prefix, error) {
	cost := 1 + int64(n>>costShift)
	for {
		p := s.current.Load()
		if p != nil && p.used.Add(cost) <= prefixBudget {
			return p, nil
		}
		if err := s.replace(p); err != nil {
			return nil, err
		}
	}
}

// replace draws a new prefix, unless another goroutine did so since old was
// loaded.
func (s *Sealer) replace(old *prefix) error {
	s.renew.Lock()
	defer s.renew.Unlock()
	if s.current.Load() != old {
		return nil
	}
	p := new(prefix)
	rand.Read(p.bytes[:]) // never fails
	return s.m.use(func() (err error) {
		p.aead, err = newXAES(&s.m.keys.payload[OneShot], &p.bytes)
		if err == nil {
			s.current.Store(p)
		}
		return err
	})
}
