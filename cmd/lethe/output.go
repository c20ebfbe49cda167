package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// print writes the result of a command: v as JSON, or what text writes.
func (a *app) print(v any, text func(w io.Writer)) error {
	return a.printTo(a.out, v, text)
}

func (a *app) printTo(w io.Writer, v any, text func(w io.Writer)) error {
	var b bytes.Buffer
	if a.json {
		if err := encodeJSON(&b, v); err != nil {
			return err
		}
	} else {
		text(&b)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// printUnlessUndone prints the result of a request under a headline. What says
// that a repeated request's effect does not hold any more makes it a CONFLICT:
// nobody is to go on as if it did.
func (a *app) printUnlessUndone(v any, headline, undone string, text func(w io.Writer)) error {
	if undone != "" {
		headline += "; " + undone
	}
	err := a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, headline)
		text(w)
	})
	if err == nil && undone != "" {
		err = fmt.Errorf("%w: %s", sdk.ErrConflict, headline)
	}
	return err
}

// encodeJSON writes v on one line.
func encodeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// failure is an error as --json shows it.
type failure struct {
	Error failureBody `json:"error"`
}

type failureBody struct {
	Outcome  string            `json:"outcome"`
	ExitCode int               `json:"exit_code"`
	Message  string            `json:"message"`
	Metadata map[string]string `json:"metadata"`
}

// metadataError adds to what an error tells programs.
type metadataError struct {
	error
	metadata map[string]string
}

func (e *metadataError) Unwrap() error { return e.error }

// with returns err with one more entry of metadata.
func with(err error, key, value string) error {
	if err == nil {
		return nil
	}
	return &metadataError{err, map[string]string{key: value}}
}

// metadataOf gathers what an error tells beside its outcome.
func metadataOf(err error) map[string]string {
	all := map[string]string{}
	var fromKeyd *sdk.Error
	var fromIdent *ident.Error
	switch {
	case errors.As(err, &fromKeyd):
		for k, v := range fromKeyd.Metadata {
			all[k] = v
		}
	case errors.As(err, &fromIdent):
		all["field"] = fromIdent.Field
	}
	for own := (*metadataError)(nil); errors.As(err, &own); err = own.error {
		for k, v := range own.metadata {
			all[k] = v
		}
	}
	return all
}

// fail tells why the command failed.
func (a *app) fail(err error, command string) {
	e := exitOf(err)
	message := a.word(err, e)
	if a.json {
		_ = encodeJSON(a.err, failure{failureBody{e.name, e.code, message, metadataOf(err)}})
		return
	}
	if e.code == exitBrokenPipe {
		return // as is the custom in pipelines
	}
	var b strings.Builder
	fmt.Fprintf(&b, "lethe: %s\n", message)
	for _, key := range []string{"hold", "generation"} {
		if v := metadataOf(err)[key]; v != "" {
			fmt.Fprintf(&b, "  %s: %s\n", key, v)
		}
	}
	switch {
	case e.outcome == keydv1.Outcome_OUTCOME_HELD && command == "lethe destroy":
		b.WriteString("  'lethe hold release' ends the hold; with --wait-for-holds the destruction waits for that\n")
	case e.code == exitUnavailable && metadataOf(err)["request_id"] != "":
		fmt.Fprintf(&b, "  repeat with --request-id %s\n", printable(metadataOf(err)["request_id"]))
	}
	var usage *usageError
	if errors.As(err, &usage) && command != "" {
		fmt.Fprintf(&b, "See '%s --help'.\n", command)
	}
	_, _ = io.WriteString(a.err, b.String())
}

// word says why the command failed.
func (a *app) word(err error, e exit) string {
	message := strings.TrimPrefix(err.Error(), "envelope: ") // a package's name, which tells users nothing
	if e.code != exitUnavailable {
		return message
	}
	// gRPC's words for a connection that was not made.
	_, why, noAnswer := strings.Cut(message, "Error while dialing: ")
	if !noAnswer {
		return message + a.brokenHint(message)
	}
	why = strings.TrimRight(why[strings.LastIndex(why, ": ")+1:], `"`)
	return fmt.Sprintf("unavailable: no keyd answers at %s (%s); is it running? --keyd or LETHE_KEYD names another", a.keyd, strings.TrimSpace(why))
}

// brokenHint says what may be behind a connection that keyd ended before it
// answered: a refused certificate shows as that as often as by its own alert.
func (a *app) brokenHint(message string) string {
	for _, broken := range []string{"error reading server preface", "broken pipe", "connection reset", "tls: "} {
		switch {
		case !strings.Contains(message, broken):
		case a.tls.Given():
			return "; does keyd accept the certificate? Its log says why not"
		default:
			return "; does keyd want a certificate? --tls-ca, --tls-cert, --tls-key"
		}
	}
	return ""
}

// note tells a person something beside the result.
func (a *app) note(format string, args ...any) {
	if !a.json {
		fmt.Fprintf(a.err, format+"\n", args...)
	}
}

// warn is note for what must not be missed: with --json too, on a line of its own.
func (a *app) warn(text string) {
	if a.json {
		_ = encodeJSON(a.err, map[string]string{"warning": text})
		return
	}
	fmt.Fprintln(a.err, "warning: "+text)
}

// table writes rows in columns; the first is the heading.
func table(w io.Writer, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	t.Flush()
}

// facts writes labels and values in two columns, leaving out empty values.
func facts(w io.Writer, pairs ...string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			fmt.Fprintf(w, "%-14s%s\n", pairs[i]+":", pairs[i+1])
		}
	}
}

// instant is a time as it is printed: RFC 3339, in UTC.
func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// printable is what somebody chose, such as a request id, as a terminal may be
// given it.
func printable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// orDash makes an empty cell visible.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// outputFlags say where a command's data goes.
type outputFlags struct {
	file  string
	force bool
}

func (o *outputFlags) add(c *cobra.Command) {
	c.Flags().StringVarP(&o.file, "output", "o", "", "file to write (default: the standard output)")
	c.Flags().BoolVar(&o.force, "force", false, "replace the output file if it exists")
}

// toStdout reports whether the data goes to the standard output.
func (o *outputFlags) toStdout() bool { return o.file == "" || o.file == "-" }

// sink is what data is written to: a file that is complete or not there at
// all, or the standard output, which takes what comes.
type sink struct {
	io.Writer
	commit  func() error
	discard func()
}

func (o *outputFlags) create(a *app, perm fs.FileMode) (*sink, error) {
	if o.toStdout() {
		return &sink{a.out, func() error { return nil }, func() {}}, nil
	}
	f, err := a.files.create(o.file, perm, o.force)
	if errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("%w; --force replaces it", err)
	}
	if err != nil {
		return nil, err
	}
	return &sink{f, f.commit, f.discard}, nil
}

// deliver writes a small piece of data to out and reports v. On the standard
// output there is one or the other: v, which holds the data, with --json, and
// otherwise the data.
func (a *app) deliver(o *outputFlags, out *sink, data []byte, v any) error {
	if o.toStdout() {
		return a.print(v, func(w io.Writer) { _, _ = w.Write(data) })
	}
	if _, err := out.Write(data); err != nil {
		return err
	}
	if err := out.commit(); err != nil {
		return err
	}
	return a.print(v, func(io.Writer) {})
}
