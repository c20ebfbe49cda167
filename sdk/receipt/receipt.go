package receipt

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"time"
)

// Bounds of a receipt.
const (
	// MaxEntries is the greatest number of entries in one receipt.
	MaxEntries = 16
	// MaxReceipt is the greatest size of a receipt in bytes.
	MaxReceipt = 1 << 20
)

const receiptFormat = "lethe.receipt/v1"

// ErrMismatch: the entries are each proven, but not about the same thing; or
// two checkpoints contradict each other.
var ErrMismatch = errors.New("entries do not belong together")

// Entry is one entry of a receipt.
type Entry struct {
	// Statement in its canonical encoding.
	Statement []byte
	// Salt of SaltSize bytes.
	Salt  []byte
	Proof Proof
}

// Encode returns the one encoding of a receipt: JSON in the form of RFC 8785
// and one newline. It checks bounds and the forms of all but the statements,
// which must be canonical encodings as they are in every ledger, and verifies
// nothing. Its errors wrap ErrMalformed.
func Encode(entries ...Entry) ([]byte, error) {
	if len(entries) == 0 || len(entries) > MaxEntries {
		return nil, fmt.Errorf("%w receipt: %d entries", ErrMalformed, len(entries))
	}
	b := append(make([]byte, 0, 4<<10), `{"entries":[`...) // larger than most
	for i, e := range entries {
		if n := len(e.Statement); n == 0 || n > MaxStatement {
			return nil, fmt.Errorf("entry %d: %w statement: %d bytes", i, ErrMalformed, n)
		}
		if len(e.Salt) != SaltSize {
			return nil, fmt.Errorf("entry %d: %w salt", i, ErrMalformed)
		}
		if err := e.Proof.check(); err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
		if _, err := ParseCheckpoint(e.Proof.Checkpoint); err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"proof":`...)
		b = appendString(b, string(e.Proof.Encode()))
		b = append(b, `,"salt":"`...)
		b = base64.StdEncoding.AppendEncode(b, e.Salt)
		b = append(b, `","statement":`...)
		b = append(b, e.Statement...)
		b = append(b, '}')
	}
	b = append(b, `],"format":"`+receiptFormat+"\"}\n"...)
	if len(b) > MaxReceipt {
		return nil, fmt.Errorf("%w receipt: larger than %d bytes", ErrMalformed, MaxReceipt)
	}
	return b, nil
}

// Parse reads a receipt WITHOUT verifying it: what it returns proves nothing.
// It accepts what Encode returns and nothing else. The statements are parts of
// receipt. Its errors wrap ErrMalformed.
func Parse(receipt []byte) ([]Entry, error) {
	entries, _, err := parse(receipt)
	return entries, err
}

// parse is Parse with what the statements say.
func parse(receipt []byte) (entries []Entry, statements []*Statement, err error) {
	if len(receipt) > MaxReceipt {
		return nil, nil, fmt.Errorf("%w receipt: larger than %d bytes", ErrMalformed, MaxReceipt)
	}
	c := &scanner{rest: receipt}
	c.literal(`{"entries":[`)
	for !c.next(']') {
		if len(entries) == MaxEntries {
			return nil, nil, fmt.Errorf("%w receipt: more than %d entries", ErrMalformed, MaxEntries)
		}
		if len(entries) > 0 {
			c.literal(",")
		}
		c.literal(`{"proof":`)
		text := c.string()
		c.literal(`,"salt":`)
		salt64 := c.string()
		c.literal(`,"statement":`)
		statement := c.object()
		c.literal("}")
		if c.failed {
			return nil, nil, fmt.Errorf("%w receipt: not in canonical form", ErrMalformed)
		}
		salt, err := base64.StdEncoding.Strict().DecodeString(salt64)
		if err != nil {
			return nil, nil, fmt.Errorf("entry %d: %w salt", len(entries), ErrMalformed)
		}
		proof, err := ParseProof([]byte(text))
		if err != nil {
			return nil, nil, fmt.Errorf("entry %d: %w", len(entries), err)
		}
		s, err := ParseStatement(statement)
		if err != nil {
			return nil, nil, fmt.Errorf("entry %d: %w", len(entries), err)
		}
		entries = append(entries, Entry{Statement: statement, Salt: salt, Proof: *proof})
		statements = append(statements, s)
	}
	c.literal(`,"format":"` + receiptFormat + "\"}\n")
	if c.failed || len(c.rest) > 0 {
		return nil, nil, fmt.Errorf("%w receipt: not in canonical form, or of unknown format", ErrMalformed)
	}
	// Whatever the lines above took too lightly does not survive this.
	again, err := Encode(entries...)
	if err != nil {
		return nil, nil, err
	}
	if !bytes.Equal(again, receipt) {
		return nil, nil, fmt.Errorf("%w receipt: not in canonical form", ErrMalformed)
	}
	return entries, statements, nil
}

