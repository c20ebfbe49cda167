package sdk

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// Policy says how many of the subjects of a blob must live for it to open.
type Policy = envelope.Policy

const (
	// All: the blob is gone with the first of its subjects. It is for what is
	// as much each one's as the others', such as a checkpoint of a conversation.
	All = envelope.All
	// Any: the blob opens while one of its subjects lives, and tells who is
	// gone. It is for what can be made again without them, such as a memory
	// blended from several people. Until that is done, the survivors still read
	// what the erased have contributed.
	Any = envelope.Any
)

// MaxSubjects is how many subjects a Group can have.
const MaxSubjects = envelope.MaxRecipients

// Group says for which subjects something is sealed or opened, and as what.
//
// They are a set: order and repetition have no meaning. Whoever opens names
// the set, as he did who sealed:
//
//   - All: exactly the blob's subjects.
//   - Any: the blob's subjects or some of them, so that it opens also for one
//     who knows only the survivors. What has become of those not named is
//     reported, by key id and handle.
//   - A group of one seals and opens blobs of one subject, whatever its policy.
//
// Naming a single subject who is none of the blob's is ErrWrongSubject, whatever
// has become of the others.
type Group struct {
	// Tenant and Class are as in a Target, and are one for all.
	Tenant string
	Class  string
	// Subjects are 1 to MaxSubjects; each is as in a Target.
	Subjects []string
	// Policy is All or Any. To open it may be zero: whichever the blob has.
	Policy Policy
	// Context is as in a Target.
	Context envelope.Context
}

// Bind returns g with the bound context of these names and values, as
// Target.Bind does.
func (g Group) Bind(pairs ...envelope.Pair) (Group, error) {
	t, err := Target{}.Bind(pairs...)
	if err == nil {
		g.Context = t.Context
	}
	return g, err
}

// Report tells of the subjects of a blob that was opened for a Group, as they
// were when their keys were leased or, later, revoked: of one whose destruction
// was cancelled it may say OUTCOME_PENDING_ERASURE for a lease longer.
type Report struct {
	// Policy is the blob's: All, Any, or envelope.Single.
	Policy Policy
	// Recipients has every subject of the blob, those that the Group named
	// first and in its order.
	Recipients []Recipient
}

// Recipient is one subject of a blob.
type Recipient struct {
	// Index is the subject's in Group.Subjects (the first, if it is there more
	// than once), and -1 for one whom the Group did not name. Reports and errors
	// hold no ids.
	Index int
	// KeyID is the subject's in the blob, and Handle its name in receipts. They
	// are zero where not known: for a Group of one and while sealing there is no
	// handle.
	KeyID  envelope.KeyID
	Handle [16]byte
	// Outcome is OUTCOME_UNSPECIFIED while the subject's key lives. Otherwise it
	// is why the key cannot be had: OUTCOME_ERASED is for good,
	// OUTCOME_PENDING_ERASURE can still be cancelled.
	Outcome keydv1.Outcome
}

// Gone returns the recipients who were erased.
func (r *Report) Gone() []Recipient {
	return r.filter(func(o keydv1.Outcome) bool { return o == keydv1.Outcome_OUTCOME_ERASED })
}

// Intact reports whether every recipient's key lives. If not, what is derived
// from several people is to be made again, once it is known that those of Gone
// will not come back.
func (r *Report) Intact() bool {
	return len(r.filter(func(o keydv1.Outcome) bool { return o != keydv1.Outcome_OUTCOME_UNSPECIFIED })) == 0
}

func (r *Report) filter(keep func(keydv1.Outcome) bool) (some []Recipient) {
	for _, m := range r.Recipients {
		if keep(m.Outcome) {
			some = append(some, m)
		}
	}
	return some
}

// GroupError is the error of a call for a Group that some of its subjects stand
// in the way of. errors.Is matches it with the sentinel of its outcome: for All
// and for sealing the most final one among them; for Any, where no subject that
// was named is left, the least final one. ErrErased then means that all whom the
// caller named are erased; see Report.Recipients for those he did not name.
type GroupError struct {
	// Report tells of the recipients as far as they are known.
	Report
	err error
}

func (e *GroupError) Error() string {
	var at []string
	for _, m := range e.Recipients {
		if m.Index >= 0 && m.Outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
			at = append(at, fmt.Sprint(m.Index+1))
		}
	}
	if len(at) == 0 || len(e.Recipients) == 1 {
		return e.err.Error()
	}
	return fmt.Sprintf("%v (subject %s of those named)", e.err, strings.Join(at, ", "))
}

// Unwrap returns the error of the outcome.
func (e *GroupError) Unwrap() error { return e.err }

// set is a Group's subjects in ascending order, none twice.
type set struct {
	subjects []string
	index    []int // of each in Group.Subjects
	policy   Policy
}

