//go:build pkcs11

package pkcs11

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
)

const (
	recordApplication  = "lethe root"
	recordVersion      = "lethe-root-v1"
	witnessApplication = "lethe witness"

	nonceSize = 8
	// maxRecords is how many records of one root are read. There is one, but
	// for crashes and races.
	maxRecords = 16
)

// rootIDs: kind, epoch and CKA_ID.
var rootIDs = regexp.MustCompile(`^pkcs11-(0|[1-9][0-9]{0,9})-([0-9a-f]{32})$`)

// requested is the root of a request, whose bytes are the key's CKA_ID.
func requested(epoch uint32, request keys.RootRequest) (rootID string, ckaID []byte) {
	return fmt.Sprintf("pkcs11-%d-%x", epoch, request), request[:]
}

// ckaID returns the CKA_ID of a root's key.
func ckaID(rootID string) ([]byte, error) {
	m := rootIDs.FindStringSubmatch(rootID)
	if m == nil {
		return nil, fmt.Errorf("PKCS#11: %w: the id is not one of this KMS", keys.ErrRootUnknown)
	}
	return hex.DecodeString(m[2])
}

var stateNames = []string{
	keys.RootEnabled: "enabled", keys.RootDisabled: "disabled",
	keys.RootPending: "pending", keys.RootDestroyed: "destroyed",
}

// record is the state of a root as the token keeps it.
type record struct {
	rootID string
	seq    uint64
	state  keys.RootState
	at     int64 // pending, destroyed: the date in Unix milliseconds; else 0
	nonce  string

	object p11.ObjectHandle // where it was read
}

func (r record) encode() string {
	return fmt.Sprintf("%s %s %d %s %d %s\n", recordVersion, r.rootID, r.seq, stateNames[r.state], r.at, r.nonce)
}

var recordForm = regexp.MustCompile(`^` + recordVersion + ` (\S+) ([0-9]{1,20}) ([a-z]+) ([0-9]{1,19}) ([0-9a-f]{16})\n$`)

// parseRecord accepts only what encode writes.
func parseRecord(text string) (record, error) {
	m := recordForm.FindStringSubmatch(text)
	if m == nil {
		return record{}, ErrDamaged
	}
	state := slices.Index(stateNames, m[3])
	if state < int(keys.RootEnabled) {
		return record{}, ErrDamaged
	}
	r := record{rootID: m[1], state: keys.RootState(state), nonce: m[5]}
	r.seq, _ = strconv.ParseUint(m[2], 10, 64)
	r.at, _ = strconv.ParseInt(m[4], 10, 64)
	dated := r.state == keys.RootPending || r.state == keys.RootDestroyed
	if r.seq == 0 || dated != (r.at > 0) || r.encode() != text {
		return record{}, ErrDamaged
	}
	return r, nil
}

func (r record) due(now time.Time) bool { return r.at != 0 && now.UnixMilli() > r.at }

func (r record) describe() keys.Root {
	d := keys.Root{ID: r.rootID, State: r.state}
	if r.at != 0 {
		d.DestroyAt = time.UnixMilli(r.at).UTC()
	}
	return d
}

func dataTemplate(application, label string) []*p11.Attribute {
	return []*p11.Attribute{
		p11.NewAttribute(p11.CKA_CLASS, p11.CKO_DATA),
		p11.NewAttribute(p11.CKA_TOKEN, true),
		p11.NewAttribute(p11.CKA_APPLICATION, application),
		p11.NewAttribute(p11.CKA_LABEL, label),
	}
}

// createData makes a private data object that nobody can edit.
func (s *session) createData(application, label, value string) (o p11.ObjectHandle, err error) {
	template := append(dataTemplate(application, label),
		p11.NewAttribute(p11.CKA_PRIVATE, true),
		p11.NewAttribute(p11.CKA_MODIFIABLE, false),
		p11.NewAttribute(p11.CKA_VALUE, value))
	err = s.call("C_CreateObject", func(c *p11.Ctx) (err error) {
		o, err = c.CreateObject(s.handle, template)
		return err
	})
	return o, err
}

