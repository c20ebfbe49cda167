//go:build !linux

package main

import (
	"errors"
	"io/fs"
	"os"
)

func openUnnamed(string, fs.FileMode) (*os.File, error) { return nil, errors.ErrUnsupported }

func nameFile(*os.File, string) error { return errors.ErrUnsupported }
