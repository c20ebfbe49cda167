// Package awstest is a double of AWS KMS for tests: an HTTP handler that speaks
// the AWS JSON 1.1 protocol for the calls of package awskms, with a clock that
// can be moved past a waiting period and faults that can be injected into any call.
//
// It is written from AWS's API reference and key state table, not measured
// against AWS. It does not check signatures or policies, and knows symmetric
// keys of one region only. Its encryption protects nothing.
package awstest

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Region and Account are those of every key.
const (
	Region  = "eu-west-1"
	Account = "111122223333"
)

// Fault is what happens to a call instead of its answer. The zero Fault is none.
type Fault struct {
	// Code and Status make the call fail with this answer.
	Code   string
	Status int
	// Drop closes the connection without an answer; with Done after doing
	// what was asked.
	Drop bool
	// Hang answers nothing until the caller gives up or the Server is released.
	Hang bool
	// Body is the answer, with status 200.
	Body string
	// Done does what was asked before the fault.
	Done bool
}

// Server is the double. Its exported fields are set before it is used, and
// may be changed through Set afterwards.
type Server struct {
	// Inject chooses the fault of a call, named as in the API ("Encrypt").
	// n counts the calls to the Server, from 1.
	Inject func(call string, n int) Fault
	// Late is how long after its date a key is deleted.
	Late time.Duration
	// NoDate leaves the Date header out of answers.
	NoDate bool
	// DateOffset is added to the time in the Date header.
	DateOffset time.Duration

	mu      sync.Mutex
	now     func() time.Time
	moved   time.Duration
	keys    map[string]*key
	aliases map[string]string
	calls   []string
	release chan struct{}
}

type key struct {
	arn, state, origin, description string
	multiRegion                     bool
	created, deletion               time.Time
	tags                            map[string]string
	secret                          cipher.AEAD
}

// New returns a Server without keys whose clock starts at the given instant
// and stands still but for Advance.
func New(start time.Time) *Server {
	return &Server{
		now:     func() time.Time { return start },
		keys:    map[string]*key{},
		aliases: map[string]string{},
		release: make(chan struct{}),
	}
}

// Now returns the Server's time.
func (s *Server) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.time()
}

func (s *Server) time() time.Time { return s.now().Add(s.moved) }

// Advance moves the Server's clock.
func (s *Server) Advance(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.moved += d
}

// Set changes the Server's fields while it serves. It also releases the calls that hang.
func (s *Server) Set(change func(*Server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
	close(s.release)
	s.release = make(chan struct{})
}

// Calls returns the names of the calls since the last Calls.
func (s *Server) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls := s.calls
	s.calls = nil
	return calls
}

// KeyState returns the state of a key as AWS names it, or "" when there is no such key.
func (s *Server) KeyState(arn string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reap()
	if k := s.keys[arn]; k != nil {
		return k.state
	}
	return ""
}

// Keys returns the ARNs of all keys.
func (s *Server) Keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reap()
	return slices.Sorted(maps.Keys(s.keys))
}

// Tags returns a key's tags, and Aliases the names of its aliases.
func (s *Server) Tags(arn string) map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.keys[arn]; k != nil {
		return maps.Clone(k.tags)
	}
	return nil
}

