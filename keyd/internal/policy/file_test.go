package policy

import (
	"os"
	"reflect"
	"strings"
	"testing"
)

const good = `
# Who may do what.
[principals."spiffe://example.org/agent"]
acme = ["sealer", "opener"]
"acme.eu" = ["sealer"]

[principals."erasure.example.org"]
"*" = ["eraser"]
acme = ["auditor"]
`

func TestParse(t *testing.T) {
	f, err := Parse([]byte(good))
	if err != nil {
		t.Fatal(err)
	}
	want := []Grant{
		{"erasure.example.org", "*", []string{"eraser"}},
		{"erasure.example.org", "acme", []string{"auditor"}},
		{"spiffe://example.org/agent", "acme", []string{"sealer", "opener"}},
		{"spiffe://example.org/agent", "acme.eu", []string{"sealer"}},
	}
	if got := f.Grants(); !reflect.DeepEqual(got, want) {
		t.Errorf("grants are %v", got)
	}
	g := f.principals["erasure.example.org"]
	if got := g.of("acme"); got != eraser|auditor {
		t.Errorf("for acme: %v", got.list())
	}
	if got := g.of("other"); got != eraser {
		t.Errorf("for another tenant: %v", got.list())
	}
	if got := f.principals["nobody.example.org"].of("acme"); got != 0 {
		t.Errorf("who is not there: %v", got.list())
	}
}

// README's example is a policy.
func TestParseWhatREADMEShows(t *testing.T) {
	readme, err := os.ReadFile("../../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(readme), "```toml\n")
	example, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("README has no example")
	}
	if _, err := Parse([]byte(example)); err != nil {
		t.Error(err)
	}
}

func TestParseRefuses(t *testing.T) {
	const agent = `[principals."spiffe://example.org/agent"]` + "\n"
	for _, c := range []struct{ name, file, want string }{
		{"nothing", "", "no principal"},
		{"only the table", "[principals]\n", "no principal"},
		{"not TOML", agent + "acme = [\"sealer\"\n", "line "},
		{"another table", agent + "acme = [\"sealer\"]\n[defaults.x]\ny = [\"sealer\"]\n", `"defaults"`},
		{"another spelling of the table", "[Principals.\"a.b\"]\nacme = [\"sealer\"]\n", `"Principals"`},
		{"a setting", "version = 1\n" + agent + "acme = [\"sealer\"]\n", "line 1"},
		{"a principal without tenants", agent, "it has no tenant"},
		{"a principal twice", agent + "acme = [\"sealer\"]\n" + agent + "zeta = [\"sealer\"]\n", "line "},
		{"a principal twice, in another form", agent + "acme = [\"sealer\"]\n[principals]\n\"spiffe://example.org/agent\" = {zeta = [\"opener\"]}\n", "line "},
		{"a tenant twice", agent + "acme = [\"sealer\"]\nacme = [\"opener\"]\n", "line 3"},
		{"a tenant twice, in another spelling", agent + "acme = [\"sealer\"]\n\"acme\" = [\"opener\"]\n", "line 3"},
		{"a tenant that is none", agent + "Acme = [\"sealer\"]\n", `tenant "Acme"`},
		{"a tenant with a star", agent + "\"acme*\" = [\"sealer\"]\n", `tenant "acme*"`},
		{"a tenant with dots, bare", agent + "acme.eu = [\"sealer\"]\n", "line 2"},
		{"no roles", agent + "acme = []\n", "it has no role"},
		{"an unknown role", agent + "acme = [\"sealer\", \"owner\"]\n", `"owner" is no role`},
		{"a role in capitals", agent + "acme = [\"Sealer\"]\n", `"Sealer" is no role`},
		{"a role twice", agent + "acme = [\"sealer\", \"sealer\"]\n", "stands twice"},
		{"a role that is a number", agent + "acme = [1]\n", "line 2"},
		{"one role without a list", agent + "acme = \"sealer\"\n", "line 2"},
		{"the role anchor for a tenant", agent + "acme = [\"anchor\"]\n", "anchor is for"},
		{"a principal that is a pattern", "[principals.\"*.example.org\"]\nacme = [\"sealer\"]\n", "neither"},
		{"a principal that is a common name", "[principals.\"Some One\"]\nacme = [\"sealer\"]\n", "neither"},
		{"a principal in capitals", "[principals.\"Example.org\"]\nacme = [\"sealer\"]\n", "neither"},
		{"an empty principal", "[principals.\"\"]\nacme = [\"sealer\"]\n", "neither"},
		{"a SPIFFE id with a query", "[principals.\"spiffe://example.org/a?b\"]\nacme = [\"sealer\"]\n", "no SPIFFE id"},
		{"too much", "#" + strings.Repeat(" ", MaxFile), "larger"},
		{"lists in lists", agent + "acme = " + strings.Repeat("[", MaxFile/2), ""},
	} {
		if _, err := Parse([]byte(c.file)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("[principals]\n\"a.b\" = {acme = [\"sealer\"]}\n"))
	f.Add([]byte("principals.\"a.b\".\"*\" = [\"anchor\"]\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := Parse(b)
		if err != nil {
			return
		}
		grants := file.Grants()
		if len(grants) == 0 {
			t.Fatal("a policy that grants nothing")
		}
		// What it grants, written plainly, grants the same.
		var again strings.Builder
		for i, g := range grants {
			if i == 0 || g.Principal != grants[i-1].Principal {
				again.WriteString("[principals.\"" + g.Principal + "\"]\n")
			}
			again.WriteString("\"" + g.Tenant + "\" = [\"" + strings.Join(g.Roles, "\", \"") + "\"]\n")
		}
		other, err := Parse([]byte(again.String()))
		if err != nil || !reflect.DeepEqual(other.Grants(), grants) {
			t.Fatalf("%v: %v became %v", err, grants, other)
		}
	})
}
