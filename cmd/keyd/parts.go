package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"lethe/keyd"
	"lethe/keyd/anchor/file"
	"lethe/keyd/store/badger"
)

// parts are the adapters that this command chose.
type parts struct {
	store  keyd.Store
	kms    keyd.KMS
	anchor keyd.Anchor
	closes []func() error
}

func (p *parts) close(log *slog.Logger) {
	for i := len(p.closes) - 1; i >= 0; i-- {
		if err := p.closes[i](); err != nil {
			log.Error("closing", "error", err)
		}
	}
}

// openParts opens the store, the KMS and the anchor. They are made in the
// order KMS, anchor, store, and only while there is no store: so a store whose
// KMS or anchor is missing is refused, and a store that is missing is never
// made beside an anchor that remembers one.
func openParts(ctx context.Context, o options, log *slog.Logger) (*parts, error) {
	p := new(parts)
	if err := p.open(ctx, o, log); err != nil {
		p.close(log)
		return nil, err
	}
	return p, nil
}

func (p *parts) open(ctx context.Context, o options, log *slog.Logger) error {
	exists, err := badger.Exists(o.store)
	if err != nil {
		return err
	}
	fresh := !exists
	if fresh {
		dirs := []string{filepath.Dir(o.anchor), filepath.Dir(o.store), filepath.Dir(o.auditLog)}
		if o.kms == kmsLocal {
			dirs = append(dirs, filepath.Dir(o.kmsFile))
		}
		for _, dir := range dirs {
			if err := makeDirs(dir); err != nil {
				return err
			}
		}
	}
	if err := apart(o); err != nil {
		return err
	}

	kms, closeKMS, err := openKMS(ctx, o, fresh)
	if err != nil {
		return err
	}
	p.kms = kms
	p.closes = append(p.closes, closeKMS)

	anchor, err := file.Open(file.Options{Dir: o.anchor, Create: fresh})
	if err != nil {
		return fmt.Errorf("the anchor in %s: %w", o.anchor, err)
	}
	p.anchor = anchor
	p.closes = append(p.closes, anchor.Close)
	if fresh {
		if _, err := anchor.Newest(context.Background()); err == nil {
			return fmt.Errorf("there is no key store in %s, but the anchor in %s remembers one: restore the store, or name its directory", o.store, o.anchor)
		}
		log.Warn("there is no key store; making one", "store", o.store)
	}

	store, err := badger.Open(badger.Options{Dir: o.store, Create: fresh, MinFree: o.minFree, Logger: log})
	if err != nil {
		return fmt.Errorf("the key store in %s: %w", o.store, err)
	}
	p.store = store
	p.closes = append(p.closes, store.Close)
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
func apart(o options) error {
	store, err := filepath.Abs(o.store)
	if err != nil {
		return err
	}
	for _, path := range append(o.kmsPaths(), o.anchor, o.auditLog) {
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
