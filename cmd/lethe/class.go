package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/proto/ident"
	keydv1 "lethe/proto/keyd/v1"
)

func (a *app) classCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "class",
		Short:   "Make, change and list a tenant's classes of data",
		Example: "  lethe class put invoice --tenant acme --width 30d --lease 1m\n  lethe class list --tenant acme",
	}, a.classPutCommand(), a.classListCommand(), a.classScheduleCommand())
}

func (a *app) classPutCommand() *cobra.Command {
	var tenant, width, lease, retention, end, approved string
	c := a.command(&cobra.Command{
		Use:   "put NAME --tenant T [--width W] [--lease L] [--retention R --approved-by CODE]",
		Short: "Make a class, or change its policy",
		Long: `Put makes a class, or changes one. What is not given stays as it is, and for a
new class is 30d, 1m and no end. A new width holds from the end of the running
bucket on.

A retention counts from sealing, for a stream from its beginning. When it is
over, opens are refused at once, and a day later (the grace) the bucket's key is
destroyed, for everybody but those whom a legal hold covers; with --end-action
deny it stays. A longer retention, or deny, set within the grace, takes that
back; what is destroyed stays destroyed.`,
		Example: `  lethe class put invoice --tenant acme --width 30d --lease 1m
  lethe class put trace --tenant acme --retention 14d --approved-by dpo-2026-04
  lethe class put trace-metadata --tenant acme --retention 396d --approved-by dpo-2026-04
  lethe class put trace --tenant acme --retention none`,
		Args: exactly("NAME"),
	}, func(ctx context.Context, args []string) error {
		if err := ident.Tenant(tenant); err != nil {
			return err
		}
		class, err := parseClass(args[0] + ":" + width + ":" + lease)
		if err != nil {
			return err
		}
		action := keydv1.EndAction_END_ACTION_UNSPECIFIED
		for known, word := range endActions {
			if word == end && known != keydv1.EndAction_END_ACTION_UNSPECIFIED {
				action = known
			}
		}
		if end != "" && action == keydv1.EndAction_END_ACTION_UNSPECIFIED {
			return usagef("--end-action: want destroy or deny")
		}
		if retention != "" && retention != "none" {
			r, err := parseDuration(retention)
			if err != nil {
				return usagef("--retention: %v", err)
			}
			class.Retention = durationpb.New(r)
			if approved == "" {
				return usagef("--retention needs --approved-by, a code for who approved it")
			}
		}
		return a.admin(ctx, func(ctx context.Context, admin keydv1.AdminServiceClient) error {
			old, err := currentClass(ctx, admin, tenant, args[0])
			if err != nil {
				return err
			}
			if old != nil {
				if width == "" {
					class.BucketWidth = old.BucketWidth
				}
				if lease == "" {
					class.Lease = old.Lease
				}
				if retention == "" {
					class.Retention = old.Retention
				}
				class.EndAction, class.ApprovedBy = old.EndAction, old.ApprovedBy
			}
			if end != "" {
				class.EndAction = action
			}
			if approved != "" || retention != "" {
				class.ApprovedBy = approved // an approval is of one retention
			}
			if class.Retention == nil {
				class.EndAction = keydv1.EndAction_END_ACTION_UNSPECIFIED
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
	for _, f := range []struct {
		value       *string
		name, usage string
	}{
		{&width, "width", "width of a bucket, 1h to 366d"},
		{&lease, "lease", "longest lease of a key, 0s to 1h"},
		{&retention, "retention", "how long data is kept, counted from sealing; none: for ever"},
		{&end, "end-action", "what happens then: destroy (the key), or deny (opens only)"},
		{&approved, "approved-by", "code for who approved it; needed with a retention"},
	} {
		c.Flags().StringVar(f.value, f.name, "", f.usage)
		_ = c.RegisterFlagCompletionFunc(f.name, cobra.NoFileCompletions)
	}
	return c
}

// currentClass returns a class as it is; nil if there is none.
func currentClass(ctx context.Context, admin keydv1.AdminServiceClient, tenant, name string) (*keydv1.Class, error) {
	res, err := admin.ListClasses(ctx, &keydv1.ListClassesRequest{Tenant: tenant})
	if err != nil {
		return nil, err
	}
	for _, c := range res.GetClasses() {
		if c.GetName() == name {
			return c, nil
		}
	}
	return nil, nil
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

// What a bucket's end takes beyond its retention (SPEC.md, retention).
const (
	longestLease = time.Hour
	destroyGrace = 24 * time.Hour
)

// classScheduleCommand prints the retention schedule of a tenant, for those who
// approve and audit it.
func (a *app) classScheduleCommand() *cobra.Command {
	var tenant string
	var markdown bool
	c := a.command(&cobra.Command{
		Use:   "schedule --tenant T [--markdown]",
		Short: "Print a tenant's retention schedule, for an auditor",
		Long: `Schedule prints for each class how long its data is kept, and what happens then.
A bucket ends for all that was sealed in it, so what is sealed first opens for
longer: by the overshoot, one bucket and the longest lease of an hour. A key that
is destroyed is so a day after that (the grace). LEDGER is the entry of the newest
change; its receipt proves it.`,
		Example: "  lethe class schedule --tenant acme --markdown > retention.md\n  lethe class schedule --tenant acme --json",
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
				AsOf    time.Time     `json:"as_of"`
				Classes []classResult `json:"classes"`
				// Access may last longer than retention by bucket_width_s and
				// longest_lease_s; the key is destroyed grace_s after it ends.
				LongestLeaseS int64 `json:"longest_lease_s"`
				GraceS        int64 `json:"grace_s"`
			}{tenant, a.now().UTC().Truncate(time.Second), classResults(res.GetClasses()),
				int64(longestLease / time.Second), int64(destroyGrace / time.Second)}
			rows := [][]string{{"CLASS", "NUMBER", "KEPT", "OVERSHOOT", "LEASE", "AT THE END", "APPROVED BY", "LEDGER"}}
			for _, c := range v.Classes {
				overshoot := formatDuration(time.Duration(c.BucketWidthS)*time.Second) + " + " + formatDuration(longestLease)
				end, approved := "opens refused, key destroyed "+formatDuration(destroyGrace)+" later", c.ApprovedBy
				switch {
				case c.RetentionS == nil:
					overshoot, end = "-", "-"
				case c.EndAction == "deny":
					end = "opens refused, key kept"
				}
				if approved == "" {
					approved = "-"
				}
				rows = append(rows, []string{
					c.Name, strconv.FormatUint(uint64(c.Number), 10), c.retention(), overshoot,
					formatDuration(time.Duration(c.LeaseMS) * time.Millisecond), end, approved, c.LedgerIndex,
				})
			}
			return a.print(v, func(w io.Writer) {
				heading, rest := "", table
				if markdown {
					heading, rest = "# ", writeMarkdown
				}
				fmt.Fprintf(w, "%sRetention schedule of tenant %s, as of %s\n\n", heading, tenant, v.AsOf.Format(time.RFC3339))
				rest(w, rows)
				fmt.Fprintf(w, "\nKept counts from sealing, for a stream from its beginning. Access may last longer by the overshoot, the bucket's width and\n"+
					"the longest lease (%s); a key that is destroyed is so %s after access ends, the grace.\n",
					formatDuration(longestLease), formatDuration(destroyGrace))
			})
		})
	})
	a.addTenantFlag(c, &tenant)
	c.Flags().BoolVar(&markdown, "markdown", false, "print the table as Markdown")
	return c
}

// writeMarkdown writes rows as a table; the first is the heading.
func writeMarkdown(w io.Writer, rows [][]string) {
	for i, r := range rows {
		fmt.Fprintf(w, "| %s |\n", strings.Join(r, " | "))
		if i == 0 {
			fmt.Fprintf(w, "%s|\n", strings.Repeat("|---", len(r)))
		}
	}
}
