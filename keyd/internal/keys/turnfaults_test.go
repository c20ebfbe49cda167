package keys_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"lethe/keyd/internal/keys"
	"lethe/keyd/internal/wrap"
	storev1 "lethe/proto/keyd/store/v1"
	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk/envelope"
)

// chaos ends a process at one of its calls to the store and the KMS: that call
// fails, having done its work or not, and after it none comes through.
type chaos struct {
	mu    sync.Mutex
	armed bool
	calls []string
	at    int // counted from 1; zero: never
	mode  fault
	dead  bool
}

func (c *chaos) fault(op string) fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.armed:
		return none
	case c.dead:
		return lost
	}
	c.calls = append(c.calls, op)
	if len(c.calls) == c.at {
		c.dead = true
		return c.mode
	}
	return none
}

func (c *chaos) isDead() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

func (c *chaos) revive() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = false
}

// people are subjects and the keys that they were given.
type people struct {
	r    *rig
	keys map[string]*keydv1.BlobKey // by subject; all of class trace
	dead map[string]*keydv1.BlobKey
}

func (r *rig) populate(n int) *people {
	p := &people{r: r, keys: make(map[string]*keydv1.BlobKey), dead: make(map[string]*keydv1.BlobKey)}
	for i := range n {
		name := fmt.Sprintf("person-%d", i)
		p.keys[name] = r.seal(name, "trace")
	}
	return p
}

func (p *people) destroy(name string) {
	p.r.destroy(name, "destroy-"+name)
	p.dead[name] = p.keys[name]
	delete(p.keys, name)
}

// check checks that everybody is as they should be.
func (p *people) check() {
	p.r.t.Helper()
	for name, k := range p.keys {
		got, err := p.r.ask(openQuery("acme", name, "trace", k))
		if err != nil || !bytes.Equal(got.Key, k.Key) {
			p.r.t.Errorf("%s is lost: %v", name, err)
		}
	}
	for name, k := range p.dead {
		_, err := p.r.ask(openQuery("acme", name, "trace", k))
		p.r.want(name+" after destruction", err, isErased)
	}
}

// opens returns the ids of all DEKs that a copy of a store's rows and a KMS
// give up to someone who holds both, and knows the formats.
func opens(t testing.TB, rows map[string][]byte, kms keys.KMS) map[string]bool {
	t.Helper()
	wrapped := func(b []byte) *storev1.Wrapped {
		w := new(storev1.Wrapped)
		if err := proto.Unmarshal(b, w); err != nil {
			t.Fatal(err)
		}
		return w
	}
	names := map[string]string{string(make([]byte, 16)): ""}
	var roots []string
	for k, v := range rows {
		switch k[0] {
		case 'T':
			var row storev1.Tenant
			if err := proto.Unmarshal(v, &row); err != nil {
				t.Fatal(err)
			}
			names[k[1:]] = row.Name
		case 'E':
			var row storev1.Epoch
			if err := proto.Unmarshal(v, &row); err != nil {
				t.Fatal(err)
			}
			roots = append(roots, row.RootId)
		}
	}
	keks := make(map[string]*wrap.Wrapper)
	for k, v := range rows {
		if k[0] != 'w' || k[5] != 'K' {
			continue
		}
		epoch := uint32(k[1])<<24 | uint32(k[2])<<16 | uint32(k[3])<<8 | uint32(k[4])
		for _, root := range roots {
			for _, name := range names {
				packed, err := kms.Unwrap(t.Context(), root, wrapped(v).Ciphertext, keys.EncryptionContext{Tenant: name, Epoch: epoch})
				if err != nil {
					continue
				}
				w, err := wrap.New(packed[16:])
				if err != nil {
					t.Fatal(err)
				}
				keks[string(packed[:16])] = w
			}
		}
	}
	found := make(map[string]bool)
	for k, v := range rows {
		if k[0] != 'w' || k[5] != 'D' {
			continue
		}
		w := wrapped(v)
		id := k[len(k)-16:]
		for kekID, kek := range keks {
			for class := range uint32(8) {
				for generation := range uint32(4) {
					n := []byte{0, 0, 0, byte(class), 0, 0, 0, byte(generation)}
					if _, err := kek.Unwrap(w.Ciphertext, envelope.Info("lethe/v1/wrap/dek", []byte(k), []byte(kekID), n)); err == nil {
						found[id] = true
					}
				}
			}
		}
	}
	return found
}

