package receipt

import (
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"
)

// String is what Describe writes.
func (v *Verified) String() string {
	var b strings.Builder
	_ = v.Describe(&b) // a strings.Builder never fails
	return b.String()
}

// Describe writes in plain words, line by line, what the receipt says, and what
// it does not. It does not look at a clock: whether a stated instant has passed
// is for the reader to see. The text is for people; programs read the fields.
func (v *Verified) Describe(w io.Writer) error {
	p := &printer{w: w}
	p.line("ledger", "%s", v.Origin)
	for _, e := range v.Entries {
		p.entry(e)
	}
	switch v.Entries[0].Statement.Kind {
	case Destroyed, Scheduled, Expired:
		p.stages(v.Stages())
	}
	p.evidence(v)
	return p.err
}

type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(label, format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, "%-12s %s\n", label+":", fmt.Sprintf(format, args...))
	}
}

// given prints a line for a string that is there.
func (p *printer) given(label, v string) {
	if v != "" {
		p.line("  "+label, "%s", v)
	}
}

func (p *printer) givenTime(label string, t time.Time) {
	if !t.IsZero() {
		p.given(label, stamp(t))
	}
}

func stamp(t time.Time) string { return t.UTC().Format(timeLayout) }

func (p *printer) entry(e VerifiedEntry) {
	s := e.Statement
	p.line("entry", "%d, %s, stated at %s", e.Index, s.Kind, stamp(s.Time))
	if s.Of != nil {
		p.line("  about", "entry %d", *s.Of)
	}
	p.given("tenant", s.Tenant)
	switch s.Scope {
	case ScopePerson:
		p.given("scope", "the whole person")
	case ScopeClasses:
		p.given("scope", "the classes below, of one person")
	case ScopeTenant:
		p.given("scope", "the whole tenant")
	}
	p.given("handle", hex.EncodeToString(s.Handle))
	if s.Generation != 0 {
		p.line("  generation", "%d", s.Generation)
	}
	for _, c := range s.Classes {
		p.line("  class", "%s (number %d)", c.Name, c.Number)
	}
	if s.Kind == Expired {
		p.line("  bucket", "from %s to %s", stamp(time.Unix(s.BucketStartS, 0)), stamp(time.Unix(s.BucketEndS, 0)))
	}
	switch s.Existed {
	case ExistedNo:
		p.given("keys", "none existed; none can be made until a reinstatement")
	case ExistedUnknown:
		p.given("keys", "none known; one may have been lost when the key store was restored; none can be made until a reinstatement")
	case ExistedYes:
		switch {
		case s.Scope == ScopeTenant:
			p.given("keys", "all of the tenant's destroyed")
		case len(s.DeadKeys) == 0:
			p.given("keys", "none was left to destroy: they had been destroyed before")
		default:
			p.line("  keys", "%d destroyed", len(s.DeadKeys))
		}
	}
	for _, k := range s.DeadKeys {
		p.line("  dead key", "%x of class number %d, generation %d", k.KeyID, k.ClassNumber, k.Generation)
	}
	p.given("reason", s.Reason)
	p.given("principal", s.Principal)
	if len(s.Request) > 0 {
		p.line("request", "%x, a keyed hash of its id", s.Request)
	}
	p.given("hold", s.Hold)
	switch {
	case s.Kind == HoldPlaced && s.HoldEnd.IsZero():
		p.given("hold ends", "when it is released")
	default:
		p.givenTime("hold ends", s.HoldEnd)
	}
	if s.Kind == ClassSet {
		p.line("  bucket", "%d s wide", s.BucketWidthS)
		p.line("  lease", "%d ms", s.LeaseMS)
		if s.RetentionS == 0 {
			p.given("retention", "none: for ever")
		} else {
			p.line("  retention", "%d s", s.RetentionS)
		}
	}
	if s.Root != "" || s.Kind == Sanitised || strings.HasPrefix(string(s.Kind), "epoch-") {
		p.line("  epoch", "%d", s.Epoch)
	}
	p.given("root", s.Root)
	p.given("kms", s.KMS)
	p.givenTime("planned end", s.PlannedEnd)
	if s.Kind != Scheduled {
		p.givenTime("due", s.Due)
	}
	p.given("next key", s.VerifierKey)
}

