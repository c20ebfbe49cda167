package policy

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"lethe/proto/ident"
)

// MaxFile is the size in bytes of the largest policy file that is read.
const MaxFile = 1 << 20

// roles is a set of roles.
type roles uint16

// The roles.
const (
	sealer   roles = 1 << iota // is given keys to seal with
	opener                     // is given keys to open with
	eraser                     // destroys, cancels and reinstates
	holder                     // places legal holds
	releaser                   // releases them
	auditor                    // reads what is recorded
	admin                      // sets up tenants and classes, and runs keyd
	anchor                     // keeps another keyd's anchor here
)

// names are the roles' names in a policy file, in the order of the constants.
var names = []string{"sealer", "opener", "eraser", "holder", "releaser", "auditor", "admin", "anchor"}

// list is the names of the roles in the set.
func (r roles) list() (list []string) {
	for i, name := range names {
		if r&(1<<i) != 0 {
			list = append(list, name)
		}
	}
	return list
}

// everywhere stands for all tenants, those to come too.
const everywhere = "*"

// grants are the roles of one principal.
type grants struct {
	everywhere roles
	tenants    map[string]roles
	any        roles // those that it has for any tenant
}

// of is the set of roles for a tenant. A nil *grants has none.
func (g *grants) of(tenant string) roles {
	if g == nil {
		return 0
	}
	return g.everywhere | g.tenants[tenant]
}

// File is what a policy file says: who has which roles for which tenants.
type File struct{ principals map[string]*grants }

// Parse reads a policy file, in TOML:
//
//	[principals."spiffe://example.org/agent"]
//	acme = ["sealer", "opener"]
//
//	[principals."erasure.example.org"]
//	"*" = ["eraser"]
//
// It refuses whatever it does not know, and whatever can mean nothing.
func Parse(b []byte) (*File, error) {
	if len(b) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	var tables map[string]map[string]map[string][]string
	if err := toml.Unmarshal(b, &tables); err != nil {
		var at *toml.DecodeError
		if errors.As(err, &at) {
			line, _ := at.Position()
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		return nil, err
	}
	for name := range tables {
		if name != "principals" {
			return nil, fmt.Errorf("%q: there is only [principals.\"NAME\"]", name)
		}
	}
	f := &File{principals: make(map[string]*grants)}
	for principal, tenants := range tables["principals"] {
		g, err := grantsOf(principal, tenants)
		if err != nil {
			return nil, fmt.Errorf("principal %q: %w", principal, err)
		}
		f.principals[principal] = g
	}
	if len(f.principals) == 0 {
		return nil, errors.New("it names no principal")
	}
	return f, nil
}

func grantsOf(principal string, tenants map[string][]string) (*grants, error) {
	if err := checkPrincipal(principal); err != nil {
		return nil, err
	}
	if len(tenants) == 0 {
		return nil, errors.New("it has no tenant")
	}
	g := &grants{tenants: make(map[string]roles)}
	for tenant, list := range tenants {
		set, err := parseRoles(list)
		if err != nil {
			return nil, fmt.Errorf("tenant %q: %w", tenant, err)
		}
		g.any |= set
		if tenant == everywhere {
			g.everywhere = set
			continue
		}
		if err := ident.Tenant(tenant); err != nil {
			return nil, fmt.Errorf("tenant %q: %w", tenant, err)
		}
		if set&anchor != 0 {
			return nil, fmt.Errorf("tenant %q: the role anchor is for %q only", tenant, everywhere)
		}
		g.tenants[tenant] = set
	}
	return g, nil
}

func parseRoles(list []string) (set roles, err error) {
	if len(list) == 0 {
		return 0, errors.New("it has no role")
	}
	for _, name := range list {
		i := slices.Index(names, name)
		if i < 0 {
			return 0, fmt.Errorf("%q is no role; there are %s", name, strings.Join(names, ", "))
		}
		if set&(1<<i) != 0 {
			return 0, fmt.Errorf("the role %s stands twice", name)
		}
		set |= 1 << i
	}
	return set, nil
}

// Grant says which roles a principal has for a tenant, or for all: "*".
type Grant struct {
	Principal string   `json:"principal"`
	Tenant    string   `json:"tenant"`
	Roles     []string `json:"roles"`
}

// Grants are all that the file says, in order of principal and tenant.
func (f *File) Grants() (all []Grant) {
	for _, principal := range slices.Sorted(maps.Keys(f.principals)) {
		g := f.principals[principal]
		if g.everywhere != 0 {
			all = append(all, Grant{principal, everywhere, g.everywhere.list()})
		}
		for _, tenant := range slices.Sorted(maps.Keys(g.tenants)) {
			all = append(all, Grant{principal, tenant, g.tenants[tenant].list()})
		}
	}
	return all
}
