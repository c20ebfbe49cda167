package sdk

import "lethe/sdk/envelope"

// Seams for the tests of package sdk_test.

// Leases returns how many leases the table holds, and how many are known,
// those that were evicted and are still in use included.
func (c *Client) Leases() (mapped, known int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	c.registry.each(func(*lease) { n++ })
	return c.registry.mapped, n
}

// CacheBytes returns what the leases of the table are counted for.
func (c *Client) CacheBytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.registry.bytes
}

// Sealers and Openers return the keys that are in the table.
func (c *Client) Sealers() (all []*envelope.Sealer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.registry.each(func(l *lease) {
		if l.sealer != nil {
			all = append(all, l.sealer)
		}
	})
	return all
}

func (c *Client) Openers() (all []*envelope.Opener) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.registry.each(func(l *lease) {
		if l.opener != nil {
			all = append(all, l.opener)
		}
	})
	return all
}

// Flights returns how many calls for keys are under way.
func (c *Client) Flights() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.flights)
}

// Settled reports whether the keeper has followed the clock, and no call of its own
// is under way.
func (c *Client) Settled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return true
	}
	settled := true
	c.registry.each(func(l *lease) { settled = settled && !l.renewing && !l.asking })
	_, boot := c.clock.Now()
	return settled && len(c.wake) == 0 && c.nextLook > boot
}

var FromRPC = fromRPC
