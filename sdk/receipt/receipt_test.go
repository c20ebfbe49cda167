package receipt_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"lethe/sdk/receipt"
)

var update = flag.Bool("update", false, "write the vectors anew")

// story is a ledger with a destruction at 12 that came to its end, and a
// scheduled one at 14 that was cancelled.
func story(t testing.TB) *testLedger {
	l := newTestLedger(t)
	l.fill(12)
	d := destroyed()
	l.add(d) // 12
	l.fill(14)
	l.add(receipt.Statement{
		Kind: receipt.Scheduled, Time: at(10), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopePerson,
		Generation: 3, Due: at(3600), DrainedBy: at(75), Reason: "request", Anchor: "file",
	}) // 14
	l.fill(20)
	l.add(receipt.Statement{Kind: receipt.Sanitised, Time: at(700), Epoch: 4})                      // 20
	l.add(receipt.Statement{Kind: receipt.Cancelled, Time: at(800), Tenant: "acme", Of: index(14)}) // 21
	l.fill(30)
	l.add(ofEpoch(receipt.EpochRetiring, 4, at(800_000)))  // 30
	l.add(ofEpoch(receipt.EpochCancelled, 4, at(810_000))) // 31
	l.add(ofEpoch(receipt.EpochRetiring, 4, at(820_000)))  // 32
	l.add(ofEpoch(receipt.EpochClosed, 4, at(900_000)))    // 33
	l.add(receipt.Statement{
		Kind: receipt.Destroyed, Time: at(900_010), Tenant: "acme", Handle: keyIDSlice(0x77), Scope: receipt.ScopeClasses,
		Classes: []receipt.Class{{Name: "memory", Number: 3}}, Generation: 1, Existed: receipt.ExistedNo, Reason: "gdpr-art17",
		DrainedBy: at(900_020), Epoch: 5, Anchor: "file",
	}) // 34
	l.add(receipt.Statement{Kind: receipt.LedgerKey, Time: at(900_100), VerifierKey: nextKey})                                                                          // 35
	l.add(receipt.Statement{Kind: receipt.Sanitised, Time: at(900_200), Epoch: 5})                                                                                      // 36
	l.add(ofEpoch(receipt.EpochClosed, 3, at(900_300)))                                                                                                                 // 37
	l.add(receipt.Statement{Kind: receipt.Reinstated, Time: at(900_400), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopePerson, Generation: 3, Of: index(12)}) // 38
	l.add(ofEpoch(receipt.EpochCancelled, 4, at(900_500)))                                                                                                              // 39
	l.add(receipt.Statement{Kind: receipt.Sanitised, Time: at(900_600), Epoch: 4})                                                                                      // 40
	whole := receipt.Statement{
		Kind: receipt.Destroyed, Time: at(900_700), Tenant: "acme", Scope: receipt.ScopeTenant, Existed: receipt.ExistedYes, Reason: "offboarding",
		DrainedBy: at(900_765), Epoch: 5, Anchor: "file",
	}
	l.add(whole) // 41
	whole.Tenant = "other"
	l.add(whole) // 42
	d.Time, d.DrainedBy, d.FinalBy, d.FinalBasis, d.Generation = whole.Time, whole.DrainedBy, time.Time{}, "", 3
	l.add(d) // 43
	d.Generation = 2
	l.add(d) // 44
	l.fill(64)
	return l
}

// ofEpoch is a statement about an epoch's root.
func ofEpoch(kind receipt.Kind, epoch uint32, at time.Time) receipt.Statement {
	s := receipt.Statement{Kind: kind, Time: at, Epoch: epoch, KMS: "local", Root: "local-4-00"}
	switch kind {
	case receipt.EpochRetiring:
		s.Due = at.Add(10 * time.Second)
	case receipt.EpochClosed:
		s.FinalBasis = "local-root-file"
	}
	return s
}

func keyIDSlice(b byte) []byte { id := keyID(b); return id[:] }

