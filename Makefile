# gossamer: `make demo` and `make test` need only Python 3.10 to 3.13 and make.

PYTHON ?= python3
VENV   ?= .venv
# Test processes side by side, and arguments for the command of a target: make bench ARGS="sae --help".
JOBS   ?= 2
ARGS   ?=

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS     := $(VENV)/.installed-bench
SITE      := $(VENV)/.installed-docs
PIP       := $(BIN)/python -m pip --disable-pip-version-check
# One thread a process: the test processes already fill the cores.
PYTEST    := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
# tests/conftest.py leaves out rooms without kernels; pytest ends with 5 where ARGS then choose no test at all.
INTERPRET := GOSSAMER_INTERPRET=1
NONE_CHOSEN := [ $$? -eq 5 ]
# Both halves run, whatever the first one finds.
halves = @$(PYTEST) $(1) $(ARGS); plain=$$?; \
	$(INTERPRET) $(PYTEST) $(1) $(ARGS) || $(NONE_CHOSEN); interpreted=$$?; \
	say() { [ $$2 -eq 0 ] && echo "$$1: passed" || echo "$$1: FAILED"; }; \
	say "the product path" $$plain; say "the kernels, interpreted" $$interpreted; [ $$plain -eq 0 ] && [ $$interpreted -eq 0 ]
# Where three libraries choose instructions, each is asked for the same.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
NUMERICAL := $(addprefix tests/,rowsparse gemm sae nn ffn attention blocksparse)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full test-avx2 lint docs dist bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) ARGS=\"$(ARGS)\""

install: $(INSTALLED) ## make .venv and install gossamer in it, with the pinned versions

demo: $(INSTALLED) ## train, decode and compare on real text; writes report/index.html
	$(BIN)/python -m demo --out report $(ARGS)

test: $(INSTALLED) ## the tests, without the slow ones; then again with the kernels in Triton's interpreter
	$(call halves,-m "not full")

test-full: $(INSTALLED) ## every test
	$(call halves,)

test-avx2: $(INSTALLED) ## the numerical tests once more, on this CPU's AVX2 alone: sums come out otherwise
	$(AVX2) $(PYTEST) -m "not full" $(NUMERICAL) $(ARGS) || $(NONE_CHOSEN)

lint: $(INSTALLED) ## ruff, mypy, and whether the tables in docs match benchmarks/results and the source
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m benchmarks.tables --check
	$(BIN)/python -m benchmarks.evidence --check
	$(BIN)/python -m benchmarks.paths --check

docs: $(SITE) ## the site of the documents and the reference, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist: $(INSTALLED) ## wheel and source distribution, in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

bench: $(PEERS) ## the benchmarks, beside their peers; writes benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove caches, builds and the report; .venv stays
	rm -rf report build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks demo -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is older than either file whenever the environment may be out of date; pip then changes the packages that differ.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "gossamer needs Python 3.10 to 3.13, and PYTHON=$(PYTHON) is missing or another one." >&2; \
		echo "Name one that fits: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
		echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing gossamer and its dependencies in $(VENV): this takes minutes the first time."
	$(PIP) install --quiet --constraint constraints.txt --editable '.[cli,sae-lens,transformers,train,test,dev]'
	@touch $@

$(PEERS): $(INSTALLED)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

$(SITE): $(INSTALLED)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@
