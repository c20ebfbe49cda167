# Targets that a newcomer needs: demo, test. The rest is for those who change Lethe.
GO ?= go
TOOL := $(GO) tool -modfile=tools/go.mod
# Generated code is not ours to check.
CHECKED := $(shell $(GO) list ./... | grep -v /proto/keyd/)

.PHONY: build demo test deps vet staticcheck unit e2e vectors fuzz gen gen-check proto-check lint bench clean

build: ## keyd and lethe into bin/
	$(GO) build -o bin/ ./cmd/keyd ./cmd/lethe

demo: build ## the main job, on real input, in a temporary directory
	$(GO) run ./cmd/e2e demo --bin bin

test: deps vet staticcheck unit vectors e2e ## everything that CI runs

deps: ## what the tests need beside Go, from Debian where that may be done
	sh .ci/deps

vet:
	$(GO) vet ./...

staticcheck:
	$(TOOL) staticcheck $(CHECKED)

unit: ## all packages but the end-to-end runs, under the race detector
	$(GO) test -race -timeout 20m $(filter-out lethe/cmd/e2e,$(CHECKED))

e2e: build ## the real binaries: kill -9, faults, syncs, leftovers
	$(GO) test -count=1 -timeout 20m ./cmd/e2e

vectors: ## a second implementation, in Python, opens the vectors of SPEC.md
	/usr/bin/python3 proto/vectors/check.py
	/usr/bin/python3 proto/vectors/receipts/check.py

FUZZTIME ?= 30s
fuzz: ## every fuzz target for FUZZTIME
	@set -e; for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "$$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p; done; done

gen: ## Go from the protos; the first run builds buf, which takes minutes
	cd proto && $(GO) tool -modfile=../tools/go.mod buf generate

gen-check: gen ## generating anew changes nothing
	git diff --exit-code -- proto

proto-check: ## lint, and no change that breaks what main promised
	cd proto && $(GO) tool -modfile=../tools/go.mod buf lint
	cd proto && $(GO) tool -modfile=../tools/go.mod buf breaking --against '../.git#branch=main,subdir=proto'

lint: ## golangci-lint; the first run builds it, which takes minutes
	$(GO) tool -modfile=tools/lint/go.mod golangci-lint run

clean:
	rm -rf bin out