// receipts are the receipts of the story that verify.
func receipts(t testing.TB, l *testLedger) map[string][]byte {
	first := newTestLedger(t)
	first.fill(1)
	return map[string][]byte{
		"destroyed":                       encode(t, l.entry(12, 13)),
		"destroyed, in a larger tree":     encode(t, l.entry(12, 50)),
		"destroyed, sanitised":            encode(t, l.entry(12, 13), l.entry(20, 21)),
		"destroyed, sanitised, final":     encode(t, l.entry(12, 13), l.entry(20, 21), l.entry(33, 34)),
		"destroyed, sanitised, retiring":  encode(t, l.entry(12, 13), l.entry(20, 21), l.entry(30, 31)),
		"destroyed, sanitised, kept":      encode(t, l.entry(12, 13), l.entry(20, 21), l.entry(31, 32)),
		"kept, and retiring again":        encode(t, l.entry(12, 13), l.entry(31, 32), l.entry(32, 33)),
		"kept, and final in the end":      encode(t, l.entry(12, 13), l.entry(20, 21), l.entry(31, 32), l.entry(33, 34)),
		"no key existed, no final date":   encode(t, l.entry(34, 35)),
		"scheduled":                       encode(t, l.entry(14, 16)),
		"scheduled, cancelled":            encode(t, l.entry(14, 16), l.entry(21, 22)),
		"scheduled, its tenant destroyed": encode(t, l.entry(14, 16), l.entry(41, 42)),
		"scheduled, its person destroyed": encode(t, l.entry(14, 16), l.entry(43, 44)),
		"reinstated":                      encode(t, l.entry(38, 39)),
		"the next key":                    encode(t, l.entry(35, 64)),
		"the first entry of a ledger":     encode(t, first.entry(0, 1)),
		"two entries in one and one tree": encode(t, l.entry(12, 33), l.entry(20, 33)),
	}
}

func classify(err error) string {
	var classes []string
	for name, target := range map[string]error{
		"malformed": receipt.ErrMalformed, "signature": receipt.ErrSignature, "proof": receipt.ErrProof, "mismatch": receipt.ErrMismatch,
	} {
		if errors.Is(err, target) {
			classes = append(classes, name)
		}
	}
	switch {
	case err == nil:
		return "verified"
	case len(classes) != 1:
		return fmt.Sprintf("unclassified %v: %v", classes, err)
	}
	return classes[0]
}

// TestEveryBit flips every bit of several receipts. Nothing may verify.
func TestEveryBit(t *testing.T) {
	l := story(t)
	keys := l.pinned()
	all := receipts(t, l)
	for _, name := range []string{"destroyed", "destroyed, sanitised, final", "the next key", "the first entry of a ledger"} {
		good := all[name]
		if _, err := receipt.Verify(good, keys); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b := bytes.Clone(good)
		counts := make(map[string]int)
		for i := range b {
			for bit := range 8 {
				b[i] ^= 1 << bit
				_, err := receipt.Verify(b, keys)
				class := classify(err)
				if class == "verified" || strings.HasPrefix(class, "unclassified") {
					t.Fatalf("%s: byte %d (%q), bit %d: %s", name, i, good[i], bit, class)
				}
				counts[class]++
				b[i] ^= 1 << bit
			}
		}
		t.Logf("%s: %d bits: %v", name, 8*len(b), counts)
	}
}

// TestEveryByte removes, doubles and cuts off at every byte.
func TestEveryByte(t *testing.T) {
	l := story(t)
	keys, good := l.pinned(), encode(t, l.entry(12, 13), l.entry(20, 21))
	for i := range good {
		for name, b := range map[string][]byte{
			"removed": append(bytes.Clone(good[:i]), good[i+1:]...),
			"doubled": append(bytes.Clone(good[:i+1]), good[i:]...),
			"cut off": good[:i],
		} {
			if bytes.Equal(b, good) {
				continue
			}
			if class := classify(verify(b, keys)); class == "verified" || strings.HasPrefix(class, "unclassified") {
				t.Fatalf("byte %d %s: %s", i, name, class)
			}
		}
	}
}

func verify(b []byte, keys *receipt.Keys) error {
	_, err := receipt.Verify(b, keys)
	return err
}

// vector is one case of proto/vectors/receipts/verify.json.
type vector struct {
	Name         string   `json:"name"`
	VerifierKeys []string `json:"verifier_keys"`
	Receipt      string   `json:"receipt"`
	Result       string   `json:"result"`
	// Entries, where it verifies.
	Entries []vectorEntry `json:"entries,omitempty"`
}

type vectorEntry struct {
	Index    uint64 `json:"index"`
	Kind     string `json:"kind"`
	LeafHash string `json:"leaf_hash"`
	TreeSize uint64 `json:"tree_size"`
	Root     string `json:"root"`
}

