package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/kmstest"
)

func itoa(fd uintptr) string { return strconv.Itoa(int(fd)) }

// Environment of a child process that runs childMain instead of the tests.
const (
	childPath    = "LETHE_LOCAL_KMS_TEST_PATH"
	childKeyfile = "LETHE_LOCAL_KMS_TEST_KEYFILE"
)

func TestMain(m *testing.M) {
	if os.Getenv(childPath) != "" {
		childMain()
	}
	os.Exit(m.Run())
}

// childMain changes the file for ever, and writes every acknowledgement to
// standard output.
func childMain() {
	k, err := Open(Options{Path: os.Getenv(childPath), Keyfile: os.Getenv(childKeyfile)})
	if err != nil {
		fmt.Println("failed", err)
		os.Exit(1)
	}
	for epoch := uint32(0); ; epoch++ {
		id, err := k.Create(context.Background(), epoch, kmstest.Request())
		if err != nil {
			fmt.Println("failed", err)
			os.Exit(1)
		}
		fmt.Println("created", id)
		if epoch%2 == 0 {
			if err := k.Disable(context.Background(), id); err != nil {
				fmt.Println("failed", err)
				os.Exit(1)
			}
			fmt.Println("disabled", id)
		}
	}
}

func startChild(t *testing.T, o Options) (cmd *exec.Cmd, lines *bufio.Scanner) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command(exe)
	cmd.Env = append(os.Environ(), childPath+"="+o.Path, childKeyfile+"="+o.Keyfile)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd, bufio.NewScanner(out)
}

// A child is killed again and again while it makes and disables roots. The
// file always opens, and whatever was acknowledged is in it.
func TestKill9(t *testing.T) {
	o, _ := withKeyfile(t)
	o.Clock = time.Now
	mustOpen(t, o).Close()
	o.Create = false
	state := map[string]keys.RootState{}
	cycles := 40
	if testing.Short() {
		cycles = 5
	}
	for cycle := range cycles {
		cmd, lines := startChild(t, o)
		// The first acknowledgements, then the kill wherever the child is by
		// then: the pipe's buffer lets it run ahead.
		for range 1 + cycle%7 {
			if !lines.Scan() {
				t.Fatal("the child ended by itself")
			}
			ack(t, state, lines.Text())
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() {
			ack(t, state, lines.Text())
		}
		cmd.Wait()

		k, err := Open(o)
		if err != nil {
			t.Fatalf("cycle %d: Open: %v", cycle, err)
		}
		for id, want := range state {
			d, err := k.Describe(t.Context(), id)
			// A root whose Disable was not acknowledged may be disabled all the same.
			if err != nil || d.State != want && d.State != keys.RootDisabled {
				t.Fatalf("cycle %d: %s is %+v, %v; acknowledged was %d", cycle, id, d, err, want)
			}
		}
		if _, err := os.Lstat(tempName(o.Path)); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("cycle %d: Open left the temporary file", cycle)
		}
		k.Close()
	}
	if len(state) < cycles/2 {
		t.Fatalf("only %d roots in %d cycles: the test tests nothing", len(state), cycles)
	}
}

func ack(t *testing.T, state map[string]keys.RootState, line string) {
	t.Helper()
	verb, id, _ := strings.Cut(line, " ")
	switch verb {
	case "created":
		state[id] = keys.RootEnabled
	case "disabled":
		state[id] = keys.RootDisabled
	default:
		t.Fatalf("the child says %q", line)
	}
}

// Two processes and two openings in this one change the file at once; nobody
// loses a change, and everybody sees those of the others.
func TestManyWriters(t *testing.T) {
	o, _ := withKeyfile(t)
	o.Clock = time.Now
	k1 := mustOpen(t, o)
	k2 := mustOpen(t, o)
	const each = 20
	var mu sync.Mutex
	state := map[string]keys.RootState{}
	var wg sync.WaitGroup
	for range 2 {
		cmd, lines := startChild(t, o)
		wg.Go(func() {
			for range each {
				if !lines.Scan() {
					t.Error("the child ended by itself")
					return
				}
				mu.Lock()
				ack(t, state, lines.Text())
				mu.Unlock()
			}
			cmd.Process.Kill()
			for lines.Scan() {
				mu.Lock()
				ack(t, state, lines.Text())
				mu.Unlock()
			}
			cmd.Wait()
		})
	}
	for _, k := range []*KMS{k1, k2} {
		wg.Go(func() {
			for i := range each {
				id, err := k.Create(t.Context(), uint32(i), kmstest.Request())
				if err != nil {
					t.Errorf("Create: %v", err)
					return
				}
				if _, err := k.Wrap(t.Context(), id, make([]byte, 32), keys.EncryptionContext{}); err != nil {
					t.Errorf("Wrap: %v", err)
				}
				mu.Lock()
				state[id] = keys.RootEnabled
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for _, k := range []*KMS{k1, k2, mustOpen(t, o)} {
		for id, want := range state {
			if d, err := k.Describe(t.Context(), id); err != nil || d.State != want && d.State != keys.RootDisabled {
				t.Fatalf("%s is %+v, %v; acknowledged was %d", id, d, err, want)
			}
		}
	}
	// What one opening ends is over for the other.
	for id := range state {
		w, err := k1.Wrap(t.Context(), id, make([]byte, 32), keys.EncryptionContext{})
		if err != nil {
			continue
		}
		if err := k2.Disable(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if _, err := k1.Unwrap(t.Context(), id, w, keys.EncryptionContext{}); !errors.Is(err, keys.ErrRootNotUsable) {
			t.Fatalf("disabled elsewhere: %v", err)
		}
		break
	}
}

// A caller waits for the lock as long as its context allows, and no longer.
func TestLockHeld(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	f, err := os.OpenFile(o.Path+".lock", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := k.Create(ctx, 1, kmstest.Request()); !errors.Is(err, keys.ErrKMSUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Create while another holds the lock: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Create(t.Context(), 1, kmstest.Request()); err != nil {
		t.Fatal(err)
	}
}

// What a crash left under the temporary name is removed and not taken for the file.
func TestTemporaryFileOfACrash(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	for name, leave := range map[string]func() error{
		"half a file": func() error { return os.WriteFile(tempName(o.Path), []byte(magic), 0o600) },
		"a link":      func() error { return os.Symlink(o.Path, tempName(o.Path)) },
	} {
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		id, err := k.Create(t.Context(), 1, kmstest.Request())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := k.Describe(t.Context(), id); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := os.Lstat(tempName(o.Path)); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("%s: still there", name)
		}
	}
}
