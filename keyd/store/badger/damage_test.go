package badger

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"lethe/keyd/internal/keys"
)

const settledRows, loggedRows = 2000, 200

// built makes a store that holds rows in tables (settled) and in a log, of one
// commit each, and returns a crash image of it and the same store closed.
func built(t *testing.T) (image_, closed string) {
	t.Helper()
	for range 20 {
		image_, closed = build(t)
		had, has := listTables(t, image_), listTables(t, closed)
		if len(has) == len(had)+1 && slices.Equal(has[:len(had)], had) {
			return image_, closed
		}
		// The log's table was merged with others while the store closed.
	}
	t.Fatal("no store was left as it was written")
	return "", ""
}

func build(t *testing.T) (image_, closed string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	for part := range 2 {
		s := openTest(t, dir)
		for i := part * settledRows / 2; i < (part+1)*settledRows/2; i += 100 {
			commitRows(t, s, "settled", i, i+100)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s := openTest(t, dir)
	merged(t, s, dir)
	for i := range loggedRows {
		commitRows(t, s, "logged", i, i+1)
	}
	image_ = image(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return image_, dir
}

// merged waits until the tables of level 0 were merged into the next one, as they
// are at some time in the first second after a start, and those that they were
// are removed.
func merged(t *testing.T, s *Store, dir string) {
	t.Helper()
	for {
		levels := s.db.Levels()
		tables := 0
		for _, l := range levels {
			tables += l.NumTables
		}
		if levels[0].NumTables == 0 && len(listTables(t, dir)) == tables {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func valueOf(kind string, i int) string { return fmt.Sprintf("%s-%d-%080d", kind, i, i*i) }

func commitRows(t *testing.T, s *Store, kind string, from, to int) {
	t.Helper()
	err := s.Update(t.Context(), func(tx keys.Tx) error {
		for i := from; i < to; i++ {
			if err := tx.Put(fmt.Appendf(nil, "%s%06d", kind, i), []byte(valueOf(kind, i))); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// missing returns how many of the built rows are not there. A read that fails
// must say that the store is damaged.
func missing(t *testing.T, s *Store) (n, failed int) {
	t.Helper()
	err := s.View(t.Context(), func(r keys.Reader) error {
		for kind, count := range map[string]int{"settled": settledRows, "logged": loggedRows} {
			for i := range count {
				v, err := r.Get(fmt.Appendf(nil, "%s%06d", kind, i))
				switch {
				case errors.Is(err, keys.ErrNotFound):
					n++
				case errors.Is(err, keys.ErrDamaged):
					failed++
				case err != nil:
					t.Errorf("Get: %v", err)
				case string(v) != valueOf(kind, i):
					t.Errorf("%s row %d has another value", kind, i)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n, failed
}

func matching(t *testing.T, dir, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) == 0 {
		t.Fatalf("no %s in the store: %v", pattern, err)
	}
	return found
}

func newest(t *testing.T, dir, pattern string) string {
	found := matching(t, dir, pattern)
	return found[len(found)-1]
}

func rewrite(t *testing.T, name string, change func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

// rot flips a byte of a file in place, as the open store's maps see it.
func rot(t *testing.T, name string, at int) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, int64(at)); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0xff
	if _, err := f.WriteAt(b, int64(at)); err != nil {
		t.Fatal(err)
	}
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte { b[(at+len(b))%len(b)] ^= 0xff; return b }
}

func keep(n int) func([]byte) []byte {
	return func(b []byte) []byte { return b[:(n+len(b))%len(b)] }
}

func TestDamageIsFoundOnOpen(t *testing.T) {
	crash, closed := built(t)
	for _, tt := range []struct {
		name   string
		from   string
		damage func(t *testing.T, dir string) (file string)
		want   error
	}{
		{"manifest missing", closed, func(t *testing.T, dir string) string {
			os.Remove(filepath.Join(dir, manifestName))
			return manifestName
		}, keys.ErrDamaged},
		{"manifest empty", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), keep(0))
			return manifestName
		}, keys.ErrDamaged},
		{"manifest cut to its header", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), keep(8))
			return manifestName
		}, keys.ErrDamaged},
		{"manifest cut in its last record", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), keep(-1))
			return manifestName
		}, keys.ErrDamaged},
		{"manifest of before the last table", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), func([]byte) []byte {
				b, err := os.ReadFile(filepath.Join(crash, manifestName))
				if err != nil {
					t.Fatal(err)
				}
				return b
			})
			return manifestName
		}, keys.ErrDamaged},
		{"manifest garbled", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), flip(20))
			return manifestName
		}, keys.ErrDamaged},
		{"manifest without magic", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), flip(0))
			return manifestName
		}, keys.ErrDamaged},
		{"manifest of a newer Badger", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), func(b []byte) []byte { b[7]++; return b })
			return manifestName
		}, keys.ErrNewerVersion},
		{"newer layout of ours", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, manifestName), func(b []byte) []byte { b[5]++; return b })
			return manifestName
		}, keys.ErrNewerVersion},
		{"table missing", closed, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.sst")
			os.Remove(f)
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"table cut", closed, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.sst")
			rewrite(t, f, keep(-100))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"table empty", closed, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.sst")
			rewrite(t, f, keep(0))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"table index garbled", closed, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.sst")
			rewrite(t, f, flip(-60))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"key registry garbled", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, registryName), flip(-1))
			return registryName
		}, keys.ErrDamaged},
		{"key registry cut", closed, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, registryName), keep(10))
			return registryName
		}, keys.ErrDamaged},
		{"log header garbled", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, flip(3))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"log cut in its header", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, keep(10))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"log garbled at its start", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, flip(logHeader+30))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"log garbled in the middle", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, func(b []byte) []byte { return flip(len(bytes.TrimRight(b, "\x00")) / 2)(b) })
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"log cut within a commit", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, func(b []byte) []byte { return b[:len(bytes.TrimRight(b, "\x00"))-10] })
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"newest log missing", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			os.Remove(f)
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"newest log missing, older one there", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			if err := os.Rename(f, filepath.Join(dir, "00000.mem")); err != nil {
				t.Fatal(err)
			}
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"newest log emptied", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, keep(0))
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"newest log cut at a commit's end", crash, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.mem")
			rewrite(t, f, func(b []byte) []byte {
				var last uint64
				end, _ := readLog(b[:len(bytes.TrimRight(b, "\x00"))-1], &last, nil)
				return b[:end] // without the last one
			})
			return filepath.Base(f)
		}, keys.ErrDamaged},
		{"the newest log's name garbled", crash, func(t *testing.T, dir string) string {
			rewrite(t, filepath.Join(dir, newestLogName), flip(0))
			return newestLogName
		}, keys.ErrDamaged},
		{"value log header garbled", closed, func(t *testing.T, dir string) string {
			f := newest(t, dir, "*.vlog")
			rewrite(t, f, flip(2))
			return filepath.Base(f)
		}, keys.ErrDamaged},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := copyDir(t, tt.from)
			file := tt.damage(t, dir)
			before := listing(t, dir)
			s, err := Open(Options{Dir: dir, Create: true})
			if err == nil {
				s.Close()
			}
			if !errors.Is(err, tt.want) {
				t.Fatalf("Open: %v, want %v", err, tt.want)
			}
			if !strings.Contains(err.Error(), file) {
				t.Errorf("Open: %v, which does not name %s", err, file)
			}
			if after := listing(t, dir); after != before {
				t.Errorf("a refused Open changed the directory:\n%s\nwas\n%s", after, before)
			}
		})
	}
}

