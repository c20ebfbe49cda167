package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lethe/sdk"
)

// badStart is a deployment in which something is wrong.
type badStart struct {
	name string
	// spoil changes the data directory of a stopped keyd, and may return flags.
	spoil func(t *testing.T, w *wrecks, data string) (flags []string)
	// says are words of the message by which an operator knows what is wrong.
	says []string
}

// wrecks are what things can be exchanged with: three copies of one
// deployment, of which later and sideways went on after the copy was made.
type wrecks struct {
	earlier, later, sideways, stranger string // data directories
}

// killed starts keyd and kills it, and returns its store's newest log.
func killed(t *testing.T, data string) string {
	t.Helper()
	k, err := startKeyd(t.Context(), filepath.Join(bin, "keyd"), data)
	if err != nil {
		t.Fatal(err)
	}
	k.kill()
	logs, err := filepath.Glob(filepath.Join(data, "store/*.mem"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("no logs: %v", err)
	}
	return logs[len(logs)-1]
}

var badStarts = []badStart{
	{"the store is locked by another keyd", func(t *testing.T, _ *wrecks, data string) []string {
		k, err := startKeyd(t.Context(), filepath.Join(bin, "keyd"), data)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(k.kill)
		return []string{"--listen", "unix:" + filepath.Join(data, "second.sock")}
	}, []string{"locked", "store"}},
	{"the manifest is garbled", overwrite("store/MANIFEST", 20), []string{"damaged", "store/MANIFEST"}},
	{"the manifest is empty", truncate("store/MANIFEST", 0), []string{"damaged", "store/MANIFEST"}},
	{"the manifest is missing", remove("store/MANIFEST"), []string{"damaged", "store/MANIFEST"}},
	{"the key registry is garbled", overwrite("store/KEYREGISTRY", 20), []string{"damaged", "store/KEYREGISTRY"}},
	{"a table is truncated", truncate("store/*.sst", 100), []string{"damaged", ".sst"}},
	{"a table is garbled", overwrite("store/*.sst", 60), []string{"damaged", ".sst"}},
	{"a table is missing", remove("store/*.sst"), []string{"damaged", ".sst"}},
	{"the newest log is missing after a kill", func(t *testing.T, _ *wrecks, data string) []string {
		if err := os.Remove(killed(t, data)); err != nil {
			t.Fatal(err)
		}
		return nil
	}, []string{"damaged", ".mem", "is missing"}},
	{"the newest log is empty after a kill", func(t *testing.T, _ *wrecks, data string) []string {
		if err := os.Truncate(killed(t, data), 0); err != nil {
			t.Fatal(err)
		}
		return nil
	}, []string{"damaged", ".mem", "its end is missing"}},
	{"the store is of a newer version", func(t *testing.T, _ *wrecks, data string) []string {
		// The manifest begins with four bytes of magic and our version.
		edit(t, filepath.Join(data, "store/MANIFEST"), func(b []byte) { b[5]++ })
		return nil
	}, []string{"newer version"}},
	{"the store's directory is empty beside an anchor", empty("store"), []string{"no key store", "anchor", "remembers"}},
	{"the store's directory is missing beside an anchor", remove("store"), []string{"no key store", "anchor", "remembers"}},
	{"the store is an older copy", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.earlier, "store"), filepath.Join(data, "store"))
		return nil
	}, []string{"behind", "anchor"}},
	{"the store is another deployment's", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.stranger, "store"), filepath.Join(data, "store"))
		return nil
	}, []string{"KMS knows no such root"}},

	{"the KMS file is missing", remove("kms/roots"), []string{"kms/roots", "no root file"}},
	{"the KMS file is damaged", overwrite("kms/roots", 80), []string{"kms/roots"}},
	{"the KMS file is truncated", truncate("kms/roots", 50), []string{"kms/roots"}},
	{"the KMS file is another deployment's", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.stranger, "kms"), filepath.Join(data, "kms"))
		return nil
	}, []string{"root"}},
	{"the keyfile is another's", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.stranger, "kms/keyfile"), filepath.Join(data, "kms/keyfile"))
		return nil
	}, []string{"kms/roots", "wrong"}},
	{"the keyfile is missing", remove("kms/keyfile"), []string{"kms/keyfile"}},
	{"the keyfile can be read by others", func(t *testing.T, _ *wrecks, data string) []string {
		if err := os.Chmod(filepath.Join(data, "kms/keyfile"), 0o644); err != nil {
			t.Fatal(err)
		}
		return nil
	}, []string{"kms/keyfile"}},
	{"a passphrase is given instead of the keyfile", func(t *testing.T, _ *wrecks, data string) []string {
		file := filepath.Join(data, "passphrase")
		if err := os.WriteFile(file, []byte("open sesame\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{"--kms-passphrase-file", file}
	}, []string{"kms/roots"}},

	{"the anchor's directory is missing", remove("anchor"), []string{"anchor", "no such"}},
	{"the anchor is empty", empty("anchor"), []string{"anchor is empty"}},
	{"the anchor is another deployment's", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.stranger, "anchor"), filepath.Join(data, "anchor"))
		return nil
	}, []string{"another ledger"}},
	{"the anchor is another history's, longer", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.sideways, "anchor"), filepath.Join(data, "anchor"))
		return nil
	}, []string{"anchor"}},
	{"the anchor is another history's, as long", func(t *testing.T, w *wrecks, data string) []string {
		replace(t, filepath.Join(w.sideways, "anchor"), filepath.Join(data, "anchor"))
		if err := os.Remove(newestObject(t, data)); err != nil {
			t.Fatal(err)
		}
		return nil
	}, []string{"another history"}},
	{"the anchor's newest object is truncated", func(t *testing.T, _ *wrecks, data string) []string {
		shorten(t, newestObject(t, data), 40)
		return nil
	}, []string{"anchor", "damaged"}},
	{"the anchor's newest object is empty", func(t *testing.T, _ *wrecks, data string) []string {
		shorten(t, newestObject(t, data), 0)
		return nil
	}, []string{"anchor", "damaged"}},
	{"the anchor's newest object is edited", func(t *testing.T, _ *wrecks, data string) []string {
		edit(t, newestObject(t, data), func(b []byte) { b[len(b)/2] ^= 1 })
		return nil
	}, []string{"anchor", "damaged"}},
	{"an older object of the anchor is edited", func(t *testing.T, _ *wrecks, data string) []string {
		edit(t, one(t, data, "anchor/objects/*/*/*/*/*"), func(b []byte) { b[len(b)/2] ^= 1 })
		return nil
	}, []string{"anchor", "damaged"}},
	{"an older object of the anchor is missing", func(t *testing.T, _ *wrecks, data string) []string {
		if err := os.Remove(one(t, data, "anchor/objects/*/*/*/*/*")); err != nil {
			t.Fatal(err)
		}
		return nil
	}, []string{"anchor", "damaged"}},
	{"the anchor's origin is missing", remove("anchor/origin"), []string{"anchor", "origin"}},
	{"the anchor can be read by others", func(t *testing.T, _ *wrecks, data string) []string {
		if err := os.Chmod(filepath.Join(data, "anchor"), 0o755); err != nil {
			t.Fatal(err)
		}
		return nil
	}, []string{"anchor", "0700"}},

	{"the anchor lies inside the store", func(t *testing.T, _ *wrecks, data string) []string {
		return []string{"--anchor", filepath.Join(data, "store/anchor")}
	}, []string{"inside the key store"}},
	{"it is to listen to other machines", func(*testing.T, *wrecks, string) []string {
		return []string{"--listen", "0.0.0.0:0"}
	}, []string{"loopback"}},
	{"its metrics are to be served to other machines", func(*testing.T, *wrecks, string) []string {
		return []string{"--metrics", "0.0.0.0:0"}
	}, []string{"loopback"}},
	{"it is not said to be for development", func(*testing.T, *wrecks, string) []string {
		return []string{"--dev=false"}
	}, []string{"--dev"}},
}

