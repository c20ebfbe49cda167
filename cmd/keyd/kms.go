package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"lethe/keyd"
	"lethe/keyd/kms/awskms"
	"lethe/keyd/kms/local"
)

// What --kms takes.
const (
	kmsLocal  = "local"
	kmsAWS    = "awskms"
	kmsPKCS11 = "pkcs11"
)

var kmsKinds = []string{kmsLocal, kmsAWS, kmsPKCS11}

type awsOptions struct {
	region, endpoint, evidence string
	waitingDays                int
}

type pkcs11Options struct {
	module, token, pinFile string
}

// kmsFlags are the flags that say something about some kinds of KMS only.
var kmsFlags = map[string][]string{
	"kms-file":            {kmsLocal},
	"kms-keyfile":         {kmsLocal},
	"kms-passphrase-file": {kmsLocal},
	"root-waiting":        {kmsLocal, kmsPKCS11},
	"aws-region":          {kmsAWS},
	"aws-endpoint":        {kmsAWS},
	"aws-waiting-days":    {kmsAWS},
	"aws-evidence":        {kmsAWS},
	"pkcs11-module":       {kmsPKCS11},
	"pkcs11-token":        {kmsPKCS11},
	"pkcs11-pin-file":     {kmsPKCS11},
}

// errNoPKCS11 is what a keyd without PKCS#11 says when it is asked for.
var errNoPKCS11 = errors.New("--kms pkcs11: this keyd was built without PKCS#11: build it with cgo and -tags pkcs11")

// checkKMS refuses a --kms that there is not, and flags of another one: whoever
// sets them believes the roots to be where they are not.
func (o *options) checkKMS(given func(flag string) bool) error {
	if !slices.Contains(kmsKinds, o.kms) {
		return fmt.Errorf("--kms %s: there is no such KMS; there are %s", o.kms, strings.Join(kmsKinds, ", "))
	}
	var wrong []string
	for flag, kinds := range kmsFlags {
		if given(flag) && !slices.Contains(kinds, o.kms) {
			wrong = append(wrong, "--"+flag)
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return fmt.Errorf("%s: not for --kms %s", strings.Join(wrong, ", "), o.kms)
	}
	if o.kms == kmsPKCS11 {
		if !pkcs11Built {
			return errNoPKCS11
		}
		if o.pkcs11.module == "" || o.pkcs11.token == "" || o.pkcs11.pinFile == "" {
			return errors.New("--kms pkcs11 needs --pkcs11-module, --pkcs11-token and --pkcs11-pin-file")
		}
	}
	return nil
}

// kmsPaths are the files of the KMS on this host.
func (o *options) kmsPaths() []string {
	var paths []string
	switch o.kms {
	case kmsLocal:
		paths = []string{o.kmsFile, o.kmsKeyfile, o.kmsPassphrase}
	case kmsAWS:
		paths = []string{o.aws.evidence}
	case kmsPKCS11:
		paths = []string{o.pkcs11.pinFile}
	}
	return slices.DeleteFunc(paths, func(p string) bool { return p == "" })
}

// openKMS opens the KMS. fresh says that there is no store yet, and that a
// local one may be made.
func openKMS(ctx context.Context, o options, fresh bool) (keyd.KMS, func() error, error) {
	switch o.kms {
	case kmsAWS:
		return openAWS(ctx, o.aws)
	case kmsPKCS11:
		return openPKCS11(ctx, o)
	}
	kms, err := openLocal(o, fresh)
	if err != nil {
		return nil, nil, fmt.Errorf("the KMS in %s: %w", o.kmsFile, err)
	}
	return kms, kms.Close, nil
}

func openLocal(o options, fresh bool) (*local.KMS, error) {
	k := local.Options{Path: o.kmsFile, Keyfile: o.kmsKeyfile, Create: fresh, Waiting: o.rootWaiting}
	if o.kmsPassphrase != "" {
		b, err := os.ReadFile(o.kmsPassphrase)
		if err != nil {
			return nil, err
		}
		k.Passphrase, _, _ = bytes.Cut(b, []byte("\n"))
	} else if fresh {
		if err := local.GenerateKeyfile(o.kmsKeyfile); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return local.Open(k)
}

func openAWS(ctx context.Context, o awsOptions) (keyd.KMS, func() error, error) {
	// Evidence that is missing is begun anew: without it no root that was to be
	// deleted before passes for destroyed.
	if err := makeDirs(filepath.Dir(o.evidence)); err != nil {
		return nil, nil, err
	}
	evidence, err := awskms.OpenEvidence(o.evidence)
	if err != nil {
		return nil, nil, err
	}
	kms, err := awskms.New(ctx, awskms.Options{
		Region: o.region, Endpoint: o.endpoint, WaitingDays: o.waitingDays, Evidence: evidence,
	})
	if err != nil {
		return nil, nil, err
	}
	return kms, func() error { return nil }, nil
}
