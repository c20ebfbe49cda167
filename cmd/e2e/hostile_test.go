package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// frame is an HTTP/2 frame with a payload.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := make([]byte, 9, 9+len(payload))
	b[0], b[1], b[2] = byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload))
	b[3], b[4] = kind, flags
	binary.BigEndian.PutUint32(b[5:], stream)
	return append(b, payload...)
}

const (
	preface      = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	frameData    = 0
	frameHeaders = 1
	frameReset   = 3
	frameSetting = 4
	framePing    = 6
	frameWindow  = 8
	frameMore    = 9
)

// greeting opens an HTTP/2 connection.
func greeting() []byte { return append([]byte(preface), frame(frameSetting, 0, 0, nil)...) }

// literal is a header in HPACK, neither indexed nor compressed; name and value
// are shorter than 127 bytes.
func literal(name, value string) []byte {
	b := append([]byte{0, byte(len(name))}, name...)
	return append(append(b, byte(len(value))), value...)
}

func callHeaders(method string) []byte {
	var b []byte
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "localhost"},
		{"te", "trailers"}, {"content-type", "application/grpc"},
	} {
		b = append(b, literal(h[0], h[1])...)
	}
	return b
}

// TestHostileBytes sends keyd what no client sends. It lives, serves others
// meanwhile, and does not grow.
func TestHostileBytes(t *testing.T) {
	address, metrics := freeAddress(t), freeAddress(t)
	d := deploy(t, "--metrics", metrics)
	d.keyd.kill()
	d.flags = append(d.flags, "--listen", address)
	d.startAt("dns:///" + address)
	cc, err := grpc.NewClient("dns:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	good, err := sdk.Dial(t.Context(), "dns:///"+address)
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	if _, err := keydv1.NewAdminServiceClient(cc).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	serves := func(after string) {
		t.Helper()
		if !d.keyd.alive() {
			t.Fatalf("keyd died of %s:\n%s", after, d.keyd.said())
		}
		who := sdk.Target{Tenant: "acme", Subject: "after " + after, Class: "memory"}
		if _, err := good.Seal(bounded(t, 20*time.Second), who, []byte("something")); err != nil {
			t.Fatalf("after %s: %v", after, err)
		}
	}
	serves("nothing")
	before := d.sample(metrics)

	for what, messages := range map[string]func() []byte{
		"random bytes":           func() []byte { return random(4096) },
		"random bytes in HTTP/2": func() []byte { return append(greeting(), random(4096)...) },
		"random frames":          randomFrames,
		"another protocol":       func() []byte { return []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") },
		"a TLS greeting":         func() []byte { return append([]byte{22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3}, random(512)...) },
		"half a preface":         func() []byte { return []byte(preface[:11]) },
		"a frame of 16 MiB":      func() []byte { return append(append(greeting(), 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1), random(1<<16)...) },
		"settings without end":   func() []byte { return append(greeting(), bytes.Repeat(frame(frameSetting, 0, 0, nil), 5000)...) },
		"pings without end": func() []byte {
			return append(greeting(), bytes.Repeat(frame(framePing, 0, 0, make([]byte, 8)), 5000)...)
		},
		"a message of 4 GiB":     func() []byte { return oneMessage([]byte{0, 0xff, 0xff, 0xff, 0xff, 1, 2, 3}) },
		"an unknown compression": func() []byte { return oneMessage(append([]byte{1, 0, 0, 0, 16}, random(16)...)) },
		"headers without end":    endlessHeaders,
		"calls reset at once":    resets,
		"windows beyond all size": func() []byte {
			return append(greeting(), bytes.Repeat(frame(frameWindow, 0, 0, []byte{0x7f, 0xff, 0xff, 0xff}), 100)...)
		},
	} {
		t.Run(what, func(t *testing.T) {
			var senders sync.WaitGroup
			for range 12 {
				senders.Go(func() { sendRaw(t, address, messages()) })
			}
			senders.Wait()
			serves(what)
		})
	}

	t.Run("calls that are wrong", func(t *testing.T) { wrongCalls(t, cc); serves("calls that are wrong") })
	t.Run("messages that are no protobuf", func(t *testing.T) { noProtobuf(t, cc); serves("messages that are no protobuf") })

	said := d.keyd.said()
	if strings.Contains(said, "panic") || strings.Contains(said, "goroutine ") {
		t.Errorf("keyd said:\n%s", said)
	}
	after := d.settled(metrics, before)
	t.Logf("before: %v; after: %v; at most %d MiB resident", before, after, d.peakMemory()>>20)
	if peak := d.peakMemory(); peak > 512<<20 {
		t.Errorf("keyd grew to %d MiB", peak>>20)
	}
	if after.goroutines > before.goroutines+20 || after.descriptors > before.descriptors+20 {
		t.Errorf("it keeps what hostile connections took: %v before, %v after", before, after)
	}
}

// TestMoreConnectionsThanDescriptors opens more connections than keyd may have
// files open. It lives, loses nothing, and takes up work by itself once they
// are gone.
func TestMoreConnectionsThanDescriptors(t *testing.T) {
	dir := tempDir(t)
	limited := filepath.Join(dir, "keyd")
	script := fmt.Sprintf("#!/bin/sh\nulimit -n 640\nexec %s \"$@\"\n", filepath.Join(bin, "keyd"))
	if err := os.WriteFile(limited, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	d := deploy(t)
	d.keyd.kill()
	k, err := startKeyd(t.Context(), limited, d.data)
	if err != nil {
		t.Fatal(err)
	}
	d.keyd = k
	d.tenant("acme", time.Minute)
	pinned := d.pinned()
	c := d.client()
	var lives []*life
	seal := func(subject string) error {
		l := &life{subject: subject, plain: random(50)}
		var err error
		if l.blob, err = c.Seal(bounded(t, 10*time.Second), of("acme", subject), l.plain); err == nil {
			lives = append(lives, l)
		}
		return err
	}
	for i := range 10 {
		if err := seal(fmt.Sprint("before ", i)); err != nil {
			t.Fatal(err)
		}
	}
	var held []net.Conn
	for range 900 {
		conn, err := net.Dial("unix", strings.TrimPrefix(d.keyd.target(), "unix://"))
		if err != nil {
			break // its queue is full
		}
		held = append(held, conn)
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = conn.Write(greeting())
	}
	refused := 0
	for i := range 10 {
		if err := seal(fmt.Sprint("during ", i)); errors.Is(err, sdk.ErrUnavailable) {
			refused++
		} else if err != nil {
			t.Errorf("a create without descriptors: %v", err)
		}
	}
	t.Logf("%d connections held; %d of 10 creates refused meanwhile", len(held), refused)
	if !d.keyd.alive() {
		t.Fatalf("keyd died:\n%s", d.keyd.said())
	}
	for _, conn := range held {
		conn.Close()
	}
	if err := eventually(t, func(context.Context) error { return seal("after") }); err != nil {
		t.Errorf("the connections are gone, but a create: %v", err)
	}
	d.verify(lives, pinned)
	d.restart()
	d.verify(lives, pinned)
}

// sendRaw sends bytes and reads until the other side has had enough, or a
// moment passes.
func sendRaw(t *testing.T, address string, b []byte) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(300 * time.Millisecond))
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, c)
		close(done)
	}()
	_, _ = c.Write(b)
	<-done
}

