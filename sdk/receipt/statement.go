package receipt

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"golang.org/x/mod/sumdb/note"
)

// Bounds of a statement.
const (
	// MaxStatement is the greatest size of an encoded statement in bytes.
	MaxStatement = 128 << 10
	// MaxListed is the greatest number of classes, and of dead keys, in one statement.
	MaxListed = 512
)

const statementType = "lethe.statement/v1"

// timeLayout is RFC 3339 in UTC with exactly three decimals.
const timeLayout = "2006-01-02T15:04:05.000Z"

// ErrMalformed is wrapped by every error about the form of a statement, a
// proof, a checkpoint or a receipt. The errors name fields, never their values.
var ErrMalformed = errors.New("malformed")

// Kind says what a statement states.
type Kind string

// The kinds of statement. What each must and may hold is in the table rules.
const (
	TenantCreated Kind = "tenant-created"
	ClassSet      Kind = "class-set"
	Destroyed     Kind = "destroyed"
	Scheduled     Kind = "scheduled"
	Cancelled     Kind = "cancelled"
	Reinstated    Kind = "reinstated"
	HoldPlaced    Kind = "hold-placed"
	HoldReleased  Kind = "hold-released"
	Expired       Kind = "expired"
	EpochOpened   Kind = "epoch-opened"
	EpochDraining Kind = "epoch-draining"
	EpochDrained  Kind = "epoch-drained"
	EpochRetiring Kind = "epoch-retiring"
	// EpochCancelled: the destruction of the epoch's root was called off.
	EpochCancelled Kind = "epoch-cancelled"
	// EpochClosed: the epoch's root is destroyed, and so are those before it.
	EpochClosed Kind = "epoch-closed"
	// Sanitised: the key store holds no bytes of keys wrapped in the epoch.
	Sanitised Kind = "sanitised"
	LedgerKey Kind = "ledger-key"
)

// Scope says how far a statement reaches.
type Scope string

// Scopes.
const (
	// ScopePerson is the whole person: every class, those not named yet included.
	ScopePerson Scope = "person"
	// ScopeClasses is the listed classes of one subject.
	ScopeClasses Scope = "classes"
	// ScopeTenant is a whole tenant.
	ScopeTenant Scope = "tenant"
)

// Whether a key existed when it was destroyed.
const (
	ExistedYes = "yes"
	ExistedNo  = "no"
	// ExistedUnknown: the key store knows of none, and was put back from a
	// backup once, which may have lacked one.
	ExistedUnknown = "unknown"
)

// What happens to keys at the end of a retention.
const (
	EndDestroy = "destroy"
	EndDeny    = "deny"
)

// Statement is one statement of the ledger: with those before it, complete
// enough to replay what it did upon an older store, save keys, which no
// statement holds. A field's zero value is an absent field. It names no
// subject but by handle.
type Statement struct {
	Kind Kind
	// Time is when it was stated. All times are whole milliseconds, and UTC
	// once parsed.
	Time time.Time

	// Tenant is 1 to 128 bytes of [a-z0-9._-].
	Tenant string
	// Handle is the subject's 16 bytes.
	Handle []byte
	Scope  Scope
	// Classes, ascending by number once encoded. Those that were dead before a
	// destruction are named with the others.
	Classes []Class
	// Generation that was destroyed, or that Reinstated began; from 1.
	Generation uint32
	// DeadKeys are the keys that this statement killed, in ascending order once encoded.
	DeadKeys []DeadKey
	// Existed is ExistedYes, ExistedNo or ExistedUnknown: keys that died before
	// this statement, in the life that it is about, count.
	Existed string

	// Reason is a code of 1 to 64 bytes of [a-z0-9._-].
	Reason string
	// Request is an HMAC of the request id, of 16 or 32 bytes.
	Request []byte
	// Principal is the authenticated name of who made the request, at most 2048
	// bytes of printable ASCII. It is absent where keyd acts by itself, and in
	// development.
	Principal string

	// DrainedBy is when the last lease is over, skew allowed for.
	DrainedBy time.Time
	// FinalBy is when no copy of the key store can bring the key back any more,
	// as planned. It and FinalBasis come together, or neither does.
	FinalBy time.Time
	// FinalBasis is a code for how far final reaches.
	FinalBasis string
	// Due is when what is scheduled falls due.
	Due time.Time
	// Epoch is the newest epoch at the commit, or the epoch that the statement is about.
	Epoch uint32
	// Anchor is the code of the anchor's failure domain, such as "file".
	Anchor string

	// Hold is the hold's id, 1 to 64 bytes of [a-z0-9._-]; HoldEnd, when it
	// ends by itself.
	Hold    string
	HoldEnd time.Time

	// Of is the ledger index of the statement that this one is about.
	Of *uint64

	// Policy of the one class in Classes, in seconds and milliseconds as the
	// names say. RetentionS zero: for ever.
	BucketWidthS, LeaseMS, RetentionS int64
	// EndAction is EndDestroy or EndDeny, with a retention only; ApprovedBy is a
	// code of 1 to 64 bytes of [a-z0-9._-] for who approved the policy.
	EndAction, ApprovedBy string
	// The grid of the running width starts at WidthFromS, in Unix seconds; the
	// next width holds from NextWidthFromS.
	WidthFromS, NextBucketWidthS, NextWidthFromS int64

	// The expired bucket, in Unix seconds.
	BucketStartS, BucketEndS int64

	// PseudonymCheck is 16 or 32 bytes: an HMAC under the tenant's pseudonym
	// key that proves that it is the same key.
	PseudonymCheck []byte

	// Root is the KMS's name of the epoch's root, at most 256 bytes of
	// printable ASCII; KMS is the kind of KMS, a code.
	Root, KMS string
	// PlannedEnd of the epoch.
	PlannedEnd time.Time

	// VerifierKey is the next key of the ledger, in the form of C2SP signed-note.
	VerifierKey string
}

