package main

import (
	"context"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"lethe/keyd"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func (a *app) policyCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "policy",
		Short:   "Look at who may do what",
		Example: "  lethe policy check policy.toml",
	}, a.policyCheckCommand())
}

func (a *app) policyCheckCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "check FILE",
		Short: "Read a policy file as keyd does, and show what it grants",
		Long: `Check reads the policy in FILE as keyd does, and shows which principal has which
roles for which tenants; * stands for all, those to come too. What keyd would
refuse, it refuses. It needs no keyd.`,
		Example: "  lethe policy check policy.toml\n  lethe policy check policy.toml --json",
		Args:    exactly("FILE"),
	}, func(_ context.Context, args []string) error {
		b, err := os.ReadFile(args[0])
		if err != nil {
			return err
		}
		policy, err := keyd.ParsePolicy(b)
		if err != nil {
			return &sdk.Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: args[0] + ": " + err.Error()}
		}
		v := struct {
			Grants []keyd.Grant `json:"grants"`
		}{policy.Grants()}
		return a.print(v, func(w io.Writer) {
			rows := [][]string{{"PRINCIPAL", "TENANT", "ROLES"}}
			for _, g := range v.Grants {
				rows = append(rows, []string{g.Principal, g.Tenant, strings.Join(g.Roles, " ")})
			}
			table(w, rows)
		})
	})
}
