package peer_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"lethe/keyd"
	"lethe/keyd/anchor/anchortest"
	"lethe/keyd/anchor/file"
	"lethe/keyd/anchor/peer"
	"lethe/keyd/internal/ledger"
	"lethe/keyd/kms/local"
	"lethe/keyd/store/badger"
	keydv1 "lethe/proto/keyd/v1"
)

// other is another keyd, which keeps anchors.
type other struct {
	dir, address string
	own          *anchortest.Memory
	server       *keyd.Server
}

func startOther(t *testing.T) *other {
	t.Helper()
	dir, err := os.MkdirTemp("", "keyd") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	o := &other{dir: filepath.Join(dir, "anchors"), address: "unix:" + filepath.Join(dir, "keyd.sock"), own: anchortest.NewMemory()}
	if err := os.Mkdir(o.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	keyfile := filepath.Join(dir, "keyfile")
	if err := local.GenerateKeyfile(keyfile); err != nil {
		t.Fatal(err)
	}
	kms, err := local.Open(local.Options{Path: filepath.Join(dir, "roots"), Keyfile: keyfile, Create: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kms.Close() })
	store, err := badger.Open(badger.Options{Dir: filepath.Join(dir, "store"), Create: true, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	shelf, err := file.OpenShelf(o.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shelf.Close() })
	o.server, err = keyd.Open(t.Context(), keyd.Config{
		Store: store, KMS: kms, Anchor: o.own, Anchors: shelf, Development: true, Initialise: true, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // calls that are under way are cut off
		o.server.Stop(ctx)
	})
	lis, err := net.Listen("unix", strings.TrimPrefix(o.address, "unix:"))
	if err != nil {
		t.Fatal(err)
	}
	go o.server.Serve(lis)
	return o
}

// place is a name at another keyd.
type place struct {
	*other
	name string
}

func (p place) Open(t *testing.T) ledger.Anchor { return p.open(t) }

func (p place) open(t *testing.T) *peer.Anchor {
	t.Helper()
	a, err := peer.Open(peer.Options{Address: p.address, Name: p.name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func (p place) Edit(t *testing.T, size uint64, edit func([]byte) []byte) {
	t.Helper()
	d := fmt.Sprintf("%015d", size)
	name := filepath.Join(p.dir, p.name, "objects", "x"+d[:3], "x"+d[3:6], "x"+d[6:9], "x"+d[9:12], d[12:])
	b, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if b = edit(b); b == nil {
		err = os.Remove(name)
	} else {
		err = os.WriteFile(name, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	o := startOther(t)
	n := 0
	anchortest.Run(t, func(t *testing.T) anchortest.Place {
		n++
		return place{o, fmt.Sprintf("keyd-%d", n)}
	})
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: got %v, want %v", what, err, want)
	}
}

// Names are apart, are made by the first object only, and lead nowhere else.
func TestNames(t *testing.T) {
	o := startOther(t)
	h := anchortest.NewHistory(t, 1)
	h.Grow(1)
	_, err := place{o, "first"}.open(t).Newest(t.Context())
	wantErr(t, "Newest", err, ledger.ErrNoObject)
	long := strings.Repeat("x", 64)
	for _, name := range []string{"..", ".", ".x", "a/b", "../x", "A", "ä", "a b", long + "x"} {
		a := place{o, name}.open(t)
		wantErr(t, "Put at "+name, a.Put(t.Context(), h.Object(0, 1)), ledger.ErrAnchorUnavailable)
		_, err := a.Newest(t.Context())
		wantErr(t, "Newest at "+name, err, ledger.ErrAnchorUnavailable)
	}
	if names, err := os.ReadDir(o.dir); err != nil || len(names) != 0 {
		t.Fatalf("there are %v, %v", names, err)
	}
	for i, name := range []string{"first", long, "a.b_c-9"} {
		h := anchortest.NewHistory(t, byte(i+1))
		h.Grow(1)
		if err := (place{o, name}).open(t).Put(t.Context(), h.Object(0, 1)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if names, err := os.ReadDir(o.dir); err != nil || len(names) != 3 {
		t.Fatalf("there are %v, %v", names, err)
	}
	// The disk of all of them vanishes: that is not an empty anchor.
	if err := os.RemoveAll(o.dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"first", "new"} {
		a := place{o, name}.open(t)
		_, err := a.Newest(t.Context())
		wantErr(t, "Newest of "+name, err, ledger.ErrAnchorUnavailable)
		wantErr(t, "Put to "+name, a.Put(t.Context(), h.Object(0, 1)), ledger.ErrAnchorUnavailable)
	}
}

// What does not decode reaches no anchor, and makes none.
func TestMalformedObject(t *testing.T) {
	o := startOther(t)
	conn, err := grpc.NewClient(o.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := keydv1.NewAnchorServiceClient(conn)
	for _, b := range [][]byte{nil, []byte("object"), make([]byte, 2<<20)} {
		_, err := client.PutObject(t.Context(), &keydv1.PutObjectRequest{Name: "a", Object: b})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("an object of %d bytes: %v", len(b), err)
		}
	}
	if names, err := os.ReadDir(o.dir); err != nil || len(names) != 0 {
		t.Fatalf("there are %v, %v", names, err)
	}
}

// An object of the greatest size passes.
func TestLargeObject(t *testing.T) {
	o := startOther(t)
	a, h := place{o, "large"}.open(t), anchortest.NewHistory(t, 1)
	for h.Grow(1000) < 16_000 {
	}
	object := h.Object(0, 16_000)
	if b, err := object.Encode(); err != nil || len(b) < 1<<20 {
		t.Fatalf("the object has %d bytes, %v", len(b), err)
	}
	if err := a.Put(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	if got, err := a.Newest(t.Context()); err != nil || len(got.Entries) != 16_000 {
		t.Fatalf("Newest: %d entries, %v", len(got.Entries), err)
	}
}

// The other keyd keeps anchors also while its own store must not serve.
func TestOtherRefusesToServe(t *testing.T) {
	o := startOther(t)
	a, h := place{o, "a"}.open(t), anchortest.NewHistory(t, 1)
	h.Grow(1)
	conn, err := grpc.NewClient(o.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	newest, err := o.own.Newest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keydv1.NewAdminServiceClient(conn).CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	for size := range newest.Size + 100 {
		o.own.Edit(size, func([]byte) []byte { return nil })
	}
	// What is to be anchored makes it look at its own anchor. The rest is refused.
	for range 2 {
		_, err = keydv1.NewErasureServiceClient(conn).DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{Tenant: "acme", SubjectId: []byte("x"), RequestId: "r", Reason: "test"})
	}
	if status.Code(err) != codes.Unavailable {
		t.Fatalf("its own anchor is damaged, and it serves: %v", err)
	}
	if err := a.Put(t.Context(), h.Object(0, 1)); err != nil {
		t.Fatal(err)
	}
}

func TestUnavailable(t *testing.T) {
	h := anchortest.NewHistory(t, 1)
	h.Grow(1)
	check := func(what, address string) {
		t.Helper()
		a, err := peer.Open(peer.Options{Address: address, Name: "a"})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		_, err = a.Newest(t.Context())
		wantErr(t, "Newest, "+what, err, ledger.ErrAnchorUnavailable)
		_, err = a.Get(t.Context(), 0)
		wantErr(t, "Get, "+what, err, ledger.ErrAnchorUnavailable)
		wantErr(t, "Put, "+what, a.Put(t.Context(), h.Object(0, 1)), ledger.ErrAnchorUnavailable)
	}
	check("nobody there", "unix:"+filepath.Join(t.TempDir(), "none.sock"))
	// Somebody who knows nothing of anchors, and one whose NOT_FOUND is not an anchor's.
	for what, answer := range map[string]error{
		"unimplemented": status.Error(codes.Unimplemented, "no such service"),
		"not found":     status.Error(codes.NotFound, "no such page"),
		"denied":        status.Error(codes.PermissionDenied, "go away"),
	} {
		srv := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return answer }))
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go srv.Serve(lis)
		check(what, lis.Addr().String())
		srv.Stop()
	}
	a, err := peer.Open(peer.Options{Address: "unix:/nowhere", Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
	_, err = a.Newest(t.Context())
	wantErr(t, "Newest after Close", err, ledger.ErrAnchorUnavailable)
}

func TestOptions(t *testing.T) {
	for _, o := range []peer.Options{
		{}, {Name: "a"}, {Address: "unix:", Name: "a"}, {Address: "unix:/x"}, {Address: "127.0.0.1", Name: "a"},
		{Address: "192.0.2.1:7420", Name: "a"}, {Address: "keyd.example:7420", Name: "a"}, {Address: "127.0.0.1:", Name: "a"},
	} {
		if _, err := peer.Open(o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
	for _, address := range []string{"unix:relative.sock", "unix:///x", "127.0.0.1:7420", "[::1]:7420", "localhost:7420"} {
		a, err := peer.Open(peer.Options{Address: address, Name: "a"})
		if err != nil {
			t.Errorf("%s: %v", address, err)
			continue
		}
		if code, description := a.Domain(); code != "keyd" || !strings.Contains(description, address) {
			t.Errorf("%s: Domain() = %q, %q", address, code, description)
		}
		a.Close()
	}
}