// Class names a class of a tenant.
type Class struct {
	// Name is 1 to 64 bytes of [a-z0-9._-].
	Name string
	// Number is 1 to 65535.
	Number uint32
}

// DeadKey is a key that was destroyed.
type DeadKey struct {
	ClassNumber uint32
	Generation  uint32
	KeyID       [16]byte
}

// rule says which fields a kind must and may have beside type, kind, time and
// those in anyKind.
type rule struct{ must, may []string }

var anyKind = []string{"anchor", "principal", "reason", "request"}

var rules = map[Kind]rule{
	TenantCreated: {must: []string{"pseudonym_check", "tenant"}},
	ClassSet: {
		must: []string{"bucket_width_s", "classes", "lease_ms", "retention_s", "tenant"},
		may:  []string{"approved_by", "end_action", "next_bucket_width_s", "next_width_from_s", "width_from_s"},
	},
	Destroyed: {
		must: []string{"anchor", "drained_by", "epoch", "existed", "reason", "scope", "tenant"},
		may:  []string{"classes", "dead_keys", "final_basis", "final_by", "generation", "handle", "of"},
	},
	Scheduled: {
		must: []string{"anchor", "due", "reason", "scope", "tenant"},
		may:  []string{"classes", "drained_by", "epoch", "generation", "handle"},
	},
	Cancelled: {
		must: []string{"of", "tenant"},
		may:  []string{"classes", "generation", "handle", "scope"},
	},
	Reinstated: {
		must: []string{"generation", "handle", "scope", "tenant"},
		may:  []string{"classes", "of"},
	},
	HoldPlaced: {
		must: []string{"hold", "reason", "scope", "tenant"},
		may:  []string{"handle", "hold_end"},
	},
	HoldReleased: {
		must: []string{"hold", "scope", "tenant"},
		may:  []string{"handle", "of"},
	},
	Expired: {
		must: []string{"anchor", "bucket_end_s", "bucket_start_s", "classes", "drained_by", "epoch", "tenant"},
		may:  []string{"final_basis", "final_by", "of"},
	},
	EpochOpened:    {must: []string{"epoch", "kms", "root"}, may: []string{"planned_end"}},
	EpochDraining:  {must: []string{"epoch"}},
	EpochDrained:   {must: []string{"epoch"}},
	EpochRetiring:  {must: []string{"due", "epoch", "kms", "root"}},
	EpochCancelled: {must: []string{"epoch", "kms", "root"}},
	EpochClosed:    {must: []string{"epoch", "final_basis", "kms", "root"}},
	Sanitised:      {must: []string{"epoch"}},
	LedgerKey:      {must: []string{"verifier_key"}},
}

// field is one member of a statement's JSON object. Every value is a string, or
// an array of objects of strings, so that nothing passes through a float.
type field struct {
	name   string
	absent func(*Statement) bool
	append func([]byte, *Statement) ([]byte, error)
	parse  func(*scanner, *Statement) error
}

