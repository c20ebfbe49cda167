package keyd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/sdktest"
)

// BenchmarkGetBlobKeys leases keys over a Unix socket, client and server in one
// process, from 64 clients of one connection.
func BenchmarkGetBlobKeys(b *testing.B) {
	const subjects, clients = 10_000, 64
	audit, err := os.Create(filepath.Join(b.TempDir(), "audit"))
	if err != nil {
		b.Fatal(err)
	}
	defer audit.Close()
	k := sdktest.Start(b, sdktest.WithLog(audit))
	k.Tenant(b, "acme")
	keys := keydv1.NewKeyServiceClient(k.Conn())
	requests := make([]*keydv1.GetBlobKeysRequest, subjects)
	for i := 0; i < subjects; {
		req := new(keydv1.GetBlobKeysRequest)
		for range min(256, subjects-i) {
			req.Queries = append(req.Queries, &keydv1.BlobKeyQuery{
				Tenant: "acme", SubjectId: fmt.Appendf(nil, "subject-%08d@bench.example", i+len(req.Queries)),
				Class: "memory", Purpose: keydv1.Purpose_PURPOSE_SEAL,
			})
		}
		res, err := keys.GetBlobKeys(b.Context(), req)
		if err != nil {
			b.Fatal(err)
		}
		for j, r := range res.Results {
			q, key := req.Queries[j], r.GetKey()
			q.Purpose, q.KeyId, q.ClassNumber, q.Bucket = keydv1.Purpose_PURPOSE_OPEN, key.KeyId, key.ClassNumber, key.Bucket
			requests[i] = &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}}
			i++
		}
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for range clients {
		wg.Go(func() {
			for n := next.Add(1); n <= int64(b.N); n = next.Add(1) {
				res, err := keys.GetBlobKeys(b.Context(), requests[n*7919%subjects])
				if err != nil || res.Results[0].GetKey() == nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}