// verifyVectors makes the cases of verify.json.
func verifyVectors(t *testing.T) []vector {
	l := story(t)
	key2 := newTestKey(t, testOrigin, 2)
	stranger := newTestKey(t, "lethe/ffffffffffffffffffffffffffffffff", 3)
	other := newTestLedger(t)
	other.origin, other.key = stranger.name, stranger
	other.fill(40)

	var out []vector
	add := func(result, name string, b []byte, vkeys ...string) {
		if len(vkeys) == 0 {
			vkeys = []string{l.key.vkey}
		}
		out = append(out, vector{Name: name, VerifierKeys: vkeys, Receipt: string(b), Result: result})
	}
	all := receipts(t, l)
	for _, name := range []string{
		"destroyed", "destroyed, in a larger tree", "destroyed, sanitised", "destroyed, sanitised, final",
		"destroyed, sanitised, retiring", "destroyed, sanitised, kept", "kept, and retiring again", "kept, and final in the end",
		"no key existed, no final date", "scheduled", "scheduled, cancelled", "scheduled, its tenant destroyed", "scheduled, its person destroyed",
		"reinstated", "the next key",
		"the first entry of a ledger", "two entries in one and one tree",
	} {
		add("verified", name, all[name])
	}
	good := all["destroyed"]
	add("verified", "two keys are pinned", good, key2.vkey, l.key.vkey)
	signed := func(keys ...note.Signer) []byte {
		e := l.entry(12, 13)
		e.Proof.Checkpoint = l.checkpoint(13, keys...)
		return encode(t, e)
	}
	add("verified", "both of two pinned keys signed", signed(l.key, key2), l.key.vkey, key2.vkey)

	edit := func(old, new string) []byte {
		if strings.Count(string(good), old) == 0 {
			t.Fatalf("nothing to edit: %q", old)
		}
		return []byte(strings.Replace(string(good), old, new, 1))
	}
	line := func(n int) string { // a line of the proof, without its end
		var doc struct{ Entries []struct{ Proof string } }
		if err := json.Unmarshal(good, &doc); err != nil {
			t.Fatal(err)
		}
		return strings.Split(doc.Entries[0].Proof, "\n")[n]
	}
	entries, err := receipt.Parse(good)
	if err != nil {
		t.Fatal(err)
	}
	hashes := len(entries[0].Proof.Hashes)
	signature := line(2 + hashes + 1 + 3 + 1) // header, index, hashes, blank, text, blank
	if !strings.HasPrefix(signature, "— ") {
		t.Fatalf("not a signature line: %q", signature)
	}

	// Malformed.
	add("malformed", "nothing", nil)
	add("malformed", "no entries", []byte(`{"entries":[],"format":"lethe.receipt/v1"}`+"\n"))
	add("malformed", "entries are null", []byte(`{"entries":null,"format":"lethe.receipt/v1"}`+"\n"))
	add("malformed", "another format", edit(`lethe.receipt/v1`, `lethe.receipt/v2`))
	add("malformed", "no newline at the end", good[:len(good)-1])
	add("malformed", "two newlines at the end", append(bytes.Clone(good), '\n'))
	add("malformed", "CRLF at the end", append(bytes.Clone(good[:len(good)-1]), '\r', '\n'))
	add("malformed", "a byte order mark", append([]byte("\ufeff"), good...))
	add("malformed", "a space", edit(`"salt":`, `"salt": `))
	add("malformed", "unknown member", edit(`"salt":`, `"key":"x","salt":`))
	add("malformed", "its own key", edit(`{"entries"`, `{"a_key":"`+key2.vkey+`","entries"`))
	add("malformed", "a member twice", edit(`,"format":"lethe.receipt/v1"`, `,"format":"lethe.receipt/v1","format":"lethe.receipt/v1"`))
	add("malformed", "case of a member", edit(`"salt"`, `"Salt"`))
	add("malformed", "CRLF in the proof", edit(`\nindex`, `\r\nindex`))
	add("malformed", "a number in the statement", edit(`"epoch":"4"`, `"epoch":4`))
	add("malformed", "an unknown kind of statement", edit(`"kind":"destroyed"`, `"kind":"erased"`))
	add("malformed", "extra data in the proof", edit(`@v1\nindex`, `@v1\nextra AAAA\nindex`))
	add("malformed", "index with a leading zero", edit(`index 12`, `index 012`))
	add("malformed", "a short hash", edit(line(2), line(2)[4:]))
	add("malformed", "a hash whose last bits are not zero", edit(line(2), nonZeroTail(line(2))))
	add("malformed", "a signature whose last bits are not zero", edit(signature, nonZeroTail(signature)))
	add("malformed", "a signature twice", edit(signature, signature+`\n`+signature))
	add("malformed", "no signature", edit(signature+`\n`, ``))
	add("malformed", "an extension line", edit(`\n\n— `, `\nextension\n\n— `))
	add("malformed", "size with a leading zero", edit(`\n13\n`, `\n013\n`))
	add("malformed", "an unescaped solidus escaped", edit(`lethe.receipt/v1`, `lethe.receipt\/v1`))
	add("malformed", "a salt of 31 bytes", edit(base64.StdEncoding.EncodeToString(l.salts[12]), base64.StdEncoding.EncodeToString(l.salts[12][1:])))

	// Signature.
	add("signature", "no such key is pinned", good, key2.vkey)
	add("signature", "signed anew with another key of the same name", signed(key2))
	add("signature", "one more signature, of an unknown key", signed(l.key, key2))
	add("signature", "one more signature, of a stranger", signed(l.key, stranger))
	add("signature", "another size", edit(`\n13\n`, `\n14\n`))
	forged := l.entry(12, 13)
	forged.Proof.Checkpoint = bytes.Replace(forged.Proof.Checkpoint, []byte(testOrigin+"\n"), []byte("lethe/1"+testOrigin[7:]+"\n"), 1)
	add("signature", "another origin", encode(t, forged))
	mixed := newTestLedger(t)
	mixed.origin = stranger.name
	mixed.fill(20)
	e := mixed.entry(3, 20)
	e.Proof.Checkpoint = mixed.checkpoint(20, l.key)
	add("signature", "signed by the pinned key of another ledger", encode(t, e))

	// Proof.
	add("proof", "another reason", edit(`gdpr-art17`, `gdpr-art18`))
	add("proof", "another handle", edit(`a00102030405060708090a0b0c0d0e0f`, `a10102030405060708090a0b0c0d0e0f`))
	add("proof", "drained earlier", edit(`12:01:05.250Z`, `12:01:04.250Z`))
	add("proof", "another index", edit(`index 12`, `index 11`))
	add("proof", "an index beyond the tree", edit(`index 12`, `index 13`))
	add("proof", "another salt", edit(base64.StdEncoding.EncodeToString(l.salts[12]), base64.StdEncoding.EncodeToString(l.salts[11])))
	add("proof", "a hash too few", edit(line(2)+`\n`, ``))
	add("proof", "a hash too many", edit(line(2), line(2)+`\n`+line(2)))
	e = l.entry(12, 13)
	e.Proof.Checkpoint = l.checkpoint(14)
	add("proof", "the checkpoint of another tree", encode(t, e))
	e = l.entry(12, 13)
	e.Statement = l.stated[34]
	add("proof", "the statement of another entry", encode(t, e))

	// Mismatch.
	add("mismatch", "a later stage alone", encode(t, l.entry(20, 21)))
	add("mismatch", "a root that is kept, alone", encode(t, l.entry(31, 32)))
	add("mismatch", "a later stage of a later epoch", encode(t, l.entry(12, 13), l.entry(36, 37)))
	add("mismatch", "the closing of an earlier epoch", encode(t, l.entry(12, 13), l.entry(37, 38)))
	add("mismatch", "a stage of a destruction behind one that is only scheduled", encode(t, l.entry(14, 16), l.entry(20, 21)))
	add("mismatch", "sanitised twice", encode(t, l.entry(12, 13), l.entry(20, 21), l.entry(40, 41)))
	add("mismatch", "kept after it was closed", encode(t, l.entry(12, 13), l.entry(33, 34), l.entry(39, 40)))
	add("mismatch", "draining is not a stage", encode(t, l.entry(12, 13), l.entry(13, 14)))
	add("mismatch", "final before the destruction", encode(t, l.entry(33, 34), l.entry(12, 13)))
	add("mismatch", "an entry twice", encode(t, l.entry(12, 13), l.entry(12, 13)))
	add("mismatch", "two destructions", encode(t, l.entry(12, 13), l.entry(34, 35)))
	add("mismatch", "scheduled, and a destruction of somebody else", encode(t, l.entry(14, 16), l.entry(34, 35)))
	add("mismatch", "scheduled, and another tenant destroyed", encode(t, l.entry(14, 16), l.entry(42, 43)))
	add("mismatch", "scheduled, and an earlier life destroyed", encode(t, l.entry(14, 16), l.entry(44, 45)))
	early := newTestLedger(t)
	early.fill(3)
	early.add(receipt.Statement{Kind: receipt.Sanitised, Time: at(1), Epoch: 4})
	early.fill(7)
	early.add(destroyed())
	add("mismatch", "a stage that was logged before what it is about", encode(t, early.entry(7, 8), early.entry(3, 8)))
	e = other.entry(20, 40)
	add("mismatch", "an entry of another ledger", encode(t, l.entry(12, 13), e), l.key.vkey, stranger.vkey)
	fork := story(t)
	fork.salts, fork.stated, fork.hashes = nil, nil, nil
	fork.fill(11)
	fork.add(destroyed())
	fork.add(destroyed())
	fork.add(receipt.Statement{Kind: receipt.Sanitised, Time: at(1), Epoch: 4})
	add("mismatch", "two roots of one size", encode(t, l.entry(12, 14), fork.entry(13, 14)))
	return out
}

