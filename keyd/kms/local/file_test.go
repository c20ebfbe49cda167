package local

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/kmstest"
)

func TestOpenMissing(t *testing.T) {
	o, _ := withKeyfile(t)
	o.Create = false
	if _, err := open(o, cheap); !errors.Is(err, ErrMissing) {
		t.Fatalf("no file: %v", err)
	}
	if _, err := os.Lstat(o.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal("Open made a file that it was not told to make")
	}
	o.Path = filepath.Join(o.Path, "elsewhere", "roots")
	o.Create = true
	if _, err := open(o, cheap); !errors.Is(err, ErrMissing) {
		t.Fatalf("no directory: %v", err)
	}
}

func TestOpenOptions(t *testing.T) {
	good, _ := withKeyfile(t)
	for name, edit := range map[string]func(*Options){
		"no path":                       func(o *Options) { o.Path = "" },
		"no secret":                     func(o *Options) { o.Keyfile = "" },
		"both secrets":                  func(o *Options) { o.Passphrase = []byte("p") },
		"empty passphrase":              func(o *Options) { o.Keyfile, o.Passphrase = "", []byte{} },
		"negative waiting":              func(o *Options) { o.Waiting = -time.Second },
		"waiting of a second and a bit": func(o *Options) { o.Waiting = time.Second + 1 },
	} {
		o := good
		edit(&o)
		if k, err := open(o, cheap); err == nil {
			k.Close()
			t.Errorf("%s: Open succeeded", name)
		}
	}
	good.Waiting = 0
	if got := mustOpen(t, good).Waiting(); got != DefaultWaiting {
		t.Errorf("Waiting = %v", got)
	}
}

func TestWrongSecret(t *testing.T) {
	byKey, _ := withKeyfile(t)
	mustOpen(t, byKey)
	byPhrase := byKey
	byPhrase.Path += "-2"
	byPhrase.Keyfile, byPhrase.Passphrase = "", []byte("right")
	mustOpen(t, byPhrase)
	otherKey := filepath.Join(filepath.Dir(byKey.Keyfile), "key-2")
	if err := GenerateKeyfile(otherKey); err != nil {
		t.Fatal(err)
	}
	with := func(o Options, keyfile, passphrase string) Options {
		o.Keyfile, o.Passphrase = keyfile, []byte(passphrase)
		return o
	}
	for name, o := range map[string]Options{
		"another keyfile":                  with(byKey, otherKey, ""),
		"another passphrase":               with(byPhrase, "", "wrong"),
		"a passphrase with a space":        with(byPhrase, "", "right "),
		"a passphrase instead of the file": with(byKey, "", "right"),
		"a keyfile instead of the phrase":  with(byPhrase, byKey.Keyfile, ""),
	} {
		before, err := os.ReadFile(o.Path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = open(o, cheap)
		if !errors.Is(err, ErrWrongSecret) || errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
		if after, _ := os.ReadFile(o.Path); !bytes.Equal(before, after) {
			t.Errorf("%s: the file changed", name)
		}
	}
	for _, o := range []Options{byKey, byPhrase} {
		mustOpen(t, o)
	}
}

func TestDamagedFileOnDisk(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	if _, err := k.Create(t.Context(), 1, kmstest.Request()); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	k.Close()
	flipped := bytes.Clone(good)
	flipped[len(flipped)/2] ^= 1
	for name, bad := range map[string][]byte{
		"empty": {}, "flipped": flipped, "cut": good[:len(good)-1], "long": make([]byte, maxFile+2),
	} {
		if err := os.WriteFile(o.Path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := open(o, cheap); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
		if after, _ := os.ReadFile(o.Path); !bytes.Equal(bad, after) {
			t.Errorf("%s: Open changed a file that it cannot read", name)
		}
	}
}

// Of those that make a keyfile at the same time one does, and each of them, told
// that it is there, reads it.
func TestKeyfileMadeAtOnce(t *testing.T) {
	dir := privateDir(t)
	for round := range 50 {
		path := filepath.Join(dir, fmt.Sprint("key", round))
		var made atomic.Int32
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				err := GenerateKeyfile(path)
				if err == nil {
					made.Add(1)
				} else if !errors.Is(err, fs.ErrExist) {
					t.Errorf("making it: %v", err)
				}
				if _, err := readKeyfile(path); err != nil {
					t.Errorf("reading it: %v", err)
				}
			})
		}
		wg.Wait()
		if n := made.Load(); n != 1 {
			t.Fatalf("%d made it", n)
		}
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 50 {
		t.Errorf("%d files of 50 keyfiles, %v", len(names), err)
	}
}

