package main

import (
	"context"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"
)

func (a *app) versionCommand() *cobra.Command {
	return a.command(&cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Example: "  lethe version --json",
	}, func(context.Context, []string) error {
		v := struct {
			Version  string `json:"version"`
			Go       string `json:"go"`
			Platform string `json:"platform"`
		}{version, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
		return a.print(v, func(w io.Writer) {
			fmt.Fprintf(w, "lethe %s (%s, %s)\n", v.Version, v.Go, v.Platform)
		})
	})
}