// nonZeroTail sets the lowest of the bits that base64 pads with.
func nonZeroTail(s string) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	s, ok := strings.CutSuffix(s, "=")
	last := strings.IndexByte(alphabet, s[len(s)-1])
	if !ok || last&3 != 0 {
		panic("not the base64 of 2 more than a multiple of 3 bytes")
	}
	return s[:len(s)-1] + alphabet[last+1:last+2] + "="
}

func TestVerifyVectors(t *testing.T) {
	made := verifyVectors(t)
	for i := range made {
		checkVector(t, &made[i], true)
	}
	if *update {
		writeVectors(t, "verify.json", made)
	}
	var kept []vector
	readVectors(t, "verify.json", &kept)
	for i := range kept {
		checkVector(t, &kept[i], false)
	}
	if !reflect.DeepEqual(kept, made) {
		t.Error("verify.json is not what the test makes")
	}
}

// checkVector verifies a case; with fill, it fills in what a good one yields.
func checkVector(t *testing.T, c *vector, fill bool) {
	t.Helper()
	v, err := receipt.Verify([]byte(c.Receipt), pin(t, c.VerifierKeys...))
	if got := classify(err); got != c.Result {
		t.Errorf("%s: got %s (%v), want %s", c.Name, got, err, c.Result)
	}
	if err != nil {
		if v != nil {
			t.Errorf("%s: something was returned with the error", c.Name)
		}
		return
	}
	raw, err := receipt.Parse([]byte(c.Receipt))
	if err != nil {
		t.Fatal(err)
	}
	var entries []vectorEntry
	for i, e := range v.Entries {
		leaf := receipt.LeafHash(raw[i].Salt, raw[i].Statement)
		entries = append(entries, vectorEntry{
			Index: e.Index, Kind: string(e.Statement.Kind), LeafHash: base64.StdEncoding.EncodeToString(leaf[:]),
			TreeSize: e.Checkpoint.Size, Root: base64.StdEncoding.EncodeToString(e.Checkpoint.Root[:]),
		})
	}
	if fill {
		c.Entries = entries
	} else if !reflect.DeepEqual(entries, c.Entries) {
		t.Errorf("%s: entries %+v, want %+v", c.Name, entries, c.Entries)
	}
}