// opensAny says which of the people's keys such a copy gives up.
func (p *people) opensAny(rows map[string][]byte, who map[string]*keydv1.BlobKey) []string {
	p.r.t.Helper()
	ids := opens(p.r.t, rows, p.r.kms)
	var names []string
	for name, k := range who {
		if ids[string(k.KeyId)] {
			names = append(names, name)
		}
	}
	return names
}

// Whatever a process does last, the next one takes it from there: at every
// call of a turn's that fails, with its work done or not done, nobody's key is
// lost, nobody comes back, and the epoch closes.
func TestKilledAtEveryStepOfATurn(t *testing.T) {
	calls := turnWithDeathAt(t, 0, none)
	t.Logf("a turn makes %d calls: %s", len(calls), strings.Join(calls, " "))
	if len(calls) < 30 {
		t.Fatalf("only %d calls", len(calls))
	}
	for i, op := range calls {
		for mode, name := range map[fault]string{lost: "lost", persisted: "persisted"} {
			t.Run(fmt.Sprintf("%d %s %s", i+1, op, name), func(t *testing.T) { turnWithDeathAt(t, i+1, mode) })
		}
	}
}

func turnWithDeathAt(t *testing.T, at int, mode fault) []string {
	r, store, kms := newMemoryRig(t)
	p := r.populate(12)
	p.destroy("person-0")
	backup := store.copyRows()
	made := make(map[string]bool)
	kms.KMS = rootLog{kms.KMS, func(id string) { made[id] = true }}
	c := &chaos{at: at, mode: mode, armed: true}
	store.fault, kms.fault = c.fault, c.fault
	closing := false
	for round := 0; ; round++ {
		if round > 200 {
			t.Fatalf("epoch 1 does not close: %v", r.epoch(1))
		}
		if c.isDead() {
			r.Keys.Close()
			c.revive()
			r.Keys = r.another()
			r.clock.Advance(keys.BeatLapse + time.Second)
		}
		if round == 0 {
			_, _ = r.TurnEpoch(context.Background(), 1)
			continue
		}
		again, err := r.StepDuties(context.Background())
		if c.isDead() {
			continue
		}
		e := r.epoch(1)
		switch {
		case e.State == open && !e.TurnRequested:
			_, err = r.TurnEpoch(context.Background(), 1) // the request was lost
			if c.isDead() {
				continue
			}
		case e.State == draining && p.dead["person-1"] == nil:
			c.mu.Lock()
			c.armed = false // the destruction is not what is tested
			c.mu.Unlock()
			p.destroy("person-1")
			c.mu.Lock()
			c.armed = true
			c.mu.Unlock()
		case e.State == closed:
			closing = true
		}
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if closing {
			break
		}
		if !again {
			r.clock.Advance(time.Hour)
			_ = r.Beat(context.Background())
		}
	}
	c.mu.Lock()
	c.armed = false
	c.mu.Unlock()
	r.wantState(2, open)
	if len(made) != 1 || !made[r.epoch(2).RootId] {
		t.Errorf("roots %v were made; epoch 2 has %s", made, r.epoch(2).RootId)
	}
	p.check()
	r.reopen2()
	p.check()
	if got := p.opensAny(backup, p.keys); len(got) != 0 {
		t.Errorf("the backup from before opens %q", got)
	}
	if got := p.opensAny(backup, p.dead); len(got) != 0 {
		t.Errorf("the backup from before opens %q", got)
	}
	if got := p.opensAny(store.copyRows(), p.dead); len(got) != 0 {
		t.Errorf("the store opens %q", got)
	}
	if got := p.opensAny(store.copyRows(), p.keys); len(got) != len(p.keys) {
		t.Errorf("the store opens %d of %d living keys: the test sees too little", len(got), len(p.keys))
	}
	_, v := r.getReceipt("destroy-person-0")
	if st := v.Stages(); st.Sanitised.IsZero() || st.Final.IsZero() {
		t.Errorf("stages of the destruction before: %+v", st)
	}
	if got := strings.Join(r.kinds(0), ", "); strings.Count(got, "epoch-closed 1") != 1 || strings.Count(got, "epoch-opened 2") != 1 ||
		strings.Count(got, "sanitised 1") != 1 || strings.Count(got, "epoch-drained 1") != 1 {
		t.Errorf("the ledger says %s", got)
	}
	return c.calls
}

// reopen2 is reopen for a store that outlives its keyd.
func (r *rig) reopen2() {
	r.t.Helper()
	r.Keys.Close()
	r.Keys = r.another()
}
