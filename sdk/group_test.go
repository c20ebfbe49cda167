package sdk_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
	"lethe/sdk/sdktest"
)

// groupOf names people of acme, in the class that most tests use.
func groupOf(policy sdk.Policy, subjects ...string) sdk.Group {
	return sdk.Group{Tenant: "acme", Class: "trace", Policy: policy, Subjects: subjects}
}

// erase destroys a person's keys.
func erase(t *testing.T, c *sdk.Client, subject string) {
	t.Helper()
	_, err := c.DestroyKey(t.Context(), sdk.DestroyRequest{
		Tenant: "acme", Subject: subject, RequestID: "erase-" + subject, Reason: "gdpr-art17",
	})
	if err != nil {
		t.Fatal(err)
	}
}

func sealGroup(t *testing.T, c *sdk.Client, g sdk.Group, plaintext string) []byte {
	t.Helper()
	blob, err := c.SealGroup(t.Context(), g, []byte(plaintext))
	if err != nil {
		t.Fatal(err)
	}
	return blob
}

func openGroup(t *testing.T, c *sdk.Client, g sdk.Group, blob []byte, want string) *sdk.Report {
	t.Helper()
	plaintext, report, err := c.OpenGroup(t.Context(), g, blob)
	if err != nil {
		t.Fatalf("%v for %d subjects: %v", g.Policy, len(g.Subjects), err)
	}
	if string(plaintext) != want {
		t.Fatalf("%q was opened", plaintext)
	}
	return report
}

// outcomes are those of a report's recipients, in its order.
func outcomes(r *sdk.Report) (all []keydv1.Outcome) {
	for _, m := range r.Recipients {
		all = append(all, m.Outcome)
	}
	return all
}

const lives = keydv1.Outcome_OUTCOME_UNSPECIFIED

// A set is a set: for all policies, sizes and orders, what is sealed for it
// opens for it, by one call to keyd for each.
func TestGroup(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Hour))
	for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
		for _, n := range []int{1, 2, 3, sdk.MaxSubjects} {
			var people []string
			for i := range n {
				people = append(people, fmt.Sprint("person-", i))
			}
			c, other := dialKeyd(t, k), dialKeyd(t, k)
			g := groupOf(policy, people...)
			blob := sealGroup(t, c, g, "what they said")
			h, _, err := envelope.ParseHeader(blob)
			if err != nil {
				t.Fatal(err)
			}
			if n > 1 && h.Policy != policy || n == 1 && h.Policy != envelope.Single || len(h.Recipients) != n {
				t.Errorf("%v of %d: the blob is %v of %d", policy, n, h.Policy, len(h.Recipients))
			}
			slices.Reverse(g.Subjects)
			g.Subjects = append(g.Subjects, g.Subjects[0])
			for _, c := range []*sdk.Client{c, other} {
				r := openGroup(t, c, g, blob, "what they said")
				if !r.Intact() || len(r.Gone()) != 0 || len(r.Recipients) != n || r.Policy != h.Policy {
					t.Errorf("%v of %d: %+v", policy, n, r)
				}
				for i, m := range r.Recipients {
					if m.Index != i || !slices.Contains(h.Recipients, m.KeyID) {
						t.Errorf("%v of %d: recipient %d is %+v", policy, n, i, m)
					}
				}
				g.Policy = 0
				openGroup(t, c, g, blob, "what they said")
				g.Policy = policy
			}
		}
	}
}