func (g *Group) set() (*set, error) {
	t := Target{Tenant: g.Tenant, Class: g.Class}
	if len(g.Subjects) == 0 {
		return nil, invalid("subjects", "a group needs a subject")
	}
	order := make([]int, len(g.Subjects))
	for i := range order {
		order[i] = i
		t.Subject = g.Subjects[i]
		if err := t.validate(); err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(g.Subjects[a], g.Subjects[b]) })
	s := &set{policy: g.Policy}
	for _, i := range order {
		if n := len(s.subjects); n == 0 || s.subjects[n-1] != g.Subjects[i] {
			s.subjects = append(s.subjects, g.Subjects[i])
			s.index = append(s.index, i)
		}
	}
	if len(s.subjects) > MaxSubjects {
		return nil, invalid("subjects", fmt.Sprintf("a group has at most %d subjects", MaxSubjects))
	}
	return s, nil
}

// target is a Group of one.
func (g *Group) target(s *set) Target {
	return Target{Tenant: g.Tenant, Subject: s.subjects[0], Class: g.Class, Context: g.Context}
}

// report turns what is known of a lease's members into what g's caller is told.
func (s *set) report(policy Policy, members []member) Report {
	r := Report{Policy: policy, Recipients: make([]Recipient, len(members))}
	for i, m := range members {
		index := -1
		if m.place >= 0 {
			index = s.index[m.place]
		}
		r.Recipients[i] = Recipient{Index: index, KeyID: m.id, Handle: m.handle, Outcome: m.outcome}
	}
	slices.SortStableFunc(r.Recipients, func(a, b Recipient) int {
		return cmp.Compare(uint(a.Index), uint(b.Index)) // -1 last
	})
	return r
}

// told turns the error of a lease into that of a call for s.
func (s *set) told(err error) error {
	if s == nil {
		return err
	}
	switch e := err.(type) {
	case *setError:
		return &GroupError{Report: s.report(s.policy, e.members), err: e.err}
	case *Error:
		if len(s.subjects) == 1 && slices.Contains(ending, e.Outcome) {
			return &GroupError{Report: s.report(envelope.Single, []member{{outcome: e.Outcome}}), err: e}
		}
	}
	return err
}

// sealKey returns what to ask keyd for to seal for g, which is not of one.
func (g *Group) sealKey(s *set) leaseKey {
	return leaseKey{
		tenant: g.Tenant, class: g.Class, subject: encodeSet(s.subjects, nil),
		purpose: keydv1.Purpose_PURPOSE_SEAL, policy: g.Policy,
	}
}

// openKey returns what to ask keyd for to open a blob of this header for g.
func (g *Group) openKey(s *set, h *envelope.Header, form envelope.Form) (leaseKey, error) {
	if h.Form != form {
		return leaseKey{}, wrongForm(form)
	}
	wrong := func(message, field string) error {
		return &Error{
			Outcome: keydv1.Outcome_OUTCOME_WRONG_SUBJECT, Message: message,
			Metadata: map[string]string{"field": field},
		}
	}
	switch {
	case g.Policy != 0 && g.Policy != h.Policy && h.Policy != envelope.Single:
		return leaseKey{}, wrong("the blob is of the other policy", "policy")
	case len(s.subjects) > len(h.Recipients):
		return leaseKey{}, wrong("more subjects are named than the blob has", "subjects")
	case h.Policy == All && len(s.subjects) < len(h.Recipients):
		return leaseKey{}, wrong("the blob has more subjects than are named", "subjects")
	}
	s.policy = h.Policy
	if h.Policy == envelope.Single {
		t := g.target(s)
		return openKey(&t, h, form)
	}
	return leaseKey{
		tenant: g.Tenant, class: g.Class, subject: encodeSet(s.subjects, h.Recipients),
		purpose: keydv1.Purpose_PURPOSE_OPEN, policy: h.Policy,
		classNumber: h.Class, bucket: h.Bucket,
	}, nil
}

// sealable checks g for sealing.
func (g *Group) sealable() (*set, error) {
	if g.Policy != All && g.Policy != Any {
		return nil, invalid("policy", "to seal, say All or Any")
	}
	return g.set()
}

// SealGroup seals plaintext for all subjects of g and returns the blob. If one
// of them was erased it fails, and the error, a *GroupError, names who.
func (c *Client) SealGroup(ctx context.Context, g Group, plaintext []byte) ([]byte, error) {
	s, err := g.sealable()
	if err != nil {
		return nil, err
	}
	if len(s.subjects) == 1 {
		blob, err := c.Seal(ctx, g.target(s), plaintext)
		return blob, s.told(err)
	}
	if len(plaintext) > envelope.MaxPlaintext {
		return nil, tooLarge()
	}
	k := g.sealKey(s)
	for range maxAttempts {
		l, err := c.find(ctx, &k)
		if err != nil {
			return nil, s.told(err)
		}
		blob, err := l.sealer.Append(nil, plaintext, g.Context)
		over := err != nil && l.isOver(err)
		c.finish(l)
		if !over {
			return blob, s.told(err)
		}
	}
	return nil, errTooShort()
}

