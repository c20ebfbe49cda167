package main

import "lethe/bench/report"

func (b *bench) latency() (*report.Section, error) { return nil, nil }
func (b *bench) growth() (*report.Section, error)  { return nil, nil }
func (b *bench) scale() (*report.Section, error)   { return nil, nil }
