// Package awskms is a KMS in AWS Key Management Service: each root is a
// symmetric customer-managed key whose material AWS made, named by its ARN.
//
// Keys are wrapped with Encrypt and Decrypt under the encryption context
//
//	lethe:kek     "tenant" or "system"
//	lethe:tenant  the tenant; absent for the system KEK
//	lethe:epoch   the epoch, in decimal
//
// so that CloudTrail shows which tenant's KEK was used when, and a key policy
// can restrict it. A wrapped key travels to AWS and back inside TLS; an
// endpoint without TLS is refused unless it is on this machine. The SDK's own
// copies of what was sent cannot be wiped.
//
// # State
//
// Only DescribeKey is believed about a root's state: what the other calls
// answer says too little. AWS answers AccessDeniedException for want of permission,
// some emulators of it for a key that is pending deletion.
//
// AWS never says that a key was destroyed. It answers NotFoundException for a
// deleted key as for one that never was. Describe therefore tells
// keys.RootDestroyed on this evidence only, all of it:
//
//  1. DescribeKey once showed this very key (by ARN) as PendingDeletion with
//     a date, and [Evidence] remembers it;
//  2. that date has passed, by the clock of AWS (the Date of its answer) and by
//     this host's;
//  3. DescribeKey answers NotFoundException for the key;
//  4. DescribeKey then answers for a witness, which is another key of the same
//     account and region, asked with the same credentials and endpoint;
//  5. DescribeKey answers NotFoundException for the key once more.
//
// Without 1 or 2 the error is keys.ErrRootUnknown; without a witness that
// answers it is keys.ErrKMSUnavailable. AccessDeniedException is keys.ErrKMSDenied
// and no evidence at all, so a policy must allow kms:DescribeKey on the keys of
// the account as a whole: one that is conditional on a tag or an alias denies it
// for a key that has gone. A witness is whatever other root this KMS has used or
// described since it was made, or Options.Witness.
//
// Evidence must outlive keyd: the waiting period is a week at the least.
//
// # Limits
//
// AWS propagates a change of state within minutes; a root may work that long
// after Disable. AWS deletes a key up to 24 hours after its date, which
// [KMS.Waiting] includes. CreateKey has no idempotency token: what a request made is
// found again by its alias, and a key that did not come to have one is left, used by
// nobody, to be found by its tags. Multi-Region keys
// are refused, since a replica outlives its primary, and so are keys whose material was
// imported or lies in an external or CloudHSM key store, since its keeper may
// have another copy.
package awskms

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/kms"
	"github.com/aws/aws-sdk-go-v2/service/kms/types"

	"lethe/keyd/internal/keys"
)

const (
	// FinalBasis is the word by which receipts say how far the destruction of
	// a root reaches: as far as AWS's own.
	FinalBasis = "aws-kms"

	kind       = "awskms"
	maxKey     = 64
	maxWrapped = 6144 // the most that Decrypt takes

	// late is how long after its date AWS may delete a key.
	late = 24 * time.Hour
	// newKeyTries bounds how often Create asks for a key that AWS has just
	// made and does not know everywhere yet.
	newKeyTries = 6
	// tidyLimit is for how long Create looks after what it could not finish,
	// when its time is over too.
	tidyLimit = 2 * time.Second
)

// Errors of this package. Both say that a root must not be used here.
var (
	// ErrMultiRegion: the key is a multi-Region key.
	ErrMultiRegion = errors.New("multi-Region keys are refused")
	// ErrOrigin: AWS did not make the key's material, or does not keep it alone.
	ErrOrigin = errors.New("keys whose material lies elsewhere are refused")
)