func writeVectors(t *testing.T, name string, v any) {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		t.Fatal(err)
	}
	dir := filepath.FromSlash("../../proto/vectors/receipts")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// consistencyVector is one case of proto/vectors/receipts/consistency.json.
type consistencyVector struct {
	Name         string   `json:"name"`
	VerifierKeys []string `json:"verifier_keys"`
	Older        string   `json:"older"`
	Newer        string   `json:"newer"`
	Proof        []string `json:"proof"` // base64
	Result       string   `json:"result"`
}

func consistencyVectors(t *testing.T) []consistencyVector {
	l := story(t)
	fork := newTestLedger(t)
	fork.fill(13)
	fork.add(destroyed())
	fork.fill(64)
	stranger := newTestKey(t, "lethe/ffffffffffffffffffffffffffffffff", 3)
	other := newTestLedger(t)
	other.origin, other.key = stranger.name, stranger
	other.fill(40)
	var out []consistencyVector
	add := func(result, name string, older, newer []byte, proof [][]byte) {
		p := []string{}
		for _, h := range proof {
			p = append(p, base64.StdEncoding.EncodeToString(h))
		}
		out = append(out, consistencyVector{
			Name: name, VerifierKeys: []string{l.key.vkey, stranger.vkey}, Older: string(older), Newer: string(newer), Proof: p, Result: result,
		})
	}
	for _, c := range [][2]uint64{{1, 2}, {13, 14}, {7, 64}, {32, 64}, {33, 61}, {63, 64}, {64, 64}} {
		add("verified", fmt.Sprintf("from %d to %d", c[0], c[1]), l.checkpoint(c[0]), l.checkpoint(c[1]), l.consistency(c[0], c[1]))
	}
	add("verified", "from the empty tree", l.checkpoint(0), l.checkpoint(40), nil)
	add("verified", "from the empty tree to itself", l.checkpoint(0), l.checkpoint(0), nil)
	add("proof", "from the empty tree with a proof", l.checkpoint(0), l.checkpoint(40), l.consistency(20, 40))
	add("proof", "a hash too few", l.checkpoint(13), l.checkpoint(40), l.consistency(13, 40)[1:])
	add("proof", "a hash too many", l.checkpoint(13), l.checkpoint(40), append(l.consistency(13, 40), make([]byte, 32)))
	add("proof", "a proof to itself", l.checkpoint(13), l.checkpoint(13), l.consistency(13, 40)[:1])
	add("proof", "of other sizes", l.checkpoint(13), l.checkpoint(40), l.consistency(14, 40))
	add("proof", "of a fork", l.checkpoint(20), fork.checkpoint(40), fork.consistency(20, 40))
	add("mismatch", "two roots of one size", l.checkpoint(20), fork.checkpoint(20), nil)
	add("mismatch", "backwards", l.checkpoint(40), l.checkpoint(13), l.consistency(13, 40))
	add("mismatch", "two ledgers", l.checkpoint(13), other.checkpoint(40), nil)
	add("signature", "the older is unknown", l.checkpoint(13, newTestKey(t, testOrigin, 2)), l.checkpoint(40), l.consistency(13, 40))
	add("signature", "the newer is unknown", l.checkpoint(13), l.checkpoint(40, newTestKey(t, testOrigin, 2)), l.consistency(13, 40))
	add("malformed", "a short hash", l.checkpoint(13), l.checkpoint(40), append(l.consistency(13, 40)[1:], make([]byte, 31)))
	add("malformed", "no checkpoint", nil, l.checkpoint(40), nil)
	return out
}

