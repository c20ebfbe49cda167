package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// TestGuaranteeNoTwoIdsShareAKey seals for ids that are easily confused: no two
// have a handle or a key in common, and a blob opens for its own only. G7.
func TestGuaranteeNoTwoIdsShareAKey(t *testing.T) {
	long := strings.Repeat("x", 1023)
	d := deploy(t)
	ids := []struct{ tenant, subject string }{
		{"a", "b:c"}, {"a.b", "c"}, {"a", "b.c"}, {"a.b", ".c"}, {"a-b", "c"}, {"a_b", "c"}, {"a", "b/c"}, {"a.b.c", "c"},
		{"a", "b"}, {"b", "a"}, {"ab", "c"}, {"a", "bc"}, {"a", "c"}, {"b", "c"},
		{"a", "12"}, {"a", "012"}, {"a", "12 "}, {"a", " 12"}, {"a", "12\n"}, {"a", "12\t"}, {"a", "+12"}, {"a", "12.0"}, {"a", "1 2"}, {"a", "\uff11\uff12"},
		{"a", "user"}, {"a", "User"}, {"a", "USER"}, {"a", "\u017fuser"}, {"a", "ſuser"[2:]}, {"a", "\u212a"}, {"a", "K"}, {"a", "k"},
		{"a", "caf\u00e9"}, {"a", "cafe\u0301"}, {"a", "\ufb01n"}, {"a", "fin"}, {"a", "\u1e9e"}, {"a", "ss"},
		{"a", "\ufeffid"}, {"a", "id"}, {"a", "i\u200bd"}, {"a", "id\u0301\u0301"},
		{"a", "%41"}, {"a", "A"}, {"a", "QQ=="}, {"a", "41"}, {"a", "\"A\""}, {"a", "\\u0041"},
		{"a", long + "y"}, {"a", long + "z"}, {"a", long}, {"a", long[1:]},
		{"a", "memory"}, {"memory", "a"}, {"a", "a"}, {"a", "*"}, {"a", "../a"}, {"a", "a\x01"}, {"a", "\x01a"},
	}
	seen := make(map[string]bool)
	for i := 0; i < len(ids); i++ {
		if k := ids[i].tenant + "\x00" + ids[i].subject; seen[k] {
			ids = append(ids[:i], ids[i+1:]...)
			i--
		} else {
			seen[k] = true
		}
		if tenant := ids[i].tenant; !seen[tenant] {
			seen[tenant] = true
			d.tenant(tenant, time.Minute)
		}
	}
	c := d.client()
	blobs := make([][]byte, len(ids))
	handles, keys := make(map[[16]byte]int), make(map[envelope.KeyID]int)
	for i, id := range ids {
		var err error
		if blobs[i], err = c.Seal(t.Context(), of(id.tenant, id.subject), []byte{byte(i)}); err != nil {
			t.Fatalf("%q: %v", id, err)
		}
		s, err := c.Describe(t.Context(), id.tenant, id.subject)
		if err != nil {
			t.Fatal(err)
		}
		if other, taken := handles[s.Handle]; taken {
			t.Errorf("%q and %q have one handle", id, ids[other])
		}
		handles[s.Handle] = i
		if len(s.Classes) != 1 {
			t.Fatalf("%q: %d classes", id, len(s.Classes))
		}
		if other, taken := keys[s.Classes[0].KeyID]; taken {
			t.Errorf("%q and %q have one key", id, ids[other])
		}
		keys[s.Classes[0].KeyID] = i
	}
	for i, id := range ids {
		for n, blob := range blobs {
			plain, err := c.Open(t.Context(), of(id.tenant, id.subject), blob)
			switch {
			case i == n && (err != nil || !bytes.Equal(plain, []byte{byte(i)})):
				t.Errorf("%q: its own blob: %v", id, err)
			case i == n:
			case err == nil:
				t.Errorf("%q opens the blob of %q", id, ids[n])
			case id.tenant == ids[n].tenant && !errors.Is(err, sdk.ErrWrongSubject):
				t.Errorf("%q, the blob of %q: %v; want wrong subject", id, ids[n], err)
			case id.tenant != ids[n].tenant && !errors.Is(err, sdk.ErrUnknown) && !errors.Is(err, sdk.ErrWrongSubject):
				// Another tenant's key ids are not told from made-up ones.
				t.Errorf("%q, the blob of %q: %v; want unknown", id, ids[n], err)
			}
		}
	}
	// And one's erasure is not another's.
	if _, err := c.DestroyKey(t.Context(), destroyRequest("a", "12", "erase 12")); err != nil {
		t.Fatal(err)
	}
	fresh := d.client()
	for i, id := range ids {
		_, err := fresh.Open(t.Context(), of(id.tenant, id.subject), blobs[i])
		if erased := id.tenant == "a" && id.subject == "12"; erased != errors.Is(err, sdk.ErrErased) || !erased && err != nil {
			t.Errorf("%q after the erasure of \"12\": %v", id, err)
		}
	}
}

