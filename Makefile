# All targets run in virtual environments that are created here. You need Python 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
# Installed first, so that all dependencies use this version of torch.
TORCH := torch==2.13.0
FAST := not slow and not gpu

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help demo test coverage check format lint types test-slow test-gpu test-peers intervals evidence pictures api bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready ## train a small network on digits and print its spectra, sharpness and landscape
	@$(BIN)/python -m ritz demo --out out/demo

test: $(VENV)/.ready ## run the fast tests, the doctests and the examples
	$(BIN)/python -m pytest -q --doctest-modules src tests -m "$(FAST)" -n 2 --dist loadfile $(OPTIONS)

coverage: OPTIONS := --cov --cov-report=term
coverage: test ## the same with code coverage; takes 50 % longer

check: format lint types test ## format, lint, types and tests: run this before you submit a change

format: $(VENV)/.ready ## check the format
	$(BIN)/ruff format --check .

lint: $(VENV)/.ready ## check the style
	$(BIN)/ruff check .

types: $(VENV)/.ready ## check the types
	$(BIN)/mypy

test-slow: $(VENV)/.ready ## run the slow tests
	$(BIN)/python -m pytest -q tests -m "slow and not gpu" --timeout 1800

# The virtual environment has torch for the CPU. This target uses the current Python with its torch
# and pytest, and runs only files with GPU tests, so that it needs no other package.
test-gpu: ## run the tests that need a CUDA device, with the current Python
	@$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
		"torch finds no CUDA device: make PYTHON=... test-gpu takes another Python")'
	$(PYTHON) -m pytest -q -m gpu $$(grep -rl --include='*.py' 'mark[.]gpu' tests)

test-peers: $(PEERS)/.ready ## compare with other libraries, in a separate environment
	$(PEERS)/bin/python -m pytest -q tests/peers --timeout 600

intervals: $(VENV)/.ready ## measure how often intervals hold the truth, for docs/intervals.md; 15 minutes
	OMP_NUM_THREADS=1 $(BIN)/python tests/intervals.py --workers 2 \
		--out benchmarks/results/intervals.json --docs docs/intervals.md

evidence: $(VENV)/.ready ## write the tables of docs/evidence.md from the stored results of studies
	$(BIN)/python docs/evidence.py

pictures: $(VENV)/.ready ## draw the pictures of docs/gallery.md from the stored results
	$(BIN)/python docs/pictures.py

api: $(VENV)/.ready ## write docs/api and docs/modules.md from the docstrings
	$(BIN)/python docs/api.py

bench: $(PEERS)/.ready ## run the benchmarks, 45 minutes; OPTIONS=--small shows that they run
	$(PEERS)/bin/python benchmarks/everything.py $(OPTIONS)

clean: ## remove the environments, caches and outputs
	rm -rf $(VENV) $(PEERS) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -o -name '*.egg-info' | xargs rm -rf

$(VENV)/.ready: pyproject.toml
	$(call environment,$(VENV))
	@$(BIN)/python -m pip install -qq -e ".[dev]"
	@touch $@

$(PEERS)/.ready: pyproject.toml tests/peers/requirements.txt tests/peers/constraints.txt
	$(call environment,$(PEERS))
	@$(PEERS)/bin/python -m pip install -qq -c tests/peers/constraints.txt \
		-e ".[dev]" -r tests/peers/requirements.txt
	@touch $@

# On some systems venv cannot install pip. Then the pip outside installs it.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "ritz needs Python 3.11 or later: make PYTHON=python3.11 ..." >&2; exit 1; }
@echo "setting up $(1) (once; a few minutes)"
@$(PYTHON) -m venv $(1) >/dev/null 2>&1 || { $(PYTHON) -m venv --clear --without-pip $(1) && \
	$(PYTHON) -m pip --python $(1)/bin/python install -qq pip; }
@$(1)/bin/python -m pip install -qq $(TORCH)
endef
