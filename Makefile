# Everything happens inside this directory: the virtual environment in .venv, the demo's files in demo/.
# PYTHON=python3.12 make test      another interpreter (3.10 or newer)
# TEST_ARGS="-k arena" make test   some of the tests
# Pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) choose where packages, and which build of torch, come from.

PYTHON ?= python3
# Six on two cores: a test waits for disks or for its own processes a third of the time.
TEST_WORKERS ?= 6
TEST_ARGS ?=
MUTANTS_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of daemons and trainers: each would compile every module anew, 0.5 s of its 1.4 s of imports.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: the tests start many processes, and torch takes every core in each unless told.
RUN_ENV := OMP_NUM_THREADS=1
PYTEST := $(RUN_ENV) $(BIN)/pytest -n $(TEST_WORKERS) --dist=worksteal
EVERYDAY := not chaos and not soak and not elastic

.PHONY: help demo test matrix chaos soak mutants gpu bench clean

help:
	@echo "make demo    four nodes, five failures, every claim checked (under 5 minutes on 2 cores)"
	@echo "make test    ruff, mypy --strict, pytest (under 9 minutes on 2 cores)"
	@echo "make matrix  each framework that has an adapter: trained, killed, gone on with"
	@echo "make chaos   the longer runs under faults"
	@echo "make soak    for CKPTD_SOAK_S seconds, an hour unless told otherwise; then the fuzzers for FUZZ_SECONDS"
	@echo "make mutants deliberate mistakes in the core and in commits: which do the tests find? (20 minutes on 2 cores)"
	@echo "make gpu     the tests of captures and restores, and bench.stall, on this machine's CUDA device"
	@echo "make bench   speed beside the machine's own limits; results in bench/results/"
	@echo "make clean   remove what was made here"

# Installed once; again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("ckptd needs Python 3.10 or newer: PYTHON=python3.x make ..." if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@echo "== installing into .venv (once, some minutes)"
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install --no-cache-dir -c constraints.txt -e '.[demo,rs,test]'
	@touch $@

# The frameworks, in an environment that sees .venv and has what it lacks.
MATRIX := .matrix/.installed
$(MATRIX): $(STAMP) tests/matrix/requirements.txt
	@test -x .matrix/bin/python || $(BIN)/python -m venv .matrix || { rm -rf .matrix; exit 1; }
	@echo "== installing into .matrix (once)"
	@$(BIN)/python -m tests.matrix.beside .venv .matrix
	@grep '^torch==' constraints.txt > .matrix/torch.txt # of the rest they want other versions than ckptd does
	@.matrix/bin/python -m pip install --no-cache-dir -c constraints.txt -U setuptools wheel # DeepSpeed is built beside torch
	@.matrix/bin/python -m pip install --no-cache-dir --no-build-isolation -c .matrix/torch.txt -r tests/matrix/requirements.txt
	@touch $@

matrix: $(MATRIX)
	@$(RUN_ENV) TORCH_EXTENSIONS_DIR=$(CURDIR)/.matrix/extensions .matrix/bin/python -m pytest -n 2 --dist=worksteal tests/matrix $(TEST_ARGS)

# What stands in for Azure Blob Storage. Where there is no npm its tests are skipped, with a word.
AZURITE := .azurite/.installed
$(AZURITE): tests/azurite.txt
	@mkdir -p .azurite
	@if command -v npm > /dev/null; then npm install --prefix .azurite --no-save --no-fund --no-audit --loglevel=error $$(cat tests/azurite.txt); \
		else echo "== no npm here: the tests of az:// are skipped"; fi
	@touch $@

demo: $(STAMP)
	@$(RUN_ENV) $(BIN)/ckptd demo

# The tests are collected once before, where nothing is compiled yet: else all workers compile all of them at the same time.
# Every part runs, mypy beside pytest, whose closing line is the end unless something failed; the status is nonzero then.
test: $(STAMP)
	@failed=""; said=$$(mktemp); \
	echo "== ruff"; $(BIN)/ruff check . || failed="$$failed ruff"; \
	echo "== mypy --strict, beside"; $(BIN)/mypy > $$said 2>&1 & mypy=$$!; \
	echo "== pytest (tests that need root and are skipped are listed with their reason at the end)"; \
	test -d tests/__pycache__ || $(PYTEST) -n 0 --collect-only -q > /dev/null || true; \
	$(PYTEST) -m '$(EVERYDAY)' $(TEST_ARGS) || failed="$$failed pytest"; \
	wait $$mypy || { failed="$$failed mypy"; cat $$said; }; \
	rm -f $$said; \
	[ -z "$$failed" ] || { echo "== FAILED:$$failed"; exit 1; }

chaos: $(STAMP) $(AZURITE)
	@$(RUN_ENV) $(BIN)/pytest -v -m 'chaos or elastic' --timeout=1800 $(TEST_ARGS)

soak: $(STAMP)
	@$(RUN_ENV) $(BIN)/pytest -v -m soak --timeout=14400 $(TEST_ARGS)

# Begins where an interrupted run stopped. MUTANTS_ARGS="--only levels.py" looks at some of them.
mutants: $(STAMP)
	@$(RUN_ENV) $(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# With the torch of GPU_PYTHON, which has CUDA: .venv has the build for the CPU. One worker, as they share the device.
GPU_PYTHON ?= python3
gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device, or a torch without CUDA")'
	$(GPU_PYTHON) -m pytest -n 0 -k cuda tests/node tests/cluster/test_device.py
	$(GPU_PYTHON) -m bench.stall --device cuda --bytes 4e9

bench: $(STAMP)
	@mkdir -p bench/results
	@missed=""; for name in stall protect erasure persist restore tensors peers; do \
		echo "== $$name"; $(BIN)/python -m bench.$$name --json bench/results/$$name.json || missed="$$missed $$name"; done; \
	test -z "$$missed" || { echo "floors missed or benchmark failed:$$missed"; exit 1; }

clean:
	rm -rf .venv .matrix .azurite .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
