// Command e2e runs the real binaries against each other. "e2e demo" tells the
// story of one erasure and checks every claim that it makes; "e2e drill" is the
// restore drill; the package's tests go further.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

const usage = `usage:
  e2e demo --bin DIR    seal, open, destroy and prove, with DIR/keyd and DIR/lethe
  e2e drill --bin DIR   the restore drill, on a scratch deployment: whoever is
                        destroyed stays so after each way of restoring
  e2e client TARGET     a client of the keyd at TARGET that obeys the lines of
                        JSON on its standard input; the demo starts these
`

var errUsage = errors.New("no such command")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		if errors.Is(err, errUsage) {
			fmt.Fprint(os.Stderr, usage)
		}
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return errUsage
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	bin := flags.String("bin", "bin", "directory of keyd and lethe")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	switch {
	case args[0] == "demo" && flags.NArg() == 0:
		return demo(ctx, *bin, out)
	case args[0] == "drill" && flags.NArg() == 0:
		return drill(ctx, *bin, out)
	case args[0] == "client" && flags.NArg() == 1:
		return serveClient(ctx, flags.Arg(0), in, out)
	}
	return errUsage
}
