//go:build !pkcs11

package parts

import (
	"context"

	"lethe/keyd"
)

const (
	// PKCS11Built says whether this build has PKCS#11.
	PKCS11Built = false
	pkcs11Note  = " (not in this build)"
)

func openPKCS11(context.Context, Options) (keyd.KMS, func() error, error) {
	return nil, nil, errNoPKCS11
}
