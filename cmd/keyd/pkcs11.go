//go:build pkcs11

package main

import (
	"context"
	"fmt"

	"lethe/keyd"
	"lethe/keyd/kms/pkcs11"
)

const (
	pkcs11Built = true
	pkcs11Note  = ""
)

func openPKCS11(ctx context.Context, o options) (keyd.KMS, func() error, error) {
	kms, err := pkcs11.Open(ctx, pkcs11.Options{
		Module: o.pkcs11.module, Token: o.pkcs11.token, PINFile: o.pkcs11.pinFile, Waiting: o.rootWaiting,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("the KMS on the token %q: %w", o.pkcs11.token, err)
	}
	return kms, kms.Close, nil
}