// The three-way rule, for one-shot blobs and streams: the only source erased,
// gone; some erased, it opens flagged; none, untouched. All dies with the first.
func TestGroupErasure(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Hour))
	warm, eraser := dialKeyd(t, k), dialKeyd(t, k)
	all, any, pair := groupOf(sdk.All, "ann", "bob", "cleo"), groupOf(sdk.Any, "ann", "bob", "cleo"), groupOf(sdk.Any, "ann", "bob")
	one := groupOf(sdk.Any, "cleo")
	blobs := map[string][]byte{
		"all": sealGroup(t, warm, all, "said"), "any": sealGroup(t, warm, any, "said"),
		"pair": sealGroup(t, warm, pair, "said"), "one": sealGroup(t, warm, one, "said"),
	}
	groups := map[string]sdk.Group{"all": all, "any": any, "pair": pair, "one": one}
	for name, g := range groups {
		if !openGroup(t, warm, g, blobs[name], "said").Intact() {
			t.Errorf("%s is not intact", name)
		}
	}
	status, err := eraser.Describe(t.Context(), "acme", "cleo")
	if err != nil {
		t.Fatal(err)
	}

	erase(t, eraser, "cleo")
	eventually(t, "the client has heard of it", func() bool {
		_, _, err := warm.OpenGroup(t.Context(), all, blobs["all"])
		return err != nil
	})
	for _, c := range []*sdk.Client{warm, dialKeyd(t, k)} {
		_, _, err := c.OpenGroup(t.Context(), all, blobs["all"])
		var gone *sdk.GroupError
		if !errors.Is(err, sdk.ErrErased) || !errors.As(err, &gone) || len(gone.Gone()) != 1 || gone.Gone()[0].Index != 2 {
			t.Errorf("all: %v", err)
		}
		if _, _, err := c.OpenGroup(t.Context(), one, blobs["one"]); !errors.Is(err, sdk.ErrErased) || !errors.As(err, &gone) || len(gone.Gone()) != 1 {
			t.Errorf("the only source: %v", err)
		}
		r := openGroup(t, c, any, blobs["any"], "said")
		if !slices.Equal(outcomes(r), []keydv1.Outcome{lives, lives, erased}) || len(r.Gone()) != 1 ||
			r.Gone()[0].Handle != status.Handle || r.Gone()[0].KeyID != status.Classes[0].KeyID {
			t.Errorf("any: %+v", r)
		}
		// One who knows of the survivors only learns that somebody is gone, and who.
		r = openGroup(t, c, pair, blobs["any"], "said")
		if !slices.Equal(outcomes(r), []keydv1.Outcome{lives, lives, erased}) || r.Gone()[0].Index != -1 || r.Gone()[0].Handle != status.Handle {
			t.Errorf("any, named by the survivors: %+v", r)
		}
		if r := openGroup(t, c, pair, blobs["pair"], "said"); !r.Intact() || len(r.Recipients) != 2 {
			t.Errorf("a pair that she is not of: %+v", r)
		}
		// Nothing is sealed for her any more.
		for _, g := range []sdk.Group{all, any, one} {
			if _, err := c.SealGroup(t.Context(), g, nil); !errors.Is(err, sdk.ErrErased) || !errors.As(err, &gone) || g.Subjects[gone.Gone()[0].Index] != "cleo" {
				t.Errorf("sealing: %v", err)
			}
		}
		// Whoever names her alone finds her erased, and that others are not.
		_, _, err = c.OpenGroup(t.Context(), one, blobs["any"])
		if !errors.Is(err, sdk.ErrErased) || !errors.As(err, &gone) || len(gone.Gone()) != 1 || len(gone.Recipients) != 3 {
			t.Errorf("any, named by the one who is erased: %v", err)
		}
	}
	erase(t, eraser, "ann")
	erase(t, eraser, "bob")
	eventually(t, "nobody is left", func() bool {
		_, _, err := warm.OpenGroup(t.Context(), any, blobs["any"])
		return errors.Is(err, sdk.ErrErased)
	})
}

