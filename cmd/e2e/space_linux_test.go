package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
)

// smallDisk mounts a file system of size bytes in memory.
func smallDisk(t testing.TB, size int64) string {
	t.Helper()
	dir := tempDir(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size)); err != nil {
		lacking(t, fmt.Sprintf("permission to mount a tmpfs (root): %v", err))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func free(t testing.TB, dir string) int64 {
	t.Helper()
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		t.Fatal(err)
	}
	return int64(s.Bavail) * s.Bsize
}

// fill leaves the disk with about left bytes free, and returns the file that
// takes the rest.
func fill(t testing.TB, dir string, left int64) string {
	t.Helper()
	ballast := filepath.Join(dir, "ballast")
	size := free(t, dir) - left
	if size <= 0 {
		t.Fatalf("only %d bytes are free", free(t, dir))
	}
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		t.Fatal(err)
	}
	return ballast
}

// TestGuaranteeDurableOnAFullStoreDisk fills the store's disk: creates fail as
// unavailable while there still is room, keyd lives, serves what it has and
// takes up creates by itself once there is room. G1, G8.
func TestGuaranteeDurableOnAFullStoreDisk(t *testing.T) {
	const minFree = 128 << 20
	disk := smallDisk(t, 384<<20)
	d := deploy(t, "--store", filepath.Join(disk, "store"), "--min-free", fmt.Sprint(minFree))
	d.tenant("acme", time.Minute)
	pinned := d.pinned()
	c := d.client()
	keys := keydv1.NewKeyServiceClient(d.conn())

	var lives []*life
	add := func(subject string) error {
		l := &life{subject: subject, plain: random(50)}
		var err error
		if l.blob, err = c.Seal(t.Context(), of("acme", subject), l.plain); err == nil {
			lives = append(lives, l)
		}
		return err
	}
	for i := range 20 {
		if err := add(fmt.Sprint("early ", i)); err != nil {
			t.Fatal(err)
		}
	}
	ballast := fill(t, disk, minFree+12<<20)

	// As many creates as the disk takes, and many more.
	created, refused := 0, 0
	for batch := 0; refused < 40 && batch < 4000; batch++ {
		req := &keydv1.GetBlobKeysRequest{}
		for i := range 256 {
			req.Queries = append(req.Queries, &keydv1.BlobKeyQuery{
				Tenant: "acme", SubjectId: fmt.Appendf(nil, "filler %d %d", batch, i), Class: "memory", Purpose: keydv1.Purpose_PURPOSE_SEAL,
			})
		}
		res, err := keys.GetBlobKeys(t.Context(), req)
		if err != nil {
			if status.Code(err) != codes.Unavailable {
				t.Fatal(err)
			}
			refused++
			continue
		}
		failed := false
		for _, r := range res.Results {
			switch {
			case r.GetKey() != nil:
				created++
			case r.GetFailure().GetOutcome() != keydv1.Outcome_OUTCOME_UNAVAILABLE:
				t.Fatalf("%v", r.GetFailure())
			default:
				failed = true
			}
		}
		if failed {
			refused++
		}
	}
	t.Logf("%d creates until the first of %d refusals; %d MiB were left", created, refused, free(t, disk)>>20)
	if created == 0 || refused == 0 {
		t.Fatal("the disk did not fill under creates")
	}
	if left := free(t, disk); left < minFree/2 {
		t.Errorf("creates went on until %d bytes were left", left)
	}
	for i := range 20 {
		if err := add(fmt.Sprint("late ", i)); !errors.Is(err, sdk.ErrUnavailable) {
			t.Fatalf("a create on a full disk: %v", err)
		}
	}
	// Nothing at all is left, as when another program takes the rest.
	rest := filepath.Join(disk, "rest")
	if f, err := os.Create(rest); err != nil {
		t.Fatal(err)
	} else if err := errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, free(t, disk)-1<<20), f.Close()); err != nil {
		t.Fatal(err)
	}
	if err := add("last"); !errors.Is(err, sdk.ErrUnavailable) {
		t.Fatalf("a create on a full disk: %v", err)
	}
	if !d.keyd.alive() {
		t.Fatalf("keyd died: %v", d.keyd.err)
	}
	d.verify(lives, pinned) // opens go on

	if err := errors.Join(os.Remove(rest), os.Remove(ballast)); err != nil {
		t.Fatal(err)
	}
	recovered := false
	for range 100 {
		if recovered = add("recovered") == nil; recovered {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if !recovered {
		t.Fatal("there is room again, but keyd does not take creates")
	}
	lives[0].asked = true
	done, err := c.DestroyKey(t.Context(), lives[0].request())
	if err != nil {
		t.Fatal(err)
	}
	lives[0].receipt = done.Receipt
	d.restart()
	d.verify(lives, pinned)
}

// TestTurnsOnAFullStoreDisk fills the store's disk at different times of a turn,
// of carrying keys over and of dropping what is drained: keyd lives and serves
// what it has, the turn goes on by itself once there is room, and nobody is lost.
// A backup for which there is no room fails, and leaves nothing.
func TestTurnsOnAFullStoreDisk(t *testing.T) {
	const minFree = 128 << 20
	disk, small := smallDisk(t, 512<<20), smallDisk(t, 256<<10)
	d := deploy(t, "--store", filepath.Join(disk, "store"), "--min-free", fmt.Sprint(minFree),
		"--kek-lease", "500ms", "--soak", "500ms", "--root-waiting", "500ms", "--rewrap-rate", "2000")
	d.tenant("acme", time.Minute)
	pinned, c := d.pinned(), d.client()
	admin := keydv1.NewAdminServiceClient(d.conn())
	d.fill(8)
	var lives []*life
	for i := range 20 {
		l := &life{subject: fmt.Sprint("subject ", i), plain: random(50)}
		var err error
		if l.blob, err = c.Seal(t.Context(), of("acme", l.subject), l.plain); err != nil {
			t.Fatal(err)
		}
		lives = append(lives, l)
	}
	backup := filepath.Join(small, "backup")
	if _, said, code := d.lethe("", "backup", "-o", backup); code == 0 {
		t.Error("a backup for which there is no room succeeds")
	} else if names, err := os.ReadDir(small); err != nil || len(names) != 0 {
		t.Errorf("the backup failed (%s) and left %v, %v", said, names, err)
	}

	states := make(map[keydv1.EpochState]int) // in which the disk was full
	for cycle := range 8 {
		if _, err := admin.TurnEpoch(t.Context(), &keydv1.TurnEpochRequest{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(cycle) * 200 * time.Millisecond)
		ballast := fill(t, disk, minFree/4)
		time.Sleep(500 * time.Millisecond)
		for _, e := range d.epochs() {
			states[e.State]++
		}
		if !d.keyd.alive() {
			t.Fatalf("keyd died: %v", d.keyd.err)
		}
		if l := lives[cycle]; l.receipt == nil {
			if plain, err := c.Open(t.Context(), of("acme", l.subject), l.blob); err != nil || string(plain) != string(l.plain) {
				t.Fatalf("an open while the disk is full: %v", err)
			}
		}
		if _, err := c.Seal(t.Context(), of("acme", fmt.Sprint("late ", cycle)), nil); !errors.Is(err, sdk.ErrUnavailable) {
			t.Fatalf("a create while the disk is full: %v", err)
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		for open := 0; open != 1; time.Sleep(100 * time.Millisecond) {
			open = 0
			for _, e := range d.epochs() {
				if e.State != keydv1.EpochState_EPOCH_STATE_CLOSED {
					open++
				}
				if e.RowsDamaged != 0 {
					t.Fatalf("damaged: %v", e)
				}
			}
			if t.Context().Err() != nil || !d.keyd.alive() {
				t.Fatalf("the epochs do not close: %v", d.epochs())
			}
		}
	}
	t.Logf("the disk was full while epochs were %v", states)
	if states[keydv1.EpochState_EPOCH_STATE_DRAINING] == 0 {
		t.Error("too little happened to show anything")
	}
	lives[0].asked = true
	done, err := c.DestroyKey(t.Context(), lives[0].request())
	if err != nil {
		t.Fatal(err)
	}
	lives[0].receipt = done.Receipt
	d.verify(lives, pinned)
	d.restart()
	d.verify(lives, pinned)
}

// TestGuaranteeNoAcknowledgementWithoutTheAnchorOnAFullDisk fills the anchor's
// disk: destroys answer unavailable, are done once there is room, and the
// repeated request has its receipt. G2, G5.
func TestGuaranteeNoAcknowledgementWithoutTheAnchorOnAFullDisk(t *testing.T) {
	disk := smallDisk(t, 4<<20)
	anchorDown(t, filepath.Join(disk, "anchor"), func() (up func()) {
		ballast := fill(t, disk, 0)
		// What is left in half-filled pages.
		out, err := exec.Command("sh", "-c", "cat /dev/zero >"+filepath.Join(disk, "rest")).CombinedOutput()
		if err == nil {
			t.Fatalf("the disk is not full: %s", out)
		}
		return func() {
			if err := errors.Join(os.Remove(ballast), os.Remove(filepath.Join(disk, "rest"))); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestGuaranteeNoAcknowledgementWithoutTheAnchor takes the anchor away
// altogether. G2, G5.
func TestGuaranteeNoAcknowledgementWithoutTheAnchor(t *testing.T) {
	dir := filepath.Join(tempDir(t), "anchor")
	anchorDown(t, dir, func() (up func()) {
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Rename(dir+".away", dir); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func anchorDown(t *testing.T, dir string, down func() (up func())) {
	d := deploy(t, "--anchor", dir, "--anchor-timeout", "700ms")
	d.tenant("acme", time.Minute)
	pinned := d.pinned()
	c := d.client()
	erasure := keydv1.NewErasureServiceClient(d.conn())
	var lives []*life
	for i := range 4 {
		l := &life{subject: fmt.Sprint("subject ", i), plain: random(50)}
		var err error
		if l.blob, err = c.Seal(t.Context(), of("acme", l.subject), l.plain); err != nil {
			t.Fatal(err)
		}
		lives = append(lives, l)
	}
	up := down()
	ask := func(l *life) error {
		_, err := erasure.DestroyKey(t.Context(), &keydv1.DestroyKeyRequest{
			Tenant: "acme", SubjectId: []byte(l.subject), RequestId: l.request().RequestID, Reason: l.request().Reason,
		})
		l.asked = true
		return err
	}
	for _, l := range lives[:3] {
		for range 2 {
			if err := ask(l); status.Code(err) != codes.Unavailable {
				t.Fatalf("a destroy while the anchor is down: %v; want unavailable", err)
			}
		}
	}
	// Nor is there a receipt by another way.
	_, err := keydv1.NewLedgerServiceClient(d.conn()).GetReceipt(bounded(t, 20*time.Second), &keydv1.GetReceiptRequest{
		Tenant: "acme", By: &keydv1.GetReceiptRequest_RequestId{RequestId: lives[0].request().RequestID},
	})
	if code := status.Code(err); code != codes.Unavailable && code != codes.NotFound {
		t.Errorf("the receipt of a destroy that the anchor does not have: %v", err)
	}
	// Nobody is told that they are erased: a loss of the store would undo it.
	if _, err := c.Open(t.Context(), of("acme", lives[0].subject), lives[0].blob); !errors.Is(err, sdk.ErrUnavailable) {
		t.Errorf("an open of what the anchor does not have as destroyed: %v; want unavailable", err)
	}
	_, err = keydv1.NewHoldServiceClient(d.conn()).PlaceHold(t.Context(), &keydv1.PlaceHoldRequest{
		Tenant: "acme", SubjectId: []byte(lives[0].subject), HoldId: "case-1", RequestId: "hold-1", Reason: "litigation",
	})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a hold on what the anchor does not have as destroyed: %v; want unavailable", err)
	}
	// What needs no anchor goes on.
	if _, err := c.Open(t.Context(), of("acme", lives[3].subject), lives[3].blob); err != nil {
		t.Errorf("an open while the anchor is down: %v", err)
	}
	up()
	for _, l := range lives[:3] {
		done, err := c.DestroyKey(bounded(t, 30*time.Second), l.request())
		if err != nil {
			t.Fatalf("the anchor is back, but the repeated request: %v", err)
		}
		l.receipt = done.Receipt
	}
	d.verify(lives, pinned)
	d.restart()
	d.verify(lives, pinned)
}
