package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

func (a *app) subjectCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "subject",
		Short:   "Show a subject's state, or reinstate one",
		Example: "  lethe subject status --tenant acme --subject-file id.txt",
	}, a.subjectStatusCommand(), a.subjectReinstateCommand())
}

// subjectResult is a subject's state as it is printed.
type subjectResult struct {
	Tenant        string               `json:"tenant"`
	Handle        string               `json:"handle"`
	State         string               `json:"state"`
	Generation    uint32               `json:"generation"`
	Classes       []subjectClassResult `json:"classes"`
	Holds         []string             `json:"holds"`
	LedgerIndexes []string             `json:"ledger_indexes"`
	Scheduled     []scheduledResult    `json:"scheduled"`
}

// scheduledResult is a destruction that is to come.
type scheduledResult struct {
	Due         time.Time `json:"due"`
	Classes     []string  `json:"classes"` // null: the whole person
	LedgerIndex uint64    `json:"ledger_index,string"`
	// WaitingFor are the holds that keep what is due from being carried out.
	WaitingFor []string `json:"waiting_for"`
}

type subjectClassResult struct {
	Class      string   `json:"class"`
	State      string   `json:"state"`
	Generation uint32   `json:"generation"`
	KeyID      *string  `json:"key_id"` // null: there is no live key
	DeadKeyIDs []string `json:"dead_key_ids"`
}

// stateName turns SUBJECT_STATE_ACTIVE into "active".
func stateName(s keydv1.SubjectState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "SUBJECT_STATE_"))
}

func newSubjectResult(tenant string, s *sdk.SubjectStatus, now time.Time) subjectResult {
	v := subjectResult{
		Tenant: tenant, Handle: hex.EncodeToString(s.Handle[:]), State: stateName(s.State), Generation: s.Generation,
		Classes: []subjectClassResult{}, Holds: append([]string{}, s.Holds...), LedgerIndexes: []string{}, Scheduled: []scheduledResult{},
	}
	for _, d := range s.Scheduled {
		r := scheduledResult{Due: d.Due.UTC(), Classes: d.Classes, LedgerIndex: d.LedgerIndex, WaitingFor: []string{}}
		if !now.Before(d.Due) {
			r.WaitingFor = v.Holds
		}
		v.Scheduled = append(v.Scheduled, r)
	}
	for _, c := range s.Classes {
		r := subjectClassResult{Class: c.Class, State: stateName(c.State), Generation: c.Generation, DeadKeyIDs: []string{}}
		if c.KeyID != (envelope.KeyID{}) {
			id := c.KeyID.String()
			r.KeyID = &id
		}
		for _, id := range c.DeadKeyIDs {
			r.DeadKeyIDs = append(r.DeadKeyIDs, id.String())
		}
		v.Classes = append(v.Classes, r)
	}
	for _, i := range s.LedgerIndexes {
		v.LedgerIndexes = append(v.LedgerIndexes, strconv.FormatUint(i, 10))
	}
	return v
}

func (v subjectResult) write(w io.Writer) {
	generation := ""
	if v.Generation > 0 {
		generation = fmt.Sprint(v.Generation)
	}
	state := v.State
	if state == "absent" {
		state = "absent: never had a key, and is not fenced"
	}
	facts(w,
		"tenant", v.Tenant,
		"handle", v.Handle,
		"state", state,
		"generation", generation,
		"holds", strings.Join(v.Holds, ", "),
		"ledger", strings.Join(v.LedgerIndexes, ", "),
	)
	if len(v.Scheduled) != 0 {
		fmt.Fprintln(w)
		rows := [][]string{{"SCHEDULED", "WHAT", "LEDGER", "WAITING FOR"}}
		for _, d := range v.Scheduled {
			what := "the whole person"
			if len(d.Classes) != 0 {
				what = strings.Join(d.Classes, ", ")
			}
			rows = append(rows, []string{instant(d.Due), what, strconv.FormatUint(d.LedgerIndex, 10), orDash(strings.Join(d.WaitingFor, ", "))})
		}
		table(w, rows)
	}
	if len(v.Classes) == 0 {
		return
	}
	fmt.Fprintln(w)
	rows := [][]string{{"CLASS", "STATE", "GENERATION", "KEY", "DEAD KEYS"}}
	for _, c := range v.Classes {
		key := "-"
		if c.KeyID != nil {
			key = *c.KeyID
		}
		rows = append(rows, []string{c.Class, c.State, fmt.Sprint(c.Generation), key, orDash(strings.Join(c.DeadKeyIDs, " "))})
	}
	table(w, rows)
}

