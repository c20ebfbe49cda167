package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func (a *app) epochCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "epoch",
		Short: "Show and turn epochs, which make destructions final",
		Long: `An epoch is the lifetime of one root key in the KMS. Turning it carries every
living key over to the next one; then the old root is destroyed, and with it
whatever an older copy of the key store holds. What was destroyed in an epoch is
final when the epoch is closed.`,
		Example: `  lethe epoch status
  lethe epoch turn --wait closed`,
	}, a.epochStatusCommand(), a.epochTurnCommand(), a.epochCancelCommand(), a.epochResumeCommand(), a.epochConfirmClockCommand())
}

// epochResult is an epoch as it is printed. A null instant has not come.
type epochResult struct {
	Epoch         uint32     `json:"epoch"`
	State         string     `json:"state"`
	Root          string     `json:"root"`
	KMS           string     `json:"kms"`
	Opened        *time.Time `json:"opened"`
	PlannedEnd    *time.Time `json:"planned_end"`
	FinalBy       *time.Time `json:"final_by"`
	Draining      *time.Time `json:"draining"`
	Drained       *time.Time `json:"drained"`
	Sanitised     *time.Time `json:"sanitised"`
	RootDisabled  *time.Time `json:"root_disabled"`
	Retiring      *time.Time `json:"retiring"`
	Due           *time.Time `json:"due"`
	Closed        *time.Time `json:"closed"`
	KeysTotal     uint64     `json:"keys_total,string"`
	KeysRewrapped uint64     `json:"keys_rewrapped,string"`
	KeysDead      uint64     `json:"keys_dead,string"`
	KeysDamaged   uint64     `json:"keys_damaged,string"`
	ETASeconds    *float64   `json:"eta_seconds"`
	Late          bool       `json:"late"`
	Kept          bool       `json:"kept"`
	TurnRequested bool       `json:"turn_requested"`
	WaitingFor    string     `json:"waiting_for"`
}

func epochState(s keydv1.EpochState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "EPOCH_STATE_"))
}

func newEpochResult(e *keydv1.Epoch) epochResult {
	at := func(t *timestamppb.Timestamp) *time.Time {
		if t == nil {
			return nil
		}
		v := t.AsTime()
		return &v
	}
	v := epochResult{
		Epoch: e.GetNumber(), State: epochState(e.GetState()), Root: e.GetRootId(), KMS: e.GetKmsKind(),
		Opened: at(e.GetOpened()), PlannedEnd: at(e.GetPlannedEnd()), FinalBy: at(e.GetFinalBy()),
		Draining: at(e.GetDraining()), Drained: at(e.GetDrained()), Sanitised: at(e.GetSanitised()),
		RootDisabled: at(e.GetRootDisabled()), Retiring: at(e.GetRetiring()), Due: at(e.GetDue()), Closed: at(e.GetClosed()),
		KeysTotal: e.GetRowsTotal(), KeysRewrapped: e.GetRowsRewrapped(), KeysDead: e.GetRowsDead(), KeysDamaged: e.GetRowsDamaged(),
		Late: e.GetLate(), Kept: e.GetKept(), TurnRequested: e.GetTurnRequested(), WaitingFor: e.GetWaitingFor(),
	}
	if eta := e.GetEta(); eta != nil {
		s := eta.AsDuration().Seconds()
		v.ETASeconds = &s
	}
	return v
}

// row is the epoch in a table.
func (v epochResult) row() []string {
	keys := "-"
	if v.KeysTotal != 0 {
		keys = fmt.Sprintf("%d of %d", v.KeysRewrapped+v.KeysDead+v.KeysDamaged, v.KeysTotal)
		if v.KeysDamaged != 0 {
			keys += fmt.Sprintf(", %d DAMAGED", v.KeysDamaged)
		}
		if v.ETASeconds != nil && *v.ETASeconds > 0 {
			keys += ", " + time.Duration(*v.ETASeconds*float64(time.Second)).Round(time.Second).String() + " left"
		}
	}
	final := "-"
	switch {
	case v.Closed != nil:
		final = "since " + instant(v.Closed.Truncate(time.Second))
	case v.FinalBy != nil:
		final = "by " + instant(v.FinalBy.Truncate(time.Second))
		if v.Late {
			final += " LATE"
		}
	}
	waits := v.WaitingFor
	switch {
	case v.State == "open" && v.PlannedEnd != nil && waits == "":
		waits = "its end at " + instant(v.PlannedEnd.Truncate(time.Second))
		if v.TurnRequested {
			waits = "its turn"
		}
	}
	return []string{strconv.FormatUint(uint64(v.Epoch), 10), v.State, keys, final, orDash(waits), v.Root}
}

