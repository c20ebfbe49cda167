package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// streamFrom is the size from which on data is sealed as a stream: what is
// smaller takes that much memory and gets the smallest blob, what is larger
// takes bounded memory.
const streamFrom = 1<<20 + 1

// dataFlags are those that seal and open share.
type dataFlags struct {
	subjects subjectsFlags
	class    string
	context  []string
	output   outputFlags
}

func (d *dataFlags) add(a *app, c *cobra.Command) {
	d.subjects.add(a, c)
	a.addClassFlag(c, &d.class)
	f := c.Flags()
	f.StringArrayVar(&d.context, "context", nil, "bound context, name=value; may be given several times")
	d.output.add(c)
	_ = c.RegisterFlagCompletionFunc("context", cobra.NoFileCompletions)
}

// group reads and checks what the flags say.
func (d *dataFlags) group(a *app, args []string) (sdk.Group, error) {
	if d.subjects.fromStdin() && (len(args) == 0 || args[0] == "-") {
		return sdk.Group{}, usagef("the standard input cannot be both the subject's id and the data: name a FILE")
	}
	bound, err := parseContext(d.context)
	if err != nil {
		return sdk.Group{}, err
	}
	if err := ident.Class(d.class); err != nil {
		return sdk.Group{}, err
	}
	ids, err := d.subjects.read(a)
	return sdk.Group{Tenant: d.subjects.tenant, Subjects: ids, Class: d.class, Context: bound}, err
}

// report prints what was done as JSON, and for people nothing: on the standard
// output, or beside it if the data went there.
func (d *dataFlags) report(a *app, v any) error {
	w := a.out
	if d.output.toStdout() {
		w = a.err
	}
	return a.printTo(w, v, func(io.Writer) {})
}

// dataResult is what seal and open report.
type dataResult struct {
	Tenant         string     `json:"tenant"`
	Class          string     `json:"class"`
	Form           string     `json:"form"`
	Policy         string     `json:"policy"`
	KeyID          string     `json:"key_id"`            // empty: there are several
	KeyIDs         []string   `json:"key_ids,omitempty"` // if there are several
	ClassNumber    uint16     `json:"class_number"`
	Bucket         *time.Time `json:"bucket"`
	ContextBound   bool       `json:"context_bound"`
	BlobBytes      int64      `json:"blob_bytes,string"`
	PlaintextBytes int64      `json:"plaintext_bytes,string"`
	Output         string     `json:"output"`
	// Of an opened blob for several.
	Recipients []recipientResult `json:"recipients,omitempty"`
}

// recipientResult is what has become of one of several whom a blob is for.
type recipientResult struct {
	// Named is which of the subjects named it is, counted from 1; null: none.
	Named   *int   `json:"named"`
	KeyID   string `json:"key_id"`
	Handle  string `json:"handle"`
	Outcome string `json:"outcome"` // "OK" while the key lives
}

func recipientResults(r *sdk.Report) (all []recipientResult) {
	if r == nil || r.Policy == envelope.Single {
		return nil
	}
	for _, m := range r.Recipients {
		v := recipientResult{KeyID: m.KeyID.String(), Handle: hex.EncodeToString(m.Handle[:]), Outcome: "OK"}
		if m.Index >= 0 {
			n := m.Index + 1
			v.Named = &n
		}
		if m.Outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
			v.Outcome = strings.TrimPrefix(m.Outcome.String(), "OUTCOME_")
		}
		all = append(all, v)
	}
	return all
}

// flag tells people of recipients whose keys cannot be had.
func (a *app) flag(all []recipientResult) {
	for _, r := range all {
		if r.Outcome == "OK" {
			continue
		}
		who := "a subject not named"
		if r.Named != nil {
			who = fmt.Sprintf("subject %d of those named", *r.Named)
		}
		a.note("%s: %s (handle %s)", who, strings.ToLower(strings.ReplaceAll(r.Outcome, "_", " ")), r.Handle)
	}
}

func (d *dataFlags) result(h *envelope.Header, blob, plaintext int64) dataResult {
	r := dataResult{
		Tenant: d.subjects.tenant, Class: d.class, Form: h.Form.String(), Policy: h.Policy.String(), ClassNumber: h.Class,
		Bucket: bucketTime(h.Bucket), ContextBound: h.Bound, BlobBytes: blob, PlaintextBytes: plaintext, Output: "-",
	}
	if len(h.Recipients) == 1 {
		r.KeyID = h.Recipients[0].String()
	} else {
		for _, id := range h.Recipients {
			r.KeyIDs = append(r.KeyIDs, id.String())
		}
	}
	if !d.output.toStdout() {
		r.Output = d.output.file
	}
	return r
}

