package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// cancelCommand calls off a destruction that has not happened.
func (a *app) cancelCommand() *cobra.Command {
	var subject subjectFlags
	var r requestFlags
	var save receiptFlags
	var only string
	var c *cobra.Command
	c = a.command(&cobra.Command{
		Use:   "cancel --tenant T --subject S --reason CODE [--destroy-request-id ID]",
		Short: "Call off a scheduled destruction",
		Long: `Cancel calls off what 'lethe destroy' scheduled for a subject: what one request
asked for, or all of it. What was refused meanwhile opens again. It
is ERASED when it comes too late.
` + subjectHelp,
		Example: `  lethe cancel --tenant acme --subject-file id.txt --reason user-request
  lethe cancel --tenant acme --subject 4711 --destroy-request-id dsr-118 --reason mistake --json`,
	}, func(ctx context.Context, _ []string) error {
		id, err := subject.read(a)
		if err != nil {
			return err
		}
		out, err := save.create(a)
		if err != nil {
			return err
		}
		defer out.discard()
		if err := r.settle(a, c); err != nil {
			return err
		}
		return a.withClient(ctx, func(ctx context.Context, client *sdk.Client) error {
			done, err := client.CancelDestruction(ctx, sdk.CancelRequest{
				Tenant: subject.tenant, Subject: id, DestroyRequestID: only, RequestID: r.id, Reason: r.reason,
			})
			if err != nil {
				return with(err, "request_id", r.id)
			}
			v := struct {
				recordResult
				Repeat bool   `json:"repeat"`
				State  string `json:"state"`
			}{save.result(r.id, done.LedgerIndex, done.Receipt), done.Repeat, stateName(done.State)}
			headline, undone := "cancelled", ""
			if done.Repeat {
				headline = "cancelled then"
				switch done.State {
				case keydv1.SubjectState_SUBJECT_STATE_SCHEDULED:
					undone = "it was scheduled again since, and is pending"
				case keydv1.SubjectState_SUBJECT_STATE_DESTROYED:
					undone = "it was destroyed since"
				}
			}
			if err := out.save(done.Receipt); err != nil {
				return fmt.Errorf("%s, but the receipt was not saved: %w", headline, err)
			}
			return a.printUnlessUndone(v, headline, undone, func(w io.Writer) { v.write(w, subject.tenant) })
		})
	})
	subject.add(a, c)
	c.MarkFlagsOneRequired("subject", "subject-file")
	r.add(c)
	save.add(c)
	c.Flags().StringVar(&only, "destroy-request-id", "", "call off only what this request scheduled")
	_ = c.RegisterFlagCompletionFunc("destroy-request-id", cobra.NoFileCompletions)
	return c
}
