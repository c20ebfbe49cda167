package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func (a *app) holdCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "hold",
		Short:   "Place, release and list legal holds",
		Example: "  lethe hold place case-17 --tenant acme --subject-file id.txt --reason litigation",
	}, a.holdPlaceCommand(), a.holdReleaseCommand(), a.holdListCommand())
}

// holdFlags say what is held. A whole tenant is held only if that is said: not
// because a subject was forgotten.
type holdFlags struct {
	subject subjectFlags
	whole   bool
}

func (h *holdFlags) add(a *app, c *cobra.Command) {
	h.subject.add(a, c)
	c.Flags().BoolVar(&h.whole, "whole-tenant", false, "the whole tenant, instead of one subject")
	c.MarkFlagsOneRequired("subject", "subject-file", "whole-tenant")
	c.MarkFlagsMutuallyExclusive("subject", "whole-tenant")
	c.MarkFlagsMutuallyExclusive("subject-file", "whole-tenant")
}

// read returns the subject's id, or nil for the whole tenant.
func (h *holdFlags) read(a *app) ([]byte, error) {
	if !h.subject.given() {
		if !h.whole {
			return nil, usagef("name a subject, or say --whole-tenant")
		}
		return nil, ident.Tenant(h.subject.tenant)
	}
	id, err := h.subject.read(a)
	return []byte(id), err
}

func (a *app) holdPlaceCommand() *cobra.Command {
	var until timeValue
	c, change := a.holdChangeCommand(&cobra.Command{
		Use:   "place HOLD --tenant T (--subject S | --whole-tenant) --reason CODE [--until TIME]",
		Short: "Forbid every destruction of a subject's or a tenant's keys",
		Long: `Place makes a legal hold with the id HOLD. While it binds, every destruction of
what it covers is refused as HELD, or waits if it was asked for with
'lethe destroy --wait-for-holds': until the hold is released, or until --until.
` + subjectHelp,
		Example: `  lethe hold place case-17 --tenant acme --subject-file id.txt --reason litigation
  lethe hold place audit-9 --tenant acme --whole-tenant --reason audit --until 2027-01-31T00:00:00Z`,
	})
	c.Flags().Var(&until, "until", "when the hold ends by itself, such as 2027-01-31T00:00:00Z")
	_ = c.RegisterFlagCompletionFunc("until", cobra.NoFileCompletions)
	change.do = func(ctx context.Context, holds keydv1.HoldServiceClient, h holdRequest) (holdAnswer, error) {
		req := &keydv1.PlaceHoldRequest{Tenant: h.tenant, SubjectId: h.subject, HoldId: h.hold, Reason: h.reason, RequestId: h.requestID}
		if !until.IsZero() {
			req.End = timestamppb.New(until.Time)
		}
		return holds.PlaceHold(ctx, req)
	}
	change.done, change.then = "the hold binds", "the hold was placed then"
	change.undone = func(binds bool) string {
		if binds {
			return ""
		}
		return "it was released or has ended since: it does not bind"
	}
	return c
}

func (a *app) holdReleaseCommand() *cobra.Command {
	c, change := a.holdChangeCommand(&cobra.Command{
		Use:   "release HOLD --tenant T (--subject S | --whole-tenant) --reason CODE",
		Short: "End a legal hold",
		Long: `Release ends the legal hold with the id HOLD. A destruction that the hold refused
has to be asked for again; one that waits, as 'lethe destroy --wait-for-holds'
does, goes on by itself when no other hold binds.
` + subjectHelp,
		Example: "  lethe hold release case-17 --tenant acme --subject-file id.txt --reason case-closed",
	})
	change.do = func(ctx context.Context, holds keydv1.HoldServiceClient, h holdRequest) (holdAnswer, error) {
		return holds.ReleaseHold(ctx, &keydv1.ReleaseHoldRequest{
			Tenant: h.tenant, SubjectId: h.subject, HoldId: h.hold, Reason: h.reason, RequestId: h.requestID,
		})
	}
	change.done, change.then = "the hold is released", "the hold was released then"
	change.undone = func(binds bool) string {
		if !binds {
			return ""
		}
		return "one with its id was placed since, and binds"
	}
	return c
}

// holdChange is what placing and releasing differ in.
type holdChange struct {
	do func(context.Context, keydv1.HoldServiceClient, holdRequest) (holdAnswer, error)
	// done is what is said of it, then what is said of a repeat.
	done, then string
	// undone says of a repeat what has become of it; empty: it still holds.
	undone func(binds bool) string
}

// holdAnswer is keyd's answer to either.
type holdAnswer interface {
	GetReceipt() []byte
	GetLedgerIndex() uint64
	GetRepeat() bool
	GetBinds() bool
}