func TestConsistencyVectors(t *testing.T) {
	made := consistencyVectors(t)
	if *update {
		writeVectors(t, "consistency.json", made)
	}
	var kept []consistencyVector
	readVectors(t, "consistency.json", &kept)
	if !reflect.DeepEqual(kept, made) {
		t.Error("consistency.json is not what the test makes")
	}
	for _, c := range kept {
		var proof [][]byte
		for _, p := range c.Proof {
			h, err := base64.StdEncoding.DecodeString(p)
			if err != nil {
				t.Fatal(err)
			}
			proof = append(proof, h)
		}
		err := receipt.VerifyConsistency(pin(t, c.VerifierKeys...), []byte(c.Older), []byte(c.Newer), proof)
		if got := classify(err); got != c.Result {
			t.Errorf("%s: got %s (%v), want %s", c.Name, got, err, c.Result)
		}
	}
}

// A pinned key's owner may sign any size; the arithmetic must not hang on it.
func TestHugeSizes(t *testing.T) {
	l := newTestLedger(t)
	l.fill(3)
	for _, size := range []uint64{1<<60 - 1, 1 << 60, 1<<62 + 1, 1<<63 - 1, 1 << 63, 1<<64 - 1} {
		c := receipt.Checkpoint{Origin: l.origin, Size: size, Root: l.root(3)}
		signed, err := note.Sign(&note.Note{Text: c.Text()}, l.key)
		if err != nil {
			t.Fatal(err)
		}
		_, err = l.pinned().Open(signed)
		if ok := err == nil; ok != (size < 1<<60) {
			t.Errorf("size %d: %v", size, err)
		}
		if err := receipt.VerifyConsistency(l.pinned(), l.checkpoint(3), signed, l.consistency(2, 3)); err == nil {
			t.Errorf("size %d: consistent", size)
		}
		if err != nil {
			continue
		}
		e := l.entry(1, 3)
		e.Proof.Checkpoint = signed
		if class := classify(verify(encode(t, e), l.pinned())); class != "proof" {
			t.Errorf("size %d: %s", size, class)
		}
	}
}

func TestPinKeys(t *testing.T) {
	good := newTestKey(t, testOrigin, 1).vkey
	for name, keys := range map[string][]string{
		"none":                   {},
		"empty":                  {""},
		"not a key":              {"lethe"},
		"wrong hash":             {strings.Replace(good, "+", "+0", 1)},
		"a newline":              {good + "\n"},
		"not canonical base64":   {nonZeroTailKey(good)},
		"one good and one bad":   {good, "x"},
		"upper-case hash":        {upperHash(good)},
		"an unknown algorithm":   {"lethe/x+00000000+AgAA"},
		"a private key in place": {"PRIVATE+KEY+" + good},
	} {
		if _, err := receipt.PinKeys(keys...); !errors.Is(err, receipt.ErrMalformed) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	l := story(t)
	if err := verify(receipts(t, l)["destroyed"], pin(t, good, good)); err != nil {
		t.Errorf("a key pinned twice: %v", err)
	}
	if err := verify(receipts(t, l)["destroyed"], nil); classify(err) != "signature" {
		t.Errorf("no key pinned: %v", err)
	}
}

// nonZeroTailKey: a key is 33 bytes, so its base64 has no padding; a newline
// inside is what lenient decoding lets pass.
func nonZeroTailKey(k string) string { return k[:len(k)-4] + "\n" + k[len(k)-4:] }

func upperHash(k string) string {
	parts := strings.SplitN(k, "+", 3)
	return parts[0] + "+" + strings.ToUpper(parts[1]) + "+" + parts[2]
}

func TestStages(t *testing.T) {
	l := story(t)
	all := receipts(t, l)
	d := receipt.Stages{
		Denied: at(0), Destroyed: at(0), DrainedBy: at(65), FinalBy: at(14 * 24 * 3600), FinalBasis: "local-root-file",
	}
	sanitised := d
	sanitised.Sanitised = at(700)
	final := sanitised
	final.Final = at(900_000)
	retiring := sanitised
	retiring.RootDue = at(800_010)
	kept := sanitised
	kept.RootKept = at(810_000)
	again := d
	again.RootDue = at(820_010)
	for name, want := range map[string]receipt.Stages{
		"destroyed":                       d,
		"destroyed, sanitised":            sanitised,
		"destroyed, sanitised, final":     final,
		"destroyed, sanitised, retiring":  retiring,
		"destroyed, sanitised, kept":      kept,
		"kept, and retiring again":        again,
		"kept, and final in the end":      final,
		"no key existed, no final date":   {Denied: at(900_010), Destroyed: at(900_010), DrainedBy: at(900_020)},
		"scheduled":                       {Denied: at(10), Due: at(3600), DrainedBy: at(75)},
		"scheduled, cancelled":            {Due: at(3600), DrainedBy: at(75), Cancelled: at(800)},
		"scheduled, its tenant destroyed": {Denied: at(10), Due: at(3600), Destroyed: at(900_700), DrainedBy: at(900_765)},
		"the next key":                    {},
	} {
		v, err := receipt.Verify(all[name], l.pinned())
		if err != nil {
			t.Fatal(err)
		}
		if got := v.Stages(); got != want {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, want)
		}
	}
}

