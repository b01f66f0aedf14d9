# Everything runs in environments made here: Python 3.11 or later, pip and make are all it takes.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
# This exact version first: whatever asks for torch afterwards finds it there.
TORCH := torch==2.13.0
FAST := not slow and not gpu

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help demo test coverage check format lint types test-slow test-gpu test-peers bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready ## train a small network on digits; its spectra, sharpness and landscape
	@$(BIN)/python -m ritz demo --out out/demo

test: $(VENV)/.ready ## run the fast tests, the doctests and the examples
	$(BIN)/python -m pytest -q --doctest-modules src tests -m "$(FAST)" -n 2 --dist loadfile $(OPTIONS)

coverage: OPTIONS := --cov --cov-report=term
coverage: test ## the same with the coverage of the code, which takes half as long again

check: format lint types test ## all that must pass before a change goes in

format: $(VENV)/.ready ## check the format
	$(BIN)/ruff format --check .

lint: $(VENV)/.ready ## check the style
	$(BIN)/ruff check .

types: $(VENV)/.ready ## check the types
	$(BIN)/mypy

test-slow: $(VENV)/.ready ## run the slow tests
	$(BIN)/python -m pytest -q tests -m "slow and not gpu" --timeout 1800

# The environment holds a build of torch for the CPU: this uses the Python at hand, with its own
# torch and pytest, and only the files that have such tests, so that it needs nothing else.
test-gpu: ## run the tests that need a CUDA device, with the Python at hand
	@$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
		"torch finds no CUDA device: make PYTHON=... test-gpu takes another Python")'
	$(PYTHON) -m pytest -q -m gpu $$(grep -rl --include='*.py' 'mark[.]gpu' tests)

test-peers: $(PEERS)/.ready ## compare with other libraries, in an environment of its own
	$(PEERS)/bin/python -m pytest -q tests/peers --timeout 600

bench: $(PEERS)/.ready ## run every benchmark and print its ratios
	@set -e; for script in $$(grep -l __main__ benchmarks/*.py); do \
		echo "== $$script"; $(PEERS)/bin/python $$script; done

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

# Some systems ship venv without the pip it would install: then the outer pip installs one.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "ritz needs Python 3.11 or later: make PYTHON=python3.11 ..." >&2; exit 1; }
@echo "setting up $(1) (once; a few minutes)"
@$(PYTHON) -m venv $(1) >/dev/null 2>&1 || { $(PYTHON) -m venv --clear --without-pip $(1) && \
	$(PYTHON) -m pip --python $(1)/bin/python install -qq pip; }
@$(1)/bin/python -m pip install -qq $(TORCH)
endef
