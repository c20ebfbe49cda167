package main

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"lethe/keyd/kms/awskms/awstest"
	keydv1 "lethe/proto/keyd/v1"
)

// holding has a KMS take calls and not answer them, so that keyd stands still
// where it makes them.
type holding struct {
	kms *awstest.Server

	mu   sync.Mutex
	held int
}

// hold holds every call of a name, once after, if it is one, was called, and when,
// if it is one, says so at the call; done says whether what is asked for is done.
func (h *holding) hold(call, after string, when func() bool, done bool) {
	h.kms.Set(func(s *awstest.Server) {
		passed := after == ""
		s.Inject = func(c string, _ int) awstest.Fault {
			h.mu.Lock()
			defer h.mu.Unlock()
			if passed && c == call && (when == nil || when()) {
				h.held++
				return awstest.Fault{Hang: true, Done: done}
			}
			passed = passed || c == after
			return awstest.Fault{}
		}
	})
}

func (h *holding) release() {
	h.kms.Set(func(s *awstest.Server) { s.Inject = nil })
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = 0
}

func (h *holding) any() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held != 0
}

const (
	isOpen      = keydv1.EpochState_EPOCH_STATE_OPEN
	isPreparing = keydv1.EpochState_EPOCH_STATE_PREPARING
	isDraining  = keydv1.EpochState_EPOCH_STATE_DRAINING
	isDrained   = keydv1.EpochState_EPOCH_STATE_DRAINED
	isRetiring  = keydv1.EpochState_EPOCH_STATE_RETIRING
	isClosed    = keydv1.EpochState_EPOCH_STATE_CLOSED
)

// standstill is where in the turn of epoch 1 keyd is killed: the state of it,
// and of the next, zero if there is none; what epoch 1 waits for; and the call of
// the KMS that keyd is in, if it is in one.
type standstill struct {
	name        string
	first, next keydv1.EpochState
	waits       string
	// call is held from the start on, or after a call of another name, or once
	// epoch 1 is that far.
	call, after string
	once        func(e *keydv1.Epoch) bool
	done        bool // what was asked for is done
	// more is what else must be so.
	more func(e *keydv1.Epoch) bool
}

func disabled(e *keydv1.Epoch) bool { return e.RootDisabled != nil }

func someCarried(e *keydv1.Epoch) bool { return e.RowsRewrapped > 300 && e.RowsRewrapped < e.RowsTotal }
func allCarried(e *keydv1.Epoch) bool {
	return e.RowsTotal != 0 && e.RowsRewrapped+e.RowsDead == e.RowsTotal
}

var standstills = []standstill{
	{name: "no root was made", first: isOpen, call: "CreateKey"},
	{name: "a root was made, and nobody knows", first: isOpen, call: "CreateKey", done: true},
	{name: "a root was made, and has no name", first: isOpen, call: "CreateAlias"},
	{name: "a root was made, and is not in the store", first: isOpen, call: "CreateAlias", done: true},
	{name: "a root was found, and is not in the store", first: isOpen, call: "DescribeKey", done: true},
	{name: "the first KEK was not wrapped", first: isOpen, next: isPreparing, call: "Encrypt"},
	{name: "the first KEK was wrapped, and is lost", first: isOpen, next: isPreparing, call: "Encrypt", done: true},
	{name: "a KEK is tried", first: isOpen, next: isPreparing, call: "Decrypt", after: "Encrypt", done: true},
	{name: "some keys are carried over", first: isDraining, next: isOpen, more: someCarried},
	{name: "the verification", first: isDraining, next: isOpen, waits: "the verification of all keys", call: "Decrypt", once: allCarried},
	{name: "the root was not disabled", first: isDrained, next: isOpen, call: "DisableKey"},
	{name: "the root was disabled, and the store does not know", first: isDrained, next: isOpen, call: "DisableKey", done: true},
	{name: "the soak", first: isDrained, next: isOpen, waits: "the end of the soak", more: disabled},
	{name: "the second verification", first: isDrained, next: isOpen, waits: "the second verification", call: "Decrypt", once: disabled, more: disabled},
	{name: "the root was not scheduled", first: isDrained, next: isOpen, call: "ScheduleKeyDeletion", more: disabled},
	{name: "the root was scheduled, and the store does not know", first: isDrained, next: isOpen, call: "ScheduleKeyDeletion", done: true, more: disabled},
	{name: "retiring", first: isRetiring, next: isOpen},
	{name: "the root is described", first: isRetiring, next: isOpen, call: "DescribeKey", done: true},
}

