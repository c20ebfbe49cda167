//go:build pkcs11

package pkcs11

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
)

const maxPIN = 256

// readPIN returns the first line of a regular file that only this user reads.
func readPIN(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("PKCS#11: PIN: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("PKCS#11: PIN: %w", err)
	}
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("PKCS#11: PIN: %w: %s must be a regular file of mode 0600 or less", ErrUnsafe, path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxPIN+2))
	defer clear(text)
	if err != nil {
		return "", fmt.Errorf("PKCS#11: PIN: %w", err)
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	if len(line) == 0 || len(line) > maxPIN {
		return "", errors.New("PKCS#11: the PIN file's first line must have 1 to 256 bytes")
	}
	return string(line), nil
}
