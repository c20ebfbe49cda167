package keyd_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/sdktest"
)

// startBench starts a keyd with a tenant.
func startBench(b *testing.B) *sdktest.Keyd {
	b.Helper()
	audit, err := os.Create(filepath.Join(b.TempDir(), "audit"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { audit.Close() })
	k := sdktest.Start(b, sdktest.WithLog(audit))
	k.Tenant(b, "acme")
	return k
}

func subject(n int) []byte { return fmt.Appendf(nil, "subject-%08d@bench.example", n) }

func sealQuery(n int) *keydv1.BlobKeyQuery {
	return &keydv1.BlobKeyQuery{Tenant: "acme", SubjectId: subject(n), Class: "memory", Purpose: keydv1.Purpose_PURPOSE_SEAL}
}

// makeSubjects makes n subjects and returns the queries that open their blobs.
func makeSubjects(b *testing.B, keys keydv1.KeyServiceClient, n int) (opens []*keydv1.BlobKeyQuery) {
	b.Helper()
	for len(opens) < n {
		req := new(keydv1.GetBlobKeysRequest)
		for i := range min(256, n-len(opens)) {
			req.Queries = append(req.Queries, sealQuery(len(opens)+i))
		}
		res, err := keys.GetBlobKeys(b.Context(), req)
		if err != nil {
			b.Fatal(err)
		}
		for i, r := range res.Results {
			q, key := req.Queries[i], r.GetKey()
			q.Purpose, q.KeyId, q.ClassNumber, q.Bucket = keydv1.Purpose_PURPOSE_OPEN, key.GetKeyId(), key.GetClassNumber(), key.GetBucket()
			opens = append(opens, q)
		}
	}
	return opens
}

// spread does b.N operations from 64 clients.
func spread(b *testing.B, op func(n int) error) {
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for range 64 {
		wg.Go(func() {
			for n := next.Add(1); n <= int64(b.N); n = next.Add(1) {
				if err := op(int(n - 1)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// getOne makes a call for one key.
func getOne(b *testing.B, keys keydv1.KeyServiceClient, q *keydv1.BlobKeyQuery) error {
	res, err := keys.GetBlobKeys(b.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}})
	if err == nil && res.Results[0].GetKey() == nil {
		err = errors.New(res.Results[0].GetFailure().GetMessage())
	}
	return err
}

// The benchmarks call keyd through a Unix socket, client and server in one
// process, from 64 clients of one connection.

// BenchmarkGetBlobKeys leases keys that are there.
func BenchmarkGetBlobKeys(b *testing.B) {
	keys := keydv1.NewKeyServiceClient(startBench(b).Conn())
	opens := makeSubjects(b, keys, 10_000)
	spread(b, func(n int) error { return getOne(b, keys, opens[n*7919%len(opens)]) })
}

// BenchmarkFirstUse makes subjects.
func BenchmarkFirstUse(b *testing.B) {
	keys := keydv1.NewKeyServiceClient(startBench(b).Conn())
	spread(b, func(n int) error { return getOne(b, keys, sealQuery(n)) })
}

// BenchmarkDestroyKey destroys subjects that have one key.
func BenchmarkDestroyKey(b *testing.B) {
	k := startBench(b)
	makeSubjects(b, keydv1.NewKeyServiceClient(k.Conn()), b.N)
	erasure := keydv1.NewErasureServiceClient(k.Conn())
	spread(b, func(n int) error {
		_, err := erasure.DestroyKey(b.Context(), &keydv1.DestroyKeyRequest{
			Tenant: "acme", SubjectId: subject(n), RequestId: strconv.Itoa(n), Reason: "bench",
		})
		return err
	})
}
