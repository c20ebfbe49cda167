package main

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// save writes a file through outputs.
func save(t *testing.T, s *outputs, path, content string, perm fs.FileMode, replace bool) error {
	t.Helper()
	f, err := s.create(path, perm, replace)
	if err != nil {
		return err
	}
	if _, err := f.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	return f.commit()
}

func TestOutputFile(t *testing.T) {
	c := offlineCLI(t)
	var s outputs
	mode := func(name string) fs.FileMode {
		fi, err := os.Lstat(c.path(name))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Mode()
	}

	f, err := s.create(c.path("new"), 0o600, false)
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("content"))
	if _, err := os.Lstat(c.path("new")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file has its name before it is complete: %v", err)
	}
	if err := f.commit(); err != nil {
		t.Fatal(err)
	}
	f.discard() // does nothing now
	if c.read("new") != "content" || mode("new") != 0o600 {
		t.Errorf("%q with mode %v", c.read("new"), mode("new"))
	}
	c.onlyFiles("new")

	// A file that exists is refused, or replaced and keeps its permissions.
	if err := os.Chmod(c.path("new"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := save(t, &s, c.path("new"), "other", 0o600, false); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over an existing file: %v", err)
	}
	if c.read("new") != "content" {
		t.Errorf("a refused file became %q", c.read("new"))
	}
	if err := save(t, &s, c.path("new"), "other", 0o600, true); err != nil {
		t.Error(err)
	}
	if c.read("new") != "other" || mode("new") != 0o640 {
		t.Errorf("replaced: %q with mode %v", c.read("new"), mode("new"))
	}
	c.onlyFiles("new")

	// One that appears meanwhile is not replaced either.
	f, err = s.create(c.path("late"), 0o600, false)
	if err != nil {
		t.Fatal(err)
	}
	c.write("late", "somebody else's")
	if err := f.commit(); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over a file that came meanwhile: %v", err)
	}
	if c.read("late") != "somebody else's" {
		t.Errorf("it became %q", c.read("late"))
	}
	c.onlyFiles("new", "late")

	// A discarded file leaves what was there.
	f, err = s.create(c.path("new"), 0o600, true)
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("half"))
	f.discard()
	f.discard()
	if c.read("new") != "other" {
		t.Errorf("after discard it is %q", c.read("new"))
	}
	c.onlyFiles("new", "late")

	// A commit that fails leaves what was there.
	f, err = s.create(c.path("new"), 0o600, true)
	if err != nil {
		t.Fatal(err)
	}
	f.f.Close()
	if err := f.commit(); err == nil {
		t.Error("a file that cannot be synced was committed")
	}
	if c.read("new") != "other" {
		t.Errorf("after a failed commit it is %q", c.read("new"))
	}
	c.onlyFiles("new", "late")
	if len(s.begun) != 0 {
		t.Errorf("%d files are still begun", len(s.begun))
	}
}

func TestOutputFileReplacesRegularFilesOnly(t *testing.T) {
	c := offlineCLI(t)
	var s outputs
	c.write("file", "old")
	// A socket stands for devices and pipes too. Only what is the test's own is
	// at risk, should the check be missing.
	lis, err := net.Listen("unix", c.path("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	for name, target := range map[string]string{"link": "file", "dangling": "nothing", "to-directory": ".", "to-socket": "socket"} {
		if err := os.Symlink(target, c.path(name)); err != nil {
			t.Fatal(err)
		}
		if err := save(t, &s, c.path(name), "new", 0o600, false); !errors.Is(err, fs.ErrExist) {
			t.Errorf("over %s: %v", name, err)
		}
	}
	if err := save(t, &s, c.path("link"), "new", 0o600, true); err != nil {
		t.Error(err)
	}
	if fi, err := os.Lstat(c.path("link")); err != nil || fi.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("the link is gone: %v %v", fi, err)
	}
	if c.read("file") != "new" {
		t.Errorf("behind the link is %q", c.read("file"))
	}
	for _, name := range []string{"dangling", "to-directory", "to-socket", "socket", "."} {
		if err := save(t, &s, c.path(name), "new", 0o600, true); err == nil {
			t.Errorf("%s was replaced", name)
		}
	}
	if fi, err := os.Stat(c.path("socket")); err != nil || fi.Mode()&fs.ModeSocket == 0 {
		t.Errorf("the socket is %v, %v", fi, err)
	}
	if err := save(t, &s, filepath.Join(c.dir, "no", "where"), "new", 0o600, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in a directory that is missing: %v", err)
	}
	c.onlyFiles("file", "link", "dangling", "to-directory", "to-socket", "socket")
}

func TestAbandonGivesUpEveryFile(t *testing.T) {
	c := offlineCLI(t)
	var s outputs
	c.write("kept", "old")
	for _, name := range []string{"kept", "new"} {
		f, err := s.create(c.path(name), 0o600, true)
		if err != nil {
			t.Fatal(err)
		}
		f.Write([]byte("half"))
	}
	s.abandon()
	c.onlyFiles("kept")
	if c.read("kept") != "old" {
		t.Errorf("it became %q", c.read("kept"))
	}
	if s.mu.TryLock() {
		t.Error("a file could still be begun or completed")
	}
}
