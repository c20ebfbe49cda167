//go:build pkcs11

package parts

import (
	"context"
	"fmt"

	"lethe/keyd"
	"lethe/keyd/kms/pkcs11"
)

const (
	// PKCS11Built says whether this build has PKCS#11.
	PKCS11Built = true
	pkcs11Note  = ""
)

func openPKCS11(ctx context.Context, o Options) (keyd.KMS, func() error, error) {
	kms, err := pkcs11.Open(ctx, pkcs11.Options{
		Module: o.PKCS11.Module, Token: o.PKCS11.Token, PINFile: o.PKCS11.PINFile, Waiting: o.RootWaiting,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("the KMS on the token %q: %w", o.PKCS11.Token, err)
	}
	return kms, kms.Close, nil
}
