package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// exitOnSignal ends the process at the first SIGINT, SIGTERM, SIGHUP or SIGQUIT,
// and leaves no incomplete file. It does not wait for the command, which may be
// stuck in reading from a pipe or writing to one.
//
// A reader of the output that goes away is an error like others, not a signal:
// what the command has begun is then undone in the ordinary way.
func (a *app) exitOnSignal(inJSON bool) {
	signal.Ignore(syscall.SIGPIPE)
	signals := make(chan os.Signal, 1)
	for _, s := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		if !signal.Ignored(s) { // as SIGHUP is under nohup
			signal.Notify(signals, s)
		}
	}
	go func() {
		s := <-signals
		a.files.abandon()
		e := exitWithCode(exitSignal + int(s.(syscall.Signal)))
		if inJSON {
			_ = encodeJSON(a.err, failure{failureBody{e.name, e.code, e.means, map[string]string{}}})
		} else {
			fmt.Fprintln(a.err, "\nlethe: "+e.means)
		}
		os.Exit(e.code)
	}()
}
