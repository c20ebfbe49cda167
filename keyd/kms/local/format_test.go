package local

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"reflect"
	"testing"

	"lethe/keyd/internal/keys"
	"lethe/keyd/kms/kmstest"
)

// sample returns a file with a root in every state, and what opens it.
func sample(t testing.TB) (data []byte, h header, sec secret) {
	t.Helper()
	raw := rawSecret{key: bytes.Repeat([]byte{7}, keySize)}
	h = raw.newHeader(argon2Cost{})
	h.salt = [saltSize]byte{1, 2, 3}
	sec, err := raw.derive(h)
	if err != nil {
		t.Fatal(err)
	}
	h.check = sec.check
	data, err = sec.seal(h, sampleState())
	if err != nil {
		t.Fatal(err)
	}
	return data, h, sec
}

func sampleState() *state {
	key := [keySize]byte{9, 8, 7}
	return &state{seq: 5, roots: []*root{
		{id: "local-1-a", epoch: 1, state: keys.RootDestroyed, created: 1, destroyAt: 2, destroyed: 3},
		{id: "local-2-b", epoch: 2, state: keys.RootPending, created: 1, destroyAt: 9, key: key},
		{id: "local-3-c", epoch: 3, state: keys.RootDisabled, created: 4, key: key},
		{id: "local-4-d", epoch: 1<<32 - 1, state: keys.RootEnabled, created: 5, key: key},
	}}
}

func openFile(data []byte, sec secret) (*state, error) {
	h, body, err := parseFile(data)
	if err != nil {
		return nil, err
	}
	return sec.open(h, body)
}

// resum gives data the checksum of what it now holds.
func resum(data []byte) []byte {
	sum := sha256.Sum256(data[:len(data)-sumSize])
	copy(data[len(data)-sumSize:], sum[:])
	return data
}

func TestFileRoundTrip(t *testing.T) {
	data, h, sec := sample(t)
	gotH, _, err := parseFile(data)
	if err != nil || gotH != h {
		t.Fatalf("header %+v, %v", gotH, err)
	}
	got, err := openFile(data, sec)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range got.roots {
		if (r.aead == nil) != (r.state == keys.RootDestroyed) {
			t.Errorf("root %s in state %d: aead %v", r.id, r.state, r.aead)
		}
		r.aead = nil
	}
	if !reflect.DeepEqual(got, sampleState()) {
		t.Fatalf("read %+v", got)
	}
}

// Every bit counts: flipped alone, the checksum tells; with the checksum made
// right again, as an editor would, the encryption tells.
func TestFileEveryBitFlip(t *testing.T) {
	data, _, sec := sample(t)
	raw := rawSecret{key: bytes.Repeat([]byte{7}, keySize)}
	for i := range len(data) * 8 {
		bad := bytes.Clone(data)
		bad[i/8] ^= 1 << (i % 8)
		if _, err := openFile(bad, sec); !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewerVersion) {
			t.Fatalf("bit %d flipped: %v", i, err)
		}
		if i/8 >= len(data)-sumSize {
			continue
		}
		h, body, err := parseFile(resum(bad))
		if err == nil {
			var s secret
			if s, err = raw.derive(h); err == nil {
				if s.check != h.check {
					continue // ErrWrongSecret, which first tells
				}
				_, err = s.open(h, body)
			}
		}
		if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewerVersion) && !errors.Is(err, ErrWrongSecret) {
			t.Fatalf("bit %d flipped and summed again: %v", i, err)
		}
	}
}

