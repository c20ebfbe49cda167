//go:build pkcs11

package pkcs11

import (
	"errors"
	"fmt"

	p11 "github.com/miekg/pkcs11"

	"lethe/keyd/internal/keys"
)

// Errors of this package. Those of a running KMS wrap one of keys.ErrKMS…
// besides, but for ErrOrigin, which says that a root must not be used here.
var (
	// ErrModule: the PKCS#11 library cannot be loaded.
	ErrModule = errors.New("the PKCS#11 module cannot be loaded")
	// ErrNoToken: the module has no token of that label, or another one than
	// before. Nothing follows from it about any root.
	ErrNoToken = errors.New("no such token")
	// ErrNoWitness: the token does not show the object that is there beside
	// every root: it has gone, was made anew, or is not the one meant. Nothing
	// follows from it about any root.
	ErrNoWitness = errors.New("the token shows no witness")
	// ErrAmbiguous: several tokens have the label.
	ErrAmbiguous = errors.New("several tokens have this label")
	// ErrUnsupported: the token lacks a mechanism that roots need, or does it
	// in another way.
	ErrUnsupported = errors.New("the token cannot do what roots need")
	// ErrPIN: the token refused the PIN, or a further wrong one might lock it.
	ErrPIN = errors.New("the PIN is refused")
	// ErrUnsafe: others can read the file of the PIN.
	ErrUnsafe = errors.New("unsafe permissions")
	// ErrOrigin: a root's key was not made by the token, or may leave it.
	ErrOrigin = errors.New("keys that were not made on the token, or may leave it, are refused")
	// ErrDamaged: a root's record is not one that this package wrote.
	ErrDamaged = errors.New("the root's record is damaged")
	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("closed")
)

// refusals are the answers by which a token says no. Every other one may pass.
var refusals = map[p11.Error]bool{
	p11.CKR_ACTION_PROHIBITED:          true,
	p11.CKR_ATTRIBUTE_READ_ONLY:        true,
	p11.CKR_ATTRIBUTE_SENSITIVE:        true,
	p11.CKR_ATTRIBUTE_TYPE_INVALID:     true,
	p11.CKR_ATTRIBUTE_VALUE_INVALID:    true,
	p11.CKR_TEMPLATE_INCOMPLETE:        true,
	p11.CKR_TEMPLATE_INCONSISTENT:      true,
	p11.CKR_MECHANISM_INVALID:          true,
	p11.CKR_MECHANISM_PARAM_INVALID:    true,
	p11.CKR_FUNCTION_NOT_SUPPORTED:     true,
	p11.CKR_FUNCTION_REJECTED:          true,
	p11.CKR_PIN_INCORRECT:              true,
	p11.CKR_PIN_INVALID:                true,
	p11.CKR_PIN_LEN_RANGE:              true,
	p11.CKR_PIN_EXPIRED:                true,
	p11.CKR_PIN_LOCKED:                 true,
	p11.CKR_USER_PIN_NOT_INITIALIZED:   true,
	p11.CKR_USER_TYPE_INVALID:          true,
	p11.CKR_SESSION_READ_ONLY:          true,
	p11.CKR_TOKEN_WRITE_PROTECTED:      true,
	p11.CKR_ENCRYPTED_DATA_INVALID:     true,
	p11.CKR_ENCRYPTED_DATA_LEN_RANGE:   true,
	p11.CKR_DATA_INVALID:               true,
	p11.CKR_DATA_LEN_RANGE:             true,
	p11.CKR_KEY_FUNCTION_NOT_PERMITTED: true,
}

// answered is the error of a call that the library answered with a code.
func answered(call string, err error) error {
	sentinel := keys.ErrKMSUnavailable
	if refusals[code(err)] {
		sentinel = keys.ErrKMSDenied
	}
	return fmt.Errorf("PKCS#11: %w: %s: %w", sentinel, call, err)
}

// code returns the code that the library answered, or CKR_OK when err holds none.
func code(err error) p11.Error {
	var c p11.Error
	errors.As(err, &c)
	return c
}

func unavailable(err error) error {
	return fmt.Errorf("PKCS#11: %w: %w", keys.ErrKMSUnavailable, err)
}

func rootError(rootID string, err error) error {
	return fmt.Errorf("PKCS#11: root %s: %w", rootID, err)
}