// Verified is a receipt whose every entry was found in a tree that a pinned
// key signed.
type Verified struct {
	// Origin names the ledger.
	Origin string
	// Entries has at least one; their indexes ascend.
	Entries []VerifiedEntry
}

// VerifiedEntry is a statement with the place where it was found.
type VerifiedEntry struct {
	// Index in the ledger.
	Index     uint64
	Statement *Statement
	// Checkpoint of the tree that the proof leads to.
	Checkpoint Checkpoint
	// SignedBy are the pinned keys that signed it, as name+hash.
	SignedBy []string
}

// Verify verifies a receipt offline, trusting nothing but the pinned keys. Its
// errors wrap ErrMalformed, ErrSignature, ErrProof or ErrMismatch. A receipt
// that verifies has not one bit that could be another.
//
// It proves that the ledger's operator logged these statements in this place.
// It does not prove that they are true, nor, without witnesses, that the
// operator shows everybody the same ledger.
func Verify(receipt []byte, pinned *Keys) (*Verified, error) {
	entries, statements, err := parse(receipt)
	if err != nil {
		return nil, err
	}
	v := &Verified{Entries: make([]VerifiedEntry, len(entries))}
	for i, e := range entries {
		c, signers, err := pinned.open(e.Proof.Checkpoint)
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
		if err := e.Proof.verify(LeafHash(e.Salt, e.Statement), c); err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
		v.Entries[i] = VerifiedEntry{Index: e.Proof.Index, Statement: statements[i], Checkpoint: c, SignedBy: signers}
	}
	v.Origin = v.Entries[0].Checkpoint.Origin
	if err := v.belongTogether(); err != nil {
		return nil, err
	}
	return v, nil
}

// about says which kinds a later entry of each kind may be about.
var about = map[Kind][]Kind{
	Cancelled:    {Scheduled},
	Destroyed:    {Scheduled},
	Reinstated:   {Destroyed},
	HoldReleased: {HoldPlaced},
}

// ofEpoch are the kinds of later entries that are about all destructions and
// expiries of their epoch.
func ofEpoch(k Kind) bool {
	switch k {
	case Sanitised, EpochRetiring, EpochCancelled, EpochClosed:
		return true
	}
	return false
}

func (v *Verified) belongTogether() error {
	first := v.Entries[0]
	switch first.Statement.Kind {
	case Sanitised, EpochCancelled, Cancelled:
		return fmt.Errorf("%w: a later stage without what it is about", ErrMismatch)
	}
	roots := make(map[uint64][32]byte)
	for i, e := range v.Entries {
		if e.Checkpoint.Origin != v.Origin {
			return fmt.Errorf("%w: entry %d is of another ledger", ErrMismatch, i)
		}
		if root, ok := roots[e.Checkpoint.Size]; ok && root != e.Checkpoint.Root {
			return fmt.Errorf("%w: two roots of one size", ErrMismatch)
		}
		roots[e.Checkpoint.Size] = e.Checkpoint.Root
		if i == 0 {
			continue
		}
		if e.Index <= v.Entries[i-1].Index {
			return fmt.Errorf("%w: entry %d is out of order", ErrMismatch, i)
		}
		if !v.isAboutEarlier(i) {
			return fmt.Errorf("%w: entry %d is not about an earlier one", ErrMismatch, i)
		}
	}
	return nil
}

