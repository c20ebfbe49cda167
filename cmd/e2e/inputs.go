package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"lethe/sdk"
	"lethe/sdk/envelope"
)

//go:embed testdata
var testdata embed.FS

// Tenants, and the person who will be erased.
const (
	helpdesk = "helpdesk"
	platform = "platform"

	erasedSubject = "mara.lind@example.org"
)

// input is a file as an agent system writes it, cut into the records of the
// people to whom they belong and what lies between, which is nobody's.
type input struct {
	title  string
	tenant string
	class  string
	whole  []byte
	pieces []piece
}

// piece is a record when it has an owner.
type piece struct {
	subject string
	place   string // where the record stands; bound to its blob
	plain   []byte
	blob    []byte // once it is sealed
}

func (p *piece) isRecord() bool { return p.subject != "" }

// target is whose the record is, and as what and where it is sealed.
func (in *input) target(p *piece) (sdk.Target, error) {
	return sdk.Target{Tenant: in.tenant, Subject: p.subject, Class: in.class}.
		Bind(envelope.Pair{Name: "place", Value: p.place})
}

// order is the same for a client process.
func (in *input) order(do string, p *piece) order {
	return order{
		Do: do, Tenant: in.tenant, Subject: p.subject, Class: in.class,
		Context: [][2]string{{"place", p.place}}, Data: p.blob,
	}
}

// records calls fn for each record.
func (in *input) records(fn func(*piece) error) error {
	for i := range in.pieces {
		if p := &in.pieces[i]; p.isRecord() {
			if err := fn(p); err != nil {
				return fmt.Errorf("%s, %s: %w", in.title, p.place, err)
			}
		}
	}
	return nil
}

// subjects counts the records of each person.
func (in *input) subjects() map[string]int {
	n := make(map[string]int)
	for _, p := range in.pieces {
		if p.isRecord() {
			n[p.subject]++
		}
	}
	return n
}

// cutter cuts a file into pieces from its beginning to its end.
type cutter struct {
	in  *input
	pos int
}

// record cuts out the record that ends at end and begins at begin.
func (c *cutter) record(begin, end int, subject, place string) {
	c.rest(begin)
	c.in.pieces = append(c.in.pieces, piece{subject: subject, place: place, plain: c.in.whole[begin:end]})
	c.pos = end
}

// rest cuts up to end, as nobody's.
func (c *cutter) rest(end int) {
	if end > c.pos {
		c.in.pieces = append(c.in.pieces, piece{plain: c.in.whole[c.pos:end]})
		c.pos = end
	}
}

func loadInputs() ([]*input, error) {
	inputs := make([]*input, 0, 3)
	for _, load := range []func() (*input, error){agentCheckpoint, otlpTrace, postgresDump} {
		in, err := load()
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, in)
	}
	return inputs, nil
}

// agentCheckpoint is one record: a checkpoint of one person's conversation.
func agentCheckpoint() (*input, error) {
	whole, err := testdata.ReadFile("testdata/agent-checkpoint/checkpoint.json")
	if err != nil {
		return nil, err
	}
	const subject = "alice@example.com"
	if !bytes.Contains(whole, []byte(subject)) {
		return nil, errors.New("agent checkpoint: not of its person")
	}
	in := &input{title: "agent checkpoint", tenant: platform, class: "checkpoint", whole: whole}
	(&cutter{in: in}).record(0, len(whole), subject, "checkpoint-24")
	return in, nil
}

// otlpTrace has one record a span. A span belongs to the user of its trace,
// whom some of the trace's spans name.
func otlpTrace() (*input, error) {
	whole, err := testdata.ReadFile("testdata/otlp-trace/traces.json")
	if err != nil {
		return nil, err
	}
	var export struct {
		Batches []struct {
			Scopes []struct {
				Spans []json.RawMessage `json:"spans"`
			} `json:"instrumentationLibrarySpans"`
		} `json:"batches"`
	}
	if err := json.Unmarshal(whole, &export); err != nil {
		return nil, fmt.Errorf("OTLP trace: %w", err)
	}
	type span struct {
		TraceID    string `json:"traceId"`
		SpanID     string `json:"spanId"`
		Attributes []struct {
			Key   string `json:"key"`
			Value struct {
				String string `json:"stringValue"`
			} `json:"value"`
		} `json:"attributes"`
	}
	var raws []json.RawMessage
	var spans []span
	users := make(map[string]string)
	for _, b := range export.Batches {
		for _, s := range b.Scopes {
			for _, raw := range s.Spans {
				var sp span
				if err := json.Unmarshal(raw, &sp); err != nil {
					return nil, fmt.Errorf("OTLP trace: %w", err)
				}
				for _, a := range sp.Attributes {
					if a.Key == "kagent.user_id" || a.Key == "user.id" {
						if known := users[sp.TraceID]; known != "" && known != a.Value.String {
							return nil, errors.New("OTLP trace: a trace of two users")
						}
						users[sp.TraceID] = a.Value.String
					}
				}
				raws, spans = append(raws, raw), append(spans, sp)
			}
		}
	}
	in := &input{title: "OTLP trace export", tenant: platform, class: "trace", whole: whole}
	c := &cutter{in: in}
	for i, raw := range raws {
		at := bytes.Index(whole[c.pos:], raw)
		if at < 0 || users[spans[i].TraceID] == "" {
			return nil, errors.New("OTLP trace: a span without a place or a user")
		}
		c.record(c.pos+at, c.pos+at+len(raw), users[spans[i].TraceID], "span "+spans[i].SpanID)
	}
	c.rest(len(whole))
	return in, nil
}

// postgresDump has one record a row. A row's first column names its thread,
// thread-<subject>-<n>, and so its person.
func postgresDump() (*input, error) {
	whole, err := testdata.ReadFile("testdata/postgres-dump/checkpoints.sql")
	if err != nil {
		return nil, err
	}
	in := &input{title: "database dump", tenant: helpdesk, class: "backup", whole: whole}
	c := &cutter{in: in}
	table, row, pos := "", 0, 0
	for line := range bytes.Lines(whole) {
		begin := pos
		pos += len(line)
		text := strings.TrimSuffix(string(line), "\n")
		switch {
		case strings.HasPrefix(text, "COPY "):
			table, row = strings.Fields(text)[1], 0
		case text == `\.`:
			table = ""
		case table != "" && strings.HasPrefix(text, "thread-"):
			row++
			thread, _, _ := strings.Cut(text, "\t")
			end := strings.LastIndexByte(thread, '-')
			c.record(begin, begin+len(text), thread[len("thread-"):end], table+" "+strconv.Itoa(row))
		}
	}
	c.rest(len(whole))
	return in, nil
}
