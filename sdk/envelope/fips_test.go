package envelope

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// One-shot blobs can be sealed and opened where FIPS 140-3 mode is enforced, and
// making a stream fails there as an error.
func TestEnforcedFIPS(t *testing.T) {
	if strings.Contains(os.Getenv("GODEBUG"), "fips140=only") {
		eachPolicy(t, func(t *testing.T, policy Policy, n int) {
			s, o := pair(t, policy, n)
			ctx := bound(t, "a", "b")
			blob := must[[]byte](t)(s.Append(nil, []byte("x"), ctx))
			if got, err := o.Append(nil, blob, ctx); err != nil || string(got) != "x" {
				t.Error(err)
			}
			if _, err := s.NewWriter(t.Context(), nil, ctx, StreamOptions{}); err == nil {
				t.Error("a stream was made: then the documentation is out of date")
			}
		})
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestEnforcedFIPS$", "-test.v")
	cmd.Env = append(os.Environ(), "GODEBUG=fips140=only")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "PASS: TestEnforcedFIPS/any_of_64") {
		t.Errorf("%v\n%s", err, out)
	}
}