// Options says which AWS KMS to use and how. The zero value uses the SDK's
// default chain for region, endpoint and credentials.
type Options struct {
	Region      string
	Endpoint    string // URL; https unless its host is a loopback address
	Profile     string // of the shared configuration files
	Credentials aws.CredentialsProvider

	// WaitingDays is the waiting period of ScheduleDestruction, 7 to 30; zero is 7.
	WaitingDays int
	// Deployment tags new keys as lethe:deployment and is part of their alias,
	// alias/lethe/<deployment>/epoch-<n>-<request>. 1 to 64 bytes of
	// [a-zA-Z0-9_-]; empty is "default".
	Deployment string
	// Tags are put on new keys beside lethe:deployment and lethe:epoch.
	Tags map[string]string
	// Policy is the key policy of new keys, in JSON; empty is the account's default.
	Policy string

	// Attempts is how often a call is tried, the first time included; zero is
	// 4. Between attempts it waits with exponential backoff and jitter, at
	// most MaxBackoff, zero being 5 s. AttemptTimeout bounds one attempt; zero
	// is 10 s. The caller's context bounds the call.
	Attempts       int
	MaxBackoff     time.Duration
	AttemptTimeout time.Duration
	// Adaptive also limits the rate of calls on this side while AWS throttles.
	Adaptive bool

	// Evidence remembers pending deletions. Nil keeps them in memory: a root
	// whose deletion ends after keyd was restarted is then never told to be
	// destroyed.
	Evidence Evidence
	// Witness is the ARN of a key to ask besides the other roots.
	Witness string
	// Clock tells the time; nil is time.Now.
	Clock func() time.Time
}

// KMS is a client of AWS KMS. It is safe for concurrent use.
type KMS struct {
	client   *kms.Client
	o        Options
	evidence Evidence
	clock    func() time.Time

	mu        sync.Mutex
	witnesses []string // ARNs that answered, newest first
	recorded  map[string]time.Time
}

var _ keys.KMS = (*KMS)(nil)

var deploymentName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// New loads the SDK's configuration. It does not call KMS.
func New(ctx context.Context, o Options) (*KMS, error) {
	if o.WaitingDays == 0 {
		o.WaitingDays = 7
	}
	if o.Deployment == "" {
		o.Deployment = "default"
	}
	if o.Attempts == 0 {
		o.Attempts = 4
	}
	if o.MaxBackoff == 0 {
		o.MaxBackoff = 5 * time.Second
	}
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = 10 * time.Second
	}
	if o.Evidence == nil {
		o.Evidence = &memory{at: map[string]time.Time{}}
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	switch {
	case o.WaitingDays < 7 || o.WaitingDays > 30:
		return nil, errors.New("AWS KMS: the waiting period is 7 to 30 days")
	case !deploymentName.MatchString(o.Deployment):
		return nil, errors.New("AWS KMS: the deployment's name is 1 to 64 bytes of [a-zA-Z0-9_-]")
	case o.Attempts < 1 || o.MaxBackoff < 0 || o.AttemptTimeout < 0:
		return nil, errors.New("AWS KMS: attempts, backoff and timeout must be positive")
	}

	var load []func(*config.LoadOptions) error
	if o.Region != "" {
		load = append(load, config.WithRegion(o.Region))
	}
	if o.Profile != "" {
		load = append(load, config.WithSharedConfigProfile(o.Profile))
	}
	if o.Credentials != nil {
		load = append(load, config.WithCredentialsProvider(o.Credentials))
	}
	cfg, err := config.LoadDefaultConfig(ctx, load...)
	if err != nil {
		return nil, fmt.Errorf("AWS KMS: configuration: %w", err)
	}
	if cfg.Region == "" {
		return nil, errors.New("AWS KMS: no region is configured")
	}
	o.Region = cfg.Region

	client := kms.NewFromConfig(cfg, func(k *kms.Options) {
		if o.Endpoint != "" {
			k.BaseEndpoint = aws.String(o.Endpoint)
		}
		k.Retryer = o.retryer()
		k.HTTPClient = o.httpClient(cfg.HTTPClient)
		// Requests hold keys: whatever the environment says, none is logged.
		k.ClientLogMode = 0
	})
	if endpoint := client.Options().BaseEndpoint; endpoint != nil {
		if err := checkEndpoint(*endpoint); err != nil {
			return nil, err
		}
	}
	k := &KMS{client: client, o: o, evidence: o.Evidence, clock: o.Clock, recorded: map[string]time.Time{}}
	if o.Witness != "" {
		if err := k.checkID(o.Witness); err != nil {
			return nil, fmt.Errorf("AWS KMS: witness: %w", err)
		}
	}
	return k, nil
}

