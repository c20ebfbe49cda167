// Command bench measures Lethe against the limit of the hardware and beside
// its peers, and writes a report. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"lethe/bench/measure"
	"lethe/bench/report"
)

func main() {
	if len(os.Args) > 1 {
		if role, ok := roles[os.Args[1]]; ok {
			exit(role(os.Args[2:]))
		}
	}
	var (
		name = flag.String("profile", "quick", "quick, full or scale")
		out  = flag.String("o", "", "directory for the report; empty: the working directory's out")
		dir  = flag.String("dir", "", "directory for the key stores, on the disk to be measured; empty: the system's temporary one")
		only = flag.String("only", "", "comma-separated names of sections to run; empty: those of the profile")
		keep = flag.Bool("keep", false, "work in -dir itself, keep the stores filled for numbers of subjects there, and use those that an earlier run kept")
		subj = flag.Int("subjects", 0, "number of subjects of the scale profile; 0: the profile's")
	)
	flag.Parse()
	exit(run(*name, *out, *dir, *only, *subj, *keep))
}

// roles are what this program is started as by itself, to be measured as a
// process of its own.
var roles = map[string]func(args []string) error{
	"serve-empty": serveEmpty,
	"serve-least": serveLeast,
	"pipe-seal":   pipeSeal,
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// bench is one run.
type bench struct {
	context.Context
	profile
	dir    string // of the run; removed at its end
	bin    string // where the product's programs are
	report *report.Report
}

// section is one subject of measurement. It adds its targets itself.
type section struct {
	name string
	run  func(*bench) (*report.Section, error)
}

var sections = []section{
	{"oneshot", (*bench).oneShot},
	{"streams", (*bench).streams},
	{"calls", (*bench).calls},
	{"durable", (*bench).durable},
	{"latency", (*bench).latency},
	{"growth", (*bench).growth},
	{"scale", (*bench).scale},
}

func run(name, out, dir, only string, subjects int, keep bool) error {
	p, ok := profiles[name]
	if !ok {
		return fmt.Errorf("there is no profile %q", name)
	}
	p.name = name
	if subjects > 0 {
		p.scaleSubjects = []int{min(10_000, subjects), subjects}
	}
	wanted := p.sections
	if only != "" {
		wanted = strings.Split(only, ",")
	}
	for _, w := range wanted {
		if !slices.ContainsFunc(sections, func(s section) bool { return s.name == w }) {
			return fmt.Errorf("there is no section %q", w)
		}
	}
	if out == "" {
		out = "out"
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	tmp := dir
	if !keep {
		var err error
		if tmp, err = os.MkdirTemp(dir, "lethe-bench-"); err != nil {
			return err
		}
		defer os.RemoveAll(tmp)
	} else if dir == "" {
		return errors.New("-keep needs a -dir")
	}
	b := &bench{Context: ctx, profile: p, dir: tmp, bin: filepath.Join(tmp, "bin")}
	b.report = &report.Report{Profile: name, Begun: time.Now(), Machine: measure.ThisMachine(), Modules: modules()}
	b.report.Commit, b.report.Modified = commit(ctx)
	if err := b.build(); err != nil {
		return err
	}
	for _, s := range sections {
		if !slices.Contains(wanted, s.name) {
			continue
		}
		begun := time.Now()
		section, err := s.run(b)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		section.Name = s.name
		b.report.Sections = append(b.report.Sections, section)
		fmt.Fprintf(os.Stderr, "%-8s %5.1f s\n", s.name, time.Since(begun).Seconds())
	}
	b.report.Seconds = time.Since(b.report.Begun).Seconds()
	b.report.LoadEnd = measure.Load()
	file := b.report.Begun.UTC().Format("2006-01-02") + "-" + b.report.Commit
	if name != "full" {
		file += "-" + name
	}
	if err := b.report.Write(out, file); err != nil {
		return err
	}
	fmt.Println(filepath.Join(out, file+".md"))
	return nil
}

// build makes the product's programs, with the versions of its own go.mod.
func (b *bench) build() error {
	cmd := exec.CommandContext(b, "go", "build", "-o", b.bin+string(filepath.Separator), "./cmd/keyd", "./cmd/lethe")
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building keyd and lethe: %w\n%s", err, out)
	}
	return nil
}

// commit tells what is measured: the commit, and whether the tree differs from
// it. What lies under bench/results is no part of what is measured.
func commit(ctx context.Context) (short string, modified bool) {
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "git", args...).Output()
		return strings.TrimSpace(string(out)), err
	}
	short, err := git("rev-parse", "--short=10", "HEAD")
	if err != nil {
		return "unknown", true
	}
	changes, err := git("status", "--porcelain", "--", "..", ":!results")
	return short, err != nil || changes != ""
}

// modules tells the versions of what is measured.
func modules() map[string]string {
	m := make(map[string]string)
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return m
	}
	for _, d := range info.Deps {
		switch d.Path {
		case "github.com/tink-crypto/tink-go/v2", "filippo.io/age", "github.com/dgraph-io/badger/v4", "google.golang.org/grpc",
			"github.com/aws/aws-encryption-sdk/releases/go/encryption-sdk", "github.com/godaddy/asherah/go/appencryption":
			m[d.Path] = d.Version
		}
	}
	return m
}

// target records what was aimed at.
func (b *bench) target(t report.Target) { b.report.Targets = append(b.report.Targets, t) }
