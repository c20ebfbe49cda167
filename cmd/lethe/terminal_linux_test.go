package main

import (
	"bytes"
	"os"
	"testing"
)

func TestIsTerminal(t *testing.T) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	if !isTerminal(terminal) {
		t.Error("a terminal is none")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, s := range []any{r, w, null, &bytes.Buffer{}, nil} {
		if isTerminal(s) {
			t.Errorf("%v is a terminal", s)
		}
	}
}
