package policy

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Every method of every service is in the table, and nothing else is.
func TestEveryMethodHasARule(t *testing.T) {
	methods := make(map[string]bool)
	for _, pkg := range []protoreflect.FullName{"keyd.v1", "grpc.health.v1"} {
		protoregistry.GlobalFiles.RangeFilesByPackage(pkg, func(f protoreflect.FileDescriptor) bool {
			for i := range f.Services().Len() {
				s := f.Services().Get(i)
				for j := range s.Methods().Len() {
					methods["/"+string(s.FullName())+"/"+string(s.Methods().Get(j).Name())] = true
				}
			}
			return true
		})
	}
	if len(methods) < 30 {
		t.Fatalf("only %d methods were found", len(methods))
	}
	for m := range methods {
		r := rules[m]
		if r == nil {
			t.Errorf("%s is not in the table", m)
			continue
		}
		if r.scope != nowhere && r.roles == 0 {
			t.Errorf("%s: nobody may", m)
		}
	}
	for m := range rules {
		if !methods[m] {
			t.Errorf("%s is in the table, and is no method", m)
		}
	}
}
