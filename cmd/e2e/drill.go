package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"lethe/sdk"
	"lethe/sdk/receipt"
)

// drillActs are the restore drill: on a deployment of its own, thrown away
// afterwards, it goes through every way in which an older store comes back.
var drillActs = []act{
	{"A scratch deployment, with people in it", drillRaise},
	{"A backup and a cold copy are taken; then people are destroyed", drillDestroy},
	{"The backup is restored over the store", drillBackup},
	{"The cold copy is put back in the place of the store", drillCopy},
	{"The backup is restored on a new host", drillNewHost},
}

// drill proves that destroyed subjects stay destroyed after a restore.
func drill(ctx context.Context, bin string, out io.Writer) error {
	return perform(ctx, drillActs, bin, "lethe-drill-", out)
}

const drillTenant = "drill"

// drillPerson is somebody in the drill.
type drillPerson struct {
	name    string
	blob    []byte
	receipt []byte // of the destruction, if destroyed
}

func (p *drillPerson) plain() []byte { return []byte("a record of " + p.name) }

func (p *drillPerson) request() sdk.DestroyRequest {
	return sdk.DestroyRequest{Tenant: drillTenant, Subject: p.name, RequestID: "drill-" + p.name, Reason: "drill"}
}

func (p *drillPerson) target() sdk.Target {
	return sdk.Target{Tenant: drillTenant, Subject: p.name, Class: "memory"}
}

func drillRaise(ctx context.Context, s *stage) error {
	if err := s.startKeyd(ctx); err != nil {
		return err
	}
	s.cleanUp(func() { s.keyd.kill() })
	if _, _, err := s.lethe(ctx, nil, "tenant", "create", drillTenant, "--class", "memory:24h:3s"); err != nil {
		return err
	}
	key, _, err := s.lethe(ctx, nil, "ledger", "key")
	if err != nil {
		return err
	}
	s.verifierKey = filepath.Join(s.dir, "ledger.key")
	if err := os.WriteFile(s.verifierKey, key, 0o600); err != nil {
		return err
	}
	app, err := sdk.Dial(ctx, s.keyd.target())
	if err != nil {
		return err
	}
	defer app.Close()
	for i := range 8 {
		p := &drillPerson{name: fmt.Sprintf("person-%d@drill.example", i)}
		if p.blob, err = app.Seal(ctx, p.target(), p.plain()); err != nil {
			return err
		}
		s.people = append(s.people, p)
	}
	// One is destroyed before the copies are taken.
	if err := destroyPerson(ctx, app, s.people[0]); err != nil {
		return err
	}
	s.tell("keyd, a tenant, %s with a sealed record each; one is destroyed already.", count(len(s.people), "person"))
	return nil
}

func destroyPerson(ctx context.Context, app *sdk.Client, p *drillPerson) error {
	done, err := app.DestroyKey(ctx, p.request())
	if err != nil {
		return err
	}
	p.receipt = done.Receipt
	return nil
}

func drillDestroy(ctx context.Context, s *stage) error {
	s.backup = filepath.Join(s.dir, "keys.backup")
	if _, _, err := s.lethe(ctx, nil, "backup", "-o", s.backup); err != nil {
		return err
	}
	if _, _, err := s.lethe(ctx, nil, "backup", "verify", s.backup); err != nil {
		return err
	}
	if err := s.keyd.stop(); err != nil {
		return err
	}
	s.old = filepath.Join(s.dir, "copied-then")
	if err := copyTree(filepath.Join(s.old, "store"), filepath.Join(s.data(), "store")); err != nil {
		return err
	}
	s.tell("lethe backup, verified; and a copy of the store's directory, with keyd stopped.")
	if err := s.startKeyd(ctx); err != nil {
		return err
	}
	app, err := sdk.Dial(ctx, s.keyd.target())
	if err != nil {
		return err
	}
	defer app.Close()
	for _, p := range s.people[1:4] {
		if err := destroyPerson(ctx, app, p); err != nil {
			return err
		}
	}
	s.checkpoint = filepath.Join(s.dir, "checkpoint")
	if _, _, err = s.lethe(ctx, nil, "ledger", "checkpoint", "-o", s.checkpoint); err != nil {
		return err
	}
	s.tell("3 more people are destroyed: the copies do not know it.")
	s.keyd.kill()
	return nil
}