func TestDescribe(t *testing.T) {
	l := story(t)
	all := receipts(t, l)
	for name, want := range map[string][]string{
		"destroyed": {
			"operator-asserted", "sanitised:   not stated", "final:       not stated yet: planned by 2026-03-15T12:00:00.250Z, on the basis local-root-file",
			"drained:     by 2026-03-01T12:01:05.250Z", "anchor:      file", "2 destroyed", "the whole person", "not that no copy",
		},
		"destroyed, sanitised, final": {
			"sanitised:   at 2026-03-01T12:11:40.250Z", "final:       at 2026-03-11T22:00:00.250Z, on the basis local-root-file", "operator-asserted",
		},
		"destroyed, sanitised, kept":     {"final:       no: at 2026-03-10T21:00:00.250Z the destruction of the root was called off"},
		"destroyed, sanitised, retiring": {"final:       not stated yet: the root is to be destroyed at 2026-03-10T18:13:30.250Z"},
		"no key existed, no final date":  {"none existed", "final:       not stated, and no date is given"},
		"scheduled": {"destroyed:   not stated; due at 2026-03-01T13:00:00.250Z", "sanitised:   not stated",
			"denied:      since 2026-03-01T12:00:10.250Z: nobody is given these keys, unless it was cancelled since", "drained:     not stated"},
		"scheduled, its tenant destroyed": {"denied:      since 2026-03-01T12:00:10.250Z: nobody is given these keys\n", "all of the tenant's destroyed", "drained:     by"},
		"scheduled, cancelled":            {"nothing was destroyed"},
		"the next key":                    {nextKey, "anchor:      not stated"},
	} {
		v, err := receipt.Verify(all[name], l.pinned())
		if err != nil {
			t.Fatal(err)
		}
		text := v.String()
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: nothing says %q:\n%s", name, w, text)
			}
		}
	}
	v, err := receipt.Verify(all["destroyed"], l.pinned())
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Describe(failingWriter{}); !errors.Is(err, errWriter) {
		t.Errorf("Describe to a failing writer: %v", err)
	}
	t.Log("\n" + v.String())
}

var errWriter = errors.New("disk full")

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errWriter }

// Every kind of statement can be described.
func TestDescribeEveryKind(t *testing.T) {
	l := newTestLedger(t)
	for _, s := range examples() {
		n := l.add(s)
		switch s.Kind {
		case receipt.Sanitised, receipt.EpochCancelled, receipt.Cancelled:
			continue // never first
		}
		v, err := receipt.Verify(encode(t, l.entry(n, n+1)), l.pinned())
		if err != nil {
			t.Fatalf("%s: %v", s.Kind, err)
		}
		if text := v.String(); !strings.Contains(text, string(s.Kind)) || strings.Contains(text, "%!") {
			t.Errorf("%s:\n%s", s.Kind, text)
		}
	}
}

// What is final of an expired bucket is not what a legal hold kept of it.
func TestExpiredButHeld(t *testing.T) {
	l := newTestLedger(t)
	n := l.add(receipt.Statement{
		Kind: receipt.Expired, Time: at(8), Tenant: "acme", Classes: []receipt.Class{{Name: "trace", Number: 1}}, BucketStartS: 1_700_000_000, BucketEndS: 1_700_086_400,
		DrainedBy: at(70), FinalBy: at(900), FinalBasis: "local-root-file", Epoch: 4, Anchor: "file",
	})
	sanitised := l.add(receipt.Statement{Kind: receipt.Sanitised, Time: at(100), Epoch: 4})
	closed := l.add(ofEpoch(receipt.EpochClosed, 4, at(900)))
	v, err := receipt.Verify(encode(t, l.entry(n, n+1), l.entry(sanitised, sanitised+1), l.entry(closed, closed+1)), l.pinned())
	if err != nil {
		t.Fatal(err)
	}
	if s := v.Stages(); !s.ButHeld || !s.Final.Equal(at(900)) {
		t.Errorf("%+v", s)
	}
	if text := v.String(); !strings.Contains(text, "but held:    none of this is about the keys of subjects whom a legal hold covered") {
		t.Error("\n" + text)
	}
}

