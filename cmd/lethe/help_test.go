package main

import (
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// everyCommand calls f for each command of ours.
func everyCommand(t *testing.T, f func(t *testing.T, c *cobra.Command)) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Name() != "exit-codes" {
			t.Run(c.CommandPath(), func(t *testing.T) { f(t, c) })
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newApp(strings.NewReader(""), io.Discard, io.Discard).rootCommand())
}

func TestEveryCommandHasHelp(t *testing.T) {
	everyCommand(t, func(t *testing.T, c *cobra.Command) {
		help := offlineCLI(t).ok("", append(strings.Fields(c.CommandPath())[1:], "--help")...)
		about := c.Long
		if about == "" {
			about = c.Short
		}
		for _, want := range []string{strings.TrimSpace(about), c.Example, "--json", "--keyd", "--timeout"} {
			if want == "" || !strings.Contains(help, want) {
				t.Errorf("the help lacks %q:\n%s", want, help)
			}
		}
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("the short help is %q", c.Short)
		}
		if c.HasParent() && !c.HasSubCommands() {
			own := regexp.MustCompile(`'lethe [^']*'`).ReplaceAllString(c.Use+" "+c.Long, "") // not other commands' flags
			for _, flag := range regexp.MustCompile(`--[a-z-]+`).FindAllString(own, -1) {
				name := strings.TrimPrefix(flag, "--")
				if c.Flags().Lookup(name) == nil && c.InheritedFlags().Lookup(name) == nil {
					t.Errorf("the help tells of %s, which is no flag", flag)
				}
			}
		}
		for i, line := range strings.Split(help, "\n") {
			// Flags are cobra's to lay out.
			if len([]rune(line)) > 120 && !strings.HasPrefix(strings.TrimSpace(line), "-") {
				t.Errorf("line %d of the help is too long: %q", i+1, line)
			}
		}
	})
}

// Every example parses: its commands and flags exist, and what must be there is.
func TestExamplesParse(t *testing.T) {
	everyCommand(t, func(t *testing.T, c *cobra.Command) {
		if c.Example == "" {
			t.Fatal("there is no example")
		}
		for _, line := range strings.Split(c.Example, "\n") {
			found := false
			for _, part := range strings.Split(line, "|") {
				words := strings.Fields(part)
				if len(words) == 0 || words[0] != "lethe" {
					continue
				}
				found = true
				for i, w := range words {
					if w == ">" || w == "<" {
						words = append(words[:i:i], words[i+2:]...)
						break
					}
				}
				root := newApp(strings.NewReader(""), io.Discard, io.Discard).rootCommand()
				cmd, rest, err := root.Find(words[1:])
				if err != nil {
					t.Errorf("%q: %v", line, err)
					continue
				}
				if err := cmd.ParseFlags(rest); err != nil {
					t.Errorf("%q: %v", line, err)
				}
				if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
					t.Errorf("%q: %v", line, err)
				}
				if err := cmd.ValidateRequiredFlags(); err != nil {
					t.Errorf("%q: %v", line, err)
				}
				if err := cmd.ValidateFlagGroups(); err != nil {
					t.Errorf("%q: %v", line, err)
				}
			}
			if !found {
				t.Errorf("%q is no example of lethe", line)
			}
		}
	})
}

func TestWithoutACommand(t *testing.T) {
	c := offlineCLI(t)
	if out := c.ok(""); !strings.Contains(out, "Examples:") {
		t.Errorf("it prints %q", out)
	}
	if text := c.fails(2, "", "hold"); !strings.Contains(text, "list, place, release") {
		t.Errorf("a group alone says %q", text)
	}
	if text := c.fails(2, "", "unsea"); strings.Contains(text, "unsea") {
		t.Errorf("it tells what was typed: %q", text)
	}
	if text := c.fails(2, "", "opne"); !strings.Contains(text, "perhaps open?") {
		t.Errorf("it suggests nothing: %q", text)
	}
	if text := c.fails(2, "", "receipt", "--jsn"); !strings.Contains(text, "'lethe receipt --help'") {
		t.Errorf("it does not say where help is: %q", text)
	}
}

// What could not be written was not said.
func TestOutputThatFails(t *testing.T) {
	c := newCLI(t)
	full := errors.New("no space left")
	for _, args := range [][]string{
		{}, {"--help"}, {"seal", "--help"}, {"help"}, {"help", "exit-codes"}, {"--version"}, {"version"},
		{"completion", "bash"}, {"status"}, {"tenant", "list"}, {"--json", "status"},
	} {
		var stderr strings.Builder
		a := newApp(strings.NewReader(""), failingWriter{full}, &stderr)
		if code := a.run(t.Context(), c.args(args)); code != 1 || !strings.Contains(stderr.String(), full.Error()) {
			t.Errorf("%v: exit code %d, %q", args, code, &stderr)
		}
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

func TestVersion(t *testing.T) {
	c := offlineCLI(t)
	if out := c.ok("", "version"); !strings.HasPrefix(out, "lethe "+version+" (go") {
		t.Errorf("it prints %q", out)
	}
	if out := c.ok("", "--version"); out != "lethe "+version+"\n" {
		t.Errorf("it prints %q", out)
	}
	if v := c.object("", "version"); v["version"] != version {
		t.Errorf("in JSON: %v", v)
	}
}

func TestCompletion(t *testing.T) {
	c := newCLI(t)
	c.ok("", "tenant", "create", "beta", "--class", "ledgers", "--class", "notes")
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out := c.ok("", "completion", shell); !strings.Contains(out, "lethe") {
			t.Errorf("for %s it prints %q", shell, out)
		}
	}
	complete := func(args ...string) string { return c.ok("", append([]string{"__complete"}, args...)...) }
	for _, x := range []struct {
		want string
		args []string
	}{
		{"acme\nbeta\n:4\n", []string{"seal", "--keyd", c.keyd.Target(), "--tenant", ""}},
		{"ledgers\nnotes\n:4\n", []string{"destroy", "--keyd", c.keyd.Target(), "--tenant", "beta", "--class", ""}},
		{":4\n", []string{"seal", "--keyd", c.keyd.Target(), "--class", ""}},
		{"place\tForbid", []string{"hold", "p"}},
		{"--request-id\t", []string{"receipt", "get", "--req"}},
	} {
		if got := complete(x.args...); !strings.HasPrefix(got, x.want) {
			t.Errorf("%v: %q", x.args, got)
		}
	}
	c.keyd.Stop()
	if got := complete("seal", "--keyd", c.keyd.Target(), "--tenant", ""); got != ":1\n" {
		t.Errorf("without keyd: %q", got)
	}
}

func TestKeydFromTheEnvironment(t *testing.T) {
	c := newCLI(t)
	t.Setenv("LETHE_KEYD", c.keyd.Target())
	var out, err strings.Builder
	if code := newApp(strings.NewReader(""), &out, &err).run(t.Context(), []string{"tenant", "list"}); code != 0 || out.String() != "acme\n" {
		t.Errorf("exit code %d, %q, %q", code, &out, &err)
	}
}
