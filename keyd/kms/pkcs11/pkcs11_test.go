//go:build pkcs11

package pkcs11

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/kmstest"
)

var tenantA = keys.EncryptionContext{Tenant: "tenant-a", Epoch: 7}

func mustCreate(t testing.TB, k *KMS, epoch uint32) string {
	t.Helper()
	id, err := k.Create(t.Context(), epoch, kmstest.Request())
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return id
}

func mustWrap(t testing.TB, k *KMS, root string, key []byte) []byte {
	t.Helper()
	w, err := k.Wrap(t.Context(), root, key, tenantA)
	if err != nil {
		t.Fatalf("Wrap: %v", err)
	}
	return w
}

func mustSchedule(t testing.TB, k *KMS, root string) time.Time {
	t.Helper()
	at, err := k.ScheduleDestruction(t.Context(), root)
	if err != nil {
		t.Fatalf("ScheduleDestruction: %v", err)
	}
	return at
}

func mustBe(t testing.TB, k *KMS, root string, want keys.RootState) {
	t.Helper()
	if d, err := k.Describe(t.Context(), root); err != nil || d.State != want {
		t.Fatalf("Describe = %+v, %v; want state %d", d, err, want)
	}
}

// other runs fn as another program would that logs in at the token.
func other(t testing.TB, label string, fn func(c *p11.Ctx, h p11.SessionHandle)) {
	t.Helper()
	library.calls.RLock()
	defer library.calls.RUnlock()
	slots, err := library.ctx.GetSlotList(true)
	must(t, err)
	for _, slot := range slots {
		info, err := library.ctx.GetTokenInfo(slot)
		must(t, err)
		if info.Label != label {
			continue
		}
		h, err := library.ctx.OpenSession(slot, p11.CKF_SERIAL_SESSION|p11.CKF_RW_SESSION)
		must(t, err)
		defer func() { must(t, library.ctx.CloseSession(h)) }()
		if err := library.ctx.Login(h, p11.CKU_USER, userPIN); err != nil && code(err) != p11.CKR_USER_ALREADY_LOGGED_IN {
			t.Fatal(err)
		}
		fn(library.ctx, h)
		return
	}
	t.Fatalf("no token %q", label)
}

func search(t testing.TB, c *p11.Ctx, h p11.SessionHandle, template []*p11.Attribute) []p11.ObjectHandle {
	t.Helper()
	must(t, c.FindObjectsInit(h, template))
	found, _, err := c.FindObjects(h, 100)
	must(t, err)
	must(t, c.FindObjectsFinal(h))
	return found
}

func keyOf(t testing.TB, root string) []*p11.Attribute {
	t.Helper()
	id, err := ckaID(root)
	must(t, err)
	return keyTemplate(id)
}

func recordOf(root string) []*p11.Attribute { return dataTemplate(recordApplication, root) }

func count(t testing.TB, label string, template []*p11.Attribute) (n int) {
	t.Helper()
	other(t, label, func(c *p11.Ctx, h p11.SessionHandle) { n = len(search(t, c, h, template)) })
	return n
}

// remove deletes objects behind keyd's back.
func remove(t testing.TB, label string, template []*p11.Attribute) {
	t.Helper()
	other(t, label, func(c *p11.Ctx, h p11.SessionHandle) {
		found := search(t, c, h, template)
		if len(found) == 0 {
			t.Fatal("nothing to remove")
		}
		for _, o := range found {
			must(t, c.DestroyObject(h, o))
		}
	})
}