// TestKilledAtEveryStateOfATurn kills keyd -9 at every state of the turn of one
// epoch, and in every call of the KMS that it makes there, which had done its
// work or not. The next keyd goes on by itself: everything that lives opens,
// everybody who was destroyed stays so, one new root is made, and the epoch
// closes. The KMS is a double of AWS's; its clock stands a week behind, so that
// the waiting period is over when the test says so. G1, G2, G4.
func TestKilledAtEveryStateOfATurn(t *testing.T) {
	double := awstest.New(time.Now().Add(-7 * 24 * time.Hour))
	server := httptest.NewServer(double)
	t.Cleanup(server.Close)
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "",
		"AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull, "AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_KMS": "",
	} {
		t.Setenv(name, value)
	}
	h := &holding{kms: double}
	d := deploy(t, "--kms", "awskms", "--aws-region", awstest.Region, "--aws-endpoint", server.URL,
		"--kek-lease", "2s", "--soak", "2s", "--rewrap-rate", "400")
	d.tenant("acme", time.Minute)
	pinned := d.pinned()
	d.fill(8)
	var lives []*life
	grow := func(n int) {
		t.Helper()
		c := d.client()
		for range n {
			l := &life{subject: fmt.Sprint("subject ", len(lives)), plain: random(50)}
			var err error
			if l.blob, err = c.Seal(t.Context(), of("acme", l.subject), l.plain); err != nil {
				t.Fatal(err)
			}
			lives = append(lives, l)
		}
	}
	destroy := func(l *life) {
		t.Helper()
		l.asked = true
		done, err := d.client().DestroyKey(t.Context(), l.request())
		if err != nil {
			t.Fatal(err)
		}
		l.receipt = done.Receipt
	}
	grow(6)
	destroy(lives[0])
	old := d.epochs()[0].RootId
	h.hold("CreateKey", "", nil, false)
	if _, err := keydv1.NewAdminServiceClient(d.conn()).TurnEpoch(t.Context(), &keydv1.TurnEpochRequest{Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	kill := func(s standstill) {
		t.Helper()
		d.keyd.kill()
		h.release()
		if s.call != "" {
			var when func() bool
			if s.once != nil {
				target := d.keyd.target()
				when = func() bool { e := firstEpoch(t.Context(), target); return e != nil && s.once(e) }
			}
			h.hold(s.call, s.after, when, s.done)
		}
		d.start()
		// A keyd that the KMS does not answer serves what it holds, and a new one
		// holds nothing yet.
		serves := s.call != "Decrypt"
		if serves {
			d.verify(lives, pinned)
		}
		d.standsStill(h, s)
		if serves && s.call != "" { // somebody new, and somebody gone
			grow(1)
			destroy(lives[len(lives)-5])
		}
		d.keyd.kill()
		h.release()
	}
	for _, s := range standstills {
		kill(s)
	}
	double.Advance(7*24*time.Hour + time.Second)
	if got := double.KeyState(old); got != "" {
		t.Fatalf("the old root is %s; the test needs it gone", got)
	}
	kill(standstill{name: "the root is gone, and the store does not know", first: isRetiring, next: isOpen, call: "DescribeKey", done: true})
	kill(standstill{name: "closed", first: isClosed, next: isOpen})
	d.start()
	d.verify(lives, pinned)

	all := d.epochs()
	if len(all) != 2 {
		t.Fatalf("epochs %v", all)
	}
	// Two keys were made in calls that keyd never heard of again, and that AWS
	// cannot be asked for: they are told of, found by their tags, and wrap nothing.
	left := 0
	for _, arn := range double.Keys() {
		switch {
		case arn == all[1].RootId:
		case len(double.Aliases(arn)) == 0 && double.Tags(arn)["lethe:epoch"] == "2":
			left++
		default:
			t.Errorf("key %s is %s, with the aliases %v", arn, double.KeyState(arn), double.Aliases(arn))
		}
	}
	if got := double.KeyState(all[1].RootId); left != 2 || got != "Enabled" {
		t.Errorf("%d keys are left over, the root is %s", left, got)
	}
	said, err := os.ReadFile(d.keyd.stderr)
	if err != nil || !strings.Contains(string(said), "is asked for again") {
		t.Errorf("keyd does not tell of what may be left over: %v", err)
	}
	d.final(lives[0], pinned)
}

// firstEpoch asks keyd how epoch 1 is; nil: it does not serve yet.
func firstEpoch(ctx context.Context, target string) *keydv1.Epoch {
	cc, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil
	}
	defer cc.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	res, err := keydv1.NewAdminServiceClient(cc).GetEpochs(ctx, &keydv1.GetEpochsRequest{})
	if err != nil {
		return nil
	}
	return res.Epochs[0]
}

// standsStill waits until keyd has come to a standstill, and stays there.
func (d *deployment) standsStill(h *holding, s standstill) {
	d.t.Helper()
	begun := time.Now()
	admin := keydv1.NewAdminServiceClient(d.conn())
	for {
		res, err := admin.GetEpochs(d.t.Context(), &keydv1.GetEpochsRequest{})
		if err != nil {
			d.t.Fatal(err)
		}
		all := res.Epochs
		first, next := all[0], keydv1.EpochState(0)
		if len(all) > 1 {
			next = all[1].State
		}
		if first.State == s.first && next == s.next && strings.Contains(first.WaitingFor, s.waits) &&
			(s.call == "" || h.any()) && (s.more == nil || s.more(first)) {
			return
		}
		if time.Since(begun) > time.Minute || !d.keyd.alive() {
			d.t.Fatalf("%s: keyd does not come there: %v", s.name, all)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