// records returns the records of a root, the one that counts first.
func (s *session) records(rootID string) ([]record, error) {
	const tries = 32
	for range tries {
		all, err := s.readRecords(rootID)
		if code(err) != p11.CKR_OBJECT_HANDLE_INVALID {
			return all, err
		}
		// One was replaced since it was listed.
	}
	return nil, unavailable(fmt.Errorf("the record of %s keeps changing", rootID))
}

func (s *session) readRecords(rootID string) ([]record, error) {
	objects, err := s.find(dataTemplate(recordApplication, rootID), maxRecords+1)
	if err != nil {
		return nil, err
	}
	if len(objects) > maxRecords {
		return nil, unavailable(fmt.Errorf("%w: %s has more than %d", ErrDamaged, rootID, maxRecords))
	}
	var all []record
	for _, o := range objects {
		value, err := s.attributes(o, p11.CKA_VALUE)
		if err != nil {
			return nil, err
		}
		r, err := parseRecord(string(value[0]))
		if err == nil && r.rootID != rootID {
			err = ErrDamaged
		}
		if err != nil {
			return nil, unavailable(fmt.Errorf("%w: %s", err, rootID))
		}
		r.object = o
		all = append(all, r)
	}
	// Of two with one number, which a crash in a race can leave, the one that
	// is closer to destruction counts: it can be cancelled.
	slices.SortFunc(all, func(a, b record) int {
		return -cmp.Or(cmp.Compare(a.seq, b.seq), cmp.Compare(a.state, b.state), cmp.Compare(a.at, b.at), cmp.Compare(a.nonce, b.nonce))
	})
	return all, nil
}

// record returns the record that counts. Without one the root is unknown.
func (s *session) record(rootID string) (record, error) {
	all, err := s.records(rootID)
	if err != nil {
		return record{}, err
	}
	if len(all) == 0 {
		return record{}, s.gone(rootID, "the token has no record of it")
	}
	return all[0], nil
}

// put makes next the record that counts, in place of those with lower numbers.
// It fails with keys.ErrKMSUnavailable, having changed nothing, when another
// process does the same.
func (s *session) put(next record) error {
	nonce := make([]byte, nonceSize)
	rand.Read(nonce)
	next.nonce = hex.EncodeToString(nonce)
	created, err := s.createData(recordApplication, next.rootID, next.encode())
	if err != nil {
		return err
	}
	all, err := s.records(next.rootID)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.seq >= next.seq && r.nonce != next.nonce {
			if err := s.destroy(created); err != nil {
				return err
			}
			return unavailable(fmt.Errorf("another process is changing %s", next.rootID))
		}
	}
	if len(all) == 0 || all[0].nonce != next.nonce {
		return unavailable(fmt.Errorf("the token does not show the record of %s that it has just taken", next.rootID))
	}
	for _, r := range all[1:] {
		if err := s.destroy(r.object); err != nil && code(err) != p11.CKR_OBJECT_HANDLE_INVALID {
			return err
		}
	}
	return nil
}

// witness makes the token's witness, an object that is there as long as the
// token shows what is on it, unless there is one.
func (s *session) witness() error {
	found, err := s.find(dataTemplate(witnessApplication, witnessApplication), 1)
	if err == nil && len(found) == 0 {
		_, err = s.createData(witnessApplication, witnessApplication, "lethe-witness-v1\n")
	}
	return err
}

// gone is the error for an object that a search of this session did not find:
// keys.ErrRootUnknown if the token shows its witness after it.
func (s *session) gone(rootID, what string) error {
	found, err := s.find(dataTemplate(witnessApplication, witnessApplication), 1)
	if err == nil && len(found) > 0 {
		_, err = s.attributes(found[0], p11.CKA_VALUE)
	}
	switch {
	case err != nil:
		return err
	case len(found) == 0:
		return unavailable(fmt.Errorf("%w; %s", ErrNoWitness, what))
	}
	return fmt.Errorf("PKCS#11: root %s: %w; %s", rootID, keys.ErrRootUnknown, what)
}
