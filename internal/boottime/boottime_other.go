//go:build !linux && !darwin

// Package boottime stands in for a clock that this system does not have.
package boottime

import "time"

// Read returns mono: there is no better clock.
func Read(mono time.Duration) time.Duration { return mono }