func randomFrames() []byte {
	b := greeting()
	for range 200 {
		b = append(b, frame(byte(mrand.IntN(12)), byte(mrand.IntN(256)), mrand.Uint32()&0xf, random(mrand.IntN(64)))...)
	}
	return b
}

// oneMessage is a call whose body is b.
func oneMessage(b []byte) []byte {
	out := append(greeting(), frame(frameHeaders, 4, 1, callHeaders("/keyd.v1.KeyService/GetBlobKeys"))...)
	return append(out, frame(frameData, 0, 1, b)...)
}

func endlessHeaders() []byte {
	b := append(greeting(), frame(frameHeaders, 0, 1, callHeaders("/keyd.v1.KeyService/GetBlobKeys"))...)
	more := bytes.Repeat(literal("x-more", strings.Repeat("x", 100)), 140)
	for range 200 {
		b = append(b, frame(frameMore, 0, 1, more)...)
	}
	return b
}

func resets() []byte {
	b := greeting()
	headers := callHeaders("/keyd.v1.KeyService/WatchRevocations")
	for i := range uint32(3000) {
		b = append(b, frame(frameHeaders, 4, 2*i+1, headers)...)
		b = append(b, frame(frameReset, 0, 2*i+1, []byte{0, 0, 0, 8})...)
	}
	return b
}

