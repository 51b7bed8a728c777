# Everything runs in .venv, which is made on first use and brought up to date when
# pyproject.toml changes.

PYTHON ?= python3
JOBS   ?= 2
BIN    := .venv/bin
MODEL  := .models/SmolLM2-135M-Instruct.gguf

.DEFAULT_GOAL := help
.PHONY: help demo docs screenshots test test-all fresh engines model lint format types unit unit-all coverage bench clean

# Tiers by folder. These need no root, no container engine and no language model. The folders named
# `live`, workloads/pipes (PyTorch), chaos, browser, examples and benchmarks belong to `make test-all`.
QUICK := $(addprefix tests/,core control adapters models api app cli config worker workloads testing \
	conformance properties simulation acceptance docs typing examples/news) \
	--ignore-glob='*/live' --ignore=tests/workloads/pipes

# Of ten thousand tests on two busy cores one may miss a time limit. At most five that failed are run once
# more, alone; what passes then is shown above as failed, and is to be mended all the same.
FAILED_AGAIN = { test $$(grep -c '::' .pytest_cache/v/cache/lastfailed) -le 5 && $(BIN)/pytest --last-failed -ra; }

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.installed-demo ## run all kinds of jobs and show what became of each; OPEN=1 leaves the dashboard open
	-@test -e $(MODEL) || $(BIN)/penstock model pull smollm2 --models-dir $(dir $(MODEL))
	$(BIN)/python examples/demo.py $(if $(OPEN),--open)

docs: .venv/.installed-docs ## build the documentation site into build/site (then: python -m http.server -d build/site)
	$(BIN)/python -m mkdocs build --strict

screenshots: .venv/.installed-test ## the dashboard's pages, phone and desktop, light and dark, into docs/images
	PENSTOCK_SCREENSHOTS=1 $(BIN)/pytest -q tests/browser/test_screenshots.py

test: lint types unit ## the quick checks: lint, types, layers, quick tests (no root, no engines)

# The larger set of packages first: it has all that lint and types need.
test-all: .venv/.installed-test-all lint types unit-all ## every check and every test (Debian, as root: installs container engines)

fresh: ## as root on Debian: README's commands in an empty Debian; COMMANDS="..." for others
	@tools/fresh.sh $(COMMANDS)

engines: ## install the container engines that tests start (Debian, as root; else they are skipped)
	@sh tests/support/install.sh

model: $(MODEL) ## fetch the small language model that tests use (94 MB, once)

$(MODEL): | .venv/.installed
	$(BIN)/penstock model pull smollm2 --models-dir $(@D)

.venv-clients/.installed: tests/support/openai/clients.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install -q -r $<
	@touch $@

lint: .venv/.installed-test ## style, format and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: .venv/.installed-test ## mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed-test ## mypy, strict
	$(BIN)/mypy

unit: .venv/.installed-test ## the quick tests alone; ARGS="-k name" narrows them
	$(BIN)/pytest -n $(JOBS) --durations=25 $(QUICK) $(ARGS)

unit-all: .venv/.installed-test-all .venv-clients/.installed engines model ## all tests alone
	$(BIN)/pytest -n $(JOBS) --durations=25 --maxfail=40 $(ARGS) || $(FAILED_AGAIN)

coverage: .venv/.installed-test-all ## the tests, and which lines they reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

bench: .venv/.installed-bench $(MODEL) ## side by side with other engines; prints ratios
	$(BIN)/python benchmarks/engine.py $(ARGS)
	$(BIN)/python benchmarks/http_api.py $(HTTP_ARGS)
	$(BIN)/python benchmarks/dashboard.py $(DASHBOARD_ARGS)
	$(BIN)/python benchmarks/pipeline.py $(PIPELINE_ARGS)
	$(BIN)/python benchmarks/container.py $(CONTAINER_ARGS)
	$(BIN)/python benchmarks/scale_out.py $(SCALE_OUT_ARGS)
	$(BIN)/python benchmarks/round_trip.py $(ROUND_TRIP_ARGS)
	$(BIN)/python benchmarks/spool.py $(SPOOL_ARGS)
	$(BIN)/python benchmarks/pipes.py $(PIPES_ARGS)

clean: ## remove .venv and everything made
	rm -rf .venv .demo build dist htmlcov .coverage .coverage.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.installed-%: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@ .venv/.installed $(if $(filter test-all,$*),.venv/.installed-test)
