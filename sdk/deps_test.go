package sdk_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// An importer of sdk compiles these modules and no others: no database, no
// cloud SDK, and nothing of keyd.
func TestDependencies(t *testing.T) {
	modules := []string{
		"golang.org/x/net",
		"golang.org/x/sys",
		"golang.org/x/text",
		"google.golang.org/genproto/googleapis/rpc",
		"google.golang.org/grpc",
		"google.golang.org/protobuf",
	}
	packages := []string{
		"lethe/internal/boottime",
		"lethe/proto/ident",
		"lethe/proto/keyd/v1",
		"lethe/sdk",
		"lethe/sdk/envelope",
	}
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}} {{.Module.Path}}{{end}}", "lethe/sdk").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		pkg, module, _ := strings.Cut(strings.TrimSpace(line), " ")
		if pkg == "" {
			continue
		}
		seen++
		if !slices.Contains(modules, module) && !slices.Contains(packages, pkg) {
			t.Errorf("sdk depends on %s of %s", pkg, module)
		}
	}
	if seen < 20 {
		t.Errorf("only %d packages were listed", seen)
	}
}
