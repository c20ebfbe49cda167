package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/durationpb"

	"lethe/bench/measure"
	keydv1 "lethe/proto/keyd/v1"
)

const (
	tenant = "bench"
	class  = "memory"
)

// daemon is a process that serves gRPC on a Unix socket.
type daemon struct {
	cmd    *exec.Cmd
	target string
	conn   *grpc.ClientConn
	exited chan error
}

func startDaemon(cmd *exec.Cmd, socket string) (*daemon, error) {
	d := &daemon{cmd: cmd, target: "unix://" + socket, exited: make(chan error, 1)}
	log, err := os.OpenFile(socket+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { d.exited <- cmd.Wait() }()
	d.conn, err = grpc.NewClient(d.target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err == nil {
		err = d.waitServing()
	}
	if err != nil {
		said, _ := os.ReadFile(socket + ".log")
		cmd.Process.Kill()
		return nil, fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path), err, said)
	}
	return d, nil
}

func (d *daemon) waitServing() error {
	health := healthpb.NewHealthClient(d.conn)
	for begun := time.Now(); time.Since(begun) < 2*time.Minute; time.Sleep(2 * time.Millisecond) {
		select {
		case err := <-d.exited:
			return errors.Join(errors.New("it exited"), err)
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		res, err := health.Check(ctx, &healthpb.HealthCheckRequest{})
		cancel()
		if err == nil && res.Status == healthpb.HealthCheckResponse_SERVING {
			return nil
		}
		d.conn.ResetConnectBackoff()
	}
	return errors.New("it does not serve")
}

func (d *daemon) process() measure.Process { return measure.Process(d.cmd.Process.Pid) }

// stop ends the process and waits for it.
func (d *daemon) stop() error {
	d.conn.Close()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-d.exited:
		return err
	case <-time.After(time.Minute):
		d.cmd.Process.Kill()
		return errors.New("it did not stop within a minute")
	}
}

// startKeyd starts the product's daemon over the data in a directory of the
// run, with a tenant if the data are new.
func (b *bench) startKeyd(name string) (*daemon, error) {
	data := filepath.Join(b.dir, name)
	_, err := os.Stat(data)
	fresh := errors.Is(err, os.ErrNotExist)
	socket := filepath.Join(b.dir, name+".sock")
	cmd := exec.Command(filepath.Join(b.bin, "keyd"), "--dev", "--data", data, "--listen", "unix:"+socket, "--log-level", "warn")
	d, err := startDaemon(cmd, socket)
	if err != nil || !fresh {
		return d, err
	}
	// Leases and buckets as long as may be, so that none ends in a round.
	_, err = keydv1.NewAdminServiceClient(d.conn).CreateTenant(b, &keydv1.CreateTenantRequest{
		Tenant: tenant, Classes: []*keydv1.Class{{
			Name: class, BucketWidth: durationpb.New(366 * 24 * time.Hour), Lease: durationpb.New(time.Hour),
		}},
	})
	if err != nil {
		d.stop()
		return nil, err
	}
	return d, nil
}

// subjectID is the id of the benchmark's n-th subject.
func subjectID(n int) []byte { return fmt.Appendf(nil, "subject-%08d@bench.example", n) }

func sealQuery(n int) *keydv1.BlobKeyQuery {
	return &keydv1.BlobKeyQuery{Tenant: tenant, SubjectId: subjectID(n), Class: class, Purpose: keydv1.Purpose_PURPOSE_SEAL}
}

// openQuery asks for the key that the answer to a sealQuery was.
func openQuery(n int, k *keydv1.BlobKey) *keydv1.BlobKeyQuery {
	q := sealQuery(n)
	q.Purpose, q.KeyId, q.ClassNumber, q.Bucket = keydv1.Purpose_PURPOSE_OPEN, k.KeyId, k.ClassNumber, k.Bucket
	return q
}

// get makes one GetBlobKeys call all of whose queries must succeed.
func get(ctx context.Context, conn grpc.ClientConnInterface, req *keydv1.GetBlobKeysRequest) (*keydv1.GetBlobKeysResponse, error) {
	res, err := keydv1.NewKeyServiceClient(conn).GetBlobKeys(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, r := range res.Results {
		if f := r.GetFailure(); f != nil {
			return nil, fmt.Errorf("a query failed: %s: %s", f.Outcome, f.Message)
		}
	}
	return res, nil
}

// fill creates the subjects from n on up to m, and returns the queries that
// open their blobs, from keep of them at most, spread evenly.
func (d *daemon) fill(ctx context.Context, n, m, keep int) ([]*keydv1.BlobKeyQuery, error) {
	const batch, clients = 256, 4
	kept := make([][]*keydv1.BlobKeyQuery, clients)
	every := max(1, (m-n)/max(keep, 1))
	_, err := closedLoop(ctx, clients, 0, (m-n+batch-1)/batch, func(client, i int) error {
		req := new(keydv1.GetBlobKeysRequest)
		first := n + i*batch
		for s := first; s < min(first+batch, m); s++ {
			req.Queries = append(req.Queries, sealQuery(s))
		}
		res, err := get(ctx, d.conn, req)
		if err != nil {
			return err
		}
		for j, r := range res.Results {
			if keep > 0 && (first+j)%every == 0 {
				kept[client] = append(kept[client], openQuery(first+j, r.GetKey()))
			}
		}
		return nil
	})
	var all []*keydv1.BlobKeyQuery
	for _, k := range kept {
		all = append(all, k...)
	}
	return all, err
}

// destroyRequest destroys a query's subject.
func destroyRequest(subject []byte) *keydv1.DestroyKeyRequest {
	return &keydv1.DestroyKeyRequest{Tenant: tenant, SubjectId: subject, RequestId: rand.Text(), Reason: "bench"}
}