// Whom a blob is not for comes before what has become of those whom it is for.
func TestGroupNamesWhomItExpects(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, 0), sdktest.Class("backup", 24*time.Hour, 0))
	k.Tenant(t, "beta", sdktest.Class("trace", 24*time.Hour, 0))
	c := dialKeyd(t, k)
	all, any := groupOf(sdk.All, "ann", "bob", "cleo"), groupOf(sdk.Any, "ann", "bob", "cleo")
	single := mustSeal(t, c, alice, "said")
	blobs := map[sdk.Policy][]byte{sdk.All: sealGroup(t, c, all, "said"), sdk.Any: sealGroup(t, c, any, "said")}
	mustSeal(t, c, sdk.Target{Tenant: "acme", Subject: "stranger", Class: "trace"}, "")
	beta, backup := all, all
	beta.Tenant, beta.Policy, backup.Class, backup.Policy = "beta", 0, "backup", 0
	for _, g := range []sdk.Group{beta, backup} {
		g.Policy = sdk.All
		sealGroup(t, c, g, "")
	}

	check := func(state string) {
		t.Helper()
		for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
			other := sdk.All + sdk.Any - policy
			for name, g := range map[string]sdk.Group{
				"a stranger for one":   groupOf(policy, "ann", "bob", "stranger"),
				"a stranger more":      groupOf(policy, "ann", "bob", "cleo", "stranger"),
				"a stranger alone":     groupOf(policy, "stranger"),
				"nobody known":         groupOf(policy, "ann", "bob", "nobody"),
				"the other policy":     groupOf(other, "ann", "bob", "cleo"),
				"another class":        backup,
				"another tenant":       beta,
				"the erased and alien": groupOf(policy, "cleo", "stranger"),
			} {
				_, _, err := c.OpenGroup(t.Context(), g, blobs[policy])
				if !errors.Is(err, sdk.ErrWrongSubject) {
					t.Errorf("%s, %v, %s: %v", state, policy, name, err)
				}
				for _, id := range []string{"ann", "bob", "cleo", "stranger", "nobody"} {
					if strings.Contains(fmt.Sprintf("%v %+v %#v", err, err, err), id) {
						t.Errorf("the error names %s", id)
					}
				}
			}
		}
		if _, _, err := c.OpenGroup(t.Context(), groupOf(sdk.All, "ann", "bob"), blobs[sdk.All]); !errors.Is(err, sdk.ErrWrongSubject) {
			t.Errorf("%s: a part of all: %v", state, err)
		}
		if _, _, err := c.OpenGroup(t.Context(), groupOf(0, "alice", "ann"), single); !errors.Is(err, sdk.ErrWrongSubject) {
			t.Errorf("%s: more than the one: %v", state, err)
		}
		openGroup(t, c, groupOf(sdk.All, "alice"), single, "said")
		openGroup(t, c, groupOf(sdk.Any, "bob"), blobs[sdk.Any], "said")
	}
	check("all live")
	erase(t, c, "cleo")
	check("one is erased")
	for name, blob := range blobs {
		if _, err := c.Open(t.Context(), alice, blob); !errors.Is(err, sdk.ErrInvalidArgument) {
			t.Errorf("%v for a target: %v", name, err)
		}
	}
}