// fields is in the order of the encoding: ascending by name.
var fields = []field{
	text("anchor", func(s *Statement) *string { return &s.Anchor }, code(64)),
	text("approved_by", func(s *Statement) *string { return &s.ApprovedBy }, code(64)),
	number("bucket_end_s", func(s *Statement) *int64 { return &s.BucketEndS }),
	number("bucket_start_s", func(s *Statement) *int64 { return &s.BucketStartS }),
	number("bucket_width_s", func(s *Statement) *int64 { return &s.BucketWidthS }),
	{
		name:   "classes",
		absent: func(s *Statement) bool { return len(s.Classes) == 0 },
		append: appendClasses,
		parse:  parseClasses,
	},
	{
		name:   "dead_keys",
		absent: func(s *Statement) bool { return len(s.DeadKeys) == 0 },
		append: appendDeadKeys,
		parse:  parseDeadKeys,
	},
	instant("drained_by", func(s *Statement) *time.Time { return &s.DrainedBy }),
	instant("due", func(s *Statement) *time.Time { return &s.Due }),
	text("end_action", func(s *Statement) *string { return &s.EndAction }, oneOf(EndDestroy, EndDeny)),
	number32("epoch", func(s *Statement) *uint32 { return &s.Epoch }),
	text("existed", func(s *Statement) *string { return &s.Existed }, oneOf(ExistedYes, ExistedNo, ExistedUnknown)),
	text("final_basis", func(s *Statement) *string { return &s.FinalBasis }, code(64)),
	instant("final_by", func(s *Statement) *time.Time { return &s.FinalBy }),
	number32("generation", func(s *Statement) *uint32 { return &s.Generation }),
	octets("handle", func(s *Statement) *[]byte { return &s.Handle }, 16),
	text("hold", func(s *Statement) *string { return &s.Hold }, code(64)),
	instant("hold_end", func(s *Statement) *time.Time { return &s.HoldEnd }),
	text("kind", func(s *Statement) *Kind { return &s.Kind }, isKind),
	text("kms", func(s *Statement) *string { return &s.KMS }, code(64)),
	number("lease_ms", func(s *Statement) *int64 { return &s.LeaseMS }),
	number("next_bucket_width_s", func(s *Statement) *int64 { return &s.NextBucketWidthS }),
	number("next_width_from_s", func(s *Statement) *int64 { return &s.NextWidthFromS }),
	{
		name:   "of",
		absent: func(s *Statement) bool { return s.Of == nil },
		append: func(dst []byte, s *Statement) ([]byte, error) {
			if s.Of == nil || *s.Of >= maxSize {
				return nil, errField("of")
			}
			return appendString(dst, strconv.FormatUint(*s.Of, 10)), nil
		},
		parse: func(c *scanner, s *Statement) error {
			n, err := parseUint(c, "of", 64)
			s.Of = &n
			return err
		},
	},
	instant("planned_end", func(s *Statement) *time.Time { return &s.PlannedEnd }),
	text("principal", func(s *Statement) *string { return &s.Principal }, func(v string) bool {
		return v != "" && len(v) <= 2048 && isPrintable(v)
	}),
	octets("pseudonym_check", func(s *Statement) *[]byte { return &s.PseudonymCheck }, 16, 32),
	text("reason", func(s *Statement) *string { return &s.Reason }, code(64)),
	octets("request", func(s *Statement) *[]byte { return &s.Request }, 16, 32),
	number("retention_s", func(s *Statement) *int64 { return &s.RetentionS }),
	text("root", func(s *Statement) *string { return &s.Root }, func(v string) bool {
		return v != "" && len(v) <= 256 && isPrintable(v)
	}),
	text("scope", func(s *Statement) *Scope { return &s.Scope }, oneOf(string(ScopePerson), string(ScopeClasses), string(ScopeTenant))),
	text("tenant", func(s *Statement) *string { return &s.Tenant }, code(128)),
	instant("time", func(s *Statement) *time.Time { return &s.Time }),
	{
		name:   "type",
		absent: func(*Statement) bool { return false },
		append: func(dst []byte, _ *Statement) ([]byte, error) { return appendString(dst, statementType), nil },
		parse: func(c *scanner, _ *Statement) error {
			if v, err := parseString(c, "type"); err != nil || v != statementType {
				return errField("type")
			}
			return nil
		},
	},
	text("verifier_key", func(s *Statement) *string { return &s.VerifierKey }, isVerifierKey),
	number("width_from_s", func(s *Statement) *int64 { return &s.WidthFromS }),
}

