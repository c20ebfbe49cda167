package envelope

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"io"
)

// Form is how a blob's payload is sealed.
type Form uint8

// Forms.
const (
	OneShot Form = 1 // in one piece
	Stream  Form = 2 // in segments
)

// String returns "one-shot" or "stream".
func (f Form) String() string {
	switch f {
	case OneShot:
		return "one-shot"
	case Stream:
		return "stream"
	}
	return "invalid"
}

// Policy is how many of a blob's recipients must live for it to open.
type Policy uint8

// Policies.
const (
	Single Policy = 1 // there is one recipient
	All    Policy = 2 // every recipient's key is needed
	Any    Policy = 3 // one recipient's key is enough
)

// String returns "single", "all" or "any".
func (p Policy) String() string {
	switch p {
	case Single:
		return "single"
	case All:
		return "all"
	case Any:
		return "any"
	}
	return "invalid"
}

// Sizes of headers in bytes.
const (
	// CommitmentSize is the size of the commitment to the content key.
	CommitmentSize = 32
	// WrappedKeySize is the size of one wrapped content key.
	WrappedKeySize = xaesNonceSize + KeySize + tagSize
	// MaxHeaderSize is the size of the largest header: ANY of 64 recipients.
	MaxHeaderSize = fixedSize + MaxRecipients*(KeyIDSize+WrappedKeySize) + CommitmentSize

	fixedSize = 17 // magic to recipient count
	boundBit  = 0x80
	version1  = 1
)

// magic begins every blob. 0xC1 is in no UTF-8 text and begins no
// MessagePack; what follows makes no CBOR that is valid.
const magic = "\xC1Lth"

// Header is the part of a blob that tells, to anybody, what it is sealed
// under. ReadHeader and ParseHeader make well-formed ones.
type Header struct {
	Form   Form
	Policy Policy
	Bound  bool // sealed with a bound context
	Class  uint16
	Bucket uint64 // start of the bucket, Unix seconds
	// Recipients are the key ids, strictly ascending; one for Single, 2 to
	// MaxRecipients otherwise.
	Recipients []KeyID
	Commitment [CommitmentSize]byte
	// Wrapped holds, for Any, the content key wrapped for each recipient.
	Wrapped [][WrappedKeySize]byte
}

// IsSealed reports whether b begins as a blob of any version does.
func IsSealed(b []byte) bool { return len(b) >= len(magic) && string(b[:len(magic)]) == magic }

// ParseHeader reads the header at the start of b and returns it with its
// size; the rest of b is not looked at. It needs no key, and verifies nothing
// but the form. It fails with ErrNotSealed, ErrUnsupportedVersion,
// ErrTruncated or ErrCorrupt.
func ParseHeader(b []byte) (*Header, int, error) {
	n, err := headerSize(b)
	if err != nil {
		return nil, 0, err
	}
	if len(b) < n {
		return nil, 0, ErrTruncated
	}
	h := &Header{
		Form:       Form(b[5] &^ boundBit >> 4),
		Policy:     Policy(b[5] & 0x0f),
		Bound:      b[5]&boundBit != 0,
		Class:      binary.BigEndian.Uint16(b[6:]),
		Bucket:     binary.BigEndian.Uint64(b[8:]),
		Recipients: make([]KeyID, b[16]),
	}
	rest := b[fixedSize:n]
	for i := range h.Recipients {
		rest = rest[copy(h.Recipients[i][:], rest):]
		if i > 0 && bytes.Compare(h.Recipients[i-1][:], h.Recipients[i][:]) >= 0 {
			return nil, 0, ErrCorrupt
		}
	}
	rest = rest[copy(h.Commitment[:], rest):]
	if h.Policy == Any {
		h.Wrapped = make([][WrappedKeySize]byte, len(h.Recipients))
		for i := range h.Wrapped {
			rest = rest[copy(h.Wrapped[i][:], rest):]
		}
	}
	return h, n, nil
}