// TestGuaranteePlainSpeechOfBadStarts starts keyd where something is wrong: it
// refuses, ends with an exit code, says what is wrong, and says of nobody that
// they were erased. G2, G8.
func TestGuaranteePlainSpeechOfBadStarts(t *testing.T) {
	d := deploy(t)
	d.tenant("acme", time.Minute)
	c := d.client()
	var blobs [][]byte
	for i := range 3 {
		b, err := c.Seal(t.Context(), of("acme", fmt.Sprint("subject ", i)), []byte("something"))
		if err != nil {
			t.Fatal(err)
		}
		blobs = append(blobs, b)
	}
	erase := func(subject string) {
		t.Helper()
		if _, err := d.client().DestroyKey(t.Context(), destroyRequest("acme", subject, "erase "+subject)); err != nil {
			t.Fatal(err)
		}
	}
	erase("subject 0")
	d.stop()
	w := &wrecks{}
	w.earlier = copyOf(t, d.data)
	// Two futures of one past.
	d.start()
	erase("subject 1")
	d.stop()
	w.later, d.data = d.data, copyOf(t, w.earlier)
	d.start()
	erase("subject 2")
	erase("subject 3")
	d.stop()
	w.sideways = d.data
	s := deploy(t)
	s.tenant("acme", time.Minute)
	for _, subject := range []string{"1", "2", "3", "4", "5", "6"} {
		if _, err := s.client().DestroyKey(t.Context(), destroyRequest("acme", subject, subject)); err != nil {
			t.Fatal(err)
		}
	}
	s.stop()
	w.stranger = s.data

	for _, bad := range badStarts {
		t.Run(bad.name, func(t *testing.T) {
			data := copyOf(t, w.later)
			flags := bad.spoil(t, w, data)
			k, err := launchKeyd(filepath.Join(bin, "keyd"), data, flags...)
			if err != nil {
				t.Fatal(err)
			}
			defer k.kill()
			select {
			case <-k.exited:
			case <-time.After(time.Minute):
				t.Fatalf("it runs:\n%s", k.said())
			}
			said := k.said()
			var exit *exec.ExitError
			if !errors.As(k.err, &exit) || exit.ExitCode() != 1 {
				t.Errorf("it ended with %v; want exit code 1", k.err)
			}
			for _, word := range bad.says {
				if !strings.Contains(said, word) {
					t.Errorf("it does not say %q", word)
				}
			}
			for _, word := range []string{"panic", "goroutine", "erased"} {
				if strings.Contains(said, word) {
					t.Errorf("it says %q", word)
				}
			}
			last := said[strings.LastIndexByte(said, '\n')+1:]
			if !strings.HasPrefix(last, "keyd: ") || t.Failed() {
				t.Errorf("it said:\n%s", said)
			}
		})
	}

	// What was only in the way, and is put right, does no harm.
	data := copyOf(t, w.later)
	d.data = data
	for _, part := range []string{"anchor", "kms"} {
		if err := os.Rename(filepath.Join(data, part), filepath.Join(data, "away")); err != nil {
			t.Fatal(err)
		}
		if _, err := startKeyd(t.Context(), filepath.Join(bin, "keyd"), data); err == nil {
			t.Fatalf("it starts without its %s", part)
		}
		if err := os.RemoveAll(filepath.Join(data, part)); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(data, "away"), filepath.Join(data, part)); err != nil {
			t.Fatal(err)
		}
	}
	d.start()
	c = d.client()
	if _, err := c.Open(t.Context(), of("acme", "subject 2"), blobs[2]); err != nil {
		t.Error(err)
	}
	for i := range 2 {
		if _, err := c.Open(t.Context(), of("acme", fmt.Sprint("subject ", i)), blobs[i]); !errors.Is(err, sdk.ErrErased) {
			t.Error(err)
		}
	}
}

