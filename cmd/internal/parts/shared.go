package parts

import (
	"strings"

	"golang.org/x/sys/unix"

	"lethe/keyd"
)

// shared says which parts lie on the store's file system. One backup, snapshot
// or rollback of that takes them all: an anchor that goes back together with
// the store does not notice, and roots that lie beside the store in a backup
// open it. That they lie on different ones proves nothing.
func (o Options) shared() string {
	var beside []string
	if o.KMS == KMSLocal && sameFileSystem(o.Store, o.KMSFile) {
		beside = append(beside, "the roots")
	}
	if dir := o.anchorDir(); dir != "" && sameFileSystem(o.Store, dir) {
		beside = append(beside, "the anchor")
	}
	return strings.Join(beside, " and ")
}

func sameFileSystem(a, b string) bool {
	var x, y unix.Stat_t
	return unix.Stat(a, &x) == nil && unix.Stat(b, &y) == nil && x.Dev == y.Dev
}

// sharedAnchor tells operators, with where the anchor is, what shares the
// store's file system.
type sharedAnchor struct {
	keyd.Anchor
	shared string
}

func (a *sharedAnchor) Domain() (code, description string) {
	code, description = a.Anchor.Domain()
	return code, description + "; on the store's file system: " + a.shared
}

// Exclusive is the anchor's own, which embedding hides: without it a keyd that
// was killed waits when it starts again.
func (a *sharedAnchor) Exclusive() bool {
	own, ok := a.Anchor.(interface{ Exclusive() bool })
	return ok && own.Exclusive()
}
