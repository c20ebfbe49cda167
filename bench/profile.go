package main

import "time"

// profile is how much is measured. Under any of them what is compared is
// compared in the same way, with more or fewer rounds.
type profile struct {
	name     string
	sections []string

	// One-shot blobs and streams.
	sizes       []int         // of blobs, in bytes
	turn        time.Duration // of one contender
	rounds      int
	streamBytes int   // of one stream of a turn
	rangedBytes int64 // of the blob that is read at random
	pipeBytes   int64 // through the command line
	pipeRounds  int

	// keyd.
	subjects   int           // that the unary calls are about
	callTurn   time.Duration // of one contender
	callRounds int
	unloaded   int // operations of one client alone
	openLoop   time.Duration

	// Growth and scale: numbers of subjects, ascending.
	growthSubjects []int
	growthBuckets  []int
	scaleSubjects  []int
}

var profiles = map[string]profile{
	"quick": {
		sections: []string{"oneshot", "streams", "calls", "durable", "latency"},
		sizes:    []int{256, 1 << 10, 4 << 10, 64 << 10, 1 << 20},
		turn:     2 * time.Millisecond, rounds: 15,
		streamBytes: 16 << 20, rangedBytes: 64 << 20, pipeBytes: 256 << 20, pipeRounds: 3,
		subjects: 2_000, callTurn: 400 * time.Millisecond, callRounds: 3, unloaded: 200,
		openLoop: 2 * time.Second,
	},
	"full": {
		sections: []string{"oneshot", "streams", "calls", "durable", "latency", "growth"},
		sizes:    []int{64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20},
		turn:     3 * time.Millisecond, rounds: 61,
		streamBytes: 16 << 20, rangedBytes: 1 << 30, pipeBytes: 4 << 30, pipeRounds: 3,
		subjects: 10_000, callTurn: time.Second, callRounds: 9, unloaded: 1000,
		openLoop:       8 * time.Second,
		growthSubjects: []int{1_000, 10_000, 100_000},
		growthBuckets:  []int{1, 10, 100, 1_000, 5_000},
	},
	"scale": {
		sections: []string{"scale"},
		turn:     3 * time.Millisecond, rounds: 61,
		subjects: 10_000, callTurn: time.Second, callRounds: 5, unloaded: 1000,
		scaleSubjects: []int{10_000, 1_000_000, 10_000_000},
	},
}