func (o Options) retryer() aws.Retryer {
	standard := func(s *retry.StandardOptions) {
		s.MaxAttempts = o.Attempts
		s.MaxBackoff = o.MaxBackoff
	}
	if o.Adaptive {
		return retry.NewAdaptiveMode(func(a *retry.AdaptiveModeOptions) {
			a.StandardOptions = append(a.StandardOptions, standard)
		})
	}
	return retry.NewStandard(standard)
}

// httpClient is the SDK's client, with the proxy and the certificates that the
// configuration asks for, bounded in time; and it follows no redirect, which
// would take a key to another host.
func (o Options) httpClient(configured aws.HTTPClient) aws.HTTPClient {
	b, ok := configured.(*awshttp.BuildableClient)
	if !ok {
		b = awshttp.NewBuildableClient()
	}
	return &http.Client{
		Transport:     b.GetTransport(),
		Timeout:       o.AttemptTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func checkEndpoint(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" {
		return errors.New("AWS KMS: the endpoint is not a URL")
	}
	if u.Scheme == "https" {
		return nil
	}
	ip, err := netip.ParseAddr(u.Hostname())
	if u.Scheme == "http" && (u.Hostname() == "localhost" || err == nil && ip.IsLoopback()) {
		return nil
	}
	return errors.New("AWS KMS: an endpoint that is not on this machine must be https: keys travel to it")
}

// Kind returns "awskms".
func (k *KMS) Kind() string { return kind }

// FinalBasis returns the constant of that name.
func (k *KMS) FinalBasis() string { return FinalBasis }

// Waiting returns the waiting period and the 24 hours by which AWS may be late.
func (k *KMS) Waiting() time.Duration {
	return time.Duration(k.o.WaitingDays)*24*time.Hour + late
}

func encryptionContext(ec keys.EncryptionContext) map[string]string {
	m := map[string]string{
		"lethe:kek":   "system",
		"lethe:epoch": strconv.FormatUint(uint64(ec.Epoch), 10),
	}
	// AWS has no use for an empty value.
	if ec.Tenant != "" {
		m["lethe:kek"], m["lethe:tenant"] = "tenant", ec.Tenant
	}
	return m
}

// Wrap encrypts a key of 1 to 64 bytes.
func (k *KMS) Wrap(ctx context.Context, rootID string, key []byte, ec keys.EncryptionContext) ([]byte, error) {
	if len(key) < 1 || len(key) > maxKey {
		return nil, fmt.Errorf("AWS KMS: a key to wrap has 1 to %d bytes", maxKey)
	}
	if err := k.check(ctx, rootID); err != nil {
		return nil, err
	}
	out, err := k.client.Encrypt(ctx, &kms.EncryptInput{
		KeyId:             &rootID,
		Plaintext:         key,
		EncryptionContext: encryptionContext(ec),
	})
	if err != nil {
		return nil, k.useError(ctx, "Encrypt", rootID, err)
	}
	if aws.ToString(out.KeyId) != rootID || len(out.CiphertextBlob) == 0 || len(out.CiphertextBlob) > maxWrapped {
		return nil, malformed("Encrypt")
	}
	k.answered(rootID)
	return out.CiphertextBlob, nil
}

// Unwrap undoes Wrap.
func (k *KMS) Unwrap(ctx context.Context, rootID string, wrapped []byte, ec keys.EncryptionContext) ([]byte, error) {
	if err := k.check(ctx, rootID); err != nil {
		return nil, err
	}
	if len(wrapped) == 0 || len(wrapped) > maxWrapped {
		return nil, fmt.Errorf("AWS KMS: %w: the wrapped key has an impossible length", keys.ErrKMSDenied)
	}
	out, err := k.client.Decrypt(ctx, &kms.DecryptInput{
		KeyId:             &rootID,
		CiphertextBlob:    wrapped,
		EncryptionContext: encryptionContext(ec),
	})
	if err != nil {
		return nil, k.useError(ctx, "Decrypt", rootID, err)
	}
	if aws.ToString(out.KeyId) != rootID || len(out.Plaintext) == 0 || len(out.Plaintext) > maxKey {
		clear(out.Plaintext)
		return nil, malformed("Decrypt")
	}
	k.answered(rootID)
	return out.Plaintext, nil
}

// Create makes a key, names it by an alias that holds the request, and waits
// until AWS describes it as enabled; or finds what has that alias already. A key
// that was made and did not get its alias is scheduled for deletion; where that
// fails too, it is found by its tags, and used by nobody.
func (k *KMS) Create(ctx context.Context, epoch uint32, request keys.RootRequest) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", unavailable("CreateKey", err)
	}
	number := strconv.FormatUint(uint64(epoch), 10)
	alias := fmt.Sprintf("alias/lethe/%s/epoch-%s-%x", k.o.Deployment, number, request)
	if rootID, err := k.aliased(ctx, alias); err != nil || rootID != "" {
		return rootID, err
	}
	tags := []types.Tag{
		{TagKey: aws.String("lethe:deployment"), TagValue: &k.o.Deployment},
		{TagKey: aws.String("lethe:epoch"), TagValue: &number},
	}
	for name, value := range k.o.Tags {
		tags = append(tags, types.Tag{TagKey: aws.String(name), TagValue: aws.String(value)})
	}
	in := &kms.CreateKeyInput{
		Description: aws.String("lethe: root of epoch " + number),
		KeySpec:     types.KeySpecSymmetricDefault,
		KeyUsage:    types.KeyUsageTypeEncryptDecrypt,
		Origin:      types.OriginTypeAwsKms,
		MultiRegion: aws.Bool(false),
		Tags:        tags,
	}
	if k.o.Policy != "" {
		in.Policy = &k.o.Policy
	}
	out, err := k.client.CreateKey(ctx, in)
	if err != nil {
		return "", k.callError(ctx, "CreateKey", err)
	}
	if out.KeyMetadata == nil || k.checkID(aws.ToString(out.KeyMetadata.Arn)) != nil {
		return "", malformed("CreateKey")
	}
	rootID := *out.KeyMetadata.Arn
	// KMS may not know the key yet where it makes the alias.
	err = k.settle(ctx, func() error {
		_, err := k.client.CreateAlias(ctx, &kms.CreateAliasInput{AliasName: &alias, TargetKeyId: &rootID})
		if err != nil {
			return k.callError(ctx, "CreateAlias", err)
		}
		return nil
	})
	if err != nil {
		// An answer was lost, or another process has made a key for this request.
		after, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyLimit)
		defer cancel()
		named, describeErr := k.aliased(after, alias)
		if describeErr == nil && named != rootID {
			k.abandon(after, rootID) // not one that may have the alias
		}
		if named == "" {
			return "", err
		}
		rootID = named
	}
	err = k.settle(ctx, func() error {
		d, err := k.Describe(ctx, rootID)
		if err == nil && d.State != keys.RootEnabled {
			err = fmt.Errorf("AWS KMS: %w: the new key is not enabled", keys.ErrKMSUnavailable)
		}
		return err
	})
	if err != nil {
		return "", err // and the request, repeated, finds it
	}
	return rootID, nil
}

