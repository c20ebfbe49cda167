package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	keydv1 "lethe/proto/keyd/v1"
	"lethe/sdk"
	"lethe/sdk/envelope"
)

// TestGuaranteeNoNames has keyd go through all that happens to subjects, also
// what goes wrong, and searches everything that it wrote or answered for the
// subjects' ids, the plaintexts and the keys. G6.
func TestGuaranteeNoNames(t *testing.T) {
	metrics := freeAddress(t)
	d := deploy(t, "--log-level", "debug", "--metrics", metrics)
	d.tenant("acme-tenant-name", time.Minute)
	subjects := []string{"mara.lind@example.org", "Íñigo \"Ío\" D'Arcy-Mbeki", "高橋 見本 様 番号", "0049 170 5550123 / 7", "user:4711-4711-4711"}
	w := &witness{t: t, d: d, client: d.client()}
	for i, subject := range subjects {
		w.search.add("the subject id "+subject, []byte(subject))
		w.live(i, subject)
	}

	scan := func(when string) {
		t.Helper()
		report := func(place string, found []string) {
			t.Errorf("%s: %s holds %s", when, place, strings.Join(found, ", "))
		}
		w.search.below(t, d.data, report)
		stderr, err := os.ReadFile(d.keyd.stderr)
		if err != nil {
			t.Fatal(err)
		}
		if found := w.search.in(stderr); found != nil {
			report("standard error", found)
		}
		for i, text := range w.answers {
			if found := w.search.in(text); found != nil {
				report(fmt.Sprintf("answer %d (%.40q)", i, text), found)
			}
		}
	}
	page := fetch(t, metrics)
	if !bytes.Contains(page, []byte(`lethe_call_seconds_count{method="GetBlobKeys"`)) {
		t.Errorf("these are no metrics of keyd:\n%.300s", page)
	}
	w.answers = append(w.answers, page)
	scan("running")
	d.stop() // which moves rows from the log into tables
	scan("stopped")
	d.start()
	if _, err := d.client().Open(t.Context(), of("acme-tenant-name", subjects[0]), w.blobs[0]); !errors.Is(err, sdk.ErrErased) {
		t.Errorf("an erased subject: %v", err)
	}
	scan("started again")
	t.Logf("%d forms of secrets searched in %d places, %d bytes", len(w.search.needles), w.search.places, w.search.bytes)

	// The search reaches what keyd does write: a tenant's name, which is in
	// the store, the anchor, the audit log and the receipts.
	var control search
	control.add("the tenant", []byte("acme-tenant-name"))
	reached := make(map[string]bool)
	control.below(t, d.data, func(place string, _ []string) {
		reached[strings.Split(place, "/")[1]] = true
	})
	for _, place := range []string{"store", "anchor", "audit.log"} {
		if !reached[place] {
			t.Errorf("the search does not even find the tenant's name in %s: %v", place, reached)
		}
	}
}

// witness goes through subjects' lives and keeps every answer.
type witness struct {
	t       *testing.T
	d       *deployment
	client  *sdk.Client
	search  search
	blobs   [][]byte
	answers [][]byte
}

// heard keeps an error's text, with all that came with it.
func (w *witness) heard(err error) {
	if err != nil {
		w.answers = append(w.answers, []byte(err.Error()), fmt.Appendf(nil, "%+v %#v", err, err))
		var e *sdk.Error
		if errors.As(err, &e) {
			w.answers = append(w.answers, fmt.Appendf(nil, "%v", e.Metadata))
		}
	}
}