// Aliases returns the names of a key's aliases.
func (s *Server) Aliases(arn string) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, target := range s.aliases {
		if target == arn {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Remove makes the Server forget a key at once, as if it had never been.
func (s *Server) Remove(arn string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.keys, arn)
}

// Edit changes what the Server says of a key: its state, origin, and whether
// it is a multi-Region key.
func (s *Server) Edit(arn string, change func(state, origin *string, multiRegion *bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keys[arn]
	change(&k.state, &k.origin, &k.multiRegion)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	call, ok := strings.CutPrefix(r.Header.Get("X-Amz-Target"), "TrentService.")
	if !ok || r.Method != http.MethodPost || r.Header.Get("Content-Type") != "application/x-amz-json-1.1" {
		http.Error(w, "not a call to KMS", http.StatusNotFound)
		return
	}
	var in request
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20))
	d.DisallowUnknownFields() // a field that the double does not know would be ignored
	decodeErr := d.Decode(&in)

	s.mu.Lock()
	s.calls = append(s.calls, call)
	var f Fault
	if s.Inject != nil {
		f = s.Inject(call, len(s.calls))
	}
	release := s.release
	status, out := 0, any(nil)
	if f == (Fault{}) || f.Done {
		if decodeErr != nil {
			status, out = 400, failure{"SerializationException", decodeErr.Error()}
		} else {
			status, out = s.do(call, in)
		}
	}
	date := s.time().Add(s.DateOffset)
	noDate := s.NoDate
	s.mu.Unlock()

	switch {
	case f.Hang:
		select {
		case <-r.Context().Done():
		case <-release:
		}
		panic(http.ErrAbortHandler)
	case f.Drop:
		panic(http.ErrAbortHandler)
	case f.Code != "":
		// AWS quotes the request in some messages.
		status, out = f.Status, failure{f.Code, fmt.Sprintf("injected; the request was %s", in.Plaintext)}
	case f.Body != "":
		status, out = http.StatusOK, json.RawMessage(f.Body)
	}
	h := w.Header()
	h.Set("Content-Type", "application/x-amz-json-1.1")
	h.Set("X-Amzn-Requestid", "00000000-0000-4000-8000-000000000000")
	h["Date"] = []string{date.UTC().Format(http.TimeFormat)}
	if noDate {
		h["Date"] = nil
	}
	body, err := json.Marshal(out)
	if err != nil {
		body = []byte(f.Body)
	}
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// request holds the fields of all calls.
type request struct {
	KeyId, TargetKeyId, AliasName  string
	Description, KeySpec, KeyUsage string
	Origin, Policy                 string
	MultiRegion                    bool
	Tags                           []struct{ TagKey, TagValue string }
	Plaintext, CiphertextBlob      []byte
	EncryptionContext              map[string]string
	PendingWindowInDays            int
}

type failure struct {
	Type    string `json:"__type"`
	Message string `json:"message"`
}

func fail(code string) (int, any) { return http.StatusBadRequest, failure{code, "as AWS says"} }

// do answers a call. The caller holds mu.
func (s *Server) do(call string, in request) (int, any) {
	s.reap()
	if call == "CreateKey" {
		return s.createKey(in)
	}
	id := in.KeyId
	switch {
	case call == "CreateAlias":
		id = in.TargetKeyId
	case strings.HasPrefix(id, "alias/"):
		id = s.aliases[id]
	}
	k := s.keys[id]
	if k == nil {
		return fail("NotFoundException")
	}
	pending := k.state == "PendingDeletion"
	switch call {
	case "CreateAlias":
		switch {
		case pending:
			return fail("KMSInvalidStateException")
		case s.aliases[in.AliasName] != "":
			return fail("AlreadyExistsException")
		case !strings.HasPrefix(in.AliasName, "alias/"):
			return fail("ValidationException")
		}
		s.aliases[in.AliasName] = id
		return http.StatusOK, struct{}{}
	case "DescribeKey":
		return http.StatusOK, map[string]any{"KeyMetadata": k.metadata()}
	case "DisableKey", "EnableKey":
		if pending {
			return fail("KMSInvalidStateException")
		}
		k.state = map[string]string{"DisableKey": "Disabled", "EnableKey": "Enabled"}[call]
		return http.StatusOK, struct{}{}
	case "ScheduleKeyDeletion":
		switch {
		case pending:
			return fail("KMSInvalidStateException")
		case in.PendingWindowInDays < 7 || in.PendingWindowInDays > 30:
			return fail("ValidationException")
		}
		k.state = "PendingDeletion"
		k.deletion = s.time().Add(time.Duration(in.PendingWindowInDays) * 24 * time.Hour)
		return http.StatusOK, map[string]any{
			"KeyId": k.arn, "KeyState": k.state, "DeletionDate": seconds(k.deletion), "PendingWindowInDays": in.PendingWindowInDays,
		}
	case "CancelKeyDeletion":
		if !pending {
			return fail("KMSInvalidStateException")
		}
		k.state, k.deletion = "Disabled", time.Time{}
		return http.StatusOK, map[string]any{"KeyId": k.arn}
	case "Encrypt", "Decrypt":
		switch k.state {
		case "Enabled":
		case "Disabled":
			return fail("DisabledException")
		default:
			return fail("KMSInvalidStateException")
		}
		if call == "Encrypt" {
			return k.encrypt(in)
		}
		return k.decrypt(in)
	}
	return fail("UnknownOperationException")
}

func (s *Server) createKey(in request) (int, any) {
	if in.KeySpec != "SYMMETRIC_DEFAULT" || in.KeyUsage != "ENCRYPT_DECRYPT" || in.Origin != "AWS_KMS" || in.MultiRegion {
		return fail("UnsupportedOperationException")
	}
	random := make([]byte, 16+32)
	rand.Read(random)
	id := hex.EncodeToString(random[:16])
	id = strings.Join([]string{id[:8], id[8:12], id[12:16], id[16:20], id[20:]}, "-")
	block, err := aes.NewCipher(random[16:])
	if err != nil {
		return http.StatusInternalServerError, failure{"KMSInternalException", "cipher"}
	}
	gcm, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return http.StatusInternalServerError, failure{"KMSInternalException", "cipher"}
	}
	k := &key{
		arn:   "arn:aws:kms:" + Region + ":" + Account + ":key/" + id,
		state: "Enabled", origin: in.Origin, description: in.Description,
		created: s.time(), tags: map[string]string{}, secret: gcm,
	}
	for _, t := range in.Tags {
		if _, twice := k.tags[t.TagKey]; twice || t.TagKey == "" {
			return fail("TagException")
		}
		k.tags[t.TagKey] = t.TagValue
	}
	s.keys[k.arn] = k
	return http.StatusOK, map[string]any{"KeyMetadata": k.metadata()}
}