// headerSize returns the size that b's first fixedSize bytes state, or what is
// wrong with them.
func headerSize(b []byte) (int, error) {
	if n := min(len(b), len(magic)); n == 0 || string(b[:n]) != magic[:n] {
		return 0, ErrNotSealed
	}
	if len(b) <= 4 {
		return 0, ErrTruncated
	}
	if b[4] != version1 {
		return 0, ErrUnsupportedVersion
	}
	if len(b) <= 5 {
		return 0, ErrTruncated
	}
	form, policy := Form(b[5]&^boundBit>>4), Policy(b[5]&0x0f)
	if !validForm(form) || !validPolicy(policy) {
		return 0, ErrCorrupt
	}
	if len(b) < fixedSize {
		return 0, ErrTruncated
	}
	count := int(b[16])
	if !validCount(policy, count) {
		return 0, ErrCorrupt
	}
	return sizeOf(policy, count), nil
}

func validForm(f Form) bool     { return f == OneShot || f == Stream }
func validPolicy(p Policy) bool { return p >= Single && p <= Any }

func validCount(p Policy, n int) bool {
	if p == Single {
		return n == 1
	}
	return n >= 2 && n <= MaxRecipients
}

func sizeOf(p Policy, recipients int) int {
	n := fixedSize + recipients*KeyIDSize + CommitmentSize
	if p == Any {
		n += recipients * WrappedKeySize
	}
	return n
}

// ReadHeader reads a header from r, and no byte beyond it. It reads at most
// MaxHeaderSize bytes and fails as ParseHeader does, or with r's error as it is.
func ReadHeader(r io.Reader) (*Header, error) {
	buf := make([]byte, fixedSize, sizeOf(Single, 1))
	n, err := fill(r, buf)
	if err != nil {
		return nil, err
	}
	size, err := headerSize(buf[:n])
	if err != nil {
		return nil, err
	}
	buf = append(buf, make([]byte, size-fixedSize)...)
	n, err = fill(r, buf[fixedSize:])
	if err != nil {
		return nil, err
	}
	h, _, err := ParseHeader(buf[:fixedSize+n])
	return h, err
}

// Size returns the size of the encoded header in bytes.
func (h *Header) Size() int { return sizeOf(h.Policy, len(h.Recipients)) }

// AppendBinary appends the encoded header to b. It is the inverse of
// ParseHeader, and fails with ErrCorrupt where ParseHeader would refuse what
// it wrote.
func (h *Header) AppendBinary(b []byte) ([]byte, error) {
	if err := h.validate(); err != nil {
		return b, err
	}
	return h.appendWraps(h.appendCore(b)), nil
}

func (h *Header) validate() error {
	if !validForm(h.Form) || !validPolicy(h.Policy) || !validCount(h.Policy, len(h.Recipients)) ||
		h.Policy == Any && len(h.Wrapped) != len(h.Recipients) || h.Policy != Any && len(h.Wrapped) != 0 {
		return ErrCorrupt
	}
	for i := range h.Recipients[1:] {
		if bytes.Compare(h.Recipients[i][:], h.Recipients[i+1][:]) >= 0 {
			return ErrCorrupt
		}
	}
	return nil
}

// appendCore appends everything but the wrapped keys.
func (h *Header) appendCore(b []byte) []byte {
	mode := byte(h.Form)<<4 | byte(h.Policy)
	if h.Bound {
		mode |= boundBit
	}
	b = append(b, magic...)
	b = append(b, version1, mode)
	b = binary.BigEndian.AppendUint16(b, h.Class)
	b = binary.BigEndian.AppendUint64(b, h.Bucket)
	b = append(b, byte(len(h.Recipients)))
	for i := range h.Recipients {
		b = append(b, h.Recipients[i][:]...)
	}
	return append(b, h.Commitment[:]...)
}

func (h *Header) appendWraps(b []byte) []byte {
	for i := range h.Wrapped {
		b = append(b, h.Wrapped[i][:]...)
	}
	return b
}

// encodedHeader is a header's bytes and their SHA-256, which authenticates the
// header as the payload's associated data.
type encodedHeader struct {
	raw  []byte
	hash [sha256.Size]byte
}

func encode(h *Header) *encodedHeader {
	raw := h.appendWraps(h.appendCore(make([]byte, 0, h.Size())))
	return &encodedHeader{raw: raw, hash: sha256.Sum256(raw)}
}
