package sdk

import (
	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// Target says whose data is sealed or opened, and as what.
type Target struct {
	// Tenant is 1 to 128 bytes of [a-z0-9._-].
	Tenant string
	// Subject is 1 to 1024 bytes of valid UTF-8 without NUL, taken byte for
	// byte: "12" and "12 " are two subjects.
	Subject string
	// Class is 1 to 64 bytes of [a-z0-9._-].
	Class string
	// Context, if not zero, is bound to the blob: Open asks for the same. It
	// ties a blob to its place, such as a row key, so that it does not open
	// elsewhere. See Bind.
	Context envelope.Context
}

// Bind returns t with the bound context of these names and values, which
// replaces the one that t had. A context that the format does not allow (see
// envelope.NewContext) is ErrInvalidArgument.
func (t Target) Bind(pairs ...envelope.Pair) (Target, error) {
	bound, err := envelope.NewContext(pairs...)
	if err != nil {
		return t, &Error{
			Outcome:  keydv1.Outcome_OUTCOME_INVALID_ARGUMENT,
			Message:  "the bound context has too many pairs, a name twice, or a name or value of a wrong size",
			Metadata: map[string]string{"field": "context"},
			cause:    err,
		}
	}
	t.Context = bound
	return t, nil
}

func (t *Target) validate() error {
	if err := ident.Tenant(t.Tenant); err != nil {
		return fromIdent(err)
	}
	if err := ident.Subject(t.Subject); err != nil {
		return fromIdent(err)
	}
	return fromIdent(ident.Class(t.Class))
}