func (a *app) sealCommand() *cobra.Command {
	var d dataFlags
	var needAll, needAny bool
	c := a.command(&cobra.Command{
		Use:   "seal --tenant T --subject S --class C [-o FILE] [FILE]",
		Short: "Seal data under a person's key, or several people's",
		Long: `Seal seals FILE, or the standard input, for one subject and class, and writes the
blob to a file or to the standard output, but not to a terminal.

With several subjects, say --all if the blob is to be gone with the first of
them who is erased, or --any if it is to open while one of them lives; open then
tells who is gone.

Up to 1 MiB is sealed in one piece. Anything longer is sealed as a stream, in
bounded memory; open tells the two apart by itself.

A --context is not stored: it must be given again to open the blob, and ties it
to its place, such as a row key. With --json and the blob on the standard
output, the result is written to the standard error.
` + subjectHelp,
		Example: `  lethe seal --tenant acme --subject-file id.txt --class trace -o trace.sealed trace.json
  pg_dump people | lethe seal --tenant acme --subject 4711 --class backup > people.sealed
  lethe seal --tenant acme --subject 4711 --class memory --context thread=t-9 -o m.sealed m.json
  lethe seal --tenant acme --subject 4711 --subject 4712 --any --class memory -o m.sealed m.json`,
		Args: atMostOneFile,
	}, func(ctx context.Context, args []string) error {
		policy := sdk.All // as good as any for one
		switch {
		case needAny:
			policy = sdk.Any
		case !needAll && len(d.subjects.ids)+len(d.subjects.files) > 1:
			return usagef("several subjects: say --all or --any")
		}
		return a.seal(ctx, &d, policy, args)
	})
	d.add(a, c)
	c.Flags().BoolVar(&needAll, "all", false, "the blob is gone with the first of its subjects")
	c.Flags().BoolVar(&needAny, "any", false, "the blob opens while one of its subjects lives")
	c.MarkFlagsMutuallyExclusive("all", "any")
	return c
}

func atMostOneFile(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return usagef("takes one FILE at most")
	}
	return nil
}

func (a *app) seal(ctx context.Context, d *dataFlags, policy sdk.Policy, args []string) error {
	if d.output.toStdout() && a.isTerminal(a.out) {
		return usagef("will not write a blob to a terminal: name a file with -o, or redirect the output")
	}
	group, err := d.group(a, args)
	if err != nil {
		return err
	}
	group.Policy = policy
	in, err := a.openInput(args)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := d.output.create(a, 0o666)
	if err != nil {
		return err
	}
	defer out.discard()
	client, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()

	defer a.showProgress("sealing", in)()
	written := &headWriter{w: out}
	if err := a.sealTo(ctx, client, group, written, in); err != nil {
		return err
	}
	if err := out.commit(); err != nil {
		return err
	}
	h, _, err := envelope.ParseHeader(written.head)
	if err != nil {
		return err
	}
	return d.report(a, d.result(h, written.size, in.read.Load()))
}

// sealTo seals what in holds, in the form that its length asks for.
func (a *app) sealTo(ctx context.Context, client *sdk.Client, group sdk.Group, out io.Writer, in io.Reader) error {
	start := make([]byte, streamFrom)
	n, err := io.ReadFull(in, start)
	start = start[:n]
	defer clear(start)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		ctx, cancel := a.call(ctx)
		defer cancel()
		blob, err := client.SealGroup(ctx, group, start)
		if err == nil {
			_, err = out.Write(blob)
		}
		return err
	}
	if err != nil {
		return err
	}
	ctx, begun, cancel := a.start(ctx)
	defer cancel()
	w, err := client.SealGroupWriter(ctx, group, out)
	if err != nil {
		return err
	}
	begun()
	if _, err := io.Copy(w, io.MultiReader(bytes.NewReader(start), in)); err != nil {
		w.Abort(err)
		return err
	}
	return w.Close()
}

// headWriter keeps the start of what it passes on, and its size.
type headWriter struct {
	w    io.Writer
	head []byte
	size int64
}

