package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"lethe/sdk"
	"lethe/sdk/receipt"
)

// lease is that of every class here: short, so that the wait for its end is.
const lease = 3 * time.Second

// requestID names the intent to erase.
const requestID = "case-2026-0117"

// Exit codes of lethe, from its table (lethe help exit-codes).
const (
	exitErased      = 10
	exitBadEvidence = 30
	exitResidue     = 31
)

func raise(ctx context.Context, s *stage) (err error) {
	if s.inputs, err = loadInputs(); err != nil {
		return err
	}
	if err := s.startKeyd(ctx); err != nil {
		return err
	}
	s.cleanUp(func() { s.keyd.kill() })
	s.tell("keyd --dev serves, with an embedded store, a KMS file and an anchor directory.")

	for _, tenant := range []string{helpdesk, platform} {
		args := []string{"tenant", "create", tenant}
		for _, in := range s.inputs {
			if in.tenant == tenant {
				args = append(args, "--class", fmt.Sprintf("%s:24h:%s", in.class, lease))
			}
		}
		if _, _, err := s.lethe(ctx, nil, args...); err != nil {
			return err
		}
		s.tell("lethe %s", strings.Join(args, " "))
	}
	key, _, err := s.lethe(ctx, nil, "ledger", "key")
	if err != nil {
		return err
	}
	s.verifierKey = filepath.Join(s.dir, "ledger.key")
	if err := os.WriteFile(s.verifierKey, key, 0o600); err != nil {
		return err
	}
	s.tell("lethe ledger key: pinned, to verify receipts with")
	s.quote(string(key))
	s.app, err = sdk.Dial(ctx, s.keyd.target())
	if err != nil {
		return err
	}
	s.cleanUp(func() { s.app.Close() })
	return nil
}

// data is the daemon's directory.
func (s *stage) data() string { return filepath.Join(s.dir, "keyd") }

// startKeyd starts the daemon, with the data that it had before if it had any.
func (s *stage) startKeyd(ctx context.Context, flags ...string) error {
	return s.startKeydOn(ctx, s.data(), flags...)
}

// startKeydOn starts the daemon on a directory.
func (s *stage) startKeydOn(ctx context.Context, data string, flags ...string) error {
	k, err := startKeyd(ctx, filepath.Join(s.bin, "keyd"), data, flags...)
	if err == nil {
		s.keyd = k
	}
	return err
}

func seal(ctx context.Context, s *stage) error {
	people := make(map[string]bool)
	for _, in := range s.inputs {
		n, bytesIn, bytesOut := 0, 0, 0
		err := in.records(func(p *piece) (err error) {
			if in.class == "checkpoint" {
				p.blob, err = s.sealWithCommand(ctx, in, p)
			} else {
				var t sdk.Target
				if t, err = in.target(p); err == nil {
					p.blob, err = s.app.Seal(ctx, t, p.plain)
				}
			}
			if err != nil {
				return err
			}
			// An id as short as "42" stands in random bytes by chance.
			if len(p.subject) > 5 && bytes.Contains(p.blob, []byte(p.subject)) || bytes.Contains(p.blob, p.plain) {
				return errors.New("the blob shows what it holds")
			}
			people[in.tenant+"/"+p.subject] = true
			n, bytesIn, bytesOut = n+1, bytesIn+len(p.plain), bytesOut+len(p.blob)
			return nil
		})
		if err != nil {
			return err
		}
		by := "the SDK"
		if in.class == "checkpoint" {
			by = "lethe seal"
		}
		s.tell("%s of tenant %s: %s of %s, %d bytes, %d sealed, by %s.", in.title, in.tenant,
			count(n, "record"), count(len(in.subjects()), "person"), bytesIn, bytesOut, by)
	}
	if len(people) < 4 {
		return fmt.Errorf("only %d people", len(people))
	}
	for _, in := range s.inputs {
		if in.subjects()[erasedSubject] == 0 {
			continue
		}
		for _, p := range in.pieces {
			if !p.isRecord() && bytes.Contains(p.plain, []byte(erasedSubject)) {
				return fmt.Errorf("%s: what is nobody's names the person to be erased", in.title)
			}
		}
	}
	return nil
}

