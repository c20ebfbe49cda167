package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"lethe/keyd/internal/keys"
)

func limits(t *testing.T, h Harness) {
	long := strings.Repeat("k", MaxKey)
	big := strings.Repeat("v", MaxValue)
	put(t, h.Store, long, "1", "k", "", "big", big)
	wantRow(t, h.Store, long, "1")
	wantRow(t, h.Store, "k", "")
	wantRow(t, h.Store, "big", big)
	for name, row := range map[string][2]string{
		"no key": {"", "v"}, "long key": {long + "k", "v"}, "big value": {"bigger", big + big},
	} {
		err := h.Store.Update(t.Context(), func(tx keys.Tx) error { return tx.Put([]byte(row[0]), []byte(row[1])) })
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
		if row[0] != "" && !errors.Is(err, keys.ErrTooLarge) {
			t.Errorf("%s: %v, want ErrTooLarge", name, err)
		}
	}
	view(t, h.Store, func(r keys.Reader) error {
		if got := keysUnder(t, r, nil, nil); !slices.Equal(got, []string{"big", "k", long}) {
			t.Errorf("rows: %.60q", got)
		}
		// A key that no row can have is no row's.
		wantGet(t, r, "", absent)
		wantGet(t, r, long+"k", absent)
		return nil
	})
}

func anyBytes(t *testing.T, h Harness) {
	rows := []string{"\x00", "\x00\x00", "\x00\xff", "!badger!", "!badger!txn", "\xff", "\xff\xff", "a\x00b", "%", "_", "é"}
	slices.Sort(rows)
	for _, k := range rows {
		put(t, h.Store, k, "v"+k)
	}
	view(t, h.Store, func(r keys.Reader) error {
		for _, k := range rows {
			wantGet(t, r, k, "v"+k)
		}
		if got := keysUnder(t, r, nil, nil); !slices.Equal(got, rows) {
			t.Errorf("rows: %q, want %q", got, rows)
		}
		if got := keysUnder(t, r, []byte("\xff"), nil); !slices.Equal(got, []string{"\xff", "\xff\xff"}) {
			t.Errorf("rows under ff: %q", got)
		}
		return nil
	})
}

func rowsBelongToCaller(t *testing.T, h Harness) {
	scribble := func(r keys.Reader) {
		v, err := r.Get([]byte("a"))
		if err != nil {
			t.Error(err)
		}
		clear(v[:cap(v)])
		err = r.Scan([]byte("a"), nil, func(k, v []byte) bool { clear(k[:cap(k)]); clear(v[:cap(v)]); return true })
		if err != nil {
			t.Error(err)
		}
	}
	mustUpdate(t, h.Store, func(tx keys.Tx) error {
		if err := tx.Put([]byte("a"), []byte("value")); err != nil {
			return err
		}
		scribble(tx)
		return nil
	})
	view(t, h.Store, func(r keys.Reader) error { scribble(r); return nil })
	mustUpdate(t, h.Store, func(tx keys.Tx) error { scribble(tx); return nil })
	wantRow(t, h.Store, "a", "value")
}

