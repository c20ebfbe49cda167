package keys_test

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/local"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
)

// openBench returns keys over a real store, with the queries that open the
// blobs of some subjects.
func openBench(b *testing.B, subjects int) (*keys.Keys, []*keydv1.BlobKeyQuery) {
	b.Helper()
	dir := b.TempDir()
	check := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	check(local.GenerateKeyfile(filepath.Join(dir, "keyfile")))
	kms, err := local.Open(local.Options{Path: filepath.Join(dir, "roots"), Keyfile: filepath.Join(dir, "keyfile"), Create: true})
	check(err)
	b.Cleanup(func() { kms.Close() })
	store, err := badger.Open(badger.Options{Dir: filepath.Join(dir, "store"), Create: true, Logger: slog.New(slog.DiscardHandler)})
	check(err)
	b.Cleanup(func() { store.Close() })
	k, err := keys.Open(b.Context(), keys.Config{
		Store: store, KMS: kms, Anchor: anchortest.NewMemory(), Initialise: true,
		EpochLength: 7 * 24 * time.Hour, KEKLease: time.Hour, AnchorTimeout: 10 * time.Second, DutyInterval: time.Minute,
	})
	check(err)
	b.Cleanup(k.Close)
	_, err = k.CreateTenant(b.Context(), "acme", nil)
	check(err)
	var opens []*keydv1.BlobKeyQuery
	for len(opens) < subjects {
		var batch []*keydv1.BlobKeyQuery
		for i := range min(keys.MaxBatch, subjects-len(opens)) {
			batch = append(batch, sealQuery("acme", fmt.Sprintf("subject-%08d@bench.example", len(opens)+i), "memory"))
		}
		results, err := k.BlobKeys(b.Context(), batch)
		check(err)
		for i, r := range results {
			check(r.Err)
			opens = append(opens, openQuery("acme", string(batch[i].SubjectId), "memory", r.Key))
		}
	}
	return k, opens
}

// BenchmarkBlobKeys leases keys of subjects that have one: one a call, and a
// hundred a call.
func BenchmarkBlobKeys(b *testing.B) {
	k, opens := openBench(b, 10_000)
	for _, batch := range []int{1, 100} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			b.ReportAllocs()
			queries := make([]*keydv1.BlobKeyQuery, batch)
			keys, begun := 0, cpuTime(b)
			for b.Loop() {
				for i := range queries {
					queries[i] = opens[rand.IntN(len(opens))]
				}
				results, err := k.BlobKeys(b.Context(), queries)
				if err != nil {
					b.Fatal(err)
				}
				for _, r := range results {
					if r.Err != nil {
						b.Fatal(r.Err)
					}
				}
				keys += batch
			}
			b.ReportMetric(float64(cpuTime(b)-begun)/float64(keys), "cpu-ns/key")
		})
	}
}

// cpuTime is what this process has spent on all processors, which a busy
// machine changes less than it does wall time.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
