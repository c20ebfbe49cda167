package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
)

func (a *app) destroyCommand() *cobra.Command {
	var d destroyFlags
	c := a.command(&cobra.Command{
		Use:   "destroy --tenant T --subject S --reason CODE [--class C]... [--receipt FILE]",
		Short: "Destroy a person's keys, for good",
		Long: `Destroy destroys the keys of a subject: of the whole person, or of the classes
named. What was sealed under them never opens again, wherever its copies lie.
There is no way back. It answers when the destruction is durable, logged, and
covered by the anchor, and prints what is true then, and what is not yet.

On a terminal it asks first; elsewhere it wants --yes. A request id that was not
given is made, and told on the standard error before anything is done, with
--json on a line of its own: if the answer is lost, or is UNAVAILABLE, repeat
the command with that --request-id, and the same receipt comes.

A subject that was reinstated is destroyed only with its --generation, so that a
late request cannot kill a later life.

With --not-before it is only scheduled: what was sealed is refused from now on,
and destroyed then, unless 'lethe cancel' comes before. With --wait-for-holds a
legal hold does not make it fail (exit code 13): it waits in the same way, and
goes on by itself as soon as no hold binds. The same command again, with the same
request id, tells what has become of it. That it is scheduled or waits ends with 0
as well: 'lethe receipt verify --stage destroyed' says whether anybody is destroyed.
` + subjectHelp,
		Example: `  lethe destroy --tenant acme --subject-file id.txt --reason gdpr-art17 --receipt receipt.json
  lethe destroy --tenant acme --subject 4711 --class memory --reason user-request --yes --json`,
	}, func(ctx context.Context, _ []string) error { return a.destroy(ctx, &d) })
	d.subject.add(a, c)
	c.MarkFlagsOneRequired("subject", "subject-file")
	d.request.add(c)
	d.save.add(c)
	addClassesFlag(a, c, &d.classes, "destroy only this class")
	c.Flags().Uint32Var(&d.generation, "generation", 1, "the generation to destroy")
	c.Flags().Var(&d.notBefore, "not-before", "when to destroy, such as 2027-01-31T00:00:00Z; until then it can be cancelled")
	_ = c.RegisterFlagCompletionFunc("not-before", cobra.NoFileCompletions)
	c.Flags().BoolVar(&d.waitForHolds, "wait-for-holds", false, "let it wait while a legal hold binds, instead of failing")
	c.Flags().BoolVar(&d.yes, "yes", false, "do not ask")
	d.command = c
	return c
}

type destroyFlags struct {
	command      *cobra.Command
	subject      subjectFlags
	request      requestFlags
	save         receiptFlags
	classes      []string
	generation   uint32
	notBefore    timeValue
	waitForHolds bool
	yes          bool
}

// destroyResult is what destroy reports. Stages and statement are null if keyd
// did not answer when it was asked for the keys to check the receipt with.
type destroyResult struct {
	recordResult
	AlreadyDestroyed bool      `json:"already_destroyed"`
	Due              time.Time `json:"due,omitzero"`
	DrainedBy        time.Time `json:"drained_by,omitzero"`
	LivingGeneration uint32    `json:"living_generation,omitzero"`
	// Existed is yes, no or unknown: whether there was a key; empty while
	// nothing is destroyed.
	Existed   string        `json:"existed,omitempty"`
	Checked   bool          `json:"checked"`
	Stages    *stagesResult `json:"stages"`
	Statement rawJSON       `json:"statement"`
}