// The key is one that the token made, shows to nobody, and lets nobody rename
// or copy, whoever has the PIN.
func TestKeyStaysOnTheToken(t *testing.T) {
	o, _, _ := options(t)
	root := mustCreate(t, mustOpen(t, o), 7)
	other(t, o.Token, func(c *p11.Ctx, h p11.SessionHandle) {
		found := search(t, c, h, keyOf(t, root))
		if len(found) != 1 {
			t.Fatalf("%d keys", len(found))
		}
		key := found[0]
		for attribute, value := range map[uint][]byte{
			p11.CKA_TOKEN: {1}, p11.CKA_PRIVATE: {1}, p11.CKA_SENSITIVE: {1}, p11.CKA_ALWAYS_SENSITIVE: {1},
			p11.CKA_EXTRACTABLE: {0}, p11.CKA_NEVER_EXTRACTABLE: {1}, p11.CKA_LOCAL: {1}, p11.CKA_MODIFIABLE: {0},
			p11.CKA_COPYABLE: {0}, p11.CKA_WRAP: {0}, p11.CKA_UNWRAP: {0}, p11.CKA_SIGN: {0}, p11.CKA_DERIVE: {0},
			p11.CKA_LABEL: []byte(root),
		} {
			got, err := c.GetAttributeValue(h, key, []*p11.Attribute{p11.NewAttribute(attribute, nil)})
			if err != nil || !bytes.Equal(got[0].Value, value) {
				t.Errorf("attribute %#x: %v, want %x", attribute, err, value)
			}
		}
		if _, err := c.GetAttributeValue(h, key, []*p11.Attribute{p11.NewAttribute(p11.CKA_VALUE, nil)}); code(err) != p11.CKR_ATTRIBUTE_SENSITIVE {
			t.Errorf("reading the key: %v", err)
		}
		if err := c.SetAttributeValue(h, key, []*p11.Attribute{p11.NewAttribute(p11.CKA_ID, []byte("x"))}); err == nil {
			t.Error("the key was renamed")
		}
		if _, err := c.CopyObject(h, key, []*p11.Attribute{p11.NewAttribute(p11.CKA_ID, []byte("x"))}); err == nil {
			t.Error("the key was copied")
		}
	})
}

// A second reading of what the package's comment says about a wrapped key.
func TestWrappedFormat(t *testing.T) {
	o, _, _ := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	key := []byte("thirty-two bytes of a key, whole")
	wrapped := mustWrap(t, k, root, key)
	if len(wrapped) != 1+12+len(key)+16 || wrapped[0] != 1 {
		t.Fatalf("a wrapped key is %x", wrapped)
	}
	ad := "\x00\x00\x00\x14lethe/v1/pkcs11/wrap" + "\x00\x00\x00\x29" + root + "\x00\x00\x00\x08tenant-a" + "\x00\x00\x00\x07"
	other(t, o.Token, func(c *p11.Ctx, h p11.SessionHandle) {
		params := p11.NewGCMParams(wrapped[1:13], []byte(ad), 128)
		defer params.Free()
		must(t, c.DecryptInit(h, []*p11.Mechanism{p11.NewMechanism(p11.CKM_AES_GCM, params)}, search(t, c, h, keyOf(t, root))[0]))
		got, err := c.Decrypt(h, wrapped[13:])
		if err != nil || !bytes.Equal(got, key) {
			t.Fatalf("decrypted: %x, %v", got, err)
		}
	})
}

func TestMissingIsNotDestroyed(t *testing.T) {
	witness := dataTemplate(witnessApplication, witnessApplication)
	for _, test := range []struct {
		name string
		do   func(t *testing.T, k *KMS, label, root string)
		want error
	}{
		{"the key of an enabled root", func(t *testing.T, _ *KMS, label, root string) {
			remove(t, label, keyOf(t, root))
		}, keys.ErrRootUnknown},
		{"the key of a disabled root", func(t *testing.T, k *KMS, label, root string) {
			must(t, k.Disable(t.Context(), root))
			remove(t, label, keyOf(t, root))
		}, keys.ErrRootUnknown},
		{"the key of a pending root before its date", func(t *testing.T, k *KMS, label, root string) {
			mustSchedule(t, k, root)
			remove(t, label, keyOf(t, root))
		}, keys.ErrRootUnknown},
		{"the record", func(t *testing.T, _ *KMS, label, root string) {
			remove(t, label, recordOf(root))
		}, keys.ErrRootUnknown},
		{"the record of a pending root, and its key", func(t *testing.T, k *KMS, label, root string) {
			mustSchedule(t, k, root)
			remove(t, label, recordOf(root))
			remove(t, label, keyOf(t, root))
		}, keys.ErrRootUnknown},
		{"everything, as on a new token", func(t *testing.T, _ *KMS, label, root string) {
			remove(t, label, recordOf(root))
			remove(t, label, keyOf(t, root))
			remove(t, label, witness)
		}, keys.ErrKMSUnavailable},
		{"the key and the witness", func(t *testing.T, _ *KMS, label, root string) {
			remove(t, label, keyOf(t, root))
			remove(t, label, witness)
		}, keys.ErrKMSUnavailable},
	} {
		t.Run(test.name, func(t *testing.T) {
			o, _, _ := options(t)
			k := mustOpen(t, o)
			root := mustCreate(t, k, 7)
			test.do(t, k, o.Token, root)
			if d, err := k.Describe(t.Context(), root); !errors.Is(err, test.want) || d.State != 0 {
				t.Errorf("Describe = %+v, %v; want %v", d, err, test.want)
			}
			if err := k.Cancel(t.Context(), root); !errors.Is(err, test.want) {
				t.Errorf("Cancel: %v; want %v", err, test.want)
			}
		})
	}
}