// TestAnchorThatLagsIsBroughtUpToDate takes the anchor's newest object away, as
// if keyd had been killed between commit and anchor: it starts, and writes it
// again.
func TestAnchorThatLagsIsBroughtUpToDate(t *testing.T) {
	d := deploy(t)
	d.tenant("acme", time.Minute)
	request := destroyRequest("acme", "somebody", "request")
	done, err := d.client().DestroyKey(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	d.stop()
	object := newestObject(t, d.data)
	before, err := os.ReadFile(object)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(object); err != nil {
		t.Fatal(err)
	}
	d.start()
	again, err := d.client().DestroyKey(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(again.Receipt, done.Receipt) {
		t.Error("another receipt")
	}
	after, err := os.ReadFile(object)
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the object is not as it was: %v", err)
	}
}

// TestPassphrase starts keyd with a passphrase for its KMS, and refuses another.
func TestPassphrase(t *testing.T) {
	dir := tempDir(t)
	file := filepath.Join(dir, "passphrase")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("correct horse battery staple\n")
	d := deploy(t, "--kms-passphrase-file", file)
	d.tenant("acme", time.Minute)
	blob, err := d.client().Seal(t.Context(), of("acme", "somebody"), []byte("something"))
	if err != nil {
		t.Fatal(err)
	}
	d.stop()
	write("wrong horse\n")
	_, err = startKeyd(t.Context(), filepath.Join(bin, "keyd"), d.data, d.flags...)
	if err == nil || !strings.Contains(err.Error(), "wrong") {
		t.Fatalf("with another passphrase: %v", err)
	}
	if strings.Contains(err.Error(), "horse") {
		t.Error("it repeats the passphrase")
	}
	write("correct horse battery staple\n")
	d.start()
	if _, err := d.client().Open(t.Context(), of("acme", "somebody"), blob); err != nil {
		t.Error(err)
	}
}

func copyOf(t testing.TB, data string) string {
	t.Helper()
	to := filepath.Join(tempDir(t), "keyd")
	replace(t, data, to)
	return to
}

// replace puts a copy of from in the place of to.
func replace(t testing.TB, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func edit(t testing.TB, file string, change func([]byte)) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	change(b)
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func shorten(t testing.TB, file string, size int64) {
	t.Helper()
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, size); err != nil {
		t.Fatal(err)
	}
}

// one returns the first file of a pattern below data.
func one(t testing.TB, data, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(data, pattern))
	if err != nil || len(files) == 0 {
		t.Fatalf("no %s: %v", pattern, err)
	}
	return files[0]
}

