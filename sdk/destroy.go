package sdk

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

const (
	// requestTimeout bounds one attempt of a request that is repeated.
	requestTimeout = 30 * time.Second
	// An unavailable keyd is asked again after requestBackoff, doubled each
	// time up to requestBackoffMax, less up to half of it by chance.
	requestBackoff    = 100 * time.Millisecond
	requestBackoffMax = 5 * time.Second
)

// DestroyRequest says what to destroy.
type DestroyRequest struct {
	Tenant  string
	Subject string
	// Classes are those to destroy; nil for the whole person, which also
	// fences every class not used yet. Empty but not nil is refused, so that a
	// list that came out empty does not become a whole person.
	Classes []string
	// IfGeneration is the life to destroy; zero is the first.
	IfGeneration uint32
	// RequestID names the intent: 1 to 128 bytes. It must be the caller's, and
	// kept with whatever made the request, since only a repeat under the same
	// id is known for a repeat.
	RequestID string
	// Reason is a code of 1 to 64 bytes of [a-z0-9._-], never prose.
	Reason string
	// NotBefore is when to destroy; until then opens are refused and the
	// destruction can be cancelled. Zero: now.
	NotBefore time.Time
	// WaitForHolds lets the destruction wait while a legal hold binds, instead
	// of ErrHeld: opens are refused at once, it can be cancelled, and it is
	// carried out as soon as no hold binds.
	WaitForHolds bool
}

// Destruction is what DestroyKey achieved.
type Destruction struct {
	// Receipt is the signed evidence; see sdk/receipt. Keep it as it is.
	Receipt []byte
	// LedgerIndex is the destruction's place in the ledger.
	LedgerIndex uint64
	// DrainedBy is the instant after which no client that follows the
	// protocol can open the data.
	DrainedBy time.Time
	// Already says that all of it had been destroyed before; the receipt is
	// that of then.
	Already bool
	// Due, unless it is zero, is when the keys will be destroyed, or later if a
	// legal hold binds then: until it is done nothing is destroyed, and it can
	// be cancelled. DestroyKey with the same request tells what has become of it.
	Due time.Time
	// LivingGeneration, unless it is zero, is that of a later life: what this
	// request destroyed was reinstated since, and the receipt is about the life
	// before.
	LivingGeneration uint32
}

