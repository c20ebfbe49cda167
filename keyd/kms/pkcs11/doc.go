// Package pkcs11 is a KMS on a PKCS#11 token, such as a hardware security
// module: each root is an AES-256 key that the token made and never lets out.
//
// It needs cgo and the build tag pkcs11; without the tag this package is empty.
// The token must offer CKM_AES_KEY_GEN, CKM_AES_GCM with an IV of 12 bytes, and
// private data objects (CKO_DATA).
//
// # Objects
//
// A root is two kinds of objects on the token, both private, so that only who
// has logged in as its user sees them. The key is a CKO_SECRET_KEY whose CKA_ID
// is 16 random bytes and whose CKA_LABEL is the root's id: sensitive, not
// extractable, not modifiable, for encryption only, and not copyable where the
// token knows that attribute. Nobody can rename it or copy it, so a search for
// its CKA_ID that finds nothing says that it is gone. A key that the token did
// not make itself, or that may leave it, is refused with [ErrOrigin].
//
// PKCS#11 knows no disabled keys and no pending destruction. The state of a
// root, and the date, are therefore in a record beside the key: a CKO_DATA
// object of application "lethe root" whose label is the root's id. It is on the
// token and not in a file, so that every keyd sees one state and a restored
// disk brings no old one back. A record is never edited. A change creates the
// next one, which counts; then the old one goes. A crash between leaves both,
// and the higher number counts. Two processes that change one root at once both
// step back, with keys.ErrKMSUnavailable. Every call reads the record first, so
// a change holds for the next call of every keyd. The token itself would still
// use a disabled key for another program that has the PIN.
//
// # Wrapping
//
// A wrapped key is a version byte (1), the IV of 12 bytes, and what AES-GCM
// (NIST SP 800-38D) gives: 29 bytes more than the key. The IV is drawn by this
// package from crypto/rand; where a token puts its own in its place, that one
// is taken. The associated data are length-prefixed: a label, the root's id,
// the tenant; then the epoch. Tokens do not agree on how they refuse a
// ciphertext, and some do it with CKR_GENERAL_ERROR, which also means that the
// token is ill: the error is keys.ErrKMSDenied only if the same key then
// encrypts and decrypts something else.
//
// # Destruction
//
// The token does not count the waiting period; keyd does, by the clock of its
// host. The first call about the root that is not a Wrap or an Unwrap after the
// date calls C_DestroyObject. Describe tells keys.RootDestroyed on this
// evidence only, all of it:
//
//  1. the record says that destruction was scheduled, with a date;
//  2. the date has passed;
//  3. a search by the key's CKA_ID finds nothing;
//  4. after it, in the same session, the token reads out the record. It is a
//     private object like the key, so the session sees what a logged-in user
//     sees.
//
// The record then stays on the token for ever, as the tombstone. A key that is
// missing without that is keys.ErrRootUnknown, and so is a root without a
// record; both only if the token then shows its witness, a private data object
// that Create puts beside the first root. Without it the error is
// keys.ErrKMSUnavailable: a module whose token has just gone may answer a
// search with nothing found. A key that the restore of a token brings back
// beside its tombstone is destroyed again by the next call about it.
//
// # Limits
//
// Destroyed means destroyed on this token. Backups, clones and other members of
// a cluster are its keeper's; receipts say so with [FinalBasis]. A record is as
// durable as the token makes its objects. Who has the PIN can delete keys and
// records with other tools. A clock that is set forward ends a waiting period
// early. PKCS#11 calls cannot be interrupted: when a context ends, the caller
// goes on at once, while the call keeps one of the sessions until the library
// returns. Copies of keys inside the PKCS#11 library and its binding cannot be
// wiped.
//
// A wrong PIN is tried once and not again, and the last try that a token leaves
// is never used, since that would lock it.
package pkcs11

import "time"

const (
	// FinalBasis is the word by which receipts say how far the destruction of
	// a root reaches: as far as this token, not its keeper's backups.
	FinalBasis = "pkcs11-token"

	// DefaultWaiting is the waiting period when Options names none.
	DefaultWaiting = 7 * 24 * time.Hour
)