// TestRefusedIdsAreRefusedEverywhereAlike gives ids that are not allowed to the
// SDK, to the bare protocol and to the command line: each says that the
// argument is invalid, and none repeats it.
func TestRefusedIdsAreRefusedEverywhereAlike(t *testing.T) {
	d := deploy(t)
	d.tenant("acme", time.Minute)
	c, conn := d.client(), d.conn()
	keys, erasure := keydv1.NewKeyServiceClient(conn), keydv1.NewErasureServiceClient(conn)
	admin := keydv1.NewAdminServiceClient(conn)
	const marker = "do-not-repeat-me"
	for _, test := range []struct{ what, tenant, subject, class string }{
		{"empty subject", "acme", "", "memory"},
		{"subject with NUL", "acme", marker + "\x00", "memory"},
		{"subject of NUL", "acme", "\x00", "memory"},
		{"subject of invalid UTF-8", "acme", marker + "\xff", "memory"},
		{"subject of a lone surrogate", "acme", marker + "\xed\xa0\x80", "memory"},
		{"subject of overlong UTF-8", "acme", marker + "\xc0\x80", "memory"},
		{"subject cut inside a rune", "acme", marker + "\xe2\x82", "memory"},
		{"subject of 1025 bytes", "acme", marker + strings.Repeat("x", 1025-len(marker)), "memory"},
		{"subject of 128 KiB", "acme", marker + strings.Repeat("x", 1<<17-len(marker)), "memory"},
		{"empty tenant", "", "somebody", "memory"},
		{"tenant in upper case", "Acme", "somebody", "memory"},
		{"tenant with a slash", "acme/x", "somebody", "memory"},
		{"tenant with a space", "acme ", "somebody", "memory"},
		{"tenant beyond ASCII", "acm\u00e9", "somebody", "memory"},
		{"tenant of 129 bytes", strings.Repeat("a", 129), "somebody", "memory"},
		{"empty class", "acme", "somebody", ""},
		{"class in upper case", "acme", "somebody", "Memory"},
		{"class of 65 bytes", "acme", "somebody", strings.Repeat("m", 65)},
		{"class with NUL", "acme", "somebody", "mem\x00ory"},
	} {
		t.Run(test.what, func(t *testing.T) {
			d.t = t
			target := sdk.Target{Tenant: test.tenant, Subject: test.subject, Class: test.class}
			request := destroyRequest(test.tenant, test.subject, "request")
			request.Classes = []string{test.class}
			_, sealErr := c.Seal(t.Context(), target, nil)
			_, openErr := c.Open(t.Context(), target, sealedSomewhere(t, c))
			_, destroyErr := c.DestroyKey(t.Context(), request)
			for what, err := range map[string]error{"Seal": sealErr, "Open": openErr, "DestroyKey": destroyErr} {
				if !errors.Is(err, sdk.ErrInvalidArgument) {
					t.Errorf("sdk %s: %v", what, err)
				}
				quiet(t, err.Error(), marker)
			}

			// A string that is not UTF-8 cannot be put into these fields at all.
			query := &keydv1.BlobKeyQuery{Tenant: test.tenant, SubjectId: []byte(test.subject), Class: test.class, Purpose: keydv1.Purpose_PURPOSE_SEAL}
			res, err := keys.GetBlobKeys(t.Context(), &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{query}})
			if err != nil {
				invalid(t, "GetBlobKeys", err)
				quiet(t, err.Error(), marker)
			} else {
				f := res.Results[0].GetFailure()
				if f.GetOutcome() != keydv1.Outcome_OUTCOME_INVALID_ARGUMENT {
					t.Errorf("GetBlobKeys: %v", f)
				}
				quiet(t, f.String(), marker)
			}
			_, err = erasure.DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
				Tenant: test.tenant, SubjectId: []byte(test.subject), Classes: []string{test.class}, RequestId: "request", Reason: "test",
			})
			invalid(t, "DestroyKey", err)
			quiet(t, err.Error(), marker)
			if test.class == "memory" {
				_, err = erasure.DescribeSubject(t.Context(), &keydv1.DescribeSubjectRequest{Tenant: test.tenant, SubjectId: []byte(test.subject)})
				invalid(t, "DescribeSubject", err)
			}
			if test.subject == "somebody" && test.class == "memory" {
				_, err = admin.CreateTenant(t.Context(), &keydv1.CreateTenantRequest{Tenant: test.tenant})
				invalid(t, "CreateTenant", err)
			}

			for _, args := range [][]string{
				{"seal", "--tenant", test.tenant, "--class", test.class, "--subject-file", "-", "-o", d.dir + "/out", "/dev/null"},
				{"destroy", "--yes", "--tenant", test.tenant, "--class", test.class, "--subject-file", "-", "--reason", "test", "--json"},
			} {
				if strings.Contains(test.class, "\x00") {
					continue // no argument of a program holds a NUL
				}
				out, said, code := d.lethe(test.subject, args...)
				if code != 2 {
					t.Errorf("lethe %s: exit code %d: %s", args[0], code, said)
				}
				quiet(t, out+said, marker)
				if args[len(args)-1] == "--json" {
					var e struct {
						Error struct{ Outcome string }
					}
					if err := json.Unmarshal([]byte(said), &e); err != nil || e.Error.Outcome != "INVALID_ARGUMENT" {
						t.Errorf("lethe %s --json: %v %s", args[0], err, said)
					}
				}
			}
		})
	}
	d.t = t
}

// sealedSomewhere is a blob to open.
func sealedSomewhere(t *testing.T, c *sdk.Client) []byte {
	t.Helper()
	b, err := c.Seal(t.Context(), of("acme", "somebody"), nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// invalid fails the test unless err is INVALID_ARGUMENT, with keyd's reason.
func invalid(t *testing.T, what string, err error) {
	t.Helper()
	s := status.Convert(err)
	if s.Code() != codes.InvalidArgument {
		t.Errorf("%s: %v", what, err)
		return
	}
	for _, detail := range s.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.Domain == "lethe" && info.Reason == "INVALID_ARGUMENT" {
			return
		}
	}
	t.Errorf("%s: no reason of keyd's: %v", what, s.Details())
}

func quiet(t *testing.T, text, marker string) {
	t.Helper()
	if strings.Contains(text, marker) {
		t.Errorf("it repeats the id: %s", text)
	}
}
