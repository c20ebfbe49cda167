package backup_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"
	"time"

	"lethe/keyd/backup"
)

var header = backup.Header{
	FormatLevel: 1, Incarnation: [16]byte{1, 2, 3}, Created: time.UnixMilli(1_770_000_000_123).UTC(),
	LedgerSize: 77, Epoch: 3, Store: "badger",
}

func write(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := backup.NewWriter(&b, header)
	if err != nil {
		t.Fatal(err)
	}
	// In pieces of odd sizes.
	for rest := data; len(rest) > 0; {
		n := min(len(rest), 70_001)
		if _, err := w.Write(rest[:n]); err != nil {
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func read(r io.Reader) (backup.Header, []byte, error) {
	in, err := backup.NewReader(r)
	if err != nil {
		return backup.Header{}, nil, err
	}
	data, err := io.ReadAll(in)
	return in.Header(), data, err
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

func TestRoundTrip(t *testing.T) {
	for _, n := range []int{0, 1, 255, 256 << 10, 256<<10 + 1, 3 << 20} {
		data := random(n)
		file := write(t, data)
		for name, r := range map[string]io.Reader{"whole": bytes.NewReader(file), "byte by byte": iotest.OneByteReader(bytes.NewReader(file))} {
			h, got, err := read(r)
			if err != nil || h != header || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, %s: %v, header %+v", n, name, err, h)
			}
		}
	}
}

// TestEveryCutAndEdit: no file that was cut, edited or continued reads as a
// whole one.
func TestEveryCutAndEdit(t *testing.T) {
	file := write(t, random(300))
	for n := range file {
		_, _, err := read(bytes.NewReader(file[:n]))
		if !errors.Is(err, backup.ErrDamaged) && !(n == 0 && errors.Is(err, backup.ErrNotBackup)) {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	for i := range file {
		for bit := range 8 {
			edited := bytes.Clone(file)
			edited[i] ^= 1 << bit
			_, _, err := read(bytes.NewReader(edited))
			if !errors.Is(err, backup.ErrDamaged) && !errors.Is(err, backup.ErrNotBackup) && !errors.Is(err, backup.ErrVersion) {
				t.Errorf("bit %d of byte %d: %v", bit, i, err)
			}
		}
	}
	if _, _, err := read(bytes.NewReader(append(bytes.Clone(file), 0))); !errors.Is(err, backup.ErrDamaged) {
		t.Errorf("a byte more: %v", err)
	}
}

// TestPieces: pieces that are repeated, left out or exchanged.
func TestPieces(t *testing.T) {
	const piece = 256 << 10
	a, b := random(piece), random(piece-1)
	file := write(t, append(bytes.Clone(a), b...))
	head := bytes.Index(file, a) - 4
	first, second := file[head:head+4+piece+4], file[head+4+piece+4:head+4+piece+4+4+len(b)+4]
	tail := file[head+len(first)+len(second):]
	join := func(parts ...[]byte) []byte { return bytes.Join(append([][]byte{file[:head]}, parts...), nil) }
	if _, _, err := read(bytes.NewReader(join(first, second, tail))); err != nil {
		t.Fatal(err)
	}
	for name, edited := range map[string][]byte{
		"repeated": join(first, first, second, tail), "left out": join(first, tail), "exchanged": join(second, first, tail),
		"another's end": join(first, second, write(t, nil)[head:]),
	} {
		if _, _, err := read(bytes.NewReader(edited)); !errors.Is(err, backup.ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNotBackup(t *testing.T) {
	for _, s := range []string{"", "x", "\x89PNG", "{\"type\":\"lethe.receipt/v1\"}"} {
		if _, err := backup.NewReader(bytes.NewReader([]byte(s))); !errors.Is(err, backup.ErrNotBackup) {
			t.Errorf("%q: %v", s, err)
		}
	}
	newer := write(t, nil)
	newer[14]++
	if _, err := backup.NewReader(bytes.NewReader(newer)); !errors.Is(err, backup.ErrVersion) {
		t.Errorf("a newer version: %v", err)
	}
}

// TestReadError: an error of what is below is told, and not taken for an end.
func TestReadError(t *testing.T) {
	file := write(t, random(1000))
	broken := errors.New("broken")
	for n := range file {
		_, _, err := read(io.MultiReader(bytes.NewReader(file[:n]), iotest.ErrReader(broken)))
		if !errors.Is(err, broken) {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	}
}

// failing takes n bytes.
type failing struct{ n int }

var errFull = errors.New("full")

func (f *failing) Write(p []byte) (int, error) {
	if len(p) > f.n {
		return 0, errFull
	}
	f.n -= len(p)
	return len(p), nil
}

// TestWriteError: wherever writing fails, Close says so.
func TestWriteError(t *testing.T) {
	data := random(600 << 10)
	whole := len(write(t, data))
	for _, n := range []int{0, 10, 100, 1000, 300 << 10, 600 << 10, whole - 33, whole - 1} {
		w, err := backup.NewWriter(&failing{n}, header)
		if err == nil {
			_, _ = w.Write(data)
			err = w.Close()
		}
		if !errors.Is(err, errFull) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
}

func FuzzReader(f *testing.F) {
	f.Add(write(f, nil))
	f.Add(write(f, random(100)))
	f.Add([]byte("\x89lethe-backup\x00\x01"))
	f.Fuzz(func(t *testing.T, file []byte) {
		h, data, err := read(bytes.NewReader(file))
		if err != nil {
			return
		}
		// What reads is what a Writer would write, but for where it is cut.
		var again bytes.Buffer
		w, err := backup.NewWriter(&again, h)
		if err != nil {
			t.Fatalf("a header that cannot be written: %v", err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if h2, data2, err := read(&again); err != nil || h2 != h || !bytes.Equal(data, data2) {
			t.Fatalf("does not read back: %v", err)
		}
	})
}
