package envelope

import (
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"hash"
	"sync"
	"sync/atomic"
)

// Options are what sealers and openers can be given beside keys.
type Options struct {
	// Check, if not nil, is called before the key is used, by an opener again
	// before a plaintext is released, by a Writer for every 512 KiB, and by a
	// Reader for every segment. Its error is returned as it is, and nothing is
	// released. It is how the holder of a lease stops the use of the key when
	// the lease is over. It may be called concurrently.
	Check func() error
}

// keyset is what a Sealer and an Opener have in common: whose blobs they are
// for, and the secrets.
type keyset struct {
	policy Policy
	opts   Options
	m      *material
	// header has no Form and Bound yet; for Any no Commitment and Wrapped.
	header Header
	// encoded is header, for Single and All: by Form, and by flag.
	encoded [3][2]*encodedHeader
}

// newKeyset fails with ErrInvalidRecipients unless there are lo to
// MaxRecipients keys of distinct ids, one class and one bucket.
func newKeyset(policy Policy, keys []*Key, lo int, opts Options) (keyset, error) {
	keys, err := ordered(keys, lo)
	if err != nil {
		return keyset{}, err
	}
	m, err := newMaterial(policy, keys)
	if err != nil {
		return keyset{}, err
	}
	s := keyset{policy: policy, opts: opts, m: m, header: Header{
		Policy:     policy,
		Class:      keys[0].Class,
		Bucket:     keys[0].Bucket,
		Commitment: m.keys.commit,
	}}
	for _, k := range keys {
		s.header.Recipients = append(s.header.Recipients, k.ID)
	}
	if policy != Any {
		h := s.header
		for _, h.Form = range []Form{OneShot, Stream} {
			for i := range 2 {
				h.Bound = i == 1
				s.encoded[h.Form][i] = encode(&h)
			}
		}
	}
	return s, nil
}

// admit reports whether the keys may be used now.
func (s *keyset) admit() error {
	if s.opts.Check == nil && !s.m.dead.Load() {
		return nil // inlined
	}
	return s.ask()
}

func (s *keyset) ask() error {
	if s.m.dead.Load() {
		return ErrWiped
	}
	if s.opts.Check == nil {
		return nil
	}
	return s.opts.Check()
}

// boundIndex indexes keyset.encoded.
func boundIndex(bound bool) int {
	if bound {
		return 1
	}
	return 0
}

// material is the secrets of one Sealer or Opener. It outlives it, so that
// the runtime can wipe the secrets of one that was dropped.
type material struct {
	dead atomic.Bool
	// macs are the keyed HMACs of bound contexts, by Form.
	macs [3]atomic.Pointer[sync.Pool]

	mu   sync.Mutex
	keys contentKeys // Single and All
	wrap []wrapKey   // Any
	// oneShot derives from keys.payload[OneShot]; nil until it is needed.
	oneShot *xaes
}

// wrapKey wraps the content keys of ANY blobs for one recipient.
type wrapKey struct {
	id   KeyID
	key  secretKey
	gone bool // forgotten
}

func newMaterial(policy Policy, keys []*Key) (*material, error) {
	m := new(material)
	if policy == Any {
		m.wrap = make([]wrapKey, len(keys))
		for i, k := range keys {
			m.wrap[i].id = k.ID
			if err := deriveKey(&m.wrap[i].key, k.Secret[:], Info(labelWrap)); err != nil {
				return nil, err
			}
		}
		return m, nil
	}
	content := secretKey(keys[0].Secret)
	defer clear(content[:])
	if policy == All {
		if err := contentOfAll(&content, keys); err != nil {
			return nil, err
		}
	}
	if err := m.keys.derive(content[:]); err != nil {
		return nil, err
	}
	for _, f := range []Form{OneShot, Stream} {
		m.macs[f].Store(&sync.Pool{New: func() any {
			var mac *contextMAC
			if m.use(func() error { mac = newContextMAC(&m.keys.context[f]); return nil }) != nil {
				return (*contextMAC)(nil)
			}
			return mac
		}})
	}
	return m, nil
}

// use calls fn while the secrets are there, and cannot be wiped. It fails with
// ErrWiped when they are gone.
func (m *material) use(fn func() error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead.Load() {
		return ErrWiped
	}
	return fn()
}

// holds reports whether the key of an ANY blob's recipient is there. Of wiped
// material it is said to be: that it was wiped is told later.
func (m *material) holds(id KeyID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.wrap {
		if m.wrap[i].id == id && !m.wrap[i].gone {
			return true
		}
	}
	return m.dead.Load()
}

// forget zeroes the key of one recipient of ANY blobs.
func (m *material) forget(id KeyID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.wrap {
		if m.wrap[i].id == id {
			clear(m.wrap[i].key[:])
			m.wrap[i].gone = true
		}
	}
}

// oneShotAEAD returns the AEAD of a prefix of one-shot blobs. It fails with
// ErrWiped when the secrets are gone.
func (m *material) oneShotAEAD(prefix *[xaesPrefixSize]byte) (cipher.AEAD, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead.Load() {
		return nil, ErrWiped
	}
	return m.deriveOneShot(prefix)
}

// deriveOneShot is oneShotAEAD for one who is within use.
func (m *material) deriveOneShot(prefix *[xaesPrefixSize]byte) (_ cipher.AEAD, err error) {
	if m.oneShot == nil {
		if m.oneShot, err = newXAES(&m.keys.payload[OneShot]); err != nil {
			return nil, err
		}
	}
	return m.oneShot.aead(prefix)
}

// wipe zeroes the secrets. The key schedules inside the standard library's
// ciphers and MACs cannot be zeroed; the references to them are dropped.
func (m *material) wipe() {
	m.dead.Store(true)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keys.wipe()
	clear(m.wrap)
	if m.oneShot != nil {
		m.oneShot.wipe()
		m.oneShot = nil
	}
	for i := range m.macs {
		m.macs[i].Store(nil)
	}
}

// tag sets sum to the context tag for a nonce.
func (m *material) tag(sum *[contextTagSize]byte, f Form, nonce []byte, c Context) error {
	pool := m.macs[f].Load()
	if pool == nil {
		return ErrWiped
	}
	mac := pool.Get().(*contextMAC)
	if mac == nil {
		return ErrWiped
	}
	mac.tag(sum, nonce, c)
	pool.Put(mac)
	return nil
}

const (
	contextTagSize  = sha256.Size
	streamNonceSize = 39 // salt and nonce prefix
)

// contextMAC computes context tags: HMAC-SHA-256(key, nonce ‖ context).
type contextMAC struct {
	mac   hash.Hash
	nonce [streamNonceSize]byte
	sum   [contextTagSize]byte
}

func newContextMAC(key *secretKey) *contextMAC {
	return &contextMAC{mac: hmac.New(sha256.New, key[:])}
}

func (c *contextMAC) tag(sum *[contextTagSize]byte, nonce []byte, bound Context) {
	c.mac.Reset()
	// Copied so that nothing of the caller's escapes to the heap.
	c.mac.Write(c.nonce[:copy(c.nonce[:], nonce)])
	c.mac.Write(bound.encoded)
	c.mac.Sum(c.sum[:0])
	*sum = c.sum
}
