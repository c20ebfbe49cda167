package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"slices"
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
roles for which tenants; * stands for all, those to come too. It notes who can
both place and release legal holds. What keyd would refuse, it refuses. It needs
no keyd.`,
		Example: "  lethe policy check policy.toml\n  lethe policy check policy.toml --json",
		Args:    exactly("FILE"),
	}, func(_ context.Context, args []string) error {
		policy, err := keyd.ReadPolicy(args[0])
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return err
		}
		if err != nil {
			return &sdk.Error{Outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, Message: err.Error()}
		}
		v := struct {
			Grants []keyd.Grant `json:"grants"`
		}{policy.Grants()}
		for _, who := range placeAndRelease(v.Grants) {
			a.note("%s can both place and release legal holds", who)
		}
		return a.print(v, func(w io.Writer) {
			rows := [][]string{{"PRINCIPAL", "TENANT", "ROLES"}}
			for _, g := range v.Grants {
				rows = append(rows, []string{g.Principal, g.Tenant, strings.Join(g.Roles, " ")})
			}
			table(w, rows)
		})
	})
}

// placeAndRelease are the principals who have, for one tenant, both roles that are
// apart so that nobody ends a hold unseen.
func placeAndRelease(grants []keyd.Grant) (who []string) {
	roles := make(map[string][]string) // of a principal, for a tenant
	of := func(principal, tenant string) string { return principal + " " + tenant }
	for _, g := range grants {
		roles[of(g.Principal, g.Tenant)] = g.Roles
	}
	for _, g := range grants {
		all := slices.Concat(g.Roles, roles[of(g.Principal, "*")])
		if slices.Contains(all, "holder") && slices.Contains(all, "releaser") && !slices.Contains(who, g.Principal) {
			who = append(who, g.Principal)
		}
	}
	return who
}
