// Package keys is the heart of keyd: the hierarchy of keys, the lives of
// subjects, the leases of blob keys, and the transaction that destroys a key
// and logs it. It declares the Store and the KMS that it stands on.
//
// The life of a key. A subject's first Seal makes its DEK, create-if-absent in
// one transaction on the subject's row (lease.go). Every lease is issued from
// one snapshot of the store; no DEK is kept in memory. DestroyKey turns the
// subject's row into a tombstone, overwrites the wrapped keys and appends the
// statement to the ledger in one transaction (destroy.go), which the anchor
// covers before the call is answered (group.go).
package keys