// Encode returns the statement's one encoding: JSON in the form of RFC 8785,
// in ASCII, in which every scalar is a string. It fails, wrapping
// ErrMalformed, when a field is missing, out of bounds, or has no place in a
// statement of that kind.
func (s *Statement) Encode() ([]byte, error) {
	r, ok := rules[s.Kind]
	if !ok {
		return nil, errField("kind")
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	dst := append(make([]byte, 0, 1<<10), '{') // few are larger
	for _, f := range fields {
		must := f.name == "type" || f.name == "kind" || f.name == "time" || slices.Contains(r.must, f.name)
		if f.absent(s) && !must {
			continue
		}
		if !must && !slices.Contains(r.may, f.name) && !slices.Contains(anyKind, f.name) {
			return nil, fmt.Errorf("%w statement: %s has no place in %s", ErrMalformed, f.name, s.Kind)
		}
		if len(dst) > 1 {
			dst = append(dst, ',')
		}
		dst = appendString(dst, f.name)
		dst = append(dst, ':')
		var err error
		if dst, err = f.append(dst, s); err != nil {
			return nil, err
		}
	}
	dst = append(dst, '}')
	if len(dst) > MaxStatement {
		return nil, fmt.Errorf("%w statement: larger than %d bytes", ErrMalformed, MaxStatement)
	}
	return dst, nil
}

// ParseStatement parses what Encode returned. It accepts nothing else: no
// other spelling of the same content, no unknown field or kind. Its errors
// wrap ErrMalformed.
func ParseStatement(b []byte) (*Statement, error) {
	if len(b) > MaxStatement {
		return nil, fmt.Errorf("%w statement: larger than %d bytes", ErrMalformed, MaxStatement)
	}
	s := new(Statement)
	c := &scanner{rest: b}
	c.literal("{")
	for i, left := 0, fields; !c.next('}'); i++ {
		if i > 0 {
			c.literal(",")
		}
		// The order is that of fields, so each can only be further on.
		for len(left) > 0 && !c.member(left[0].name) {
			left = left[1:]
		}
		if len(left) == 0 {
			return nil, fmt.Errorf("%w statement: unknown, repeated or misplaced member", ErrMalformed)
		}
		if err := left[0].parse(c, s); err != nil {
			return nil, err
		}
		left = left[1:]
	}
	if len(c.rest) > 0 {
		return nil, fmt.Errorf("%w statement: trailing bytes", ErrMalformed)
	}
	// Whatever the lines above took too lightly does not survive this.
	again, err := s.Encode()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, b) {
		return nil, fmt.Errorf("%w statement: not in canonical form", ErrMalformed)
	}
	return s, nil
}

// check holds the rules that span fields.
func (s *Statement) check() error {
	if (s.FinalBy.IsZero()) != (s.FinalBasis == "") && (s.Kind == Destroyed || s.Kind == Expired) {
		return fmt.Errorf("%w statement: final_by and final_basis come together", ErrMalformed)
	}
	for _, t := range []struct {
		name string
		at   time.Time
	}{{"drained_by", s.DrainedBy}, {"final_by", s.FinalBy}, {"due", s.Due}} {
		if !t.at.IsZero() && t.at.Before(s.Time) {
			return fmt.Errorf("%w statement: %s is before time", ErrMalformed, t.name)
		}
	}
	if (s.Existed == ExistedNo || s.Existed == ExistedUnknown) && len(s.DeadKeys) > 0 {
		return fmt.Errorf("%w statement: dead keys that never existed", ErrMalformed)
	}
	if (s.Kind == ClassSet || s.Kind == Expired) && len(s.Classes) != 1 {
		return fmt.Errorf("%w statement: %s is about one class", ErrMalformed, s.Kind)
	}
	if s.Kind == Expired && s.BucketEndS <= s.BucketStartS {
		return fmt.Errorf("%w statement: an empty bucket", ErrMalformed)
	}
	switch s.Scope {
	case ScopePerson, ScopeClasses:
		if s.Handle == nil {
			return fmt.Errorf("%w statement: handle is missing", ErrMalformed)
		}
		if s.Generation == 0 && (s.Kind == Destroyed || s.Kind == Scheduled || s.Kind == Reinstated) {
			return fmt.Errorf("%w statement: generation is missing", ErrMalformed)
		}
		if s.Scope == ScopeClasses && len(s.Classes) == 0 {
			return fmt.Errorf("%w statement: classes are missing", ErrMalformed)
		}
	case ScopeTenant:
		if s.Handle != nil || s.Generation != 0 || len(s.Classes) > 0 || len(s.DeadKeys) > 0 {
			return fmt.Errorf("%w statement: a subject in the scope of a tenant", ErrMalformed)
		}
		if s.Kind == Reinstated {
			return fmt.Errorf("%w statement: a tenant is never reinstated", ErrMalformed)
		}
	}
	return nil
}