func listing(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			info, err := d.Info()
			if err != nil {
				return err
			}
			fmt.Fprintln(&b, d.Name(), info.Size())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// What a crash leaves is no damage.
func TestRemainsOfACrashPass(t *testing.T) {
	crash, closed := built(t)
	for _, tt := range []struct {
		name  string
		crash func(t *testing.T, dir string)
	}{
		{"as it was", func(*testing.T, string) {}},
		{"new log not yet sized", func(t *testing.T, dir string) { touch(t, dir, "00099.mem") }},
		{"old log emptied, not yet removed", func(t *testing.T, dir string) { touch(t, dir, "00000.mem") }},
		{"newest log not yet noted", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, newestLogName)); err != nil {
				t.Fatal(err)
			}
			touch(t, dir, newestLogTemp)
		}},
		{"value log not yet sized", func(t *testing.T, dir string) { touch(t, dir, "000099.vlog") }},
		{"garbage list not yet sized", func(t *testing.T, dir string) { touch(t, dir, discardName) }},
		{"table written, not yet listed", func(t *testing.T, dir string) {
			// The closed store has the log's rows in its newest table.
			copyFile(t, newest(t, closed, "*.sst"), filepath.Join(dir, filepath.Base(newest(t, closed, "*.sst"))))
		}},
		{"table half written", func(t *testing.T, dir string) {
			name := filepath.Join(dir, filepath.Base(newest(t, closed, "*.sst")))
			copyFile(t, newest(t, closed, "*.sst"), name)
			rewrite(t, name, func(b []byte) []byte { clear(b[len(b)/2:]); return b })
		}},
		{"table listed, log not yet removed", func(t *testing.T, dir string) {
			copyFile(t, newest(t, closed, "*.sst"), filepath.Join(dir, filepath.Base(newest(t, closed, "*.sst"))))
			copyFile(t, filepath.Join(closed, manifestName), filepath.Join(dir, manifestName))
		}},
		{"manifest record half written", func(t *testing.T, dir string) {
			rewrite(t, filepath.Join(dir, manifestName), func(b []byte) []byte { return append(b, 0, 0, 0, 20, 1, 2, 3, 4, 5) })
		}},
		{"manifest being rewritten", func(t *testing.T, dir string) { touch(t, dir, manifestRewrite) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := copyDir(t, crash)
			tt.crash(t, dir)
			s, err := Open(Options{Dir: dir})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if n, failed := missing(t, s); n+failed > 0 {
				t.Errorf("%d rows are missing, %d cannot be read", n, failed)
			}
		})
	}
}

