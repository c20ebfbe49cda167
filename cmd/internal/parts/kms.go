package parts

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
	KMSLocal  = "local"
	KMSAWS    = "awskms"
	KMSPKCS11 = "pkcs11"
)

var kmsKinds = []string{KMSLocal, KMSAWS, KMSPKCS11}

// AWSOptions say where AWS KMS is.
type AWSOptions struct {
	// Region and Endpoint of AWS KMS; empty: the SDK's configuration.
	Region, Endpoint string
	// Evidence is the file that remembers which roots are to be deleted.
	Evidence string
	// WaitingDays is AWS KMS's waiting period; zero: the least.
	WaitingDays int
}

// PKCS11Options say where the token is.
type PKCS11Options struct {
	// Module is the library of the token's maker, Token its label, and PINFile
	// the file whose first line is the user's PIN.
	Module, Token, PINFile string
}

// kmsFlags are the flags that say something about some kinds of KMS only.
var kmsFlags = map[string][]string{
	"kms-file":            {KMSLocal},
	"kms-keyfile":         {KMSLocal},
	"kms-passphrase-file": {KMSLocal},
	"root-waiting":        {KMSLocal, KMSPKCS11},
	"aws-region":          {KMSAWS},
	"aws-endpoint":        {KMSAWS},
	"aws-waiting-days":    {KMSAWS},
	"aws-evidence":        {KMSAWS},
	"pkcs11-module":       {KMSPKCS11},
	"pkcs11-token":        {KMSPKCS11},
	"pkcs11-pin-file":     {KMSPKCS11},
}

// errNoPKCS11 is what a keyd without PKCS#11 says when it is asked for.
var errNoPKCS11 = errors.New("--kms pkcs11: this program was built without PKCS#11: build it with cgo and -tags pkcs11")

// CheckKMS refuses a --kms that there is not, and flags of another one: whoever
// sets them believes the roots to be where they are not.
func (o *Options) CheckKMS(given func(flag string) bool) error {
	if !slices.Contains(kmsKinds, o.KMS) {
		return fmt.Errorf("--kms %s: there is no such KMS; there are %s", o.KMS, strings.Join(kmsKinds, ", "))
	}
	var wrong []string
	for flag, kinds := range kmsFlags {
		if given(flag) && !slices.Contains(kinds, o.KMS) {
			wrong = append(wrong, "--"+flag)
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return fmt.Errorf("%s: not for --kms %s", strings.Join(wrong, ", "), o.KMS)
	}
	if o.KMS == KMSPKCS11 {
		if !PKCS11Built {
			return errNoPKCS11
		}
		if o.PKCS11.Module == "" || o.PKCS11.Token == "" || o.PKCS11.PINFile == "" {
			return errors.New("--kms pkcs11 needs --pkcs11-module, --pkcs11-token and --pkcs11-pin-file")
		}
	}
	return nil
}

// kmsPaths are the files of the KMS on this host.
func (o *Options) kmsPaths() []string {
	var paths []string
	switch o.KMS {
	case KMSLocal:
		paths = []string{o.KMSFile, o.KMSKeyfile, o.KMSPassphrase}
	case KMSAWS:
		paths = []string{o.AWS.Evidence}
	case KMSPKCS11:
		paths = []string{o.PKCS11.PINFile}
	}
	return slices.DeleteFunc(paths, func(p string) bool { return p == "" })
}

// openKMS opens the KMS. fresh says that there is no store yet, and that a
// local one may be made.
func openKMS(ctx context.Context, o Options, fresh bool) (keyd.KMS, func() error, error) {
	switch o.KMS {
	case KMSAWS:
		return openAWS(ctx, o.AWS)
	case KMSPKCS11:
		return openPKCS11(ctx, o)
	}
	kms, err := openLocal(o, fresh)
	if err != nil {
		return nil, nil, fmt.Errorf("the KMS in %s: %w", o.KMSFile, err)
	}
	return kms, kms.Close, nil
}

func openLocal(o Options, fresh bool) (*local.KMS, error) {
	k := local.Options{Path: o.KMSFile, Keyfile: o.KMSKeyfile, Create: fresh, Waiting: o.RootWaiting}
	if o.KMSPassphrase != "" {
		b, err := os.ReadFile(o.KMSPassphrase)
		if err != nil {
			return nil, err
		}
		k.Passphrase, _, _ = bytes.Cut(b, []byte("\n"))
	} else if fresh {
		if err := local.GenerateKeyfile(o.KMSKeyfile); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return local.Open(k)
}

func openAWS(ctx context.Context, o AWSOptions) (keyd.KMS, func() error, error) {
	// Evidence that is missing is begun anew: without it no root that was to be
	// deleted before passes for destroyed.
	if err := makeDirs(filepath.Dir(o.Evidence)); err != nil {
		return nil, nil, err
	}
	evidence, err := awskms.OpenEvidence(o.Evidence)
	if err != nil {
		return nil, nil, err
	}
	kms, err := awskms.New(ctx, awskms.Options{
		Region: o.Region, Endpoint: o.Endpoint, WaitingDays: o.WaitingDays, Evidence: evidence,
	})
	if err != nil {
		return nil, nil, err
	}
	return kms, func() error { return nil }, nil
}
