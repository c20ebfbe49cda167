package keys_test

import (
	"fmt"
	"os"
	"testing"

	"lethe/keyd/internal/keys"
)

// TestMain looks, after all tests, whether any of them changed what was shared.
func TestMain(m *testing.M) {
	code := m.Run()
	if err := keys.CheckShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}
