package receipt_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"lethe/sdk/receipt"
)

// testLedger is a ledger made with package tlog alone, from fixed keys and
// salts, so that everything made from it is the same at every run.
type testLedger struct {
	t      testing.TB
	origin string
	key    testKey
	hashes []tlog.Hash
	salts  [][]byte
	stated [][]byte
}

// testKey is a note.Signer.
type testKey struct {
	name string
	priv ed25519.PrivateKey
	hash uint32
	vkey string
}

func newTestKey(t testing.TB, name string, seed byte) testKey {
	t.Helper()
	priv := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	vkey, err := note.NewEd25519VerifierKey(name, priv.Public().(ed25519.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		t.Fatal(err)
	}
	return testKey{name: name, priv: priv, hash: v.KeyHash(), vkey: vkey}
}

func (k testKey) Name() string                    { return k.name }
func (k testKey) KeyHash() uint32                 { return k.hash }
func (k testKey) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(k.priv, msg), nil }

const testOrigin = "lethe/000102030405060708090a0b0c0d0e0f"

func newTestLedger(t testing.TB) *testLedger {
	return &testLedger{t: t, origin: testOrigin, key: newTestKey(t, testOrigin, 1)}
}

// add appends a statement and returns its index.
func (l *testLedger) add(s receipt.Statement) uint64 {
	l.t.Helper()
	b, err := s.Encode()
	if err != nil {
		l.t.Fatal(err)
	}
	n := uint64(len(l.stated))
	salt := sha256.Sum256(binary.BigEndian.AppendUint64([]byte("salt"), n))
	stored, err := tlog.StoredHashesForRecordHash(int64(n), receipt.LeafHash(salt[:], b), l)
	if err != nil {
		l.t.Fatal(err)
	}
	l.hashes = append(l.hashes, stored...)
	l.salts = append(l.salts, salt[:])
	l.stated = append(l.stated, b)
	return n
}

// fill appends statements of no interest until there are size entries.
func (l *testLedger) fill(size uint64) {
	for uint64(len(l.stated)) < size {
		l.add(receipt.Statement{Kind: receipt.EpochDraining, Time: at(0), Epoch: uint32(len(l.stated))})
	}
}

func (l *testLedger) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	out := make([]tlog.Hash, len(indexes))
	for i, x := range indexes {
		out[i] = l.hashes[x]
	}
	return out, nil
}

func (l *testLedger) root(size uint64) [32]byte {
	l.t.Helper()
	h, err := tlog.TreeHash(int64(size), l)
	if err != nil {
		l.t.Fatal(err)
	}
	return h
}

func (l *testLedger) checkpoint(size uint64, keys ...note.Signer) []byte {
	l.t.Helper()
	if len(keys) == 0 {
		keys = []note.Signer{l.key}
	}
	c := receipt.Checkpoint{Origin: l.origin, Size: size, Root: l.root(size)}
	b, err := note.Sign(&note.Note{Text: c.Text()}, keys...)
	if err != nil {
		l.t.Fatal(err)
	}
	return b
}

func (l *testLedger) entry(index, size uint64) receipt.Entry {
	l.t.Helper()
	p, err := tlog.ProveRecord(int64(size), int64(index), l)
	if err != nil {
		l.t.Fatal(err)
	}
	e := receipt.Entry{
		Statement: l.stated[index], Salt: l.salts[index],
		Proof: receipt.Proof{Index: index, Checkpoint: l.checkpoint(size)},
	}
	for _, h := range p {
		e.Proof.Hashes = append(e.Proof.Hashes, h)
	}
	return e
}

func (l *testLedger) consistency(older, newer uint64) [][]byte {
	l.t.Helper()
	p, err := tlog.ProveTree(int64(newer), int64(older), l)
	if err != nil {
		l.t.Fatal(err)
	}
	var out [][]byte
	for _, h := range p {
		out = append(out, bytes.Clone(h[:]))
	}
	return out
}

func (l *testLedger) pinned() *receipt.Keys {
	l.t.Helper()
	return pin(l.t, l.key.vkey)
}

