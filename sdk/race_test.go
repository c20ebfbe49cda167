//go:build race

package sdk_test

// raceDetector: sync.Pool forgets at random while the race detector runs, so
// what depends on it allocates.
const raceDetector = true
