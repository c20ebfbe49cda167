package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"lethe/internal/certtest"
	"lethe/sdk"
)

// The agent seals and opens, counsel places holds, a clerk releases them, the
// pipeline erases: each with a certificate of its own, and nothing else.
func TestRolesOnTheRealBinaries(t *testing.T) {
	dir := tempDir(t)
	ca := certtest.New(t)
	cert, key := ca.Issue(t, certtest.DNS("localhost"))
	caFile, policy := certtest.Write(t, dir, "ca.pem", ca.PEM), filepath.Join(dir, "policy.toml")
	write := func(agent, rest string) {
		t.Helper()
		certtest.Write(t, dir, "policy.toml", []byte(`
[principals."spiffe://acme.test/agent"]
acme = [`+agent+`]
[principals."spiffe://acme.test/counsel"]
acme = ["holder"]
[principals."clerk.acme.test"]
acme = ["releaser"]
[principals."erasure.acme.test"]
acme = ["eraser"]
[principals."auditor.acme.test"]
acme = ["auditor"]
[principals."ops.test"]
"*" = ["admin"]
`+rest))
	}
	write(`"sealer", "opener"`, "")
	keyd, err := launchKeyd(filepath.Join(bin, "keyd"), filepath.Join(dir, "keyd"), "--dev=false", "--policy", policy,
		"--tls-cert", certtest.Write(t, dir, "keyd.pem", cert), "--tls-key", certtest.Write(t, dir, "keyd.key", key), "--tls-client-ca", caFile)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		keyd.kill()
		if t.Failed() {
			t.Logf("keyd said:\n%s", keyd.said())
		}
	})
	until := func(what string, done func() bool) {
		t.Helper()
		for ctx := bounded(t, time.Minute); !done(); time.Sleep(10 * time.Millisecond) {
			if ctx.Err() != nil || !keyd.alive() {
				t.Fatalf("never: %s; keyd said:\n%s", what, keyd.said())
			}
		}
	}
	client, err := sdk.Dial(t.Context(), keyd.target(), sdk.WithTLS(ca.Client(t, certtest.DNS("health.test"))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	until("keyd serves", func() bool {
		res, err := healthpb.NewHealthClient(client.Conn()).Check(t.Context(), &healthpb.HealthCheckRequest{})
		return err == nil && res.Status == healthpb.HealthCheckResponse_SERVING
	})

	// as returns a command line for a principal; without one it shows no certificate.
	as := func(principal certtest.Option) func(code int, stdin string, args ...string) string {
		env := append(os.Environ(), "LETHE_KEYD="+keyd.target())
		if principal != nil {
			name := filepath.Join(dir, time.Now().Format("150405.000000000"))
			cert, key := ca.Issue(t, principal)
			for suffix, content := range map[string][]byte{".pem": cert, ".key": key} {
				if err := os.WriteFile(name+suffix, content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			env = append(env, "LETHE_TLS_CA="+caFile, "LETHE_TLS_CERT="+name+".pem", "LETHE_TLS_KEY="+name+".key")
		}
		return func(code int, stdin string, args ...string) string {
			t.Helper()
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "lethe"), args...)
			cmd.Env, cmd.Stdin = env, strings.NewReader(stdin)
			var out, said bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &said
			var exit *exec.ExitError
			if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if got := cmd.ProcessState.ExitCode(); got != code && code >= 0 {
				t.Errorf("lethe %s: exit code %d, want %d: %s", strings.Join(args, " "), got, code, &said)
			}
			if code < 0 {
				return said.String()
			}
			return out.String()
		}
	}
	agent, counsel := as(certtest.URI("spiffe://acme.test/agent")), as(certtest.URI("spiffe://acme.test/counsel"))
	clerk, erasure := as(certtest.DNS("clerk.acme.test")), as(certtest.DNS("erasure.acme.test"))
	auditor, ops, nobody := as(certtest.DNS("auditor.acme.test")), as(certtest.DNS("ops.test")), as(nil)
	const denied = 15
	with := func(command string, more ...string) []string { // about ann
		return append(strings.Fields(command+" --tenant acme --subject ann"), more...)
	}
	sealed, opened := filepath.Join(dir, "sealed"), filepath.Join(dir, "opened")

	nobody(16, "", "status")
	agent(denied, "", "tenant", "create", "acme")
	ops(0, "", "tenant", "create", "acme")
	ops(0, "", "status")
	agent(denied, "", "status")
	pinned := certtest.Write(t, dir, "ledger.key", []byte(auditor(0, "", "ledger", "key")))

	agent(0, "text", with("seal --class memory", "-o", sealed)...)
	agent(0, "", with("open --class memory", "-o", opened, sealed)...)
	for name, run := range map[string]func(int, string, ...string) string{"counsel": counsel, "clerk": clerk, "erasure": erasure, "auditor": auditor, "ops": ops} {
		if run(denied, "", with("open --class memory", sealed)...); t.Failed() {
			t.Fatalf("%s opens", name)
		}
	}
	agent(denied, "", with("destroy --yes --reason gdpr-art17")...)

	clerk(denied, "", with("hold place case-1 --reason litigation")...)
	counsel(0, "", with("hold place case-1 --reason litigation", "--receipt", filepath.Join(dir, "placed"))...)
	if list := auditor(0, "", with("hold list")...); !strings.Contains(list, "spiffe://acme.test/counsel") {
		t.Errorf("the list does not say who placed the hold: %s", list)
	}
	erasure(13, "", with("destroy --yes --reason gdpr-art17")...)
	counsel(denied, "", with("hold release case-1 --reason closed")...)
	erasure(denied, "", with("hold release case-1 --reason closed")...)
	clerk(0, "", with("hold release case-1 --reason closed", "--receipt", filepath.Join(dir, "released"))...)
	agent(0, "", with("open --class memory --force", "-o", opened, sealed)...)
	erasure(0, "", with("destroy --yes --reason gdpr-art17", "--receipt", filepath.Join(dir, "destroyed"))...)
	agent(10, "", with("open --class memory", sealed)...)
	for name, want := range map[string]string{
		"placed": "spiffe://acme.test/counsel", "released": "clerk.acme.test", "destroyed": "erasure.acme.test",
	} {
		if text := auditor(0, "", "receipt", "verify", filepath.Join(dir, name), "--key-file", pinned); !strings.Contains(strings.Join(strings.Fields(text), " "), "principal: "+want) {
			t.Errorf("the receipt %s does not name %s:\n%s", name, want, text)
		}
	}

	// A policy is taken up by SIGHUP, a bad one is not, and is told of.
	hup := func() {
		t.Helper()
		if err := keyd.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	write(`"opener"`, "")
	hup()
	until("the agent's right to seal is taken away", func() bool {
		return strings.Contains(agent(-1, "text", "seal", "--tenant", "acme", "--subject", "bob", "--class", "memory", "-o", opened, "--force"), "not allowed")
	})
	write(`"owner"`, "")
	hup()
	until("the bad policy is told of", func() bool { return strings.Contains(ops(-1, "", "status"), "not healthy: access") })
	agent(denied, "text", "seal", "--tenant", "acme", "--subject", "bob", "--class", "memory", "-o", opened, "--force")
	write(`"sealer", "opener"`, "")
	hup()
	until("all is well again", func() bool { return ops(-1, "", "status") == "" })
	agent(0, "text", "seal", "--tenant", "acme", "--subject", "bob", "--class", "memory", "-o", opened, "--force")
	if err := keyd.stop(); err != nil {
		t.Error(err)
	}
}
