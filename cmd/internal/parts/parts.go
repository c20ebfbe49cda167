// Package parts opens what a keyd stands on: its store, its KMS and its anchor,
// as flags name them.
package parts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"lethe/cmd/internal/mtls"
	"lethe/keyd"
	"lethe/keyd/store/badger"
)

// Options say where the parts are.
type Options struct {
	// Data is the directory under which the defaults lie.
	Data string
	// Store is the directory of the key store.
	Store string
	// KMS is where the roots are: KMSLocal, KMSAWS or KMSPKCS11.
	KMS string
	// KMSFile is the file of the local KMS's roots; KMSKeyfile, or the first
	// line of KMSPassphrase, protects it.
	KMSFile, KMSKeyfile, KMSPassphrase string
	AWS                                AWSOptions
	PKCS11                             PKCS11Options
	// RootWaiting is the waiting period before a root is destroyed; zero: the
	// KMS's default.
	RootWaiting time.Duration
	// Anchor says where the anchor is: a directory, s3://BUCKET/PREFIX?… or
	// keyd:ADDRESS/NAME; see CheckAnchor.
	Anchor string
	// AnchorTLS are for an anchor at a keyd with roles.
	AnchorTLS mtls.Files
	// MinFree is how many bytes must stay free on the store's disk.
	MinFree uint64
	// Beside are other files that must not lie in the store's directory.
	Beside []string
}

// AddFlags adds the flags that set Options.
func (o *Options) AddFlags(f *pflag.FlagSet) {
	f.StringVar(&o.Data, "data", "lethe-dev", "directory under which the defaults below lie")
	f.StringVar(&o.Store, "store", "", "directory of the key store (default <data>/store)")
	f.StringVar(&o.KMS, "kms", KMSLocal, "where the roots are: "+strings.Join(kmsKinds, ", ")+pkcs11Note)
	f.StringVar(&o.KMSFile, "kms-file", "", "file of the local KMS's roots, outside the store (default <data>/kms/roots)")
	f.StringVar(&o.KMSKeyfile, "kms-keyfile", "", "keyfile that protects the roots (default <data>/kms/keyfile)")
	f.StringVar(&o.KMSPassphrase, "kms-passphrase-file", "", "file whose first line is the passphrase that protects the roots, instead of a keyfile")
	f.StringVar(&o.AWS.Region, "aws-region", "", "region of AWS KMS (default: the AWS SDK's configuration, as are the credentials)")
	f.StringVar(&o.AWS.Endpoint, "aws-endpoint", "", "URL of AWS KMS, if it is not the region's own")
	f.IntVar(&o.AWS.WaitingDays, "aws-waiting-days", 0, "days, 7 to 30, that AWS KMS waits before it deletes a root (default 7)")
	f.StringVar(&o.AWS.Evidence, "aws-evidence", "", "file that remembers which roots AWS KMS is to delete and when (default <data>/kms/aws-evidence)")
	f.StringVar(&o.PKCS11.Module, "pkcs11-module", "", "path of the PKCS#11 library of the token's maker")
	f.StringVar(&o.PKCS11.Token, "pkcs11-token", "", "label of the token")
	f.StringVar(&o.PKCS11.PINFile, "pkcs11-pin-file", "", "file of mode 0600 whose first line is the PIN of the token's user")
	f.StringVar(&o.Anchor, "anchor", "", "where the anchor is, in another failure domain where there is one: a directory, s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path-style=true, or keyd:ADDRESS/NAME (default <data>/anchor)")
	f.StringVar(&o.AnchorTLS.CA, "anchor-tls-ca", "", "certificates, in PEM, of the CA of the keyd that keeps the anchor; without it that keyd is one for development, on this machine")
	f.StringVar(&o.AnchorTLS.Certificate, "anchor-tls-cert", "", "certificate to show to it, in PEM; it needs the role anchor there")
	f.StringVar(&o.AnchorTLS.Key, "anchor-tls-key", "", "its key, in PEM")
	f.Uint64Var(&o.MinFree, "min-free", badger.DefaultMinFree, fmt.Sprintf("bytes that must stay free on the store's disk, at least %d", badger.LeastMinFree))
	f.DurationVar(&o.RootWaiting, "root-waiting", 0, "waiting period before a root is destroyed (default 1h with --kms local, 168h with pkcs11)")
}

// SetDefaults sets what no flag set.
func (o *Options) SetDefaults() {
	for _, d := range []struct {
		field *string
		name  string
	}{{&o.Store, "store"}, {&o.KMSFile, "kms/roots"}, {&o.Anchor, "anchor"}, {&o.AWS.Evidence, "kms/aws-evidence"}} {
		if *d.field == "" {
			*d.field = filepath.Join(o.Data, d.name)
		}
	}
	if o.KMSKeyfile == "" && o.KMSPassphrase == "" {
		o.KMSKeyfile = filepath.Join(o.Data, "kms/keyfile")
	}
}

