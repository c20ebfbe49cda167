package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"lethe/cmd/internal/parts"
	"lethe/keyd"
)

type restoreFlags struct {
	parts.Options
	backup  string
	force   bool
	replay  bool
	callOff bool
}

func (a *app) restoreCommand() *cobra.Command {
	var f restoreFlags
	var c *cobra.Command
	c = a.command(&cobra.Command{
		Use:   "restore (--backup FILE | --replay | --backup FILE --replay) [--data DIR]",
		Short: "Put a key store back from a backup, and replay what it lacks",
		Long: `Restore works on the files of a key store that no keyd has open.

With --backup it makes the key store of a backup file, in a new or an empty
directory. With --force a directory that holds something is moved aside first; it
is never deleted. Where --replay in the same command then finds the root over the
backup's keys destroyed, or being retired, it is put in its place again; of a
--replay by itself, later, nothing is put back. keyd refuses to serve a
restored store until it was replayed, as it refuses any store that is behind its
anchor, and says what is missing.

With --replay it does again what the store lacks and the anchor's mirror has:
destructions, holds placed and released, reinstatements, class settings, tenants,
epochs. The ledger comes out as it was, so every receipt verifies and every
repeated request gets the answer that it had. It can be stopped at any point,
and run again. It takes over the anchor first, as a start of keyd does: a keyd
that still runs on the lost store stops serving, and is waited for 15 seconds
where the anchor is not a directory and that keyd did not say that it ended.

Keys are in no ledger. What was first used after the backup is lost: its blobs
answer UNKNOWN, unless they were destroyed; those answer ERASED. A new seal for
the same person makes a new key, and opens nothing old. A tenant that was created
after the backup is lost: its name stays taken, and its calls answer UNAVAILABLE.
If a newer backup turns up, restore that instead, before anything is sealed anew.
` + backupHelp + `

Where the root over the backup's keys is disabled or about to be destroyed, replay
stops and says so; --call-off-destruction has the KMS enable it, which is logged,
and puts off when what was destroyed in that epoch becomes final.`,
		Example: `  lethe restore --backup keys.backup --replay --data /var/lib/lethe
  lethe restore --backup keys.backup --store /var/lib/lethe/store --force
  lethe restore --replay --data /var/lib/lethe --anchor /mnt/other/anchor`,
	}, func(ctx context.Context, _ []string) error {
		f.SetDefaults()
		if err := f.CheckKMS(c.Flags().Changed); err != nil {
			return usagef("%v", err)
		}
		return a.restore(ctx, &f)
	})
	fl := c.Flags()
	f.AddFlags(fl)
	fl.StringVar(&f.backup, "backup", "", "backup file to make the key store of; -: the standard input")
	fl.BoolVar(&f.force, "force", false, "move what is in the store's directory aside")
	fl.BoolVar(&f.replay, "replay", false, "replay what the store lacks from the anchor's mirror")
	fl.BoolVar(&f.callOff, "call-off-destruction", false, "have the KMS keep a root that the backup needs and that is being retired")
	return c
}

// restoreResult is what restore did.
type restoreResult struct {
	Backup        *backupResult     `json:"backup,omitempty"`
	Store         string            `json:"store"`
	MovedAside    string            `json:"moved_aside,omitempty"`
	Replayed      bool              `json:"replayed"`
	LedgerFrom    uint64            `json:"ledger_from,string"`
	LedgerTo      uint64            `json:"ledger_to,string"`
	Statements    map[string]uint64 `json:"statements"`
	LostTenants   []string          `json:"lost_tenants"`
	NewBuckets    int               `json:"new_buckets"`
	Epoch         uint32            `json:"epoch,omitempty"`
	DrainingEpoch uint32            `json:"draining_epoch,omitempty"`
	CalledOff     []uint32          `json:"called_off_epochs"`
	Kept          []uint32          `json:"kept_epochs"`

	done *keyd.Replayed
}

func (v *restoreResult) write(w io.Writer) {
	if v.Backup != nil {
		facts(w, "restored", v.Store, "from", fmt.Sprintf("a backup of %s, epoch %d", instant(v.Backup.Created), v.Backup.Epoch), "moved aside", v.MovedAside)
	}
	if !v.Replayed {
		fmt.Fprintln(w, "keyd will not serve it before 'lethe restore --replay' was run.")
		return
	}
	what := v.done.Kinds()
	switch {
	case what != "":
	case v.done.CopyServed:
		what = "no entry was missing; but a copy of this store has served since, or the anchor is an older one"
	default:
		what = "nothing was missing"
	}
	facts(w, "replayed", what, "ledger", fmt.Sprintf("%d entries, as the anchor has it; there were %d", v.LedgerTo, v.LedgerFrom))
	for _, t := range v.LostTenants {
		facts(w, "lost", fmt.Sprintf("tenant %s: it was created after the backup, and its keys are not in it", t))
	}
	if v.DrainingEpoch != 0 {
		facts(w, "epochs", fmt.Sprintf("%d is open; keys are carried over to it from %d while keyd serves", v.Epoch, v.DrainingEpoch))
	}
	for _, e := range v.CalledOff {
		facts(w, "called off", fmt.Sprintf("the destruction of the root of epoch %d", e))
	}
	for _, e := range v.Kept {
		facts(w, "kept", fmt.Sprintf("the root of epoch %d, until 'lethe epoch resume %[1]d': what was destroyed in it does not become final before", e))
	}
	fmt.Fprintln(w, "The store can serve. Keys that were first used after the backup are lost, and answer UNKNOWN.")
}

