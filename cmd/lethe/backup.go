package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"lethe/keyd/backup"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

const backupHelp = `
A backup holds wrapped keys, which open nothing without the KMS that holds the
root over them. It brings the key store back as long as that root lives: until
the epoch that was open then is closed. After that it opens nothing for anybody,
and cannot be used for recovery either: take backups more often than epochs turn.
What was destroyed since is destroyed again when the backup is replayed; what was
first used since is lost.`

func (a *app) backupCommand() *cobra.Command {
	var output outputFlags
	c := a.command(&cobra.Command{
		Use:   "backup [-o FILE]",
		Short: "Back up keyd's key store while it serves",
		Long: `Backup writes a copy of the key store, as of an instant while it runs, to a file
or to the standard output, but not to a terminal. Every byte is verified on its
way; a file appears under its name only once it is whole and on the disk.
` + backupHelp,
		Example: `  lethe backup -o keys.backup
  lethe backup | ssh vault 'cat > keys.backup'
  lethe backup verify keys.backup`,
		Args: noSuchCommand,
	}, func(ctx context.Context, _ []string) error { return a.backup(ctx, &output) })
	output.add(c)
	c.AddCommand(a.backupVerifyCommand())
	return c
}

type backupResult struct {
	Output      string    `json:"output,omitempty"`
	Bytes       int64     `json:"bytes,string"`
	Created     time.Time `json:"created"`
	Incarnation string    `json:"incarnation"`
	LedgerSize  uint64    `json:"ledger_size,string"`
	Epoch       uint32    `json:"epoch"`
	Store       string    `json:"store"`
}

func newBackupResult(h backup.Header, n int64) backupResult {
	return backupResult{
		Bytes: n, Created: h.Created, Incarnation: hex.EncodeToString(h.Incarnation[:]),
		LedgerSize: h.LedgerSize, Epoch: h.Epoch, Store: h.Store,
	}
}

func (v backupResult) write(w io.Writer) {
	facts(w,
		"backup of", v.Incarnation,
		"taken", instant(v.Created),
		"ledger", fmt.Sprintf("%d entries or more", v.LedgerSize),
		"epoch", fmt.Sprintf("%d; usable until that is closed", v.Epoch),
		"size", formatBytes(float64(v.Bytes)),
	)
}

// counted counts the bytes that pass.
type counted struct {
	io.Writer
	n int64
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.n += int64(n)
	return n, err
}

// pieces reads a stream of pieces. begun is called at the first.
type pieces struct {
	stream grpc.ServerStreamingClient[keydv1.BackupResponse]
	begun  func()
	rest   []byte
}

func (p *pieces) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		m, err := p.stream.Recv()
		if err != nil {
			return 0, err
		}
		p.begun()
		p.rest = m.GetData()
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// verified copies a backup file to w, and fails unless it is one and whole.
func verified(w io.Writer, r io.Reader) (backup.Header, int64, error) {
	c := &counted{Writer: w}
	in, err := backup.NewReader(io.TeeReader(r, c))
	if err != nil {
		return backup.Header{}, 0, err
	}
	_, err = io.Copy(io.Discard, in)
	return in.Header(), c.n, err
}

func (a *app) backup(ctx context.Context, output *outputFlags) error {
	if output.toStdout() && a.isTerminal(a.out) {
		return usagef("will not write a backup to a terminal: name a file with -o, or redirect the output")
	}
	out, err := output.create(a, 0o600)
	if err != nil {
		return err
	}
	defer out.discard()
	client, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, begun, cancel := a.start(ctx)
	defer cancel()
	stream, err := keydv1.NewAdminServiceClient(client.Conn()).Backup(ctx, &keydv1.BackupRequest{})
	if err != nil {
		return err
	}
	h, n, err := verified(out, &pieces{stream: stream, begun: begun})
	if errors.Is(err, backup.ErrDamaged) || errors.Is(err, backup.ErrNotBackup) {
		// Of what keyd sends while it sends it, this is no more than a cut.
		err = fmt.Errorf("%w: %w", sdk.ErrUnavailable, err)
	}
	if err != nil {
		return err
	}
	if err := out.commit(); err != nil {
		return err
	}
	v := newBackupResult(h, n)
	v.Output = output.file
	w := a.out
	if output.toStdout() {
		v.Output, w = "-", a.err
	}
	return a.printTo(w, v, v.write)
}

func (a *app) backupVerifyCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "verify [FILE]",
		Short: "Check that a backup file is whole, without keyd",
		Long: `Verify reads a backup file, or the standard input, to its end and checks every
checksum. It says what the file is of. Whether its epoch still has its root is
for the KMS to say.`,
		Example: "  lethe backup verify keys.backup",
		Args:    atMostOneFile,
	}, func(_ context.Context, args []string) error {
		in := a.in
		if len(args) == 1 && args[0] != "-" {
			f, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer f.Close()
			in = f
		}
		h, n, err := verified(io.Discard, in)
		if err != nil {
			return err
		}
		v := newBackupResult(h, n)
		return a.print(v, v.write)
	})
}