func TestEncodeBounds(t *testing.T) {
	l := story(t)
	if _, err := receipt.Encode(); !errors.Is(err, receipt.ErrMalformed) {
		t.Errorf("no entries: %v", err)
	}
	e := l.entry(12, 13)
	many := make([]receipt.Entry, receipt.MaxEntries+1)
	for i := range many {
		many[i] = e
	}
	if _, err := receipt.Encode(many...); !errors.Is(err, receipt.ErrMalformed) {
		t.Errorf("too many entries: %v", err)
	}
	if _, err := receipt.Encode(many[:receipt.MaxEntries]...); err != nil {
		t.Errorf("as many entries as there may be: %v", err)
	}
	for name, spoil := range map[string]func(*receipt.Entry){
		"no salt":       func(e *receipt.Entry) { e.Salt = nil },
		"no statement":  func(e *receipt.Entry) { e.Statement = nil },
		"no checkpoint": func(e *receipt.Entry) { e.Proof.Checkpoint = nil },
		"61 hashes":     func(e *receipt.Entry) { e.Proof.Hashes = make([][32]byte, 61) },
		"no proof":      func(e *receipt.Entry) { e.Proof = receipt.Proof{} },
	} {
		bad := e
		spoil(&bad)
		if _, err := receipt.Encode(bad); !errors.Is(err, receipt.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A statement's own form is the ledger's to keep, and a verifier's to check.
	e.Statement = []byte(`{"kind":"destroyed"}`)
	b, err := receipt.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := receipt.Parse(b); !errors.Is(err, receipt.ErrMalformed) {
		t.Errorf("a statement that is none: %v", err)
	}
	if _, err := receipt.Parse(bytes.Repeat([]byte{' '}, receipt.MaxReceipt+1)); !errors.Is(err, receipt.ErrMalformed) {
		t.Errorf("too large: %v", err)
	}
}

// LeafHash is what RFC 6962 says of the record SHA-256(salt ‖ statement).
func TestLeafHash(t *testing.T) {
	got := receipt.LeafHash(make([]byte, 32), []byte("{}"))
	// sha256(00 ‖ sha256(32 zeros ‖ "{}")), computed with sha256sum.
	const want = "627b40308cb462615d283a539f5d5dc5d0d9b259ffd267ddcb659b91b217b85e"
	if h := fmt.Sprintf("%x", got); h != want {
		t.Fatalf("got %s", h)
	}
}

// Proofs agree with package tlog's own check, for every entry of every tree.
func TestEveryProof(t *testing.T) {
	l := newTestLedger(t)
	l.fill(33)
	for size := uint64(1); size <= 33; size++ {
		for n := range size {
			e := l.entry(n, size)
			hashes := make(tlog.RecordProof, len(e.Proof.Hashes))
			for i, h := range e.Proof.Hashes {
				hashes[i] = h
			}
			if err := tlog.CheckRecord(hashes, int64(size), l.root(size), int64(n), receipt.LeafHash(e.Salt, e.Statement)); err != nil {
				t.Fatal(err)
			}
			if err := verify(encode(t, e), l.pinned()); err != nil {
				t.Fatalf("entry %d of %d: %v", n, size, err)
			}
		}
	}
}

func seeds(f *testing.F) *testLedger {
	l := story(f)
	for _, b := range receipts(f, l) {
		f.Add(b)
	}
	var kept []vector
	b, err := os.ReadFile("../../proto/vectors/receipts/verify.json")
	if err != nil {
		f.Fatal(err)
	}
	if err := json.Unmarshal(b, &kept); err != nil {
		f.Fatal(err)
	}
	for _, v := range kept {
		f.Add([]byte(v.Receipt))
	}
	return l
}

func FuzzParseReceipt(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := receipt.Parse(b)
		if err != nil {
			if classify(err) != "malformed" {
				t.Fatal(classify(err))
			}
			return
		}
		again, err := receipt.Encode(entries...)
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%q became %q, %v", b, again, err)
		}
	})
}

// FuzzVerify: whatever verifies is one of the statements that the ledger holds.
func FuzzVerify(f *testing.F) {
	l := seeds(f)
	keys := l.pinned()
	first := newTestLedger(f)
	first.fill(1)
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := receipt.Verify(b, keys)
		if class := classify(err); strings.HasPrefix(class, "unclassified") {
			t.Fatal(class)
		}
		if err != nil {
			return
		}
		for _, e := range v.Entries {
			s, err := e.Statement.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(s, l.stated[e.Index]) && !(e.Index == 0 && bytes.Equal(s, first.stated[0])) {
				t.Fatalf("verified a statement that was never made: %s", s)
			}
		}
		_ = v.String()
		_ = v.Stages()
	})
}
