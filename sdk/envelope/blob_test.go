package envelope

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"
)

func randomKey(class uint16, bucket uint64) *Key {
	k := &Key{Class: class, Bucket: bucket}
	rand.Read(k.ID[:])
	rand.Read(k.Secret[:])
	return k
}

func randomKeys(n int) []*Key {
	keys := make([]*Key, n)
	for i := range keys {
		keys[i] = randomKey(7, 1700000000)
	}
	return keys
}

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// pair makes a sealer and an opener for n new keys.
func pair(t testing.TB, policy Policy, n int) (*Sealer, *Opener) {
	t.Helper()
	return pairOf(t, policy, randomKeys(n))
}

func pairOf(t testing.TB, policy Policy, keys []*Key) (*Sealer, *Opener) {
	t.Helper()
	return sealer(t, policy, keys, Options{}), opener(t, policy, keys, Options{})
}

func sealer(t testing.TB, policy Policy, keys []*Key, opts Options) *Sealer {
	t.Helper()
	if policy == Single {
		return must[*Sealer](t)(NewSealer(keys[0], opts))
	}
	return must[*Sealer](t)(NewMultiSealer(policy, keys, opts))
}

func opener(t testing.TB, policy Policy, keys []*Key, opts Options) *Opener {
	t.Helper()
	if policy == Single {
		return must[*Opener](t)(NewOpener(keys[0], opts))
	}
	return must[*Opener](t)(NewMultiOpener(policy, keys, opts))
}

func bound(t testing.TB, kv ...string) Context {
	t.Helper()
	var pairs []Pair
	for i := 0; i < len(kv); i += 2 {
		pairs = append(pairs, Pair{kv[i], kv[i+1]})
	}
	return must[Context](t)(NewContext(pairs...))
}

func eachPolicy(t *testing.T, f func(t *testing.T, policy Policy, n int)) {
	for _, c := range []struct {
		policy Policy
		n      int
	}{{Single, 1}, {All, 2}, {All, MaxRecipients}, {Any, 2}, {Any, MaxRecipients}} {
		t.Run(fmt.Sprintf("%s of %d", c.policy, c.n), func(t *testing.T) { f(t, c.policy, c.n) })
	}
}

func TestOneShotRoundTrip(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy Policy, n int) {
		s, o := pair(t, policy, n)
		for _, ctx := range []Context{{}, bound(t, "thread", "42", "row", "")} {
			for _, size := range []int{0, 1, 15, 16, 17, 256, 65536, 1 << 20} {
				plain := make([]byte, size)
				rand.Read(plain)
				blob, err := s.Append([]byte("front"), plain, ctx)
				if err != nil {
					t.Fatal(err)
				}
				if got := len(blob) - len("front") - size; got != s.Overhead(ctx) {
					t.Fatalf("overhead is %d, Overhead says %d", got, s.Overhead(ctx))
				}
				got, err := o.Append([]byte("before"), blob[len("front"):], ctx)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, append([]byte("before"), plain...)) {
					t.Fatalf("size %d: opened to something else", size)
				}
				other := bound(t, "thread", "43", "row", "")
				if got, err := o.Append([]byte("before"), blob[len("front"):], other); !errors.Is(err, ErrWrongContext) || string(got) != "before" {
					t.Fatalf("another context: %v", err)
				}
			}
		}
	})
}
