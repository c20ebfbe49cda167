package main

import (
	"context"
	"errors"
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

// anchored takes a keyd whose anchor is elsewhere through a destruction, a
// restart, and the return of an older store. away takes the anchor out of reach.
func anchored(t *testing.T, code string, env []string, away func(), flags ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	data := dataDir(t)
	store, older := filepath.Join(data, "store"), filepath.Join(data, "older")

	d, client := start(t, data, env, flags...)
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(ctx, &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{}
	for _, subject := range []string{"stays", "goes"} {
		var err error
		if blobs[subject], err = client.Seal(ctx, target(subject), []byte("of "+subject)); err != nil {
			t.Fatal(err)
		}
	}
	// Something is anchored before the copy, so that it is of the same ledger.
	if _, err := client.DestroyKey(ctx, sdk.DestroyRequest{Tenant: "acme", Subject: "other", RequestID: "r0", Reason: "gdpr-17"}); err != nil {
		t.Fatal(err)
	}
	client.Close()
	d.stop(t)
	if err := os.CopyFS(older, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}

	d, client = start(t, data, env, flags...)
	if _, err := client.DestroyKey(ctx, sdk.DestroyRequest{Tenant: "acme", Subject: "goes", RequestID: "r1", Reason: "gdpr-17"}); err != nil {
		t.Fatal(err)
	}
	if c := component(t, client, "anchor"); !c.Healthy || !strings.Contains(c.Detail, code) {
		t.Errorf("the anchor's status: %v", c)
	}
	client.Close()
	d.cmd.Process.Kill()
	<-d.done

	d, client = start(t, data, env, flags...)
	if plain, err := client.Open(ctx, target("stays"), blobs["stays"]); err != nil || string(plain) != "of stays" {
		t.Fatalf("the one who stays: %q, %v", plain, err)
	}
	if _, err := client.Open(ctx, target("goes"), blobs["goes"]); !errors.Is(err, sdk.ErrErased) {
		t.Fatalf("the one who was erased: %v", err)
	}
	client.Close()
	d.stop(t)
	if _, err := os.Stat(filepath.Join(data, "anchor")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory of the anchor was made: %v", err)
	}

	newer := filepath.Join(data, "newer")
	if err := errors.Join(os.Rename(store, newer), os.Rename(older, store)); err != nil {
		t.Fatal(err)
	}
	if said := fails(t, data, env, flags...); !strings.Contains(said, "behind the anchor") {
		t.Errorf("with an older store: %s", said)
	}
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	if said := fails(t, data, env, flags...); !strings.Contains(said, "remembers one") {
		t.Errorf("without a store: %s", said)
	}
	away()
	if said := fails(t, data, env, flags...); !strings.Contains(said, "anchor is unavailable") {
		t.Errorf("without store and anchor: %s", said)
	}
	if _, err := os.Stat(store); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a store was made: %v", err)
	}
	if err := os.Rename(newer, store); err != nil {
		t.Fatal(err)
	}
	if said := fails(t, data, env, flags...); !strings.Contains(said, "anchor is unavailable") {
		t.Errorf("without the anchor: %s", said)
	}
}

// TestS3Anchor has the anchor in an object store.
func TestS3Anchor(t *testing.T) {
	t.Parallel()
	where, env, away := bucket(t)
	missing := strings.Replace(where, "anchors", "missing", 1)
	if said := fails(t, dataDir(t), env, "--anchor", missing); !strings.Contains(said, "NoSuchBucket") {
		t.Errorf("with a bucket that is missing: %s", said)
	}
	anchored(t, "s3", env, away, "--anchor", where)
}

// bucket is an anchor's place in an object store that other people wrote, with
// the environment that reaches it; away takes it out of reach.
func bucket(t *testing.T) (where string, env []string, away func()) {
	t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("anchors"); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(gofakes3.New(backend, gofakes3.WithLogger(gofakes3.DiscardLog())).Server())
	t.Cleanup(func() {
		srv.Close()
		if _, err := backend.HeadObject("anchors", "lethe/one/origin"); err != nil {
			t.Error(err)
		}
	})
	return "s3://anchors/lethe/one?path-style=true&region=eu-central-1&endpoint=" + url.QueryEscape(srv.URL), []string{
		"AWS_ACCESS_KEY_ID=AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY=secret", "AWS_SESSION_TOKEN=", "AWS_REGION=", "AWS_DEFAULT_REGION=",
		"AWS_CONFIG_FILE=" + os.DevNull, "AWS_SHARED_CREDENTIALS_FILE=" + os.DevNull, "AWS_ENDPOINT_URL=", "AWS_ENDPOINT_URL_S3=",
	}, srv.Close
}

// TestKeydAnchor has the anchor at another keyd, which keeps its own in a directory.
func TestKeydAnchor(t *testing.T) {
	t.Parallel()
	data := dataDir(t)
	shelf := filepath.Join(data, "others")
	if said := fails(t, data, nil, "--serve-anchors", shelf); !strings.Contains(said, "--serve-anchors "+shelf) {
		t.Errorf("with a directory that is missing: %s", said)
	}
	if said := fails(t, data, nil, "--serve-anchors", filepath.Join(data, "store", "x")); !strings.Contains(said, "lies inside") {
		t.Errorf("with a directory in the store: %s", said)
	}
	if err := os.Mkdir(shelf, 0o700); err != nil {
		t.Fatal(err)
	}
	other, _ := start(t, data, nil, "--serve-anchors", shelf)
	address := "keyd:unix:" + filepath.Join(data, "keyd.sock")
	anchored(t, "keyd", nil, func() { other.stop(t) }, "--anchor", address+"/first")
	if names, err := os.ReadDir(shelf); err != nil || len(names) != 1 || names[0].Name() != "first" {
		t.Errorf("the other keyd keeps %v, %v", names, err)
	}
	// One that keeps none for others.
	other, client := start(t, data, nil)
	if said := fails(t, dataDir(t), nil, "--anchor", address+"/first"); !strings.Contains(said, "anchor is unavailable") {
		t.Errorf("at a keyd that keeps no anchors: %s", said)
	}
	client.Close()
	other.stop(t)
}

// TestSecondCopyS3 and TestSecondCopyKeyd: of two keyds with copies of a store,
// the one that started later serves, once the other has seen it.
func TestSecondCopyS3(t *testing.T) {
	t.Parallel()
	where, env, _ := bucket(t)
	secondCopy(t, env, "--anchor", where)
}

func TestSecondCopyKeyd(t *testing.T) {
	t.Parallel()
	data := dataDir(t)
	shelf := filepath.Join(data, "others")
	if err := os.Mkdir(shelf, 0o700); err != nil {
		t.Fatal(err)
	}
	start(t, data, nil, "--serve-anchors", shelf)
	secondCopy(t, nil, "--anchor", "keyd:unix:"+filepath.Join(data, "keyd.sock")+"/first")
}

// waits begins what a keyd says that waits for one that may still serve.
const waits = "did not say that it ended"

// TestKilledStartsAtOnce: whoever has the directory of the anchor locked waits
// for nobody, whatever it shares a file system with.
func TestKilledStartsAtOnce(t *testing.T) {
	t.Parallel()
	data := dataDir(t)
	d, _ := start(t, data, nil)
	d.cmd.Process.Kill()
	<-d.done
	d, _ = start(t, data, nil)
	if strings.Contains(d.said(), waits) {
		t.Errorf("it waits:\n%s", d.said())
	}
	d.stop(t)
}

func secondCopy(t *testing.T, env []string, flags ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	data := dataDir(t)
	d, client := start(t, data, env, flags...)
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(ctx, &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	blob, err := client.Seal(ctx, target("alice"), []byte("of alice"))
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
	d.stop(t)
	stale := copyData(t, data)
	one, ofOne := start(t, data, env, flags...)
	if strings.Contains(one.said(), waits) {
		t.Errorf("the one after an end waits:\n%s", one.said())
	}
	// One that was copied before the other began is not the store that serves.
	if said := fails(t, stale, env, flags...); !strings.Contains(said, "a copy of it has served since") || !strings.Contains(said, "restore --replay") {
		t.Errorf("a copy from before: %s", said)
	}
	one.freeze(t)
	copied := copyData(t, data)
	if err := one.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	two, ofTwo := start(t, copied, env, flags...)
	if !strings.Contains(two.said(), waits) {
		t.Errorf("the one beside it does not wait:\n%s", two.said())
	}
	if _, err := ofTwo.DestroyKey(ctx, sdk.DestroyRequest{Tenant: "acme", Subject: "alice", RequestID: "r1", Reason: "gdpr-17"}); err != nil {
		t.Fatal(err)
	}
	admin := keydv1.NewAdminServiceClient(ofOne.Conn())
	for {
		_, err := admin.CreateTenant(ctx, &keydv1.CreateTenantRequest{Tenant: "other"})
		if err != nil && strings.Contains(err.Error(), "anchor") {
			break // another one has taken it over, or holds another history
		}
		if ctx.Err() != nil {
			t.Fatalf("the older one still answers: %v", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	ofOne.Close()
	one.stop(t)
	if said := fails(t, data, env, flags...); !strings.Contains(said, "behind the anchor") {
		t.Errorf("the older one, again: %s", said)
	}
	if _, err := ofTwo.Open(ctx, target("alice"), blob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("the later one: %v", err)
	}
	ofTwo.Close()
	two.stop(t)
}

// copyData copies a keyd's store and roots.
func copyData(t *testing.T, data string) string {
	t.Helper()
	to := dataDir(t)
	for _, part := range []string{"store", "kms"} {
		if err := os.CopyFS(filepath.Join(to, part), os.DirFS(filepath.Join(data, part))); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"keyfile", "roots", "roots.lock"} {
		if err := os.Chmod(filepath.Join(to, "kms", name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func TestAnchorFlag(t *testing.T) {
	for anchor, want := range map[string]string{ // of the error; empty: none
		"a/directory": "",
		"s3/x":        "",
		"s3://b":      "",
		"s3://b/p/q":  "",
		"s3://b/p?endpoint=https://s3.example&region=r&path-style=true": "",
		"keyd:unix:/run/keyd.sock/lethe":                                "",
		"keyd:127.0.0.1:7420/lethe":                                     "",
		"s3://":                                                         "no bucket",
		"s3:///p":                                                       "no bucket",
		"s3://key:secret@b/p":                                           "credentials",
		"s3://b/p#x":                                                    "s3://BUCKET/PREFIX",
		"s3://b/p?path-style=maybe":                                     "true or false",
		"s3://b/p?pathstyle=true":                                       "there are endpoint",
		"s3://b/p?region=":                                              "with a value",
		"s3://b/p?region=a&region=b":                                    "once",
		"keyd:/x":                                                       "ADDRESS/NAME",
		"keyd:127.0.0.1:7420":                                           "ADDRESS/NAME",
		"keyd:127.0.0.1:7420/":                                          "ADDRESS/NAME",
		"keyd:127.0.0.1:7420/UPPER":                                     "1 to 64 bytes",
		"keyd:127.0.0.1:7420/..":                                        "1 to 64 bytes",
	} {
		c := command()
		c.SetArgs([]string{"--anchor", anchor})
		err := c.Execute()
		if want == "" {
			want = "or --dev, for development" // said last, before anything is opened
		}
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("--anchor %s: %v; want %q", anchor, err, want)
		}
	}
}
