package main

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"lethe/sdk/envelope"
)

func TestInspect(t *testing.T) {
	c := newCLI(t)
	for _, n := range []int{0, 1, 100, streamFrom - 1, streamFrom, 16*segmentSize - 16*segmentTagSize - streamHeaderSize, 2 << 20} {
		for _, bound := range [][]string{nil, {"--context", "row=7"}} {
			sealed := c.object(pattern(n), append(append(append([]string{"seal"}, whose...), bound...), "--force", "-o", c.path("blob"))...)
			blob := c.read("blob")
			for _, v := range []map[string]any{c.object(blob, "inspect"), c.object("", "inspect", c.path("blob"))} {
				if v["plaintext_bytes"] != fmt.Sprint(n) || v["blob_bytes"] != fmt.Sprint(len(blob)) {
					t.Errorf("%d bytes of plaintext in %d: %v", n, len(blob), v)
				}
				if v["form"] != sealed["form"] || v["bucket"] != sealed["bucket"] || v["class_number"] != sealed["class_number"] ||
					v["context_bound"] != (bound != nil) || v["key_ids"].([]any)[0] != sealed["key_id"] || v["policy"] != "single" {
					t.Errorf("it was sealed so: %v, and is inspected so: %v", sealed, v)
				}
			}
		}
	}
}

// Blobs for several.
func TestInspectForSeveral(t *testing.T) {
	c := offlineCLI(t)
	keys := []*envelope.Key{
		{ID: envelope.KeyID{1}, Class: 7, Bucket: 86400}, {ID: envelope.KeyID{2}, Class: 7, Bucket: 86400},
	}
	for _, policy := range []envelope.Policy{envelope.All, envelope.Any} {
		s, err := envelope.NewMultiSealer(policy, keys, envelope.Options{})
		if err != nil {
			t.Fatal(err)
		}
		blob, err := s.Append(nil, []byte("plain"), envelope.Context{})
		if err != nil {
			t.Fatal(err)
		}
		v := c.object(string(blob), "inspect")
		if v["policy"] != policy.String() || v["plaintext_bytes"] != "5" || len(v["key_ids"].([]any)) != 2 || v["bucket"] != "1970-01-02T00:00:00Z" {
			t.Errorf("%v: %v", policy, v)
		}
		out := c.ok(string(blob), "inspect")
		for _, id := range []string{"01000000000000000000000000000000", "02000000000000000000000000000000"} {
			if !strings.Contains(out, id) {
				t.Errorf("%v: it does not name key %s:\n%s", policy, id, out)
			}
		}
	}
}

func TestInspectOfForgedHeaders(t *testing.T) {
	c := offlineCLI(t)
	header := func(h envelope.Header) string {
		b, err := h.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, form := range []envelope.Form{envelope.OneShot, envelope.Stream} {
		far := header(envelope.Header{Form: form, Policy: envelope.Single, Bucket: 1<<64 - 1, Recipients: make([]envelope.KeyID, 1)})
		v := c.object(far, "inspect")
		if v["bucket"] != nil || v["bucket_unix"] != "18446744073709551615" || v["plaintext_bytes"] != nil {
			t.Errorf("%v: %v", form, v)
		}
		out := c.ok(far, "inspect")
		if !strings.Contains(out, "18446744073709551615 s after 1970") || !strings.Contains(out, "too short") {
			t.Errorf("%v:\n%s", form, out)
		}
		for i := range far {
			if r := c.run(far[:i], "inspect"); r.code != 20 && r.code != 22 || r.out != "" {
				t.Errorf("%v, the first %d bytes: exit code %d", form, i, r.code)
			}
		}
	}
}

// zeros is an input of n zero bytes after head, read in pieces as a pipe is.
func zeros(head string, n int64) io.Reader {
	return io.MultiReader(strings.NewReader(head), io.LimitReader(zeroReader{}, n))
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestInspectOfALongPipeTakesLittleMemory(t *testing.T) {
	c := offlineCLI(t)
	h := envelope.Header{Form: envelope.Stream, Policy: envelope.Single, Recipients: make([]envelope.KeyID, 1)}
	head, err := h.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	inspect := func(n int64) uint64 {
		c.app = func(a *app) { a.in = zeros(string(head), n) }
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if v := c.object("", "inspect"); v["blob_bytes"] != fmt.Sprint(int64(len(head))+n) {
			t.Errorf("%d bytes: %v", n, v)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	if few, many := inspect(1<<10), inspect(64<<20); many > few+1<<20 {
		t.Errorf("%d bytes are allocated for 1 KiB, and %d for 64 MiB", few, many)
	}
}

func FuzzInspect(f *testing.F) {
	f.Add([]byte("\xC1Lth\x01\x11"))
	f.Add([]byte(""))
	h := envelope.Header{Form: envelope.Stream, Policy: envelope.Any, Bound: true, Recipients: []envelope.KeyID{{1}, {2}}, Wrapped: make([][envelope.WrappedKeySize]byte, 2)}
	b, err := h.AppendBinary(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &cli{t: t, dir: "."}
		r := c.run(string(b), "inspect", "--json")
		switch r.code {
		case 0:
			if c.decode(r.out)["blob_bytes"] != fmt.Sprint(len(b)) {
				t.Errorf("%d bytes: %s", len(b), r.out)
			}
		case 20, 21, 22, 24:
			if r.out != "" {
				t.Errorf("exit code %d, and yet %s", r.code, r.out)
			}
		default:
			t.Errorf("exit code %d: %s", r.code, r.err)
		}
	})
}

func TestBucketTime(t *testing.T) {
	last := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	if got := bucketTime(uint64(last.Unix())); got == nil || !got.Equal(last) {
		t.Errorf("the end of 9999 is %v", got)
	}
	if got := bucketTime(uint64(last.Unix()) + 1); got != nil {
		t.Errorf("the year 10000 is %v", got)
	}
}
