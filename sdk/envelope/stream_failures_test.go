package envelope

import (
	"bytes"
	"crypto/rand"
	"testing"
)

// frame is one segment that a writer who obeys no rule seals.
type frame struct {
	size   int // of the plaintext
	last   bool
	spoilt bool // a bit of the tag is flipped
	cut    int  // bytes missing at its end
}

// TestStreamFailures is the catalogue of failures of segmented streams that
// C2SP/CCTV made for age, under the names it has there, in our framing.
func TestStreamFailures(t *testing.T) {
	const (
		first = segmentPlain - streamHeaderSize // plaintext that fills segment 0
		next  = segmentPlain
	)
	many := make([]frame, 257)
	many[0].size = first
	for i := range many[1:] {
		many[i+1].size = next
	}
	many[256] = frame{size: 1, last: true}
	for name, c := range map[string]struct {
		frames  []frame
		garbage int
		head    int // bytes of the stream header, if not all
		want    error
	}{
		"stream_empty_payload":             {frames: []frame{{0, true, false, 0}}},
		"stream_last_chunk_full":           {frames: []frame{{first, true, false, 0}}},
		"stream_last_chunk_full_second":    {frames: []frame{{first, false, false, 0}, {next, true, false, 0}}},
		"stream_two_chunks":                {frames: []frame{{first, false, false, 0}, {100, true, false, 0}}},
		"stream_three_chunks":              {frames: []frame{{first, false, false, 0}, {next, false, false, 0}, {100, true, false, 0}}},
		"stream_257_chunks":                {frames: many},
		"stream_bad_tag":                   {frames: []frame{{100, true, true, 0}}, want: ErrCorrupt},
		"stream_bad_tag_second_chunk":      {frames: []frame{{first, false, false, 0}, {100, true, true, 0}}, want: ErrCorrupt},
		"stream_bad_tag_second_chunk_full": {frames: []frame{{first, false, false, 0}, {next, true, true, 0}}, want: ErrCorrupt},
		"stream_last_chunk_empty":          {frames: []frame{{first, false, false, 0}, {0, true, false, 0}}, want: ErrCorrupt},
		"stream_missing_tag":               {frames: []frame{{10, true, false, 16}}, want: ErrTruncated},
		"stream_missing_tag, long":         {frames: []frame{{100, true, false, 16}}, want: ErrCorrupt},
		"stream_no_chunks":                 {frames: nil, want: ErrTruncated},
		"stream_no_final":                  {frames: []frame{{100, false, false, 0}}, want: ErrCorrupt},
		"stream_no_final_full":             {frames: []frame{{first, false, false, 0}}, want: ErrTruncated},
		"stream_no_final_two_chunks":       {frames: []frame{{first, false, false, 0}, {100, false, false, 0}}, want: ErrCorrupt},
		"stream_no_final_two_chunks_full":  {frames: []frame{{first, false, false, 0}, {next, false, false, 0}}, want: ErrTruncated},
		"stream_no_nonce":                  {head: -1, want: ErrTruncated},
		"stream_short_nonce":               {head: 20, want: ErrTruncated},
		"stream_short_chunk":               {frames: []frame{{0, true, false, 4}}, want: ErrTruncated},
		"stream_short_second_chunk":        {frames: []frame{{first, false, false, 0}, {0, true, false, 4}}, want: ErrTruncated},
		"stream_trailing_garbage_short":    {frames: []frame{{100, true, false, 0}}, garbage: 4, want: ErrCorrupt},
		"stream_trailing_garbage_long":     {frames: []frame{{100, true, false, 0}}, garbage: 100, want: ErrCorrupt},
		"trailing garbage after full":      {frames: []frame{{first, true, false, 0}}, garbage: 1, want: ErrCorrupt},
		"trailing garbage, many segments":  {frames: []frame{{first, true, false, 0}}, garbage: 3 * segmentSize, want: ErrCorrupt},
		"stream_two_final_chunks":          {frames: []frame{{100, true, false, 0}, {100, true, false, 0}}, want: ErrCorrupt},
		"stream_two_final_chunks_full":     {frames: []frame{{first, true, false, 0}, {next, true, false, 0}}, want: ErrCorrupt},
		"stream_two_final_chunks_second":   {frames: []frame{{first, true, false, 0}, {100, true, false, 0}}, want: ErrCorrupt},
		"stream_two_final_chunks_short":    {frames: []frame{{50, true, false, 0}, {20, true, false, 0}}, want: ErrCorrupt},
		"bad tag in a later turn": {frames: append(append([]frame{{first, false, false, 0}}, slicesRepeat(frame{size: next}, 20)...),
			frame{next, false, true, 0}, frame{100, true, false, 0}), want: ErrCorrupt},
		"missing end in a later turn": {frames: append([]frame{{first, false, false, 0}}, slicesRepeat(frame{size: next}, 20)...), want: ErrTruncated},
	} {
		t.Run(name, func(t *testing.T) {
			s, o := pair(t, Single, 1)
			blob, plain := frames(t, s, c.frames)
			blob = append(blob, make([]byte, c.garbage)...)
			switch {
			case c.head < 0:
				blob = blob[:sizeOf(Single, 1)]
			case c.head > 0:
				blob = blob[:sizeOf(Single, 1)+c.head]
			}
			for _, workers := range []int{1, 2, 3} {
				got, err := openStream(o, bytes.NewReader(blob), Context{}, workers)
				if err != c.want {
					t.Errorf("%d workers: %v, want %v", workers, err, c.want)
				}
				// Whatever was given before is whole segments from the start.
				if !bytes.HasPrefix(plain, got) || err == nil && len(got) != len(plain) ||
					err != nil && len(got) != 0 && (len(got)+streamHeaderSize)%segmentPlain != 0 {
					t.Errorf("%d workers: %d bytes of plaintext", workers, len(got))
				}
			}
			got, err := openStreamAt(o, blob, Context{})
			if err != c.want || !bytes.HasPrefix(plain, got) {
				t.Errorf("at random: %v, want %v", err, c.want)
			}
		})
	}
}