// live is a subject's life, with a request id that holds its own id and with
// all that can be refused.
func (w *witness) live(i int, subject string) {
	t, c, ctx := w.t, w.client, w.t.Context()
	t.Helper()
	who := of("acme-tenant-name", subject)
	plain := append([]byte("the plaintext of one record: "), random(40)...)
	w.search.add(fmt.Sprint("plaintext ", i), plain)

	blob, err := c.Seal(ctx, who, plain)
	if err != nil {
		t.Fatal(err)
	}
	w.blobs, w.answers = append(w.blobs, blob), append(w.answers, blob)
	bound, err := who.Bind(envelope.Pair{Name: "row", Value: subject})
	if err != nil {
		t.Fatal(err)
	}
	boundBlob, err := c.Seal(ctx, bound, plain)
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, boundBlob)

	// The blob key, as every client gets it.
	h, _, err := envelope.ParseHeader(blob)
	if err != nil {
		t.Fatal(err)
	}
	res, err := keydv1.NewKeyServiceClient(w.d.conn()).GetBlobKeys(ctx, &keydv1.GetBlobKeysRequest{Queries: []*keydv1.BlobKeyQuery{{
		Tenant: who.Tenant, SubjectId: []byte(subject), Class: "memory", Purpose: keydv1.Purpose_PURPOSE_OPEN,
		KeyId: h.Recipients[0][:], ClassNumber: uint32(h.Class), Bucket: h.Bucket,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	key := res.Results[0].GetKey().GetKey()
	if len(key) != 32 {
		t.Fatal("no blob key came")
	}
	w.search.add(fmt.Sprint("blob key ", i), key)

	// What goes wrong.
	_, err = c.Open(ctx, of("acme-tenant-name", subject+"!"), blob)
	w.refused(err, sdk.ErrWrongSubject)
	_, err = c.Open(ctx, bound, blob)
	w.refused(err, sdk.ErrWrongContext)
	_, err = c.Open(ctx, who, plain)
	w.refused(err, sdk.ErrNotSealed)
	_, err = c.Open(ctx, who, append(bytes.Clone(blob), 0))
	w.refused(err, sdk.ErrCorrupt)
	_, err = c.Seal(ctx, sdk.Target{Tenant: "acme-tenant-name", Subject: subject, Class: "no-such-class"}, plain)
	w.refused(err, sdk.ErrUnknown)
	_, err = c.Seal(ctx, of("no-such-tenant", subject), plain)
	w.refused(err, sdk.ErrUnknown)
	_, err = c.Seal(ctx, of("acme-tenant-name", subject+"\x00"), plain)
	w.refused(err, sdk.ErrInvalidArgument)
	// The id where it does not belong, straight to keyd.
	conn := w.d.conn()
	_, err = keydv1.NewErasureServiceClient(conn).DestroyKey(ctx, &keydv1.DestroyKeyRequest{
		Tenant: subject, SubjectId: []byte(subject), Classes: []string{subject}, RequestId: subject, Reason: subject,
	})
	w.heard(err)
	_, err = keydv1.NewHoldServiceClient(conn).PlaceHold(ctx, &keydv1.PlaceHoldRequest{Tenant: subject, SubjectId: []byte(subject), HoldId: subject, Reason: subject})
	w.heard(err)
	_, err = keydv1.NewLedgerServiceClient(conn).GetReceipt(ctx, &keydv1.GetReceiptRequest{
		Tenant: "acme-tenant-name", By: &keydv1.GetReceiptRequest_RequestId{RequestId: "never " + subject},
	})
	w.heard(err)
	_, err = keydv1.NewLedgerServiceClient(conn).ListReceipts(ctx, &keydv1.ListReceiptsRequest{Tenant: "acme-tenant-name", PageToken: subject})
	w.heard(err)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = c.Describe(ended, "acme-tenant-name", subject)
	w.heard(err)

	// Held, released, destroyed, reinstated, destroyed.
	holds := keydv1.NewHoldServiceClient(c.Conn())
	placed, err := holds.PlaceHold(ctx, &keydv1.PlaceHoldRequest{
		Tenant: "acme-tenant-name", SubjectId: []byte(subject), HoldId: fmt.Sprint("hold-", i), Reason: "litigation", RequestId: "hold " + subject,
	})
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, placed.Receipt)
	short, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err = c.DestroyKey(short, destroyRequest("acme-tenant-name", subject, "while held "+subject))
	w.refused(err, sdk.ErrHeld)
	released, err := holds.ReleaseHold(ctx, &keydv1.ReleaseHoldRequest{
		Tenant: "acme-tenant-name", SubjectId: []byte(subject), HoldId: fmt.Sprint("hold-", i), Reason: "settled", RequestId: "release " + subject,
	})
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, released.Receipt)
	done, err := c.DestroyKey(ctx, destroyRequest("acme-tenant-name", subject, "destroy "+subject))
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, done.Receipt)
	_, err = c.Open(ctx, who, blob)
	w.refused(err, sdk.ErrErased)
	again, err := c.Reinstate(ctx, sdk.ReinstateRequest{Tenant: "acme-tenant-name", Subject: subject, RequestID: "reinstate " + subject, Reason: "consent"})
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, again.Receipt)
	second, err := c.Seal(ctx, who, plain)
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, second)
	_, err = c.DestroyKey(ctx, destroyRequest("acme-tenant-name", subject, "late "+subject))
	w.refused(err, sdk.ErrConflict)
	late := destroyRequest("acme-tenant-name", subject, "destroy again "+subject)
	late.IfGeneration = again.Generation
	if _, err = c.DestroyKey(ctx, late); err != nil {
		t.Fatal(err)
	}
	if _, err := c.DestroyKey(ctx, destroyRequest("acme-tenant-name", "never seen "+subject, "never seen "+subject)); err != nil {
		t.Fatal(err)
	}
	list, err := keydv1.NewLedgerServiceClient(c.Conn()).ListReceipts(ctx, &keydv1.ListReceiptsRequest{Tenant: "acme-tenant-name", SubjectId: []byte(subject)})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Entries {
		w.answers = append(w.answers, e.Statement)
	}
	status, err := keydv1.NewAdminServiceClient(c.Conn()).GetStatus(ctx, &keydv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.answers = append(w.answers, []byte(status.String()))
}

// refused fails the test unless err is want, and keeps it.
func (w *witness) refused(err, want error) {
	w.t.Helper()
	if !errors.Is(err, want) {
		w.t.Errorf("%v; want %v", err, want)
	}
	w.heard(err)
}

// freeAddress is a loopback address at which nobody listened a moment ago.
func freeAddress(t testing.TB) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	return lis.Addr().String()
}

func fetch(t testing.TB, address string) []byte {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
