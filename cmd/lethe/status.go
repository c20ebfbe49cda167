package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func (a *app) statusCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "status",
		Short: "Show how keyd is",
		Long: `Status shows what keyd says of itself and of what it stands on. Its exit code is
that of UNAVAILABLE if any part is not healthy.`,
		Example: "  lethe status\n  lethe status --json",
	}, func(ctx context.Context, _ []string) error { return a.status(ctx) })
}

type componentResult struct {
	Name    string `json:"name"`
	Healthy bool   `json:"healthy"`
	Detail  string `json:"detail"`
}

type statusResult struct {
	Version         string            `json:"version"`
	Development     bool              `json:"development"`
	Incarnation     string            `json:"incarnation"`
	FormatLevel     uint32            `json:"format_level"`
	Epoch           uint32            `json:"epoch"`
	EpochPlannedEnd time.Time         `json:"epoch_planned_end,omitzero"`
	LedgerSize      uint64            `json:"ledger_size,string"`
	AnchoredSize    uint64            `json:"anchored_size,string"`
	Components      []componentResult `json:"components"`
}

func (a *app) status(ctx context.Context) error {
	return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
		res, err := admin.GetStatus(ctx, &keydv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		v := statusResult{
			Version: res.GetVersion(), Development: res.GetDevelopment(),
			Incarnation: hex.EncodeToString(res.GetIncarnation()), FormatLevel: res.GetFormatLevel(),
			Epoch: res.GetEpoch(), LedgerSize: res.GetLedgerSize(), AnchoredSize: res.GetAnchoredSize(),
			Components: []componentResult{},
		}
		if end := res.GetEpochPlannedEnd(); end != nil {
			v.EpochPlannedEnd = end.AsTime()
		}
		var ill []string
		for _, c := range res.GetComponents() {
			v.Components = append(v.Components, componentResult{c.GetName(), c.GetHealthy(), c.GetDetail()})
			if !c.GetHealthy() {
				ill = append(ill, c.GetName())
			}
		}
		if err := a.print(v, v.write); err != nil {
			return err
		}
		if len(ill) > 0 {
			return fmt.Errorf("%w: not healthy: %s", sdk.ErrUnavailable, strings.Join(ill, ", "))
		}
		return nil
	})
}

func (v statusResult) write(w io.Writer) {
	mode := "roles, over TLS"
	if v.Development {
		mode = "development: no roles, no TLS"
	}
	facts(w,
		"keyd", v.Version,
		"mode", mode,
		"store", v.Incarnation,
		"format", fmt.Sprint(v.FormatLevel),
		"epoch", fmt.Sprintf("%d, planned to end at %s", v.Epoch, orDash(instant(v.EpochPlannedEnd))),
		"ledger", fmt.Sprintf("%d entries, %d of them anchored", v.LedgerSize, v.AnchoredSize),
	)
	fmt.Fprintln(w)
	rows := [][]string{{"COMPONENT", "STATE", "DETAIL"}}
	for _, c := range v.Components {
		state := "healthy"
		if !c.Healthy {
			state = "NOT HEALTHY"
		}
		rows = append(rows, []string{c.Name, state, c.Detail})
	}
	table(w, rows)
}