func (a *app) subjectStatusCommand() *cobra.Command {
	var s subjectFlags
	c := a.command(&cobra.Command{
		Use:   "status --tenant T --subject S",
		Short: "Show a subject's state, keys and holds",
		Long: `Status shows the state of a subject and its classes, the ids of its keys, the
holds that bind, what is scheduled, and its entries in the ledger. A subject that keyd has never
seen is absent, which proves nothing.
` + subjectHelp,
		Example: "  lethe subject status --tenant acme --subject-file id.txt",
	}, func(ctx context.Context, _ []string) error {
		id, err := s.read(a)
		if err != nil {
			return err
		}
		return a.withClient(ctx, func(ctx context.Context, client *sdk.Client) error {
			status, err := client.Describe(ctx, s.tenant, id)
			if err != nil {
				return err
			}
			v := newSubjectResult(s.tenant, status, a.now())
			return a.print(v, v.write)
		})
	})
	s.add(a, c)
	c.MarkFlagsOneRequired("subject", "subject-file")
	return c
}

func (a *app) subjectReinstateCommand() *cobra.Command {
	var s subjectFlags
	var r requestFlags
	var save receiptFlags
	var classes []string
	var generation uint32
	var c *cobra.Command
	c = a.command(&cobra.Command{
		Use:   "reinstate --tenant T --subject S --generation N --reason CODE",
		Short: "Begin the next life of a destroyed subject",
		Long: `Reinstate lets a destroyed subject, or destroyed classes of one, have keys again.
What was destroyed stays destroyed. --generation names the destroyed life that
the new one follows, as subject status shows it.
` + subjectHelp,
		Example: "  lethe subject reinstate --tenant acme --subject-file id.txt --generation 1 --reason new-contract",
	}, func(ctx context.Context, _ []string) error {
		id, err := s.read(a)
		if err != nil {
			return err
		}
		if generation == 0 {
			return usagef("--generation: generations count from 1")
		}
		if err := checkClasses(classes); err != nil {
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
			done, err := client.Reinstate(ctx, sdk.ReinstateRequest{
				Tenant: s.tenant, Subject: id, Classes: classes, IfGeneration: generation, RequestID: r.id, Reason: r.reason,
			})
			if err != nil {
				return with(err, "request_id", r.id)
			}
			v := struct {
				recordResult
				Generation       uint32 `json:"generation"`
				Repeat           bool   `json:"repeat"`
				State            string `json:"state"`
				LivingGeneration uint32 `json:"living_generation,omitzero"`
			}{save.result(r.id, done.LedgerIndex, done.Receipt), done.Generation, done.Repeat, stateName(done.State), done.LivingGeneration}
			if err := out.save(done.Receipt); err != nil {
				return err
			}
			headline := fmt.Sprintf("reinstated: generation %d has begun; what was destroyed stays destroyed", v.Generation)
			undone := ""
			if v.Repeat {
				headline = fmt.Sprintf("reinstated then: generation %d began", v.Generation)
				switch {
				case done.State == keydv1.SubjectState_SUBJECT_STATE_DESTROYED:
					undone = "it, or a class of it, was destroyed since"
				case done.State == keydv1.SubjectState_SUBJECT_STATE_SCHEDULED:
					undone = "a destruction of it is pending"
				case v.LivingGeneration != v.Generation:
					undone = fmt.Sprintf("it lives in generation %d now", v.LivingGeneration)
				}
			}
			return a.printUnlessUndone(v, headline, undone, func(w io.Writer) { v.recordResult.write(w, s.tenant) })
		})
	})
	s.add(a, c)
	c.MarkFlagsOneRequired("subject", "subject-file")
	r.add(c)
	save.add(c)
	addClassesFlag(a, c, &classes, "reinstate only this class")
	c.Flags().Uint32Var(&generation, "generation", 0, "the destroyed generation")
	_ = c.MarkFlagRequired("generation")
	return c
}

// addClassesFlag adds --class for operations on the whole person unless
// classes are named. An empty name is an error, not the whole person.
func addClassesFlag(a *app, c *cobra.Command, classes *[]string, help string) {
	c.Flags().StringArrayVar(classes, "class", nil, help+"; may be given several times (default: the whole person)")
	_ = c.RegisterFlagCompletionFunc("class", a.completeClasses)
}
