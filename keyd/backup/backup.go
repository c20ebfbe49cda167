// Package backup is the form of backup files: a frame around what a store's
// own backup writes, so that a file that was cut or has rotten is never taken
// for a whole one. SPEC.md, Part IV, describes it.
//
// The checksums find accidents. They are no signature: whoever can write a
// backup can make one that verifies. What keeps a doctored store from serving
// is its comparison with the anchor, and that keys are bound to their rows.
package backup

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"time"
)

// magic begins a file, with the version of the form in its last byte.
const magic = "\x89lethe-backup\x00\x01"

const (
	// maxChunk is the greatest number of bytes of data in one piece.
	maxChunk = 1 << 20
	// chunkSize is how many the Writer puts into one.
	chunkSize = 256 << 10
	maxStore  = 64
	fixed     = 4 + 16 + 8 + 8 + 4 + 1
)

// Errors of reading. Nothing that was read before one of them may be used.
var (
	// ErrNotBackup: the file does not begin as a backup does.
	ErrNotBackup = errors.New("not a backup file")
	// ErrVersion: a newer version wrote it.
	ErrVersion = errors.New("the backup file is of a newer version")
	// ErrDamaged: it was cut or edited, or has bytes after its end.
	ErrDamaged = errors.New("the backup file is damaged")
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// Header says what a backup is of.
type Header struct {
	// FormatLevel is that of the store's rows.
	FormatLevel uint32
	// Incarnation is the store's own random name.
	Incarnation [16]byte
	// Created is when the backup was begun, in whole milliseconds.
	Created time.Time
	// LedgerSize and Epoch are those of the store when the backup was begun;
	// the copy holds at least as much.
	LedgerSize uint64
	Epoch      uint32
	// Store is the kind of store whose data these are, at most 64 bytes of
	// printable ASCII: only that kind reads them.
	Store string
}

func (h Header) encode() ([]byte, error) {
	if !isStore(h.Store) || h.Created.UnixMilli() < 0 {
		return nil, errors.New("backup: a header out of bounds")
	}
	b := binary.BigEndian.AppendUint32(nil, h.FormatLevel)
	b = append(b, h.Incarnation[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(h.Created.UnixMilli()))
	b = binary.BigEndian.AppendUint64(b, h.LedgerSize)
	b = binary.BigEndian.AppendUint32(b, h.Epoch)
	b = append(b, byte(len(h.Store)))
	return append(b, h.Store...), nil
}

func isStore(s string) bool {
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return s != "" && len(s) <= maxStore
}

// Writer frames a backup. It is for one goroutine.
type Writer struct {
	w     io.Writer
	sum   hash.Hash
	buf   []byte
	total uint64
	index uint64
	err   error
}

// NewWriter writes the file's head to w.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	b, err := h.encode()
	if err != nil {
		return nil, err
	}
	out := &Writer{w: w, sum: sha256.New(), buf: make([]byte, 0, chunkSize)}
	head := append([]byte(magic), b...)
	out.put(head)
	out.put(binary.BigEndian.AppendUint32(nil, crc32.Checksum(head, crcTable)))
	return out, out.err
}

func (w *Writer) put(b []byte) {
	if w.err != nil {
		return
	}
	w.sum.Write(b)
	_, w.err = w.w.Write(b)
}

// Write adds data. What it got is on its way to the file after Close only.
func (w *Writer) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 && w.err == nil {
		k := min(len(p), chunkSize-len(w.buf))
		w.buf = append(w.buf, p[:k]...)
		p = p[k:]
		if len(w.buf) == chunkSize {
			w.flush()
		}
	}
	if w.err != nil {
		return 0, w.err
	}
	return n, nil
}

func (w *Writer) flush() {
	if len(w.buf) == 0 {
		return
	}
	w.put(binary.BigEndian.AppendUint32(nil, uint32(len(w.buf))))
	w.put(w.buf)
	w.put(binary.BigEndian.AppendUint32(nil, chunkSum(w.index, w.buf)))
	w.total += uint64(len(w.buf))
	w.index++
	w.buf = w.buf[:0]
}

// chunkSum covers the piece's place too, so that one that is repeated, missing
// or moved is found where it stands.
func chunkSum(index uint64, data []byte) uint32 {
	return crc32.Update(crc32.Checksum(binary.BigEndian.AppendUint64(nil, index), crcTable), crcTable, data)
}

// Close writes the file's end. It does not close the writer below. A file
// without it is refused.
func (w *Writer) Close() error {
	w.flush()
	w.put(binary.BigEndian.AppendUint64(make([]byte, 4), w.total))
	if w.err != nil {
		return w.err
	}
	_, w.err = w.w.Write(w.sum.Sum(nil))
	if w.err != nil {
		return w.err
	}
	w.err = errors.New("backup: closed")
	return nil
}

