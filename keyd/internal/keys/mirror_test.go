package keys_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"lethe/keyd/internal/ledger"
)

// An old object of the anchor that was edited is found: of a small ledger before
// keyd serves, of a large one while it does, and then it serves no more. A
// restore would replay it.
func TestEditedMirror(t *testing.T) {
	for _, size := range []int{20, 2100} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			r, _, _ := newMemoryRig(t)
			r.seal("ann", "trace")
			var wg sync.WaitGroup
			for worker := range 8 {
				wg.Go(func() {
					for i := worker; i < size; i += 8 {
						name := fmt.Sprintf("person-%d", i)
						if _, err := r.DestroyKey(t.Context(), destroyRequest(name, name)); err != nil {
							t.Errorf("destroy: %v", err)
						}
					}
				})
			}
			wg.Wait()
			r.reopen2()
			if err := r.Serving(); err != nil {
				t.Fatal(err)
			}
			o, err := r.anchor.Get(t.Context(), uint64(size/2))
			if err != nil {
				t.Fatal(err)
			}
			r.anchor.Edit(o.Size, func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
			r.Keys.Close()
			err = r.serve()
			if large := size > 2048; large != (err == nil) {
				t.Fatalf("it starts with: %v", err)
			} else if large {
				for range 2000 {
					if err = r.Serving(); err != nil {
						break
					}
					time.Sleep(5 * time.Millisecond)
				}
			}
			if !errors.Is(err, ledger.ErrAnchorDamaged) {
				t.Errorf("an edited object of %d entries is not found: %v", o.Size, err)
			}
		})
	}
}