type holdRequest struct {
	tenant, hold, reason, requestID string
	subject                         []byte
}

func (a *app) holdChangeCommand(c *cobra.Command) (*cobra.Command, *holdChange) {
	var h holdFlags
	var r requestFlags
	var save receiptFlags
	var change holdChange
	c.Args = exactly("HOLD")
	a.command(c, func(ctx context.Context, args []string) error {
		subject, err := h.read(a)
		if err != nil {
			return err
		}
		if err := ident.HoldID(args[0]); err != nil {
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
			done, err := change.do(ctx, keydv1.NewHoldServiceClient(client.Conn()),
				holdRequest{tenant: h.subject.tenant, hold: args[0], reason: r.reason, requestID: r.id, subject: subject})
			if err != nil {
				return with(err, "request_id", r.id)
			}
			v := struct {
				Hold string `json:"hold"`
				recordResult
				Repeat bool `json:"repeat"`
				Binds  bool `json:"binds"`
			}{args[0], save.result(r.id, done.GetLedgerIndex(), done.GetReceipt()), done.GetRepeat(), done.GetBinds()}
			headline, undone := change.done, ""
			if v.Repeat {
				headline, undone = change.then, change.undone(v.Binds)
			}
			if err := out.save(done.GetReceipt()); err != nil {
				return fmt.Errorf("%s, but the receipt was not saved: %w", headline, err)
			}
			return a.printUnlessUndone(v, headline, undone, func(w io.Writer) { v.recordResult.write(w, h.subject.tenant) })
		})
	})
	h.add(a, c)
	r.add(c)
	save.add(c)
	return c, &change
}

// holdResult is a hold as it is printed.
type holdResult struct {
	Hold        string     `json:"hold"`
	Reason      string     `json:"reason"`
	Placed      time.Time  `json:"placed"`
	End         *time.Time `json:"end"` // null: when it is released
	LedgerIndex uint64     `json:"ledger_index,string"`
	Binds       bool       `json:"binds"`
	Principal   string     `json:"principal"` // who placed it; empty in development
}

func (a *app) holdListCommand() *cobra.Command {
	var h holdFlags
	c := a.command(&cobra.Command{
		Use:   "list --tenant T (--subject S | --whole-tenant)",
		Short: "List the legal holds on a subject, or on a tenant itself",
		Long: `List shows the holds on a subject, or with --whole-tenant those on the tenant
itself, which bind all of its subjects. subject status shows both together.
` + subjectHelp,
		Example: "  lethe hold list --tenant acme --whole-tenant\n  lethe hold list --tenant acme --subject-file id.txt --json",
	}, func(ctx context.Context, _ []string) error {
		subject, err := h.read(a)
		if err != nil {
			return err
		}
		return a.withClient(ctx, func(ctx context.Context, client *sdk.Client) error {
			res, err := keydv1.NewHoldServiceClient(client.Conn()).ListHolds(ctx, &keydv1.ListHoldsRequest{Tenant: h.subject.tenant, SubjectId: subject})
			if err != nil {
				return err
			}
			v := struct {
				Tenant string       `json:"tenant"`
				Holds  []holdResult `json:"holds"`
			}{h.subject.tenant, []holdResult{}}
			rows := [][]string{{"HOLD", "REASON", "PLACED", "BY", "ENDS", "LEDGER", "BINDS"}}
			for _, hold := range res.GetHolds() {
				r := holdResult{
					Hold: hold.GetHoldId(), Reason: hold.GetReason(), Placed: hold.GetPlaced().AsTime(),
					LedgerIndex: hold.GetLedgerIndex(), Binds: true, Principal: hold.GetPrincipal(),
				}
				ends := "when released"
				if hold.GetEnd() != nil {
					end := hold.GetEnd().AsTime()
					r.End, r.Binds, ends = &end, a.now().Before(end), instant(end)
				}
				v.Holds = append(v.Holds, r)
				rows = append(rows, []string{r.Hold, r.Reason, instant(r.Placed), orDash(r.Principal), ends, fmt.Sprint(r.LedgerIndex), fmt.Sprint(r.Binds)})
			}
			return a.print(v, func(w io.Writer) { table(w, rows) })
		})
	})
	h.add(a, c)
	return c
}

// timeValue is the value of a flag: a time in the form of RFC 3339.
type timeValue struct{ time.Time }

func (v *timeValue) Set(s string) (err error) {
	v.Time, err = time.Parse(time.RFC3339, s)
	return err
}

func (v *timeValue) String() string { return instant(v.Time) }
func (v *timeValue) Type() string   { return "time" }