// sealWithCommand seals a record through the command line, from file to file.
func (s *stage) sealWithCommand(ctx context.Context, in *input, p *piece) ([]byte, error) {
	plain, sealed := filepath.Join(s.dir, "plain"), filepath.Join(s.dir, "sealed")
	if err := os.WriteFile(plain, p.plain, 0o600); err != nil {
		return nil, err
	}
	defer os.Remove(plain)
	defer os.Remove(sealed)
	_, _, err := s.lethe(ctx, []byte(p.subject), "seal", "--tenant", in.tenant, "--subject-file", "-",
		"--class", in.class, "--context", "place="+p.place, "-o", sealed, plain)
	if err != nil {
		return nil, err
	}
	return os.ReadFile(sealed)
}

// openWithCommand opens a record through the command line, from file to file.
func (s *stage) openWithCommand(ctx context.Context, in *input, p *piece) ([]byte, int, error) {
	sealed, plain := filepath.Join(s.dir, "sealed"), filepath.Join(s.dir, "plain")
	if err := os.WriteFile(sealed, p.blob, 0o600); err != nil {
		return nil, 0, err
	}
	defer os.Remove(sealed)
	defer os.Remove(plain)
	_, code, err := s.lethe(ctx, []byte(p.subject), "open", "--tenant", in.tenant, "--subject-file", "-",
		"--class", in.class, "--context", "place="+p.place, "-o", plain, sealed)
	if err != nil {
		if _, missing := os.Stat(plain); !errors.Is(missing, os.ErrNotExist) {
			err = errors.Join(err, errors.New("yet it left a file"))
		}
		return nil, code, err
	}
	b, err := os.ReadFile(plain)
	return b, 0, err
}

func openAll(ctx context.Context, s *stage) error {
	for _, in := range s.inputs {
		var whole []byte
		for i := range in.pieces {
			p := &in.pieces[i]
			plain := p.plain
			if p.isRecord() {
				t, err := in.target(p)
				if err != nil {
					return err
				}
				if plain, err = s.app.Open(ctx, t, p.blob); err != nil {
					return fmt.Errorf("%s, %s: %w", in.title, p.place, err)
				}
			}
			whole = append(whole, plain...)
		}
		if !bytes.Equal(whole, in.whole) {
			return fmt.Errorf("%s: opened, it is not what was sealed", in.title)
		}
		s.tell("%s: put together again, the same %d bytes.", in.title, len(whole))
	}
	in := s.inputs[0]
	return in.records(func(p *piece) error {
		plain, _, err := s.openWithCommand(ctx, in, p)
		if err != nil {
			return err
		}
		if !bytes.Equal(plain, p.plain) {
			return errors.New("lethe open gives something else")
		}
		s.tell("lethe open: the %s too, byte for byte.", in.title)
		return nil
	})
}

// hers returns a record of the person to be erased, and the input it is from.
func (s *stage) hers() (*input, *piece) {
	for _, in := range s.inputs {
		for i := range in.pieces {
			if in.pieces[i].subject == erasedSubject {
				return in, &in.pieces[i]
			}
		}
	}
	panic("no record of the person to be erased")
}

func leaseElsewhere(ctx context.Context, s *stage) (err error) {
	bridge, err := startRelay(filepath.Join(s.dir, "third.sock"), s.keyd.target())
	if err != nil {
		return err
	}
	s.cleanUp(bridge.close)
	if s.witness, err = startRelay(filepath.Join(s.dir, "first.sock"), s.keyd.target()); err != nil {
		return err
	}
	s.witness.pushFirst.Store(true)
	s.cleanUp(s.witness.close)
	if s.relay, err = startRelay(filepath.Join(s.dir, "second.sock"), s.keyd.target()); err != nil {
		return err
	}
	s.cleanUp(s.relay.close)
	for _, c := range []struct {
		at *relay
		to **clientProcess
	}{{s.witness, &s.listening}, {s.relay, &s.deaf}, {bridge, &s.severed}} {
		started, err := startClient(c.at.target())
		if err != nil {
			return err
		}
		s.cleanUp(started.close)
		*c.to = started
	}
	in, p := s.hers()
	for _, c := range []*clientProcess{s.listening, s.deaf, s.severed} {
		if err := opens(c, in, p); err != nil {
			return err
		}
	}
	s.tell("Three client processes opened a record of hers; each may keep the key for %s.", lease)

	s.relay.cut.Store(true)
	s.tell("Between keyd and the second, a relay now swallows what is pushed.")
	bridge.close()
	s.tell("The third is cut off from keyd altogether.")
	if err := s.listening.send(watchOrder(in, p, time.Now().Add(30*time.Second))); err != nil {
		return err
	}
	s.pushedAnswer = make(chan watched, 1)
	go func() {
		a, err := s.listening.receive()
		s.pushedAnswer <- watched{a, err}
	}()
	return nil
}

