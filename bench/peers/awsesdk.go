package peers

import (
	"context"
	"crypto/rand"

	mpl "github.com/aws/aws-cryptographic-material-providers-library/releases/go/mpl/awscryptographymaterialproviderssmithygenerated"
	mpltypes "github.com/aws/aws-cryptographic-material-providers-library/releases/go/mpl/awscryptographymaterialproviderssmithygeneratedtypes"
	esdk "github.com/aws/aws-encryption-sdk/releases/go/encryption-sdk/awscryptographyencryptionsdksmithygenerated"
	esdktypes "github.com/aws/aws-encryption-sdk/releases/go/encryption-sdk/awscryptographyencryptionsdksmithygeneratedtypes"
)

// AWSESDK is the AWS Encryption SDK for Go with a raw AES keyring, so that no
// call leaves the process. Signed is its default: an ECDSA key a message.
func AWSESDK(signed bool) (OneShot, error) {
	ctx := context.Background()
	materials, err := mpl.NewClient(mpltypes.MaterialProvidersConfig{})
	if err != nil {
		return OneShot{}, err
	}
	key := make([]byte, 32)
	rand.Read(key) // never fails
	ring, err := materials.CreateRawAesKeyring(ctx, mpltypes.CreateRawAesKeyringInput{
		KeyName: "bench", KeyNamespace: "bench", WrappingKey: key,
		WrappingAlg: mpltypes.AesWrappingAlgAlgAes256GcmIv12Tag16,
	})
	if err != nil {
		return OneShot{}, err
	}
	client, err := esdk.NewClient(esdktypes.AwsEncryptionSdkConfig{})
	if err != nil {
		return OneShot{}, err
	}
	name, suite := "AWS Encryption SDK, unsigned", mpltypes.ESDKAlgorithmSuiteIdAlgAes256GcmHkdfSha512CommitKey
	if signed {
		name, suite = "AWS Encryption SDK, signed", mpltypes.ESDKAlgorithmSuiteIdAlgAes256GcmHkdfSha512CommitKeyEcdsaP384
	}
	return OneShot{
		Name: name,
		Note: "a data key a message, raw AES keyring in the process, committing suite, no caching manager",
		Seal: func(_, plaintext []byte) ([]byte, error) {
			out, err := client.Encrypt(ctx, esdktypes.EncryptInput{Plaintext: plaintext, Keyring: ring, AlgorithmSuiteId: &suite})
			if err != nil {
				return nil, err
			}
			return out.Ciphertext, nil
		},
		Open: func(_, sealed []byte) ([]byte, error) {
			out, err := client.Decrypt(ctx, esdktypes.DecryptInput{Ciphertext: sealed, Keyring: ring})
			if err != nil {
				return nil, err
			}
			return out.Plaintext, nil
		},
	}, nil
}
