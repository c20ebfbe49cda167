//go:build !linux

package main

import "errors"

// connections is how many are served at a time: the rest wait.
func connections() int { return 256 }

func hideMemory() error { return errors.New("not offered on this system") }