// watched is what came of a watch.
type watched struct {
	answer
	err error
}

func watchOrder(in *input, p *piece, until time.Time) order {
	o := in.order("watch", p)
	o.Until = until
	return o
}

// opens fails unless the client opens the record, byte for byte.
func opens(c *clientProcess, in *input, p *piece) error {
	a, err := c.do(in.order("open", p))
	switch {
	case err != nil:
		return err
	case a.Outcome != "OK":
		return fmt.Errorf("a client process cannot open %s: %s %s", p.place, a.Outcome, a.Message)
	case !bytes.Equal(a.Data, p.plain):
		return fmt.Errorf("a client process opens %s to something else", p.place)
	}
	return nil
}

// refuses fails unless the client is told that the record's owner was erased.
func refuses(c *clientProcess, in *input, p *piece) error {
	a, err := c.do(in.order("open", p))
	switch {
	case err != nil:
		return err
	case a.Outcome != "ERASED":
		return fmt.Errorf("a client process that should find %s erased finds: %s %s", p.place, a.Outcome, a.Message)
	case len(a.Data) != 0:
		return errors.New("an error came with data")
	}
	return nil
}

// refusesOnceTold is refuses for a client that has a lease, and hears of it a
// moment later.
func refusesOnceTold(c *clientProcess, in *input, p *piece) error {
	for give := time.Now().Add(15 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		a, err := c.do(in.order("open", p))
		if err != nil {
			return err
		}
		if a.Outcome != "OK" || time.Now().After(give) {
			return refuses(c, in, p)
		}
	}
}

// refusesOnceReconnected is refuses for a client whose keyd was restarted: it
// may find it unavailable for a moment, and nothing else meanwhile.
func (s *stage) refusesOnceReconnected(c *clientProcess, in *input, p *piece) error {
	for give := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		a, err := c.do(in.order("open", p))
		if err != nil {
			return err
		}
		if a.Outcome != "UNAVAILABLE" || time.Now().After(give) {
			return refuses(c, in, p)
		}
	}
}

func destroy(ctx context.Context, s *stage) error {
	in, _ := s.hers()
	s.receipt = filepath.Join(s.dir, "receipt.json")
	// The watching client has opened some more by now.
	time.Sleep(50 * time.Millisecond)
	s.lap = time.Now()
	out, _, err := s.lethe(ctx, []byte(erasedSubject), "destroy", "--yes", "--tenant", in.tenant, "--subject-file", "-",
		"--reason", "gdpr-art17", "--request-id", requestID, "--receipt", s.receipt)
	if err != nil {
		return err
	}
	s.destroyed = time.Now()
	s.gone[in.tenant+"/"+erasedSubject] = true
	s.tell("lethe destroy: durable, logged, anchored, acknowledged.")
	answer, _, _ := strings.Cut(string(out), "receipt:")
	s.quote(answer)
	v, err := s.verify()
	if err != nil {
		return err
	}
	stages := v.Stages()
	s.drainedBy = stages.DrainedBy
	if stages.Destroyed.IsZero() || !s.drainedBy.After(s.destroyed) {
		return errors.New("the receipt does not state a destruction with an instant to come by which it is drained")
	}
	if bytes.Contains(out, []byte(erasedSubject)) {
		return errors.New("lethe destroy printed whom it destroyed")
	}
	return nil
}

