package keys

import "context"

type principalKey struct{}

// WithPrincipal says by whom a call is made. What the call has logged names it.
func WithPrincipal(ctx context.Context, principal string) context.Context {
	return context.WithValue(ctx, principalKey{}, principal)
}

// principalOf is who makes a call; empty for keyd's own work, and in development.
func principalOf(ctx context.Context) string {
	principal, _ := ctx.Value(principalKey{}).(string)
	return principal
}
