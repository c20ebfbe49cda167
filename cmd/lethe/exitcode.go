package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// exit is one way in which the command line ends.
type exit struct {
	code int
	// name is what --json calls it: the outcome's name on the wire where it
	// has one.
	name    string
	outcome keydv1.Outcome // unspecified: not keyd's or the SDK's
	means   string
}

// exits is the one table of exit codes. Codes are never given a new meaning.
var exits = []exit{
	{code: 0, name: "OK", means: "it was done"},
	{code: exitOther, name: "OTHER", means: "anything that no other line names, such as a file that cannot be written"},
	{code: exitInvalid, name: "INVALID_ARGUMENT", outcome: keydv1.Outcome_OUTCOME_INVALID_ARGUMENT, means: "the command, a flag or the request is wrong"},
	{code: 10, name: "ERASED", outcome: keydv1.Outcome_OUTCOME_ERASED, means: "the key was destroyed; final"},
	{code: 11, name: "PENDING_ERASURE", outcome: keydv1.Outcome_OUTCOME_PENDING_ERASURE, means: "a destruction is scheduled, and opens are refused already"},
	{code: 12, name: "EXPIRED", outcome: keydv1.Outcome_OUTCOME_EXPIRED, means: "the class's retention has ended; final"},
	{code: 13, name: "HELD", outcome: keydv1.Outcome_OUTCOME_HELD, means: "a legal hold forbids the destruction"},
	{code: 14, name: "UNKNOWN", outcome: keydv1.Outcome_OUTCOME_UNKNOWN, means: "keyd has never heard of it; no proof of erasure"},
	{code: 15, name: "DENIED", outcome: keydv1.Outcome_OUTCOME_DENIED, means: "the caller may not do this"},
	{code: exitUnavailable, name: "UNAVAILABLE", outcome: keydv1.Outcome_OUTCOME_UNAVAILABLE, means: "keyd, its store, KMS or anchor does not answer now; try again"},
	{code: 17, name: "EXHAUSTED", outcome: keydv1.Outcome_OUTCOME_EXHAUSTED, means: "a quota, a size or a rate is exceeded"},
	{code: 18, name: "CONFLICT", outcome: keydv1.Outcome_OUTCOME_CONFLICT, means: "something changed meanwhile, or a request id or name is taken"},
	{code: 19, name: "WRONG_SUBJECT", outcome: keydv1.Outcome_OUTCOME_WRONG_SUBJECT, means: "the blob belongs to somebody else"},
	{code: 20, name: "NOT_SEALED", outcome: keydv1.Outcome_OUTCOME_NOT_SEALED, means: "the input is not a blob"},
	{code: 21, name: "CORRUPT", outcome: keydv1.Outcome_OUTCOME_CORRUPT, means: "the blob was changed, or is malformed"},
	{code: 22, name: "TRUNCATED", outcome: keydv1.Outcome_OUTCOME_TRUNCATED, means: "the blob ends too early"},
	{code: 23, name: "WRONG_CONTEXT", outcome: keydv1.Outcome_OUTCOME_WRONG_CONTEXT, means: "the blob was sealed with another bound context"},
	{code: 24, name: "UNSUPPORTED_VERSION", outcome: keydv1.Outcome_OUTCOME_UNSUPPORTED_VERSION, means: "the blob's version is not known here"},
	{code: exitBadEvidence, name: "INVALID_EVIDENCE", means: "a receipt or a checkpoint does not verify against the pinned keys"},
	{code: exitResidue, name: "RESIDUE", means: "a key store's files hold wrapped keys of the destroyed"},
	{code: exitOtherReceipt, name: "OTHER_RECEIPT", means: "a receipt verifies, and is not about what was expected, or does not say the stage"},
	{code: 129, name: "INTERRUPTED", means: "stopped by SIGHUP"},
	{code: 130, name: "INTERRUPTED", means: "stopped by SIGINT"},
	{code: 131, name: "INTERRUPTED", means: "stopped by SIGQUIT"},
	{code: exitBrokenPipe, name: "BROKEN_PIPE", means: "whoever read the output went away"},
	{code: 143, name: "INTERRUPTED", means: "stopped by SIGTERM"},
}

const (
	exitOther       = 1
	exitInvalid     = 2
	exitUnavailable = 16
	exitBadEvidence = 30
	exitResidue     = 31
	// exitOtherReceipt is of an otherReceiptError and a stageError.
	exitOtherReceipt = 32
	// A signal's exit code is this and its number.
	exitSignal     = 128
	exitBrokenPipe = exitSignal + 13
)

// usageError is a command line that asks for nothing that can be done. It
// holds no value that was given, which may be a subject's id.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// evidenceError is evidence that does not verify.
type evidenceError struct{ cause error }

func (e *evidenceError) Error() string { return "does not verify: " + e.cause.Error() }
func (e *evidenceError) Unwrap() error { return e.cause }

// exitOf returns the line of the table that err belongs to.
func exitOf(err error) exit {
	var usage *usageError
	var evidence *evidenceError
	var residue *residueError
	var other *otherReceiptError
	var stage *stageError
	switch {
	case err == nil:
		return exitWithCode(0)
	case errors.As(err, &usage):
		return exitWithCode(exitInvalid)
	case errors.As(err, &evidence):
		return exitWithCode(exitBadEvidence)
	case errors.As(err, &residue):
		return exitWithCode(exitResidue)
	case errors.As(err, &other), errors.As(err, &stage):
		return exitWithCode(exitOtherReceipt)
	case errors.Is(err, syscall.EPIPE):
		return exitWithCode(exitBrokenPipe)
	}
	outcome := sdk.OutcomeOf(err)
	if errors.Is(err, envelope.ErrTooLarge) {
		outcome = keydv1.Outcome_OUTCOME_EXHAUSTED
	}
	for _, e := range exits {
		if e.outcome == outcome && outcome != keydv1.Outcome_OUTCOME_UNSPECIFIED {
			return e
		}
	}
	return exitWithCode(exitOther)
}

func exitWithCode(code int) exit {
	for _, e := range exits {
		if e.code == code {
			return e
		}
	}
	return exit{code: code, name: "OTHER"}
}

// exitCodesTopic is `lethe help exit-codes`.
func exitCodesTopic() *cobra.Command {
	var b strings.Builder
	b.WriteString("Exit codes tell the outcomes apart. With --json the error on standard error has\nthe name below as \"outcome\".\n\n")
	writeExitCodes(&b)
	b.WriteString("\nUnknown and unavailable never mean erased. What ends with UNAVAILABLE may have\nbeen done: repeat a destroy with the same --request-id.")
	return &cobra.Command{Use: "exit-codes", Short: "What each exit code means", Long: b.String()}
}

func writeExitCodes(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, e := range exits {
		fmt.Fprintf(t, "  %d\t%s\t%s\n", e.code, e.name, e.means)
	}
	t.Flush()
}
