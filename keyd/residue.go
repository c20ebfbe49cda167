package keyd

import (
	"context"

	"lethe/keyd/internal/keys"
)

// What is left of destroyed keys in the files of a store.
type (
	// StoreFiles are the files of a store that nobody has open; a store's
	// package implements it.
	StoreFiles    = keys.Files
	Residue       = keys.Residue
	ResidueReport = keys.ResidueReport
)

// FindResidue looks in every byte of a store's files for the wrapped keys of
// destroyed subjects, of erased tenants, and of the key ids that are named. It
// cannot see the blocks of a disk that files were freed from, nor copies of the
// store elsewhere. It changes nothing.
func FindResidue(ctx context.Context, files StoreFiles, named [][16]byte) (*ResidueReport, error) {
	return keys.FindResidue(ctx, files, named)
}
