package peers

import (
	"bytes"
	"context"
	"encoding/json"

	"github.com/godaddy/asherah/go/appencryption"
	"github.com/godaddy/asherah/go/appencryption/pkg/crypto/aead"
	"github.com/godaddy/asherah/go/appencryption/pkg/kms"
	"github.com/godaddy/asherah/go/appencryption/pkg/persistence"
)

// Asherah is GoDaddy's Asherah with a session open, its keys cached, an
// in-memory metastore and a static master key. Its sealed form is a struct,
// which is encoded as JSON, as its users store it.
func Asherah() (OneShot, error) {
	crypto := aead.NewAES256GCM()
	master, err := kms.NewStatic("thisIsAStaticMasterKeyForTesting", crypto)
	if err != nil {
		return OneShot{}, err
	}
	factory := appencryption.NewSessionFactory(&appencryption.Config{
		Service: "bench", Product: "bench", Policy: appencryption.NewCryptoPolicy(),
	}, persistence.NewMemoryMetastore(), master, crypto, appencryption.WithMetrics(false))
	session, err := factory.GetSession("subject")
	if err != nil {
		factory.Close()
		return OneShot{}, err
	}
	ctx := context.Background()
	return OneShot{
		Name: "Asherah",
		Note: "a data key a message in locked memory; session and intermediate key cached; metastore in memory, static master key; the row as JSON",
		Seal: func(_, plaintext []byte) ([]byte, error) {
			row, err := session.Encrypt(ctx, bytes.Clone(plaintext))
			if err != nil {
				return nil, err
			}
			return json.Marshal(row)
		},
		Open: func(_, sealed []byte) ([]byte, error) {
			var row appencryption.DataRowRecord
			if err := json.Unmarshal(sealed, &row); err != nil {
				return nil, err
			}
			return session.Decrypt(ctx, row)
		},
		Close: func() {
			session.Close()
			factory.Close()
			master.Close()
		},
	}, nil
}