func errField(name string) error {
	return fmt.Errorf("%w statement: %s is missing or out of bounds", ErrMalformed, name)
}

func text[T ~string](name string, at func(*Statement) *T, valid func(string) bool) field {
	return field{
		name:   name,
		absent: func(s *Statement) bool { return *at(s) == "" },
		append: func(dst []byte, s *Statement) ([]byte, error) {
			v := string(*at(s))
			if !valid(v) {
				return nil, errField(name)
			}
			return appendString(dst, v), nil
		},
		parse: func(c *scanner, s *Statement) error {
			v, err := parseString(c, name)
			*at(s) = T(v)
			return err
		},
	}
}

func octets(name string, at func(*Statement) *[]byte, sizes ...int) field {
	return field{
		name:   name,
		absent: func(s *Statement) bool { return *at(s) == nil },
		append: func(dst []byte, s *Statement) ([]byte, error) {
			if !slices.Contains(sizes, len(*at(s))) {
				return nil, errField(name)
			}
			return appendString(dst, hex.EncodeToString(*at(s))), nil
		},
		parse: func(c *scanner, s *Statement) error {
			v, err := parseString(c, name)
			if err != nil {
				return err
			}
			if *at(s), err = hex.DecodeString(v); err != nil {
				return errField(name)
			}
			return nil
		},
	}
}

func number(name string, at func(*Statement) *int64) field {
	return field{
		name:   name,
		absent: func(s *Statement) bool { return *at(s) == 0 },
		append: func(dst []byte, s *Statement) ([]byte, error) {
			if *at(s) < 0 {
				return nil, errField(name)
			}
			return appendString(dst, strconv.FormatInt(*at(s), 10)), nil
		},
		parse: func(c *scanner, s *Statement) error {
			n, err := parseUint(c, name, 63)
			*at(s) = int64(n)
			return err
		},
	}
}

func number32(name string, at func(*Statement) *uint32) field {
	return field{
		name:   name,
		absent: func(s *Statement) bool { return *at(s) == 0 },
		append: func(dst []byte, s *Statement) ([]byte, error) {
			return appendString(dst, strconv.FormatUint(uint64(*at(s)), 10)), nil
		},
		parse: func(c *scanner, s *Statement) error {
			n, err := parseUint(c, name, 32)
			*at(s) = uint32(n)
			return err
		},
	}
}

func instant(name string, at func(*Statement) *time.Time) field {
	return field{
		name:   name,
		absent: func(s *Statement) bool { return at(s).IsZero() },
		append: func(dst []byte, s *Statement) ([]byte, error) {
			t := at(s).UTC()
			if t.Year() < 1970 || t.Year() > 9999 || t.Nanosecond()%int(time.Millisecond) != 0 {
				return nil, errField(name)
			}
			return appendString(dst, t.Format(timeLayout)), nil
		},
		parse: func(c *scanner, s *Statement) error {
			v, err := parseString(c, name)
			if err != nil {
				return err
			}
			if *at(s), err = time.Parse(timeLayout, v); err != nil {
				return errField(name)
			}
			return nil
		},
	}
}