func slicesRepeat(f frame, n int) []frame {
	all := make([]frame, n)
	for i := range all {
		all[i] = f
	}
	return all
}

// frames seals what no Writer would, and returns the plaintext too.
func frames(t testing.TB, s *Sealer, frames []frame) (blob, plain []byte) {
	t.Helper()
	h := s.encoded[Stream][0]
	var nonce [streamNonceSize]byte
	rand.Read(nonce[:])
	c := must[*segmentCipher](t)(newSegmentCipher(&s.m.keys.payload[Stream], &nonce, &h.hash))
	blob = append(bytes.Clone(h.raw), streamHeaderSize)
	blob = append(blob, nonce[:]...)
	for i, f := range frames {
		p := randomBytes(f.size)
		plain = append(plain, p...)
		sealed := c.seal(new(segmentNonce), append(make([]byte, 0, f.size+tagSize), p...), uint64(i), f.last)
		if f.spoilt {
			sealed[len(sealed)-1] ^= 1
		}
		blob = append(blob, sealed[:len(sealed)-f.cut]...)
	}
	return blob, plain
}

// Segments of another stream under the same key do not fit in.
func TestSegmentsOfAnotherStream(t *testing.T) {
	s, o := pair(t, Single, 1)
	a := sealStream(t, s, randomBytes(4*segmentPlain), Context{}, 1)
	b := sealStream(t, s, randomBytes(4*segmentPlain), Context{}, 1)
	at := sizeOf(Single, 1)
	for i := range 4 {
		lo, hi := at+i*segmentSize, at+(i+1)*segmentSize
		if i == 0 {
			lo += streamHeaderSize
		}
		mixed := bytes.Clone(a)
		copy(mixed[lo:hi], b[lo:hi])
		if _, err := openStream(o, bytes.NewReader(mixed), Context{}, 1); err != ErrCorrupt {
			t.Errorf("segment %d: %v", i, err)
		}
		if _, err := openStreamAt(o, mixed, Context{}); err != ErrCorrupt {
			t.Errorf("segment %d, at random: %v", i, err)
		}
	}
	// Nor does a context tag of another stream or form.
	ctx := bound(t, "a", "b")
	a, b = sealStream(t, s, nil, ctx, 1), sealStream(t, s, nil, ctx, 1)
	copy(a[at:at+contextTagSize], b[at:])
	if _, err := openStream(o, bytes.NewReader(a), ctx, 1); err != ErrWrongContext {
		t.Error(err)
	}
}

// A stream that gets shorter below its ReaderAt.
func TestReaderAtSourceShrinks(t *testing.T) {
	s, o := pair(t, Single, 1)
	blob := sealStream(t, s, randomBytes(4*segmentPlain), Context{}, 1)
	if _, err := o.NewReaderAt(bytes.NewReader(blob[:len(blob)-1]), int64(len(blob)), Context{}); err != ErrTruncated {
		t.Error(err)
	}
	for _, size := range []int64{-1, 0, 1, 20, 70, 120} {
		_, err := o.NewReaderAt(bytes.NewReader(blob), size, Context{})
		if err == nil || !isOurs(err) {
			t.Errorf("size %d: %v", size, err)
		}
	}
}
