package badger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/dgraph-io/badger/v4"

	"lethe/keyd/internal/keys"
)

// overlay is a set of writes.
type overlay struct {
	rows  map[string]write
	bytes int64
}

type write struct {
	value   []byte
	deleted bool
}

func (o *overlay) put(key string, w write) {
	if o.rows == nil {
		o.rows = make(map[string]write)
	}
	if old, ok := o.rows[key]; ok {
		o.bytes -= charge(key, old.value)
	}
	o.bytes += charge(key, w.value)
	o.rows[key] = w
}

// fits says whether one transaction holds both (rows of both counted twice).
func (o *overlay) fits(more *overlay, maxBytes, maxRows int64) bool {
	return o.bytes+more.bytes <= maxBytes && int64(len(o.rows)+len(more.rows)) <= maxRows
}

func (o *overlay) add(more *overlay) {
	if o.rows == nil {
		*o = *more
		return
	}
	for k, w := range more.rows {
		o.put(k, w)
	}
}

// reader reads a snapshot, through up to two overlays. It is used by one
// goroutine.
type reader struct {
	store  *Store
	ctx    context.Context
	txn    *badger.Txn
	rows   *rowCache // of txn's snapshot
	over   *overlay  // looked at first; may be nil
	under  *overlay  // looked at next; may be nil
	buf    []byte
	closed bool
}

var errOver = errors.New("store: used after its function returned")

func (r *reader) close() {
	r.closed = true
	if r.under == nil { // the txn is not shared
		discard(r.txn)
	}
}

// discard ends a transaction that reads. Badger panics there too if it had
// panicked over an iterator.
func discard(txn *badger.Txn) {
	defer func() { _ = recover() }()
	txn.Discard()
}

func (r *reader) Get(key []byte) ([]byte, error) {
	if r.closed {
		return nil, errOver
	}
	for _, o := range [...]*overlay{r.over, r.under} {
		if o == nil {
			continue
		}
		if w, ok := o.rows[string(key)]; ok {
			if w.deleted {
				return nil, keys.ErrNotFound
			}
			return append([]byte{}, w.value...), nil
		}
	}
	return r.stored(key)
}

// stored reads a row from Badger, which panics over some damage.
func (r *reader) stored(key []byte) (value []byte, err error) {
	defer r.recoverDamage(&err)
	r.buf = append(append(r.buf[:0], rowPrefix), key...)
	if value, ok := r.rows.get(r.buf); ok {
		return value, nil
	}
	item, err := r.txn.Get(r.buf)
	if err != nil {
		return nil, readError(err)
	}
	if value, err = itemValue(r.buf, item); err == nil {
		r.rows.put(r.buf, value)
	}
	return value, err
}

// itemValue returns a copy of an item's row value.
func itemValue(key []byte, item *badger.Item) (value []byte, err error) {
	err = item.Value(func(stored []byte) error {
		v, err := rowValue(key, stored)
		value = append([]byte{}, v...)
		return err
	})
	if err != nil {
		return nil, readError(err)
	}
	return value, nil
}

// Scan implements keys.Reader. What fn writes during an Update's scan, the
// scan under way does not see.
func (r *reader) Scan(prefix, after []byte, fn func(key, value []byte) bool) error {
	if r.closed {
		return errOver
	}
	own := r.pending(prefix, after)

	o := badger.DefaultIteratorOptions
	o.PrefetchValues = false // values are beside their keys
	o.Prefix = badgerKey(string(prefix))
	it, err := r.iterator(o)
	if err != nil {
		return err
	}
	defer it.Close()

	start := o.Prefix
	if after != nil {
		if a := append(badgerKey(string(after)), 0); bytes.Compare(a, start) > 0 {
			start = a
		}
	}
	cursor := &cursor{reader: r, it: it}
	for cursor.seek(start); ; {
		if err := cursor.err; err != nil {
			return err
		}
		if cursor.n++; cursor.n%256 == 0 && r.ctx.Err() != nil {
			return ended(r.ctx.Err())
		}
		order := -1 // of the stored row to the pending one
		switch {
		case cursor.key == nil && len(own) == 0:
			return nil
		case cursor.key == nil:
			order = 1
		case len(own) > 0:
			order = strings.Compare(string(cursor.key), own[0].key)
		}
		key, value, deleted := cursor.key, cursor.value, false
		if order >= 0 {
			key, value, deleted = []byte(own[0].key), bytes.Clone(own[0].value), own[0].deleted
			own = own[1:]
		}
		if !deleted && !fn(key, value) {
			return nil
		}
		if order <= 0 {
			cursor.next()
		}
	}
}

func (r *reader) iterator(o badger.IteratorOptions) (it *badger.Iterator, err error) {
	defer r.recoverDamage(&err)
	return r.txn.NewIterator(o), nil
}

// cursor walks stored rows; key is nil at the end.
type cursor struct {
	reader     *reader
	it         *badger.Iterator
	key, value []byte
	err        error
	n          int
}

func (c *cursor) seek(key []byte) {
	defer c.reader.recoverDamage(&c.err)
	c.it.Seek(key)
	c.read()
}

func (c *cursor) next() {
	defer c.reader.recoverDamage(&c.err)
	c.it.Next()
	c.read()
}

func (c *cursor) read() {
	c.key, c.value = nil, nil
	if !c.it.Valid() {
		return
	}
	item := c.it.Item()
	if c.value, c.err = itemValue(item.Key(), item); c.err == nil {
		c.key = bytes.Clone(item.Key()[1:])
	}
}

type pendingRow struct {
	key string
	write
}

// pending returns the overlays' rows under prefix and after after, in order.
func (r *reader) pending(prefix, after []byte) []pendingRow {
	var rows []pendingRow
	collect := func(o, hidden *overlay) {
		if o == nil {
			return
		}
		for k, w := range o.rows {
			if !strings.HasPrefix(k, string(prefix)) || after != nil && k <= string(after) {
				continue
			}
			if hidden != nil {
				if _, ok := hidden.rows[k]; ok {
					continue
				}
			}
			rows = append(rows, pendingRow{k, w})
		}
	}
	collect(r.over, nil)
	collect(r.under, r.over)
	slices.SortFunc(rows, func(a, b pendingRow) int { return strings.Compare(a.key, b.key) })
	return rows
}

// tx is the keys.Tx of one run of one update.
type tx struct {
	reader
	own     overlay
	refused error // of the first refused Put or Delete
}

func (t *tx) Put(key, value []byte) error {
	if len(value) > MaxValue {
		return t.refuse(fmt.Errorf("%w: a value of %d bytes", keys.ErrTooLarge, len(value)))
	}
	return t.write(key, write{value: value})
}

func (t *tx) Delete(key []byte) error { return t.write(key, write{deleted: true}) }

func (t *tx) write(key []byte, w write) error {
	switch {
	case t.closed:
		return errOver
	case len(key) == 0:
		return t.refuse(errors.New("store: an empty key"))
	case len(key) > MaxKey:
		return t.refuse(fmt.Errorf("%w: a key of %d bytes", keys.ErrTooLarge, len(key)))
	}
	t.own.put(string(key), w)
	if t.own.bytes > t.store.maxBytes || int64(len(t.own.rows)) > t.store.maxRows {
		return t.refuse(fmt.Errorf("%w: more than %d bytes or %d rows",
			keys.ErrTooLarge, t.store.maxBytes, t.store.maxRows))
	}
	return nil
}

func (t *tx) refuse(err error) error {
	if t.refused == nil {
		t.refused = err
	}
	return err
}
