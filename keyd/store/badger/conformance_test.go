package badger

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"lethe/keyd/internal/keys"
	"lethe/keyd/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		dir := filepath.Join(t.TempDir(), "store")
		s := openTest(t, dir)
		return storetest.Harness{
			Store: s,
			Reopen: func(t *testing.T) keys.Store {
				t.Helper()
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = openTest(t, dir)
				return s
			},
			Crash: func(t *testing.T) keys.Store {
				t.Helper()
				return openTest(t, image(t, s))
			},
			Restore: func(t *testing.T, r io.Reader) keys.Store {
				t.Helper()
				dir := filepath.Join(t.TempDir(), "restored")
				if err := Restore(t.Context(), dir, r); err != nil {
					t.Fatal(err)
				}
				return openTest(t, dir)
			},
			Bytes: func(t *testing.T, b []byte) bool {
				t.Helper()
				return filesHold(t, dir, b)
			},
		}
	})
}

// image copies the directory as it is between two commits, and between two
// compactions.
func image(t *testing.T, s *Store) string {
	t.Helper()
	s.commitMu.Lock()
	defer s.commitMu.Unlock()
	for {
		before := listTables(t, s.dir.path)
		to := copyDir(t, s.dir.path)
		if slices.Equal(listTables(t, s.dir.path), before) && slices.Equal(listTables(t, to), before) {
			return to
		}
	}
}

func listTables(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.sst"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	return names
}

// copyDir copies a store's directory, leaving holes where logs are empty.
func copyDir(t *testing.T, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy")
	if err := os.Mkdir(to, 0o700); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		name := filepath.Join(to, f.Name())
		b, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a compaction was faster
		}
		if err == nil {
			err = os.WriteFile(name, bytes.TrimRight(b, "\x00"), 0o600)
		}
		if err == nil {
			err = os.Truncate(name, int64(len(b)))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func filesHold(t *testing.T, dir string, b []byte) bool {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		content, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if bytes.Contains(content, b) {
			return true
		}
	}
	return false
}
