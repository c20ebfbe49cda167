package anchortest_test

import (
	"testing"

	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/internal/ledger"
)

type memoryPlace struct{ *anchortest.Memory }

func (p memoryPlace) Open(*testing.T) ledger.Anchor { return p.Memory }

func (p memoryPlace) Edit(_ *testing.T, size uint64, edit func([]byte) []byte) {
	p.Memory.Edit(size, edit)
}

func TestMemory(t *testing.T) {
	anchortest.Run(t, func(*testing.T) anchortest.Place { return memoryPlace{anchortest.NewMemory()} })
}
