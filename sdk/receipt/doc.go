// Package receipt holds the formats of Lethe's ledger and verifies receipts
// offline: statements, inclusion proofs, checkpoints and the receipts that are
// made of them. It needs no network and no keyd.
//
// A receipt is to be verified against keys that came through another channel
// than the receipt itself:
//
//	keys, err := receipt.PinKeys(verifierKey)
//	...
//	v, err := receipt.Verify(saved, keys)
//	...
//	fmt.Print(v)
//
// The formats are those of RFC 6962 (tree and proofs), C2SP signed-note,
// tlog-checkpoint and tlog-proof, and RFC 8785 (JSON), each narrowed so that
// one meaning has one encoding.
package receipt
