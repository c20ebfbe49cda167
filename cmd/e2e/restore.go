package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"lethe/sdk"
)

// secondRequestID names the intent to erase one more.
const secondRequestID = "case-2026-0118"

// quick makes an epoch that is turned end within seconds.
var quick = []string{"--soak", "2s", "--kek-lease", "2s", "--root-waiting", "2s", "--drain-budget", "30s"}

// second returns a record of a person who is not erased yet, the input it is
// from, and that person's name as s.gone has it.
func (s *stage) second() (*input, *piece, string) {
	for _, in := range s.inputs {
		for i := range in.pieces {
			p := &in.pieces[i]
			if name := in.tenant + "/" + p.subject; p.isRecord() && in.class != "checkpoint" && !s.gone[name] {
				return in, p, name
			}
		}
	}
	panic("everybody is erased")
}

// restore has a backup taken, erases one more person, and puts the backup back.
func restore(ctx context.Context, s *stage) error {
	s.old = filepath.Join(s.dir, "copied-then")
	for _, part := range []string{"store", "anchor", "kms"} {
		if err := copyTree(filepath.Join(s.old, part), filepath.Join(s.data(), part)); err != nil {
			return err
		}
	}
	if err := s.startKeyd(ctx, quick...); err != nil {
		return err
	}
	s.tell("While keyd is stopped, its store, anchor and KMS file are copied, for later.")
	in, p, name := s.second()
	s.next = sealedRecord{in, p}
	c, err := startClient(s.keyd.target())
	if err != nil {
		return err
	}
	s.cleanUp(c.close)
	if err := opens(c, in, p); err != nil {
		return err
	}
	s.backup = filepath.Join(s.dir, "keys.backup")
	out, _, err := s.lethe(ctx, nil, "backup", "-o", s.backup)
	if err != nil {
		return err
	}
	s.tell("lethe backup, while it serves:")
	s.quote(string(out))

	s.receipt = filepath.Join(s.dir, "second.json")
	if _, _, err = s.lethe(ctx, []byte(p.subject), "destroy", "--yes", "--tenant", in.tenant, "--subject-file", "-",
		"--reason", "gdpr-art17", "--request-id", secondRequestID, "--receipt", s.receipt); err != nil {
		return err
	}
	v, err := s.verify()
	if err != nil {
		return err
	}
	dead := v.Entries[0].Statement.DeadKeys
	if len(dead) == 0 {
		return errors.New("the receipt names no key that was destroyed")
	}
	s.deadKey = hex.EncodeToString(dead[0].KeyID[:])
	s.gone[name] = true
	if err := refusesOnceTold(c, in, p); err != nil {
		return err
	}
	s.tell("lethe destroy: one more person is erased, after the backup.")

	s.keyd.kill()
	if _, _, err := s.lethe(ctx, nil, "restore", "--backup", s.backup, "--data", s.data(), "--force"); err != nil {
		return err
	}
	s.tell("keyd is killed, and the backup restored in the place of the store.")
	said, err := s.refusesToStart(ctx, s.data(), quick...)
	if err != nil {
		return err
	}
	if !strings.Contains(said, "behind the anchor") {
		return fmt.Errorf("keyd refuses the older store, but says %q", said)
	}
	s.tell("keyd refuses to serve it:")
	s.quote(said)
	words, _, err := s.lethe(ctx, nil, "restore", "--replay", "--data", s.data())
	if err != nil {
		return err
	}
	s.tell("lethe restore --replay:")
	s.quote(string(words))
	if err := s.startKeyd(ctx, quick...); err != nil {
		return err
	}
	if err := s.erasedForNewcomers(); err != nil {
		return err
	}
	if err := s.refusesOnceReconnected(c, in, p); err != nil {
		return err
	}
	first, err := os.ReadFile(s.receipt)
	if err != nil {
		return err
	}
	again, err := s.app.DestroyKey(ctx, sdk.DestroyRequest{
		Tenant: in.tenant, Subject: p.subject, RequestID: secondRequestID, Reason: "gdpr-art17",
	})
	if err != nil {
		return err
	}
	if !bytes.Equal(again.Receipt, first) {
		return errors.New("after the replay the repeated request was answered with another receipt")
	}
	s.tell("The request repeated returns the receipt from before the restore, byte for byte.")
	return nil
}

// thief makes a directory of what somebody may have: parts of the copies of
// then, and the KMS as it is now unless it is one of those parts.
func (s *stage) thief(name string, parts ...string) (data string, err error) {
	data = filepath.Join(s.dir, name)
	for _, part := range parts {
		if err := copyTree(filepath.Join(data, part), filepath.Join(s.old, part)); err != nil {
			return "", err
		}
	}
	if slices.Contains(parts, "kms") {
		return data, nil
	}
	return data, copyTree(filepath.Join(data, "kms"), filepath.Join(s.data(), "kms"))
}

// turn shows what the backup and the copies are worth while the root lives, and
// ends its epoch.
func turn(ctx context.Context, s *stage) error {
	// The control: with the root alive, what is tried later does work.
	for _, from := range []string{"copy", "backup"} {
		parts := map[string][]string{"copy": {"store", "anchor"}, "backup": {"anchor"}}[from]
		if err := s.rolledBack(ctx, "control-"+from, parts...); err != nil {
			return fmt.Errorf("the control: the %s, the anchor of then and the KMS: %w", from, err)
		}
	}
	s.tell("Whoever has the backup or the copy, the anchor of then and the KMS opens that record still. That is so until its receipt is final.")

	words, _, err := s.lethe(ctx, nil, "epoch", "turn", "--wait", "closed")
	if err != nil {
		return err
	}
	s.tell("lethe epoch turn --wait closed: keys carried over and verified, the old root destroyed.")
	s.quote(string(words))
	if err := os.Remove(s.receipt); err != nil {
		return err
	}
	if _, _, err := s.lethe(ctx, nil, "receipt", "get", "--tenant", s.next.in.tenant, "--request-id", secondRequestID, "--wait", "final", "-o", s.receipt); err != nil {
		return err
	}
	s.tell("lethe receipt get --wait final.")
	if err := s.erasedForNewcomers(); err != nil {
		return err
	}
	return s.keyd.stop()
}

