package main

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"lethe/cmd/internal/mtls"
	"lethe/sdk"
)

const (
	defaultKeyd    = "unix:lethe-dev/keyd.sock"
	defaultTimeout = 30 * time.Second
)

// app is one run of the command line.
type app struct {
	in         io.Reader
	out, err   io.Writer
	isTerminal func(any) bool
	now        func() time.Time
	files      outputs

	// Flags of every command.
	keyd    string
	tls     mtls.Files
	json    bool
	timeout time.Duration

	// began says that a command's own code runs: an error before that is one
	// of usage.
	began bool
}

func newApp(in io.Reader, out, err io.Writer) *app {
	return &app{in: in, out: out, err: err, isTerminal: isTerminal, now: time.Now}
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// run runs the command that args name and returns its exit code.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(a.in)
	help := &checkedWriter{Writer: a.out}
	root.SetOut(help)
	root.SetErr(a.err)
	cmd, err := root.ExecuteContextC(ctx)
	var usage *usageError
	switch {
	case err == nil && help.err == nil:
		return 0
	case err == nil:
		err = help.err
	case !a.began && !errors.As(err, &usage):
		err = &usageError{err.Error()}
	}
	a.json = a.json || wantsJSON(args) // parsing may have stopped before it
	if cmd.Name() == "help" {
		cmd = cmd.Root() // the help about help tells no command's name
	}
	a.fail(err, cmd.CommandPath())
	return exitOf(err).code
}

// checkedWriter keeps the first error of what cobra writes, such as help: cobra
// itself ends well whether or not it could be written.
type checkedWriter struct {
	io.Writer
	err error
}

func (w *checkedWriter) Write(p []byte) (int, error) {
	if w.err == nil {
		_, w.err = w.Writer.Write(p)
	}
	return len(p), nil
}

// wantsJSON reports whether args ask for JSON, whether or not they parse.
func wantsJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--json") || slices.Contains(args, "--json=true")
}

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "lethe",
		Short: "Seal people's data under keys that can be destroyed",
		Long: `lethe seals data under a key that belongs to one person, opens it, destroys the
key for good, and shows and verifies the evidence of that. It talks to keyd.`,
		Example: `  lethe tenant create acme
  lethe seal --tenant acme --subject-file id.txt --class trace -o trace.sealed trace.json
  lethe open --tenant acme --subject-file id.txt --class trace trace.sealed
  lethe destroy --tenant acme --subject-file id.txt --reason gdpr-art17 --receipt receipt.json
  lethe ledger key > ledger.key
  lethe receipt verify receipt.json --key-file ledger.key`,
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noSuchCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("lethe {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	keyd := os.Getenv("LETHE_KEYD")
	if keyd == "" {
		keyd = defaultKeyd
	}
	f := root.PersistentFlags()
	f.StringVar(&a.keyd, "keyd", keyd, "address of keyd: unix:PATH or HOST:PORT; the environment's LETHE_KEYD, if set")
	f.StringVar(&a.tls.CA, "tls-ca", os.Getenv("LETHE_TLS_CA"), "CA of keyd's certificate, in PEM; the environment's LETHE_TLS_CA, if set")
	f.StringVar(&a.tls.Certificate, "tls-cert", os.Getenv("LETHE_TLS_CERT"), "certificate to show to keyd, in PEM; the environment's LETHE_TLS_CERT, if set")
	f.StringVar(&a.tls.Key, "tls-key", os.Getenv("LETHE_TLS_KEY"), "its key, in PEM; the environment's LETHE_TLS_KEY, if set")
	f.BoolVar(&a.json, "json", false, "print one JSON object, and errors as JSON")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "how long to wait for keyd's answer to a call; 0: for ever")
	root.AddGroup(
		&cobra.Group{ID: "data", Title: "Data:"},
		&cobra.Group{ID: "people", Title: "People and their erasure:"},
		&cobra.Group{ID: "evidence", Title: "Evidence:"},
		&cobra.Group{ID: "setup", Title: "Setting up:"},
		&cobra.Group{ID: "operations", Title: "Running keyd:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("data", a.sealCommand(), a.openCommand(), a.inspectCommand())
	add("people", a.destroyCommand(), a.cancelCommand(), a.subjectCommand(), a.holdCommand())
	add("evidence", a.receiptCommand(), a.ledgerCommand(), a.epochCommand(), a.auditCommand())
	add("setup", a.tenantCommand(), a.classCommand(), a.statusCommand())
	add("operations", a.backupCommand(), a.restoreCommand(), a.policyCommand(), a.benchCommand())
	root.AddCommand(a.versionCommand(), exitCodesTopic())
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.Args, c.Example = helpTopic, "  lethe help receipt verify"
		}
	}
	return root
}