// aliased returns the ARN of the key that has an alias, or "" if none has.
func (k *KMS) aliased(ctx context.Context, alias string) (string, error) {
	out, err := k.client.DescribeKey(ctx, &kms.DescribeKeyInput{KeyId: &alias})
	switch {
	case code(err) == "NotFoundException":
		return "", nil
	case err != nil:
		return "", k.callError(ctx, "DescribeKey", err)
	case out.KeyMetadata == nil || k.checkID(aws.ToString(out.KeyMetadata.Arn)) != nil:
		return "", malformed("DescribeKey")
	}
	if _, err := state(out.KeyMetadata); err != nil {
		return "", err
	}
	return *out.KeyMetadata.Arn, nil
}

// settle repeats fn while it fails because AWS does not know a new key yet.
func (k *KMS) settle(ctx context.Context, fn func() error) error {
	pause := min(100*time.Millisecond, k.o.MaxBackoff)
	for try := 1; ; try++ {
		err := fn()
		if !errors.Is(err, keys.ErrRootUnknown) {
			return err
		}
		if try == newKeyTries {
			// It was made: unknown is not the word.
			return fmt.Errorf("AWS KMS: %w: the new key is not known yet", keys.ErrKMSUnavailable)
		}
		select {
		case <-ctx.Done():
			return unavailable("CreateKey", ctx.Err())
		case <-time.After(pause):
			pause = min(2*pause, k.o.MaxBackoff)
		}
	}
}