// tooLarge: a transaction of 256 MiB fits nowhere.
func tooLarge(t *testing.T, h Harness) {
	put(t, h.Store, "before", "1")
	value := bytes.Repeat([]byte("x"), 512<<10)
	err := h.Store.Update(t.Context(), func(tx keys.Tx) error {
		for i := range 512 {
			if err := tx.Put(fmt.Append(nil, "huge", i), value); err != nil {
				return fmt.Errorf("put %d: %w", i, err)
			}
		}
		return nil
	})
	if !errors.Is(err, keys.ErrTooLarge) {
		t.Errorf("Update: %v, want ErrTooLarge", err)
	}
	err = h.Store.Update(t.Context(), func(tx keys.Tx) error {
		for i := range 1 << 20 {
			if err := tx.Put(fmt.Append(nil, "many", i), nil); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, keys.ErrTooLarge) {
		t.Errorf("a million rows: %v, want nil or ErrTooLarge", err)
	}
	view(t, h.Store, func(r keys.Reader) error {
		if got := keysUnder(t, r, []byte("huge"), nil); len(got) > 0 {
			t.Errorf("%d rows of the refused transaction are there", len(got))
		}
		n := len(keysUnder(t, r, []byte("many"), nil))
		if want := map[bool]int{true: 1 << 20, false: 0}[err == nil]; n != want {
			t.Errorf("%d rows are there, want %d", n, want)
		}
		return nil
	})
	put(t, h.Store, "after", "1")
}

func scanOrder(t *testing.T, h Harness) {
	all := []string{"a", "a\x00", "a\x00b", "ab", "abc", "b", "b\xff", "b\xffa", "c"}
	for _, k := range []int{3, 1, 8, 0, 2, 7, 5, 4, 6} {
		put(t, h.Store, all[k], "v"+all[k])
	}
	view(t, h.Store, func(r keys.Reader) error {
		for _, tt := range []struct {
			prefix, after string
			want          []string
		}{
			{"", "", all},
			{"a", "", all[:5]},
			{"ab", "", all[3:5]},
			{"b\xff", "", all[6:8]},
			{"d", "", nil},
			{"a", "a", all[1:5]},
			{"a", "a\x00a", all[2:5]},
			{"a", "abc", nil},
			{"b", "a", all[5:8]},
			{"a", "z", nil},
			{"", "b", all[6:]},
		} {
			var after []byte
			if tt.after != "" {
				after = []byte(tt.after)
			}
			if got := keysUnder(t, r, []byte(tt.prefix), after); !slices.Equal(got, tt.want) {
				t.Errorf("Scan(%q, %q): %q, want %q", tt.prefix, tt.after, got, tt.want)
			}
		}
		var got []string
		err := r.Scan(nil, nil, func(k, v []byte) bool {
			if string(v) != "v"+string(k) {
				t.Errorf("row %q has value %q", k, v)
			}
			got = append(got, string(k))
			return len(got) < 4
		})
		if err != nil || !slices.Equal(got, all[:4]) {
			t.Errorf("a scan that was stopped: %q, %v", got, err)
		}
		return nil
	})
}

func scanMany(t *testing.T, h Harness) {
	const rows = 100_000
	fill(t, h.Store, "m", rows, []byte("0123456789012345678901234567890123456789"))
	put(t, h.Store, "l", "", "n", "")
	n := 0
	view(t, h.Store, func(r keys.Reader) error {
		return r.Scan([]byte("m"), nil, func(k, _ []byte) bool {
			if want := fmt.Sprintf("m%08d", n); string(k) != want {
				t.Errorf("row %d is %q", n, k)
				return false
			}
			n++
			return true
		})
	})
	if n != rows {
		t.Errorf("%d rows, want %d", n, rows)
	}
	n = 0
	for after := []byte(nil); ; {
		batch := 0
		view(t, h.Store, func(r keys.Reader) error {
			return r.Scan([]byte("m"), after, func(k, _ []byte) bool {
				after = bytes.Clone(k)
				batch++
				return batch < 999
			})
		})
		if n += batch; batch < 999 {
			break
		}
	}
	if n != rows {
		t.Errorf("%d rows in pieces, want %d", n, rows)
	}
}

func scanMerges(t *testing.T, h Harness) {
	fill(t, h.Store, "r", 20, []byte("old"))
	mustUpdate(t, h.Store, func(tx keys.Tx) error {
		var want []string
		for i := range 25 {
			k := fmt.Sprintf("r%08d", i)
			switch {
			case i%3 == 0:
				if err := tx.Delete([]byte(k)); err != nil {
					return err
				}
				continue
			case i%3 == 1 || i >= 20:
				if err := tx.Put([]byte(k), []byte("new")); err != nil {
					return err
				}
			}
			want = append(want, k)
		}
		if got := keysUnder(t, tx, []byte("r"), nil); !slices.Equal(got, want) {
			t.Errorf("scan: %q, want %q", got, want)
		}
		if got := keysUnder(t, tx, []byte("r"), []byte(want[4])); !slices.Equal(got, want[5:]) {
			t.Errorf("scan after %q: %q, want %q", want[4], got, want[5:])
		}
		return tx.Scan([]byte("r"), nil, func(k, v []byte) bool {
			wantGet(t, tx, string(k), string(v))
			return true
		})
	})
}
