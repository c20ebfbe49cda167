package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
)

// rawJSON is JSON that is passed on as it is.
type rawJSON = json.RawMessage

// receiptFlags say where a receipt is saved.
type receiptFlags struct {
	file    string
	replace bool
}

func (r *receiptFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&r.file, "receipt", "", "file to save the receipt in")
	c.Flags().BoolVar(&r.replace, "replace-receipt", false, "replace the receipt's file if it exists")
}

// receiptFile is the file to save a receipt in, if one is wanted.
type receiptFile struct{ f *outputFile }

func (r *receiptFlags) create(a *app) (*receiptFile, error) {
	if r.file == "" {
		return &receiptFile{}, nil
	}
	f, err := a.files.create(r.file, 0o666, r.replace)
	if errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("%w; --replace-receipt replaces it", err)
	}
	return &receiptFile{f}, err
}

func (r *receiptFile) discard() {
	if r.f != nil {
		r.f.discard()
	}
}

func (r *receiptFile) save(b []byte) error {
	if r.f == nil {
		return nil
	}
	if _, err := r.f.Write(b); err != nil {
		return err
	}
	return r.f.commit()
}

// recordResult is what every command that adds to the ledger reports.
type recordResult struct {
	RequestID   string `json:"request_id"`
	LedgerIndex uint64 `json:"ledger_index,string"`
	// Receipt is the receipt's text: itself JSON, of which no byte may change.
	Receipt     string  `json:"receipt"`
	ReceiptFile *string `json:"receipt_file"` // null: not saved
}

func (r *receiptFlags) result(requestID string, index uint64, b []byte) recordResult {
	v := recordResult{RequestID: requestID, LedgerIndex: index, Receipt: string(b)}
	if r.file != "" {
		v.ReceiptFile = &r.file
	}
	return v
}

// plainWord is what no shell takes for anything but one word.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._:/@-]*$`)

func (v recordResult) write(w io.Writer, tenant string) {
	by := fmt.Sprintf("--index %d", v.LedgerIndex)
	if plainWord.MatchString(v.RequestID) {
		by = "--request-id " + v.RequestID
	}
	saved := fmt.Sprintf("not saved; lethe receipt get --tenant %s %s", tenant, by)
	if v.ReceiptFile != nil {
		saved = *v.ReceiptFile
	}
	facts(w,
		"request id", printable(v.RequestID),
		"ledger index", strconv.FormatUint(v.LedgerIndex, 10),
		"receipt", saved,
	)
}

// stagesResult is how far a destruction has come. A null instant is one that
// the receipt does not state.
type stagesResult struct {
	Denied     *time.Time `json:"denied"`
	ButHeld    bool       `json:"but_held"` // not of whom a legal hold covered at denied
	Destroyed  *time.Time `json:"destroyed"`
	Due        *time.Time `json:"due"`
	Cancelled  *time.Time `json:"cancelled"`
	DrainedBy  *time.Time `json:"drained_by"`
	Sanitised  *time.Time `json:"sanitised"`
	FinalBy    *time.Time `json:"final_by"`
	FinalBasis string     `json:"final_basis"`
	Final      *time.Time `json:"final"`
	// NotYet names the stages that are not reached, by this machine's clock
	// where the clock decides.
	NotYet []string `json:"not_yet"`
}

// isDestruction reports whether the receipt is about something that has stages.
func isDestruction(v *receipt.Verified) bool {
	switch v.Entries[0].Statement.Kind {
	case receipt.Destroyed, receipt.Scheduled, receipt.Expired:
		return true
	}
	return false
}

func newStagesResult(v *receipt.Verified, now time.Time) *stagesResult {
	if !isDestruction(v) {
		return nil
	}
	at := func(t time.Time) *time.Time {
		if t.IsZero() {
			return nil
		}
		t = t.UTC()
		return &t
	}
	s := v.Stages()
	return &stagesResult{
		Denied: at(s.Denied), ButHeld: s.ButHeld, Destroyed: at(s.Destroyed), Due: at(s.Due), Cancelled: at(s.Cancelled),
		DrainedBy: at(s.DrainedBy), Sanitised: at(s.Sanitised),
		FinalBy: at(s.FinalBy), FinalBasis: s.FinalBasis, Final: at(s.Final),
		NotYet: notYet(s, now),
	}
}

