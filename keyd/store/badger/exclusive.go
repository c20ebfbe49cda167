package badger

// Exclusive says that no other process has the store open: its directory is
// locked.
func (s *Store) Exclusive() bool { return true }
