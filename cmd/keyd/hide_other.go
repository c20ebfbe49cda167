//go:build !linux

package main

import "errors"

func hideMemory() error { return errors.New("not offered on this system") }