// notYet names the stages that are not reached at now.
func notYet(s receipt.Stages, now time.Time) []string {
	missing := []string{}
	add := func(stage string, reached bool) {
		if !reached {
			missing = append(missing, stage)
		}
	}
	add("destroyed", !s.Destroyed.IsZero())
	// What is only scheduled may have been cancelled since: no clock drains it.
	add("drained", !s.Destroyed.IsZero() && !s.DrainedBy.IsZero() && !now.Before(s.DrainedBy))
	add("sanitised", !s.Sanitised.IsZero())
	add("final", !s.Final.IsZero())
	return missing
}

// writeVerified writes what a receipt says, and what holds at now.
func writeVerified(w io.Writer, v *receipt.Verified, now time.Time) {
	_ = v.Describe(w) // to memory
	if !isDestruction(v) {
		return
	}
	s := v.Stages()
	missing := notYet(s, now)
	text := "every stage is reached"
	if len(missing) > 0 {
		text = "not " + strings.Join(missing, ", not ") + " yet"
	}
	if s.ButHeld {
		text += ", but for what a legal hold covered"
	}
	fmt.Fprintf(w, "%-12s %s, by this machine's clock (%s)\n", "now:", text, instant(now.Truncate(time.Second)))
}

// firstStatement is the statement that a receipt, which was verified, begins with.
func firstStatement(b []byte) rawJSON {
	entries, err := receipt.Parse(b)
	if err != nil {
		return nil
	}
	return entries[0].Statement
}

func (a *app) receiptCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "receipt",
		Short: "Get, verify and list receipts",
		Example: `  lethe receipt get --tenant acme --request-id case-17 -o receipt.json
  lethe receipt verify receipt.json --key-file ledger.key`,
	}, a.receiptGetCommand(), a.receiptVerifyCommand(), a.receiptListCommand())
}

func (a *app) receiptGetCommand() *cobra.Command {
	var s subjectFlags
	var requestID string
	var index uint64
	var wait, atMost string
	var output outputFlags
	var c *cobra.Command
	c = a.command(&cobra.Command{
		Use:   "get --tenant T (--request-id ID | --index N | --subject S) [--wait STAGE] [-o FILE]",
		Short: "Get a receipt from keyd",
		Long: `Get fetches the receipt of a request, of an entry of the ledger, or of the newest
entry about a subject, with all later stages that there are. Without --json and
-o it writes the receipt and nothing else. It verifies nothing: see receipt
verify.

With --wait it waits until the receipt of a destruction says that it is
sanitised, or final: until the epoch is closed in which it was made. That can be
days, and 'lethe epoch turn' hastens it. With --wait-at-most it ends with
UNAVAILABLE when the receipt does not say so in time.`,
		Example: `  lethe receipt get --tenant acme --request-id case-17 -o receipt.json
  lethe receipt get --tenant acme --request-id case-17 --wait final -o receipt.json
  lethe receipt get --tenant acme --index 42 | lethe receipt verify - --key-file ledger.key`,
	}, func(ctx context.Context, _ []string) error {
		if wait != "" && wait != "sanitised" && wait != "final" {
			return usagef("--wait takes sanitised or final")
		}
		var most time.Duration
		if atMost != "" {
			var err error
			if most, err = parseDuration(atMost); err != nil || most == 0 {
				return usagef("--wait-at-most: %v", errDuration)
			}
			if wait == "" {
				return usagef("--wait-at-most goes with --wait")
			}
		}
		req := &keydv1.GetReceiptRequest{Tenant: s.tenant}
		switch f := c.Flags(); {
		case f.Changed("request-id"):
			req.By = &keydv1.GetReceiptRequest_RequestId{RequestId: requestID}
		case f.Changed("index"):
			req.By = &keydv1.GetReceiptRequest_LedgerIndex{LedgerIndex: index}
		default:
			id, err := s.read(a)
			if err != nil {
				return err
			}
			req.By = &keydv1.GetReceiptRequest_SubjectId{SubjectId: []byte(id)}
		}
		out, err := output.create(a, 0o666)
		if err != nil {
			return err
		}
		defer out.discard()
		var res *keydv1.GetReceiptResponse
		get := func(ctx context.Context, client *sdk.Client) (err error) {
			res, err = keydv1.NewLedgerServiceClient(client.Conn()).GetReceipt(ctx, req)
			return err
		}
		if wait == "" {
			err = a.withClient(ctx, get)
		} else {
			err = a.awaitStage(ctx, wait, most, get, func() []byte { return res.GetReceipt() })
		}
		if err != nil {
			return err
		}
		v := struct {
			Tenant      string  `json:"tenant"`
			LedgerIndex uint64  `json:"ledger_index,string"`
			Receipt     string  `json:"receipt"`
			ReceiptFile *string `json:"receipt_file"`
		}{Tenant: s.tenant, LedgerIndex: res.GetLedgerIndex(), Receipt: string(res.GetReceipt())}
		if !output.toStdout() {
			v.ReceiptFile = &output.file
		}
		return a.deliver(&output, out, res.GetReceipt(), v)
	})
	s.add(a, c)
	f := c.Flags()
	f.StringVar(&requestID, "request-id", "", "the id of the request")
	f.Uint64Var(&index, "index", 0, "the entry's index in the ledger")
	f.StringVar(&wait, "wait", "", "wait until a destruction is sanitised, or final")
	_ = c.RegisterFlagCompletionFunc("wait", cobra.FixedCompletions([]string{"sanitised", "final"}, cobra.ShellCompDirectiveNoFileComp))
	f.StringVar(&atMost, "wait-at-most", "", "how long to wait, such as 90s or 30d (default: as long as it takes)")
	_ = c.RegisterFlagCompletionFunc("wait-at-most", cobra.NoFileCompletions)
	output.add(c)
	c.MarkFlagsOneRequired("request-id", "index", "subject", "subject-file")
	c.MarkFlagsMutuallyExclusive("request-id", "index", "subject", "subject-file")
	return c
}

