//go:build !linux && !darwin

package sdk

import "time"

func bootTime(mono time.Duration) time.Duration { return mono }