func (a *app) destroy(ctx context.Context, d *destroyFlags) error {
	id, err := d.subject.read(a)
	if err != nil {
		return err
	}
	if d.generation == 0 {
		return usagef("--generation: generations count from 1")
	}
	if err := checkClasses(d.classes); err != nil {
		return err
	}
	client, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	if !d.yes {
		if err := a.confirmDestroy(ctx, client, d, id); err != nil {
			return err
		}
	}
	// A receipt that could not be saved is found out before, not after.
	out, err := d.save.create(a)
	if err != nil {
		return err
	}
	defer out.discard()
	if err := d.request.settle(a, d.command); err != nil {
		return err
	}

	call, cancel := a.call(ctx)
	defer cancel()
	done, err := client.DestroyKey(call, sdk.DestroyRequest{
		Tenant: d.subject.tenant, Subject: id, Classes: d.classes, IfGeneration: d.generation,
		RequestID: d.request.id, Reason: d.request.reason, NotBefore: d.notBefore.Time, WaitForHolds: d.waitForHolds,
	})
	if err != nil {
		return with(err, "request_id", d.request.id)
	}
	saved := out.save(done.Receipt)

	v := destroyResult{
		recordResult:     d.save.result(d.request.id, done.LedgerIndex, done.Receipt),
		AlreadyDestroyed: done.Already, Due: done.Due, DrainedBy: done.DrainedBy,
		LivingGeneration: done.LivingGeneration,
	}
	destruction := destructionIn(done.Receipt)
	if destruction != nil {
		v.Existed = destruction.Existed
	}
	verified, unchecked := a.check(ctx, client, done.Receipt)
	if verified != nil {
		v.Checked = true
		v.Stages = newStagesResult(verified, a.now())
		v.Statement = firstStatement(done.Receipt)
	}
	err = a.print(v, func(w io.Writer) {
		switch {
		case v.LivingGeneration != 0:
			fmt.Fprintf(w, "destroyed then, in generation %d; reinstated since, and living in generation %d: nothing was destroyed now\n",
				d.generation, v.LivingGeneration)
		case v.AlreadyDestroyed && v.Existed == receipt.ExistedNo:
			fmt.Fprintln(w, "already fenced: no key existed, nothing was destroyed; the receipt is that of then")
		case v.AlreadyDestroyed:
			fmt.Fprintln(w, "already destroyed; the receipt is that of then")
		case !v.Due.IsZero() && !v.Due.After(a.now()):
			fmt.Fprintln(w, "waiting, not destroyed: it goes on when no legal hold binds; opens and seals are refused from now on")
		case !v.Due.IsZero():
			fmt.Fprintln(w, "scheduled, not destroyed: opens and seals are refused from now on")
		case v.Existed == receipt.ExistedNo:
			fmt.Fprintln(w, "fenced: no key existed, nothing was destroyed")
		case v.Existed == receipt.ExistedUnknown:
			fmt.Fprintln(w, "fenced: no key is known, nothing was destroyed; a restored key store may have lost one")
		case destruction != nil && destruction.Scope == receipt.ScopeTenant:
			fmt.Fprintln(w, "destroyed, with the whole tenant")
		case destruction != nil && len(destruction.DeadKeys) == 0:
			fmt.Fprintln(w, "destroyed: every key of it was destroyed before; the receipt names all of it")
		default:
			fmt.Fprintln(w, "destroyed")
		}
		v.recordResult.write(w, d.subject.tenant)
		if verified == nil {
			facts(w, "drained by", instant(v.DrainedBy))
			return
		}
		fmt.Fprintln(w)
		writeVerified(w, verified, a.now())
		fmt.Fprintln(w, "\nChecked with the key that keyd itself names. Whoever is to rely on the receipt\nverifies it with a key that came another way: lethe receipt verify")
	})
	switch {
	case saved != nil:
		return with(fmt.Errorf("it is done, but the receipt was not saved: %w", saved), "request_id", d.request.id)
	case unchecked != nil:
		return with(unchecked, "request_id", d.request.id)
	}
	return err
}

// destructionIn returns the destruction that a receipt, not verified, states;
// nil if it states none.
func destructionIn(b []byte) *receipt.Statement {
	entries, err := receipt.Parse(b)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if s, err := receipt.ParseStatement(e.Statement); err == nil && s.Kind == receipt.Destroyed {
			return s
		}
	}
	return nil
}

// confirmDestroy has a person at a terminal confirm what is going to die.
func (a *app) confirmDestroy(ctx context.Context, client *sdk.Client, d *destroyFlags, id string) error {
	if d.subject.fromStdin() || !a.isTerminal(a.in) || !a.isTerminal(a.err) {
		return usagef("there is no terminal to ask on: say --yes")
	}
	call, cancel := a.call(ctx)
	defer cancel()
	status, err := client.Describe(call, d.subject.tenant, id)
	if err != nil {
		return err
	}
	newSubjectResult(d.subject.tenant, status, a.now()).write(a.err)
	what := "the whole person, classes not used yet included"
	if d.classes != nil {
		what = "only " + strings.Join(d.classes, ", ")
	}
	handle := hex.EncodeToString(status.Handle[:])
	fmt.Fprintf(a.err, "\nThis destroys %s, for good.\nType \"destroy\" or the handle to go on: ", what)
	answer, err := bufio.NewReader(io.LimitReader(a.in, 256)).ReadString('\n')
	if err != nil && err != io.EOF {
		return err
	}
	switch strings.TrimSpace(answer) {
	case "destroy", handle:
		return nil
	}
	return errNotConfirmed
}

var errNotConfirmed = errors.New("not confirmed: nothing was destroyed")

// check verifies a receipt with the keys that keyd names. It tells nothing new
// to who trusts keyd, but finds out a receipt that nobody could verify. Without
// an answer there is neither a result nor an error.
func (a *app) check(ctx context.Context, client *sdk.Client, saved []byte) (*receipt.Verified, error) {
	ctx, cancel := a.call(ctx)
	defer cancel()
	res, err := keydv1.NewLedgerServiceClient(client.Conn()).GetLedgerKey(ctx, &keydv1.GetLedgerKeyRequest{})
	if err != nil {
		return nil, nil
	}
	keys, err := receipt.PinKeys(res.GetVerifierKeys()...)
	if err != nil {
		return nil, &evidenceError{err}
	}
	v, err := receipt.Verify(saved, keys)
	if err != nil {
		return nil, &evidenceError{err}
	}
	return v, nil
}