// comesBack fails unless keyd refuses the store in data, and serves it once it
// was replayed, with the destroyed destroyed and everybody else there.
func (s *stage) comesBack(ctx context.Context, data string) error {
	said, err := s.refusesToStart(ctx, data)
	if err != nil {
		return err
	}
	s.tell("keyd refuses to serve it:")
	s.quote(said)
	out, _, err := s.lethe(ctx, nil, "restore", "--replay", "--data", data)
	if err != nil {
		return err
	}
	s.tell("lethe restore --replay:")
	s.quote(string(out))
	if err := s.startKeydOn(ctx, data); err != nil {
		return err
	}
	defer s.keyd.kill()
	app, err := sdk.Dial(ctx, s.keyd.target())
	if err != nil {
		return err
	}
	defer app.Close()
	pinned, err := s.pinned()
	if err != nil {
		return err
	}
	gone := 0
	for _, p := range s.people {
		plain, err := app.Open(ctx, p.target(), p.blob)
		if p.receipt == nil {
			if err != nil {
				return fmt.Errorf("somebody who lives: %w", err)
			}
			if !bytes.Equal(plain, p.plain()) {
				return errors.New("somebody's record opens to something else")
			}
			continue
		}
		gone++
		if !errors.Is(err, sdk.ErrErased) {
			return fmt.Errorf("a destroyed person is not erased: open: %w", err)
		}
		if _, err := app.Seal(ctx, p.target(), p.plain()); !errors.Is(err, sdk.ErrErased) {
			return fmt.Errorf("a destroyed person is not erased: seal: %w", err)
		}
		again, err := app.DestroyKey(ctx, p.request())
		if err != nil {
			return err
		}
		if !bytes.Equal(again.Receipt, p.receipt) {
			return errors.New("a destroyed person's receipt is another one now")
		}
		if _, err := receipt.Verify(p.receipt, pinned); err != nil {
			return err
		}
	}
	s.tell("%d destroyed: erased, for opens and seals, with the same receipts. %d others: their records open.", gone, len(s.people)-gone)
	// A replay that begins new buckets adds that to the ledger.
	if _, _, err := s.lethe(ctx, nil, "ledger", "consistency", s.checkpoint, "--key-file", s.verifierKey); err != nil {
		return fmt.Errorf("the ledger is not the one from before: %w", err)
	}
	s.tell("The ledger holds all that its checkpoint from before covers, as it was.")
	return s.keyd.stop()
}

func drillBackup(ctx context.Context, s *stage) error {
	_, code, err := s.lethe(ctx, nil, "restore", "--backup", s.backup, "--data", s.data())
	if err == nil || code == 0 {
		return fmt.Errorf("lethe restore writes over a store without --force: %w", err)
	}
	if _, _, err := s.lethe(ctx, nil, "restore", "--backup", s.backup, "--data", s.data(), "--force"); err != nil {
		return err
	}
	s.tell("lethe restore: not over a store; with --force it moves that aside.")
	return s.comesBack(ctx, s.data())
}

func drillCopy(ctx context.Context, s *stage) error {
	store := filepath.Join(s.data(), "store")
	if err := os.RemoveAll(store); err != nil {
		return err
	}
	if err := copyTree(store, filepath.Join(s.old, "store")); err != nil {
		return err
	}
	return s.comesBack(ctx, s.data())
}

func drillNewHost(ctx context.Context, s *stage) error {
	data := filepath.Join(s.dir, "elsewhere")
	for _, part := range []string{"kms", "anchor"} {
		if err := copyTree(filepath.Join(data, part), filepath.Join(s.data(), part)); err != nil {
			return err
		}
	}
	out, _, err := s.lethe(ctx, nil, "restore", "--backup", s.backup, "--data", data)
	if err != nil {
		return err
	}
	s.tell("lethe restore, beside the KMS and the anchor:")
	s.quote(strings.TrimSpace(string(out)))
	return s.comesBack(ctx, data)
}