// isAboutEarlier reports whether entry i is about one before it.
func (v *Verified) isAboutEarlier(i int) bool {
	s := v.Entries[i].Statement
	if ofEpoch(s.Kind) {
		return v.endsEpoch(i)
	}
	for _, e := range v.Entries[:i] {
		if overtakes(s, e.Statement) {
			return true
		}
		if s.Of == nil || e.Index != *s.Of || e.Statement.Tenant != s.Tenant {
			continue
		}
		if s.Handle != nil && !bytes.Equal(s.Handle, e.Statement.Handle) {
			return false
		}
		for _, k := range about[s.Kind] {
			if k == e.Statement.Kind {
				return true
			}
		}
	}
	return false
}

// overtakes reports whether a destruction reaches all that another statement
// scheduled: of the whole person, or of the tenant.
func overtakes(s, scheduled *Statement) bool {
	if s.Kind != Destroyed || scheduled.Kind != Scheduled || s.Tenant != scheduled.Tenant {
		return false
	}
	return s.Scope == ScopeTenant || s.Scope == ScopePerson && bytes.Equal(s.Handle, scheduled.Handle) && s.Generation >= scheduled.Generation
}

// endsEpoch reports whether entry i, which is about an epoch, is about that of
// a destruction or expiry before it, and no earlier entry says the same or has
// closed the epoch.
func (v *Verified) endsEpoch(i int) bool {
	s := v.Entries[i].Statement
	found := false
	for _, e := range v.Entries[:i] {
		if e.Statement.Epoch != s.Epoch {
			continue
		}
		switch e.Statement.Kind {
		case Destroyed, Expired:
			found = true
		case EpochClosed:
			return false
		case Sanitised:
			if s.Kind == Sanitised {
				return false
			}
		}
	}
	return found
}

// Stages is how far a destruction has come as far as its receipt states. A zero
// time means that the receipt does not state that stage: not that it happened,
// nor that it did not.
type Stages struct {
	// Denied is since when the keys are refused; while Destroyed is zero, until
	// a cancellation, which the receipt may not show.
	Denied time.Time
	// ButHeld: it is an expiry, of which no stage is about the keys of subjects
	// whom a legal hold covered at Denied. They live on under the hold.
	ButHeld bool
	// Destroyed is when they were destroyed; zero while it is only scheduled
	// for Due.
	Destroyed, Due time.Time
	// Cancelled is when the scheduled destruction was called off.
	Cancelled time.Time
	// DrainedBy is when the last lease is over. It was stated in advance; while
	// Destroyed is zero, a cancellation that the receipt does not show voids it.
	DrainedBy time.Time
	// Sanitised is when keyd stated that its store holds no bytes of the keys.
	Sanitised time.Time
	// FinalBy is the plan, and FinalBasis how far it reaches.
	FinalBy    time.Time
	FinalBasis string
	// RootDue is when the KMS destroys the root of the destruction's epoch.
	RootDue time.Time
	// RootKept is when that was called off, which leaves FinalBy without
	// ground; zero if it was not, or was scheduled again.
	RootKept time.Time
	// Final is when the root, and every root before it, was stated to be destroyed.
	Final time.Time
}

// Stages reads the stages of the destruction (or expiry) that the receipt is
// about.
func (v *Verified) Stages() Stages {
	var st Stages
	for _, e := range v.Entries {
		s := e.Statement
		switch s.Kind {
		case Scheduled:
			st.Denied, st.Due = s.Time, s.Due
		case Cancelled:
			st.Cancelled, st.Denied = s.Time, time.Time{}
		case Destroyed, Expired:
			if st.Denied.IsZero() {
				st.Denied = s.Time
			}
			st.Destroyed = s.Time
			st.ButHeld = s.Kind == Expired
			st.FinalBy, st.FinalBasis = s.FinalBy, s.FinalBasis
		case Sanitised:
			st.Sanitised = s.Time
		case EpochRetiring:
			if !st.Destroyed.IsZero() {
				st.RootDue, st.RootKept = s.Due, time.Time{}
			}
		case EpochCancelled:
			st.RootDue, st.RootKept = time.Time{}, s.Time
		case EpochClosed:
			if !st.Destroyed.IsZero() {
				st.Final, st.FinalBasis, st.RootKept = s.Time, s.FinalBasis, time.Time{}
			}
		}
		if !s.DrainedBy.IsZero() {
			st.DrainedBy = s.DrainedBy
		}
	}
	return st
}
