package keys_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/backup"
	"lethe/keyd/internal/keys"
	"lethe/keyd/store/badger"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
)

// residue audits the rig's store, which must be closed.
func (r *rig) residue(named ...[16]byte) *keys.ResidueReport {
	r.t.Helper()
	return r.residueIn(filepath.Join(r.dir, "store"), named...)
}

// residueIn is residue of the store's files in another place.
func (r *rig) residueIn(store string, named ...[16]byte) *keys.ResidueReport {
	r.t.Helper()
	files, err := badger.OpenFiles(store)
	if err != nil {
		r.t.Fatal(err)
	}
	defer files.Close()
	report, err := keys.FindResidue(r.t.Context(), files, named)
	if err != nil {
		r.t.Fatal(err)
	}
	if len(report.Unread) != 0 {
		r.t.Errorf("unread: %q", report.Unread)
	}
	return report
}

// inFiles says which files below dir hold these bytes, and where first.
func inFiles(t *testing.T, dir string, what []byte) map[string]int64 {
	t.Helper()
	found := make(map[string]int64)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if at := bytes.Index(b, what); at >= 0 {
			found[filepath.Base(path)] = int64(at)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// wrappedDEKs are the ciphertexts of the DEKs of an epoch, by key id.
func (r *rig) wrappedDEKs(epoch byte) map[[16]byte][]byte {
	r.t.Helper()
	all := make(map[[16]byte][]byte)
	for key, value := range r.rows("w\x00\x00\x00" + string(epoch) + "D") {
		var w storev1.Wrapped
		if err := proto.Unmarshal([]byte(value), &w); err != nil {
			r.t.Fatal(err)
		}
		all[[16]byte([]byte(key)[len(key)-16:])] = w.Ciphertext
	}
	return all
}

// What a destruction leaves in the files is found, and is gone from them once
// the epoch's range was dropped.
func TestResidue(t *testing.T) {
	r := newRig(t)
	store := filepath.Join(r.dir, "store")
	eve, ann := r.seal("eve", "trace"), r.seal("ann", "trace")
	// Of many classes, so that tables keep only parts of her keys' keys.
	classes := []string{"memory", "checkpoint", "backup"}
	for _, c := range classes {
		r.seal("eve", c)
	}
	wrapped := r.wrappedDEKs(1)
	if len(wrapped) != 2+len(classes) {
		t.Fatalf("%d DEKs", len(wrapped))
	}
	// Until the store is closed all of it is in its log, where nothing merges it.
	before := r.copyTo("before")
	if report := r.residueIn(before); len(report.Residue) != 0 || report.Dead != 0 || report.Files == 0 || report.Bytes == 0 {
		t.Errorf("before any destruction: %+v", report)
	}
	annID := [16]byte(ann.KeyId)
	if report := r.residueIn(before, annID); len(report.Residue) == 0 || report.Residue[0].KeyID != annID {
		t.Errorf("a living key that was named: %+v", report)
	}

	r.destroy("eve", "request")
	check := func(when, store string) {
		t.Helper()
		report := r.residueIn(store)
		if report.Dead != 1+len(classes) {
			t.Errorf("%s: %d key ids are dead", when, report.Dead)
		}
		of := make(map[[16]byte]bool)
		for _, x := range report.Residue {
			if x.KeyID == annID || x.Epoch != 1 || x.Closed || x.Share {
				t.Errorf("%s: found %+v", when, x)
			}
			b, err := os.ReadFile(filepath.Join(store, x.File))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.HasPrefix(b[x.Offset+20:], wrapped[x.KeyID]) {
				t.Errorf("%s: there is no wrapped key of hers at %d of %s", when, x.Offset, x.File)
			}
			of[x.KeyID] = true
		}
		for id, ciphertext := range wrapped {
			if there := len(inFiles(t, store, ciphertext)) != 0; id != annID && there != of[id] {
				t.Errorf("%s: the files hold a key of hers: %v; found: %v", when, there, of[id])
			}
		}
		if when == "at once" && !of[[16]byte(eve.KeyId)] {
			t.Error("a destruction leaves nothing, so nothing is tested")
		}
	}
	check("at once", r.copyTo("after"))
	// Closing the store moves what is in logs into tables, which may be merged.
	r.close()
	check("from tables", store)

	r.open(false)
	r.turn()
	r.wantState(1, drained)
	r.close()
	report := r.residue()
	if len(report.Residue) != 0 || report.Dead != 1+len(classes) {
		t.Errorf("after the range was dropped: %+v", report)
	}
	for id, ciphertext := range wrapped {
		if where := inFiles(t, store, ciphertext); len(where) != 0 {
			t.Errorf("after the range was dropped, the wrapped key of %x is in %v", id, where)
		}
	}

	// The files as they are, and a stray copy among them.
	for id, ciphertext := range wrapped {
		if id == annID {
			continue
		}
		stray := append(append(append([]byte("w\x00\x00\x00\x01D"), make([]byte, 32)...), id[:]...), make([]byte, 12)...)
		stray = append(append(stray, 0x0a, 16), make([]byte, 16)...)
		stray = append(append(stray, 0x12, byte(len(ciphertext))), ciphertext...)
		if err := os.WriteFile(filepath.Join(store, "lost"), stray, 0o600); err != nil {
			t.Fatal(err)
		}
		report := r.residue()
		if len(report.Residue) != 1 || report.Residue[0] != (keys.Residue{File: "lost", Offset: 66, Epoch: 1, KeyID: id}) {
			t.Errorf("a stray copy: %+v", report)
		}
	}
}

// inEveryFile are the rows of a store that nobody has open, as whoever has its
// files finds them: where newer copies of a row hide older ones, one that holds a key.
func inEveryFile(t *testing.T, store string) map[string][]byte {
	t.Helper()
	files, err := badger.OpenFiles(store)
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	all := make(map[string][]byte)
	unread, err := files.Rows(func(key, value []byte) {
		if len(value) > len(all[string(key)]) {
			all[string(key)] = bytes.Clone(value)
		}
	})
	if err != nil || len(unread) != 0 {
		t.Fatalf("unread: %q, %v", unread, err)
	}
	return all
}

// Once an epoch is closed, a copy of the store and a backup from before, all that
// lies in any of their files, and the KMS open no key; while it is not, they do.
func TestGuaranteeBackupProofInEveryFile(t *testing.T) {
	r := newRig(t)
	store := filepath.Join(r.dir, "store")
	p := r.populate(3)
	p.destroy("person-0") // and the wrapped key lies in a log still, until tables are merged
	copied := r.copyTo("copied")
	in, err := backup.NewReader(bytes.NewReader(r.backup()))
	if err != nil {
		t.Fatal(err)
	}
	restored := filepath.Join(t.TempDir(), "restored")
	if err := badger.Restore(t.Context(), restored, in); err != nil {
		t.Fatal(err)
	}
	p.destroy("person-1")
	opened := func(dir string) string {
		rows := inEveryFile(t, dir)
		names := append(p.opensAny(rows, p.dead), p.opensAny(rows, p.keys)...)
		slices.Sort(names)
		return fmt.Sprint(names)
	}
	if got := opened(copied); got != "[person-0 person-1 person-2]" {
		t.Errorf("while the root lives, the copy opens %s: the test sees too little", got)
	}
	if got := opened(restored); got != "[person-1 person-2]" {
		t.Errorf("while the root lives, the backup opens %s, and should who lived when it was taken", got)
	}
	r.turn()
	r.closeEpoch(1)
	r.close()
	for what, dir := range map[string]string{"the copy": copied, "the backup": restored} {
		if got := opened(dir); got != "[]" {
			t.Errorf("after the epoch is closed, %s opens %s", what, got)
		}
	}
	if got := opened(store); got != "[person-2]" {
		t.Errorf("the store opens %s, and should who lives", got)
	}
}

// A whole tenant's keys are looked for too.
func TestResidueOfATenant(t *testing.T) {
	r := newRig(t)
	r.seal("ann", "trace")
	wrapped := r.wrappedDEKs(1)
	if _, err := r.DestroyTenant(t.Context(), &keydv1.DestroyTenantRequest{Tenant: "acme", RequestId: "offboard", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	r.close()
	report := r.residue()
	for id := range wrapped {
		found := false
		for _, x := range report.Residue {
			found = found || x.KeyID == id
		}
		if !found {
			t.Errorf("a key of the erased tenant is not found: %+v", report)
		}
	}
}

func TestResidueWantsAStoppedStore(t *testing.T) {
	r := newRig(t)
	if _, err := badger.OpenFiles(filepath.Join(r.dir, "store")); !errors.Is(err, keys.ErrLocked) {
		t.Errorf("while a keyd has it open: %v", err)
	}
	if _, err := badger.OpenFiles(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("where there is no store: %v", err)
	}
}
