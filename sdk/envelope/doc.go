// Package envelope is the format of sealed blobs and its cryptography: what
// bytes a blob consists of, how one is sealed under blob keys, and how it is
// opened or refused. It talks to nobody; the keys come from the caller.
//
// A [Sealer] seals under one key, under several of which all must live
// ([All]), or under several of which one suffices ([Any]). An [Opener] is made
// for the keys that the caller expects and refuses a blob that names others.
// Small data is sealed whole with [Sealer.Append]; large data as a stream with
// [Sealer.NewWriter].
//
// The primitives are XAES-256-GCM (C2SP), AES-256-GCM, HKDF-SHA-256 (RFC 5869)
// and HMAC-SHA-256 (RFC 2104), all from the standard library but for XAES's
// key derivation; streams have the segment framing of Tink's AES-GCM-HKDF.
// The format is specified in proto/SPEC.md, Part I.
//
// Sealing and opening in one piece works in FIPS 140-3 mode, enforced too.
// Streams need nonces that are counted, which GODEBUG=fips140=only refuses;
// there, making a stream fails.
package envelope
