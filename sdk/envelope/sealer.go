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
	// front is what a blob without context begins with: header and prefix.
	front []byte
	// used lies in a cache line of its own: each blob writes it, and those who
	// seal beside it on other processors read the rest.
	_    [cacheLine]byte
	used atomic.Int64
	_    [cacheLine]byte
}

const cacheLine = 64

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
	if err := s.admit(); err != nil {
		return dst, err
	}
	return s.AppendChecked(dst, plaintext, bound)
}

// AppendChecked is Append for a caller who knows, since a moment ago, what
// Options.Check would say, and spares asking twice.
func (s *Sealer) AppendChecked(dst, plaintext []byte, bound Context) ([]byte, error) {
	defer runtime.KeepAlive(s)
	if len(plaintext) > MaxPlaintext {
		return dst, ErrTooLarge
	}
	if s.m.dead.Load() {
		return dst, ErrWiped
	}
	if s.policy == Any {
		return s.appendAny(dst, plaintext, bound)
	}
	p := s.current.Load()
	if cost := prefixCost(len(plaintext)); p == nil || p.used.Add(cost) > prefixBudget {
		var err error
		if p, err = s.replace(p, cost); err != nil {
			return dst, err
		}
	}
	if !bound.IsZero() {
		return s.appendBound(dst, plaintext, bound, p)
	}
	dst = slices.Grow(dst, len(p.front)+gcmNonceSize+len(plaintext)+tagSize)
	// The AEAD comes first: it alone minds where plaintext lies.
	blob := p.aead.Seal(dst[:len(dst)+len(p.front)], nil, plaintext, s.encoded[OneShot][0].hash[:])
	copy(blob[len(dst):], p.front)
	return blob, nil
}

// appendBound is AppendChecked with a bound context, for Single and All.
func (s *Sealer) appendBound(dst, plaintext []byte, bound Context, p *prefix) ([]byte, error) {
	h := s.encoded[OneShot][1]
	blob := sealOneShot(dst, plaintext, h, contextTagSize, &p.bytes, p.aead)
	tag, nonce := tagAndNonce(blob[len(dst)+len(h.raw):])
	if err := s.m.tag(tag, OneShot, nonce, bound); err != nil {
		return dst, err
	}
	return blob, nil
}

// sealOneShot appends a blob to dst, in which it leaves a gap for a context tag.
func sealOneShot(dst, plaintext []byte, h *encodedHeader, gap int, pre *[xaesPrefixSize]byte, aead cipher.AEAD) []byte {
	start := len(dst)
	body := start + len(h.raw) + gap
	dst = slices.Grow(dst, len(h.raw)+gap+xaesNonceSize+len(plaintext)+tagSize)
	blob := aead.Seal(dst[:body+xaesPrefixSize], nil, plaintext, h.hash[:])
	copy(blob[start:], h.raw)
	copy(blob[body:], pre[:])
	return blob
}

// tagAndNonce returns where the context tag and the nonce lie in a one-shot
// blob behind its header.
func tagAndNonce(b []byte) (tag *[contextTagSize]byte, nonce []byte) {
	return (*[contextTagSize]byte)(b), b[contextTagSize:][:xaesNonceSize]
}

func prefixCost(n int) int64 { return 1 + int64(n>>costShift) }

// replace draws a new prefix for what costs cost, unless another goroutine did
// so since old was loaded.
func (s *Sealer) replace(old *prefix, cost int64) (*prefix, error) {
	s.renew.Lock()
	defer s.renew.Unlock()
	if p := s.current.Load(); p != nil && p != old && p.used.Add(cost) <= prefixBudget {
		return p, nil
	}
	p := new(prefix)
	rand.Read(p.bytes[:]) // never fails
	p.front = append(slices.Clip(s.encoded[OneShot][0].raw), p.bytes[:]...)
	p.used.Store(cost)
	err := s.m.use(func() (err error) {
		p.aead, err = s.m.deriveOneShot(&p.bytes)
		if err == nil {
			s.current.Store(p)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}