// abandon schedules the deletion of a key that Create made and that has no alias.
func (k *KMS) abandon(ctx context.Context, rootID string) {
	// What fails here has failed above as well, and Create reports that.
	_, _ = k.client.ScheduleKeyDeletion(ctx, &kms.ScheduleKeyDeletionInput{
		KeyId: &rootID, PendingWindowInDays: aws.Int32(int32(k.o.WaitingDays)),
	})
}

// Disable disables the key, and succeeds once AWS describes it so. A key that is
// pending deletion stays so.
func (k *KMS) Disable(ctx context.Context, rootID string) error {
	if err := k.check(ctx, rootID); err != nil {
		return err
	}
	var d keys.Root
	_, err := k.client.DisableKey(ctx, &kms.DisableKeyInput{KeyId: &rootID})
	if err != nil {
		d, err = k.stateAfter(ctx, "DisableKey", rootID, err)
	} else {
		d, err = k.Describe(ctx, rootID)
	}
	switch {
	case err != nil:
		return err
	case d.State == keys.RootDestroyed:
		return notUsable(rootID)
	case d.State == keys.RootEnabled:
		return changing("DisableKey", rootID)
	}
	return nil
}

// ScheduleDestruction schedules the deletion of the key. For a key that is
// pending or destroyed it returns the date of its deletion.
func (k *KMS) ScheduleDestruction(ctx context.Context, rootID string) (time.Time, error) {
	// Before: the key may be one that is refused here, or be pending already.
	d, err := k.Describe(ctx, rootID)
	if err == nil && (d.State == keys.RootEnabled || d.State == keys.RootDisabled) {
		_, err = k.client.ScheduleKeyDeletion(ctx, &kms.ScheduleKeyDeletionInput{
			KeyId: &rootID, PendingWindowInDays: aws.Int32(int32(k.o.WaitingDays)),
		})
		if err != nil {
			d, err = k.stateAfter(ctx, "ScheduleKeyDeletion", rootID, err)
		} else {
			d, err = k.Describe(ctx, rootID)
		}
	}
	if err != nil {
		return time.Time{}, err
	}
	if d.State != keys.RootPending && d.State != keys.RootDestroyed {
		return time.Time{}, changing("ScheduleKeyDeletion", rootID)
	}
	return d.DestroyAt, nil
}

