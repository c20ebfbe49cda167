package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"lethe/sdk"
)

// blend seals one memory for three people, of whom one after the other is
// erased: with two left it opens and says who is to be left out, with none it
// is gone. What was sealed for all of them is gone with the first.
func blend(ctx context.Context, s *stage) error {
	people := []string{"noor@example.org", "piet@example.org", "quin@example.org"}
	memory := sdk.Group{Tenant: helpdesk, Class: "memory", Subjects: people}
	if _, _, err := s.lethe(ctx, nil, "class", "put", memory.Class, "--tenant", helpdesk, "--width", "24h", "--lease", lease.String()); err != nil {
		return err
	}
	whose := []string{"--tenant", helpdesk, "--class", memory.Class}
	for i, p := range people {
		file := filepath.Join(s.dir, fmt.Sprintf("subject-%d", i+1))
		if err := os.WriteFile(file, []byte(p), 0o600); err != nil {
			return err
		}
		whose = append(whose, "--subject-file", file)
	}
	plain := []byte("Noor, Piet and Quin share an account; its renewal is due in May.")
	sealed := map[string][]byte{}
	for _, policy := range []string{"any", "all"} {
		blob, _, err := s.lethe(ctx, plain, append([]string{"seal", "--" + policy}, whose...)...)
		if err != nil {
			return err
		}
		sealed[policy] = blob
		opened, _, err := s.lethe(ctx, blob, append([]string{"open"}, whose...)...)
		if err != nil || !bytes.Equal(opened, plain) {
			return fmt.Errorf("sealed for three, it does not open for them: %w", err)
		}
	}
	s.tell("lethe seal --any and --all, for three people: both open for the three.")

	if err := s.erase(ctx, people[1]); err != nil {
		return err
	}
	opened, report, err := s.app.OpenGroup(ctx, memory, sealed["any"])
	if err != nil {
		return fmt.Errorf("a memory of three, of whom one is erased: %w", err)
	}
	if gone := report.Gone(); !bytes.Equal(opened, plain) || len(gone) != 1 || gone[0].Index != 1 {
		return errors.New("it is not told who of three is gone")
	}
	if _, code, err := s.lethe(ctx, sealed["all"], append([]string{"open"}, whose...)...); err == nil || code != exitErased {
		return fmt.Errorf("what was sealed for all three does not end as erased: %w", err)
	}
	s.tell("The second is erased. For any: it opens, and is flagged with the second of three. For all: erased.")

	left := memory
	left.Policy, left.Subjects = sdk.Any, []string{people[0], people[2]}
	if sealed["again"], err = s.app.SealGroup(ctx, left, []byte("Noor and Quin share an account.")); err != nil {
		return err
	}
	_, report, err = s.app.OpenGroup(ctx, left, sealed["again"])
	if err != nil || !report.Intact() {
		return fmt.Errorf("made again for those who are left, it is not intact: %w", err)
	}
	s.tell("Made again without him, for the two who are left: it opens, unflagged.")

	for _, p := range left.Subjects {
		if err := s.erase(ctx, p); err != nil {
			return err
		}
	}
	for what, g := range map[string]sdk.Group{"any": memory, "again": left} {
		if _, _, err := s.app.OpenGroup(ctx, g, sealed[what]); !errors.Is(err, sdk.ErrErased) {
			return fmt.Errorf("nobody is left, yet a memory is not erased: %w", err)
		}
	}
	s.tell("Nobody is left: erased, the old one and the new one.")
	return nil
}

// erase destroys a person's keys, through the application's own client, which
// stops using its own at once.
func (s *stage) erase(ctx context.Context, subject string) error {
	_, err := s.app.DestroyKey(ctx, sdk.DestroyRequest{
		Tenant: helpdesk, Subject: subject, RequestID: "blend-" + subject, Reason: "gdpr-art17",
	})
	return err
}
