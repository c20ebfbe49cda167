package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lethe/sdk"
	"lethe/sdk/receipt"
)

// TestGuaranteeDurableAcrossLossOfPower runs keyd under a tracer that knows
// what a loss of power would leave at each instant (only what was synced, under
// names that were synced), and starts keyd from what it would have left at each
// acknowledgement and between syncs. Whatever had been acknowledged by then
// must be there. Every sync is held back for a moment, so that an
// acknowledgement which does not wait for its sync overtakes it. G1, G2.
func TestGuaranteeDurableAcrossLossOfPower(t *testing.T) {
	r := &powerRun{t: t, dir: tempDir(t)}
	var err error
	root := filepath.Join(r.dir, "disk")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	if r.tracer.disk, err = newDisk(root); err != nil {
		t.Fatal(err)
	}
	r.root = must(inodeOf(unix.AT_FDCWD, root))
	r.tracer.onSync = func() { r.cut(false) }

	r.start(root)
	r.client = r.dial()
	r.acknowledge("tenant", r.createTenant)
	for i := range 4 {
		r.acknowledge("seal", r.seal(i))
	}
	r.acknowledge("destroy", r.destroy(1))
	r.acknowledge("destroy of a subject never seen", r.destroy(100))
	r.stop() // with all that a clean stop writes
	r.client.Close()
	r.start(root)
	r.client = r.dial()
	for i := 4; i < 6; i++ {
		r.acknowledge("seal", r.seal(i))
	}
	r.acknowledge("destroy", r.destroy(4))
	r.acknowledge("destroy", r.destroy(0))
	r.tracer.kill()
	if r.tracer.err != nil {
		t.Fatal(r.tracer.err)
	}
	r.client.Close()

	acks, syncs := 0, 0
	for i, c := range r.cuts {
		if c.ack {
			acks++
		} else {
			syncs++
			// Of the syncs, a sample that moves with the run.
			if i%3 != os.Getpid()%3 {
				continue
			}
		}
		r.replay(i, c)
	}
	t.Logf("%d acknowledgements and %d syncs; %d starts from what a loss of power left", acks, syncs, r.replays)
	if acks != len(r.acks) || syncs < 3*acks {
		t.Error("too few syncs were seen to show anything")
	}
}

// powerRun is a run under the tracer.
type powerRun struct {
	t       *testing.T
	dir     string
	root    inode
	tracer  tracer
	client  *sdk.Client
	lives   map[int]*life
	acks    []ack
	cuts    []cut
	replays int
}

// ack is what was acknowledged.
type ack struct {
	what string
	check
}

// check is how to check that what was acknowledged holds.
type check struct {
	holds func(context.Context, *sdk.Client, *receipt.Keys) error
	// entries is how many entries of the ledger the anchor must hold.
	entries uint64
}

// cut is what a loss of power would leave.
type cut struct {
	left  durable
	acked int  // acknowledgements before it
	ack   bool // taken at one
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (r *powerRun) socket() string { return filepath.Join(r.dir, "keyd.sock") }

func (r *powerRun) start(root string) {
	r.t.Helper()
	stderr, err := os.Create(filepath.Join(r.dir, "stderr"))
	if err != nil {
		r.t.Fatal(err)
	}
	defer stderr.Close()
	err = r.tracer.start(stderr, filepath.Join(bin, "keyd"), "--dev",
		"--data", filepath.Join(root, "keyd"), "--listen", "unix:"+r.socket())
	if errors.Is(err, unix.EPERM) {
		lacking(r.t, "permission to trace a process (ptrace)")
	} else if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(r.tracer.kill)
	// keyd hides itself: a tracer of the same user sees its calls, not its files.
	k := &keydProcess{address: "unix://" + r.socket(), stderr: stderr.Name(), exited: r.tracer.exited}
	if err := k.waitServing(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	if _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.tracer.process.Pid)); errors.Is(err, fs.ErrPermission) {
		lacking(r.t, "permission to look at a traced process's files (root)")
	}
}

func (r *powerRun) stop() {
	r.t.Helper()
	unix.Kill(r.tracer.process.Pid, unix.SIGTERM)
	select {
	case <-r.tracer.exited:
	case <-time.After(30 * time.Second):
		r.t.Fatal("keyd does not stop")
	}
}

