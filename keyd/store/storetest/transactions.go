package storetest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"lethe/keyd/internal/keys"
)

func getInt(r keys.Reader, key string) (int, error) {
	v, err := r.Get([]byte(key))
	if errors.Is(err, keys.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return int(int64(binary.BigEndian.Uint64(v))), nil
}

func putInt(tx keys.Tx, key string, n int) error {
	return tx.Put([]byte(key), binary.BigEndian.AppendUint64(nil, uint64(int64(n))))
}

// registers is a model of a few rows for porcupine: a transaction reads some
// and writes one with a value nobody else writes.
const registers = 3

type registersInput struct {
	reads []int
	write int // register to write, or -1
	value int
}

var registersModel = porcupine.Model{
	Init: func() any { return [registers]int{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.([registers]int), input.(registersInput), output.([]int)
		for i, r := range in.reads {
			if s[r] != out[i] {
				return false, s
			}
		}
		if in.write >= 0 {
			s[in.write] = in.value
		}
		return true, s
	},
}

func strictlySerializable(t *testing.T, h Harness) {
	const clients, each = 6, 60
	var mu sync.Mutex
	var history []porcupine.Operation
	start := time.Now()
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(c)))
			for i := range each {
				in := registersInput{write: -1}
				for r := range registers {
					if rnd.IntN(2) == 0 {
						in.reads = append(in.reads, r)
					}
				}
				if rnd.IntN(3) > 0 {
					in.write, in.value = rnd.IntN(registers), 1+c*each+i
				}
				var out []int
				read := func(r keys.Reader) error {
					out = out[:0]
					for _, reg := range in.reads {
						v, err := getInt(r, fmt.Sprint("reg", reg))
						if err != nil {
							return err
						}
						out = append(out, v)
					}
					return nil
				}
				call := time.Since(start)
				var err error
				if in.write < 0 && rnd.IntN(2) == 0 {
					err = h.Store.View(t.Context(), read)
				} else {
					err = update(t.Context(), h.Store, func(tx keys.Tx) error {
						if err := read(tx); err != nil || in.write < 0 {
							return err
						}
						return putInt(tx, fmt.Sprint("reg", in.write), in.value)
					})
				}
				end := time.Since(start)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				history = append(history, porcupine.Operation{
					ClientId: c, Input: in, Call: int64(call), Output: slices.Clone(out), Return: int64(end),
				})
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if res := porcupine.CheckOperationsTimeout(registersModel, history, time.Minute); res != porcupine.Ok {
		t.Errorf("history of %d transactions: %v", len(history), res)
	}
}

func transfersKeepTheSum(t *testing.T, h Harness) {
	const accounts, clients, each = 5, 8, 50
	name := func(i int) string { return fmt.Sprint("account", i) }
	mustUpdate(t, h.Store, func(tx keys.Tx) error {
		for i := range accounts {
			if err := putInt(tx, name(i), 100); err != nil {
				return err
			}
		}
		return nil
	})
	sum := func(r keys.Reader) {
		total := 0
		for i := range accounts {
			n, err := getInt(r, name(i))
			if err != nil {
				t.Error(err)
			}
			total += n
		}
		if total != accounts*100 {
			t.Errorf("the accounts hold %d, want %d", total, accounts*100)
		}
	}
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(2, uint64(c)))
			for range each {
				from, to, n := rnd.IntN(accounts), rnd.IntN(accounts), rnd.IntN(50)
				err := update(t.Context(), h.Store, func(tx keys.Tx) error {
					a, err := getInt(tx, name(from))
					if err != nil {
						return err
					}
					if err := putInt(tx, name(from), a-n); err != nil {
						return err
					}
					b, err := getInt(tx, name(to))
					if err != nil {
						return err
					}
					return putInt(tx, name(to), b+n)
				})
				if err != nil {
					t.Error(err)
				}
				view(t, h.Store, func(r keys.Reader) error { sum(r); return nil })
			}
		})
	}
	wg.Wait()
}