func (h *headWriter) Write(p []byte) (int, error) {
	n, err := h.w.Write(p)
	h.size += int64(n)
	h.head = append(h.head, p[:min(n, envelope.MaxHeaderSize-len(h.head))]...)
	return n, err
}

func (a *app) openCommand() *cobra.Command {
	var d dataFlags
	c := a.command(&cobra.Command{
		Use:   "open --tenant T --subject S --class C [-o FILE] [FILE]",
		Short: "Open a blob",
		Long: `Open opens the blob in FILE, or from the standard input, if it was sealed for the
subject, class and context named, and writes the plaintext.

A blob for several subjects wants them named: all of them if all are needed to
open it, some of them if any will do. Then it is told which of them are gone.

With -o the file is complete or not there at all: one that fails or is
interrupted leaves nothing, and touches no file that was there. On the standard
output a stream's plaintext appears piece by piece; each piece is authentic, but
only exit code 0 says that all of it came.

A file that exists is replaced only with --force, and keeps its permissions; a
new one can be read by its owner alone. With --json and the plaintext on the
standard output, the result is written to the standard error.
` + subjectHelp,
		Example: `  lethe open --tenant acme --subject-file id.txt --class trace -o trace.json trace.sealed
  lethe open --tenant acme --subject 4711 --class backup < people.sealed | psql people
  lethe open --tenant acme --subject 4711 --class memory --context thread=t-9 m.sealed
  lethe open --tenant acme --subject 4711 --subject 4712 --class memory m.sealed`,
		Args: atMostOneFile,
	}, func(ctx context.Context, args []string) error { return a.open(ctx, &d, args) })
	d.add(a, c)
	return c
}

func (a *app) open(ctx context.Context, d *dataFlags, args []string) error {
	group, err := d.group(a, args)
	if err != nil {
		return err
	}
	in, err := a.openSealed(args)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := d.output.create(a, 0o600)
	if err != nil {
		return err
	}
	defer out.discard()
	client, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()

	defer a.showProgress("opening", in)()
	h, report, size, err := a.openTo(ctx, client, group, out, in)
	if err != nil {
		if size > 0 && d.output.toStdout() {
			return fmt.Errorf("%w (what was written before that, %d bytes, is authentic but not all)", err, size)
		}
		return err
	}
	if err := out.commit(); err != nil {
		return err
	}
	v := d.result(h, in.read.Load(), size)
	v.Recipients = recipientResults(report)
	a.flag(v.Recipients)
	return d.report(a, v)
}

// openTo opens the blob that in holds, of either form, and tells how much
// plaintext it wrote to out.
func (a *app) openTo(ctx context.Context, client *sdk.Client, group sdk.Group, out io.Writer, in *input) (*envelope.Header, *sdk.Report, int64, error) {
	// The header is read again by the SDK. What stands behind it in a stream is
	// waited for here, where a slow source is no fault of keyd's.
	var head bytes.Buffer
	h, err := envelope.ReadHeader(io.TeeReader(in, &head))
	if err != nil {
		return nil, nil, 0, err
	}
	if _, err := io.CopyN(&head, in, 4<<10); err != nil && err != io.EOF {
		return nil, nil, 0, err
	}
	blob := io.MultiReader(&head, in)

	if h.Form == envelope.OneShot {
		// More than the largest blob is read of nothing; what is too large is
		// then refused by the SDK.
		const most = envelope.MaxHeaderSize + envelope.MaxPlaintext + 4<<10
		var whole bytes.Buffer
		if in.size > 0 && in.size <= most {
			whole.Grow(int(in.size) + bytes.MinRead)
		}
		if _, err := whole.ReadFrom(io.LimitReader(blob, most)); err != nil {
			return nil, nil, 0, err
		}
		ctx, cancel := a.call(ctx)
		defer cancel()
		plaintext, report, err := client.OpenGroup(ctx, group, whole.Bytes())
		if err != nil {
			return nil, nil, 0, err
		}
		defer clear(plaintext)
		n, err := out.Write(plaintext)
		return h, report, int64(n), err
	}
	ctx, begun, cancel := a.start(ctx)
	defer cancel()
	r, err := client.OpenGroupReader(ctx, group, blob)
	if err != nil {
		return nil, nil, 0, err
	}
	defer r.Close()
	begun()
	n, err := r.WriteTo(out)
	return h, r.Report(), n, err
}