// OpenGroup opens a blob that was sealed for g's subjects and returns the
// plaintext, and a report of who among them is gone. When it does not open
// because of its subjects, the error is a *GroupError that names them.
func (c *Client) OpenGroup(ctx context.Context, g Group, blob []byte) ([]byte, *Report, error) {
	s, err := g.set()
	if err != nil {
		return nil, nil, err
	}
	h, _, err := envelope.ParseHeader(blob)
	if err != nil {
		return nil, nil, err
	}
	k, err := g.openKey(s, h, envelope.OneShot)
	if err != nil {
		return nil, nil, err
	}
	for range maxAttempts {
		l, err := c.find(ctx, &k)
		if err != nil {
			return nil, nil, s.told(err)
		}
		plaintext, err := l.opener.Append(nil, blob, g.Context)
		over := err != nil && l.isOver(err)
		report := s.of(l)
		c.finish(l)
		if over {
			continue
		}
		if err != nil {
			return nil, nil, s.told(err)
		}
		return plaintext, report, nil
	}
	return nil, nil, errTooShort()
}

// of reports on the recipients of a lease's key or keys.
func (s *set) of(l *lease) *Report {
	members := []member{{id: l.id}}
	if known := l.members.Load(); known != nil {
		members = *known
	}
	r := s.report(s.policy, members)
	return &r
}

// find is obtain for those who have not looked at the table.
func (c *Client) find(ctx context.Context, k *leaseKey) (*lease, error) {
	if l := c.table.get(k); l != nil && l.checkSeal() == nil {
		l.markFound()
		return l, nil
	}
	return c.obtain(ctx, k)
}

// SealGroupWriter is SealWriter for the subjects of g. The Writer fails at its
// next turn when one of them is erased.
func (c *Client) SealGroupWriter(ctx context.Context, g Group, w io.Writer) (*Writer, error) {
	s, err := g.sealable()
	if err != nil {
		return nil, err
	}
	if len(s.subjects) == 1 {
		k := leaseKey{tenant: g.Tenant, subject: s.subjects[0], class: g.Class, purpose: keydv1.Purpose_PURPOSE_SEAL}
		return c.sealWriter(ctx, &k, s, g.Context, w)
	}
	k := g.sealKey(s)
	return c.sealWriter(ctx, &k, s, g.Context, w)
}

// sealWriter begins a stream under what k asks for, for s or, if that is nil,
// for a Target.
func (c *Client) sealWriter(ctx context.Context, k *leaseKey, s *set, bound envelope.Context, w io.Writer) (*Writer, error) {
	h, err := c.hold(ctx, k)
	if err != nil {
		return nil, s.told(err)
	}
	h.set = s
	ew, err := h.lease.sealer.NewWriter(ctx, w, bound, envelope.StreamOptions{})
	if err != nil {
		h.release()
		return nil, h.err(err)
	}
	return &Writer{held: held{client: c, lease: h.lease, set: s}, w: ew}, nil
}

// OpenGroupReader is OpenReader for the subjects of g. A Reader of the policy
// All fails at its next turn when one of them is erased; one of Any goes on
// while one whom g names lives, and its Report says who does not.
func (c *Client) OpenGroupReader(ctx context.Context, g Group, r io.Reader) (*Reader, error) {
	s, err := g.set()
	if err != nil {
		return nil, err
	}
	h, err := envelope.ReadHeader(r)
	if err != nil {
		return nil, err
	}
	hold, err := c.holdGroup(ctx, &g, s, h)
	if err != nil {
		return nil, err
	}
	er, err := hold.lease.opener.NewReaderAfter(ctx, h, r, g.Context, envelope.StreamOptions{})
	if err != nil {
		hold.release()
		return nil, hold.err(err)
	}
	return &Reader{held: held{client: c, lease: hold.lease, set: s}, r: er}, nil
}

// OpenGroupReaderAt is OpenReaderAt for the subjects of g.
func (c *Client) OpenGroupReaderAt(ctx context.Context, g Group, r io.ReaderAt, size int64) (*ReaderAt, error) {
	s, err := g.set()
	if err != nil {
		return nil, err
	}
	h, err := envelope.ReadHeader(io.NewSectionReader(r, 0, size))
	if err != nil {
		return nil, err
	}
	hold, err := c.holdGroup(ctx, &g, s, h)
	if err != nil {
		return nil, err
	}
	er, err := hold.lease.opener.NewReaderAt(r, size, g.Context)
	if err != nil {
		hold.release()
		return nil, hold.err(err)
	}
	return &ReaderAt{held: held{client: c, lease: hold.lease, set: s}, r: er}, nil
}

func (c *Client) holdGroup(ctx context.Context, g *Group, s *set, h *envelope.Header) (*held, error) {
	k, err := g.openKey(s, h, envelope.Stream)
	if err != nil {
		return nil, err
	}
	hold, err := c.hold(ctx, &k)
	if err != nil {
		return nil, s.told(err)
	}
	hold.set = s
	return hold, nil
}

// Report tells of the recipients of a stream that was opened for a Group, as
// far as it is known now. For one opened for a Target it is nil.
func (r *Reader) Report() *Report { return r.held.report() }

// Report tells of the recipients of a stream that was opened for a Group, as
// far as it is known now. For one opened for a Target it is nil.
func (r *ReaderAt) Report() *Report { return r.held.report() }

func (s *held) report() *Report {
	if s.set == nil {
		return nil
	}
	return s.set.of(s.lease)
}
