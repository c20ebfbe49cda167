package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"lethe/keyd"
	"lethe/keyd/store/badger"
)

func (a *app) auditCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "audit",
		Short: "Look at what keyd leaves on the disk",
		Long: `Audit looks at the files of a key store themselves, not at what keyd says of
them.`,
		Example: "  lethe audit residue --store lethe-dev/store",
	}, a.auditResidueCommand())
}

func (a *app) auditResidueCommand() *cobra.Command {
	var store string
	var keyIDs []string
	c := a.command(&cobra.Command{
		Use:   "residue --store DIR [--key-id HEX]...",
		Short: "Look for wrapped keys of the destroyed in the files of a key store",
		Long: `Residue reads every byte of the files of a key store that no keyd has open, and
lists the wrapped keys in them that belong to people and tenants that were
destroyed: to every key id that the store calls dead, and to those that --key-id
names. It changes nothing.

A destruction overwrites a wrapped key, which leaves the older bytes in a store's
tables and logs until the epoch has turned and its keys are dropped (the stage
"sanitised"). Such a copy opens while its epoch's root lives, and to whoever has
both; once that root is destroyed it opens nothing, wherever it lies.

It sees the files as the file system shows them. It does not see the blocks of a
disk that files were freed from, nor snapshots, replicas, backups and other
copies of the directory.

Its exit code is that of RESIDUE if anything is found. A store that keyd would
refuse as damaged is never called clean: what it has lost may have said who else
was destroyed.`,
		Example: `  lethe audit residue --store lethe-dev/store
  lethe audit residue --store lethe-dev/store --key-id 00112233445566778899aabbccddeeff --json`,
	}, func(ctx context.Context, _ []string) error { return a.auditResidue(ctx, store, keyIDs) })
	c.Flags().StringVar(&store, "store", "", "directory of the key store (required)")
	c.Flags().StringArrayVar(&keyIDs, "key-id", nil, "a key id to look for besides, 32 hex digits; may be repeated")
	_ = c.MarkFlagRequired("store")
	_ = c.MarkFlagDirname("store")
	return c
}

type residueResult struct {
	File   string `json:"file"`
	Offset int64  `json:"offset,string"`
	// Epoch is null where the bytes do not tell.
	Epoch       *uint32 `json:"epoch"`
	EpochClosed bool    `json:"epoch_closed"`
	KeyID       string  `json:"key_id"`
	What        string  `json:"what"`
}

type residueReport struct {
	Residue    []residueResult `json:"residue"`
	DeadKeyIDs int             `json:"dead_key_ids"`
	Files      int             `json:"files"`
	Bytes      int64           `json:"bytes,string"`
	Unread     []string        `json:"unread"`
	// Damage is why keyd would refuse the store, empty if it would not.
	Damage string `json:"damage"`
}

// residueError is residue that was found.
type residueError struct{ copies int }

func (e *residueError) Error() string {
	return fmt.Sprintf("residue: %d wrapped keys of the destroyed are in the store's files", e.copies)
}

func (v residueReport) write(w io.Writer) {
	if len(v.Residue) != 0 {
		rows := [][]string{{"FILE", "OFFSET", "EPOCH", "KEY ID", "WHAT"}}
		for _, r := range v.Residue {
			epoch := "-"
			if r.Epoch != nil {
				epoch = fmt.Sprint(*r.Epoch)
				if r.EpochClosed {
					epoch += ", closed"
				}
			}
			rows = append(rows, []string{r.File, fmt.Sprint(r.Offset), epoch, r.KeyID, r.What})
		}
		table(w, rows)
		fmt.Fprintln(w)
	}
	for _, name := range v.Unread {
		facts(w, "damaged", name+": its bytes were looked at, its rows cannot be told")
	}
	if v.Damage != "" {
		facts(w, "damage", v.Damage)
	}
	found := "no wrapped key of any of them"
	if n := len(v.Residue); n != 0 {
		found = fmt.Sprintf("%d wrapped keys of them", n)
	}
	facts(w,
		"looked for", fmt.Sprintf("%d dead key ids", v.DeadKeyIDs),
		"looked at", fmt.Sprintf("%d files, %s", v.Files, formatBytes(float64(v.Bytes))),
		"found", found,
		"not seen", "freed blocks of the disk; snapshots, backups and other copies of the directory",
	)
}

func (a *app) auditResidue(ctx context.Context, store string, keyIDs []string) error {
	var named [][16]byte
	for _, s := range keyIDs {
		b, err := hex.DecodeString(s)
		if err != nil || len(b) != 16 {
			return usagef("--key-id takes 32 hex digits")
		}
		named = append(named, [16]byte(b))
	}
	files, err := badger.OpenFiles(store)
	if errors.Is(err, keyd.ErrLocked) {
		err = fmt.Errorf("%w; stop keyd, or run it on a copy", err)
	}
	if err != nil {
		return err
	}
	defer files.Close()
	found, err := keyd.FindResidue(ctx, files, named)
	if err != nil {
		return err
	}
	damage := files.Check()
	v := residueReport{
		Residue: []residueResult{}, DeadKeyIDs: found.Dead, Files: found.Files, Bytes: found.Bytes,
		Unread: append([]string{}, found.Unread...),
	}
	if damage != nil {
		v.Damage = damage.Error()
	}
	for _, r := range found.Residue {
		x := residueResult{File: r.File, Offset: r.Offset, EpochClosed: r.Closed, KeyID: hex.EncodeToString(r.KeyID[:]), What: "key"}
		if r.Share {
			x.What = "share"
		}
		if r.Epoch != 0 {
			x.Epoch = &r.Epoch
		}
		v.Residue = append(v.Residue, x)
	}
	if err := a.print(v, v.write); err != nil {
		return err
	}
	if len(v.Residue) != 0 {
		return &residueError{len(v.Residue)}
	}
	if damage != nil {
		return fmt.Errorf("%w; whose keys are dead by what it has lost is not known", damage)
	}
	if len(v.Unread) != 0 {
		return fmt.Errorf("%d files of the store are damaged; what only they tell is not known", len(v.Unread))
	}
	return nil
}