func TestGroupRefusesWhatCannotBe(t *testing.T) {
	c, f, _ := start(t)
	many := make([]string, sdk.MaxSubjects+1)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	for name, g := range map[string]sdk.Group{
		"nobody": groupOf(sdk.Any), "too many": groupOf(sdk.Any, many...), "an empty id": groupOf(sdk.All, "ann", ""),
		"no policy": groupOf(0, "ann", "bob"), "single": groupOf(envelope.Single, "ann"),
		"no tenant": {Class: "trace", Policy: sdk.All, Subjects: []string{"ann"}},
		"no class":  {Tenant: "acme", Policy: sdk.All, Subjects: []string{"ann"}},
	} {
		if _, err := c.SealGroup(t.Context(), g, nil); !errors.Is(err, sdk.ErrInvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := c.SealGroupWriter(t.Context(), g, io.Discard); !errors.Is(err, sdk.ErrInvalidArgument) {
			t.Errorf("%s, a stream: %v", name, err)
		}
	}
	if _, _, err := c.OpenGroup(t.Context(), groupOf(sdk.Any, "ann"), []byte("plain")); !errors.Is(err, sdk.ErrNotSealed) {
		t.Errorf("plaintext: %v", err)
	}
	if n := f.calls.Load(); n != 0 {
		t.Errorf("keyd was asked %d times", n)
	}
}

// Streams for several, and what becomes of a running one when somebody is erased.
func TestGroupStreams(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Hour))
	c, eraser := dialKeyd(t, k), dialKeyd(t, k)
	content := randomBytes(3 << 20)
	stream := func(g sdk.Group) []byte {
		var b bytes.Buffer
		w, err := c.SealGroupWriter(t.Context(), g, &b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	all, any := groupOf(sdk.All, "ann", "bob", "cleo"), groupOf(sdk.Any, "ann", "bob", "cleo")
	readers := map[sdk.Policy]*sdk.Reader{}
	ats := map[sdk.Policy]*sdk.ReaderAt{}
	for _, g := range []sdk.Group{all, any} {
		blob := stream(g)
		r, err := c.OpenGroupReader(t.Context(), g, bytes.NewReader(blob))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, content) || !r.Report().Intact() || len(r.Report().Recipients) != 3 {
			t.Fatalf("%v: %d bytes, %v, %+v", g.Policy, len(got), err, r.Report())
		}
		r.Close()
		if readers[g.Policy], err = c.OpenGroupReader(t.Context(), g, bytes.NewReader(blob)); err != nil {
			t.Fatal(err)
		}
		defer readers[g.Policy].Close()
		if _, err := io.CopyN(io.Discard, readers[g.Policy], 1000); err != nil {
			t.Fatal(err)
		}
		if ats[g.Policy], err = c.OpenGroupReaderAt(t.Context(), g, bytes.NewReader(blob), int64(len(blob))); err != nil {
			t.Fatal(err)
		}
		defer ats[g.Policy].Close()
	}
	writers := map[sdk.Policy]*sdk.Writer{}
	for _, g := range []sdk.Group{all, any} {
		w, err := c.SealGroupWriter(t.Context(), g, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Abort(nil)
		writers[g.Policy] = w
	}

	// Ann, Bob and Cleo in turn, so that whoever's key opens the stream is
	// among the first two.
	for i, who := range []string{"ann", "bob"} {
		erase(t, eraser, who)
		eventually(t, "the stream knows", func() bool { return len(ats[sdk.Any].Report().Gone()) == i+1 })
		var p [100]byte
		if _, err := ats[sdk.Any].ReadAt(p[:], 2<<20); err != nil || !bytes.Equal(p[:], content[2<<20:2<<20+100]) {
			t.Errorf("%d erased: %v", i+1, err)
		}
	}
	var gone *sdk.GroupError
	if _, err := ats[sdk.All].ReadAt(make([]byte, 1), 0); !errors.Is(err, sdk.ErrErased) || !errors.As(err, &gone) || gone.Gone()[0].Index != 0 {
		t.Errorf("all, at an offset: %v", err)
	}
	if _, err := io.Copy(io.Discard, readers[sdk.All]); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("all: %v", err)
	}
	if n, err := io.Copy(io.Discard, readers[sdk.Any]); err != nil || n != int64(len(content))-1000 {
		t.Errorf("any: %d bytes, %v", n, err)
	}
	if r := readers[sdk.Any].Report(); len(r.Gone()) != 2 {
		t.Errorf("any: %+v", r)
	}
	for policy, w := range writers {
		if _, err := w.Write(content); err == nil {
			err = w.Close()
			if !errors.Is(err, sdk.ErrErased) {
				t.Errorf("%v: a stream goes on being sealed: %v", policy, err)
			}
		} else if !errors.Is(err, sdk.ErrErased) {
			t.Errorf("%v: %v", policy, err)
		}
	}
	erase(t, eraser, "cleo")
	eventually(t, "nobody is left", func() bool {
		_, err := ats[sdk.Any].ReadAt(make([]byte, 1), 0)
		return errors.Is(err, sdk.ErrErased)
	})
}

// A scheduled destruction flags, and does no more once it is cancelled.
func TestGroupPending(t *testing.T) {
	k := sdktest.Start(t)
	k.Tenant(t, "acme", sdktest.Class("trace", 24*time.Hour, time.Hour))
	c, eraser := dialKeyd(t, k), dialKeyd(t, k)
	any, all := groupOf(sdk.Any, "ann", "bob"), groupOf(sdk.All, "ann", "bob")
	anyBlob, allBlob := sealGroup(t, c, any, "said"), sealGroup(t, c, all, "said")
	openGroup(t, c, any, anyBlob, "said")
	if _, err := eraser.DestroyKey(t.Context(), sdk.DestroyRequest{
		Tenant: "acme", Subject: "bob", RequestID: "later", Reason: "gdpr-art17", NotBefore: time.Now().Add(time.Hour),
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is flagged", func() bool {
		r := openGroup(t, c, any, anyBlob, "said")
		return slices.Equal(outcomes(r), []keydv1.Outcome{lives, pending}) && len(r.Gone()) == 0
	})
	if _, _, err := c.OpenGroup(t.Context(), all, allBlob); !errors.Is(err, sdk.ErrPendingErasure) {
		t.Errorf("all: %v", err)
	}
	if _, _, err := c.OpenGroup(t.Context(), groupOf(sdk.Any, "bob"), anyBlob); !errors.Is(err, sdk.ErrPendingErasure) {
		t.Errorf("any, named by him alone: %v", err)
	}
	if _, err := eraser.CancelDestruction(t.Context(), sdk.CancelRequest{Tenant: "acme", Subject: "bob", RequestID: "cancel", Reason: "mistake"}); err != nil {
		t.Fatal(err)
	}
	openGroup(t, c, all, allBlob, "said")
	if r := openGroup(t, dialKeyd(t, k), any, anyBlob, "said"); !r.Intact() {
		t.Errorf("cancelled: %+v", r)
	}
}

