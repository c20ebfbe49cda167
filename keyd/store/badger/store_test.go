package badger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"testing"

	"lethe/keyd/internal/keys"
)

func openTest(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(Options{Dir: dir, Create: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestOpenDoesNotMakeAStoreUnlessAsked(t *testing.T) {
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "absent")} {
		if _, err := Open(Options{Dir: dir}); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Open of a store that is not there: %v, want fs.ErrNotExist", err)
		}
	}
}

func TestAcknowledgedRowsSurviveReopening(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	s := openTest(t, dir)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			err := s.Update(ctx, func(tx keys.Tx) error {
				return tx.Put(fmt.Append(nil, "k", i), fmt.Append(nil, "v", i))
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openTest(t, dir)
	err := s.View(ctx, func(r keys.Reader) error {
		for i := range 100 {
			v, err := r.Get(fmt.Append(nil, "k", i))
			if err != nil || string(v) != fmt.Sprint("v", i) {
				t.Errorf("row %d: %q, %v", i, v, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