func TestKeyfile(t *testing.T) {
	dir := privateDir(t)
	path := filepath.Join(dir, "key")
	if err := GenerateKeyfile(path); err != nil {
		t.Fatal(err)
	}
	if err := GenerateKeyfile(path); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("over an existing keyfile: %v", err)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode() != 0o600 {
		t.Fatalf("mode %v, %v", fi.Mode(), err)
	}
	line, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"empty":       "",
		"cut":         string(line[:len(line)-2]) + "\n",
		"no newline":  string(line[:len(line)-1]),
		"two lines":   string(line) + "\n",
		"CRLF":        string(line[:len(line)-1]) + "\r\n",
		"capitals":    keyfilePrefix + strings.Repeat("AB", keySize) + "\n",
		"not hex":     keyfilePrefix + strings.Repeat("zz", keySize) + "\n",
		"a newer one": "lethe-keyfile-v2:" + strings.Repeat("ab", keySize) + "\n",
		"megabytes":   strings.Repeat("a", 1<<22),
	} {
		bad2 := filepath.Join(dir, "bad")
		if err := os.WriteFile(bad2, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := open(Options{Path: filepath.Join(dir, "roots"), Keyfile: bad2, Create: true}, cheap)
		if !errors.Is(err, ErrBadKeyfile) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && bad != "" && strings.Contains(err.Error(), strings.Repeat("ab", 8)) {
			t.Errorf("%s: the error shows the keyfile", name)
		}
	}
	if _, err := open(Options{Path: filepath.Join(dir, "roots"), Keyfile: filepath.Join(dir, "none"), Create: true}, cheap); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no keyfile: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "roots")); err == nil {
		t.Error("a root file was made without a keyfile")
	}
}

