package badger

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// The manifest lists the tables and not the logs, so a log that somebody
// removes would take commits along that were acknowledged, and nothing would
// tell. So while the store is open a small file names the newest log: it is
// written before the first commit in that log is acknowledged, and after the
// log's name and size are durable. Badger makes the next log before it empties
// and removes one, so whatever ends the process, there is then that log as it was
// sized, or a later one. Where Badger cuts or removes logs without such care
// (opening, closing, dropping a range) the file is removed before.
//
// That the end of a log was overwritten with zeros, from a commit's end on,
// cannot be told from a log that was never written that far.

const (
	newestLogName = "NEWEST-LOG"
	newestLogTemp = newestLogName + ".new"
)

// newestLog returns the log that the file names, 0 if there is none.
func (d *directory) newestLog() (uint64, error) {
	b, err := os.ReadFile(d.file(newestLogName))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("store: %w", err)
	}
	id, err := strconv.ParseUint(strings.TrimSuffix(string(b), "\n"), 10, 64)
	if err != nil || id == 0 {
		return 0, damaged(d.file(newestLogName), "is garbled")
	}
	return id, nil
}

// checkNewestLog fails if the newest log is not among those that are there, or
// has not its size any more.
func (d *directory) checkNewestLog(logs []uint64) error {
	id, err := d.newestLog()
	if err != nil || id == 0 {
		return err
	}
	if len(logs) == 0 || slices.Max(logs) < id {
		return damaged(d.log(id), "is missing, with the newest commits")
	}
	if slices.Max(logs) > id {
		return nil
	}
	b, err := os.ReadFile(d.log(id))
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if len(b)-len(bytes.TrimRight(b, "\x00")) < logSlack {
		return damaged(d.log(id), "its end is missing, with the newest commits")
	}
	return nil
}

// noteNewestLog makes the file name a log, whose own name is durable.
func (d *directory) noteNewestLog(id uint64) error {
	if id <= d.noted {
		return nil
	}
	if err := syncFile(d.log(id)); err != nil { // its size; a commit that it holds is synced
		return err
	}
	f, err := os.OpenFile(d.file(newestLogTemp), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, id)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(d.file(newestLogTemp), d.file(newestLogName)); err != nil {
		return err
	}
	d.noted = id
	return d.lock.Sync()
}

// forgetNewestLog removes the file durably.
func (d *directory) forgetNewestLog() error {
	d.noted = 0
	err := os.Remove(d.file(newestLogName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, d.lock.Sync())
}
