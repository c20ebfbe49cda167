package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
)

// completionTimeout is how long a shell waits for keyd at the press of a key.
const completionTimeout = 2 * time.Second

// complete asks keyd for words, and has none if it does not answer.
func (a *app) complete(cmd *cobra.Command, words func(context.Context, keydv1.AdminServiceClient) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	a.timeout = min(a.timeout, completionTimeout)
	if a.timeout <= 0 {
		a.timeout = completionTimeout
	}
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	var found []string
	err := a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) (err error) {
		found, err = words(ctx, admin)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeTenants(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, allTenants)
}

// completeClasses completes the classes of the tenant named before.
func (a *app) completeClasses(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	tenant, err := cmd.Flags().GetString("tenant")
	if err != nil || tenant == "" {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(cmd, func(ctx context.Context, admin keydv1.AdminServiceClient) ([]string, error) {
		res, err := admin.ListClasses(ctx, &keydv1.ListClassesRequest{Tenant: tenant})
		var names []string
		for _, c := range res.GetClasses() {
			names = append(names, c.GetName())
		}
		return names, err
	})
}