func TestUnsafePermissions(t *testing.T) {
	setup := func(t *testing.T) (o Options, dir string) {
		o, _ = withKeyfile(t)
		dir = filepath.Join(filepath.Dir(o.Path), "above", "dir")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		o.Path = filepath.Join(dir, "roots")
		keyfile := filepath.Join(dir, "key")
		if err := os.Rename(o.Keyfile, keyfile); err != nil {
			t.Fatal(err)
		}
		o.Keyfile = keyfile
		mustOpen(t, o).Close()
		return o, dir
	}
	chmod := func(t *testing.T, path string, mode uint32) {
		if err := unix.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	symlink := func(t *testing.T, path string) {
		if err := errors.Join(os.Rename(path, path+".real"), os.Symlink(path+".real", path)); err != nil {
			t.Fatal(err)
		}
	}
	for name, spoil := range map[string]func(t *testing.T, o Options, dir string){
		"root file readable by the group":  func(t *testing.T, o Options, _ string) { chmod(t, o.Path, 0o640) },
		"root file readable by all":        func(t *testing.T, o Options, _ string) { chmod(t, o.Path, 0o604) },
		"root file writable by all":        func(t *testing.T, o Options, _ string) { chmod(t, o.Path, 0o602) },
		"keyfile readable by the group":    func(t *testing.T, o Options, _ string) { chmod(t, o.Keyfile, 0o640) },
		"keyfile readable by all":          func(t *testing.T, o Options, _ string) { chmod(t, o.Keyfile, 0o644) },
		"directory writable by the group":  func(t *testing.T, _ Options, dir string) { chmod(t, dir, 0o770) },
		"directory writable by all":        func(t *testing.T, _ Options, dir string) { chmod(t, dir, 0o707) },
		"directory sticky, of all":         func(t *testing.T, _ Options, dir string) { chmod(t, dir, 0o1777) },
		"directory above writable":         func(t *testing.T, _ Options, dir string) { chmod(t, filepath.Dir(dir), 0o777) },
		"root file a link":                 func(t *testing.T, o Options, _ string) { symlink(t, o.Path) },
		"keyfile a link":                   func(t *testing.T, o Options, _ string) { symlink(t, o.Keyfile) },
		"link to a directory in a bad one": func(t *testing.T, o Options, dir string) { symlink(t, dir); chmod(t, filepath.Dir(dir), 0o777) },
		"root file a pipe": func(t *testing.T, o Options, _ string) {
			if err := errors.Join(os.Remove(o.Path), unix.Mkfifo(o.Path, 0o600)); err != nil {
				t.Fatal(err)
			}
		},
		"lock file a link": func(t *testing.T, o Options, _ string) { symlink(t, o.Path+".lock") },
	} {
		t.Run(name, func(t *testing.T) {
			o, dir := setup(t)
			mustOpen(t, o).Close()
			spoil(t, o, dir)
			if _, err := open(o, cheap); !errors.Is(err, ErrUnsafe) {
				t.Fatalf("Open: %v", err)
			}
		})
	}
	if os.Geteuid() == 0 { // only root can give a file away
		for name, path := range map[string]func(o Options, dir string) string{
			"root file of another user":       func(o Options, _ string) string { return o.Path },
			"keyfile of another user":         func(o Options, _ string) string { return o.Keyfile },
			"directory of another user":       func(_ Options, dir string) string { return dir },
			"directory above of another user": func(_ Options, dir string) string { return filepath.Dir(dir) },
		} {
			t.Run(name, func(t *testing.T) {
				o, dir := setup(t)
				if err := os.Chown(path(o, dir), 4242, 4242); err != nil {
					t.Fatal(err)
				}
				if _, err := open(o, cheap); !errors.Is(err, ErrUnsafe) {
					t.Fatalf("Open: %v", err)
				}
			})
		}
		t.Run("link of another user", func(t *testing.T) {
			o, dir := setup(t)
			symlink(t, dir)
			mustOpen(t, o).Close()
			if err := os.Lchown(dir, 4242, 4242); err != nil {
				t.Fatal(err)
			}
			if _, err := open(o, cheap); !errors.Is(err, ErrUnsafe) {
				t.Fatalf("Open: %v", err)
			}
		})
	}
	t.Run("fine", func(t *testing.T) {
		o, dir := setup(t)
		chmod(t, dir, 0o755)
		chmod(t, filepath.Dir(dir), 0o1777)
		if err := os.Symlink(dir, filepath.Join(filepath.Dir(filepath.Dir(dir)), "link")); err != nil {
			t.Fatal(err)
		}
		o.Path = filepath.Join(filepath.Dir(filepath.Dir(dir)), "link", "roots")
		mustOpen(t, o)
	})
}

// While it is open, the file may vanish, be damaged, or be put back from a backup.
func TestFileChangesUnderneath(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	id, err := k.Create(t.Context(), 1, kmstest.Request())
	if err != nil {
		t.Fatal(err)
	}
	older, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.ScheduleDestruction(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	newer, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	// A sibling of the same sequence number.
	sibling := bytes.Clone(newer)
	sec := k.secret
	st, err := openFile(sibling, sec)
	if err != nil {
		t.Fatal(err)
	}
	st.find(id).state, st.find(id).destroyAt = keys.RootEnabled, 0
	if sibling, err = sec.seal(k.head, st); err != nil {
		t.Fatal(err)
	}
	other := o
	other.Path += "-other"
	mustOpen(t, other)
	foreign, err := os.ReadFile(other.Path)
	if err != nil {
		t.Fatal(err)
	}
	put := func(data []byte) {
		t.Helper()
		if err := os.WriteFile(o.Path+".put", data, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(o.Path+".put", o.Path); err != nil {
			t.Fatal(err)
		}
	}
	for name, spoil := range map[string]func(){
		"put back from a backup": func() { put(older) },
		"forked":                 func() { put(sibling) },
		"another root file":      func() { put(foreign) },
		"damaged":                func() { put(newer[:len(newer)-1]) },
		"open to others":         func() { put(newer); os.Chmod(o.Path, 0o644) },
	} {
		spoil()
		if _, err := k.Describe(t.Context(), id); !errors.Is(err, keys.ErrKMSUnavailable) {
			t.Errorf("%s: Describe: %v", name, err)
		}
		if _, err := k.Wrap(t.Context(), id, make([]byte, 32), keys.EncryptionContext{}); !errors.Is(err, keys.ErrKMSUnavailable) {
			t.Errorf("%s: Wrap: %v", name, err)
		}
		if _, err := k.Create(t.Context(), 2, kmstest.Request()); !errors.Is(err, keys.ErrKMSUnavailable) {
			t.Errorf("%s: Create: %v", name, err)
		}
	}
	put(newer)
	if d, err := k.Describe(t.Context(), id); err != nil || d.State != keys.RootPending {
		t.Fatalf("with the right file back: %+v, %v", d, err)
	}
}

// A reader that meets a replacement reads the old version or the new one, and
// never the zeros that overwrite the old one.
func TestReadWhileReplaced(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 60 {
			if _, err := k.Create(t.Context(), uint32(i), kmstest.Request()); err != nil {
				t.Errorf("Create: %v", err)
				return
			}
		}
	}()
	for n := 0; ; n++ {
		v, err := readRoots(k.path)
		if err != nil {
			t.Fatalf("read %d: %v", n, err)
		}
		v.file.Close()
		if _, _, err := parseFile(v.data); err != nil {
			t.Fatalf("read %d: %v", n, err)
		}
		select {
		case <-done:
			return
		default:
		}
	}
}

// A write that fails changes nothing, and nothing is claimed.
func TestWriteFails(t *testing.T) {
	o, c := withKeyfile(t)
	k := mustOpen(t, o)
	id, err := k.Create(t.Context(), 1, kmstest.Request())
	if err != nil {
		t.Fatal(err)
	}
	at, err := k.ScheduleDestruction(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	// A directory that is not empty takes the temporary file's name.
	if err := os.MkdirAll(filepath.Join(tempName(o.Path), "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.Advance(at.Sub(c.Now()))
	if d, err := k.Describe(t.Context(), id); !errors.Is(err, keys.ErrKMSUnavailable) || d.State != 0 {
		t.Fatalf("Describe of a root whose destruction cannot be written: %+v, %v", d, err)
	}
	if err := k.Cancel(t.Context(), id); !errors.Is(err, keys.ErrKMSUnavailable) {
		t.Fatalf("Cancel: %v", err)
	}
	if after, _ := os.ReadFile(o.Path); !bytes.Equal(before, after) {
		t.Fatal("the file changed")
	}
	if err := os.RemoveAll(tempName(o.Path)); err != nil {
		t.Fatal(err)
	}
	if d, err := k.Describe(t.Context(), id); err != nil || d.State != keys.RootDestroyed {
		t.Fatalf("Describe = %+v, %v", d, err)
	}
}

// A clock that jumps back after the end of the waiting period revives nothing.
func TestClockJumpsBack(t *testing.T) {
	o, c := withKeyfile(t)
	k := mustOpen(t, o)
	id, err := k.Create(t.Context(), 1, kmstest.Request())
	if err != nil {
		t.Fatal(err)
	}
	at, err := k.ScheduleDestruction(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	c.Advance(at.Sub(c.Now()))
	if d, err := k.Describe(t.Context(), id); err != nil || d.State != keys.RootDestroyed {
		t.Fatalf("Describe = %+v, %v", d, err)
	}
	c.Advance(-24 * time.Hour)
	o.Create = false
	for _, k := range []*KMS{k, mustOpen(t, o)} {
		if d, err := k.Describe(t.Context(), id); err != nil || d.State != keys.RootDestroyed {
			t.Fatalf("Describe = %+v, %v", d, err)
		}
		if err := k.Cancel(t.Context(), id); !errors.Is(err, keys.ErrRootNotUsable) {
			t.Fatalf("Cancel: %v", err)
		}
	}
	c.Advance(-100 * 365 * 24 * time.Hour)
	if _, err := k.Create(t.Context(), 2, kmstest.Request()); !errors.Is(err, keys.ErrKMSUnavailable) {
		t.Fatalf("Create before 1970: %v", err)
	}
}

// The version that a write replaces is overwritten, unless it has a second name.
func TestReplacedFileIsOverwritten(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	content := func(f *os.File) []byte {
		b, err := os.ReadFile("/dev/fd/" + itoa(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	old, err := os.Open(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	before := content(old)
	if bytes.Equal(before, make([]byte, len(before))) {
		t.Fatal("the file is zeros already")
	}
	if _, err := k.Create(t.Context(), 1, kmstest.Request()); err != nil {
		t.Fatal(err)
	}
	if after := content(old); !bytes.Equal(after, make([]byte, len(before))) {
		t.Fatal("the replaced file still holds its bytes")
	}
	if err := os.Link(o.Path, o.Path+".backup"); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Create(t.Context(), 2, kmstest.Request()); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(o.Path + ".backup"); !bytes.Equal(got, want) {
		t.Fatal("a hard link to the replaced file was overwritten")
	}
}

func TestClose(t *testing.T) {
	o, _ := withKeyfile(t)
	k := mustOpen(t, o)
	id, err := k.Create(t.Context(), 1, kmstest.Request())
	if err != nil {
		t.Fatal(err)
	}
	r := k.cur.find(id)
	for range 2 {
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if r.key != [keySize]byte{} || r.aead != nil {
		t.Error("Close left the key in memory")
	}
	for name, call := range map[string]func() error{
		"Create": func() error { _, err := k.Create(t.Context(), 1, kmstest.Request()); return err },
		"Wrap": func() error {
			_, err := k.Wrap(t.Context(), id, make([]byte, 32), keys.EncryptionContext{})
			return err
		},
		"Disable":  func() error { return k.Disable(t.Context(), id) },
		"Describe": func() error { _, err := k.Describe(t.Context(), id); return err },
	} {
		if err := call(); !errors.Is(err, ErrClosed) || !errors.Is(err, keys.ErrKMSUnavailable) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
}
