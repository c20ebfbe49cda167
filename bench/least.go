package main

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"lethe/keyd/store/badger"
)

// The least that can be called a durable destroy: a call, its rows in the store,
// an object of the anchor and a signature for those that came together, and an
// answer as large as a receipt. No key, no check, no tree, no proof, no audit;
// nothing is read, and nobody looks whether another wrote to the anchor. What
// keyd is short of this is its own; what this is short of the rows alone is the
// price of an acknowledged call.
const leastMethod = "/lethe.bench.Least/Call"

// leastServer groups as keyd does: while the anchor is busy, calls wait for each
// other.
type leastServer struct {
	rows   func(calls int) error
	entry  int    // bytes that a call adds to an object of the anchor
	dir    string // of the objects
	calls  chan *leastCall
	anchor chan []*leastCall
	key    ed25519.PrivateKey
	busy   atomic.Int32 // groups that the anchor has, or is to get
	idle   chan struct{}
}

type leastCall struct {
	err  error
	done chan struct{}
}

const leastGroup = 64

func (s *leastServer) call() error {
	c := &leastCall{done: make(chan struct{})}
	s.calls <- c
	<-c.done
	return c.err
}

// commit is the loop that writes the rows.
func (s *leastServer) commit() {
	for {
		group := []*leastCall{<-s.calls}
		for full := false; !full && len(group) < leastGroup; {
			select {
			case c := <-s.calls:
				group = append(group, c)
				continue
			default:
			}
			if s.busy.Load() == 0 {
				break
			}
			select {
			case c := <-s.calls:
				group = append(group, c)
			case <-s.idle:
			}
		}
		err := s.rows(len(group))
		for _, c := range group {
			c.err = err
		}
		s.busy.Add(1)
		s.anchor <- group
	}
}

// write is the loop that writes the anchor's objects.
func (s *leastServer) write() {
	for n := 0; ; n++ {
		group := <-s.anchor
		err := s.object(n, len(group))
		s.busy.Add(-1)
		select {
		case s.idle <- struct{}{}:
		default:
		}
		for _, c := range group {
			c.err = errors.Join(c.err, err)
			close(c.done)
		}
	}
}

func (s *leastServer) object(n, calls int) error {
	b := make([]byte, calls*s.entry)
	sum := sha256.Sum256(b)
	b = append(b, ed25519.Sign(s.key, sum[:])...)
	f, err := os.CreateTemp(s.dir, "new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	dir := filepath.Join(s.dir, fmt.Sprint("x", n/1000))
	if n%1000 == 0 {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	if err := os.Link(f.Name(), filepath.Join(dir, fmt.Sprint(n))); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// serveLeast serves it on the socket that args name first, with data in the
// directory named next, with answers of the size and rows of the shape that
// follow. The largest row is the ledger's entry, which the anchor has too.
func serveLeast(args []string) error {
	answer, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	var sh shape
	var entry int
	for _, a := range args[3:] {
		var r rowSize
		if _, err := fmt.Sscanf(a, "%d+%d", &r.key, &r.value); err != nil {
			return err
		}
		sh = append(sh, r)
		entry = max(entry, r.value)
	}
	store, err := badger.Open(badger.Options{Dir: filepath.Join(args[1], "store"), Create: true})
	if err != nil {
		return err
	}
	defer store.Close()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	l := &leastServer{
		rows: groupOf(store, sh), entry: entry, dir: filepath.Join(args[1], "anchor"), key: key,
		calls: make(chan *leastCall), anchor: make(chan []*leastCall), idle: make(chan struct{}, 1),
	}
	if err := os.Mkdir(l.dir, 0o700); err != nil {
		return err
	}
	go l.commit()
	go l.write()
	lis, err := net.Listen("unix", args[0])
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "lethe.bench.Least",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{
			MethodName: "Call",
			Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				if err := decode(new(wrapperspb.BytesValue)); err != nil {
					return nil, err
				}
				return &wrapperspb.BytesValue{Value: make([]byte, answer)}, l.call()
			},
		}},
	}, nil)
	healthpb.RegisterHealthServer(s, health.NewServer())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, s.Stop)
	return s.Serve(lis)
}

// groupOf writes the rows of so many calls in one transaction.
func groupOf[T putter](s updater[T], sh shape) func(calls int) error {
	var n uint64
	return func(calls int) error {
		return s.Update(context.Background(), func(tx T) error {
			for range calls {
				n++
				if err := sh.put(n, tx.Put); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func (b *bench) startLeast(name string, sh shape, receipt int) (*daemon, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(b.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	socket := dir + ".sock"
	args := []string{"serve-least", socket, dir, strconv.Itoa(receipt)}
	for _, r := range sh {
		args = append(args, fmt.Sprintf("%d+%d", r.key, r.value))
	}
	return startDaemon(exec.Command(self, args...), socket)
}

func callLeast(ctx context.Context, conn grpc.ClientConnInterface) error {
	request := make([]byte, proto.Size(destroyRequest(subjectID(0))))
	return conn.Invoke(ctx, leastMethod, &wrapperspb.BytesValue{Value: request}, new(wrapperspb.BytesValue))
}
