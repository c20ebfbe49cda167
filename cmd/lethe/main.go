// Command lethe is the command line of Lethe: it seals and opens, destroys
// keys, and shows and verifies the evidence.
package main

import (
	"context"
	"os"
)

// version is set when a release is built.
var version = "0.1.0-dev"

func main() {
	forbidCoreDumps()
	a := newApp(os.Stdin, os.Stdout, os.Stderr)
	a.exitOnSignal(wantsJSON(os.Args[1:]))
	os.Exit(a.run(context.Background(), os.Args[1:]))
}