// wrongCalls makes calls that keyd must refuse.
func wrongCalls(t *testing.T, cc *grpc.ClientConn) {
	ctx := bounded(t, time.Minute)
	keys := keydv1.NewKeyServiceClient(cc)
	query := func() *keydv1.BlobKeyQuery {
		return &keydv1.BlobKeyQuery{Tenant: "acme", SubjectId: []byte("somebody"), Class: "memory", Purpose: keydv1.Purpose_PURPOSE_SEAL}
	}
	for what, test := range map[string]struct {
		call func() error
		want []codes.Code
	}{
		"no query": {func() error { _, err := keys.GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{}); return err }, []codes.Code{codes.InvalidArgument}},
		"257 queries": {func() error {
			req := &keydv1.GetBlobKeysRequest{}
			for range 257 {
				req.Queries = append(req.Queries, query())
			}
			_, err := keys.GetBlobKeys(ctx, req)
			return err
		}, []codes.Code{codes.InvalidArgument}},
		"a message of 2 MiB": {func() error {
			q := query()
			q.SubjectId = make([]byte, 2<<20)
			_, err := keys.GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}})
			return err
		}, []codes.Code{codes.ResourceExhausted}},
		"a message of 64 MiB": {func() error {
			q := query()
			q.SubjectId = make([]byte, 64<<20)
			_, err := keys.GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}})
			return err
		}, []codes.Code{codes.ResourceExhausted}},
		"a compressed message": {func() error {
			q := query()
			q.SubjectId = make([]byte, 1<<20-200) // a kilobyte on the wire
			_, err := keys.GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{q}}, grpc.UseCompressor(gzip.Name))
			return err
		}, []codes.Code{codes.Unimplemented, codes.ResourceExhausted, codes.InvalidArgument}},
		"an unknown method": {func() error {
			return cc.Invoke(ctx, "/keyd.v1.KeyService/GiveMeAll", &keydv1.GetBlobKeysRequest{}, &keydv1.GetBlobKeysResponse{})
		}, []codes.Code{codes.Unimplemented}},
		"an unknown service": {func() error {
			return cc.Invoke(ctx, "/keyd.v2.KeyService/GetBlobKeys", &keydv1.GetBlobKeysRequest{}, &keydv1.GetBlobKeysResponse{})
		}, []codes.Code{codes.Unimplemented}},
		"revocations of nobody": {func() error { return watchOnce(ctx, keys, &keydv1.WatchRevocationsRequest{}) }, []codes.Code{codes.InvalidArgument}},
		"revocations of 257 tenants": {func() error {
			return watchOnce(ctx, keys, &keydv1.WatchRevocationsRequest{Tenants: slicesOf("acme", 257)})
		}, []codes.Code{codes.InvalidArgument}},
		"revocations of a bad tenant": {func() error { return watchOnce(ctx, keys, &keydv1.WatchRevocationsRequest{Tenants: []string{"A\x00"}}) }, []codes.Code{codes.InvalidArgument}},
	} {
		got := status.Code(test.call())
		ok := false
		for _, want := range test.want {
			ok = ok || got == want
		}
		if !ok {
			t.Errorf("%s: %v; want %v", what, got, test.want)
		}
	}
	// One query that is wrong fails by itself.
	for what, spoil := range map[string]func(*keydv1.BlobKeyQuery){
		"no purpose":             func(q *keydv1.BlobKeyQuery) { q.Purpose = 0 },
		"an unknown purpose":     func(q *keydv1.BlobKeyQuery) { q.Purpose = 99 },
		"to seal, with a key id": func(q *keydv1.BlobKeyQuery) { q.KeyId = make([]byte, 16) },
		"to open, with no key id": func(q *keydv1.BlobKeyQuery) {
			q.Purpose = keydv1.Purpose_PURPOSE_OPEN
		},
		"to open, with a long key id": func(q *keydv1.BlobKeyQuery) {
			q.Purpose, q.KeyId = keydv1.Purpose_PURPOSE_OPEN, make([]byte, 17)
		},
	} {
		bad := query()
		spoil(bad)
		res, err := keys.GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{query(), bad, query()}})
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if f := res.Results[1].GetFailure(); f.GetOutcome() != keydv1.Outcome_OUTCOME_INVALID_ARGUMENT {
			t.Errorf("%s: %v", what, res.Results[1])
		}
		if res.Results[0].GetKey() == nil || res.Results[2].GetKey() == nil {
			t.Errorf("%s fails the queries beside it", what)
		}
	}
}

