package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// TestRestoreOntoANewHost: the old host is gone, or so it seems. On another one,
// with the backup, the roots and the anchor and nothing else, keyd refuses to
// serve, replays, and then whoever was destroyed is, and whoever lives opens.
// The old keyd, which still runs or comes back, does not serve beside it.
func TestRestoreOntoANewHost(t *testing.T) {
	t.Run("the anchor in a bucket, the old keyd stands still", func(t *testing.T) {
		backend := s3mem.New()
		if err := backend.CreateBucket("anchors"); err != nil {
			t.Fatal(err)
		}
		srv := httptest.NewServer(gofakes3.New(backend, gofakes3.WithLogger(gofakes3.DiscardLog())).Server())
		t.Cleanup(srv.Close)
		for name, value := range map[string]string{
			"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "", "AWS_REGION": "", "AWS_DEFAULT_REGION": "",
			"AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull, "AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_S3": "",
		} {
			t.Setenv(name, value)
		}
		anchor := "s3://anchors/lethe?path-style=true&region=eu-central-1&endpoint=" + url.QueryEscape(srv.URL)
		newHost(t, anchor, "behind the anchor", func(old *deployment, _ []*life) func() {
			// A machine that was suspended, or cut off: its keyd knows of nothing.
			if err := old.keyd.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := old.keyd.cmd.Process.Signal(syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
			}
		})
	})
	t.Run("the anchor in a directory, the old keyd comes back", func(t *testing.T) {
		newHost(t, filepath.Join(tempDir(t), "anchor"), "locked by another keyd", func(old *deployment, _ []*life) func() {
			old.keyd.kill() // the directory is for one keyd at a time
			return func() {
				k, err := launchKeyd(filepath.Join(bin, "keyd"), old.data, old.flags...)
				if err != nil {
					t.Fatal(err)
				}
				old.keyd = k
			}
		})
	})
	t.Run("the anchor at another keyd, the old keyd serves on", func(t *testing.T) {
		shelf := filepath.Join(tempDir(t), "anchors")
		if err := os.Mkdir(shelf, 0o700); err != nil {
			t.Fatal(err)
		}
		keeper := deploy(t, "--serve-anchors", shelf)
		newHost(t, "keyd:"+keeper.keyd.target()+"/n1", "anchor", func(old *deployment, own []*life) func() {
			// It destroys one after the other, until nobody answers for it any more.
			ctx, cancel := context.WithCancel(t.Context())
			c := old.client()
			destroy := func(ctx context.Context, l *life) bool {
				l.asked = true
				done, err := c.DestroyKey(ctx, l.request())
				if err == nil {
					l.receipt = done.Receipt
				}
				return err == nil
			}
			first, last := own[0], own[len(own)-1]
			if !destroy(ctx, first) {
				t.Error("it does not destroy")
			}
			over := make(chan struct{})
			go func() {
				defer close(over)
				for _, l := range own[1 : len(own)-1] {
					if ctx.Err() != nil {
						break
					}
					destroy(ctx, l)
					time.Sleep(20 * time.Millisecond)
				}
			}()
			return func() {
				cancel()
				<-over
				if destroy(bounded(t, time.Second), last) {
					t.Error("it acknowledges a destruction although it was taken over from")
				}
			}
		})
	})
}

// newHost is TestRestoreOntoANewHost with an anchor. leave takes the old keyd
// away, or has it destroy what is its own, and returns how it comes back; beside
// is what it says when it is started beside the new one.
func newHost(t *testing.T, anchor, beside string, leave func(old *deployment, own []*life) (back func())) {
	old := deploy(t, "--anchor", anchor)
	old.tenant("acme", time.Minute)
	pinned := old.pinned()
	c := old.client()
	var lives []*life
	seal := func(subject string) *life {
		t.Helper()
		l := &life{subject: subject, plain: random(50)}
		var err error
		if l.blob, err = c.Seal(t.Context(), of("acme", l.subject), l.plain); err != nil {
			t.Fatal(err)
		}
		return l
	}
	destroy := func(c *sdk.Client, l *life) {
		t.Helper()
		l.asked = true
		done, err := c.DestroyKey(t.Context(), l.request())
		if err != nil {
			t.Fatal(err)
		}
		l.receipt = done.Receipt
	}
	for i := range 12 {
		lives = append(lives, seal(fmt.Sprint("person ", i)))
	}
	destroy(c, lives[0])
	var own []*life
	for i := range 200 {
		own = append(own, seal(fmt.Sprint("of the old one ", i)))
	}
	backup := filepath.Join(tempDir(t), "keys.backup")
	if _, said, code := old.lethe("", "backup", "-o", backup); code != 0 {
		t.Fatalf("backup: %s", said)
	}
	for _, l := range lives[1:5] {
		destroy(c, l)
	}
	lost := seal("lost with the host")
	back := leave(old, own)

	// The new host: another tree, with what the roots' and the backup's keepers have.
	host := tempDir(t)
	d := &deployment{t: t, dir: host, data: filepath.Join(host, "var", "keyd"), flags: []string{"--anchor", anchor}}
	if err := os.MkdirAll(filepath.Join(d.data, "kms"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"kms/roots", "kms/keyfile"} {
		b, err := os.ReadFile(filepath.Join(old.data, part))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d.data, part), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d.keyd = &keydProcess{address: "unix://" + filepath.Join(d.data, "keyd.sock")}
	refuses := func(d *deployment, says string) {
		t.Helper()
		k, err := startKeyd(t.Context(), filepath.Join(bin, "keyd"), d.data, d.flags...)
		if err == nil {
			k.kill()
			t.Fatalf("it serves; it was to say %q", says)
		}
		if !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "erased") {
			t.Fatalf("it was to say %q: %v", says, err)
		}
	}
	restore := func(args ...string) {
		t.Helper()
		if _, said, code := d.lethe("", append([]string{"restore", "--data", d.data, "--anchor", anchor}, args...)...); code != 0 {
			t.Fatalf("restore %v: %s", args, said)
		}
	}
	refuses(d, "no key store") // an empty host is no first start
	restore("--backup", backup)
	refuses(d, "behind the anchor")
	restore("--replay")
	d.start()
	t.Cleanup(func() { d.keyd.kill() })
	d.verify(lives, pinned)
	app := d.client()
	if _, err := app.Open(t.Context(), of("acme", lost.subject), lost.blob); !errors.Is(err, sdk.ErrUnknown) {
		t.Errorf("a key that the backup lacks: %v", err)
	}
	destroy(app, lives[5])

	// The old one: what it would say is not the last word, so it says nothing.
	stale := keydv1.NewKeyServiceClient(old.conn())
	back()
	lives = append(lives, own...)
	for begun := time.Now(); time.Since(begun) < 2*time.Second && old.keyd.alive(); time.Sleep(5 * time.Millisecond) {
		for _, l := range lives[5:7] {
			_, err := stale.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{{
				Tenant: "acme", SubjectId: []byte(l.subject), Class: "memory", Purpose: keydv1.Purpose_PURPOSE_SEAL,
			}}})
			if err == nil {
				t.Fatal("the old keyd serves beside the new one")
			}
		}
	}
	old.keyd.kill()
	refuses(old, beside)
	if b, err := os.ReadFile(old.keyd.stderr); err != nil || bytes.Contains(b, []byte("panic")) {
		t.Errorf("the old keyd: %v, %.2000s", err, b)
	}
	d.verify(lives, pinned)
	d.stop()
	refuses(old, "anchor") // it is behind, or has another history by what it did not acknowledge
	d.start()
	d.verify(lives, pinned)
}