// The token goes at each call in turn, and comes back: meanwhile a root is
// neither unknown nor destroyed, and afterwards it is what it was.
func TestTokenGoesMidway(t *testing.T) {
	for _, want := range []keys.RootState{keys.RootEnabled, keys.RootPending, keys.RootDestroyed} {
		for n := int64(1); ; n++ {
			o, c, f := options(t)
			k := mustOpen(t, o)
			root := mustCreate(t, k, 7)
			if want != keys.RootEnabled {
				mustSchedule(t, k, root)
			}
			if want == keys.RootDestroyed {
				c.Advance(2 * time.Minute)
			}
			var calls atomic.Int64
			f.set(func(string) error {
				if calls.Add(1) == n {
					return os.Rename(tokens, tokens+".away")
				}
				return nil
			})
			d, err := k.Describe(t.Context(), root)
			f.set(nil)
			gone := calls.Load() >= n
			if gone {
				must(t, os.Rename(tokens+".away", tokens))
				must(t, library.reinitialise(library.gen)) // SoftHSM does not look again by itself
			}
			if err == nil && d.State != want {
				t.Fatalf("the token went at call %d: %+v; want state %d", n, d, want)
			}
			if err != nil && (!errors.Is(err, keys.ErrKMSUnavailable) || errors.Is(err, keys.ErrRootUnknown)) {
				t.Fatalf("the token went at call %d: %v", n, err)
			}
			if err == nil && want == keys.RootDestroyed {
				if left := count(t, o.Token, keyOf(t, root)); left != 0 {
					t.Fatalf("the token went at call %d: called destroyed, and %d keys are left", n, left)
				}
			}
			mustBe(t, k, root, want)
			must(t, k.Close())
			if !gone {
				break
			}
		}
	}
}

// A token restored from its keeper's backup brings a key back beside the
// tombstone.
func TestKeyBesideItsTombstoneIsDestroyedAgain(t *testing.T) {
	o, c, _ := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	at := mustSchedule(t, k, root)
	c.Advance(2 * time.Minute)
	mustBe(t, k, root, keys.RootDestroyed)
	if n := count(t, o.Token, keyOf(t, root)); n != 0 {
		t.Fatalf("%d keys after the destruction", n)
	}
	id, err := ckaID(root)
	must(t, err)
	_, err = in(t.Context(), k, func(s *session) (p11.ObjectHandle, error) { return s.generate(root, id) })
	must(t, err)
	if n := count(t, o.Token, keyOf(t, root)); n != 1 {
		t.Fatalf("%d keys after the restore", n)
	}
	if d, err := k.Describe(t.Context(), root); err != nil || d.State != keys.RootDestroyed || !d.DestroyAt.Equal(at) {
		t.Fatalf("Describe = %+v, %v", d, err)
	}
	if n := count(t, o.Token, keyOf(t, root)); n != 0 {
		t.Fatalf("%d keys after Describe", n)
	}
}