// stages says of each stage what is stated and what is not.
func (p *printer) stages(st Stages) {
	if !st.Cancelled.IsZero() {
		p.line("cancelled", "at %s: nothing was destroyed", stamp(st.Cancelled))
		return
	}
	if st.Destroyed.IsZero() {
		p.line("denied", "since %s: nobody is given these keys, unless it was cancelled since, which this receipt cannot show", stamp(st.Denied))
		p.line("destroyed", "not stated; due at %s, or when no legal hold binds any more; can be cancelled until it is done", stamp(st.Due))
	} else {
		p.line("denied", "since %s: nobody is given these keys", stamp(st.Denied))
		p.line("destroyed", "at %s", stamp(st.Destroyed))
	}
	if st.ButHeld {
		p.line("but held", "none of this is about the keys of subjects whom a legal hold covered at that time: they live on under the hold, and this receipt does not say whether there are any")
	}
	switch {
	case st.DrainedBy.IsZero():
		p.line("drained", "not stated")
	case st.Destroyed.IsZero():
		p.line("drained", "not stated: unless it was cancelled since, no client that follows the protocol can open the data after %s", stamp(st.DrainedBy))
	default:
		p.line("drained", "by %s: no client that follows the protocol can open the data after that; "+
			"one that keeps a key against the rules can", stamp(st.DrainedBy))
	}
	if st.Sanitised.IsZero() {
		p.line("sanitised", "not stated: bytes of the wrapped keys may still lie in the key store")
	} else {
		p.line("sanitised", "at %s: the key store holds no bytes of the wrapped keys", stamp(st.Sanitised))
	}
	switch {
	case !st.Final.IsZero():
		p.line("final", "at %s, on the basis %s: no older copy of the key store brings the keys back%s", stamp(st.Final), st.FinalBasis, beyond(st.FinalBasis))
	case !st.RootKept.IsZero():
		p.line("final", "no: at %s the destruction of the root was called off, and what was planned does not hold; an older copy "+
			"of the key store, with the root that wrapped it, could bring the keys back", stamp(st.RootKept))
	case !st.RootDue.IsZero():
		p.line("final", "not stated yet: the root is to be destroyed at %s, on the basis %s; until then an older copy of the key store, "+
			"with that root, could bring the keys back", stamp(st.RootDue), st.FinalBasis)
	case !st.FinalBy.IsZero():
		p.line("final", "not stated yet: planned by %s, on the basis %s; until then an older copy of the key store, "+
			"with the root that wrapped it, could bring the keys back", stamp(st.FinalBy), st.FinalBasis)
	default:
		p.line("final", "not stated, and no date is given: an older copy of the key store, with the root that wrapped it, "+
			"could bring the keys back")
	}
}

func (p *printer) evidence(v *Verified) {
	for _, e := range v.Entries {
		p.line("checkpoint", "of %d entries, signed by %s", e.Checkpoint.Size, strings.Join(e.SignedBy, " and "))
	}
	p.line("witnesses", "none: operator-asserted; nobody else has seen this ledger's head")
	anchor := ""
	for _, e := range v.Entries {
		if e.Statement.Anchor != "" {
			anchor = e.Statement.Anchor
		}
	}
	if anchor == "" {
		p.line("anchor", "not stated")
	} else {
		p.line("anchor", "%s", anchor)
	}
	p.line("proves", "that these statements were logged; not that no copy of the data or of a key exists elsewhere")
}

// beyond says what the destruction of a root does not reach.
func beyond(basis string) string {
	switch basis {
	case "local-root-file":
		return ", unless somebody kept a copy of the roots file too"
	case "pkcs11-token":
		return ", unless somebody kept a backup of the token too"
	}
	return ""
}
