package keys_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	keydv1 "lethe/proto/keyd/v1"
)

// A query that names no key id gets its subject's among the recipients, and
// no other.
func TestRecipients(t *testing.T) {
	r := newRig(t)
	if _, err := r.CreateTenant(t.Context(), "beta", nil); err != nil {
		t.Fatal(err)
	}
	people := []string{"ann", "bob", "cleo"}
	leased := map[string]*keydv1.BlobKey{}
	var recipients [][]byte
	for _, p := range people {
		leased[p] = r.seal(p, "trace")
		recipients = append(recipients, leased[p].KeyId)
	}
	slices.SortFunc(recipients, bytes.Compare)
	stranger := r.seal("stranger", "trace")
	r.seal("ann", "backup")
	r.destroy("cleo", "r1")

	among := func(subject, class string) *keydv1.BlobKeyQuery {
		q := openQuery("acme", subject, class, leased["ann"])
		q.KeyId = nil
		return q
	}
	results, err := r.BlobKeysAmong(t.Context(), []*keydv1.BlobKeyQuery{
		among("ann", "trace"), among("bob", "trace"), among("cleo", "trace"), among("stranger", "trace"),
		among("nobody", "trace"), among("ann", "backup"), openQuery("acme", "stranger", "trace", stranger),
	}, recipients, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []keydv1.Outcome{ok, ok, isErased, isWrong, isWrong, isWrong, ok} {
		r.want(fmt.Sprint("query ", i), results[i].Err, want)
	}
	for i, p := range people {
		if !bytes.Equal(results[i].Recipient, leased[p].KeyId) {
			t.Errorf("%s is found to be recipient %x, not %x", p, results[i].Recipient, leased[p].KeyId)
		}
	}
	for i := range 2 {
		if !bytes.Equal(results[i].Key.Key, leased[people[i]].Key) {
			t.Errorf("%s gets another key", people[i])
		}
	}
	for _, i := range []int{3, 4, 6} {
		if results[i].Recipient != nil {
			t.Errorf("query %d: recipient %x", i, results[i].Recipient)
		}
	}

	// Blobs whose keys nobody has heard of are no evidence of anything.
	never := [][]byte{bytes.Repeat([]byte{1}, 16), bytes.Repeat([]byte{2}, 16)}
	results, err = r.BlobKeysAmong(t.Context(), []*keydv1.BlobKeyQuery{among("ann", "trace")}, never, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.want("unknown keys", results[0].Err, isUnknown)

	states, err := r.Recipients(t.Context(), "acme", append(slices.Clone(never), recipients...))
	if err != nil {
		t.Fatal(err)
	}
	handles := map[string]bool{}
	for i, s := range states {
		want := ok
		switch {
		case i < len(never):
			want = isUnknown
		case bytes.Equal(recipients[i-len(never)], leased["cleo"].KeyId):
			want = isErased
		}
		if s.Outcome != want || (len(s.Handle) == 16) != (i >= len(never)) {
			t.Errorf("recipient %d: %v", i, s)
		}
		handles[string(s.Handle)] = true
	}
	if len(handles) != 4 {
		t.Errorf("%d handles", len(handles))
	}
	// Another tenant learns nothing of them.
	states, err = r.Recipients(t.Context(), "beta", recipients)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range states {
		if s.Outcome != isUnknown || len(s.Handle) != 0 {
			t.Errorf("another tenant is told %v", s)
		}
	}
}

func TestRecipientsAreChecked(t *testing.T) {
	r := newRig(t)
	id := func(i int) []byte { return bytes.Repeat([]byte{byte(i)}, 16) }
	var many [][]byte
	for i := range 65 {
		many = append(many, id(i))
	}
	q := openQuery("acme", "ann", "trace", r.seal("ann", "trace"))
	other := openQuery("beta", "ann", "trace", r.seal("ann", "trace"))
	for name, recipients := range map[string][][]byte{
		"one": {id(1)}, "too many": many, "not ascending": {id(2), id(1)}, "twice": {id(1), id(1)}, "short": {id(1), id(2)[:15]},
	} {
		_, err := r.BlobKeysAmong(t.Context(), []*keydv1.BlobKeyQuery{q}, recipients, nil)
		r.want(name, err, isInvalid)
	}
	_, err := r.BlobKeysAmong(t.Context(), []*keydv1.BlobKeyQuery{q, other}, many[:2], nil)
	r.want("two tenants", err, isInvalid)
	q.KeyId = nil
	results, err := r.BlobKeysAmong(t.Context(), []*keydv1.BlobKeyQuery{q}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.want("no key id", results[0].Err, isInvalid)
}
