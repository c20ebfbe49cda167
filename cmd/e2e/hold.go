package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"lethe/sdk"
)

// exitHeld is lethe's exit code for what a legal hold forbids.
const exitHeld = 13

// holdErasure has a person ask for erasure while a court wants the data kept:
// it is refused or, if it may, waits, and goes on by itself when the hold is
// released.
func holdErasure(ctx context.Context, s *stage) error {
	t := sdk.Target{Tenant: helpdesk, Subject: "rosa@example.org", Class: "memory"}
	plain := []byte("Rosa disputes an invoice.")
	blob, err := s.app.Seal(ctx, t, plain)
	if err != nil {
		return err
	}
	id := []byte(t.Subject)
	whose := []string{"--tenant", t.Tenant, "--subject-file", "-"}
	if _, _, err := s.lethe(ctx, id, append([]string{"hold", "place", "case-7", "--reason", "litigation"}, whose...)...); err != nil {
		return err
	}
	destroy := append([]string{"destroy", "--yes", "--reason", "gdpr-art17", "--request-id", "rosa-1"}, whose...)
	if _, code, err := s.lethe(ctx, id, destroy...); err == nil || code != exitHeld {
		return fmt.Errorf("lethe destroy under a hold does not end as held: %w", err)
	}
	if opened, err := s.app.Open(ctx, t, blob); err != nil || !bytes.Equal(opened, plain) {
		return fmt.Errorf("held, it does not open: %w", err)
	}
	s.tell("lethe hold place; lethe destroy: exit code %d, held. Her record opens.", exitHeld)

	destroy = append(destroy, "--wait-for-holds")
	out, _, err := s.lethe(ctx, id, destroy...)
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(out, []byte("waiting, not destroyed")) {
		return errors.New("an erasure that waits does not say so")
	}
	// keyd refuses at once; a client that has a lease hears of it a moment later.
	for give := time.Now().Add(15 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		opened, err := s.app.Open(ctx, t, blob)
		if errors.Is(err, sdk.ErrPendingErasure) {
			break
		}
		if err != nil || !bytes.Equal(opened, plain) || time.Now().After(give) {
			return fmt.Errorf("what waits to be erased is not refused as pending: %w", err)
		}
	}
	s.tell("lethe destroy --wait-for-holds: waiting, not destroyed. Her record is refused as pending, and the key is there.")

	if _, _, err := s.lethe(ctx, id, append([]string{"hold", "release", "case-7", "--reason", "settled"}, whose...)...); err != nil {
		return err
	}
	for give := time.Now().Add(15 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		_, err := s.app.Open(ctx, t, blob)
		if errors.Is(err, sdk.ErrErased) {
			break
		}
		if !errors.Is(err, sdk.ErrPendingErasure) || time.Now().After(give) {
			return fmt.Errorf("released, it does not come to be erased: %w", err)
		}
	}
	out, _, err = s.lethe(ctx, id, destroy...)
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(out, []byte("destroyed\n")) {
		return errors.New("the repeated request does not tell of the destruction")
	}
	s.tell("lethe hold release, and nothing else: erased. The same request again tells of the destruction.")
	return nil
}
