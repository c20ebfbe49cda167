package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// A class whose policy is not named gets that of keyd's own classes.
const (
	defaultWidth = 30 * day
	defaultLease = time.Minute
)

// admin calls AdminService.
func (a *app) admin(ctx context.Context, do func(context.Context, keydv1.AdminServiceClient) error) error {
	return a.withClient(ctx, func(ctx context.Context, c *sdk.Client) error {
		return do(ctx, keydv1.NewAdminServiceClient(c.Conn()))
	})
}

// withClient dials keyd for calls that together take no longer than --timeout.
func (a *app) withClient(ctx context.Context, do func(context.Context, *sdk.Client) error) error {
	client, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := a.call(ctx)
	defer cancel()
	return do(ctx, client)
}

// classResult is a class as it is printed.
type classResult struct {
	Name         string `json:"name"`
	Number       uint32 `json:"number"`
	BucketWidthS int64  `json:"bucket_width_s"`
	LeaseMS      int64  `json:"lease_ms"`
	RetentionS   *int64 `json:"retention_s"` // null: for ever
}

func classResults(classes []*keydv1.Class) []classResult {
	all := make([]classResult, 0, len(classes))
	for _, c := range classes {
		r := classResult{
			Name: c.GetName(), Number: c.GetNumber(),
			BucketWidthS: c.GetBucketWidth().GetSeconds(),
			LeaseMS:      c.GetLease().AsDuration().Milliseconds(),
		}
		if c.GetRetention() != nil {
			r.RetentionS = &c.Retention.Seconds
		}
		all = append(all, r)
	}
	return all
}

func writeClasses(w io.Writer, classes []classResult) {
	rows := [][]string{{"CLASS", "NUMBER", "BUCKET", "LEASE", "RETENTION"}}
	for _, c := range classes {
		retention := "for ever"
		if c.RetentionS != nil {
			retention = formatDuration(time.Duration(*c.RetentionS) * time.Second)
		}
		rows = append(rows, []string{
			c.Name, strconv.FormatUint(uint64(c.Number), 10),
			formatDuration(time.Duration(c.BucketWidthS) * time.Second),
			formatDuration(time.Duration(c.LeaseMS) * time.Millisecond),
			retention,
		})
	}
	table(w, rows)
}

// parseClass reads name[:width[:lease]].
func parseClass(s string) (*keydv1.Class, error) {
	name, rest, _ := strings.Cut(s, ":")
	width, lease, _ := strings.Cut(rest, ":")
	if err := ident.Class(name); err != nil {
		return nil, err
	}
	w, l := defaultWidth, defaultLease
	var err error
	if width != "" {
		if w, err = parseDuration(width); err != nil {
			return nil, usagef("--class: width: %v", err)
		}
	}
	if lease != "" {
		if l, err = parseDuration(lease); err != nil {
			return nil, usagef("--class: lease: %v", err)
		}
	}
	return &keydv1.Class{Name: name, BucketWidth: durationpb.New(w), Lease: durationpb.New(l)}, nil
}

func (a *app) tenantCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "tenant",
		Short:   "Create and list tenants",
		Example: "  lethe tenant create acme\n  lethe tenant list",
	}, a.tenantCreateCommand(), a.tenantListCommand())
}

func (a *app) tenantCreateCommand() *cobra.Command {
	var specs []string
	c := a.command(&cobra.Command{
		Use:   "create NAME [--class NAME[:WIDTH[:LEASE]]]...",
		Short: "Create a tenant with its keys and first classes",
		Long: `Create makes a tenant. A name is never used twice, not even after its tenant is
gone.

A class is NAME, the width of its buckets (1h to 366d; 30d unless given) and the
lease of its keys (0s to 1h; 1m unless given). The lease bounds how long clients
go on without keyd, and as long they may take to stop after a destruction.
Without --class the tenant gets checkpoint, trace, backup and memory.`,
		Example: `  lethe tenant create acme
  lethe tenant create acme --class memory:30d:1m --class trace:1d:10s`,
		Args: exactly("NAME"),
	}, func(ctx context.Context, args []string) error {
		if err := ident.Tenant(args[0]); err != nil {
			return err
		}
		req := &keydv1.CreateTenantRequest{Tenant: args[0]}
		for _, s := range specs {
			class, err := parseClass(s)
			if err != nil {
				return err
			}
			req.Classes = append(req.Classes, class)
		}
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			res, err := admin.CreateTenant(ctx, req)
			if err != nil {
				return err
			}
			v := struct {
				Tenant  string        `json:"tenant"`
				Classes []classResult `json:"classes"`
			}{args[0], classResults(res.GetClasses())}
			return a.print(v, func(w io.Writer) {
				fmt.Fprintf(w, "created tenant %s\n", v.Tenant)
				writeClasses(w, v.Classes)
			})
		})
	})
	c.Flags().StringArrayVar(&specs, "class", nil, "a first class, NAME[:WIDTH[:LEASE]]; may be given several times")
	_ = c.RegisterFlagCompletionFunc("class", cobra.NoFileCompletions)
	return c
}

