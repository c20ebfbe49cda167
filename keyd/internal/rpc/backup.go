package rpc

import (
	"google.golang.org/grpc"

	keydv1 "lethe/proto/keyd/v1"
)

func (s *adminService) Backup(_ *keydv1.BackupRequest, stream grpc.ServerStreamingServer[keydv1.BackupResponse]) error {
	return s.keys.Backup(stream.Context(), &pieces{stream: stream})
}

// pieceSize is how many bytes a message of Backup has, at most.
const pieceSize = 256 << 10

// pieces sends what is written to it. Send holds on to nothing after it
// returned, and waits while the client does not read.
type pieces struct {
	stream grpc.ServerStreamingServer[keydv1.BackupResponse]
}

func (p *pieces) Write(b []byte) (n int, err error) {
	for n < len(b) {
		k := min(len(b)-n, pieceSize)
		if err := p.stream.Send(&keydv1.BackupResponse{Data: b[n : n+k]}); err != nil {
			return n, err
		}
		n += k
	}
	return n, nil
}