// noWriteSkew: two on call, and each may leave if the other stays.
func noWriteSkew(t *testing.T, h Harness) {
	for round := range 100 {
		a, b := fmt.Sprint("a", round), fmt.Sprint("b", round)
		put(t, h.Store, a, "on", b, "on")
		var wg sync.WaitGroup
		for _, me := range []string{a, b} {
			wg.Go(func() {
				err := update(t.Context(), h.Store, func(tx keys.Tx) error {
					on := 0
					for _, k := range []string{a, b} {
						v, err := tx.Get([]byte(k))
						if err != nil {
							return err
						}
						if string(v) == "on" {
							on++
						}
					}
					if on < 2 {
						return nil
					}
					return tx.Put([]byte(me), []byte("off"))
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		view(t, h.Store, func(r keys.Reader) error {
			x, _ := r.Get([]byte(a))
			y, _ := r.Get([]byte(b))
			if string(x)+string(y) == "offoff" {
				t.Errorf("round %d: both left", round)
			}
			return nil
		})
	}
}

var errTaken = errors.New("taken")

func oneWinner(t *testing.T, h Harness) {
	for round := range 30 {
		key := fmt.Append(nil, "row", round)
		var winners atomic.Int32
		var won atomic.Value
		var wg sync.WaitGroup
		for c := range 16 {
			wg.Go(func() {
				mine := fmt.Sprint("client", c)
				err := update(t.Context(), h.Store, func(tx keys.Tx) error {
					_, err := tx.Get(key)
					if err == nil {
						return errTaken
					}
					if !errors.Is(err, keys.ErrNotFound) {
						return err
					}
					return tx.Put(key, []byte(mine))
				})
				switch {
				case err == nil:
					winners.Add(1)
					won.Store(mine)
				case err != errTaken:
					t.Errorf("Update: %v, want errTaken as it is", err)
				default:
					// Whoever is told that it is taken can read it.
					view(t, h.Store, func(r keys.Reader) error {
						if _, err := r.Get(key); err != nil {
							t.Errorf("Get of a taken row: %v", err)
						}
						return nil
					})
				}
			})
		}
		wg.Wait()
		if n := winners.Load(); n != 1 {
			t.Fatalf("round %d: %d winners", round, n)
		}
		wantRow(t, h.Store, string(key), won.Load().(string))
	}
}

func counter(t *testing.T, h Harness) {
	const clients, each = 16, 40
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for range each {
				err := update(t.Context(), h.Store, func(tx keys.Tx) error {
					n, err := getInt(tx, "n")
					if err != nil {
						return err
					}
					runtime.Gosched()
					return putInt(tx, "n", n+1)
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	view(t, h.Store, func(r keys.Reader) error {
		if n, err := getInt(r, "n"); n != clients*each || err != nil {
			t.Errorf("counter = %d, %v, want %d", n, err, clients*each)
		}
		return nil
	})
}

// absentRowConflicts: each of two writes its row unless the other's is there.
func absentRowConflicts(t *testing.T, h Harness) {
	for round := range 50 {
		pair := [2]string{fmt.Sprint("x", round), fmt.Sprint("y", round)}
		var wg sync.WaitGroup
		for i := range pair {
			wg.Go(func() {
				err := update(t.Context(), h.Store, func(tx keys.Tx) error {
					if _, err := tx.Get([]byte(pair[1-i])); err == nil {
						return nil
					}
					return tx.Put([]byte(pair[i]), []byte("1"))
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		view(t, h.Store, func(r keys.Reader) error {
			_, errX := r.Get([]byte(pair[0]))
			_, errY := r.Get([]byte(pair[1]))
			if (errX == nil) == (errY == nil) {
				t.Errorf("round %d: want one of the rows, have %v and %v", round, errX, errY)
			}
			return nil
		})
	}
}

func readYourWrites(t *testing.T, h Harness) {
	put(t, h.Store, "old", "1", "gone", "1", "kept", "1")
	mustUpdate(t, h.Store, func(tx keys.Tx) error {
		for _, err := range []error{
			tx.Put([]byte("new"), []byte("2")),
			tx.Put([]byte("old"), []byte("2")),
			tx.Delete([]byte("gone")),
			tx.Put([]byte("brief"), []byte("2")),
			tx.Delete([]byte("brief")),
			tx.Delete([]byte("back")),
			tx.Put([]byte("back"), []byte("2")),
			tx.Delete([]byte("never there")),
		} {
			if err != nil {
				return err
			}
		}
		for key, want := range map[string]string{
			"new": "2", "old": "2", "gone": absent, "kept": "1", "brief": absent, "back": "2",
		} {
			wantGet(t, tx, key, want)
		}
		if got, want := keysUnder(t, tx, nil, nil), []string{"back", "kept", "new", "old"}; !slices.Equal(got, want) {
			t.Errorf("Scan in Update: %q, want %q", got, want)
		}
		return nil
	})
	for key, want := range map[string]string{"new": "2", "old": "2", "gone": absent, "brief": absent, "back": "2"} {
		wantRow(t, h.Store, key, want)
	}
}

func failedLeavesNothing(t *testing.T, h Harness) {
	boom := errors.New("boom")
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			key := fmt.Sprintf("row%03d", i)
			fails := i%3 == 0
			err := update(t.Context(), h.Store, func(tx keys.Tx) error {
				if err := tx.Put([]byte(key), []byte("x")); err != nil {
					return err
				}
				if err := tx.Delete([]byte("untouched")); err != nil {
					return err
				}
				if err := tx.Put([]byte("untouched"), []byte("x")); err != nil {
					return err
				}
				if fails {
					return boom
				}
				return nil
			})
			if fails && err != boom || !fails && err != nil {
				t.Errorf("%s: %v", key, err)
			}
		})
	}
	wg.Wait()
	for i := range 200 {
		want := "x"
		if i%3 == 0 {
			want = absent
		}
		wantRow(t, h.Store, fmt.Sprintf("row%03d", i), want)
	}
}

func unheededRefusal(t *testing.T, h Harness) {
	err := h.Store.Update(t.Context(), func(tx keys.Tx) error {
		if err := tx.Put([]byte("a"), nil); err != nil {
			return err
		}
		_ = tx.Put([]byte("b"), make([]byte, 2<<20))
		return nil
	})
	if err == nil {
		t.Error("Update whose Put was refused returned nil")
	}
	wantRow(t, h.Store, "a", absent)
}

func panicHarmsNobody(t *testing.T, h Harness) {
	boom := errors.New("boom")
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			panics := i%5 == 0
			defer func() {
				p := recover()
				if panics != (p != nil) {
					t.Errorf("client %d: panic %v", i, p)
				}
				if err, ok := p.(error); panics && (!ok || !errors.Is(err, boom)) && p != any(boom) {
					t.Errorf("client %d: panic with %v, want the function's own", i, p)
				}
			}()
			err := update(t.Context(), h.Store, func(tx keys.Tx) error {
				if err := tx.Put(fmt.Appendf(nil, "row%03d", i), []byte("x")); err != nil {
					return err
				}
				if panics {
					panic(boom)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range 100 {
		want := "x"
		if i%5 == 0 {
			want = absent
		}
		wantRow(t, h.Store, fmt.Sprintf("row%03d", i), want)
	}
}

// exitHarmsNobody: runtime.Goexit, as testing's FailNow calls it.
func exitHarmsNobody(t *testing.T, h Harness) {
	var returned atomic.Int32
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Go(func() {
			err := update(t.Context(), h.Store, func(tx keys.Tx) error {
				if err := tx.Put(fmt.Appendf(nil, "row%03d", i), []byte("x")); err != nil {
					return err
				}
				if i%6 == 0 {
					runtime.Goexit()
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			returned.Add(1)
		})
	}
	wg.Wait()
	if n := returned.Load(); n != 50 {
		t.Errorf("%d updates returned, want 50", n)
	}
	for i := range 60 {
		want := "x"
		if i%6 == 0 {
			want = absent
		}
		wantRow(t, h.Store, fmt.Sprintf("row%03d", i), want)
	}
}

func cancelled(t *testing.T, h Harness) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ran := false
	err := h.Store.Update(ctx, func(tx keys.Tx) error { ran = true; return tx.Put([]byte("a"), nil) })
	if !errors.Is(err, context.Canceled) || ran {
		t.Errorf("Update with an ended context: %v, ran %v", err, ran)
	}
	wantRow(t, h.Store, "a", absent)
	if err := h.Store.View(ctx, func(keys.Reader) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("View with an ended context: %v", err)
	}

	// Cancelled while another holds things up: it returns, and what the store
	// then holds is all of it or nothing.
	block, blocked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	wg.Go(func() {
		err := update(t.Context(), h.Store, func(tx keys.Tx) error {
			once.Do(func() { close(blocked) })
			<-block
			return tx.Put([]byte("slow"), nil)
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-blocked
	ctx, cancel = context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- h.Store.Update(ctx, func(tx keys.Tx) error {
			if err := tx.Put([]byte("b1"), []byte("x")); err != nil {
				return err
			}
			return tx.Put([]byte("b2"), []byte("x"))
		})
	}()
	cancel()
	unblock := sync.OnceFunc(func() { close(block) })
	defer unblock()
	select {
	case err = <-done:
	case <-time.After(10 * time.Second): // a store may be running it already
		unblock()
		err = <-done
	}
	unblock()
	wg.Wait()
	wantRow(t, h.Store, "slow", "")
	view(t, h.Store, func(r keys.Reader) error {
		_, err1 := r.Get([]byte("b1"))
		_, err2 := r.Get([]byte("b2"))
		if (err1 == nil) != (err2 == nil) {
			t.Errorf("half of a cancelled update is there: %v, %v", err1, err2)
		}
		if err == nil && err1 != nil {
			t.Errorf("Update returned nil, but its row: %v", err1)
		}
		return nil
	})

	// A scan that goes on too long ends with its context.
	fill(t, h.Store, "many", 2000, nil)
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	err = h.Store.View(ctx, func(r keys.Reader) error {
		return r.Scan([]byte("many"), nil, func(_, _ []byte) bool { cancel(); return true })
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a scan whose context ended: %v", err)
	}
}

// noRunAfterReturn: the race detector sees a late run touch n.
func noRunAfterReturn(t *testing.T, h Harness) {
	var wg sync.WaitGroup
	for c := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(3, uint64(c)))
			for i := range 40 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(2000))*time.Microsecond)
				n := 0
				err := h.Store.Update(ctx, func(tx keys.Tx) error {
					n++
					return tx.Put([]byte(strconv.Itoa(c*1000+i)), []byte("x"))
				})
				cancel()
				if err == nil && n == 0 {
					t.Error("acknowledged without having run")
				}
				n = 0
			}
		})
	}
	wg.Wait()
}
