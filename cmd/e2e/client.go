package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"lethe/sdk"
	"lethe/sdk/envelope"
)

// order is one line for a client process.
type order struct {
	// Do is "seal" Data, "open" Data, or "watch": open Data again and again
	// until it is refused, or until Until.
	Do      string      `json:"do"`
	Tenant  string      `json:"tenant"`
	Subject string      `json:"subject"`
	Class   string      `json:"class"`
	Context [][2]string `json:"context,omitempty"`
	Data    []byte      `json:"data"`
	Until   time.Time   `json:"until,omitzero"`
}

// answer is a client process's line in return.
type answer struct {
	// Outcome is "OK", the name of an outcome, or "UNSPECIFIED".
	Outcome string `json:"outcome"`
	Message string `json:"message,omitempty"`
	// Data is the blob or the plaintext.
	Data []byte `json:"data,omitempty"`
	// Opened is how often a watch opened the blob; LastOpened and Refused are
	// when it last did and when it first did not.
	Opened     int       `json:"opened,omitempty"`
	LastOpened time.Time `json:"last_opened,omitzero"`
	Refused    time.Time `json:"refused,omitzero"`
}

func (o *order) target() (sdk.Target, error) {
	t := sdk.Target{Tenant: o.Tenant, Subject: o.Subject, Class: o.Class}
	pairs := make([]envelope.Pair, len(o.Context))
	for i, p := range o.Context {
		pairs[i] = envelope.Pair{Name: p[0], Value: p[1]}
	}
	return t.Bind(pairs...)
}

// serveClient is the client process: it obeys the lines of in until they end.
func serveClient(ctx context.Context, target string, in io.Reader, out io.Writer) error {
	client, err := sdk.Dial(ctx, target)
	if err != nil {
		return err
	}
	defer client.Close()
	orders, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var o order
		if err := orders.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := answers.Encode(obey(ctx, client, &o)); err != nil {
			return err
		}
	}
}

func obey(ctx context.Context, client *sdk.Client, o *order) answer {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	t, err := o.target()
	if err != nil {
		return answerOf(nil, err)
	}
	switch o.Do {
	case "seal":
		return answerOf(client.Seal(ctx, t, o.Data))
	case "open":
		return answerOf(client.Open(ctx, t, o.Data))
	case "watch":
		return watch(ctx, client, t, o)
	}
	return answer{Outcome: "UNSPECIFIED", Message: "no such order"}
}

func watch(ctx context.Context, client *sdk.Client, t sdk.Target, o *order) answer {
	var a answer
	for {
		begun := time.Now()
		_, err := client.Open(ctx, t, o.Data)
		if err != nil {
			refused := answerOf(nil, err)
			refused.Opened, refused.LastOpened, refused.Refused = a.Opened, a.LastOpened, time.Now()
			return refused
		}
		a.Opened++
		a.LastOpened = begun
		if time.Now().After(o.Until) {
			a.Outcome = "OK"
			return a
		}
		time.Sleep(time.Millisecond)
	}
}

func answerOf(data []byte, err error) answer {
	if err == nil {
		return answer{Outcome: "OK", Data: data}
	}
	return answer{Outcome: outcomeName(err), Message: err.Error()}
}

// outcomeName names an error's outcome as the wire does.
func outcomeName(err error) string {
	if err == nil {
		return "OK"
	}
	return strings.TrimPrefix(sdk.OutcomeOf(err).String(), "OUTCOME_")
}

// clientProcess is a client in a process of its own, which holds its own leases.
type clientProcess struct {
	cmd     *exec.Cmd
	orders  *json.Encoder
	answers *json.Decoder
	stdin   io.Closer
	stderr  strings.Builder
}

// startClient starts a client process of the keyd at target.
func startClient(target string) (*clientProcess, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &clientProcess{cmd: exec.Command(self, "client", target)}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.cmd.Stderr = &c.stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.stdin, c.orders, c.answers = in, json.NewEncoder(in), json.NewDecoder(bufio.NewReader(out))
	return c, c.cmd.Start()
}

// send gives an order; receive waits for its answer.
func (c *clientProcess) send(o order) error { return c.orders.Encode(o) }

func (c *clientProcess) receive() (a answer, err error) {
	if err := c.answers.Decode(&a); err != nil {
		return a, fmt.Errorf("client process: %w %s", err, c.stderr.String())
	}
	return a, nil
}

func (c *clientProcess) do(o order) (answer, error) {
	if err := c.send(o); err != nil {
		return answer{}, err
	}
	return c.receive()
}

// close ends the process.
func (c *clientProcess) close() {
	c.stdin.Close()
	stuck := time.AfterFunc(5*time.Second, func() { c.cmd.Process.Kill() })
	c.cmd.Wait()
	stuck.Stop()
}