func appendClasses(dst []byte, s *Statement) ([]byte, error) {
	if len(s.Classes) == 0 || len(s.Classes) > MaxListed {
		return nil, errField("classes")
	}
	list := slices.Clone(s.Classes)
	slices.SortFunc(list, func(a, b Class) int { return int(a.Number) - int(b.Number) })
	dst = append(dst, '[')
	for i, c := range list {
		if c.Number == 0 || c.Number > 1<<16-1 || !isCode(c.Name, 64) || i > 0 && c.Number == list[i-1].Number {
			return nil, errField("classes")
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"name":`...)
		dst = appendString(dst, c.Name)
		dst = append(dst, `,"number":"`...)
		dst = strconv.AppendUint(dst, uint64(c.Number), 10)
		dst = append(dst, `"}`...)
	}
	return append(dst, ']'), nil
}

func parseClasses(c *scanner, s *Statement) error {
	c.literal("[")
	for !c.next(']') {
		if len(s.Classes) == MaxListed {
			return errField("classes")
		}
		if len(s.Classes) > 0 {
			c.literal(",")
		}
		c.literal(`{"name":`)
		name := c.string()
		c.literal(`,"number":`)
		n, err := parseUint(c, "classes", 32)
		if err != nil {
			return err
		}
		c.literal("}")
		s.Classes = append(s.Classes, Class{Name: name, Number: uint32(n)})
	}
	return nil
}

func compareDeadKeys(a, b DeadKey) int {
	if a.ClassNumber != b.ClassNumber {
		return int(a.ClassNumber) - int(b.ClassNumber)
	}
	if a.Generation != b.Generation {
		if a.Generation < b.Generation {
			return -1
		}
		return 1
	}
	return bytes.Compare(a.KeyID[:], b.KeyID[:])
}

func appendDeadKeys(dst []byte, s *Statement) ([]byte, error) {
	if len(s.DeadKeys) == 0 || len(s.DeadKeys) > MaxListed {
		return nil, errField("dead_keys")
	}
	list := slices.Clone(s.DeadKeys)
	slices.SortFunc(list, compareDeadKeys)
	dst = append(dst, '[')
	for i, k := range list {
		if k.ClassNumber == 0 || k.ClassNumber > 1<<16-1 || k.Generation == 0 || i > 0 && k == list[i-1] {
			return nil, errField("dead_keys")
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"class_number":"`...)
		dst = strconv.AppendUint(dst, uint64(k.ClassNumber), 10)
		dst = append(dst, `","generation":"`...)
		dst = strconv.AppendUint(dst, uint64(k.Generation), 10)
		dst = append(dst, `","key_id":"`...)
		dst = hex.AppendEncode(dst, k.KeyID[:])
		dst = append(dst, `"}`...)
	}
	return append(dst, ']'), nil
}

func parseDeadKeys(c *scanner, s *Statement) error {
	c.literal("[")
	for !c.next(']') {
		if len(s.DeadKeys) == MaxListed {
			return errField("dead_keys")
		}
		if len(s.DeadKeys) > 0 {
			c.literal(",")
		}
		c.literal(`{"class_number":`)
		class, err1 := parseUint(c, "dead_keys", 32)
		c.literal(`,"generation":`)
		generation, err2 := parseUint(c, "dead_keys", 32)
		c.literal(`,"key_id":`)
		id := c.string()
		c.literal("}")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if c.failed || len(id) != 32 {
			return errField("dead_keys")
		}
		k := DeadKey{ClassNumber: uint32(class), Generation: uint32(generation)}
		if _, err := hex.Decode(k.KeyID[:], []byte(id)); err != nil {
			return errField("dead_keys")
		}
		s.DeadKeys = append(s.DeadKeys, k)
	}
	return nil
}

func parseString(c *scanner, name string) (string, error) {
	v := c.string()
	if c.failed {
		return "", errField(name)
	}
	return v, nil
}

func parseUint(c *scanner, name string, bits int) (uint64, error) {
	v, err := parseString(c, name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(v, 10, bits)
	if err != nil {
		return 0, errField(name)
	}
	return n, nil
}

func code(limit int) func(string) bool {
	return func(v string) bool { return isCode(v, limit) }
}

func oneOf(values ...string) func(string) bool {
	return func(v string) bool { return slices.Contains(values, v) }
}

func isKind(v string) bool {
	_, ok := rules[Kind(v)]
	return ok
}

func isVerifierKey(v string) bool {
	_, err := parseVerifierKey(v)
	return err == nil
}

// parseVerifierKey parses a verifier key and refuses any spelling of it but one.
func parseVerifierKey(v string) (note.Verifier, error) {
	if len(v) > 512 || !isPrintable(v) {
		return nil, fmt.Errorf("%w verifier key", ErrMalformed)
	}
	k, err := note.NewVerifier(v)
	if err != nil {
		return nil, fmt.Errorf("%w verifier key: %w", ErrMalformed, err)
	}
	if again, err := respellVerifierKey(v); err != nil || again != v {
		return nil, fmt.Errorf("%w verifier key: not in canonical form", ErrMalformed)
	}
	return k, nil
}