// rolledBack opens the record of the erased person with these parts rolled back
// to then, and fails where that does not succeed.
func (s *stage) rolledBack(ctx context.Context, name string, parts ...string) error {
	data, err := s.thief(name, parts...)
	if err != nil {
		return err
	}
	if !slices.Contains(parts, "store") {
		// The anchor of then lacks nothing that the backup has, so that it knows
		// of nothing to replay either.
		if _, _, err := s.lethe(ctx, nil, "restore", "--backup", s.backup, "--replay", "--data", data); err != nil {
			return err
		}
	}
	k, err := startKeyd(ctx, filepath.Join(s.bin, "keyd"), data)
	if err != nil {
		return err
	}
	s.cleanUp(k.kill)
	defer k.kill()
	c, err := startClient(k.target())
	if err != nil {
		return err
	}
	defer c.close()
	return opens(c, s.next.in, s.next.p)
}

// final shows that nothing of that opens anything now.
func final(ctx context.Context, s *stage) error {
	data, err := s.thief("after-copy", "store", "anchor")
	if err != nil {
		return err
	}
	said, err := s.refusesToStart(ctx, data)
	if err != nil {
		return fmt.Errorf("the copy of the store, the anchor of then and the KMS: %w", err)
	}
	s.tell("The same tried again. keyd on the copy, the anchor of then and the KMS file as it is now:")
	s.quote(said)

	if data, err = s.thief("after-backup", "anchor"); err != nil {
		return err
	}
	if _, _, err := s.lethe(ctx, nil, "restore", "--backup", s.backup, "--data", data); err != nil {
		return err
	}
	for _, anchor := range []struct{ what, dir string }{
		{"the anchor of then", filepath.Join(data, "anchor")},
		{"the true anchor", filepath.Join(s.data(), "anchor")},
	} {
		_, code, err := s.lethe(ctx, nil, "restore", "--replay", "--data", data, "--anchor", anchor.dir)
		if err == nil {
			return fmt.Errorf("a backup of a closed epoch was replayed with %s", anchor.what)
		}
		if code == 0 {
			return err
		}
		s.tell("lethe restore --replay of the backup, with %s: exit code %d.", anchor.what, code)
		s.quote(strings.TrimPrefix(err.Error(), fmt.Sprintf("lethe restore: exit code %d: ", code)))
		if _, err := s.refusesToStart(ctx, data, "--anchor", anchor.dir); err != nil {
			return fmt.Errorf("the backup, %s and the KMS: %w", anchor.what, err)
		}
	}
	s.tell("And keyd on each of these: does not start.")

	if err := s.rolledBack(ctx, "roots-copied", "store", "anchor", "kms"); err != nil {
		return fmt.Errorf("the control: all three as they were: %w", err)
	}
	s.tell("The limit: a KMS that is a file can be copied. With a copy of its file from before, that record opens. Receipts name this basis: local-root-file.")

	store := filepath.Join(s.data(), "store")
	if _, code, err := s.lethe(ctx, nil, "audit", "residue", "--store", filepath.Join(s.old, "store"), "--key-id", s.deadKey); err == nil || code != exitResidue {
		return fmt.Errorf("lethe audit residue does not find the destroyed key in the copy of the store: %w", err)
	}
	if _, _, err = s.lethe(ctx, nil, "audit", "residue", "--store", store); err != nil {
		return err
	}
	s.tell("lethe audit residue: that person's wrapped key is in the copy, and no byte of any destroyed one in the store.")
	v, err := s.verify()
	if err != nil {
		return err
	}
	stages := v.Stages()
	if stages.Sanitised.IsZero() || stages.Final.IsZero() {
		return errors.New("the receipt does not end final")
	}
	words, _, err := s.lethe(ctx, nil, "receipt", "verify", s.receipt, "--key-file", s.verifierKey)
	if err != nil {
		return err
	}
	s.tell("That person's receipt, verified offline, is final:")
	s.quote(string(words))
	return nil
}

// refusesToStart starts a keyd, which must end by itself with an error, and
// returns what it said last.
func (s *stage) refusesToStart(ctx context.Context, data string, flags ...string) (said string, err error) {
	k, err := launchKeyd(filepath.Join(s.bin, "keyd"), data, flags...)
	if err != nil {
		return "", err
	}
	defer k.kill()
	select {
	case <-k.exited:
	case <-ctx.Done():
		return "", ctx.Err()
	case <-time.After(30 * time.Second):
		return "", errors.New("keyd runs where it should refuse to")
	}
	if k.err == nil {
		return "", errors.New("keyd ends without an error where it should refuse to serve")
	}
	lines := strings.Split(k.said(), "\n")
	said = lines[len(lines)-1]
	if !strings.HasPrefix(said, "keyd: ") {
		return "", fmt.Errorf("keyd ends otherwise than by refusing: %q", said)
	}
	return said, nil
}

// copyTree copies a directory, closed to others.
func copyTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		to := filepath.Join(to, rel)
		switch {
		case e.IsDir():
			return os.MkdirAll(to, 0o700)
		case !e.Type().IsRegular():
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(to, b, 0o600)
	})
}