// Every change is cut off after each of its calls, as a crash does it; a new
// KMS finds the root before or after it, and repeating it brings it about.
func TestCutOffAnywhere(t *testing.T) {
	for _, step := range []struct {
		name     string
		from, to keys.RootState
		do       func(ctx context.Context, k *KMS, root string) error
	}{
		{"Disable", keys.RootEnabled, keys.RootDisabled, func(ctx context.Context, k *KMS, root string) error {
			return k.Disable(ctx, root)
		}},
		{"ScheduleDestruction", keys.RootDisabled, keys.RootPending, func(ctx context.Context, k *KMS, root string) error {
			_, err := k.ScheduleDestruction(ctx, root)
			return err
		}},
		{"Cancel", keys.RootPending, keys.RootEnabled, func(ctx context.Context, k *KMS, root string) error {
			return k.Cancel(ctx, root)
		}},
		{"destruction", keys.RootPending, keys.RootDestroyed, func(ctx context.Context, k *KMS, root string) error {
			_, err := k.Describe(ctx, root)
			return err
		}},
	} {
		t.Run(step.name, func(t *testing.T) {
			o, c, f := options(t)
			for cut := int64(1); ; cut++ {
				k := mustOpen(t, o)
				root := mustCreate(t, k, 7)
				if step.from != keys.RootEnabled {
					must(t, k.Disable(t.Context(), root))
				}
				if step.from == keys.RootPending {
					mustSchedule(t, k, root)
				}
				if step.to == keys.RootDestroyed {
					c.Advance(2 * time.Minute)
				}
				f.cutAfter(cut)
				err := step.do(t.Context(), k, root)
				f.set(nil)
				must(t, k.Close())
				if err == nil {
					if cut < 8 {
						t.Fatalf("it took %d calls only", cut)
					}
					return
				}
				if !errors.Is(err, keys.ErrKMSUnavailable) {
					t.Fatalf("cut after %d calls: %v", cut, err)
				}
				k = mustOpen(t, o)
				if step.to != keys.RootDestroyed {
					if d, err := k.Describe(t.Context(), root); err != nil || d.State != step.from && d.State != step.to {
						t.Fatalf("cut after %d calls: Describe = %+v, %v", cut, d, err)
					}
				}
				if err := step.do(t.Context(), k, root); err != nil {
					t.Fatalf("cut after %d calls and repeated: %v", cut, err)
				}
				mustBe(t, k, root, step.to)
				must(t, k.Close())
			}
		})
	}
}

// What a crash leaves of a change, the next change clears away.
func TestOldRecordsGo(t *testing.T) {
	o, _, _ := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	for seq := uint64(2); seq < 5; seq++ {
		r := record{rootID: root, seq: seq, state: keys.RootDisabled, nonce: "00000000000000aa"}
		_, err := in(t.Context(), k, func(s *session) (p11.ObjectHandle, error) {
			return s.createData(recordApplication, root, r.encode())
		})
		must(t, err)
	}
	mustBe(t, k, root, keys.RootDisabled)
	must(t, k.Cancel(t.Context(), root))
	mustBe(t, k, root, keys.RootEnabled)
	if n := count(t, o.Token, recordOf(root)); n != 1 {
		t.Fatalf("%d records", n)
	}
}

// Create, cut off anywhere, returns no root; the request repeated makes one, of
// which there is one key and one record.
func TestCreateCutOffAnywhere(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	for cut := int64(1); ; cut++ {
		request := kmstest.Request()
		f.cutAfter(cut)
		id, err := k.Create(t.Context(), 7, request)
		f.set(nil)
		if err != nil && (id != "" || !errors.Is(err, keys.ErrKMSUnavailable)) {
			t.Fatalf("cut after %d calls: %q, %v", cut, id, err)
		}
		whole := err == nil
		if id, err = k.Create(t.Context(), 7, request); err != nil {
			t.Fatalf("cut after %d calls, and repeated: %v", cut, err)
		}
		mustBe(t, k, id, keys.RootEnabled)
		if keys, records := count(t, o.Token, keyOf(t, id)), count(t, o.Token, recordOf(id)); keys != 1 || records != 1 {
			t.Fatalf("cut after %d calls, and repeated: %d keys, %d records", cut, keys, records)
		}
		if whole {
			return
		}
	}
}

// CKR_GENERAL_ERROR is what SoftHSM answers for a wrong ciphertext, and what an
// ill token answers for a right one.
func TestIllTokenIsNotDenial(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	wrapped := mustWrap(t, k, root, make([]byte, 32))
	for _, ill := range []string{"C_Decrypt", "C_DecryptInit"} {
		f.set(func(call string) error {
			if call == ill {
				return p11.Error(p11.CKR_GENERAL_ERROR)
			}
			return nil
		})
		if _, err := k.Unwrap(t.Context(), root, wrapped, tenantA); !errors.Is(err, keys.ErrKMSUnavailable) || errors.Is(err, keys.ErrKMSDenied) {
			t.Errorf("%s ill: %v", ill, err)
		}
	}
	f.set(nil)
	wrapped[20] ^= 1
	if _, err := k.Unwrap(t.Context(), root, wrapped, tenantA); !errors.Is(err, keys.ErrKMSDenied) || errors.Is(err, keys.ErrKMSUnavailable) {
		t.Errorf("an altered byte: %v", err)
	}
}

