// Package sdk seals a person's data before it is stored where nobody can
// delete it, and makes it unreadable for good when that person is erased.
//
// A [Client] leases keys from keyd, Lethe's key daemon. Each key belongs to one
// subject of one tenant, one class of data and one slice of time. Data is
// sealed with [Client.Seal], or [Client.SealWriter] if it is large, and can be
// read for as long as keyd leases the key again. [Client.DestroyKey] ends that:
// the copies stay where they are, as ciphertext.
//
// # Targets
//
// Whoever opens says whose data he expects, as he did who sealed it: a blob
// opens only for the tenant, subject, class and bound context that it was
// sealed for. Identifiers are compared byte for byte; nothing is trimmed,
// folded or normalised. Opening something that is not a blob is [ErrNotSealed];
// nothing is ever passed through.
//
// # Several people
//
// What is as much one person's as another's is sealed for a [Group]: of the
// policy [All] it is gone with the first of them, of [Any] it opens while one of
// them lives, and [Client.OpenGroup] reports who does not. That is how to treat
// what was derived from several: the only source erased, it is gone
// ([ErrErased]); some erased, it opens and [Report.Gone] has them, so that it can
// be made again without; none, it is left alone. Until it is made again, the
// survivors read in an Any blob also what the erased have contributed.
//
// The keys of a group are leased by one call, however many they are, and make
// one lease, which is revoked for All by the loss of one and for Any by the loss
// of the last. Reports and errors name subjects by their place in the Group.
//
// # Leases
//
// A key is kept for as long as its lease says, which the class's policy sets:
// a minute unless configured, never more than an hour. Within it, sealing and
// opening are local and ask nobody. The lease counts from before it was asked
// for, and is over when the wall clock or the boot-time clock says so,
// whichever comes first; a suspended machine finds its leases over when it
// wakes. The lease is checked before a key is used, again before an opened
// plaintext is released, and once a turn (at most 1 MiB) of a stream. A key is
// wiped when its lease is over, when it is revoked, and at [Client.Close]. Keys
// that are in use are renewed in the background before their leases end, and
// the key of the next bucket is asked for before it begins; for others neither
// is done.
//
// keyd streams revocations, so that clients stop within moments of a
// destruction. When the stream is down it is opened again from where it broke;
// until then, the leases bound how long a destroyed key stays in use.
//
// A class whose lease is zero has keyd asked for every operation.
//
// # Outages
//
// While keyd cannot be reached, leases in hand run out; after that Seal and
// Open fail with [ErrUnavailable]. There is no fallback: nothing is stored as
// plaintext, and no old key is kept. For how long an application goes on during
// an outage of keyd is therefore the lease, which is also for how long clients
// may go on reading after a destruction: one setting, chosen for both.
//
// # Errors
//
// Every outcome has its own sentinel, for errors.Is, and [OutcomeOf] tells it
// for any error. Errors of calls are of type *[Error]. None holds the id of a
// subject, a plaintext or a key.
//
//	ErrErased           the key was destroyed; the data is gone, for good
//	ErrPendingErasure   a destruction is scheduled, and can be cancelled
//	ErrExpired          the class's retention has ended for this data, for good
//	ErrHeld             a legal hold forbids the destruction
//	ErrUnknown          keyd never heard of it; no proof of an erasure
//	ErrInvalidArgument  the call is wrong, and was not sent if that shows
//	ErrDenied           the caller may not do this
//	ErrUnavailable      keyd, or what it stands on, cannot answer now: retry
//	ErrExhausted        a quota, a size or a rate: retry later, if at all
//	ErrConflict         something changed meanwhile: look again, then retry
//	ErrWrongSubject     the blob is somebody else's, dead or alive
//	ErrNotSealed        the bytes are not a blob
//	ErrCorrupt          the blob was changed
//	ErrTruncated        the blob ends too early
//	ErrWrongContext     the blob is sound, but bound to another context
//	ErrUnsupportedVersion  the blob is newer than this package
//
// Erased is never guessed: an error that keyd did not write in so many words is
// at most unavailable. When a caller's context ends, the error is
// ErrUnavailable and also the context's own.
//
// # Concurrency
//
// A Client is safe for concurrent use, and is meant to be shared: callers that
// miss the same key wait for one call, and one that gives up does not disturb
// the others. With a lease in hand, [Client.AppendSeal] and [Client.AppendOpen]
// neither lock nor allocate. A [Writer] or [Reader] is for one goroutine at a
// time; a [ReaderAt] is for any number.
//
// The number of keys kept, and the memory they are counted for, are bounded
// (see [WithCacheLimits]). A key that is given up for room is still used by the
// operations and streams that have it.
package sdk