// One call for all keys, whatever their number and however many wait for it,
// and none while the lease lasts.
func TestGroupIsOneCall(t *testing.T) {
	c, f, _ := start(t)
	var people []string
	for i := range sdk.MaxSubjects {
		people = append(people, fmt.Sprint("person-", i))
	}
	for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
		g := groupOf(policy, people...)
		calls, asked := f.calls.Load(), f.asked.Load()
		blob := sealGroup(t, c, g, "said")
		if n, q := f.calls.Load()-calls, f.asked.Load()-asked; n != 1 || q != int64(len(people)) {
			t.Errorf("%v: %d calls of %d queries to seal", policy, n, q)
		}
		calls, asked = f.calls.Load(), f.asked.Load()
		gate := make(chan struct{})
		f.with(func() { f.answer = held(gate) })
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { openGroup(t, c, g, blob, "said") })
		}
		eventually(t, "the call is under way", func() bool { return f.calls.Load() > calls })
		close(gate)
		wg.Wait()
		sealGroup(t, c, g, "said")
		openGroup(t, c, g, blob, "said")
		if n, q := f.calls.Load()-calls, f.asked.Load()-asked; n != 1 || q != int64(len(people)) {
			t.Errorf("%v: %d calls of %d queries to open", policy, n, q)
		}
	}
}

// A group's lease ends, is renewed if hot and only then, and bounds an outage.
func TestGroupLease(t *testing.T) {
	for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
		c, f, clock := start(t)
		g := groupOf(policy, "ann", "bob", "cleo")
		blob := sealGroup(t, c, g, "said")
		openGroup(t, c, g, blob, "said")
		openGroup(t, c, g, blob, "said") // found: hot
		sealGroup(t, c, g, "said")
		calls := f.calls.Load()
		clock.Advance(50 * time.Second)
		eventually(t, "both are renewed", func() bool { return f.calls.Load() == calls+2 && c.Settled() })
		clock.Advance(40 * time.Second) // they would have ended
		openGroup(t, c, g, blob, "said")
		clock.Advance(15 * time.Second)
		eventually(t, "the one in use is renewed", func() bool { return f.calls.Load() == calls+3 && c.Settled() })

		f.setDown(true)
		clock.Advance(15 * time.Second)
		openGroup(t, c, g, blob, "said")
		clock.Advance(time.Minute)
		if _, _, err := c.OpenGroup(t.Context(), g, blob); !errors.Is(err, sdk.ErrUnavailable) {
			t.Errorf("%v: open in an outage: %v", policy, err)
		}
		if _, err := c.SealGroup(t.Context(), g, nil); !errors.Is(err, sdk.ErrUnavailable) {
			t.Errorf("%v: seal in an outage: %v", policy, err)
		}
		eventually(t, "all keys are gone", func() bool { _, known := c.Leases(); return known == 0 })
	}
}

// A renewal that finds somebody gone takes away his key and no other's.
func TestGroupRenewalFindsSomebodyGone(t *testing.T) {
	c, f, clock := start(t, sdk.WithRevocations(false))
	all, any := groupOf(sdk.All, "ann", "bob"), groupOf(sdk.Any, "ann", "bob")
	allBlob, anyBlob := sealGroup(t, c, all, "said"), sealGroup(t, c, any, "said")
	for range 2 {
		openGroup(t, c, all, allBlob, "said")
		openGroup(t, c, any, anyBlob, "said")
	}
	f.kill("ann", erased, false)
	openGroup(t, c, all, allBlob, "said") // within the lease
	calls := f.calls.Load()
	clock.Advance(50 * time.Second)
	eventually(t, "they are renewed", func() bool { return f.calls.Load() >= calls+2 && c.Settled() })
	calls = f.calls.Load()
	if r := openGroup(t, c, any, anyBlob, "said"); !slices.Equal(outcomes(r), []keydv1.Outcome{erased, lives}) {
		t.Errorf("any: %+v", r)
	}
	if n := f.calls.Load(); n != calls {
		t.Errorf("%d calls more for whoever is left", n-calls)
	}
	if _, _, err := c.OpenGroup(t.Context(), all, allBlob); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("all: %v", err)
	}
}