// reap deletes the keys whose date has passed.
func (s *Server) reap() {
	for arn, k := range s.keys {
		if k.state == "PendingDeletion" && !k.deletion.IsZero() && !s.time().Before(k.deletion.Add(s.Late)) {
			delete(s.keys, arn)
			maps.DeleteFunc(s.aliases, func(_, target string) bool { return target == arn })
		}
	}
}

func (k *key) metadata() map[string]any {
	_, id, _ := strings.Cut(k.arn, ":key/")
	m := map[string]any{
		"Arn": k.arn, "KeyId": id, "AWSAccountId": Account,
		"CreationDate": seconds(k.created), "Description": k.description,
		"Enabled": k.state == "Enabled", "KeyState": k.state,
		"KeyManager": "CUSTOMER", "KeySpec": "SYMMETRIC_DEFAULT", "KeyUsage": "ENCRYPT_DECRYPT",
		"Origin": k.origin, "MultiRegion": k.multiRegion,
	}
	if k.state == "PendingDeletion" && !k.deletion.IsZero() {
		m["DeletionDate"] = seconds(k.deletion)
	}
	return m
}

// seconds is a time as the protocol writes it, to the millisecond.
func seconds(t time.Time) json.Number {
	return json.Number(strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64))
}

// The ciphertext is the key's id, a zero byte and the sealed bytes.
func (k *key) encrypt(in request) (int, any) {
	if len(in.Plaintext) < 1 || len(in.Plaintext) > 4096 {
		return fail("ValidationException")
	}
	blob := append([]byte(k.arn), 0)
	return http.StatusOK, map[string]any{
		"KeyId": k.arn, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT",
		"CiphertextBlob": k.secret.Seal(blob, nil, in.Plaintext, associated(k.arn, in.EncryptionContext)),
	}
}

func (k *key) decrypt(in request) (int, any) {
	arn, sealed, ok := strings.Cut(string(in.CiphertextBlob), "\x00")
	switch {
	case len(in.CiphertextBlob) < 1 || len(in.CiphertextBlob) > 6144:
		return fail("ValidationException")
	case !ok || !strings.HasPrefix(arn, "arn:aws:kms:"):
		return fail("InvalidCiphertextException")
	case arn != k.arn:
		return fail("IncorrectKeyException")
	}
	plain, err := k.secret.Open(nil, nil, []byte(sealed), associated(k.arn, in.EncryptionContext))
	if err != nil {
		return fail("InvalidCiphertextException")
	}
	return http.StatusOK, map[string]any{
		"KeyId": k.arn, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT", "Plaintext": plain,
	}
}

func associated(arn string, context map[string]string) []byte {
	b, err := json.Marshal([]any{arn, context}) // maps are marshalled in order of their keys
	if err != nil {
		panic(errors.New("an encryption context is strings"))
	}
	return b
}
