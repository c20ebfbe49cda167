//go:build !pkcs11

package main

import (
	"context"

	"lethe/keyd"
)

const (
	pkcs11Built = false
	pkcs11Note  = " (not in this build)"
)

func openPKCS11(context.Context, options) (keyd.KMS, func() error, error) {
	return nil, nil, errNoPKCS11
}