type epochsResult struct {
	Epochs  []epochResult `json:"epochs"`
	Problem string        `json:"problem"`
}

func (v epochsResult) write(w io.Writer) {
	rows := [][]string{{"EPOCH", "STATE", "KEYS CARRIED OVER", "FINAL", "WAITS FOR", "ROOT"}}
	for _, e := range v.Epochs {
		rows = append(rows, e.row())
	}
	table(w, rows)
	if v.Problem != "" {
		fmt.Fprintf(w, "\nproblem: %s\n", v.Problem)
	}
}

func getEpochs(ctx context.Context, admin keydv1.AdminServiceClient) (epochsResult, error) {
	res, err := admin.GetEpochs(ctx, &keydv1.GetEpochsRequest{})
	v := epochsResult{Epochs: []epochResult{}, Problem: res.GetProblem()}
	for _, e := range res.GetEpochs() {
		v.Epochs = append(v.Epochs, newEpochResult(e))
	}
	return v, err
}

func (a *app) epochStatusCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "status",
		Short: "Show every epoch and how far it has come",
		Long: `Status shows every epoch: how many of its keys are carried over, what it waits
for, and when what was destroyed in it is final. Its exit code is that of
UNAVAILABLE if keyd's work on the epochs does not go on.`,
		Example: "  lethe epoch status\n  lethe epoch status --json",
	}, func(ctx context.Context, _ []string) error {
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			v, err := getEpochs(ctx, admin)
			if err != nil {
				return err
			}
			if err := a.print(v, v.write); err != nil {
				return err
			}
			if v.Problem != "" {
				return fmt.Errorf("%w: the work on the epochs does not go on", sdk.ErrUnavailable)
			}
			return nil
		})
	})
}

// waitStates are what --wait takes, in the order in which they come.
var waitStates = []string{"open", "draining", "drained", "sanitised", "retiring", "closed"}

// reached says whether an epoch has come as far as a stage.
func (v epochResult) reached(stage string) bool {
	if stage == "sanitised" {
		return v.Sanitised != nil || v.State == "closed"
	}
	return slices.Index(waitStates, v.State) >= slices.Index(waitStates, stage)
}

// pollEvery is how often a command that waits asks keyd.
const pollEvery = 500 * time.Millisecond

// await calls done until it says true. Each call has --timeout; the waiting
// itself has no bound but ctx's. A keyd that has answered once is waited for
// when it is away.
func (a *app) await(ctx context.Context, done func(ctx context.Context) (bool, error)) error {
	answered := false
	for {
		call, cancel := a.call(ctx)
		ok, err := done(call)
		cancel()
		away := sdk.OutcomeOf(err) == keydv1.Outcome_OUTCOME_UNAVAILABLE
		if ok || err != nil && !(away && answered) {
			return err
		}
		answered = answered || err == nil
		timer := time.NewTimer(pollEvery)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(ctx.Err(), err)
		}
	}
}

