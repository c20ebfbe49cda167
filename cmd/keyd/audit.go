package main

import (
	"io"
	"os"
)

// auditLog is the file of audit lines. After a line of which only a part could
// be written, as on a full disk, the next one begins on a line of its own.
type auditLog struct {
	file io.WriteCloser
	torn bool // the file ends in the middle of a line
}

func openAuditLog(name string) (*auditLog, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &auditLog{file: f, torn: endsInMidLine(f)}, nil
}

// endsInMidLine says whether a keyd before was cut off, by a full disk or a loss
// of power. Where that cannot be read it says so too: an empty line does no harm.
func endsInMidLine(f *os.File) bool {
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() || fi.Size() == 0 {
		return false
	}
	r, err := os.Open(f.Name())
	if err != nil {
		return true
	}
	defer r.Close()
	var last [1]byte
	_, err = r.ReadAt(last[:], fi.Size()-1)
	return err != nil || last[0] != '\n'
}

// Write writes one line, with its end. It is called by one at a time.
func (a *auditLog) Write(line []byte) (int, error) {
	if a.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := a.file.Write(line)
	if n > 0 {
		a.torn = line[n-1] != '\n'
	}
	return n, err
}

func (a *auditLog) Close() error { return a.file.Close() }