func newestObject(t testing.TB, data string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(data, "anchor/objects/*/*/*/*/*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no objects in the anchor: %v", err)
	}
	return files[len(files)-1]
}

func overwrite(pattern string, at int) func(*testing.T, *wrecks, string) []string {
	return func(t *testing.T, _ *wrecks, data string) []string {
		edit(t, one(t, data, pattern), func(b []byte) {
			for i := min(at, len(b)-1); i < min(at+8, len(b)); i++ {
				b[i] ^= 0x5a
			}
		})
		return nil
	}
}

func truncate(pattern string, size int64) func(*testing.T, *wrecks, string) []string {
	return func(t *testing.T, _ *wrecks, data string) []string {
		shorten(t, one(t, data, pattern), size)
		return nil
	}
}

func remove(pattern string) func(*testing.T, *wrecks, string) []string {
	return func(t *testing.T, _ *wrecks, data string) []string {
		if err := os.RemoveAll(one(t, data, pattern)); err != nil {
			t.Fatal(err)
		}
		return nil
	}
}

func empty(dir string) func(*testing.T, *wrecks, string) []string {
	return func(t *testing.T, _ *wrecks, data string) []string {
		path := filepath.Join(data, dir)
		if err := errors.Join(os.RemoveAll(path), os.Mkdir(path, 0o700)); err != nil {
			t.Fatal(err)
		}
		return nil
	}
}