// A crash may follow at once on a start that cut off what a crash had left.
func TestCrashAfterACommitWasCutOff(t *testing.T) {
	crash, _ := built(t)
	dir := copyDir(t, crash)
	rewrite(t, newest(t, dir, "*.mem"), func(b []byte) []byte { return flip(len(bytes.TrimRight(b, "\x00")) - 1)(b) })
	d, err := openDirectory(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.close(); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if n, failed := missing(t, s); n != 1 || failed != 0 {
		t.Errorf("%d rows are missing and %d cannot be read; one was under way", n, failed)
	}
}

// Once a commit is acknowledged, the newest log is noted; a store that is closed
// has none.
func TestNewestLogIsNoted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := openTest(t, dir)
	check := func(when string) uint64 {
		t.Helper()
		f, err := s.dir.list()
		if err != nil {
			t.Fatal(err)
		}
		noted, err := s.dir.newestLog()
		if err != nil || len(f.logs) == 0 || noted != f.logs[len(f.logs)-1] {
			t.Errorf("%s: log %d is noted, %v; there are %v", when, noted, err, f.logs)
		}
		return noted
	}
	first := check("opened")
	value := make([]byte, MaxValue)
	for i := range 50 {
		if err := s.Update(t.Context(), func(tx keys.Tx) error { return tx.Put(fmt.Append(nil, "big", i), value) }); err != nil {
			t.Fatal(err)
		}
		check("after a commit")
	}
	last := check("in the end")
	if last == first {
		t.Error("no second log was begun")
	}
	if err := s.DropRange(t.Context(), []byte("big")); err != nil {
		t.Fatal(err)
	}
	if check("after a drop") == last {
		t.Error("a drop began no log")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if noted, err := s.dir.newestLog(); noted != 0 || err != nil {
		t.Errorf("closed: log %d is noted, %v", noted, err)
	}
	if f, err := s.dir.list(); err != nil || len(f.logs) != 0 {
		t.Errorf("closed: logs %v, %v", f.logs, err)
	}
}

// A directory in which nothing was ever written, or from which everything that
// was is gone, is told from one that holds a store.
func TestExists(t *testing.T) {
	exists := func(dir string) bool {
		t.Helper()
		b, err := Exists(dir)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	dir := filepath.Join(t.TempDir(), "store")
	if exists(dir) {
		t.Error("a directory that is not there")
	}
	s := openTest(t, dir)
	unwritten := image(t, s)
	commitRows(t, s, "logged", 0, 1)
	written := image(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	lost := copyDir(t, written)
	os.Remove(newest(t, lost, "*.mem"))
	emptied := copyDir(t, written)
	rewrite(t, newest(t, emptied, "*.mem"), keep(0))
	for _, x := range []struct {
		what string
		dir  string
		want bool
	}{
		{"never written", unwritten, false},
		{"one commit, in a log", written, true},
		{"one commit, in a table", dir, true},
		{"one commit, in a log that is gone", lost, true},
		{"one commit, in a log that was emptied", emptied, true},
	} {
		if exists(x.dir) != x.want {
			t.Errorf("%s: %v", x.what, !x.want)
		}
	}
	openTest(t, unwritten)
}

func touch(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestTornCommit zeroes and garbles the last commit of a log at every
// byte: it was not acknowledged, and everything before it was.
func TestTornCommit(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := openTest(t, dir)
	for i := range 3 {
		commitRows(t, s, "logged", i, i+1)
	}
	before := image(t, s)
	err := s.Update(t.Context(), func(tx keys.Tx) error {
		return errors.Join(tx.Put([]byte("last1"), []byte("x")), tx.Put([]byte("last2"), []byte("y")))
	})
	if err != nil {
		t.Fatal(err)
	}
	after := image(t, s)
	used := func(dir string) int {
		b, err := os.ReadFile(newest(t, dir, "*.mem"))
		if err != nil {
			t.Fatal(err)
		}
		var last uint64
		end, _ := readLog(b, &last, nil)
		return end
	}
	from, to := used(before), used(after)
	if to <= from {
		t.Fatalf("the last commit lies in [%d, %d)", from, to)
	}
	step := 5
	if testing.Short() {
		step = 25
	}
	for at := from; at < to; at += step {
		for name, tear := range map[string]func([]byte) []byte{
			"zeroed":  func(b []byte) []byte { clear(b[at:]); return b },
			"garbled": func(b []byte) []byte { b[at] ^= 0x55; return b },
			"only its end written": func(b []byte) []byte {
				clear(b[from:at])
				return b
			},
		} {
			dir := copyDir(t, after)
			rewrite(t, newest(t, dir, "*.mem"), tear)
			s, err := Open(Options{Dir: dir})
			if err != nil {
				t.Fatalf("%s at %d: %v", name, at-from, err)
			}
			err = s.View(t.Context(), func(r keys.Reader) error {
				for i := range 3 {
					if v, err := r.Get(fmt.Appendf(nil, "logged%06d", i)); err != nil || string(v) != valueOf("logged", i) {
						t.Errorf("%s at %d: row %d: %q, %v", name, at-from, i, v, err)
					}
				}
				_, err1 := r.Get([]byte("last1"))
				_, err2 := r.Get([]byte("last2"))
				if (err1 == nil) != (err2 == nil) {
					t.Errorf("%s at %d: half a commit: %v, %v", name, at-from, err1, err2)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			// It goes on, and what it then acknowledges stays.
			commitRows(t, s, "logged", 3, 4)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			os.RemoveAll(dir)
		}
	}
}

// TestRandomDamage changes one file in one way: the store is refused, or has
// every row, or says of the rows that it cannot read that it is damaged. Only
// the very last commit may be lost with the log's end.
func TestRandomDamage(t *testing.T) {
	crash, closed := built(t)
	rnd := rand.New(rand.NewPCG(7, 7))
	rounds := 100
	if testing.Short() {
		rounds = 25
	}
	outcomes := map[string]int{}
	for range rounds {
		from := []string{crash, closed}[rnd.IntN(2)]
		dir := copyDir(t, from)
		all := matching(t, dir, "*")
		name := all[rnd.IntN(len(all))]
		what := filepath.Base(name)
		size := 0
		may := 0 // rows that may be missing in silence
		if filepath.Ext(name) == ".mem" {
			may = 1 // the last one, as if it had been under way
		}
		rewrite(t, name, func(b []byte) []byte {
			if len(b) == 0 {
				return b
			}
			size = len(b)
			used := len(bytes.TrimRight(b, "\x00"))
			if used > 0 && rnd.IntN(4) > 0 {
				size = used // where there is something
			}
			at := rnd.IntN(size)
			switch rnd.IntN(4) {
			case 0:
				what += fmt.Sprintf(" cut at %d", at)
				return b[:at]
			case 1:
				what += fmt.Sprintf(" bit flipped at %d", at)
				b[at] ^= 1 << rnd.IntN(8)
			case 2:
				n := min(len(b)-at, 1+rnd.IntN(4096))
				what += fmt.Sprintf(" %d bytes zeroed at %d", n, at)
				clear(b[at : at+n])
				if at+n >= used {
					may += may * n / len(valueOf("logged", 0)) // a log that was never written so far looks the same
				}
			case 3:
				n := min(len(b)-at, 1+rnd.IntN(300))
				what += fmt.Sprintf(" %d random bytes at %d", n, at)
				for i := range n {
					b[at+i] = byte(rnd.Uint32())
				}
			}
			return b
		})
		s, err := Open(Options{Dir: dir})
		switch {
		case errors.Is(err, keys.ErrDamaged), errors.Is(err, keys.ErrNewerVersion):
			outcomes["refused"]++
		case err != nil:
			t.Errorf("%s: Open: %v", what, err)
		default:
			n, failed := missing(t, s)
			if n > may {
				t.Errorf("%s: %d rows are missing in silence, where %d may", what, n, may)
			}
			if failed > 0 {
				outcomes["found when read"]++
			} else {
				outcomes["whole"]++
			}
			_ = s.Close()
		}
		os.RemoveAll(dir)
	}
	t.Log(outcomes)
}

func TestLockedByAnother(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := openTest(t, dir)
	if _, err := Open(Options{Dir: dir, Create: true}); !errors.Is(err, keys.ErrLocked) {
		t.Errorf("Open of an open store: %v, want ErrLocked", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	openTest(t, dir)
}

func TestClosedToOthers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "store")
	s := openTest(t, dir)
	commitRows(t, s, "logged", 0, 10)
	private := func(when string) {
		t.Helper()
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err == nil && info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s: %s has mode %v", when, d.Name(), info.Mode())
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	private("open")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	private("closed")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	openTest(t, dir)
	private("opened again")
}

func TestCreateRefusesForeignFiles(t *testing.T) {
	dir := t.TempDir()
	touch(t, dir, "notes.txt")
	if _, err := Open(Options{Dir: dir, Create: true}); err == nil {
		t.Error("Open made a store among other files")
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: file, Create: true}); err == nil {
		t.Error("Open took a file for a directory")
	}
}
