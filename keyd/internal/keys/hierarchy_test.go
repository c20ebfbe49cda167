package keys

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
)

// unhex is a byte string in the vectors.
type unhex []byte

func (u *unhex) UnmarshalText(b []byte) (err error) {
	*u, err = hex.DecodeString(string(b))
	return err
}

// The keys that clients get are those of SPEC.md.
func TestDerivationVectors(t *testing.T) {
	b, err := os.ReadFile("../../../proto/vectors/derivation.json")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Hierarchy []struct {
			Tenant    string
			Class     uint32
			Bucket    uint64
			KeyID     unhex `json:"key_id"`
			BucketKey unhex `json:"bucket_key"`
			DEK       unhex
			Share     unhex
			BlobKey   unhex `json:"blob_key"`
		}
	}
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Hierarchy) == 0 {
		t.Fatal("no vectors")
	}
	for _, c := range v.Hierarchy {
		share, err := shareOf(c.BucketKey, c.Tenant, c.Class, c.Bucket, c.KeyID)
		if err != nil || !bytes.Equal(share, c.Share) {
			t.Errorf("%s/%d: share %x, %v", c.Tenant, c.Class, share, err)
		}
		key, err := blobKey(c.DEK, share, c.Tenant, c.Class, c.Bucket, c.KeyID)
		if err != nil || !bytes.Equal(key, c.BlobKey) {
			t.Errorf("%s/%d: blob key %x, %v", c.Tenant, c.Class, key, err)
		}
	}
}
