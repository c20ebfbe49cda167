package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// As OPERATIONS says of a damaged anchor: the newest object, removed, is written
// again by the keyd of the store that served last. An older copy of that store
// is refused still.
func TestNewestObjectIsWrittenAgain(t *testing.T) {
	data := dataDir(t)
	d, client := start(t, data, nil)
	if _, err := keydv1.NewAdminServiceClient(client.Conn()).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	destroy := func(client *sdk.Client, id string) []byte {
		t.Helper()
		res, err := client.DestroyKey(t.Context(), sdk.DestroyRequest{Tenant: "acme", Subject: id, RequestID: id, Reason: "gdpr-17"})
		if err != nil {
			t.Fatal(err)
		}
		return res.Receipt
	}
	destroy(client, "first")
	d.stop(t)
	older := filepath.Join(t.TempDir(), "store")
	if err := os.CopyFS(older, os.DirFS(filepath.Join(data, "store"))); err != nil {
		t.Fatal(err)
	}
	d, client = start(t, data, nil)
	receipt := destroy(client, "second")
	d.stop(t)

	var objects []string
	for depth := "*"; len(objects) == 0; depth += "/*" {
		objects, _ = filepath.Glob(filepath.Join(data, "anchor/objects", depth))
		objects = slices.DeleteFunc(objects, func(name string) bool { fi, err := os.Stat(name); return err != nil || fi.IsDir() })
	}
	newest := slices.Max(objects)
	whole, err := os.ReadFile(newest)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(newest, int64(len(whole)/2)); err != nil {
		t.Fatal(err)
	}
	if said := fails(t, data, nil); !strings.Contains(said, "anchor is damaged") || !strings.Contains(said, newest) {
		t.Errorf("it says %s", said)
	}
	if err := os.Remove(newest); err != nil {
		t.Fatal(err)
	}
	if said := fails(t, data, nil, "--store", older); !strings.Contains(said, "behind") {
		t.Errorf("on an older copy it says %s", said)
	}
	_, client = start(t, data, nil)
	if c := component(t, client, "anchor"); !c.Healthy {
		t.Errorf("the anchor is %v", c)
	}
	if again := destroy(client, "second"); !bytes.Equal(again, receipt) {
		t.Error("the receipt is another")
	}
	if _, err := os.Stat(newest); err != nil {
		t.Errorf("the object was not written again: %v", err)
	}
}
