package main

import (
	"bytes"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lethe/proto/ident"
	"lethe/sdk/envelope"
)

// Text about the flags below, for the commands that have them.
const subjectHelp = `
Whose data it is, is said by --subject or, so that the id stands neither in the
list of processes nor in the shell's history, by --subject-file: the file holds
the id and nothing else. It is taken byte for byte; one line feed at its end is
not part of it.`

// subjectFlags say whose data it is.
type subjectFlags struct {
	tenant string
	id     string
	file   string
	flags  *pflag.FlagSet
}

func (s *subjectFlags) add(a *app, c *cobra.Command) {
	s.flags = c.Flags()
	a.addTenantFlag(c, &s.tenant)
	s.flags.Var(&onceValue{value: &s.id}, "subject", "the subject's id")
	s.flags.Var(&onceValue{value: &s.file}, "subject-file", "file with the subject's id; -: the standard input")
	c.MarkFlagsMutuallyExclusive("subject", "subject-file")
}

// given reports whether a subject was named; one that is named with an empty
// id counts, and is refused later.
func (s *subjectFlags) given() bool {
	return s.flags.Changed("subject") || s.flags.Changed("subject-file")
}

// read returns the subject's id, once it and the tenant's were found valid.
func (s *subjectFlags) read(a *app) (string, error) {
	if err := ident.Tenant(s.tenant); err != nil {
		return "", err
	}
	id := s.id
	if s.flags.Changed("subject-file") {
		var err error
		if id, err = a.readSubject(s.file); err != nil {
			return "", err
		}
	}
	return id, ident.Subject(id)
}

// fromStdin reports whether the id is read from the standard input.
func (s *subjectFlags) fromStdin() bool { return s.file == "-" }

// subjectsFlags say whose data it is, when it may be several people's.
type subjectsFlags struct {
	tenant string
	ids    []string
	files  []string
}

func (s *subjectsFlags) add(a *app, c *cobra.Command) {
	a.addTenantFlag(c, &s.tenant)
	c.Flags().StringArrayVar(&s.ids, "subject", nil, "the subject's id; given again for each of several")
	c.Flags().StringArrayVar(&s.files, "subject-file", nil, "file with the subject's id; -: the standard input; given again for each of several")
	c.MarkFlagsMutuallyExclusive("subject", "subject-file")
	c.MarkFlagsOneRequired("subject", "subject-file")
}

// read returns the subjects' ids, once they and the tenant's were found valid.
func (s *subjectsFlags) read(a *app) ([]string, error) {
	if err := ident.Tenant(s.tenant); err != nil {
		return nil, err
	}
	ids := slices.Clone(s.ids)
	for _, file := range s.files {
		id, err := a.readSubject(file)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		if err := ident.Subject(id); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// fromStdin reports whether an id is read from the standard input.
func (s *subjectsFlags) fromStdin() bool { return slices.Contains(s.files, "-") }

// readSubject reads the id that a file holds.
func (a *app) readSubject(file string) (string, error) {
	b, err := a.readSmall(file, ident.MaxSubject+1)
	b = bytes.TrimSuffix(b, []byte("\n"))
	if last, _ := utf8.DecodeLastRune(b); unicode.IsSpace(last) || bytes.HasPrefix(b, []byte("\ufeff")) {
		a.warn("the id in the file ends in white space, such as a carriage return, or begins with a byte order mark; it is taken byte for byte, with that")
	}
	return string(b), err
}

func (a *app) addTenantFlag(c *cobra.Command, tenant *string) {
	c.Flags().StringVar(tenant, "tenant", "", "the tenant")
	_ = c.MarkFlagRequired("tenant")
	_ = c.RegisterFlagCompletionFunc("tenant", a.completeTenants)
}

func (a *app) addClassFlag(c *cobra.Command, class *string) {
	c.Flags().StringVar(class, "class", "", "the class of the data")
	_ = c.MarkFlagRequired("class")
	_ = c.RegisterFlagCompletionFunc("class", a.completeClasses)
}

// parseContext reads pairs of the form name=value.
func parseContext(pairs []string) (envelope.Context, error) {
	var all []envelope.Pair
	for _, p := range pairs {
		name, value, ok := strings.Cut(p, "=")
		if !ok {
			return envelope.Context{}, usagef("--context: want name=value")
		}
		all = append(all, envelope.Pair{Name: name, Value: value})
	}
	bound, err := envelope.NewContext(all...)
	if err != nil {
		return bound, usagef("--context: at most %d pairs, no name twice, names of 1 to %d bytes, values of at most %d",
			envelope.MaxContextPairs, envelope.MaxContextName, envelope.MaxContextValue)
	}
	return bound, nil
}

// requestIDFlag names an intent, so that its repetition is known for one.
type requestIDFlag struct{ id string }

func (r *requestIDFlag) add(c *cobra.Command) {
	c.Flags().StringVar(&r.id, "request-id", "", "the request's id; give it again to repeat the request (default: a new one)")
	_ = c.RegisterFlagCompletionFunc("request-id", cobra.NoFileCompletions)
}

// settle makes an id if none was given, and tells it before anything is done
// under it, so that whatever happens the request can be repeated. It comes after
// everything that can be found wrong without keyd.
func (r *requestIDFlag) settle(a *app, c *cobra.Command) error {
	if c.Flags().Changed("request-id") {
		return ident.RequestID(r.id)
	}
	r.id = "cli-" + strings.ToLower(rand.Text())
	if !a.json {
		a.note("request id: %s", r.id)
		return nil
	}
	return encodeJSON(a.err, struct {
		RequestID string `json:"request_id"`
	}{r.id})
}

// requestFlags name an intent, and why there is one.
type requestFlags struct {
	requestIDFlag
	reason string
}

func (r *requestFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&r.reason, "reason", "", "a code of [a-z0-9._-], such as gdpr-art17; it is kept in the ledger")
	_ = c.MarkFlagRequired("reason")
	_ = c.RegisterFlagCompletionFunc("reason", cobra.NoFileCompletions)
	r.requestIDFlag.add(c)
}

func (r *requestFlags) settle(a *app, c *cobra.Command) error {
	if err := ident.Reason(r.reason); err != nil {
		return err
	}
	return r.requestIDFlag.settle(a, c)
}

// checkClasses finds a class that cannot be, the empty one above all.
func checkClasses(classes []string) error {
	for _, c := range classes {
		if err := ident.Class(c); err != nil {
			return err
		}
	}
	return nil
}

// onceValue is the value of a flag that may be given once: of two people, one
// would be forgotten in silence.
type onceValue struct {
	value *string
	given bool
}

func (v *onceValue) Set(s string) error {
	if v.given {
		return errors.New("is given twice")
	}
	*v.value, v.given = s, true
	return nil
}

func (v *onceValue) String() string {
	if v.value == nil {
		return ""
	}
	return *v.value
}

func (v *onceValue) Type() string { return "string" }
