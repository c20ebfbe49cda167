# Targets that a newcomer needs: demo, test. The rest is for those who change Lethe.
GO ?= go
TOOL := $(GO) tool -modfile=tools/go.mod
# Generated code is not ours to check.
CHECKED := $(shell $(GO) list ./... | grep -v /proto/keyd/)

.PHONY: build demo test deps vet staticcheck unit pkcs11 e2e vectors fuzz gen gen-check proto-check lint bench bench-quick bench-scale bench-test clean

TAGS ?=
build: ## keyd and lethe into bin/; with TAGS=pkcs11, keyd on PKCS#11 tokens too
	$(GO) build -tags '$(TAGS)' -o bin/ ./cmd/keyd ./cmd/lethe

demo: build ## the main job, on real input, in a temporary directory
	$(GO) run ./cmd/e2e demo --bin bin

test: deps vet staticcheck unit pkcs11 vectors e2e ## everything that CI runs

deps: ## what the tests need beside Go, from Debian where that may be done
	sh .ci/deps

vet:
	$(GO) vet ./...

staticcheck:
	$(TOOL) staticcheck $(CHECKED)

unit: ## all packages but the end-to-end runs, under the race detector
	$(GO) test -race -timeout 20m $(filter-out lethe/cmd/e2e,$(CHECKED))

pkcs11: ## what only a build with PKCS#11 has, on SoftHSM
	CGO_ENABLED=1 $(GO) vet -tags pkcs11 ./keyd/kms/pkcs11 ./cmd/keyd
	$(TOOL) staticcheck -tags pkcs11 ./keyd/kms/pkcs11 ./cmd/keyd
	CGO_ENABLED=1 $(GO) test -race -tags pkcs11 -timeout 10m ./keyd/kms/pkcs11
	CGO_ENABLED=1 $(GO) test -race -tags pkcs11 -timeout 10m -run 'PKCS11|KMSFlags' ./cmd/keyd

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

# Reports go to bench/results: see bench/README.md. They are in a module of
# their own, so that the peers stay out of the product; its first build takes
# minutes.
bench: ## measure against the limit and beside the peers; under 15 minutes on two cores
	cd bench && $(GO) build -o ../bin/bench . && ../bin/bench -profile full -o results

bench-quick: ## the same with fewer rounds, into out/; under two minutes
	cd bench && $(GO) build -o ../bin/bench . && ../bin/bench -profile quick -o ../out

BENCH_SUBJECTS ?= 10000000
bench-scale: ## one keyd with BENCH_SUBJECTS subjects; takes long, and some GB of disk
	cd bench && $(GO) build -o ../bin/bench . && ../bin/bench -profile scale -subjects $(BENCH_SUBJECTS) -o results

bench-test: ## the bench's own tests
	cd bench && $(GO) vet ./... && $(GO) test ./...

clean:
	rm -rf bin out