// Cancel cancels the deletion of the key and enables it.
func (k *KMS) Cancel(ctx context.Context, rootID string) error {
	d, err := k.Describe(ctx, rootID)
	if err != nil {
		return err
	}
	if d.State == keys.RootPending {
		_, err := k.client.CancelKeyDeletion(ctx, &kms.CancelKeyDeletionInput{KeyId: &rootID})
		if err != nil {
			if d, err = k.stateAfter(ctx, "CancelKeyDeletion", rootID, err); err != nil {
				return err
			}
		} else {
			d.State = keys.RootDisabled // as AWS leaves it
		}
	}
	if d.State == keys.RootDisabled {
		if _, err := k.client.EnableKey(ctx, &kms.EnableKeyInput{KeyId: &rootID}); err != nil {
			if _, err = k.stateAfter(ctx, "EnableKey", rootID, err); err != nil {
				return err
			}
		}
		if d, err = k.Describe(ctx, rootID); err != nil {
			return err
		}
	}
	switch d.State {
	case keys.RootEnabled:
		return nil
	case keys.RootDestroyed:
		return notUsable(rootID)
	}
	return changing("EnableKey", rootID)
}

// Describe tells the key's state; see the package's comment for what it takes
// to call a root destroyed. DestroyAt stays set then.
func (k *KMS) Describe(ctx context.Context, rootID string) (keys.Root, error) {
	if err := k.check(ctx, rootID); err != nil {
		return keys.Root{}, err
	}
	m, _, err := k.describeKey(ctx, rootID)
	if err != nil {
		if code(err) == "NotFoundException" {
			return k.destroyed(ctx, rootID)
		}
		return keys.Root{}, k.callError(ctx, "DescribeKey", err)
	}
	d, err := state(m)
	if err != nil {
		return keys.Root{}, err
	}
	if d.State == keys.RootPending {
		err = k.saw(ctx, rootID, d.DestroyAt)
	} else {
		err = k.forget(ctx, rootID)
	}
	if err != nil {
		return keys.Root{}, err
	}
	k.answered(rootID)
	return d, nil
}

// describeKey returns what AWS says about exactly this key, and AWS's time. Its
// error is the SDK's, or one for which code is empty.
func (k *KMS) describeKey(ctx context.Context, rootID string) (*types.KeyMetadata, time.Time, error) {
	out, err := k.client.DescribeKey(ctx, &kms.DescribeKeyInput{KeyId: &rootID})
	if err != nil {
		return nil, time.Time{}, err
	}
	if out.KeyMetadata == nil || aws.ToString(out.KeyMetadata.Arn) != rootID {
		return nil, time.Time{}, malformed("DescribeKey")
	}
	now, _ := awsmiddleware.GetServerTime(out.ResultMetadata)
	return out.KeyMetadata, now, nil
}

func state(m *types.KeyMetadata) (keys.Root, error) {
	d := keys.Root{ID: *m.Arn}
	switch {
	case aws.ToBool(m.MultiRegion) || m.KeyState == types.KeyStatePendingReplicaDeletion:
		return keys.Root{}, fmt.Errorf("AWS KMS: %s: %w", d.ID, ErrMultiRegion)
	case m.Origin != types.OriginTypeAwsKms:
		return keys.Root{}, fmt.Errorf("AWS KMS: %s: %w: its origin is %s", d.ID, ErrOrigin, m.Origin)
	}
	switch m.KeyState {
	case types.KeyStateEnabled:
		d.State = keys.RootEnabled
	case types.KeyStateDisabled:
		d.State = keys.RootDisabled
	case types.KeyStatePendingDeletion:
		if m.DeletionDate == nil || m.DeletionDate.IsZero() {
			return keys.Root{}, malformed("DescribeKey")
		}
		// The date is a decimal fraction on the wire and a float in the SDK.
		d.State, d.DestroyAt = keys.RootPending, m.DeletionDate.Round(time.Millisecond).UTC()
	default: // being made or updated, or cut off from its key store
		return keys.Root{}, changing("DescribeKey", d.ID)
	}
	return d, nil
}

