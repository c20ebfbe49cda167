package badger

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
)

// smallDisk mounts a file system of size bytes for the test.
func smallDisk(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=700", size))
	switch {
	case err == nil:
	case os.Getenv("CI") == "true" || os.Geteuid() == 0:
		t.Fatalf("mounting a small file system: %v", err)
	default:
		t.Skipf("mounting a small file system needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmounting: %v", err)
		}
	})
	return dir
}

// childFills writes from many goroutines until the store is full, and goes on
// trying for a while: it must not die.
func childFills(dir string) error {
	s, err := Open(Options{Dir: dir, Create: true, MinFree: 1})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make(chan error, 32)
	for c := range 32 {
		wg.Go(func() {
			value := make([]byte, 4000)
			full := 0
			for i := 0; full < 200; i++ {
				for j := range value {
					value[j] = byte(rand.Uint32())
				}
				err := s.Update(context.Background(), func(tx keys.Tx) error {
					return tx.Put(fmt.Appendf(nil, "%d/%d", c, rand.IntN(1e9)), append([]byte{}, value...))
				})
				switch {
				case errors.Is(err, keys.ErrFull):
					full++
				case err != nil:
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	if err := <-errs; err != nil {
		return err
	}
	fmt.Println("full") // until a compaction has made room
	return s.Close()
}

func TestFullDisk(t *testing.T) {
	disk := smallDisk(t, 500<<20)
	dir := filepath.Join(disk, "store")
	cmd, out := child(t, "fill", dir)
	said := make([]byte, 200)
	n, _ := out.Read(said)
	if err := cmd.Wait(); err != nil || string(said[:n]) != "full\n" {
		t.Fatalf("child: %v, said %q", err, said[:n])
	}

	// With something else in the way the store opens, reads, refuses to write,
	// and goes on when the room is back.
	free, err := freeBytes(disk)
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(disk, "ballast")
	if err := os.WriteFile(ballast, make([]byte, free/2), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Options{Dir: dir, MinFree: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	write := func() error {
		return s.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte("row"), []byte("x")) })
	}
	if err := write(); !errors.Is(err, keys.ErrFull) {
		t.Errorf("Update: %v, want ErrFull", err)
	}
	if err := s.Check(t.Context()); !errors.Is(err, keys.ErrFull) {
		t.Errorf("Check: %v, want ErrFull", err)
	}
	if free, least := s.Free(); free >= least || least < LeastMinFree {
		t.Errorf("Free: %d, %d", free, least)
	}
	noWrite := errors.New("nothing to do")
	if err := s.Update(t.Context(), func(tx keys.Tx) error { return noWrite }); err != noWrite {
		t.Errorf("an update that writes nothing: %v", err)
	}
	if err := s.Update(t.Context(), func(tx keys.Tx) error {
		_, err := tx.Get([]byte("row"))
		if !errors.Is(err, keys.ErrNotFound) {
			return fmt.Errorf("a refused row: %w", err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	// The store itself had filled the disk; make the disk larger.
	if err := unix.Mount("tmpfs", disk, "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d", 1<<30)); err != nil {
		t.Fatal(err)
	}
	if err := write(); err != nil {
		t.Errorf("Update with room again: %v", err)
	}
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("Check with room again: %v", err)
	}
}

// A file system with room but no inodes is full, and what is missing is said.
func TestNoInodes(t *testing.T) {
	disk := smallDisk(t, 900<<20)
	s := openTest(t, filepath.Join(disk, "store"))
	write := func() error {
		return s.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte("row"), []byte("x")) })
	}
	inodes := func(free uint64) {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(disk, &st); err != nil {
			t.Fatal(err)
		}
		options := fmt.Sprintf("nr_inodes=%d", st.Files-st.Ffree+free)
		if err := unix.Mount("tmpfs", disk, "tmpfs", unix.MS_REMOUNT, options); err != nil {
			t.Fatal(err)
		}
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	inodes(20)
	_, openErr := Open(Options{Dir: filepath.Join(disk, "other"), Create: true})
	for name, err := range map[string]error{"Update": write(), "Check": s.Check(t.Context()), "Open": openErr} {
		if !errors.Is(err, keys.ErrFull) || !strings.Contains(err.Error(), "inodes free") || strings.Contains(err.Error(), "MiB") {
			t.Errorf("%s: %v, want ErrFull for inodes", name, err)
		}
	}
	inodes(1000)
	if err := write(); err != nil {
		t.Errorf("with inodes again: %v", err)
	}
}

// TestRefusedWhenFull: whoever reads what an earlier refused update of the same
// group wrote would see what never was.
func TestRefusedWhenFull(t *testing.T) {
	s := openTest(t, t.TempDir())
	var mu sync.Mutex
	var free uint64 = 1 << 40
	s.stat = func(string) (uint64, error) { mu.Lock(); defer mu.Unlock(); return free, nil }
	set := func(n uint64) { mu.Lock(); defer mu.Unlock(); free = n }
	put := func(key string) error {
		return s.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte(key), []byte("x")) })
	}
	if err := put("a"); err != nil {
		t.Fatal(err)
	}
	set(DefaultMinFree)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if err := put(fmt.Sprint("b", i)); !errors.Is(err, keys.ErrFull) {
				t.Errorf("Update: %v, want ErrFull", err)
			}
			err := s.Update(t.Context(), func(tx keys.Tx) error {
				return tx.Scan([]byte("b"), nil, func(k, _ []byte) bool {
					t.Errorf("row %q of a refused update is seen", k)
					return true
				})
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := s.DropRange(t.Context(), []byte("a")); err != nil {
		t.Errorf("DropRange, which makes room: %v", err)
	}
	set(DefaultMinFree/2 - 1)
	if err := s.DropRange(t.Context(), []byte("a")); !errors.Is(err, keys.ErrFull) {
		t.Errorf("DropRange without any room: %v, want ErrFull", err)
	}
	set(1 << 40)
	if err := put("b"); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// childStarves lets the process run out of file descriptors, all but one that
// comes and goes, while it writes enough for compactions. In that state Badger
// alone loses rows.
func childStarves(dir string) error {
	s, err := Open(Options{Dir: dir, Create: true})
	if err != nil {
		return err
	}
	ctx := context.Background()
	value := make([]byte, 1000)
	written := 0
	write := func(rows int) error {
		for end := written + rows; written < end; {
			err := s.Update(ctx, func(tx keys.Tx) error {
				for i := written; i < written+500; i++ {
					if err := tx.Put(fmt.Appendf(nil, "%08d", i), value); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
			written += 500
		}
		return nil
	}
	if err := write(20_000); err != nil {
		return err
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	open, _ := countDescriptors()
	limit.Cur = open + 300
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	if err := write(20_000); err != nil {
		return fmt.Errorf("with descriptors to spare: %w", err)
	}
	var taken []*os.File
	for range 200 {
		f, err := os.Open("/dev/null")
		if err != nil {
			return err
		}
		taken = append(taken, f)
	}
	s.fds.at = s.fds.at.Add(-descriptorsEvery)
	if err := write(500); !errors.Is(err, keys.ErrFull) {
		return fmt.Errorf("without descriptors to spare: %w", err)
	}
	if err := s.Check(ctx); !errors.Is(err, keys.ErrFull) {
		return fmt.Errorf("Check without descriptors to spare: %w", err)
	}
	for _, f := range taken {
		f.Close()
	}
	s.fds.at = s.fds.at.Add(-descriptorsEvery)
	if err := write(500); err != nil {
		return fmt.Errorf("with descriptors to spare again: %w", err)
	}
	n := 0
	err = s.View(ctx, func(r keys.Reader) error {
		return r.Scan(nil, nil, func(_, _ []byte) bool { n++; return true })
	})
	if err == nil && n != written {
		err = fmt.Errorf("%d of %d rows are there", n, written)
	}
	fmt.Println("done")
	return errors.Join(err, s.Close())
}

func TestFileDescriptors(t *testing.T) {
	cmd, out := child(t, "starve", filepath.Join(t.TempDir(), "store"))
	said := make([]byte, 500)
	n, _ := out.Read(said)
	if err := cmd.Wait(); err != nil || string(said[:n]) != "done\n" {
		t.Fatalf("child: %v, said %q", err, said[:n])
	}
}

// childIsLimited has the process's files limited in size: at first the store
// refuses to write; without that guard a write fails, and the store stops. It
// says why, also to who reads meanwhile, and loses nothing.
func childIsLimited(dir string) error {
	s, err := Open(Options{Dir: dir, Create: true})
	if err != nil {
		return err
	}
	ctx := context.Background()
	written := 0
	write := func() error {
		err := s.Update(ctx, func(tx keys.Tx) error {
			for i := written; i < written+500; i++ {
				if err := tx.Put(fmt.Appendf(nil, "%08d", i), make([]byte, 1000)); err != nil {
					return err
				}
			}
			return nil
		})
		if err == nil {
			written += 500
		}
		return err
	}
	setLimit := func(n uint64) error {
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
			return err
		}
		limit.Cur = min(n, limit.Max)
		return unix.Setrlimit(unix.RLIMIT_FSIZE, &limit)
	}
	if err := write(); err != nil {
		return err
	}
	if err := setLimit(24 << 20); err != nil { // less than a log, more than a table
		return err
	}
	if err := write(); !errors.Is(err, keys.ErrFull) || !strings.Contains(err.Error(), "RLIMIT_FSIZE") {
		return fmt.Errorf("an update under a limit: %w", err)
	}
	if err := s.Check(ctx); !errors.Is(err, keys.ErrFull) {
		return fmt.Errorf("Check under a limit: %w", err)
	}
	if _, err := Open(Options{Dir: dir + ".other", Create: true}); !errors.Is(err, keys.ErrFull) {
		return fmt.Errorf("Open under a limit: %w", err)
	}

	s.fileLimit = func() uint64 { return math.MaxUint64 }
	stopped := func(what string, err error) error {
		if !errors.Is(err, keys.ErrUnavailable) || errors.Is(err, keys.ErrDamaged) ||
			!strings.Contains(err.Error(), "file too large") || !strings.Contains(err.Error(), "restart keyd") {
			return fmt.Errorf("%s when the store has stopped: %w", what, err)
		}
		return nil
	}
	err = s.View(ctx, func(r keys.Reader) error { // from before
		for write() == nil {
		}
		_, err := r.Get([]byte("a row"))
		scan := r.Scan(nil, nil, func(_, _ []byte) bool { return true })
		return errors.Join(stopped("Get", err), stopped("Scan", scan))
	})
	if err := errors.Join(err, stopped("Update", write()), stopped("Check", s.Check(ctx))); err != nil {
		return err
	}
	fmt.Println(written)
	if filepath.Base(dir) == "killed" {
		time.Sleep(time.Hour)
	}
	s.Close() // which cannot be well
	return nil
}

func TestFileSizeLimit(t *testing.T) {
	for _, end := range []string{"killed", "closed"} {
		dir := filepath.Join(t.TempDir(), end)
		cmd, out := child(t, "limit", dir)
		var written int
		if _, err := fmt.Fscanln(out, &written); err != nil {
			cmd.Process.Kill()
			rest, _ := io.ReadAll(out)
			t.Fatalf("child: %v, %v, said %q", err, cmd.Wait(), rest)
		}
		if end == "killed" {
			cmd.Process.Kill()
		}
		if err := cmd.Wait(); err != nil && end != "killed" {
			t.Fatalf("child: %v", err)
		}
		s, err := Open(Options{Dir: dir})
		if err != nil {
			t.Fatalf("%s: %v", end, err)
		}
		n := 0
		err = s.View(t.Context(), func(r keys.Reader) error {
			return r.Scan(nil, nil, func(_, _ []byte) bool { n++; return true })
		})
		if err != nil || n != written || s.Close() != nil {
			t.Errorf("%s: %d rows are there, %d were acknowledged: %v", end, n, written, err)
		}
	}
}