// verify verifies the receipt under the pinned key, without keyd.
func (s *stage) verify() (*receipt.Verified, error) {
	b, err := os.ReadFile(s.receipt)
	if err != nil {
		return nil, err
	}
	pinned, err := s.pinned()
	if err != nil {
		return nil, err
	}
	return receipt.Verify(b, pinned)
}

func (s *stage) pinned() (*receipt.Keys, error) {
	key, err := os.ReadFile(s.verifierKey)
	if err != nil {
		return nil, err
	}
	return receipt.PinKeys(strings.Fields(string(key))...)
}

func pushed(ctx context.Context, s *stage) error {
	var w watched
	select {
	case w = <-s.pushedAnswer:
	case <-ctx.Done():
		return ctx.Err()
	}
	switch {
	case w.err != nil:
		return w.err
	case w.Outcome != "ERASED":
		return fmt.Errorf("the client process was not told that she is erased: %s %s", w.Outcome, w.Message)
	case w.Opened == 0:
		return errors.New("the client process held no lease")
	case w.Refused.After(s.drainedBy):
		return errors.New("the client process went on after the instant that the receipt states")
	case s.witness.passed.Load() == 0:
		return errors.New("it was not a pushed revocation that stopped the client process")
	}
	after := w.LastOpened.Sub(s.destroyed)
	when := brief(max(after, -after)) + " before"
	if after > 0 {
		when = brief(after) + " after"
	}
	s.tell("The first client opened her record %d times, last %s the acknowledgement was printed; then: erased.", w.Opened, when)
	in, p := s.hers()
	return refuses(s.listening, in, p)
}

func unpushed(ctx context.Context, s *stage) error {
	in, p := s.hers()
	for _, c := range []*clientProcess{s.deaf, s.severed} {
		if err := c.send(watchOrder(in, p, s.drainedBy)); err != nil {
			return err
		}
	}
	a, err := s.deaf.receive()
	switch {
	case err != nil:
		return err
	case a.Outcome != "ERASED":
		return fmt.Errorf("at drained_by the client process without the push finds: %s %s", a.Outcome, a.Message)
	case a.Refused.After(s.drainedBy):
		return errors.New("the client process went on after the instant that the receipt states")
	case !s.relay.awaitSwallowed():
		return errors.New("nothing was pushed, so nothing was cut off")
	}
	s.tell("The second, told nothing, went on for %s, until it asked for its lease again; then: erased. The receipt promised %s at most.",
		brief(a.Refused.Sub(s.destroyed)), brief(s.drainedBy.Sub(s.destroyed)))
	a, err = s.severed.receive()
	switch {
	case err != nil:
		return err
	case a.Outcome != "UNAVAILABLE":
		return fmt.Errorf("at drained_by the client process that is cut off finds: %s %s", a.Outcome, a.Message)
	case a.Refused.After(s.drainedBy):
		return errors.New("the client process went on after the instant that the receipt states")
	}
	s.tell("The third went on for %s, until its lease was over; then: unavailable, which is all that it can know.",
		brief(a.Refused.Sub(s.destroyed)))
	return nil
}

// erasedForNewcomers checks with a fresh client process that every record of
// those who are gone is refused as erased and everybody else's opens.
func (s *stage) erasedForNewcomers() error {
	c, err := startClient(s.keyd.target())
	if err != nil {
		return err
	}
	defer c.close()
	refused, opened := 0, 0
	others := make(map[string]bool)
	for _, in := range s.inputs {
		err := in.records(func(p *piece) error {
			if s.gone[in.tenant+"/"+p.subject] {
				refused++
				return refuses(c, in, p)
			}
			opened++
			others[in.tenant+"/"+p.subject] = true
			return opens(c, in, p)
		})
		if err != nil {
			return err
		}
	}
	if refused == 0 || len(others) < 2 {
		return errors.New("too little was tried")
	}
	whose := "her"
	if len(s.gone) > 1 {
		whose = "the " + count(len(s.gone), "person") + "'s"
	}
	s.tell("A new client process: %s %s are refused as erased; the %s of %d others open, byte for byte.",
		whose, count(refused, "record"), count(opened, "record"), len(others))
	return nil
}