// awaitStage gets a receipt until it states a stage, for no longer than most
// unless that is zero.
func (a *app) awaitStage(ctx context.Context, stage string, most time.Duration, get func(context.Context, *sdk.Client) error, got func() []byte) error {
	client, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	look := func(ctx context.Context) (bool, error) {
		if err := get(ctx, client); err != nil {
			return false, err
		}
		return states(got(), stage)
	}
	first, cancel := a.call(ctx)
	defer cancel()
	if ok, err := look(first); ok || err != nil {
		return err
	}
	a.note("waiting until the receipt says that it is %s%s; 'lethe epoch turn' hastens it", stage, expected(got()))
	waiting := ctx
	if most != 0 {
		waiting, cancel = context.WithTimeout(ctx, most)
		defer cancel()
	}
	err = a.await(waiting, look)
	if err != nil && waiting.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("%w: after %s the receipt does not say %s yet", sdk.ErrUnavailable, formatDuration(most), stage)
	}
	return err
}

// expected says what an unverified receipt, which states no last stage yet,
// tells of when it will.
func expected(b []byte) (text string) {
	entries, err := receipt.Parse(b)
	if err != nil {
		return ""
	}
	for _, e := range entries {
		s, err := receipt.ParseStatement(e.Statement)
		if err != nil {
			return ""
		}
		switch {
		case s.Kind == receipt.Scheduled:
			text = ", after it is destroyed, which is due at " + instant(s.Due)
		case s.Kind == receipt.EpochRetiring && !s.Due.IsZero():
			text = ", which is due at " + instant(s.Due)
		case s.Kind == receipt.EpochCancelled:
			text = "; the destruction of the root was called off, and no date is known"
		case !s.FinalBy.IsZero():
			text = ", which is planned by " + instant(s.FinalBy)
		}
	}
	return text
}

// states reports whether an unverified receipt states a stage of a destruction.
func states(b []byte, stage string) (bool, error) {
	entries, err := receipt.Parse(b)
	if err != nil {
		return false, &evidenceError{err}
	}
	for i, e := range entries {
		s, err := receipt.ParseStatement(e.Statement)
		if err != nil {
			return false, &evidenceError{err}
		}
		switch s.Kind {
		case receipt.Sanitised:
			if stage == "sanitised" {
				return true, nil
			}
		case receipt.EpochClosed:
			return true, nil
		case receipt.Destroyed, receipt.Expired, receipt.Scheduled, receipt.EpochRetiring, receipt.EpochCancelled:
		case receipt.Cancelled:
			return false, fmt.Errorf("%w: the destruction was called off, and has no later stages", sdk.ErrConflict)
		default:
			if i == 0 {
				return false, usagef("--wait is for receipts of destructions")
			}
		}
	}
	return false, nil
}

