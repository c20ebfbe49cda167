//go:build !unix

package file

import (
	"errors"
	"os"
)

func lockDir(string) (*os.File, error) {
	return nil, errors.New("an anchor for one process alone is not offered on this system")
}