// destroyed is Describe of a key that AWS has just said it does not find.
func (k *KMS) destroyed(ctx context.Context, rootID string) (keys.Root, error) {
	unknown := func(why string) (keys.Root, error) {
		return keys.Root{}, fmt.Errorf("AWS KMS: %s: %w; %s", rootID, keys.ErrRootUnknown, why)
	}
	at, ok, err := k.evidence.Seen(ctx, rootID)
	if err != nil {
		return keys.Root{}, unavailable("evidence", err)
	}
	if !ok {
		return unknown("it was never seen pending deletion")
	}
	if !k.clock().After(at) {
		return unknown("the date of its deletion has not come")
	}
	now, err := k.witness(ctx, rootID)
	if err != nil {
		return keys.Root{}, err
	}
	if now.IsZero() {
		return keys.Root{}, fmt.Errorf("AWS KMS: %w: its answer has no date", keys.ErrKMSUnavailable)
	}
	if !now.After(at) {
		return unknown("by the clock of AWS the date of its deletion has not come")
	}
	_, _, err = k.describeKey(ctx, rootID)
	switch {
	case err == nil:
		return keys.Root{}, changing("DescribeKey", rootID)
	case code(err) != "NotFoundException":
		return keys.Root{}, k.callError(ctx, "DescribeKey", err)
	}
	return keys.Root{ID: rootID, State: keys.RootDestroyed, DestroyAt: at}, nil
}

// witness asks for other keys of the root's account until one is described,
// and returns AWS's time of that.
func (k *KMS) witness(ctx context.Context, rootID string) (time.Time, error) {
	account, _, _ := strings.Cut(rootID, ":key/")
	err := fmt.Errorf("AWS KMS: %w: no other key of the account is known to ask for", keys.ErrKMSUnavailable)
	for _, id := range k.candidates() {
		if id == rootID || !strings.HasPrefix(id, account+":key/") {
			continue
		}
		_, now, e := k.describeKey(ctx, id)
		if e == nil {
			return now, nil
		}
		err = k.callError(ctx, "DescribeKey", e)
		if code(e) != "NotFoundException" {
			return time.Time{}, err
		}
		// A witness that has gone itself says nothing.
		err = fmt.Errorf("AWS KMS: %w: none of the keys asked for is found", keys.ErrKMSUnavailable)
	}
	return time.Time{}, err
}

func (k *KMS) candidates() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var ids []string
	if k.o.Witness != "" {
		ids = append(ids, k.o.Witness)
	}
	return append(ids, k.witnesses...)
}

// answered notes a key that AWS has just answered for.
func (k *KMS) answered(rootID string) {
	const keep = 4
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.witnesses) > 0 && k.witnesses[0] == rootID {
		return
	}
	w := []string{rootID}
	for _, id := range k.witnesses {
		if id != rootID && len(w) < keep {
			w = append(w, id)
		}
	}
	k.witnesses = w
}

var keyARN = regexp.MustCompile(`^arn:aws[a-z-]*:kms:([a-z0-9-]+):[0-9]{12}:key/(mrk-)?[0-9a-zA-Z-]{1,64}$`)

// checkID refuses what is not the ARN of a key of this region.
func (k *KMS) checkID(rootID string) error {
	m := keyARN.FindStringSubmatch(rootID)
	switch {
	case m == nil:
		return fmt.Errorf("%w: the id is not the ARN of a key", keys.ErrRootUnknown)
	case m[1] != k.o.Region:
		return fmt.Errorf("%w: it is of region %s, and this is %s", keys.ErrRootUnknown, m[1], k.o.Region)
	case m[2] != "":
		return ErrMultiRegion
	}
	return nil
}

func (k *KMS) check(ctx context.Context, rootID string) error {
	if err := k.checkID(rootID); err != nil {
		return fmt.Errorf("AWS KMS: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return unavailable("call", err)
	}
	return nil
}
