# Needs python3 (3.11 or newer) and a network to its package index; everything else goes into .venv.
# All of that but torch is held to the hashes in constraints.txt. torch has a wheel for each kind of machine (CPU, CUDA), so it is held to
# its version alone, and so is what only its build for GPUs asks for.

PYTHON ?= python3
VENV := .venv
SYSTEMS := src/paceline_lab/systems/requirements
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all engines compiled check docs results pictures dist lock clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1#/p' $(MAKEFILE_LIST) | awk -F'#' '{ printf "%-18s%s\n", $$1, $$2 }'

install: $(VENV)/.test ## Make .venv with the package and all its extras.

demo: $(VENV)/.test ## Train on real data with all cores, then measure 1 against all of them: ends with report.html.
	@$(BIN)/paceline train examples/digits.yaml
	@$(BIN)/paceline bench scaling examples/digits.yaml --repeat 5

# Tests also wait for processes that they start, so there is one more of them at work than cores.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

# Only the processes of pytest are measured: measuring the thousands that tests start would slow the suite. Python 3.12 made tracing cheap;
# on 3.11 it takes half as much time again, so that coverage is measured there on request only: make test COVERAGE=1
COVERAGE ?= $(shell $(PYTHON) -c 'import sys; print(*[1] * (sys.version_info >= (3, 12)))')

# Without bytecode, each of the thousands of processes would compile what it imports.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.test ## Run every check and every test that is not slow; on Python 3.12 or newer, print the coverage by package.
	@$(MAKE) --no-print-directory --jobs=2 check compiled
	@$(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup $(if $(COVERAGE),--cov --cov-report=)
	$(if $(COVERAGE),@$(BIN)/python .ci/coverage)

test-all: $(VENV)/.test ## Run every check and every test.
	@$(MAKE) --no-print-directory --jobs=2 check compiled
	@$(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --slow

engines: $(VENV)/.test ## Make build/engines (Ray, SkyPilot, MPICH, kubernetes-validate), build/flower and build/frameworks (Lightning, trackers), for the slow tests that need them.
	@$(PYTHON) -m venv build/engines
	@build/engines/bin/python -m pip --disable-pip-version-check install --quiet 'ray[default]==2.60.*' 'skypilot==0.14.*' kubernetes-validate mpich
	@$(PYTHON) -m venv build/flower
	@build/flower/bin/python -m pip --disable-pip-version-check install --quiet 'flwr[simulation]==1.42.*'
	@$(PYTHON) -m venv build/frameworks
	@for made in build/engines build/flower build/frameworks; do \
		echo "import site; site.addsitedir('$(CURDIR)/$$(echo $(VENV)/lib/python*/site-packages)')" \
			> $$(echo $$made/lib/python*/site-packages)/paceline.pth; \
	done
	@# last, so that it finds torch in .venv
	@echo '$(TORCH)' > build/frameworks/torch.in
	@build/frameworks/bin/python -m pip --disable-pip-version-check install --quiet --constraint build/frameworks/torch.in \
		'lightning==2.6.*' 'wandb==0.31.*' 'mlflow==3.17.*' 'prometheus-client==0.26.*' \
		'opentelemetry-sdk==1.45.*' 'opentelemetry-exporter-otlp-proto-http==1.45.*'

# The workers of pytest would each compile the tests anew if they met them at the same time. This also builds the simulated accelerator.
compiled: $(VENV)/.test
	@$(BIN)/python -m compileall -q src tests
	@$(BIN)/pytest --collect-only --quiet > /dev/null

check: $(VENV)/.test ## Run the linters and the type checker.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(VENV)/.test ## Build the documentation site in build/site; a link that leads nowhere is an error.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

results: $(VENV)/.test ## Write docs/results/*.md and the README's figures from docs/results/data/*.json.
	@$(BIN)/python docs/results.py

pictures: $(VENV)/.test ## Draw docs/images/* from docs/images/data and docs/results/data; needs Chromium for pictures of pages.
	@$(BIN)/python docs/pictures.py

dist: $(VENV)/.test ## Build the wheel and the sdist in dist/.
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	@ls dist/*

clean: ## Remove .venv and all caches. Runs are kept.
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock: $(VENV)/.made ## Write constraints.txt anew from pyproject.toml, with hashes; versions there stay where they fit.
	@$(PIP) install --quiet uv
	@echo '$(TORCH)' > $(VENV)/torch.in
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 $(VENV)/torch.in \
		| sed -nE 's/^((nvidia|cuda|triton)[a-z0-9-]*)==.*/--no-emit-package=\1/p' > $(VENV)/torchs-own.in
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--constraints $(VENV)/torch.in --extra test --no-emit-package=torch $$(cat $(VENV)/torchs-own.in) \
		--output-file constraints.txt pyproject.toml
	@sed -i '1i # Exact versions and hashes of all that the package, its extras and its tests install, but for torch. Written by `make lock`.' \
		constraints.txt
	@# Fails if a pinned version has no wheel for arm64; reads only the index.
	@$(BIN)/uv pip compile --quiet --python-platform aarch64-manylinux_2_28 --python-version 3.11 --only-binary :all: \
		--constraints $(VENV)/torch.in --constraints constraints.txt --extra all pyproject.toml > /dev/null
	@for input in $(SYSTEMS)/*.in; do \
		$(BIN)/uv pip compile --quiet --python-platform linux --python-version 3.11 --generate-hashes --no-annotate --no-header \
			--constraints $(VENV)/torch.in --no-emit-package=torch $$(cat $(VENV)/torchs-own.in) \
			--output-file $${input%.in}.txt $$input || exit 1; \
	done

# The stamp: an installation is repeated only when what it installs has changed.
$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing paceline with its extras and the tools for tests into $(VENV) (torch is large: minutes) …"
	@$(PIP) install --quiet --require-hashes --no-deps -r constraints.txt
	@$(PIP) install --quiet $(TORCH)
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@$(PIP) check
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." \
			"Name a newer one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@