func pin(t testing.TB, vkeys ...string) *receipt.Keys {
	t.Helper()
	k, err := receipt.PinKeys(vkeys...)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func encode(t testing.TB, entries ...receipt.Entry) []byte {
	t.Helper()
	b, err := receipt.Encode(entries...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// at is a fixed instant and some seconds.
func at(seconds int) time.Time {
	return time.Date(2026, 3, 1, 12, 0, 0, 250e6, time.UTC).Add(time.Duration(seconds) * time.Second)
}

var testHandle = []byte{0xa0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

func keyID(b byte) (id [16]byte) {
	for i := range id {
		id[i] = b + byte(i)
	}
	return id
}

func index(n uint64) *uint64 { return &n }

func destroyed() receipt.Statement {
	return receipt.Statement{
		Kind: receipt.Destroyed, Time: at(0), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopePerson,
		Classes:    []receipt.Class{{Name: "memory", Number: 3}, {Name: "trace", Number: 1}},
		Generation: 2,
		DeadKeys: []receipt.DeadKey{
			{ClassNumber: 3, Generation: 2, KeyID: keyID(0x40)},
			{ClassNumber: 1, Generation: 1, KeyID: keyID(0x10)},
		},
		Existed: receipt.ExistedYes, Reason: "gdpr-art17", Request: bytes.Repeat([]byte{7}, 32),
		DrainedBy: at(65), FinalBy: at(14 * 24 * 3600), FinalBasis: "local-root-file", Epoch: 4, Anchor: "file",
	}
}

// examples has one statement of every kind, with every field that it may have.
func examples() []receipt.Statement {
	class := []receipt.Class{{Name: "trace", Number: 1}}
	classes := []receipt.Class{{Name: "trace", Number: 1}, {Name: "memory", Number: 3}}
	expired := receipt.Statement{
		Kind: receipt.Expired, Time: at(8), Tenant: "acme", Classes: class, BucketStartS: 1_700_000_000, BucketEndS: 1_700_086_400,
		DrainedBy: at(70), FinalBy: at(900), FinalBasis: "aws-kms", Epoch: 4, Anchor: "s3", Of: index(1),
	}
	return []receipt.Statement{
		{Kind: receipt.TenantCreated, Time: at(0), Tenant: "acme", PseudonymCheck: bytes.Repeat([]byte{9}, 32), Reason: "new", Request: testHandle, Anchor: "file"},
		{
			Kind: receipt.ClassSet, Time: at(1), Tenant: "acme", Classes: class, BucketWidthS: 86_400, LeaseMS: 60_000,
			RetentionS: 2_592_000, WidthFromS: 1_699_920_000, NextBucketWidthS: 3600, NextWidthFromS: 1_700_006_400,
		},
		destroyed(),
		{
			Kind: receipt.Scheduled, Time: at(2), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopeClasses, Classes: classes,
			Generation: 1, Due: at(3600), DrainedBy: at(70), Epoch: 4, Reason: "request", Request: testHandle, Anchor: "file",
		},
		{Kind: receipt.Cancelled, Time: at(3), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopeClasses, Classes: classes, Generation: 1, Of: index(3)},
		{Kind: receipt.Reinstated, Time: at(4), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopePerson, Generation: 3, Classes: classes, Of: index(2)},
		{Kind: receipt.HoldPlaced, Time: at(5), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopePerson, Hold: "case-7", HoldEnd: at(99), Reason: "litigation"},
		{Kind: receipt.HoldReleased, Time: at(6), Tenant: "acme", Handle: testHandle, Scope: receipt.ScopePerson, Hold: "case-7", Of: index(6), Reason: "settled"},
		expired,
		{Kind: receipt.EpochOpened, Time: at(9), Epoch: 4, Root: `root "4" \ west`, KMS: "local", PlannedEnd: at(7 * 24 * 3600)},
		{Kind: receipt.EpochDraining, Time: at(10), Epoch: 3},
		{Kind: receipt.EpochDrained, Time: at(11), Epoch: 3},
		{Kind: receipt.EpochRetiring, Time: at(12), Epoch: 3, Root: "root-3", KMS: "awskms", Due: at(7 * 24 * 3600)},
		{Kind: receipt.EpochClosed, Time: at(13), Epoch: 3, Root: "root-3", KMS: "awskms", FinalBasis: "aws-kms"},
		{Kind: receipt.Sanitised, Time: at(14), Epoch: 3},
		{Kind: receipt.EpochCancelled, Time: at(15), Epoch: 3, Root: "root-3", KMS: "awskms"},
		{Kind: receipt.LedgerKey, Time: at(16), VerifierKey: nextKey},
	}
}

const nextKey = "lethe/000102030405060708090a0b0c0d0e0f+709de7e6+AYE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU"