// A lost session is replaced within the call, and so is everything when the
// module is started anew.
func TestRecoversWithinTheCall(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	key := make([]byte, 32)
	wrapped := mustWrap(t, k, root, key)
	for _, c := range []p11.Error{p11.CKR_SESSION_HANDLE_INVALID, p11.CKR_USER_NOT_LOGGED_IN, p11.CKR_DEVICE_REMOVED, p11.CKR_TOKEN_NOT_PRESENT} {
		f.once(c)
		if got, err := k.Unwrap(t.Context(), root, wrapped, tenantA); err != nil || !bytes.Equal(got, key) {
			t.Errorf("after %v: %v", c, err)
		}
	}
	f.set(nil)
	gen := library.gen
	must(t, library.reinitialise(gen))
	if library.gen == gen {
		t.Fatal("the module was not started anew")
	}
	if got, err := k.Unwrap(t.Context(), root, wrapped, tenantA); err != nil || !bytes.Equal(got, key) {
		t.Errorf("after C_Finalize and C_Initialize: %v", err)
	}
}

// Another process writes a record of the same number at the same moment.
func TestConcurrentChangeStepsBack(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	theirs := record{rootID: root, seq: 2, state: keys.RootDisabled, nonce: "ffffffffffffffff"}
	f.set(func(call string) error {
		if call == "C_CreateObject" {
			other(t, o.Token, func(c *p11.Ctx, h p11.SessionHandle) {
				_, err := c.CreateObject(h, append(recordOf(root),
					p11.NewAttribute(p11.CKA_PRIVATE, true), p11.NewAttribute(p11.CKA_VALUE, theirs.encode())))
				must(t, err)
			})
		}
		return nil
	})
	if at, err := k.ScheduleDestruction(t.Context(), root); !errors.Is(err, keys.ErrKMSUnavailable) || !at.IsZero() {
		t.Fatalf("ScheduleDestruction = %v, %v", at, err)
	}
	f.set(nil)
	mustBe(t, k, root, keys.RootDisabled)
	must(t, k.Cancel(t.Context(), root))
	if n := count(t, o.Token, recordOf(root)); n != 1 {
		t.Fatalf("%d records", n)
	}
}

func TestDamagedRecord(t *testing.T) {
	o, c, _ := options(t)
	k := mustOpen(t, o)
	one, two := mustCreate(t, k, 7), mustCreate(t, k, 8)
	good := record{rootID: one, seq: 1, state: keys.RootEnabled, nonce: "00000000000000aa"}
	pending := record{rootID: one, seq: 9, state: keys.RootPending, at: c.Now().UnixMilli(), nonce: good.nonce}
	for name, text := range map[string]string{
		"no end":                     strings.TrimSuffix(good.encode(), "\n"),
		"more":                       good.encode() + "\n",
		"a leading zero":             strings.Replace(good.encode(), " 1 ", " 01 ", 1),
		"no number":                  strings.Replace(good.encode(), " 1 ", " 0 ", 1),
		"a huge number":              strings.Replace(good.encode(), " 1 ", " 99999999999999999999 ", 1),
		"another state":              strings.Replace(good.encode(), "enabled", "undead", 1),
		"an enabled one with a date": strings.Replace(pending.encode(), "pending", "enabled", 1),
		"a pending one without":      strings.Replace(good.encode(), "enabled", "pending", 1),
		"another root's":             strings.ReplaceAll(good.encode(), one, two),
	} {
		remove(t, o.Token, recordOf(one))
		_, err := in(t.Context(), k, func(s *session) (p11.ObjectHandle, error) { return s.createData(recordApplication, one, text) })
		must(t, err)
		if d, err := k.Describe(t.Context(), one); !errors.Is(err, ErrDamaged) || !errors.Is(err, keys.ErrKMSUnavailable) || d.State != 0 {
			t.Errorf("%s: %+v, %v", name, d, err)
		}
		if _, err := k.Wrap(t.Context(), one, make([]byte, 32), tenantA); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: Wrap: %v", name, err)
		}
	}
	mustBe(t, k, two, keys.RootEnabled)
}

