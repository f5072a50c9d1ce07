# Needs python3 (3.11 or newer) and a network to its package index; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1#/p' $(MAKEFILE_LIST) | awk -F'#' '{ printf "%-18s%s\n", $$1, $$2 }'

install: $(VENV)/.test ## Make .venv with the package and all its extras.

demo: $(VENV)/.all ## Train on real data with all cores, then measure 1 against all of them: ends with report.html.
	@$(BIN)/paceline train examples/digits.yaml
	@$(BIN)/paceline bench examples/digits.yaml --repeat 5

test: check ## Run every check and every test that is not slow.
	@$(BIN)/pytest

test-all: check ## Run every check and every test.
	@$(BIN)/pytest --slow

check: $(VENV)/.test ## Run the linters and the type checker.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

clean: ## Remove .venv and all caches. Runs are kept.
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an installation is repeated only when what it installs has changed.
$(VENV)/.all: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing paceline with its extras into $(VENV) (torch is large: minutes) …"
	@$(PIP) --no-build-isolation -e '.[all]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing paceline with its extras and the tools for tests into $(VENV) (torch is large: minutes) …"
	@$(PIP) --no-build-isolation -e '.[test]'
	@touch $(VENV)/.all $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." \
			"Name a newer one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools
	@touch $@
