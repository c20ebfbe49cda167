package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"lethe/sdk"
)

// act is a part of the demo: it fails when one of its claims does not hold.
// What it starts, it hands to the stage's cleanUp.
type act struct {
	title string
	play  func(context.Context, *stage) error
}

// acts are played in this order; each builds on what the ones before left on
// the stage.
var acts = []act{
	{"A key daemon and two tenants", raise},
	{"Three real inputs, sealed record by record for the people they belong to", seal},
	{"Everything opens again", openAll},
	{"Other processes hold live leases", leaseElsewhere},
	{"One person is erased", destroy},
	{"Her data no longer opens where the revocation was pushed", pushed},
	{"Nor where the push was cut off, after the lease", unpushed},
	{"Nor in a fresh client, nor for a new seal; everybody else's opens", fresh},
	{"Nor after keyd is killed and started again", restart},
	{"A memory blended from three people outlives two of them, and no more", blend},
	{"An erasure that a legal hold forbids waits, and goes on by itself", holdErasure},
	{"The receipt verifies offline, and not once a bit of it is changed", proof},
	{"A backup is restored, and brings nobody back", restore},
	{"The epoch is turned, and its root dies", turn},
	{"Now the backup opens nothing, whoever has it and the KMS; the receipt is final", final},
}

// stage is what the acts share.
type stage struct {
	*story
	bin, dir string

	keyd   *keydProcess
	app    *sdk.Client // the application that seals and opens
	inputs []*input
	gone   map[string]bool // who is erased: tenant/subject

	listening *clientProcess // a client that revocations reach
	witness   *relay         // before it: sees that they do
	deaf      *clientProcess // a client that they do not reach
	relay     *relay         // before it: swallows them
	severed   *clientProcess // a client that nothing reaches

	pushedAnswer chan watched
	destroyed    time.Time // when the destruction was acknowledged
	drainedBy    time.Time
	receipt      string // file
	verifierKey  string // file

	old     string       // directory: the store and the anchor, as old as the backup
	backup  string       // file
	next    sealedRecord // of the person who is erased after the backup
	deadKey string       // key id of that person's

	// Of the restore drill.
	people     []*drillPerson
	checkpoint string // file, after the destructions

	cleanUps []func()
}

// cleanUp has fn called at the end, last come first served.
func (s *stage) cleanUp(fn func()) { s.cleanUps = append(s.cleanUps, fn) }

// sealedRecord is a record and the input that it is from.
type sealedRecord struct {
	in *input
	p  *piece
}

// demo tells the story of an erasure.
func demo(ctx context.Context, bin string, out io.Writer) error {
	return perform(ctx, acts, bin, "lethe-demo-", out)
}

// perform plays all acts in a temporary directory, and fails with the first of
// them that fails.
func perform(ctx context.Context, acts []act, bin, tempName string, out io.Writer) (err error) {
	bin, err = filepath.Abs(bin)
	if err != nil {
		return err
	}
	for _, name := range []string{"keyd", "lethe"} {
		if _, err := exec.LookPath(filepath.Join(bin, name)); err != nil {
			return fmt.Errorf("%w (build it first)", err)
		}
	}
	dir, err := os.MkdirTemp("", tempName)
	if err != nil {
		return err
	}
	s := &stage{story: newStory(out), bin: bin, dir: dir, gone: make(map[string]bool)}
	s.cleanUp(func() { err = errors.Join(err, os.RemoveAll(dir)) })
	defer func() {
		for i := len(s.cleanUps) - 1; i >= 0; i-- {
			s.cleanUps[i]()
		}
	}()
	for i, a := range acts {
		s.act(i+1, a.title)
		if err := a.play(ctx, s); err != nil {
			if ctx.Err() != nil {
				return errors.New("interrupted; everything that was started has been stopped and removed")
			}
			return fmt.Errorf("act %d: %w", i+1, err)
		}
	}
	s.print("\nEvery claim held. It took %s.\n", brief(time.Since(s.begun)))
	return s.err
}

// lethe runs the command line, as an operator would, and returns what it
// printed and its exit code.
func (s *stage) lethe(ctx context.Context, stdin []byte, args ...string) (stdout []byte, code int, err error) {
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "lethe"), args...)
	cmd.Env = append(os.Environ(), "LETHE_KEYD="+s.keyd.target())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stdin = bytes.NewReader(stdin)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return out.Bytes(), exit.ExitCode(), fmt.Errorf("lethe %s: exit code %d: %s", args[0], exit.ExitCode(), bytes.TrimSpace(said.Bytes()))
	}
	return out.Bytes(), 0, err
}