// helpTopic refuses help about what there is not.
func helpTopic(c *cobra.Command, args []string) error {
	if _, rest, err := c.Root().Find(args); err != nil || len(rest) > 0 {
		return usagef("no such command")
	}
	return nil
}

// command makes a command whose code has begun once do is called.
func (a *app) command(c *cobra.Command, do func(ctx context.Context, args []string) error) *cobra.Command {
	if c.Args == nil {
		c.Args = noArguments
	}
	c.DisableFlagsInUseLine = true
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkGiven(cmd.Flags()); err != nil {
			return err
		}
		if a.timeout < 0 {
			return usagef("--timeout: at least 0")
		}
		a.began = true
		return do(cmd.Context(), args)
	}
	return c
}

// pageToken is the flag whose empty value means something: the first page.
const pageToken = "page-token"

// checkGiven refuses a flag that was given an empty value, which is a variable
// of a script that was not set, and not the wish for the default.
func checkGiven(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		empty := f.Value.String() == "" && f.Name != pageToken
		if list, ok := f.Value.(pflag.SliceValue); ok {
			empty = slices.Contains(list.GetSlice(), "")
		}
		if empty && err == nil {
			err = with(usagef("--%s is given an empty value", f.Name), "field", f.Name)
		}
	})
	return err
}

// group makes a command that only holds others.
func group(c *cobra.Command, commands ...*cobra.Command) *cobra.Command {
	c.Args = noSuchCommand
	c.DisableFlagsInUseLine = true
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		var names []string
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				names = append(names, sub.Name())
			}
		}
		return usagef("which one? %s", strings.Join(names, ", "))
	}
	c.AddCommand(commands...)
	return c
}

// noSuchCommand and noArguments are cobra's own without the argument in the
// message: it may be a subject's id.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
		return usagef("no such command; perhaps %s?", strings.Join(s, " or "))
	}
	return usagef("no such command")
}

func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("takes no arguments, only flags")
	}
	return nil
}

// flagError words an error of parsing flags without the value.
func flagError(err error) error {
	var unknown *pflag.NotExistError
	var missing *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		return usagef("unknown flag --%s", unknown.GetSpecifiedName())
	case errors.As(err, &unknown):
		return usagef("unknown flag -%s", unknown.GetSpecifiedName())
	case errors.As(err, &missing):
		return usagef("--%s needs a value", missing.GetFlag().Name)
	case errors.As(err, &invalid):
		return usagef("--%s: want %s", invalid.GetFlag().Name, form(invalid.GetFlag().Value.Type()))
	}
	return usagef("the flags cannot be read")
}

// form is what a flag's value of a type looks like.
func form(kind string) string {
	switch kind {
	case "time":
		return "a time such as 2027-01-31T00:00:00Z"
	case "duration":
		return "a duration such as 90s or 24h"
	case "bool":
		return "true or false"
	case "uint32", "uint64", "int", "int64":
		return "a whole number that fits"
	}
	return "a value of another form: " + kind
}

// dial makes a client of keyd.
func (a *app) dial(ctx context.Context) (*sdk.Client, error) {
	if !a.tls.Given() {
		return sdk.Dial(ctx, a.keyd)
	}
	config, err := a.tls.Config()
	if err != nil {
		return nil, usagef("--tls-ca, --tls-cert, --tls-key: %v", err)
	}
	return sdk.Dial(ctx, a.keyd, sdk.WithTLS(config))
}

// call returns a context for one call to keyd.
func (a *app) call(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.timeout)
}

// start returns a context for something that begins with a call and then
// goes on for as long as it takes: it ends early only if begun is not called
// in time.
func (a *app) start(ctx context.Context) (_ context.Context, begun func(), cancel context.CancelFunc) {
	ctx, cancel = context.WithCancel(ctx)
	if a.timeout <= 0 {
		return ctx, func() {}, cancel
	}
	timer := time.AfterFunc(a.timeout, cancel)
	return ctx, func() { timer.Stop() }, cancel
}
