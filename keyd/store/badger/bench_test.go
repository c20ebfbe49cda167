package badger

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dgraph-io/badger/v4"

	"lethe/keyd/internal/keys"
)

func benchKey(n uint64) []byte {
	return binary.BigEndian.AppendUint64(make([]byte, 0, 24), n*0x9e3779b97f4a7c15)
}

// benchClients spreads b.N over clients goroutines.
func benchClients(b *testing.B, clients int, op func(n uint64) error) {
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ResetTimer()
	for range clients {
		wg.Go(func() {
			for {
				n := next.Add(1)
				if n > int64(b.N) {
					return
				}
				if err := op(uint64(n)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}

// BenchmarkPut writes rows of 150 bytes durably: through the store, and through
// Badger alone with a synced transaction each, which is what it would be
// without the committer. Compare within one run.
func BenchmarkPut(b *testing.B) {
	value := make([]byte, 142)
	for _, clients := range []int{1, 64, 256} {
		b.Run(fmt.Sprintf("store/clients=%d", clients), func(b *testing.B) {
			s := openBench(b)
			benchClients(b, clients, func(n uint64) error {
				return s.Update(context.Background(), func(tx keys.Tx) error { return tx.Put(benchKey(n), value) })
			})
		})
		b.Run(fmt.Sprintf("badger/clients=%d", clients), func(b *testing.B) {
			db, err := badger.Open(badgerOptions(b.TempDir(), nil))
			if err != nil {
				b.Fatal(err)
			}
			defer db.Close()
			benchClients(b, clients, func(n uint64) error {
				return db.Update(func(txn *badger.Txn) error { return txn.Set(benchKey(n), value) })
			})
		})
	}
}

// BenchmarkGet reads rows of 150 bytes at random, of 200,000.
func BenchmarkGet(b *testing.B) {
	const rows = 200_000
	s := openBench(b)
	value := make([]byte, 142)
	for i := uint64(0); i < rows; {
		err := s.Update(b.Context(), func(tx keys.Tx) error {
			for end := i + 2000; i < end; i++ {
				if err := tx.Put(benchKey(i), value); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	get := func(uint64) error {
		return s.View(context.Background(), func(r keys.Reader) error {
			_, err := r.Get(benchKey(rand.Uint64N(rows)))
			return err
		})
	}
	for _, clients := range []int{1, 2, 64} {
		b.Run(fmt.Sprintf("store/clients=%d", clients), func(b *testing.B) { benchClients(b, clients, get) })
		b.Run(fmt.Sprintf("badger/clients=%d", clients), func(b *testing.B) {
			ts := s.snaps.newest().ts
			benchClients(b, clients, func(uint64) error {
				txn := s.db.NewTransactionAt(ts, false)
				defer txn.Discard()
				item, err := txn.Get(badgerKey(string(benchKey(rand.Uint64N(rows)))))
				if err != nil {
					return err
				}
				_, err = item.ValueCopy(nil)
				return err
			})
		})
	}
	b.Run("store/while writing", func(b *testing.B) {
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for c := range 16 {
			wg.Go(func() {
				for n := uint64(c); ; n += 16 {
					select {
					case <-stop:
						return
					default:
					}
					err := s.Update(context.Background(), func(tx keys.Tx) error { return tx.Put(benchKey(rows+n), value) })
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		benchClients(b, 64, get)
		close(stop)
		wg.Wait()
	})
}

func openBench(b *testing.B) *Store {
	b.Helper()
	s, err := Open(Options{Dir: filepath.Join(b.TempDir(), "store"), Create: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	return s
}