func (a *app) epochTurnCommand() *cobra.Command {
	var epoch uint32
	var wait string
	c := a.command(&cobra.Command{
		Use:   "turn [--epoch N] [--wait STAGE]",
		Short: "Turn the open epoch now",
		Long: `Turn has keyd open the next epoch and carry all keys over to it, without waiting
for the planned end. It answers when that is recorded; keyd does it in the
background, and nobody's calls are interrupted.

With --wait it waits until the epoch that was turned has come to a stage:
draining, drained, sanitised, retiring or closed. Closed takes as long as the
soak and the KMS's waiting period.

A backup of the key store from before the epoch that retires cannot be used for
recovery any more once that epoch is closed.`,
		Example: "  lethe epoch turn\n  lethe epoch turn --epoch 7 --wait closed",
	}, func(ctx context.Context, _ []string) error {
		if wait != "" && !slices.Contains(waitStates[1:], wait) {
			return usagef("--wait takes one of %s", strings.Join(waitStates[1:], ", "))
		}
		client, err := a.dial(ctx)
		if err != nil {
			return err
		}
		defer client.Close()
		admin := keydv1.NewAdminServiceClient(client.Conn())
		call, cancel := a.call(ctx)
		defer cancel()
		if epoch == 0 {
			// Named, so that a call that is repeated does not turn another one.
			status, err := admin.GetStatus(call, &keydv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			epoch = status.GetEpoch()
		}
		if _, err := admin.TurnEpoch(call, &keydv1.TurnEpochRequest{Epoch: epoch}); err != nil {
			return err
		}
		var v epochResult
		look := func(ctx context.Context) (bool, error) {
			all, err := getEpochs(ctx, admin)
			if err != nil {
				return false, err
			}
			for _, e := range all.Epochs {
				if e.Epoch == epoch {
					v = e
					return wait == "" || e.reached(wait), nil
				}
			}
			return false, fmt.Errorf("%w: keyd does not show the epoch", sdk.ErrUnknown)
		}
		if err := a.await(ctx, look); err != nil {
			return err
		}
		return a.print(v, func(w io.Writer) {
			facts(w, "epoch", fmt.Sprint(v.Epoch), "state", v.State, "waits for", v.WaitingFor)
		})
	})
	c.Flags().Uint32Var(&epoch, "epoch", 0, "the epoch to turn; one that has turned is not turned again (default: the open one)")
	c.Flags().StringVar(&wait, "wait", "", "wait until the epoch is "+strings.Join(waitStates[1:], ", "))
	_ = c.RegisterFlagCompletionFunc("wait", cobra.FixedCompletions(waitStates[1:], cobra.ShellCompDirectiveNoFileComp))
	return c
}

// epochArgument reads the number of an epoch.
func epochArgument(args []string) (uint32, error) {
	n, err := strconv.ParseUint(args[0], 10, 32)
	if err != nil || n == 0 {
		return 0, usagef("an epoch is a number from 1 on")
	}
	return uint32(n), nil
}

// epochDone is what the commands below print.
func (a *app) epochDone(epoch uint32, done string) error {
	v := struct {
		Epoch uint32 `json:"epoch"`
	}{epoch}
	return a.print(v, func(w io.Writer) { fmt.Fprintln(w, done) })
}

func (a *app) epochCancelCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "cancel EPOCH",
		Args:  exactly("EPOCH"),
		Short: "Keep the root of a past epoch",
		Long: `Cancel keeps the root of an epoch from being destroyed, and calls its destruction
off in the KMS while the waiting period lasts: a backup that needs it can be
used. What was destroyed in that epoch does not become final meanwhile; this is
logged, receipts say it, and keyd's health reports it until epoch resume.`,
		Example: "  lethe epoch cancel 7",
	}, func(ctx context.Context, args []string) error {
		epoch, err := epochArgument(args)
		if err != nil {
			return err
		}
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			if _, err := admin.CancelRetirement(ctx, &keydv1.CancelRetirementRequest{Epoch: epoch}); err != nil {
				return err
			}
			return a.epochDone(epoch, "the root is kept; what was destroyed in this epoch does not become final")
		})
	})
}

func (a *app) epochResumeCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "resume EPOCH",
		Args:  exactly("EPOCH"),
		Short: "Let a root that was kept be destroyed",
		Long: `Resume ends what epoch cancel, or somebody in the KMS itself, began: the root is
disabled, soaks, and is scheduled for destruction anew.`,
		Example: "  lethe epoch resume 7",
	}, func(ctx context.Context, args []string) error {
		epoch, err := epochArgument(args)
		if err != nil {
			return err
		}
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			if _, err := admin.ResumeRetirement(ctx, &keydv1.ResumeRetirementRequest{Epoch: epoch}); err != nil {
				return err
			}
			return a.epochDone(epoch, "the retirement goes on")
		})
	})
}

func (a *app) epochConfirmClockCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "confirm-clock",
		Short: "Say that keyd's clock is right",
		Long: `Confirm-clock says that keyd's clock is right although it has jumped by more than
a day, or keyd was stopped for longer. Until then keyd does nothing that a clock
triggers and nobody can undo: expiries, destructions that fall due, scheduled
turns, and the destruction of roots. Look at the time that it prints.`,
		Example: "  lethe epoch confirm-clock",
	}, func(ctx context.Context, _ []string) error {
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			res, err := admin.ConfirmClock(ctx, &keydv1.ConfirmClockRequest{})
			if err != nil {
				return err
			}
			v := struct {
				Time time.Time `json:"time"`
			}{res.GetTime().AsTime()}
			return a.print(v, func(w io.Writer) { facts(w, "keyd's clock", instant(v.Time)) })
		})
	})
}
