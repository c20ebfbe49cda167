package rpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
)

func TestSendBackup(t *testing.T) {
	want := bytes.Repeat([]byte("0123456789"), 100_000)
	backup := func(_ context.Context, w io.Writer) error {
		_, err := w.Write(want)
		return err
	}
	var got []byte
	err := sendBackup(t.Context(), backup, func(m *keydv1.BackupResponse) error {
		if len(m.Data) > pieceSize {
			t.Errorf("a piece of %d bytes", len(m.Data))
		}
		got = append(got, m.Data...)
		return nil
	}, time.Hour)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	broken := errors.New("broken")
	err = sendBackup(t.Context(), backup, func(*keydv1.BackupResponse) error { return broken }, time.Hour)
	if !errors.Is(err, broken) {
		t.Errorf("sending fails: %v", err)
	}
}

// TestBackupThatIsNotRead: a client that reads no further does not keep the
// store's snapshot for ever.
func TestBackupThatIsNotRead(t *testing.T) {
	ended, released := make(chan struct{}), make(chan error, 1)
	err := sendBackup(t.Context(), func(ctx context.Context, w io.Writer) error {
		_, err := w.Write([]byte("x"))
		released <- errors.Join(err, ctx.Err())
		return err
	}, func(*keydv1.BackupResponse) error {
		<-ended // as a stream whose call has ended returns
		return io.ErrClosedPipe
	}, time.Millisecond)
	var outcome *keys.Error
	if !errors.As(err, &outcome) || outcome.Outcome != keydv1.Outcome_OUTCOME_UNAVAILABLE {
		t.Errorf("a stalled backup: %v", err)
	}
	close(ended)
	if err := <-released; !errors.Is(err, context.Canceled) {
		t.Errorf("what reads the store was not told: %v", err)
	}
}