func TestFileTruncatedAndExtended(t *testing.T) {
	data, _, sec := sample(t)
	for n := range len(data) {
		if _, err := openFile(data[:n], sec); !errors.Is(err, ErrDamaged) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
		if n >= len(magic)+2+sumSize {
			if _, err := openFile(resum(bytes.Clone(data[:n])), sec); !errors.Is(err, ErrDamaged) {
				t.Fatalf("cut to %d bytes and summed again: %v", n, err)
			}
		}
	}
	if _, err := openFile(append(bytes.Clone(data), 0), sec); !errors.Is(err, ErrDamaged) {
		t.Fatalf("with a byte more: %v", err)
	}
	if _, err := openFile(resum(append(bytes.Clone(data), make([]byte, 64)...)), sec); !errors.Is(err, ErrDamaged) {
		t.Fatalf("with 64 bytes more, summed again: %v", err)
	}
}

func TestFileNewerVersion(t *testing.T) {
	data, _, sec := sample(t)
	binary.BigEndian.PutUint16(data[len(magic):], formatVersion+1)
	if _, err := openFile(data[:len(magic)+2], sec); !errors.Is(err, ErrNewerVersion) {
		t.Fatalf("a newer version, of which the rest is not known: %v", err)
	}
	binary.BigEndian.PutUint16(data[len(magic):], 0)
	if _, err := openFile(data, sec); !errors.Is(err, ErrDamaged) {
		t.Fatalf("version 0: %v", err)
	}
}

