//go:build !unix

package main

func forbidCoreDumps() {}
