package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"strings"

	"lethe/sdk"
	"lethe/sdk/envelope"
)

// Seal a record under the key of the person it is about, and open it again.
func Example() {
	ctx := context.Background()
	client, err := sdk.Dial(ctx, exampleAddress())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	target := sdk.Target{Tenant: "acme", Subject: "user-4711", Class: "checkpoint"}
	blob, err := client.Seal(ctx, target, []byte("the state of an agent"))
	if err != nil {
		log.Fatal(err)
	}
	// Store blob wherever the record would have gone.

	plaintext, err := client.Open(ctx, target, blob)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(plaintext))
	// Output: the state of an agent
}

// Bind a blob to the row that it is stored in, so that it does not open when
// it is moved to another.
func ExampleTarget_Bind() {
	ctx := context.Background()
	client, err := sdk.Dial(ctx, exampleAddress())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	person := sdk.Target{Tenant: "acme", Subject: "user-4711", Class: "checkpoint"}
	first, err := person.Bind(envelope.Pair{Name: "thread", Value: "t1"}, envelope.Pair{Name: "checkpoint", Value: "1"})
	if err != nil {
		log.Fatal(err)
	}
	second, err := person.Bind(envelope.Pair{Name: "thread", Value: "t1"}, envelope.Pair{Name: "checkpoint", Value: "2"})
	if err != nil {
		log.Fatal(err)
	}
	blob, err := client.Seal(ctx, first, []byte("state"))
	if err != nil {
		log.Fatal(err)
	}
	_, err = client.Open(ctx, second, blob)
	fmt.Println(errors.Is(err, sdk.ErrWrongContext))
	// Output: true
}

// Erase a person: destroy the key, and what was sealed under it is gone
// wherever its copies lie.
func ExampleClient_DestroyKey() {
	ctx := context.Background()
	client, err := sdk.Dial(ctx, exampleAddress())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	target := sdk.Target{Tenant: "acme", Subject: "user-4711", Class: "trace"}
	blob, err := client.Seal(ctx, target, []byte("what the user said"))
	if err != nil {
		log.Fatal(err)
	}

	destruction, err := client.DestroyKey(ctx, sdk.DestroyRequest{
		Tenant:    "acme",
		Subject:   "user-4711",
		RequestID: "ticket-2041", // kept with the request, for retries
		Reason:    "gdpr-art17",
	})
	if err != nil {
		log.Fatal(err)
	}
	// Keep destruction.Receipt as evidence.
	fmt.Println("receipt:", len(destruction.Receipt) > 0)

	_, err = client.Open(ctx, target, blob)
	switch {
	case errors.Is(err, sdk.ErrErased):
		fmt.Println("erased")
	case errors.Is(err, sdk.ErrUnavailable):
		fmt.Println("try again later") // this says nothing about the data
	}
	// Output:
	// receipt: true
	// erased
}

// Seal data that is too large for memory as a stream.
func ExampleClient_SealWriter() {
	ctx := context.Background()
	client, err := sdk.Dial(ctx, exampleAddress())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	target := sdk.Target{Tenant: "acme", Subject: "user-4711", Class: "backup"}
	source := strings.NewReader(strings.Repeat("a long backup ", 100_000))
	var stored bytes.Buffer

	w, err := client.SealWriter(ctx, target, &stored)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := io.Copy(w, source); err != nil {
		w.Abort(err) // what was written so far does not open
		log.Fatal(err)
	}
	if err := w.Close(); err != nil { // only now is the blob complete
		log.Fatal(err)
	}

	r, err := client.OpenReader(ctx, target, &stored)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	fmt.Println(n, err)
	// Output: 1400000 <nil>
}

// A memory blended from several people opens while one of them lives, and
// tells who is gone, so that it can be made again without them.
func ExampleClient_OpenGroup() {
	ctx := context.Background()
	client, err := sdk.Dial(ctx, exampleAddress())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	sources := sdk.Group{
		Tenant: "acme", Class: "memory", Policy: sdk.Any,
		Subjects: []string{"user-1", "user-2", "user-3"},
	}
	blob, err := client.SealGroup(ctx, sources, []byte("they plan a trip together"))
	if err != nil {
		log.Fatal(err)
	}
	_, err = client.DestroyKey(ctx, sdk.DestroyRequest{
		Tenant: "acme", Subject: "user-2", RequestID: "ticket-2042", Reason: "gdpr-art17",
	})
	if err != nil {
		log.Fatal(err)
	}

	memory, report, err := client.OpenGroup(ctx, sources, blob)
	if err != nil {
		log.Fatal(err) // sdk.ErrErased: nobody is left, delete it
	}
	fmt.Println(string(memory))
	for _, r := range report.Gone() {
		fmt.Println("make it again without", sources.Subjects[r.Index])
	}
	// Output:
	// they plan a trip together
	// make it again without user-2
}