// A file must not choose what opening it costs.
func TestFilePassphraseCostIsBounded(t *testing.T) {
	raw := rawSecret{passphrase: []byte("p")}
	for _, c := range []argon2Cost{
		{},
		{passes: 1, memory: 64 << 10, lanes: 1},
		{passes: 2, memory: 19<<10 - 1, lanes: 1},
		{passes: 2, memory: 512<<10 + 1, lanes: 1},
		{passes: 2, memory: 1<<32 - 1, lanes: 1},
		{passes: 1<<32 - 1, memory: 64 << 10, lanes: 1},
		{passes: 17, memory: 64 << 10, lanes: 1},
		{passes: 3, memory: 64 << 10, lanes: 0},
		{passes: 3, memory: 64 << 10, lanes: 255},
	} {
		h := raw.newHeader(c)
		data := append(h.encode(aeadOverhead), make([]byte, aeadOverhead+sumSize)...)
		if _, _, err := parseFile(resum(data)); !errors.Is(err, ErrDamaged) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	for _, c := range []argon2Cost{defaultArgon2, cheap} {
		h := raw.newHeader(c)
		data := append(h.encode(aeadOverhead), make([]byte, aeadOverhead+sumSize)...)
		if _, _, err := parseFile(resum(data)); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestStateOneEncoding(t *testing.T) {
	good := sampleState().encode()
	if _, err := decodeState(good); err != nil {
		t.Fatal(err)
	}
	edit := func(fn func(*state)) []byte {
		st := sampleState()
		fn(st)
		return st.encode()
	}
	for name, bad := range map[string][]byte{
		"out of order":          edit(func(st *state) { st.roots[0], st.roots[1] = st.roots[1], st.roots[0] }),
		"the same id twice":     edit(func(st *state) { st.roots[1].id = st.roots[0].id }),
		"an empty id":           edit(func(st *state) { st.roots[0].id = "" }),
		"an id with a space":    edit(func(st *state) { st.roots[3].id = "local 4" }),
		"an id not ASCII":       edit(func(st *state) { st.roots[3].id = "local-\xff" }),
		"state 0":               edit(func(st *state) { st.roots[3].state = 0 }),
		"state 5":               edit(func(st *state) { st.roots[3].state = 5 }),
		"pending, no date":      edit(func(st *state) { st.roots[1].destroyAt = 0 }),
		"enabled with a date":   edit(func(st *state) { st.roots[3].destroyAt = 1 }),
		"disabled, destroyed":   edit(func(st *state) { st.roots[2].destroyed = 1 }),
		"destroyed, no date":    edit(func(st *state) { st.roots[0].destroyed = 0 }),
		"destroyed, never due":  edit(func(st *state) { st.roots[0].destroyAt = 0 }),
		"a date before 1970":    edit(func(st *state) { st.roots[1].destroyAt = -1 }),
		"created before 1970":   edit(func(st *state) { st.roots[1].created = -1 }),
		"a byte more":           append(bytes.Clone(good), 0),
		"a byte less":           good[:len(good)-1],
		"fewer roots than said": append([]byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0}, good[12:]...),
		"four billion roots":    append([]byte{0, 0, 0, 0, 0, 0, 0, 1, 255, 255, 255, 255}, good[12:]...),
	} {
		if st, err := decodeState(bad); !errors.Is(err, ErrDamaged) || st != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A destroyed root's state and its key exclude each other: the encoding has no
// place for a key with a tombstone.
func TestDestroyDueRemovesTheKey(t *testing.T) {
	o, c := withKeyfile(t)
	k := mustOpen(t, o)
	id, err := k.Create(t.Context(), 1, kmstest.Request())
	if err != nil {
		t.Fatal(err)
	}
	key := bytes.Clone(k.cur.find(id).key[:])
	at, err := k.ScheduleDestruction(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	plain := func() []byte {
		data, err := os.ReadFile(o.Path)
		if err != nil {
			t.Fatal(err)
		}
		h, body, err := parseFile(data)
		if err != nil {
			t.Fatal(err)
		}
		b, err := k.secret.body.Decrypt(body, h.encode(len(body)))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if !bytes.Contains(plain(), key) {
		t.Fatal("the key is not found where it must be: the search is wrong")
	}
	c.Advance(at.Sub(c.Now()))
	if d, err := k.Describe(t.Context(), id); err != nil || d.State != keys.RootDestroyed {
		t.Fatalf("Describe at the instant = %+v, %v", d, err)
	}
	if bytes.Contains(plain(), key) {
		t.Fatal("the file still holds the key of a destroyed root")
	}
	if r := k.cur.find(id); r.key != [keySize]byte{} || r.aead != nil {
		t.Fatal("memory still holds the key of a destroyed root")
	}
}

// Associated data tells every root and context from every other.
func TestWrapADIsInjective(t *testing.T) {
	seen := map[string]string{}
	for _, rootID := range []string{"r", "r1", "", "r\x00\x00\x00\x01t"} {
		for _, tenant := range []string{"", "t", "1", "1t", "t\x00\x00\x00\x01"} {
			for _, epoch := range []uint32{0, 1, 256} {
				what := fmt.Sprintf("%q %q %d", rootID, tenant, epoch)
				ad := string(wrapAD(rootID, keys.EncryptionContext{Tenant: tenant, Epoch: epoch}))
				if other, ok := seen[ad]; ok {
					t.Errorf("%s and %s have the same associated data", what, other)
				}
				seen[ad] = what
			}
		}
	}
}

func FuzzParseFile(f *testing.F) {
	data, _, _ := sample(f)
	f.Add(data)
	f.Add(data[:headerSize])
	raw := rawSecret{passphrase: []byte("p")}
	h := raw.newHeader(defaultArgon2)
	f.Add(append(h.encode(aeadOverhead), make([]byte, aeadOverhead+sumSize)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		// The fuzzer cannot make a checksum; with a right one it gets further.
		inputs := [][]byte{data}
		if len(data) >= sumSize {
			inputs = append(inputs, resum(bytes.Clone(data)))
		}
		for _, data := range inputs {
			h, body, err := parseFile(data)
			if err != nil {
				if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewerVersion) {
					t.Fatalf("untyped: %v", err)
				}
				continue
			}
			again := append(h.encode(len(body)), body...)
			if !bytes.Equal(again, data[:len(data)-sumSize]) {
				t.Fatal("a file that parses does not encode to itself")
			}
		}
	})
}

func FuzzDecodeState(f *testing.F) {
	f.Add(sampleState().encode())
	f.Add((&state{seq: 1}).encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := decodeState(data)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("untyped: %v", err)
			}
			return
		}
		if !bytes.Equal(st.encode(), data) {
			t.Fatal("a state that decodes does not encode to itself")
		}
	})
}