func (a *app) restore(ctx context.Context, f *restoreFlags) error {
	switch {
	case f.backup == "" && !f.replay:
		return usagef("--backup, --replay, or both")
	case f.force && f.backup == "":
		return usagef("--force goes with --backup")
	case f.callOff && !f.replay:
		return usagef("--call-off-destruction goes with --replay")
	}
	log := slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	v := &restoreResult{Store: f.Store, Statements: map[string]uint64{}, LostTenants: []string{}, CalledOff: []uint32{}, Kept: []uint32{}}
	if f.backup != "" {
		if err := a.putBack(ctx, f, v, log); err != nil {
			return err
		}
	}
	if f.replay {
		if err := a.replay(ctx, f, v, log); err != nil {
			return f.undo(err, v.MovedAside)
		}
	}
	return a.print(v, v.write)
}

// undo puts the store that was moved aside in its place again, where replay
// failed before it changed anything; otherwise it says where that store is.
func (f *restoreFlags) undo(err error, aside string) error {
	if aside == "" {
		return err
	}
	if errors.Is(err, keyd.ErrRootDestroyed) || errors.Is(err, keyd.ErrRootRetiring) {
		back := f.TakeBack(aside)
		if back == nil {
			return fmt.Errorf("%w (what was there is in its place again, and nothing was changed)", err)
		}
		err = fmt.Errorf("%w; the store that was there could not be put in its place again: %w", err, back)
	}
	return fmt.Errorf("%w (what was there is now %s)", err, aside)
}

func (a *app) putBack(ctx context.Context, f *restoreFlags, v *restoreResult, log *slog.Logger) error {
	in, size := a.in, int64(0)
	if f.backup != "-" {
		file, err := os.Open(f.backup)
		if err != nil {
			return err
		}
		defer file.Close()
		if info, err := file.Stat(); err == nil {
			size = info.Size()
		}
		in = file
	}
	h, aside, err := f.PutBack(ctx, in, f.force, log)
	if errors.Is(err, parts.ErrOccupied) {
		err = fmt.Errorf("%w; --force moves what is in it aside", err)
	}
	if aside != "" {
		v.MovedAside = aside
		if err != nil {
			err = fmt.Errorf("%w (what was there is now %s)", err, aside)
		}
	}
	if err != nil {
		return err
	}
	b := newBackupResult(h, size)
	v.Backup = &b
	return nil
}

// noteEvery is how often a long replay says how far it is.
const noteEvery = 2 * time.Second

func (a *app) replay(ctx context.Context, f *restoreFlags, v *restoreResult, log *slog.Logger) error {
	p, err := parts.Open(ctx, f.Options, false, log)
	if err != nil {
		return err
	}
	defer p.Close(log)
	last := a.now()
	done, err := keyd.Replay(ctx, keyd.Config{Store: p.Store, KMS: p.KMS, Anchor: p.Anchor, Log: log}, keyd.ReplayOptions{
		CallOff: f.callOff,
		Progress: func(done, total uint64) {
			if now := a.now(); now.Sub(last) >= noteEvery {
				last = now
				a.note("replayed %d of %d entries", done, total)
			}
		},
		Waits: func(d time.Duration) {
			a.note("The keyd that served last did not say that it ended: waiting %v until it has seen that it was taken over from.", d)
		},
	})
	if errors.Is(err, keyd.ErrRootRetiring) && !f.callOff {
		err = fmt.Errorf("%w; --call-off-destruction has the KMS keep it", err)
	}
	if err != nil {
		return err
	}
	v.done, v.Replayed = done, true
	v.LedgerFrom, v.LedgerTo, v.NewBuckets = done.From, done.To, done.NewBuckets
	v.Epoch, v.DrainingEpoch = done.Epoch, done.Draining
	v.LostTenants = append(v.LostTenants, done.LostTenants...)
	v.CalledOff = append(v.CalledOff, done.CalledOff...)
	v.Kept = append(v.Kept, done.Kept...)
	for kind, n := range done.Missing {
		v.Statements[string(kind)] = n
	}
	return nil
}