func (a *app) tenantListCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:     "list",
		Short:   "List the tenants",
		Example: "  lethe tenant list --json",
	}, func(ctx context.Context, _ []string) error {
		var names []string
		err := a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) (err error) {
			names, err = allTenants(ctx, admin)
			return err
		})
		if err != nil {
			return err
		}
		v := struct {
			Tenants []string `json:"tenants"`
		}{names}
		return a.print(v, func(w io.Writer) {
			for _, n := range names {
				fmt.Fprintln(w, n)
			}
		})
	})
}

// allTenants reads every page of the list, and sorts it.
func allTenants(ctx context.Context, admin keydv1.AdminServiceClient) ([]string, error) {
	names := []string{}
	req := &keydv1.ListTenantsRequest{PageSize: 1000}
	for {
		res, err := admin.ListTenants(ctx, req)
		if err != nil {
			return nil, err
		}
		names = append(names, res.GetTenants()...)
		if res.GetNextPageToken() == "" {
			slices.Sort(names)
			return names, nil
		}
		req.PageToken = res.GetNextPageToken()
	}
}

func (a *app) classCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "class",
		Short:   "Make, change and list a tenant's classes of data",
		Example: "  lethe class put invoice --tenant acme --width 30d --lease 1m\n  lethe class list --tenant acme",
	}, a.classPutCommand(), a.classListCommand())
}

func (a *app) classPutCommand() *cobra.Command {
	var tenant, width, lease string
	c := a.command(&cobra.Command{
		Use:   "put NAME --tenant T [--width W] [--lease L]",
		Short: "Make a class, or change its policy",
		Long: `Put makes a class, or changes one. What is not given stays as it is, and for a
new class is 30d and 1m. A new width holds from the end of the running bucket on.`,
		Example: `  lethe class put invoice --tenant acme --width 30d --lease 1m
  lethe class put trace --tenant acme --lease 10s`,
		Args: exactly("NAME"),
	}, func(ctx context.Context, args []string) error {
		if err := ident.Tenant(tenant); err != nil {
			return err
		}
		class, err := parseClass(args[0] + ":" + width + ":" + lease)
		if err != nil {
			return err
		}
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			if width == "" || lease == "" {
				if err := keepPolicy(ctx, admin, tenant, class, width == "", lease == ""); err != nil {
					return err
				}
			}
			res, err := admin.PutClass(ctx, &keydv1.PutClassRequest{Tenant: tenant, Class: class})
			if err != nil {
				return err
			}
			put := classResults([]*keydv1.Class{res.GetClass()})
			v := struct {
				Tenant string      `json:"tenant"`
				Class  classResult `json:"class"`
			}{tenant, put[0]}
			return a.print(v, func(w io.Writer) { writeClasses(w, put) })
		})
	})
	a.addTenantFlag(c, &tenant)
	c.Flags().StringVar(&width, "width", "", "width of a bucket, 1h to 366d")
	c.Flags().StringVar(&lease, "lease", "", "longest lease of a key, 0s to 1h")
	_ = c.RegisterFlagCompletionFunc("width", cobra.NoFileCompletions)
	_ = c.RegisterFlagCompletionFunc("lease", cobra.NoFileCompletions)
	return c
}

// keepPolicy sets what of a class's policy is to stay, if the class exists.
func keepPolicy(ctx context.Context, admin keydv1.AdminServiceClient, tenant string, class *keydv1.Class, width, lease bool) error {
	res, err := admin.ListClasses(ctx, &keydv1.ListClassesRequest{Tenant: tenant})
	if err != nil {
		return err
	}
	for _, c := range res.GetClasses() {
		if c.GetName() != class.GetName() {
			continue
		}
		if width {
			class.BucketWidth = c.GetBucketWidth()
		}
		if lease {
			class.Lease = c.GetLease()
		}
		class.Retention = c.GetRetention()
	}
	return nil
}

func (a *app) classListCommand() *cobra.Command {
	var tenant string
	c := a.command(&cobra.Command{
		Use:     "list --tenant T",
		Short:   "List a tenant's classes",
		Example: "  lethe class list --tenant acme",
	}, func(ctx context.Context, _ []string) error {
		if err := ident.Tenant(tenant); err != nil {
			return err
		}
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			res, err := admin.ListClasses(ctx, &keydv1.ListClassesRequest{Tenant: tenant})
			if err != nil {
				return err
			}
			v := struct {
				Tenant  string        `json:"tenant"`
				Classes []classResult `json:"classes"`
			}{tenant, classResults(res.GetClasses())}
			return a.print(v, func(w io.Writer) { writeClasses(w, v.Classes) })
		})
	})
	a.addTenantFlag(c, &tenant)
	return c
}

// exactly wants the arguments that it names.
func exactly(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return usagef("wants %s", strings.Join(names, " "))
		}
		return nil
	}
}
