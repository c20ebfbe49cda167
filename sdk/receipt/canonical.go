package receipt

// appendString appends s as a JSON string in the form of RFC 8785 section
// 3.2.2.2: only the quote, the backslash and the controls are escaped, each in
// one way. s must be valid UTF-8.
func appendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	plain := 0 // where what needs no escape begins
	for i := range len(s) {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[plain:i]...)
		plain = i + 1
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\b':
			dst = append(dst, `\b`...)
		case c == '\t':
			dst = append(dst, `\t`...)
		case c == '\n':
			dst = append(dst, `\n`...)
		case c == '\f':
			dst = append(dst, `\f`...)
		case c == '\r':
			dst = append(dst, `\r`...)
		default:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&0xf])
		}
	}
	dst = append(dst, s[plain:]...)
	return append(dst, '"')
}

// isPrintable reports whether s has only the printable characters of ASCII,
// the space included.
func isPrintable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// isCode reports whether s is 1 to limit bytes of [a-z0-9._-].
func isCode(s string, limit int) bool {
	if s == "" || len(s) > limit {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// scanner reads JSON in canonical form: no spaces, and strings as appendString
// writes them. Once something is not as asked for, it fails for good. It is
// strict enough to find the members of a document; that a document is the one
// spelling of its content is for the caller to check by encoding it again.
type scanner struct {
	rest   []byte
	failed bool
}

// literal consumes s.
func (c *scanner) literal(s string) {
	if c.failed || len(c.rest) < len(s) || string(c.rest[:len(s)]) != s {
		c.failed = true
		return
	}
	c.rest = c.rest[len(s):]
}

// next reports whether b comes next, and consumes it if so.
func (c *scanner) next(b byte) bool {
	if c.failed || len(c.rest) == 0 || c.rest[0] != b {
		return false
	}
	c.rest = c.rest[1:]
	return true
}

// member reports whether a member of that name comes next, and consumes all of
// it but its value if so.
func (c *scanner) member(name string) bool {
	n := len(name)
	if c.failed || len(c.rest) < n+3 || c.rest[0] != '"' || string(c.rest[1:n+1]) != name || string(c.rest[n+1:n+3]) != `":` {
		return false
	}
	c.rest = c.rest[n+3:]
	return true
}

// string consumes a string and returns what it says.
func (c *scanner) string() string {
	c.literal(`"`)
	if c.failed {
		return ""
	}
	for i, b := range c.rest {
		switch {
		case b == '"':
			s := string(c.rest[:i])
			c.rest = c.rest[i+1:]
			return s
		case b == '\\':
			return c.escapedString(i)
		case b < 0x20:
			c.failed = true
			return ""
		}
	}
	c.failed = true
	return ""
}

// object consumes an object, without looking into it more than to find its end,
// and returns its bytes.
func (c *scanner) object() []byte {
	start := c.rest
	c.literal("{")
	depth := 1
	for !c.failed {
		switch {
		case c.next('{'):
			depth++
		case c.next('}'):
			if depth--; depth == 0 {
				n := len(start) - len(c.rest)
				return start[:n:n]
			}
		case len(c.rest) == 0:
			c.failed = true
		case c.rest[0] == '"':
			c.string()
		default:
			c.rest = c.rest[1:]
		}
	}
	return nil
}

// escapedString is string from the first escape on, at i.
func (c *scanner) escapedString(i int) string {
	s := append([]byte(nil), c.rest[:i]...)
	c.rest = c.rest[i:]
	for len(c.rest) > 1 {
		b := c.rest[0]
		switch {
		case b == '"':
			c.rest = c.rest[1:]
			return string(s)
		case b < 0x20:
			c.failed = true
			return ""
		case b != '\\':
			s = append(s, b)
			c.rest = c.rest[1:]
			continue
		}
		b, c.rest = c.rest[1], c.rest[2:]
		switch b {
		case '"', '\\':
			s = append(s, b)
		case 'b':
			s = append(s, '\b')
		case 't':
			s = append(s, '\t')
		case 'n':
			s = append(s, '\n')
		case 'f':
			s = append(s, '\f')
		case 'r':
			s = append(s, '\r')
		default: // \u00.. of other controls: nothing of ours has any
			c.failed = true
			return ""
		}
	}
	if c.next('"') {
		return string(s)
	}
	c.failed = true
	return ""
}
