package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/receipt"
)

func (a *app) ledgerCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "ledger",
		Short: "Show the ledger's keys and head, and check that it only grows",
		Example: `  lethe ledger key > ledger.key
  lethe ledger checkpoint -o today.checkpoint
  lethe ledger consistency monday.checkpoint today.checkpoint --key-file ledger.key`,
	}, a.ledgerKeyCommand(), a.ledgerCheckpointCommand(), a.ledgerConsistencyCommand())
}

// ledger calls LedgerService.
func (a *app) ledger(ctx context.Context, do func(context.Context, keydv1.LedgerServiceClient) error) error {
	return a.withClient(ctx, func(ctx context.Context, c *sdk.Client) error {
		return do(ctx, keydv1.NewLedgerServiceClient(c.Conn()))
	})
}

func (a *app) ledgerKeyCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "key",
		Short: "Print the keys that verify the ledger",
		Long: `Key prints the verifier keys of the ledger, oldest first, one a line, in the form
of C2SP signed-note. Take them once, over a connection that can be trusted, and
keep them: they are what receipts are verified against.`,
		Example: "  lethe ledger key > ledger.key",
	}, func(ctx context.Context, _ []string) error {
		return a.ledger(ctx, func(ctx context.Context, ledger keydv1.LedgerServiceClient) error {
			res, err := ledger.GetLedgerKey(ctx, &keydv1.GetLedgerKeyRequest{})
			if err != nil {
				return err
			}
			v := struct {
				VerifierKeys []string `json:"verifier_keys"`
			}{append([]string{}, res.GetVerifierKeys()...)}
			return a.print(v, func(w io.Writer) {
				for _, k := range v.VerifierKeys {
					fmt.Fprintln(w, k)
				}
			})
		})
	})
}

func (a *app) ledgerCheckpointCommand() *cobra.Command {
	var output outputFlags
	c := a.command(&cobra.Command{
		Use:   "checkpoint [-o FILE]",
		Short: "Get the ledger's newest signed head",
		Long: `Checkpoint prints the newest checkpoint that the anchor covers, in the form of
C2SP tlog-checkpoint. Whoever keeps one can later have it shown, with ledger
consistency, that nothing before it was taken out or changed.`,
		Example: "  lethe ledger checkpoint -o today.checkpoint",
	}, func(ctx context.Context, _ []string) error {
		out, err := output.create(a, 0o666)
		if err != nil {
			return err
		}
		defer out.discard()
		return a.ledger(ctx, func(ctx context.Context, ledger keydv1.LedgerServiceClient) error {
			res, err := ledger.GetCheckpoint(ctx, &keydv1.GetCheckpointRequest{})
			if err != nil {
				return err
			}
			signed := res.GetCheckpoint()
			head, err := receipt.ParseCheckpoint(signed)
			if err != nil {
				return &evidenceError{err}
			}
			v := struct {
				Origin     string `json:"origin"`
				Size       uint64 `json:"size,string"`
				Root       string `json:"root"`
				Checkpoint string `json:"checkpoint"`
			}{head.Origin, head.Size, base64.StdEncoding.EncodeToString(head.Root[:]), string(signed)}
			return a.deliver(&output, out, signed, v)
		})
	})
	output.add(c)
	return c
}

// maxCheckpointFile bounds what is read as a checkpoint; one is far smaller.
const maxCheckpointFile = 64 << 10

func (a *app) ledgerConsistencyCommand() *cobra.Command {
	var k keyFlags
	c := a.command(&cobra.Command{
		Use:   "consistency OLD [NEW] (--key KEY | --key-file FILE)",
		Short: "Check that one checkpoint of the ledger extends another",
		Long: `Consistency verifies two checkpoints against the pinned keys, and that NEW's
ledger begins with all of OLD's, unchanged. The proof comes from keyd, which
cannot forge it. Without NEW it is keyd's newest checkpoint.`,
		Example: `  lethe ledger consistency monday.checkpoint --key-file ledger.key
  lethe ledger consistency monday.checkpoint today.checkpoint --key-file ledger.key`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return usagef("wants OLD, or OLD and NEW")
			}
			if len(args) == 2 && args[0] == "-" && args[1] == "-" {
				return usagef("the standard input cannot be both checkpoints")
			}
			return nil
		},
	}, func(ctx context.Context, args []string) error {
		keys, err := k.pin(a)
		if err != nil {
			return err
		}
		var signed [2][]byte
		for i, name := range args {
			if signed[i], err = a.readSmall(name, maxCheckpointFile); err != nil {
				return err
			}
		}
		return a.ledger(ctx, func(ctx context.Context, ledger keydv1.LedgerServiceClient) error {
			if len(args) == 1 {
				res, err := ledger.GetCheckpoint(ctx, &keydv1.GetCheckpointRequest{})
				if err != nil {
					return err
				}
				signed[1] = res.GetCheckpoint()
			}
			return a.consistency(ctx, ledger, keys, signed[0], signed[1])
		})
	})
	k.add(c)
	return c
}

func (a *app) consistency(ctx context.Context, ledger keydv1.LedgerServiceClient, keys *receipt.Keys, older, newer []byte) error {
	old, err := keys.Open(older)
	if err != nil {
		return &evidenceError{fmt.Errorf("the older checkpoint: %w", err)}
	}
	head, err := keys.Open(newer)
	if err != nil {
		return &evidenceError{fmt.Errorf("the newer checkpoint: %w", err)}
	}
	var proof [][]byte
	if old.Origin == head.Origin && old.Size < head.Size {
		res, err := ledger.GetConsistencyProof(ctx, &keydv1.GetConsistencyProofRequest{OldSize: old.Size, NewSize: head.Size})
		if err != nil {
			return err
		}
		proof = res.GetHashes()
	}
	if err := receipt.VerifyConsistency(keys, older, newer, proof); err != nil {
		return &evidenceError{err}
	}
	v := struct {
		Consistent bool   `json:"consistent"`
		Origin     string `json:"origin"`
		OldSize    uint64 `json:"old_size,string"`
		NewSize    uint64 `json:"new_size,string"`
	}{true, head.Origin, old.Size, head.Size}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintf(w, "consistent: the ledger at size %d begins with the one at size %d, unchanged\n", v.NewSize, v.OldSize)
	})
}
