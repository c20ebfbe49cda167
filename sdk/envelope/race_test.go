//go:build race

package envelope

// raceEnabled: the race detector makes sync.Pool forget things, on purpose.
const raceEnabled = true