// A revocation that overtakes the answer: All is dead, Any is asked for again.
func TestRevocationOvertakesGroup(t *testing.T) {
	for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
		c, f, _ := start(t)
		g := groupOf(policy, "ann", "bob")
		blob := sealGroup(t, c, g, "said")
		eventually(t, "it is watched", func() bool { return f.isWatching("acme") })
		gate := make(chan struct{})
		f.with(func() { f.answer = held(gate) })
		calls := f.calls.Load()
		type opened struct {
			r   *sdk.Report
			err error
		}
		done := make(chan opened)
		go func() {
			_, r, err := c.OpenGroup(t.Context(), g, blob)
			done <- opened{r, err}
		}()
		eventually(t, "the call is under way", func() bool { return f.calls.Load() > calls })
		f.kill("bob", erased, true)
		eventually(t, "the revocation has come", func() bool { mapped, _ := c.Leases(); return mapped == 0 })
		close(gate)
		o := <-done
		var gone *sdk.GroupError
		switch {
		case policy == sdk.All && (!errors.Is(o.err, sdk.ErrErased) || !errors.As(o.err, &gone) || len(gone.Gone()) != 1 || gone.Gone()[0].Index != 1):
			t.Errorf("all: %v", o.err)
		case policy == sdk.Any && (o.err != nil || !slices.Equal(outcomes(o.r), []keydv1.Outcome{lives, erased})):
			t.Errorf("any: %+v, %v", o.r, o.err)
		}
	}
}

// A lease of zero is for one operation, for several as for one.
func TestGroupZeroLease(t *testing.T) {
	c, f, _ := start(t)
	f.setLease(0)
	for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
		g := groupOf(policy, "ann", "bob")
		blob := sealGroup(t, c, g, "said")
		for range 3 {
			calls := f.calls.Load()
			openGroup(t, c, g, blob, "said")
			if n := f.calls.Load() - calls; n != 1 {
				t.Errorf("%v: %d calls", policy, n)
			}
		}
		if _, known := c.Leases(); known != 0 {
			t.Errorf("%v: %d leases are kept", policy, known)
		}
	}
}

// Past the bucket's end nothing new is sealed under its keys, and a stream goes on.
func TestGroupBucketBoundary(t *testing.T) {
	c, f, clock := start(t)
	f.with(func() { f.width, f.lease = time.Minute, durationpb.New(5*time.Minute) })
	for _, policy := range []sdk.Policy{sdk.All, sdk.Any} {
		g := groupOf(policy, "ann", "bob")
		before := sealGroup(t, c, g, "before")
		var b bytes.Buffer
		w, err := c.SealGroupWriter(t.Context(), g, &b)
		if err != nil {
			t.Fatal(err)
		}
		clock.Advance(time.Minute)
		after := sealGroup(t, c, g, "after")
		for range 2 { // the first lease is over, unless renewed
			clock.Advance(3 * time.Minute)
			eventually(t, "the stream's lease is renewed", c.Settled)
		}
		if _, err := w.Write([]byte("stream")); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatalf("%v: %v", policy, err)
		}
		openGroup(t, c, g, before, "before")
		openGroup(t, c, g, after, "after")
		h0, _, _ := envelope.ParseHeader(before)
		h1, _, _ := envelope.ParseHeader(after)
		h2, _, _ := envelope.ParseHeader(b.Bytes())
		if h1.Bucket != h0.Bucket+60 || h2.Bucket != h0.Bucket {
			t.Errorf("%v: buckets %d, %d and %d", policy, h0.Bucket, h1.Bucket, h2.Bucket)
		}
	}
}
