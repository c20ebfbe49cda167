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
//
// The life of an epoch. One keyd does the duties for all (duty.go). It has the
// KMS make the next root, gives every tenant its KEK and opens the epoch
// (turn.go); carries every live key over (rewrap.go); waits until all other
// keyds have seen that (heartbeat.go); verifies it (scan.go); drops the rows,
// disables the root, lets it soak, verifies again, has it destroyed, and closes
// the epoch when the KMS says that it is (retire.go). What was destroyed in the
// epoch is final then (receipts.go).
package keys
