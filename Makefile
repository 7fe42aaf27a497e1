# Everything a developer or an operator does here; `make help` lists it.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/.ready
CLASSES := .venv/.classes
# Spark is started by what these targets run; it asks for Java by JAVA_HOME.
WITH_JAVA = java_home="$$(scripts/ensure-java)" && export JAVA_HOME="$$java_home" &&

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(CLASSES) ## Make .venv with all dependencies as locked, and find or install Java

$(READY): requirements.lock pyproject.toml
	@scripts/ensure-java >/dev/null
	@python="$$(scripts/find-python)" && echo "Making .venv with $$python ..." && \
		"$$python" -m venv .venv
	@echo "Installing the locked dependencies ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--no-deps -e .
	@touch $@
	@echo "Ready."

# Java loads Spark in half the time from it; without it all works as well.
$(CLASSES): $(READY)
	@echo "Laying out Spark's classes for Java ..."
	@$(WITH_JAVA) $(BIN)/python -m spark_pipeline.class_archive >.venv/classes.log 2>&1 || \
		{ tail -n 5 .venv/classes.log; exit 1; }
	@touch $@

.PHONY: check
check: $(READY) ## Lint, formatting and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

# As the files come: the services first, many small ones last, so that both workers end together.
.PHONY: test
test: $(CLASSES) ## All tests, on real servers; ARGS= goes to pytest
	@$(WITH_JAVA) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: chaos
chaos: $(CLASSES) ## The tests that take minutes; ARGS= goes to pytest
	@$(WITH_JAVA) $(BIN)/pytest -m chaos $(ARGS)

.PHONY: demo
demo: $(READY) ## The whole pipeline on this machine, nothing else needed
	@$(WITH_JAVA) $(BIN)/python -m examples.demo

# exec: with a shell in between, make would report Ctrl-C as an error though all was drained.
.PHONY: run
run: $(READY) ## Run the pipeline; CONFIG= names its configuration file
	@$(WITH_JAVA) exec $(BIN)/walbrook run $(if $(CONFIG),--config $(CONFIG))

.PHONY: bench
bench: $(READY) ## Benchmarks, the last line is JSON; ONLY= names one
	@$(WITH_JAVA) $(BIN)/python -m benchmarks $(ONLY)

.PHONY: format
format: $(READY) ## Format the code and sort its imports
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

.PHONY: docs
docs: $(READY) ## Write docs/configuration.md from the configuration model
	@$(BIN)/python -m cdc.config.reference

# One file for Python 3.11 and later on Linux and macOS. setuptools builds the project itself.
.PHONY: lock
lock: ## Renew requirements.lock (needs uv)
	@echo 'setuptools>=77,<90' | uv pip compile pyproject.toml - --extra embedded --extra dev \
		--universal --python-version 3.11 --generate-hashes --upgrade --quiet \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links \
		--output-file requirements.lock

.PHONY: clean
clean: ## Remove .venv, caches, build results, and var/ with the change log of `make run`
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		spark-warehouse metastore_db derby.log var
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
