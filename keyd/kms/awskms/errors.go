package awskms

import (
	"context"
	"errors"
	"fmt"

	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"

	"lethe/keyd/internal/keys"
)

// code returns the code of an error that KMS answered, or "" when there was no
// answer.
func code(err error) string {
	var api smithy.APIError
	if errors.As(err, &api) {
		return api.ErrorCode()
	}
	return ""
}

// passing are the codes of faults that pass, beside those of throttling.
// Answers of status 5xx do too, and those that are no answers of KMS's, such as
// a redirect.
var passing = map[string]bool{
	"KMSInternalException":       true,
	"KMSInvalidStateException":   true, // callers that can ask for the state do
	"DependencyTimeoutException": true,
	"KeyUnavailableException":    true,
	"InternalFailure":            true,
	"InternalFailureException":   true,
	"ServiceUnavailable":         true,
	"RequestTimeout":             true,
	"RequestTimeoutException":    true,
}

// callError maps the SDK's error to the sentinels of package keys. What KMS
// wrote beside its code is left out: it may quote the request.
func (k *KMS) callError(ctx context.Context, call string, err error) error {
	if ctx.Err() != nil {
		return unavailable(call, ctx.Err())
	}
	if errors.Is(err, keys.ErrKMSUnavailable) { // an answer that was not understood
		return err
	}
	c := code(err)
	if c == "" {
		return unavailable(call, err)
	}
	status, request := 0, "unknown"
	var resp *awshttp.ResponseError
	if errors.As(err, &resp) {
		status, request = resp.HTTPStatusCode(), resp.ServiceRequestID()
	}
	_, throttled := retry.DefaultThrottleErrorCodes[c]
	sentinel := keys.ErrKMSDenied
	switch {
	case throttled || passing[c] || status < 400 || status >= 500 || status == 429:
		sentinel = keys.ErrKMSUnavailable
	case c == "DisabledException":
		sentinel = keys.ErrRootNotUsable
	case c == "NotFoundException":
		sentinel = keys.ErrRootUnknown
	}
	return fmt.Errorf("AWS KMS: %w: %s answered %s (status %d, request %q)", sentinel, call, c, status, request)
}

// useError is callError for Encrypt and Decrypt: where the code leaves open
// whether the key's state is to blame, the key is described.
func (k *KMS) useError(ctx context.Context, call, rootID string, err error) error {
	var d keys.Root
	if code(err) == "AccessDeniedException" {
		// AWS denies for want of permission. An emulator may deny the use of a
		// key that is not enabled, and a policy that of a key that is gone.
		failed := k.callError(ctx, call, err)
		if d, err = k.Describe(ctx, rootID); err != nil || d.State == keys.RootEnabled {
			return failed
		}
	} else if d, err = k.stateAfter(ctx, call, rootID, err); err != nil {
		return err
	}
	if d.State == keys.RootEnabled {
		return changing(call, rootID)
	}
	return notUsable(rootID)
}

// stateAfter describes the key after a call that failed because of the key's
// state. When it failed for another reason, it returns the call's error.
func (k *KMS) stateAfter(ctx context.Context, call, rootID string, err error) (keys.Root, error) {
	switch code(err) {
	case "KMSInvalidStateException", "NotFoundException":
		return k.Describe(ctx, rootID)
	}
	return keys.Root{}, k.callError(ctx, call, err)
}

func unavailable(call string, err error) error {
	return fmt.Errorf("AWS KMS: %s: %w: %w", call, keys.ErrKMSUnavailable, err)
}

// malformed: KMS, or something in its place, answered what KMS does not.
func malformed(call string) error {
	return fmt.Errorf("AWS KMS: %w: the answer to %s is not one of KMS's", keys.ErrKMSUnavailable, call)
}

// changing: the key's state is in between, or not yet known everywhere.
func changing(call, rootID string) error {
	return fmt.Errorf("AWS KMS: %s: %w: the state of %s is changing", call, keys.ErrKMSUnavailable, rootID)
}

func notUsable(rootID string) error {
	return fmt.Errorf("AWS KMS: %s: %w", rootID, keys.ErrRootNotUsable)
}
