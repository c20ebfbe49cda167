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
	EndAction    string `json:"end_action,omitempty"`
	ApprovedBy   string `json:"approved_by,omitempty"`
	LedgerIndex  string `json:"ledger_index"` // of the newest change
}

func classResults(classes []*keydv1.Class) []classResult {
	all := make([]classResult, 0, len(classes))
	for _, c := range classes {
		r := classResult{
			Name: c.GetName(), Number: c.GetNumber(),
			BucketWidthS: c.GetBucketWidth().GetSeconds(),
			LeaseMS:      c.GetLease().AsDuration().Milliseconds(),
			ApprovedBy:   c.GetApprovedBy(),
			LedgerIndex:  strconv.FormatUint(c.GetLedgerIndex(), 10),
		}
		if c.GetRetention() != nil {
			r.RetentionS = &c.Retention.Seconds
			r.EndAction = endActions[c.GetEndAction()]
		}
		all = append(all, r)
	}
	return all
}

// endActions are the words for what happens at the end of a retention.
var endActions = map[keydv1.EndAction]string{
	keydv1.EndAction_END_ACTION_UNSPECIFIED: "destroy",
	keydv1.EndAction_END_ACTION_DESTROY:     "destroy",
	keydv1.EndAction_END_ACTION_DENY:        "deny",
}

func (c *classResult) retention() string {
	if c.RetentionS == nil {
		return "for ever"
	}
	return formatDuration(time.Duration(*c.RetentionS) * time.Second)
}

func writeClasses(w io.Writer, classes []classResult) {
	rows := [][]string{{"CLASS", "NUMBER", "BUCKET", "LEASE", "RETENTION"}}
	for _, c := range classes {
		rows = append(rows, []string{
			c.Name, strconv.FormatUint(uint64(c.Number), 10),
			formatDuration(time.Duration(c.BucketWidthS) * time.Second),
			formatDuration(time.Duration(c.LeaseMS) * time.Millisecond),
			c.retention(),
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
		Short:   "Create, list and erase tenants",
		Example: "  lethe tenant create acme\n  lethe tenant list",
	}, a.tenantCreateCommand(), a.tenantListCommand(), a.tenantDestroyCommand())
}

func (a *app) tenantCreateCommand() *cobra.Command {
	var specs []string
	var r requestIDFlag
	var c *cobra.Command
	c = a.command(&cobra.Command{
		Use:   "create NAME [--class NAME[:WIDTH[:LEASE]]]... [--request-id ID]",
		Short: "Create a tenant with its keys and first classes",
		Long: `Create makes a tenant. A name is never used twice, not even after its tenant is
gone.

A class is NAME, the width of its buckets (1h to 366d; 30d unless given) and the
lease of its keys (0s to 1h; 1m unless given). The lease bounds how long clients
go on without keyd, and as long they may take to stop after a destruction.
Without --class the tenant gets checkpoint, trace, backup and memory.

A request id that was not given is made, and told first: if the answer is lost,
or is UNAVAILABLE, repeat the command with that --request-id.`,
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
		if err := r.settle(a, c); err != nil {
			return err
		}
		req.RequestId = r.id
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			res, err := admin.CreateTenant(ctx, req)
			if err != nil {
				return with(err, "request_id", r.id)
			}
			v := struct {
				Tenant    string        `json:"tenant"`
				RequestID string        `json:"request_id"`
				Classes   []classResult `json:"classes"`
			}{args[0], r.id, classResults(res.GetClasses())}
			return a.print(v, func(w io.Writer) {
				fmt.Fprintf(w, "created tenant %s\n", v.Tenant)
				writeClasses(w, v.Classes)
			})
		})
	})
	c.Flags().StringArrayVar(&specs, "class", nil, "a first class, NAME[:WIDTH[:LEASE]]; may be given several times")
	_ = c.RegisterFlagCompletionFunc("class", cobra.NoFileCompletions)
	r.add(c)
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

// exactly wants the arguments that it names.
func exactly(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return usagef("wants %s", strings.Join(names, " "))
		}
		return nil
	}
}

// tenantDestroyCommand erases a whole tenant.
func (a *app) tenantDestroyCommand() *cobra.Command {
	var r requestFlags
	var save receiptFlags
	var yes string
	var c *cobra.Command
	c = a.command(&cobra.Command{
		Use:   "destroy NAME --reason CODE --yes-erase NAME [--receipt FILE]",
		Short: "Erase a whole tenant, for good",
		Long: `Destroy erases a tenant: everything that was ever sealed for any of its subjects
never opens again. It is refused while a legal hold on the tenant, or on any of
its subjects, binds. There is no way back, and the name is never used again.

It does not ask: --yes-erase has to repeat the tenant's name.`,
		Example: "  lethe tenant destroy acme --reason offboarding --yes-erase acme --receipt acme.json",
		Args:    exactly("NAME"),
	}, func(ctx context.Context, args []string) error {
		if err := ident.Tenant(args[0]); err != nil {
			return err
		}
		if yes != args[0] {
			return usagef("--yes-erase has to repeat the tenant's name")
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
			res, err := keydv1.NewErasureServiceClient(client.Conn()).DestroyTenant(ctx, &keydv1.DestroyTenantRequest{
				Tenant: args[0], RequestId: r.id, Reason: r.reason,
			})
			if err != nil {
				return with(err, "request_id", r.id)
			}
			v := struct {
				Tenant string `json:"tenant"`
				recordResult
				AlreadyDestroyed bool      `json:"already_destroyed"`
				DrainedBy        time.Time `json:"drained_by"`
			}{args[0], save.result(r.id, res.GetLedgerIndex(), res.GetReceipt()), res.GetAlreadyDestroyed(), res.GetDrainedBy().AsTime()}
			if err := out.save(res.GetReceipt()); err != nil {
				return fmt.Errorf("it is destroyed, but the receipt was not saved: %w", err)
			}
			return a.print(v, func(w io.Writer) {
				fmt.Fprintf(w, "erased tenant %s\n", args[0])
				v.recordResult.write(w, args[0])
				facts(w, "drained by", instant(v.DrainedBy))
			})
		})
	})
	r.add(c)
	save.add(c)
	c.Flags().StringVar(&yes, "yes-erase", "", "the tenant's name, once more")
	_ = c.RegisterFlagCompletionFunc("yes-erase", cobra.NoFileCompletions)
	return c
}