func watchOnce(ctx context.Context, keys keydv1.KeyServiceClient, req *keydv1.WatchRevocationsRequest) error {
	s, err := keys.WatchRevocations(ctx, req)
	if err != nil {
		return err
	}
	_, err = s.Recv()
	return err
}

func slicesOf(s string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = s
	}
	return out
}

// bytesCodec puts bytes on the wire as they are.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error)   { return v.([]byte), nil }
func (bytesCodec) Unmarshal(b []byte, v any) error { *v.(*[]byte) = bytes.Clone(b); return nil }
func (bytesCodec) Name() string                    { return "proto" }

// noProtobuf calls every method with bytes that are no message of its.
func noProtobuf(t *testing.T, cc *grpc.ClientConn) {
	ctx := bounded(t, time.Minute)
	var bodies [][]byte
	for range 30 {
		bodies = append(bodies, random(1+mrand.IntN(200)))
	}
	bodies = append(bodies,
		bytes.Repeat([]byte{0x0b}, 100_000),                  // groups in groups
		[]byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f},           // a length beyond the message
		append([]byte{0x0a, 0x80, 0x80, 0x40}, random(9)...), // a forged length
		bytes.Repeat([]byte{0x0a, 0x00}, 400_000),            // 400,000 empty queries
		nested(20_000),
	)
	for _, method := range []string{
		"/keyd.v1.KeyService/GetBlobKeys", "/keyd.v1.ErasureService/DestroyKey", "/keyd.v1.ErasureService/Reinstate",
		"/keyd.v1.ErasureService/DescribeSubject", "/keyd.v1.HoldService/PlaceHold", "/keyd.v1.HoldService/ReleaseHold",
		"/keyd.v1.LedgerService/GetReceipt", "/keyd.v1.AdminService/CreateTenant",
		"/keyd.v1.AdminService/PutClass",
	} {
		for i, body := range bodies {
			var answer []byte
			err := cc.Invoke(ctx, method, body, &answer, grpc.ForceCodec(bytesCodec{}))
			if err == nil {
				t.Errorf("%s answers message %d", method, i)
			} else if ctx.Err() != nil || errors.Is(err, io.EOF) || status.Code(err) == codes.Unavailable {
				t.Fatalf("%s, message %d: %v", method, i, err)
			}
		}
	}
}

// nested is messages in messages, n deep.
func nested(n int) []byte {
	var b []byte
	for range n {
		if len(b) > 60_000 {
			break
		}
		b = append(binary.AppendUvarint([]byte{0x0a}, uint64(len(b))), b...)
	}
	return b
}

// holdings are what a process holds.
type holdings struct{ goroutines, descriptors int }

// sample reads keyd's metrics.
func (d *deployment) sample(metrics string) (u holdings) {
	d.t.Helper()
	for line := range strings.Lines(string(fetch(d.t, metrics))) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		switch name {
		case "go_goroutines":
			u.goroutines = int(n)
		case "process_open_fds":
			u.descriptors = int(n)
		}
	}
	if u.goroutines == 0 {
		d.t.Fatal("no metrics")
	}
	return u
}

// settled samples until keyd is back at what it was, or does not come back.
func (d *deployment) settled(metrics string, before holdings) (u holdings) {
	d.t.Helper()
	for range 150 {
		if u = d.sample(metrics); u.goroutines <= before.goroutines+2 && u.descriptors <= before.descriptors+2 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	return u
}

// peakMemory is the most memory that keyd has had resident, in bytes; zero
// where the system does not tell.
func (d *deployment) peakMemory() int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.keyd.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kib << 10
		}
	}
	return 0
}