func (r *powerRun) dial() *sdk.Client {
	c, err := sdk.Dial(r.t.Context(), "unix://"+r.socket())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// cut notes what a loss of power now would leave. disk.mu is held.
func (r *powerRun) cut(isAck bool) {
	r.cuts = append(r.cuts, cut{left: r.tracer.disk.clone(), acked: len(r.acks), ack: isAck})
}

// acknowledge makes a call, and has the power cut at its acknowledgement.
func (r *powerRun) acknowledge(what string, call func() check) {
	r.t.Helper()
	made := call()
	r.tracer.disk.mu.Lock()
	defer r.tracer.disk.mu.Unlock()
	r.acks = append(r.acks, ack{what, made})
	r.cut(true)
}

func (r *powerRun) createTenant() check {
	d := &deployment{t: r.t, keyd: &keydProcess{address: "unix://" + r.socket()}}
	d.tenant("acme", time.Minute)
	return check{holds: func(ctx context.Context, c *sdk.Client, _ *receipt.Keys) error {
		_, err := c.Describe(ctx, "acme", "anybody")
		return err
	}}
}

func (r *powerRun) life(i int) *life {
	if r.lives == nil {
		r.lives = make(map[int]*life)
	}
	if r.lives[i] == nil {
		r.lives[i] = &life{subject: fmt.Sprint("subject ", i), plain: random(100)}
	}
	return r.lives[i]
}

func (r *powerRun) seal(i int) func() check {
	l := r.life(i)
	return func() check {
		blob, err := r.client.Seal(bounded(r.t, 20*time.Second), of("acme", l.subject), l.plain)
		if err != nil {
			r.t.Fatal(err)
		}
		l.blob = blob
		return check{holds: func(ctx context.Context, c *sdk.Client, _ *receipt.Keys) error {
			plain, err := c.Open(ctx, of("acme", l.subject), blob)
			if l.asked && errors.Is(err, sdk.ErrErased) {
				return nil // destroyed, later or by the time of the cut
			}
			if err == nil && !bytes.Equal(plain, l.plain) {
				return errors.New("it opens to something else")
			}
			return err
		}}
	}
}

func (r *powerRun) destroy(i int) func() check {
	l := r.life(i)
	return func() check {
		l.asked = true
		done, err := r.client.DestroyKey(bounded(r.t, 20*time.Second), l.request())
		if err != nil {
			r.t.Fatal(err)
		}
		return check{entries: done.LedgerIndex + 1, holds: func(ctx context.Context, c *sdk.Client, pinned *receipt.Keys) error {
			if l.blob != nil {
				if _, err := c.Open(ctx, of("acme", l.subject), l.blob); !errors.Is(err, sdk.ErrErased) {
					return fmt.Errorf("open: %w", err)
				}
			}
			if _, err := c.Seal(ctx, of("acme", l.subject), l.plain); !errors.Is(err, sdk.ErrErased) {
				return fmt.Errorf("seal: %w", err)
			}
			again, err := c.DestroyKey(ctx, l.request())
			if err != nil {
				return err
			}
			if !bytes.Equal(again.Receipt, done.Receipt) {
				return errors.New("the repeated request has another receipt")
			}
			_, err = receipt.Verify(done.Receipt, pinned)
			return err
		}}
	}
}

// replay starts keyd from what a cut left, and checks what was acknowledged.
func (r *powerRun) replay(i int, c cut) {
	r.t.Helper()
	r.replays++
	dir := filepath.Join(r.dir, fmt.Sprint("cut", i))
	if err := os.Mkdir(dir, 0o700); err != nil {
		r.t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := c.left.restore(r.root, dir); err != nil {
		r.t.Fatal(err)
	}
	left := listing(dir)
	defer func() {
		if r.t.Failed() {
			r.t.Fatalf("what it left:\n%s", left)
		}
	}()
	d := &deployment{t: r.t, dir: dir, data: filepath.Join(dir, "keyd")}
	when := fmt.Sprintf("cut %d, after %d acknowledgements", i, c.acked)
	anchored := anchoredEntries(r.t, d.data)
	for n, a := range r.acks[:c.acked] {
		if a.entries > anchored {
			r.t.Errorf("%s: the acknowledged %s (%d) is not in the anchor, which holds %d entries and not %d", when, a.what, n, anchored, a.entries)
		}
	}
	k, err := startKeyd(r.t.Context(), filepath.Join(bin, "keyd"), d.data)
	if err != nil {
		r.t.Errorf("%s: %v", when, err)
		return
	}
	d.keyd = k
	defer k.kill()
	if c.acked == 0 {
		return
	}
	client := d.client()
	defer client.Close()
	pinned := d.pinned()
	for n, a := range r.acks[:c.acked] {
		if err := a.holds(bounded(r.t, 20*time.Second), client, pinned); err != nil {
			r.t.Errorf("%s: the acknowledged %s (%d) is lost: %v", when, a.what, n, err)
		}
	}
}

// listing lists the files below dir with their sizes.
func listing(dir string) string {
	var b strings.Builder
	filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if fi, err := e.Info(); err == nil {
			fmt.Fprintf(&b, "%s %10d %s\n", fi.Mode(), fi.Size(), strings.TrimPrefix(path, dir))
		}
		return nil
	})
	return b.String()
}

// anchoredEntries is how many entries the anchor holds, by its newest object,
// whose path spells the number.
func anchoredEntries(t testing.TB, data string) uint64 {
	objects, err := filepath.Glob(filepath.Join(data, "anchor/objects/*/*/*/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(objects) == 0 {
		return 0
	}
	digits := strings.NewReplacer("x", "", "/", "").Replace(strings.TrimPrefix(objects[len(objects)-1], filepath.Join(data, "anchor/objects")))
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
