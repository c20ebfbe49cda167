package badger

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
)

// The test binary runs itself as the process to kill or to starve.
const childEnv = "LETHE_BADGER_TEST_CHILD"

func TestMain(m *testing.M) {
	if job := os.Getenv(childEnv); job != "" {
		name, dir, _ := strings.Cut(job, " ")
		if err := children[name](dir); err != nil {
			fmt.Println("error", err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var children = map[string]func(dir string) error{
	"write":  childWrites,
	"hold":   childHolds,
	"starve": childStarves,
	"fill":   childFills,
	"limit":  childIsLimited,
}

func child(t *testing.T, job, dir string) (*exec.Cmd, io.Reader) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+job+" "+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// childWrites writes from many goroutines, and says so after each
// acknowledgement. Each client counts up, and drops its older rows' range now
// and then.
func childWrites(dir string) error {
	s, err := Open(Options{Dir: dir, Create: true})
	if err != nil {
		return err
	}
	ctx := context.Background()
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", args...)
	}
	failed := make(chan error)
	pad := strings.Repeat("x", 300)
	for c := range 200 {
		go func() {
			first := 0
			err := s.View(ctx, func(r keys.Reader) error {
				v, err := r.Get(fmt.Appendf(nil, "n%03d", c))
				if err == nil {
					first, err = strconv.Atoi(string(v))
				} else if errors.Is(err, keys.ErrNotFound) {
					err = nil
				}
				return err
			})
			for i := first + 1; err == nil; i++ {
				err = s.Update(ctx, func(tx keys.Tx) error {
					return errors.Join(tx.Put(fmt.Appendf(nil, "n%03d", c), fmt.Append(nil, i)),
						tx.Put(fmt.Appendf(nil, "c%03d/%07d", c, i), []byte(pad)),
						tx.Put(fmt.Appendf(nil, "w%d/%03d/%07d", i%2, c, i), []byte(pad)))
				})
				if err == nil {
					say("%d %d", c, i)
				}
			}
			failed <- err
		}()
	}
	go func() {
		for i := 0; ; i++ {
			time.Sleep(30 * time.Millisecond)
			if err := s.DropRange(ctx, fmt.Append(nil, "w", i%2, "/")); err != nil {
				failed <- err
			}
		}
	}()
	return <-failed
}

// TestKilledWhileWriting kills a process, with SIGKILL, among hundreds of
// concurrent updates and the drops beside them, over and over on one store.
func TestKilledWhileWriting(t *testing.T) {
	cycles := 15
	if testing.Short() {
		cycles = 4
	}
	dir := filepath.Join(t.TempDir(), "store")
	acknowledged := make([]int, 200)
	total := 0
	for cycle := range cycles {
		cmd, out := child(t, "write", dir)
		kill := sync.OnceValue(func() *time.Timer {
			return time.AfterFunc(time.Duration(50+rand.IntN(500))*time.Millisecond, func() { cmd.Process.Kill() })
		})
		if cycle%3 == 0 { // perhaps while it opens the store
			kill()
		}
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			kill()
			var c, i int
			if _, err := fmt.Sscanf(lines.Text(), "%d %d", &c, &i); err != nil {
				if strings.HasPrefix(lines.Text(), "error") {
					t.Errorf("child: %s", lines.Text())
				}
				continue // the last line may be cut
			}
			if i < acknowledged[c] {
				continue // the number in a cut line
			}
			acknowledged[c] = i
			total++
		}
		cmd.Wait()
		kill().Stop()
		s, err := Open(Options{Dir: dir, Create: true})
		if err != nil {
			t.Fatal(err)
		}
		err = s.View(t.Context(), func(r keys.Reader) error {
			for c, n := range acknowledged {
				got := 0
				v, err := r.Get(fmt.Appendf(nil, "n%03d", c))
				if err == nil {
					got, err = strconv.Atoi(string(v))
				}
				if n > 0 && err != nil || got < n {
					t.Errorf("client %d: counter %d, %v; %d was acknowledged", c, got, err, n)
				}
				rows := 0
				err = r.Scan(fmt.Appendf(nil, "c%03d/", c), nil, func(k, _ []byte) bool {
					rows++
					if want := fmt.Sprintf("c%03d/%07d", c, rows); string(k) != want {
						t.Errorf("row %q where %q is due", k, want)
						return false
					}
					return true
				})
				if err != nil || rows != got {
					t.Errorf("client %d: %d rows, %v, beside counter %d", c, rows, err, got)
				}
			}
			return nil
		})
		if err = errors.Join(err, s.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if total == 0 {
		t.Error("nothing was acknowledged before the kills")
	}
	t.Logf("%d acknowledged updates in %d cycles", total, cycles)
}

func childHolds(dir string) error {
	s, err := Open(Options{Dir: dir, Create: true})
	if err != nil {
		return err
	}
	fmt.Println("open")
	io.Copy(io.Discard, os.Stdin)
	return s.Close()
}

func TestLockedByAnotherProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=hold "+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "open\n" {
		t.Fatalf("child: %q, %v", line, err)
	}
	if _, err := Open(Options{Dir: dir}); !errors.Is(err, keys.ErrLocked) {
		t.Errorf("Open: %v, want ErrLocked", err)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatalf("after the other has ended: %v", err)
	}
	s.Close()
}