// keyFlags are the verifier keys that somebody pinned.
type keyFlags struct {
	keys []string
	file string
}

func (k *keyFlags) add(c *cobra.Command) {
	c.Flags().StringArrayVar(&k.keys, "key", nil, "a pinned verifier key; may be given several times")
	c.Flags().StringVar(&k.file, "key-file", "", "file with pinned verifier keys, one a line, as ledger key prints them")
	c.MarkFlagsOneRequired("key", "key-file")
	_ = c.RegisterFlagCompletionFunc("key", cobra.NoFileCompletions)
}

const maxKeyFile = 1 << 20

// pin reads the keys.
func (k *keyFlags) pin(a *app) (*receipt.Keys, error) {
	all := append([]string(nil), k.keys...)
	if k.file != "" {
		b, err := a.readSmall(k.file, maxKeyFile)
		if err != nil {
			return nil, err
		}
		if len(b) > maxKeyFile {
			return nil, usagef("the file of pinned keys is too long to be one")
		}
		for line := range strings.Lines(string(b)) {
			line = strings.TrimSpace(line)
			if line != "" && !strings.HasPrefix(line, "#") {
				all = append(all, line)
			}
		}
	}
	keys, err := receipt.PinKeys(all...)
	if err != nil {
		return nil, usagef("the pinned keys: %v", err)
	}
	return keys, nil
}

// verifiedResult is a receipt that verifies.
type verifiedResult struct {
	Valid   bool                  `json:"valid"`
	Origin  string                `json:"origin"`
	Entries []verifiedEntryResult `json:"entries"`
	Stages  *stagesResult         `json:"stages"` // null: it is not about a destruction
	// Witnesses other than the operator who signed the ledger's head.
	Witnesses []string `json:"witnesses"`
}

type verifiedEntryResult struct {
	LedgerIndex uint64   `json:"ledger_index,string"`
	TreeSize    uint64   `json:"tree_size,string"`
	SignedBy    []string `json:"signed_by"`
	Statement   rawJSON  `json:"statement"`
}

// expectFlags say what a receipt has to be about.
type expectFlags struct {
	tenant     string
	handle     string
	generation uint32
}

func (x *expectFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&x.tenant, "tenant", "", "the tenant that the receipt has to be about")
	f.StringVar(&x.handle, "handle", "", "the subject that it has to be about, by the handle that subject status prints")
	f.Uint32Var(&x.generation, "generation", 0, "the generation that it has to be about")
	for _, name := range []string{"tenant", "handle", "generation"} {
		_ = c.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
}

// otherReceiptError is a receipt that verifies and is about something else than
// was expected.
type otherReceiptError struct{ field string }

func (e *otherReceiptError) Error() string {
	return "it verifies, and is about another " + e.field + " than the one expected, or about none"
}

// check compares what a receipt begins with, by which its later entries are
// bound, with what is expected.
func (x *expectFlags) check(s *receipt.Statement) error {
	switch {
	case x.tenant != "" && s.Tenant != x.tenant:
		return &otherReceiptError{"tenant"}
	case x.handle != "" && hex.EncodeToString(s.Handle) != x.handle:
		return &otherReceiptError{"subject"}
	case x.generation != 0 && s.Generation != x.generation:
		return &otherReceiptError{"generation"}
	}
	return nil
}

// usable refuses expectations that no receipt can meet.
func (x *expectFlags) usable() error {
	if x.tenant != "" {
		if err := ident.Tenant(x.tenant); err != nil {
			return err
		}
	}
	x.handle = strings.ToLower(x.handle)
	if b, err := hex.DecodeString(x.handle); err != nil || len(b) != 0 && len(b) != 16 {
		return usagef("--handle: want 32 hexadecimal digits")
	}
	return nil
}

// stageNames are the stages of a destruction, in their order.
var stageNames = []string{"denied", "destroyed", "drained", "sanitised", "final"}

// expectedStage is a stage that a receipt has to say was reached, now or at a
// given time.
type expectedStage struct {
	name string
	at   timeValue
}

