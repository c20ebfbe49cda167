package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lethe/sdk/envelope"
)

func (a *app) inspectCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:   "inspect [FILE]",
		Short: "Show a blob's header, without keys",
		Long: `Inspect shows what the header of the blob in FILE, or from the standard input,
tells to anybody. It needs no key and no keyd, and reads any length in little
memory. It verifies the form and nothing else.`,
		Example: `  lethe inspect trace.sealed
  zcat people.sealed.gz | lethe inspect --json`,
		Args: atMostOneFile,
	}, func(_ context.Context, args []string) error { return a.inspect(args) })
}

// inspection is what inspect prints.
type inspection struct {
	Form           string     `json:"form"`
	Policy         string     `json:"policy"`
	ClassNumber    uint16     `json:"class_number"`
	Bucket         *time.Time `json:"bucket"` // null: beyond what RFC 3339 can say
	BucketUnix     uint64     `json:"bucket_unix,string"`
	ContextBound   bool       `json:"context_bound"`
	KeyIDs         []string   `json:"key_ids"`
	Commitment     string     `json:"commitment"`
	HeaderBytes    int        `json:"header_bytes"`
	BlobBytes      int64      `json:"blob_bytes,string"`
	PlaintextBytes *int64     `json:"plaintext_bytes,string"` // null: too short to be a blob
}

func (a *app) inspect(args []string) error {
	in, err := a.openSealed(args)
	if err != nil {
		return err
	}
	defer in.Close()
	h, err := envelope.ReadHeader(in)
	if err != nil {
		return err
	}
	size := in.size
	if size < 0 {
		if _, err := io.Copy(io.Discard, in); err != nil {
			return err
		}
		size = in.read.Load()
	}
	v := inspection{
		Form: h.Form.String(), Policy: h.Policy.String(), ClassNumber: h.Class,
		Bucket: bucketTime(h.Bucket), BucketUnix: h.Bucket, ContextBound: h.Bound,
		Commitment: hex.EncodeToString(h.Commitment[:]), HeaderBytes: h.Size(), BlobBytes: size,
	}
	for _, id := range h.Recipients {
		v.KeyIDs = append(v.KeyIDs, id.String())
	}
	plaintext := "cannot be: the blob is too short"
	if n, ok := plaintextSize(h, size); ok {
		v.PlaintextBytes = &n
		plaintext = fmt.Sprintf("%d bytes, if the blob is whole", n)
	}
	return a.print(v, func(w io.Writer) {
		bucket := fmt.Sprintf("%d s after 1970", v.BucketUnix)
		if v.Bucket != nil {
			bucket = "from " + instant(*v.Bucket)
		}
		bound := "none"
		if v.ContextBound {
			bound = "bound; it must be given to open"
		}
		facts(w,
			"form", v.Form,
			"policy", v.Policy,
			"class number", fmt.Sprint(v.ClassNumber),
			"bucket", bucket,
			"context", bound,
			"key id", strings.Join(v.KeyIDs, "\n              "),
			"commitment", v.Commitment,
			"header", fmt.Sprintf("%d bytes", v.HeaderBytes),
			"blob", fmt.Sprintf("%d bytes", v.BlobBytes),
			"plaintext", plaintext,
			"verified", "the form only; whether the blob is sound is seen by opening it",
		)
	})
}

// bucketTime is the start of a bucket, or nil if it has no form in RFC 3339.
func bucketTime(unix uint64) *time.Time {
	if unix > 253402300799 { // the end of the year 9999
		return nil
	}
	t := time.Unix(int64(unix), 0).UTC()
	return &t
}

// Sizes of what stands between header and plaintext; SPEC.md, part I.
const (
	contextTagSize   = 32
	oneShotOverhead  = 24 + 16 // nonce and tag
	streamHeaderSize = 40
	segmentSize      = 64 << 10
	segmentTagSize   = 16
)

// plaintextSize is how much plaintext a blob of this header and size holds.
func plaintextSize(h *envelope.Header, size int64) (int64, bool) {
	n := size - int64(h.Size())
	if h.Bound {
		n -= contextTagSize
	}
	if h.Form == envelope.OneShot {
		n -= oneShotOverhead
		return n, n >= 0
	}
	segments := (n + segmentSize - 1) / segmentSize // the first holds the stream's header
	n -= streamHeaderSize + segments*segmentTagSize
	return n, n >= 0
}