// Parts are open.
type Parts struct {
	Store  keyd.Store
	KMS    keyd.KMS
	Anchor keyd.Anchor
	// Shared says of which parts one copy can be made at a time, where that
	// seems so. It is empty where nothing is known.
	Shared string
	closes []func() error
}

// Close closes them, the last one opened first.
func (p *Parts) Close(log *slog.Logger) {
	for i := len(p.closes) - 1; i >= 0; i-- {
		if err := p.closes[i](); err != nil {
			log.Error("closing", "error", err)
		}
	}
	p.closes = nil
}

// Open opens the store, the KMS and the anchor. With create they are made in
// the order KMS, anchor, store, and only while there is no store: so a store
// whose KMS or anchor is missing is refused, and a store that is missing is
// never made beside an anchor that remembers one.
func Open(ctx context.Context, o Options, create bool, log *slog.Logger) (*Parts, error) {
	p := new(Parts)
	if err := p.open(ctx, o, create, log); err != nil {
		p.Close(log)
		return nil, err
	}
	return p, nil
}

func (p *Parts) open(ctx context.Context, o Options, create bool, log *slog.Logger) error {
	if err := o.CheckAnchor(); err != nil {
		return err
	}
	if err := o.checkMinFree(); err != nil {
		return err
	}
	exists, err := badger.Exists(o.Store)
	if err != nil {
		return err
	}
	fresh := create && !exists
	if fresh {
		dirs := []string{filepath.Dir(o.Store)}
		if dir := o.anchorDir(); dir != "" {
			dirs = append(dirs, filepath.Dir(dir))
		}
		if o.KMS == KMSLocal {
			dirs = append(dirs, filepath.Dir(o.KMSFile))
		}
		for _, name := range o.Beside {
			dirs = append(dirs, filepath.Dir(name))
		}
		for _, dir := range dirs {
			if err := await(ctx, log, dir, func() error { return makeDirs(dir) }); err != nil {
				return err
			}
		}
	}
	if err := o.apart(); err != nil {
		return err
	}

	kms, closeKMS, err := openKMS(ctx, o, fresh)
	if err != nil {
		return err
	}
	p.KMS = kms
	p.closes = append(p.closes, closeKMS)

	theAnchor := "the anchor in " + o.Anchor
	var anchor keyd.Anchor
	err = await(ctx, log, theAnchor, func() (err error) {
		anchor, err = o.openAnchor(ctx, fresh)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", theAnchor, err)
	}
	p.Anchor = anchor
	p.closes = append(p.closes, func() error { return closeAnchor(anchor) })
	if fresh {
		err := await(ctx, log, theAnchor, func() error {
			_, err := anchor.Newest(ctx)
			return err
		})
		switch {
		case err == nil:
			return fmt.Errorf("there is no key store in %s, but the anchor in %s remembers one: restore the store, or name its directory", o.Store, o.Anchor)
		case !errors.Is(err, keyd.ErrNoObject):
			return fmt.Errorf("there is no key store in %s, and whether the anchor in %s remembers one is not known: %w", o.Store, o.Anchor, err)
		}
		log.Warn("there is no key store; making one", "store", o.Store)
	}

	store, err := badger.Open(badger.Options{Dir: o.Store, Create: fresh, MinFree: o.MinFree, Logger: log})
	if err != nil {
		return fmt.Errorf("the key store in %s: %w", o.Store, err)
	}
	p.Store = store
	p.closes = append(p.closes, store.Close)
	var shared string
	err = await(ctx, log, theAnchor, func() error {
		shared = o.shared()
		return nil
	})
	if err != nil {
		return err
	}
	if p.Shared = shared; shared != "" {
		p.Anchor = &sharedAnchor{p.Anchor, p.Shared}
	}
	return nil
}

func (o Options) checkMinFree() error {
	if o.MinFree < badger.LeastMinFree {
		return fmt.Errorf("--min-free: at least %d: the store needs that much to write at all", badger.LeastMinFree)
	}
	return nil
}

// makeDirs makes dir and its missing parents, durably: a key store whose
// directory's name a loss of power takes away would be made anew.
func makeDirs(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	switch err := os.Mkdir(dir, 0o700); {
	case errors.Is(err, fs.ErrExist):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		if err := makeDirs(filepath.Dir(dir)); err != nil {
			return err
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case err != nil:
		return err
	}
	parent, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return err
	}
	return errors.Join(parent.Sync(), parent.Close())
}

// apart refuses the KMS's files or an anchor inside the store's directory: they
// would be copied, restored and lost together with it.
func (o Options) apart() error {
	store, err := filepath.Abs(o.Store)
	if err != nil {
		return err
	}
	for _, path := range append(append(o.kmsPaths(), o.anchorDir()), o.Beside...) {
		if path == "" {
			continue
		}
		abs, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		if rel, err := filepath.Rel(store, abs); err == nil && filepath.IsLocal(rel) {
			return fmt.Errorf("%s lies inside the key store's directory", path)
		}
	}
	return nil
}