func fresh(ctx context.Context, s *stage) error {
	if err := s.erasedForNewcomers(); err != nil {
		return err
	}
	in, p := s.hers()
	_, code, err := s.openWithCommand(ctx, in, p)
	if err == nil {
		return errors.New("lethe open opens her record")
	}
	if code != exitErased {
		return fmt.Errorf("lethe open fails, but not with the exit code of erased: %w", err)
	}
	s.tell("lethe open: exit code %d, erased, and no file.", code)
	t, err := in.target(p)
	if err != nil {
		return err
	}
	if _, err := s.app.Seal(ctx, t, p.plain); !errors.Is(err, sdk.ErrErased) {
		return fmt.Errorf("a late seal for her: %w, and not erased", err)
	}
	s.tell("A late write for her gets no new key either: erased.")
	return nil
}

func restart(ctx context.Context, s *stage) error {
	s.keyd.kill()
	if err := s.startKeyd(ctx); err != nil {
		return err
	}
	s.tell("keyd was killed (-9) and started again on the same directory.")
	if err := s.erasedForNewcomers(); err != nil {
		return err
	}
	in, p := s.hers()
	if err := s.refusesOnceReconnected(s.listening, in, p); err != nil {
		return err
	}
	s.tell("The client process that lived through it: still erased.")
	first, err := os.ReadFile(s.receipt)
	if err != nil {
		return err
	}
	again, err := s.app.DestroyKey(ctx, sdk.DestroyRequest{
		Tenant: in.tenant, Subject: erasedSubject, RequestID: requestID, Reason: "gdpr-art17",
	})
	if err != nil {
		return err
	}
	if !bytes.Equal(again.Receipt, first) {
		return errors.New("the repeated request was answered with another receipt")
	}
	s.tell("The same request repeated returns the same receipt, byte for byte.")
	return nil
}

func proof(ctx context.Context, s *stage) error {
	if err := s.keyd.stop(); err != nil {
		return err
	}
	s.tell("keyd is stopped: SIGTERM, exit code 0.")
	words, _, err := s.lethe(ctx, nil, "receipt", "verify", s.receipt, "--key-file", s.verifierKey)
	if err != nil {
		return err
	}
	s.tell("lethe receipt verify, offline, under the pinned key:")
	s.quote(string(words))

	whole, err := os.ReadFile(s.receipt)
	if err != nil {
		return err
	}
	for _, word := range []string{erasedSubject, "mara"} {
		if bytes.Contains(whole, []byte(word)) {
			return errors.New("the receipt names her")
		}
	}
	pinned, err := s.pinned()
	if err != nil {
		return err
	}
	for bit := range 8 * len(whole) {
		flipped := bytes.Clone(whole)
		flipped[bit/8] ^= 1 << (bit % 8)
		if _, err := receipt.Verify(flipped, pinned); err == nil {
			return fmt.Errorf("the receipt verifies with bit %d flipped", bit)
		}
	}
	s.tell("Each of its %d bits flipped in turn: not one verifies.", 8*len(whole))

	tampered := filepath.Join(s.dir, "tampered.json")
	parts := []string{`"statement":`, `"salt":`, `"proof":`, `"drained_by":`}
	for _, part := range parts {
		at := bytes.Index(whole, []byte(part))
		if at < 0 {
			return fmt.Errorf("the receipt has no %s", part)
		}
		flipped := bytes.Clone(whole)
		flipped[at+len(part)+3] ^= 1
		if err := os.WriteFile(tampered, flipped, 0o600); err != nil {
			return err
		}
		if _, code, err := s.lethe(ctx, nil, "receipt", "verify", tampered, "--key-file", s.verifierKey); err == nil || code != exitBadEvidence {
			return fmt.Errorf("lethe receipt verify does not refuse a receipt changed in %s: %w", part, err)
		}
	}
	s.tell("lethe receipt verify refuses it changed in its statement, salt, proof or date: exit code %d.", exitBadEvidence)
	return nil
}

// count says how many, in words: "1 record", "4 people".
func count(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case what == "person":
		return fmt.Sprintf("%d people", n)
	}
	return fmt.Sprintf("%d %ss", n, what)
}