// DestroyKey destroys a subject's keys for good. This client stops using its
// own at once, whatever the answer. While keyd is unavailable the request is
// repeated, under the same id, until ctx ends; ErrUnavailable then says
// nothing about whether it was done, and the caller repeats it.
//
// ErrHeld means that a legal hold forbids it, ErrConflict that the subject is
// in another generation or the request id was used for something else.
func (c *Client) DestroyKey(ctx context.Context, r DestroyRequest) (*Destruction, error) {
	if err := validateIntent(r.Tenant, r.Subject, r.Classes, r.RequestID, r.Reason); err != nil {
		return nil, err
	}
	req := &keydv1.DestroyKeyRequest{
		Tenant:       r.Tenant,
		SubjectId:    []byte(r.Subject),
		Classes:      r.Classes,
		IfGeneration: r.IfGeneration,
		RequestId:    r.RequestID,
		Reason:       r.Reason,
		WaitForHolds: r.WaitForHolds,
	}
	if !r.NotBefore.IsZero() {
		req.NotBefore = timestamppb.New(r.NotBefore)
	}
	c.forget(r.Tenant, r.Subject)
	// Once more for what was leased between the two.
	defer c.forget(r.Tenant, r.Subject)
	resp, err := persist(ctx, c, func(ctx context.Context) (*keydv1.DestroyKeyResponse, error) {
		return c.erasure.DestroyKey(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	d := &Destruction{
		Receipt:     resp.GetReceipt(),
		LedgerIndex: resp.GetLedgerIndex(),
		Already:     resp.GetAlreadyDestroyed(),

		LivingGeneration: resp.GetLivingGeneration(),
	}
	if resp.GetDrainedBy() != nil {
		d.DrainedBy = resp.GetDrainedBy().AsTime()
	}
	if resp.GetDue() != nil {
		d.Due = resp.GetDue().AsTime()
	}
	return d, nil
}

// CancelRequest says which scheduled destructions to call off.
type CancelRequest struct {
	Tenant  string
	Subject string
	// DestroyRequestID is the request that scheduled it; empty: all that is
	// scheduled for the subject.
	DestroyRequestID string
	// RequestID and Reason are as in a DestroyRequest.
	RequestID string
	Reason    string
}

// Cancellation is what CancelDestruction achieved.
type Cancellation struct {
	Receipt     []byte
	LedgerIndex uint64
	// Repeat says that the request was answered before, and the receipt is that
	// of then. State is what has become since of that whose destruction was
	// called off: it may be scheduled again, or destroyed.
	Repeat bool
	State  keydv1.SubjectState
}

// CancelDestruction calls off what DestroyKey scheduled. It is ErrErased when
// it comes too late, and ErrUnknown when nothing is scheduled. It is repeated as
// DestroyKey is.
func (c *Client) CancelDestruction(ctx context.Context, r CancelRequest) (*Cancellation, error) {
	if err := validateIntent(r.Tenant, r.Subject, nil, r.RequestID, r.Reason); err != nil {
		return nil, err
	}
	if r.DestroyRequestID != "" {
		if err := ident.RequestID(r.DestroyRequestID); err != nil {
			return nil, fromIdent(err)
		}
	}
	req := &keydv1.CancelDestructionRequest{
		Tenant: r.Tenant, SubjectId: []byte(r.Subject), DestroyRequestId: r.DestroyRequestID,
		RequestId: r.RequestID, Reason: r.Reason,
	}
	resp, err := persist(ctx, c, func(ctx context.Context) (*keydv1.CancelDestructionResponse, error) {
		return c.erasure.CancelDestruction(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return &Cancellation{
		Receipt: resp.GetReceipt(), LedgerIndex: resp.GetLedgerIndex(), Repeat: resp.GetRepeat(), State: resp.GetState(),
	}, nil
}

// ReinstateRequest says whose next life to begin.
type ReinstateRequest struct {
	Tenant  string
	Subject string
	// Classes are as in a DestroyRequest.
	Classes []string
	// IfGeneration is the destroyed life that this follows; zero is the first.
	IfGeneration uint32
	// RequestID and Reason are as in a DestroyRequest.
	RequestID string
	Reason    string
}

// Reinstatement is what Reinstate achieved.
type Reinstatement struct {
	Receipt     []byte
	LedgerIndex uint64
	// Generation is the one that began.
	Generation uint32
	// Repeat says that the request was answered before, and the receipt is that
	// of then. State is what has become since of what was reinstated, and
	// LivingGeneration its newest generation that lives; zero: it is destroyed.
	Repeat           bool
	State            keydv1.SubjectState
	LivingGeneration uint32
}

// Reinstate begins the next life of a destroyed subject or class. What was
// destroyed stays destroyed. It is repeated as DestroyKey is.
func (c *Client) Reinstate(ctx context.Context, r ReinstateRequest) (*Reinstatement, error) {
	if err := validateIntent(r.Tenant, r.Subject, r.Classes, r.RequestID, r.Reason); err != nil {
		return nil, err
	}
	req := &keydv1.ReinstateRequest{
		Tenant:       r.Tenant,
		SubjectId:    []byte(r.Subject),
		Classes:      r.Classes,
		IfGeneration: r.IfGeneration,
		RequestId:    r.RequestID,
		Reason:       r.Reason,
	}
	resp, err := persist(ctx, c, func(ctx context.Context) (*keydv1.ReinstateResponse, error) {
		return c.erasure.Reinstate(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return &Reinstatement{
		Receipt:     resp.GetReceipt(),
		LedgerIndex: resp.GetLedgerIndex(),
		Generation:  resp.GetGeneration(),

		Repeat: resp.GetRepeat(), State: resp.GetState(), LivingGeneration: resp.GetLivingGeneration(),
	}, nil
}

// SubjectStatus is the state of a subject.
type SubjectStatus struct {
	// Handle is the subject's only name in keyd's store and in receipts.
	Handle [16]byte
	// State is that of the person as a whole; destroyed is the fence over all
	// classes.
	State      keydv1.SubjectState
	Generation uint32
	Classes    []ClassStatus
	// Holds are the ids of the legal holds that bind now, those on the tenant
	// included.
	Holds []string
	// LedgerIndexes are the ledger's entries about the subject, oldest first.
	LedgerIndexes []uint64
	// Scheduled are the destructions that are to come, soonest first.
	Scheduled []ScheduledDestruction
}

// ScheduledDestruction is one that is to come: when it is due, or when no hold
// binds any more if that is later.
type ScheduledDestruction struct {
	Due time.Time
	// Classes are nil for the whole person.
	Classes     []string
	LedgerIndex uint64
}

// ClassStatus is the state of one class of a subject.
type ClassStatus struct {
	Class      string
	State      keydv1.SubjectState
	Generation uint32
	// KeyID is the live key's, and zero when there is none.
	KeyID      envelope.KeyID
	DeadKeyIDs []envelope.KeyID
}

// Describe tells the state of a subject.
func (c *Client) Describe(ctx context.Context, tenant, subject string) (*SubjectStatus, error) {
	if err := ident.Tenant(tenant); err != nil {
		return nil, fromIdent(err)
	}
	if err := ident.Subject(subject); err != nil {
		return nil, fromIdent(err)
	}
	if c.ctx.Err() != nil {
		return nil, ErrClosed
	}
	resp, err := c.erasure.DescribeSubject(ctx, &keydv1.DescribeSubjectRequest{Tenant: tenant, SubjectId: []byte(subject)})
	if err != nil {
		return nil, err
	}
	s := &SubjectStatus{
		State:         resp.GetState(),
		Generation:    resp.GetGeneration(),
		Holds:         resp.GetHolds(),
		LedgerIndexes: resp.GetLedgerIndexes(),
	}
	if len(resp.GetHandle()) != len(s.Handle) {
		return nil, malformed("a handle of a wrong size")
	}
	s.Handle = [16]byte(resp.GetHandle())
	for _, d := range resp.GetScheduled() {
		s.Scheduled = append(s.Scheduled, ScheduledDestruction{Due: d.GetDue().AsTime(), Classes: d.GetClasses(), LedgerIndex: d.GetLedgerIndex()})
	}
	for _, cs := range resp.GetClasses() {
		class := ClassStatus{Class: cs.GetClass(), State: cs.GetState(), Generation: cs.GetGeneration()}
		if id := cs.GetKeyId(); len(id) == envelope.KeyIDSize {
			class.KeyID = envelope.KeyID(id)
		} else if len(id) != 0 {
			return nil, malformed("a key id of a wrong size")
		}
		for _, id := range cs.GetDeadKeyIds() {
			if len(id) != envelope.KeyIDSize {
				return nil, malformed("a key id of a wrong size")
			}
			class.DeadKeyIDs = append(class.DeadKeyIDs, envelope.KeyID(id))
		}
		s.Classes = append(s.Classes, class)
	}
	return s, nil
}

func validateIntent(tenant, subject string, classes []string, requestID, reason string) error {
	if err := ident.Tenant(tenant); err != nil {
		return fromIdent(err)
	}
	if err := ident.Subject(subject); err != nil {
		return fromIdent(err)
	}
	if classes != nil && len(classes) == 0 {
		return invalid("classes", "an empty list of classes; nil is the whole person")
	}
	for _, class := range classes {
		if err := ident.Class(class); err != nil {
			return fromIdent(err)
		}
	}
	if err := ident.RequestID(requestID); err != nil {
		return fromIdent(err)
	}
	return fromIdent(ident.Reason(reason))
}

// persist makes a call that may be repeated until it is answered with
// something other than unavailable, or ctx ends.
func persist[T any](ctx context.Context, c *Client, call func(context.Context) (T, error)) (T, error) {
	var none T
	open, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	// What keyd itself told last tells more than that the wait is over, or that
	// the attempt under way was cut off by it.
	last := new(Error)
	for delay := requestBackoff; ; delay = min(2*delay, requestBackoffMax) {
		attempt, cancel := context.WithTimeout(open, requestTimeout)
		resp, err := call(attempt)
		cancel()
		if e := (*Error)(nil); errors.As(err, &e) && (e.told || !last.told && (last.Message == "" || open.Err() == nil)) {
			last = e
		}
		switch {
		case err == nil:
			return resp, nil
		case c.ctx.Err() != nil:
			return none, ErrClosed
		case OutcomeOf(err) != keydv1.Outcome_OUTCOME_UNAVAILABLE:
			return none, err
		case sleep(open, c.clock, delay-rand.N(delay/2)):
			continue
		case c.ctx.Err() != nil:
			return none, ErrClosed
		}
		return none, &Error{
			Outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE,
			Message: last.Message, Metadata: last.Metadata, cause: ctx.Err(),
		}
	}
}
