// Package storetest holds what every keys.Store must pass.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"lethe/keyd/internal/keys"
)

// Limits of a row that every store takes, in bytes.
const (
	MaxKey   = 256
	MaxValue = 1<<20 - 1<<10
)

// Harness is one store, empty at first, and what can be done to it from
// outside. Functions that do not apply to a backend are nil, and the tests that
// need them do not run; Run logs which.
type Harness struct {
	Store keys.Store
	// Reopen closes the store and opens it again.
	Reopen func(t *testing.T) keys.Store
	// Crash opens a store on what a loss of power at this instant would leave,
	// beside Store, which goes on.
	Crash func(t *testing.T) keys.Store
	// Restore opens a new store that holds what Backup wrote.
	Restore func(t *testing.T, backup io.Reader) keys.Store
	// Bytes reports whether b occurs in the store's files. Blocks that no file
	// uses do not count.
	Bytes func(t *testing.T, b []byte) bool
}

// Run runs the suite. open makes an empty store for one test and has it closed
// when the test ends.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	tests := []struct {
		name string
		run  func(*testing.T, Harness)
	}{
		{"Transactions/Histories are strictly serializable", strictlySerializable},
		{"Transactions/Transfers keep the sum", transfersKeepTheSum},
		{"Transactions/No write skew on point reads", noWriteSkew},
		{"Transactions/Create if absent has one winner", oneWinner},
		{"Transactions/Counter loses no increment", counter},
		{"Transactions/An absent row conflicts too", absentRowConflicts},
		{"Transactions/Own writes are read", readYourWrites},
		{"Transactions/A failed one leaves nothing", failedLeavesNothing},
		{"Transactions/An unheeded refusal fails the update", unheededRefusal},
		{"Transactions/A panic harms nobody else", panicHarmsNobody},
		{"Transactions/A goroutine exit harms nobody else", exitHarmsNobody},
		{"Transactions/A cancelled one ends", cancelled},
		{"Transactions/No run after return", noRunAfterReturn},
		{"Views/See what was acknowledged before", viewSeesAcknowledged},
		{"Views/Are stable", viewIsStable},
		{"Views/Return their error", viewReturnsError},
		{"Views/Do not wait for updates", viewGoesOn},
		{"Views/End with their function", readerEnds},
		{"Rows/Limits", limits},
		{"Rows/Any bytes", anyBytes},
		{"Rows/Belong to the caller", rowsBelongToCaller},
		{"Rows/Too large a transaction", tooLarge},
		{"Scans/Order, prefix and resumption", scanOrder},
		{"Scans/A hundred thousand rows", scanMany},
		{"Scans/Merge own writes", scanMerges},
		{"Ranges/Dropped exactly", dropExactly},
		{"Ranges/Dropped beside traffic", dropBesideTraffic},
		{"Ranges/Dropped for good", dropForGood},
		{"Ranges/Bytes are gone", dropBytes},
		{"Durability/Reopened", reopened},
		{"Durability/Acknowledged before a crash", crashed},
		{"Durability/Backup is one instant", backup},
		{"Durability/Backup ends with its context", backupCancelled},
		{"Closing/Waits, then refuses", closing},
		{"Closing/Check", check},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, open(t)) })
	}
}

// applies reports whether the harness can do what a test needs.
func applies(t *testing.T, can bool, what string) bool {
	if !can {
		t.Logf("not run: the harness has no %s", what)
	}
	return can
}

// update retries while the store says that nothing was written.
func update(ctx context.Context, s keys.Store, fn func(keys.Tx) error) error {
	for {
		if err := s.Update(ctx, fn); !errors.Is(err, keys.ErrConflict) {
			return err
		}
	}
}

func mustUpdate(t *testing.T, s keys.Store, fn func(keys.Tx) error) {
	t.Helper()
	if err := update(t.Context(), s, fn); err != nil {
		t.Fatalf("Update: %v", err)
	}
}

func put(t *testing.T, s keys.Store, pairs ...string) {
	t.Helper()
	mustUpdate(t, s, func(tx keys.Tx) error {
		for i := 0; i < len(pairs); i += 2 {
			if err := tx.Put([]byte(pairs[i]), []byte(pairs[i+1])); err != nil {
				return err
			}
		}
		return nil
	})
}

func view(t *testing.T, s keys.Store, fn func(keys.Reader) error) {
	t.Helper()
	if err := s.View(context.WithoutCancel(t.Context()), fn); err != nil {
		t.Fatalf("View: %v", err)
	}
}

// wantRow checks a row's value; absent is for none.
const absent = "\x00absent"

func wantRow(t *testing.T, s keys.Store, key, want string) {
	t.Helper()
	view(t, s, func(r keys.Reader) error { wantGet(t, r, key, want); return nil })
}

func wantGet(t *testing.T, r keys.Reader, key, want string) {
	t.Helper()
	got, err := r.Get([]byte(key))
	switch {
	case want == absent && errors.Is(err, keys.ErrNotFound):
	case want == absent:
		t.Errorf("Get(%.20q) = %.20q, %v, want ErrNotFound", key, got, err)
	case err != nil || string(got) != want:
		t.Errorf("Get(%.20q) = %.20q, %v, want %.20q", key, got, err, want)
	}
}

func keysUnder(t *testing.T, r keys.Reader, prefix, after []byte) (found []string) {
	t.Helper()
	err := r.Scan(prefix, after, func(k, _ []byte) bool { found = append(found, string(k)); return true })
	if err != nil {
		t.Errorf("Scan(%q): %v", prefix, err)
	}
	return found
}

// fill puts n rows "<prefix><8 digits>" of value in transactions of 500.
func fill(t *testing.T, s keys.Store, prefix string, n int, value []byte) {
	t.Helper()
	for i := 0; i < n; {
		from := i
		mustUpdate(t, s, func(tx keys.Tx) error {
			for i = from; i < min(n, from+500); i++ {
				if err := tx.Put(fmt.Appendf(nil, "%s%08d", prefix, i), bytes.Clone(value)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}
