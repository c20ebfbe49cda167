package sdk_test

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

func TestDialTargets(t *testing.T) {
	for _, target := range []string{
		"unix:///run/keyd.sock", "unix:keyd.sock", "127.0.0.1:7420", "dns:///127.0.0.1:7420", "localhost:7420",
		"dns:///localhost:7420", "[::1]:7420", "127.8.8.8:1",
	} {
		c, err := sdk.Dial(t.Context(), target)
		if err != nil {
			t.Errorf("%s: %v", target, err)
			continue
		}
		c.Close()
	}
	for _, target := range []string{
		"keyd.example.com:7420", "dns:///keyd.example.com:7420", "10.0.0.1:7420", "0.0.0.0:7420", "[::]:7420", "",
		"keyd", "localhost", "passthrough:///10.0.0.1:7420", "localhost.example.com:1", "dns://10.0.0.1/localhost:7420",
	} {
		c, err := sdk.Dial(t.Context(), target)
		if !errors.Is(err, sdk.ErrInvalidArgument) {
			t.Errorf("%q without TLS: %v", target, err)
		}
		if err == nil {
			c.Close()
		}
	}
	c, err := sdk.Dial(t.Context(), "keyd.example.com:7420", sdk.WithTLS(&tls.Config{}))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	for _, limits := range []sdk.Option{sdk.WithCacheLimits(0, 1), sdk.WithCacheLimits(1, 0), sdk.WithCacheLimits(-1, -1)} {
		if _, err := sdk.Dial(t.Context(), "localhost:1", limits); !errors.Is(err, sdk.ErrInvalidArgument) {
			t.Errorf("limits: %v", err)
		}
	}
}

func TestUnixSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "lethe")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "keyd.sock")
	lis, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	keydv1.RegisterKeyServiceServer(s, newFakeKeyd(t, newFakeClock()))
	go s.Serve(lis)
	defer s.Stop()
	c, err := sdk.Dial(t.Context(), "unix://"+path, sdk.WithClock(newFakeClock()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	mustOpen(t, c, alice, mustSeal(t, c, alice, "data"), "data")
}