func (x *expectedStage) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&x.name, "stage", "", "the stage that it has to say is reached: "+strings.Join(stageNames, ", "))
	f.Var(&x.at, "at", "when the stage has to be reached, such as 2027-01-31T00:00:00Z (default: now)")
	_ = c.RegisterFlagCompletionFunc("stage", cobra.FixedCompletions(stageNames, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("at", cobra.NoFileCompletions)
}

func (x *expectedStage) usable() error {
	switch {
	case x.name == "" && !x.at.IsZero():
		return usagef("--at goes with --stage")
	case x.name != "" && !slices.Contains(stageNames, x.name):
		return usagef("--stage takes one of %s", strings.Join(stageNames, ", "))
	}
	return nil
}

// stageError is a receipt that verifies and does not say that a stage is reached.
type stageError struct{ stage string }

func (e *stageError) Error() string {
	return "it verifies, and does not say that it is " + e.stage + " by then"
}

// check looks for the stage in what a receipt says. Of the stages, only drained
// is told by a clock: the others are stated once they are reached.
func (x *expectedStage) check(v *receipt.Verified, now time.Time) error {
	if x.name == "" {
		return nil
	}
	s := v.Stages()
	reached := map[string]time.Time{
		"denied": s.Denied, "destroyed": s.Destroyed, "drained": s.DrainedBy, "sanitised": s.Sanitised, "final": s.Final,
	}[x.name]
	at := now
	if !x.at.IsZero() {
		at = x.at.Time
	}
	byClock := x.name == "drained" || !x.at.IsZero()
	switch {
	case !isDestruction(v), reached.IsZero(), byClock && at.Before(reached):
		return &stageError{x.name}
	case x.name != "denied" && s.Destroyed.IsZero(): // it can still be cancelled, or was
		return &stageError{x.name}
	}
	return nil
}

func (a *app) receiptVerifyCommand() *cobra.Command {
	var k keyFlags
	var expect expectFlags
	var stage expectedStage
	c := a.command(&cobra.Command{
		Use:   "verify FILE (--key KEY | --key-file FILE) [--tenant T] [--handle H] [--generation N] [--stage S]",
		Short: "Verify a receipt offline, against pinned keys",
		Long: `Verify reads a receipt from FILE, or from the standard input if that is "-", and
verifies it against the ledger's keys as they were pinned: taken with ledger key
at a time, or through a channel, that the verifier trusts. It talks to nobody.
It prints what the receipt says is true, and what it does not say or is not yet
true. Exit code 0 means valid, and nothing else does.

A receipt of somebody else is valid too. Say with --tenant and --handle whom it
has to be about, and with --generation which life; otherwise compare what is
printed. A receipt about something else ends with OTHER_RECEIPT, and so does one
that does not say that --stage is reached: now, by this machine's clock, or at
--at. The stages are denied, destroyed, drained, sanitised and final.`,
		Example: `  lethe receipt verify receipt.json --key-file ledger.key
  lethe receipt verify receipt.json --key-file ledger.key --tenant acme --handle 5f0c1d2e3b4a59687786a5b4c3d2e1f0
  lethe receipt verify receipt.json --key-file ledger.key --stage final
  lethe receipt get --tenant acme --index 42 | lethe receipt verify - --key-file ledger.key --json`,
		Args: exactly("FILE"),
	}, func(_ context.Context, args []string) error {
		if args[0] == "-" && k.file == "-" {
			return usagef("the standard input cannot be both the receipt and the keys")
		}
		if err := errors.Join(expect.usable(), stage.usable()); err != nil {
			return err
		}
		keys, err := k.pin(a)
		if err != nil {
			return err
		}
		b, err := a.readSmall(args[0], receipt.MaxReceipt)
		if err != nil {
			return err
		}
		v, err := receipt.Verify(b, keys)
		if err != nil {
			return &evidenceError{err}
		}
		if err := expect.check(v.Entries[0].Statement); err != nil {
			return err
		}
		entries, err := receipt.Parse(b)
		if err != nil {
			return &evidenceError{err}
		}
		now := a.now()
		if err := stage.check(v, now); err != nil {
			return err
		}
		r := verifiedResult{Valid: true, Origin: v.Origin, Stages: newStagesResult(v, now), Witnesses: []string{}}
		for i, e := range v.Entries {
			r.Entries = append(r.Entries, verifiedEntryResult{
				LedgerIndex: e.Index, TreeSize: e.Checkpoint.Size, SignedBy: e.SignedBy, Statement: entries[i].Statement,
			})
		}
		return a.print(r, func(w io.Writer) {
			fmt.Fprintln(w, "valid")
			writeVerified(w, v, now)
		})
	})
	k.add(c)
	expect.add(c)
	stage.add(c)
	return c
}

func (a *app) receiptListCommand() *cobra.Command {
	var s subjectFlags
	var limit uint32
	var token string
	c := a.command(&cobra.Command{
		Use:   "list --tenant T [--subject S] [--limit N]",
		Short: "List a tenant's entries in the ledger",
		Long: `List shows a tenant's entries in the ledger, oldest first, or only those about one
subject. If there are more than --limit, it tells the --page-token to go on with.`,
		Example: `  lethe receipt list --tenant acme
  lethe receipt list --tenant acme --subject-file id.txt --json`,
	}, func(ctx context.Context, _ []string) error {
		req := &keydv1.ListReceiptsRequest{Tenant: s.tenant, PageToken: token}
		if s.given() {
			id, err := s.read(a)
			if err != nil {
				return err
			}
			req.SubjectId = []byte(id)
		}
		if limit == 0 {
			return usagef("--limit: at least 1")
		}
		return a.withClient(ctx, func(ctx context.Context, client *sdk.Client) error {
			return a.listReceipts(ctx, keydv1.NewLedgerServiceClient(client.Conn()), req, limit)
		})
	})
	s.add(a, c)
	c.Flags().Uint32Var(&limit, "limit", 100, "how many entries at most")
	c.Flags().StringVar(&token, pageToken, "", "where to go on, as a previous list told")
	return c
}

type receiptEntryResult struct {
	LedgerIndex uint64  `json:"ledger_index,string"`
	Statement   rawJSON `json:"statement"`
}

func (a *app) listReceipts(ctx context.Context, ledger keydv1.LedgerServiceClient, req *keydv1.ListReceiptsRequest, limit uint32) error {
	v := struct {
		Tenant        string               `json:"tenant"`
		Receipts      []receiptEntryResult `json:"receipts"`
		NextPageToken string               `json:"next_page_token"`
	}{Tenant: req.GetTenant(), Receipts: []receiptEntryResult{}}
	rows := [][]string{{"INDEX", "TIME", "KIND", "SCOPE", "HANDLE", "GENERATION", "REASON"}}
	for {
		req.PageSize = min(limit-uint32(len(v.Receipts)), 1000)
		res, err := ledger.ListReceipts(ctx, req)
		if err != nil {
			return err
		}
		for _, e := range res.GetEntries() {
			s, err := receipt.ParseStatement(e.GetStatement())
			if err != nil {
				return &evidenceError{fmt.Errorf("entry %d: %w", e.GetLedgerIndex(), err)}
			}
			v.Receipts = append(v.Receipts, receiptEntryResult{e.GetLedgerIndex(), e.GetStatement()})
			rows = append(rows, statementRow(e.GetLedgerIndex(), s))
		}
		v.NextPageToken = res.GetNextPageToken()
		if v.NextPageToken == "" || uint32(len(v.Receipts)) >= limit {
			break
		}
		if v.NextPageToken == req.GetPageToken() {
			return errors.New("keyd's list does not advance")
		}
		req.PageToken = v.NextPageToken
	}
	if err := a.print(v, func(w io.Writer) { table(w, rows) }); err != nil {
		return err
	}
	if v.NextPageToken != "" {
		a.note("there are more: --page-token %s", v.NextPageToken)
	}
	return nil
}

func statementRow(index uint64, s *receipt.Statement) []string {
	generation := "-"
	if s.Generation != 0 {
		generation = strconv.FormatUint(uint64(s.Generation), 10)
	}
	scope := string(s.Scope)
	if s.Scope == receipt.ScopeClasses || s.Kind == receipt.ClassSet {
		var names []string
		for _, c := range s.Classes {
			names = append(names, c.Name)
		}
		scope = strings.Join(names, ",")
	}
	handle := "-"
	if len(s.Handle) > 0 {
		handle = fmt.Sprintf("%x", s.Handle)
	}
	return []string{
		strconv.FormatUint(index, 10), instant(s.Time), string(s.Kind), orDash(scope), handle, generation, orDash(s.Reason),
	}
}