// Reader reads what a Writer wrote, and nothing else. Read returns io.EOF only
// once the file's end is there and everything before it is as it was written.
// It is for one goroutine.
type Reader struct {
	r      *bufio.Reader
	sum    hash.Hash
	header Header
	chunk  []byte // what is left of the piece under way
	buf    []byte
	total  uint64
	index  uint64
	err    error
}

// NewReader reads the file's head.
func NewReader(r io.Reader) (*Reader, error) {
	in := &Reader{r: bufio.NewReaderSize(r, 64<<10), sum: sha256.New()}
	head := make([]byte, len(magic)+fixed)
	switch n, err := io.ReadFull(in.r, head[:len(magic)]); {
	case n > 0 && !bytes.HasPrefix([]byte(magic[:len(magic)-1]), head[:min(n, len(magic)-1)]), n == 0 && errors.Is(err, io.EOF):
		return nil, ErrNotBackup
	case err != nil:
		return nil, cut(err)
	}
	if head[len(magic)-1] != magic[len(magic)-1] {
		return nil, fmt.Errorf("%w: %d", ErrVersion, head[len(magic)-1])
	}
	if _, err := io.ReadFull(in.r, head[len(magic):]); err != nil {
		return nil, cut(err)
	}
	head = append(head, make([]byte, head[len(head)-1])...)
	var sum [4]byte
	if _, err := io.ReadFull(in.r, head[len(magic)+fixed:]); err != nil {
		return nil, cut(err)
	}
	if _, err := io.ReadFull(in.r, sum[:]); err != nil {
		return nil, cut(err)
	}
	if crc32.Checksum(head, crcTable) != binary.BigEndian.Uint32(sum[:]) {
		return nil, damaged("its head")
	}
	in.sum.Write(head)
	in.sum.Write(sum[:])
	b := head[len(magic):]
	in.header = Header{
		FormatLevel: binary.BigEndian.Uint32(b),
		Incarnation: [16]byte(b[4:20]),
		Created:     time.UnixMilli(int64(binary.BigEndian.Uint64(b[20:]))).UTC(),
		LedgerSize:  binary.BigEndian.Uint64(b[28:]),
		Epoch:       binary.BigEndian.Uint32(b[36:]),
		Store:       string(b[fixed:]),
	}
	if !isStore(in.header.Store) || binary.BigEndian.Uint64(b[20:]) > 1<<62 {
		return nil, damaged("its head")
	}
	return in, nil
}

// Header returns what the file says of itself.
func (r *Reader) Header() Header { return r.header }

// Size is how many bytes of data were read so far.
func (r *Reader) Size() uint64 { return r.total - uint64(len(r.chunk)) }

func (r *Reader) Read(p []byte) (int, error) {
	if len(r.chunk) == 0 && r.err == nil {
		r.err = r.next()
	}
	if len(r.chunk) == 0 {
		return 0, r.err
	}
	n := copy(p, r.chunk)
	r.chunk = r.chunk[n:]
	return n, nil
}

// next reads the next piece, or the end.
func (r *Reader) next() error {
	var n [4]byte
	if err := r.full(n[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(n[:])
	switch {
	case size == 0:
		return r.end()
	case size > maxChunk:
		return damaged("the length of piece %d", r.index)
	case int(size) > cap(r.buf):
		r.buf = make([]byte, size)
	}
	r.buf = r.buf[:size]
	if err := r.full(r.buf); err != nil {
		return err
	}
	if err := r.full(n[:]); err != nil {
		return err
	}
	if chunkSum(r.index, r.buf) != binary.BigEndian.Uint32(n[:]) {
		return damaged("piece %d fails its checksum", r.index)
	}
	r.chunk = r.buf
	r.index++
	r.total += uint64(size)
	return nil
}

func (r *Reader) end() error {
	var total [8]byte
	if err := r.full(total[:]); err != nil {
		return err
	}
	want := r.sum.Sum(nil)
	var sum [sha256.Size]byte
	if _, err := io.ReadFull(r.r, sum[:]); err != nil {
		return cut(err)
	}
	if binary.BigEndian.Uint64(total[:]) != r.total || !bytes.Equal(want, sum[:]) {
		return damaged("it fails its checksum")
	}
	switch _, err := r.r.ReadByte(); {
	case err == nil:
		return damaged("bytes after its end")
	case !errors.Is(err, io.EOF):
		return err
	}
	return io.EOF
}

func (r *Reader) full(b []byte) error {
	if _, err := io.ReadFull(r.r, b); err != nil {
		return cut(err)
	}
	r.sum.Write(b)
	return nil
}

// cut turns an early end into damage; other errors are the reader's below.
func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return damaged("its end is missing")
	}
	return err
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}
