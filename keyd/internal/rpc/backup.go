package rpc

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"

	"lethe/keyd/internal/keys"
	keydv1 "lethe/proto/keyd/v1"
)

// stallLimit is how long a client may let a backup wait for it. While a backup
// is under way the bytes of a dropped epoch stay in the store, so that one that
// is never read to its end would keep receipts from becoming sanitised.
const stallLimit = 2 * time.Minute

func (s *adminService) Backup(_ *keydv1.BackupRequest, stream grpc.ServerStreamingServer[keydv1.BackupResponse]) error {
	return sendBackup(stream.Context(), s.keys.Backup, stream.Send, stallLimit)
}

// sendBackup sends what backup writes, in pieces, and gives up when one of them
// cannot be sent for longer than limit.
func sendBackup(ctx context.Context, backup func(context.Context, io.Writer) error, send func(*keydv1.BackupResponse) error, limit time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &pieces{send: send, sent: make(chan struct{}, 1)}
	done := make(chan error, 1)
	go func() { done <- backup(ctx, p) }()
	stalled := time.NewTimer(limit)
	defer stalled.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-p.sent:
			stalled.Reset(limit)
		case <-stalled.C:
			// That the call ends is what ends the sending.
			return &keys.Error{Outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE, Message: "the backup was not read; take it again"}
		}
	}
}

// pieceSize is how many bytes a message of Backup has, at most.
const pieceSize = 256 << 10

// pieces sends what is written to it. Sending holds on to nothing after it
// returned, and waits while the client does not read.
type pieces struct {
	send func(*keydv1.BackupResponse) error
	sent chan struct{}
}

func (p *pieces) Write(b []byte) (n int, err error) {
	for n < len(b) {
		k := min(len(b)-n, pieceSize)
		if err := p.send(&keydv1.BackupResponse{Data: b[n : n+k]}); err != nil {
			return n, err
		}
		n += k
		select {
		case p.sent <- struct{}{}:
		default:
		}
	}
	return n, nil
}