// A key that somebody brought along, or that may leave, poses as a root's.
func TestForeignKeyIsRefused(t *testing.T) {
	for name, make1 := range map[string]func(c *p11.Ctx, h p11.SessionHandle, template []*p11.Attribute) (p11.ObjectHandle, error){
		"brought": func(c *p11.Ctx, h p11.SessionHandle, template []*p11.Attribute) (p11.ObjectHandle, error) {
			return c.CreateObject(h, append(template, p11.NewAttribute(p11.CKA_VALUE, make([]byte, 32))))
		},
		"extractable": func(c *p11.Ctx, h p11.SessionHandle, template []*p11.Attribute) (p11.ObjectHandle, error) {
			return c.GenerateKey(h, []*p11.Mechanism{p11.NewMechanism(p11.CKM_AES_KEY_GEN, nil)},
				append(template, p11.NewAttribute(p11.CKA_VALUE_LEN, 32), p11.NewAttribute(p11.CKA_EXTRACTABLE, true)))
		},
	} {
		o, _, _ := options(t)
		k := mustOpen(t, o)
		root := mustCreate(t, k, 7)
		remove(t, o.Token, keyOf(t, root))
		other(t, o.Token, func(c *p11.Ctx, h p11.SessionHandle) {
			_, err := make1(c, h, append(keyOf(t, root),
				p11.NewAttribute(p11.CKA_KEY_TYPE, p11.CKK_AES), p11.NewAttribute(p11.CKA_TOKEN, true),
				p11.NewAttribute(p11.CKA_MODIFIABLE, false), p11.NewAttribute(p11.CKA_SENSITIVE, true),
				p11.NewAttribute(p11.CKA_ENCRYPT, true), p11.NewAttribute(p11.CKA_DECRYPT, true)))
			must(t, err)
		})
		if _, err := k.Wrap(t.Context(), root, make([]byte, 32), tenantA); !errors.Is(err, ErrOrigin) {
			t.Errorf("%s: Wrap: %v", name, err)
		}
		if d, err := k.Describe(t.Context(), root); !errors.Is(err, ErrOrigin) || d.State != 0 {
			t.Errorf("%s: Describe = %+v, %v", name, d, err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	o, _, f := options(t)
	twice := newToken(t)
	initToken(t, twice)
	readable := pinFile(t, userPIN)
	must(t, os.Chmod(readable, 0o640))
	for name, test := range map[string]struct {
		change func(*Options)
		want   error
	}{
		"no such module":    {func(o *Options) { o.Module = filepath.Join(t.TempDir(), "none.so") }, ErrModule},
		"not a module":      {func(o *Options) { o.Module = o.PINFile }, ErrModule},
		"no such token":     {func(o *Options) { o.Token = "elsewhere" }, ErrNoToken},
		"two of one label":  {func(o *Options) { o.Token = twice }, ErrAmbiguous},
		"a readable PIN":    {func(o *Options) { o.PINFile = readable }, ErrUnsafe},
		"a directory":       {func(o *Options) { o.PINFile = t.TempDir() }, ErrUnsafe},
		"no PIN file":       {func(o *Options) { o.PINFile = filepath.Join(t.TempDir(), "none") }, os.ErrNotExist},
		"an empty PIN file": {func(o *Options) { o.PINFile = pinFile(t, "\n") }, nil},
		"a long PIN":        {func(o *Options) { o.PINFile = pinFile(t, strings.Repeat("9", 257)) }, nil},
		"no label":          {func(o *Options) { o.Token = "" }, nil},
		"a bad wait":        {func(o *Options) { o.Waiting = time.Nanosecond }, nil},
	} {
		bad := o
		test.change(&bad)
		k, err := Open(t.Context(), bad)
		if err == nil || k != nil || test.want != nil && !errors.Is(err, test.want) {
			t.Errorf("%s: %v; want %v", name, err, test.want)
		}
	}
	f.set(func(call string) error {
		if call == "C_GetMechanismInfo" {
			return p11.Error(p11.CKR_MECHANISM_INVALID)
		}
		return nil
	})
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a token without AES-GCM: %v", err)
	}
}

// A wrong PIN is tried once, and never when that would lock the token.
func TestWrongPIN(t *testing.T) {
	o, _, f := options(t)
	wrong := o
	wrong.PINFile = pinFile(t, "not-the-pin")
	f.count("C_Login")
	_, err := Open(t.Context(), wrong)
	if !errors.Is(err, ErrPIN) || !errors.Is(err, keys.ErrKMSDenied) || strings.Contains(err.Error(), "not-the-pin") {
		t.Fatalf("Open: %v", err)
	}
	if n := f.count("C_Login"); n != 1 {
		t.Fatalf("it was tried %d times", n)
	}

	// It is changed while keyd runs, and the session is lost.
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	other(t, o.Token, func(c *p11.Ctx, h p11.SessionHandle) { must(t, c.SetPIN(h, userPIN, "another-pin")) })
	f.count("C_Login")
	f.once(p11.CKR_SESSION_HANDLE_INVALID)
	for range 5 {
		if _, err := k.Describe(t.Context(), root); !errors.Is(err, ErrPIN) || !errors.Is(err, keys.ErrKMSDenied) {
			t.Fatalf("Describe: %v", err)
		}
	}
	if n := f.count("C_Login"); n != 1 {
		t.Fatalf("the old PIN was tried %d times", n)
	}
}

// SoftHSM knows no last try; other tokens do.
func TestLastTryIsNotUsed(t *testing.T) {
	for flags, want := range map[uint]bool{
		0: false, p11.CKF_TOKEN_INITIALIZED | p11.CKF_LOGIN_REQUIRED: false, p11.CKF_USER_PIN_COUNT_LOW: false,
		p11.CKF_USER_PIN_COUNT_LOW | p11.CKF_USER_PIN_FINAL_TRY: true, p11.CKF_USER_PIN_LOCKED: true,
	} {
		if got := lastTry(flags); got != want {
			t.Errorf("lastTry(%#x) = %v", flags, got)
		}
	}
}

// A KMS stays with the token that it began with.
func TestAnotherTokenOfThatLabel(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	k.mu.Lock()
	k.serial = "0123456789abcdef"
	k.mu.Unlock()
	f.once(p11.CKR_DEVICE_REMOVED)
	if _, err := k.Describe(t.Context(), root); !errors.Is(err, ErrNoToken) || !errors.Is(err, keys.ErrKMSUnavailable) {
		t.Fatalf("Describe: %v", err)
	}
}

// Calls that hang take no more than their sessions.
func TestHungCallsAreBounded(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	gate, inside := make(chan struct{}), make(chan struct{}, 100)
	f.set(func(string) error { inside <- struct{}{}; <-gate; return nil })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	for range 3 * maxSessions {
		go func() { _, err := k.Wrap(ctx, root, make([]byte, 32), tenantA); done <- err }()
	}
	for range maxSessions {
		<-inside
	}
	cancel()
	for range 3 * maxSessions {
		if err := <-done; !errors.Is(err, keys.ErrKMSUnavailable) || !errors.Is(err, context.Canceled) {
			t.Errorf("Wrap: %v", err)
		}
	}
	if n := len(inside); n != 0 {
		t.Errorf("%d more calls were inside", n)
	}
	f.set(nil)
	close(gate)
	mustBe(t, k, root, keys.RootEnabled)
}

// A call whose caller has gone makes no change when the library answers at last.
func TestAbandonedCallChangesNothing(t *testing.T) {
	o, _, f := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	gate, inside := make(chan struct{}), make(chan struct{}, 1)
	f.set(func(string) error {
		select {
		case inside <- struct{}{}:
		default:
		}
		<-gate
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { _, err := k.ScheduleDestruction(ctx, root); done <- err }()
	<-inside
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("ScheduleDestruction: %v", err)
	}
	f.count("")
	f.set(nil)
	close(gate)
	for range maxSessions { // once it has ended, all sessions are to be had
		k.slots <- struct{}{}
	}
	for range maxSessions {
		<-k.slots
	}
	if n := f.count("C_CreateObject"); n != 0 {
		t.Fatalf("%d objects were created", n)
	}
	mustBe(t, k, root, keys.RootEnabled)
}

func TestClosed(t *testing.T) {
	o, _, _ := options(t)
	k := mustOpen(t, o)
	root := mustCreate(t, k, 7)
	must(t, k.Close())
	must(t, k.Close())
	if _, err := k.Describe(t.Context(), root); !errors.Is(err, ErrClosed) || !errors.Is(err, keys.ErrKMSUnavailable) {
		t.Fatalf("Describe: %v", err)
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add(record{rootID: unknownRoot, seq: 3, state: keys.RootPending, at: 1, nonce: hex.EncodeToString(make([]byte, nonceSize))}.encode())
	f.Add("lethe-root-v1 x 1 enabled 0 0000000000000000\n")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := parseRecord(text)
		if err == nil && r.encode() != text {
			t.Fatalf("%q is read as %q", text, r.encode())
		}
		if err != nil && !errors.Is(err, ErrDamaged) {
			t.Fatal(err)
		}
	})
}
