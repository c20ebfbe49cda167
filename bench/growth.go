package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/bench/measure"
	"lethe/bench/peers"
	"lethe/bench/report"
	"lethe/keyd"
	"lethe/keyd/anchor/file"
	"lethe/keyd/kms/local"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

func (b *bench) growth() (*report.Section, error) {
	s := &report.Section{Title: "Growth", Text: "What costs more as something grows. Sizes of payloads are above; replicas: not run, since the store of this version is of one process. " +
		"GROWTH.md puts the numbers together."}
	all, err := b.populations("growth", b.growthSubjects)
	if err != nil {
		return nil, fmt.Errorf("subjects: %w", err)
	}
	s.Tables = append(s.Tables, populationTable(all))
	s.Plots = append(s.Plots, populationPlot("subjects", all))
	recipients, err := b.recipients()
	if err != nil {
		return nil, fmt.Errorf("recipients: %w", err)
	}
	buckets, err := b.buckets()
	if err != nil {
		return nil, fmt.Errorf("buckets: %w", err)
	}
	s.Tables = append(s.Tables, recipients, buckets)
	return s, nil
}

// recipients seals 1 KiB for several subjects.
func (b *bench) recipients() (report.Table, error) {
	t := report.Table{
		Title: "Recipients of a blob of 1 KiB",
		Head:  []string{"recipients", "policy", "seal µs", "open µs", "seal allocs", "open allocs", "overhead bytes", "seal, of the limit", "open, of the limit"},
	}
	plain := make([]byte, 1<<10)
	limit := peers.Limit()
	raw, err := limit.Seal(nil, plain)
	if err != nil {
		return t, err
	}
	rawDst := make([]byte, 0, 2<<10)
	for _, n := range []int{1, 2, 4, 8, 16, 32, 64} {
		for _, policy := range []envelope.Policy{envelope.All, envelope.Any} {
			keys := make([]*envelope.Key, n)
			for i := range keys {
				keys[i] = &envelope.Key{Class: 1}
				rand.Read(keys[i].ID[:])
				rand.Read(keys[i].Secret[:])
			}
			var sealer *envelope.Sealer
			var opener *envelope.Opener
			name := policy.String()
			if n == 1 {
				if policy == envelope.Any {
					continue
				}
				name = "single"
				if sealer, err = envelope.NewSealer(keys[0], envelope.Options{}); err == nil {
					opener, err = envelope.NewOpener(keys[0], envelope.Options{})
				}
			} else if sealer, err = envelope.NewMultiSealer(policy, keys, envelope.Options{}); err == nil {
				opener, err = envelope.NewMultiOpener(policy, keys, envelope.Options{})
			}
			if err != nil {
				return t, err
			}
			blob, err := sealer.Append(nil, plain, envelope.Context{})
			if err != nil {
				return t, err
			}
			dst := make([]byte, 0, len(blob)+64)
			loop := func(name string, op func() error) measure.Contender {
				return measure.Contender{Name: name, Run: func(_, n int) error {
					for range n {
						if err := op(); err != nil {
							return err
						}
					}
					return nil
				}}
			}
			r, err := measure.Race{Turn: b.turn, Rounds: max(b.rounds/3, 9)}.Run(b,
				loop("limit", func() error { _, err := limit.Seal(rawDst, plain); return err }),
				loop("limit", func() error { _, err := limit.Open(rawDst, raw); return err }),
				loop("seal", func() error { _, err := sealer.Append(dst, plain, envelope.Context{}); return err }),
				loop("open", func() error { _, err := opener.Append(dst, blob, envelope.Context{}); return err }))
			if err != nil {
				return t, err
			}
			t.Add(n, name, r[2].NsPerOp/1e3, r[3].NsPerOp/1e3, r[2].AllocsPerOp, r[3].AllocsPerOp, len(blob)-len(plain), r[2].Ratio, r[3].Ratio*r[1].NsPerOp/r[0].NsPerOp)
		}
	}
	return t, nil
}

// movedClock is a wall clock that is moved by hand.
type movedClock struct {
	mu    sync.Mutex
	ahead time.Duration
}

func (c *movedClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.ahead)
}

func (c *movedClock) move(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += d
}

// buckets seals for one subject in many buckets, and opens in all of them. The
// keyd is in this process, since its clock has to be moved.
func (b *bench) buckets() (report.Table, error) {
	t := report.Table{
		Title: "Buckets of a class: opening in a random one of them",
		Head:  []string{"buckets", "first use of a bucket p50 ms", "get p50 ms", "get p99 ms"},
	}
	ctx, dir := context.Context(b), filepath.Join(b.dir, "buckets")
	clock := new(movedClock)
	if err := local.GenerateKeyfile(dir + ".keyfile"); err != nil {
		return t, err
	}
	kms, err := local.Open(local.Options{Path: dir + ".roots", Keyfile: dir + ".keyfile", Create: true, Clock: clock.now})
	if err != nil {
		return t, err
	}
	defer kms.Close()
	anchor, err := file.Open(file.Options{Dir: dir + ".anchor", Create: true})
	if err != nil {
		return t, err
	}
	defer anchor.Close()
	store, err := badger.Open(badger.Options{Dir: dir, Create: true})
	if err != nil {
		return t, err
	}
	defer store.Close()
	server, err := keyd.Open(ctx, keyd.Config{
		Store: store, KMS: kms, Anchor: anchor, Clock: clock.now, Development: true, Initialise: true,
		EpochLength: 100 * 365 * 24 * time.Hour, KEKLease: 100 * 365 * 24 * time.Hour, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return t, err
	}
	defer server.Stop(ctx)
	lis, err := net.Listen("unix", dir+".sock")
	if err != nil {
		return t, err
	}
	go server.Serve(lis)
	conn, err := grpc.NewClient("unix://"+dir+".sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return t, err
	}
	defer conn.Close()
	_, err = keydv1.NewAdminServiceClient(conn).CreateTenant(ctx, &keydv1.CreateTenantRequest{
		Tenant: tenant, Classes: []*keydv1.Class{{Name: class, BucketWidth: durationpb.New(time.Hour), Lease: durationpb.New(time.Minute)}},
	})
	if err != nil {
		return t, err
	}
	var opens []*keydv1.GetBlobKeysRequest
	for _, n := range b.growthBuckets {
		var first []float64
		for len(opens) < n {
			begun := time.Now()
			res, err := get(ctx, conn, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{sealQuery(0)}})
			if err != nil {
				return t, err
			}
			first = append(first, since(begun))
			opens = append(opens, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{openQuery(0, res.Results[0].GetKey())}})
			clock.move(time.Hour)
		}
		l, err := closedLoop(ctx, 1, 0, 2*b.unloaded, func(_, i int) error {
			_, err := get(ctx, conn, opens[i*7919%len(opens)])
			return err
		})
		if err != nil {
			return t, err
		}
		t.Add(n, measure.Median(first), l.at(0.5)/1e6, l.at(0.99)/1e6)
	}
	return t, nil
}
