# Everything a developer or an operator does here; `make help` lists it.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/.ready
CLASSES := .venv/.classes
# Each test run starts hundreds of Python processes: none of them has to compile our modules again.
export PYTHONDONTWRITEBYTECODE :=
# Spark is started by what these targets run; it asks for Java by JAVA_HOME.
WITH_JAVA = java_home="$$(scripts/ensure-java)" && export JAVA_HOME="$$java_home" &&

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(CLASSES) ## Make .venv with all dependencies as locked, and find or install Java

# editable_mode=compat: Spark looks for its sources on sys.path, where the default's import hook is not.
$(READY): requirements.lock pyproject.toml
	@scripts/ensure-java >/dev/null
	@python="$$(scripts/find-python)" && echo "Making .venv with $$python ..." && \
		"$$python" -m venv .venv
	@echo "Installing the locked dependencies ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--no-deps --config-settings editable_mode=compat -e .
	@touch $@
	@echo "Ready."

# Java loads Spark in half the time from it; without it all works as well.
$(CLASSES): $(READY)
	@echo "Laying out Spark's classes for Java ..."
	@$(WITH_JAVA) $(BIN)/python -m spark_pipeline.session.class_archive >.venv/classes.log 2>&1 || \
		{ tail -n 5 .venv/classes.log; exit 1; }
	@touch $@

.PHONY: check
check: $(READY) ## Lint, formatting, types, rooms, words and links
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/pytest -qq --no-summary tests/unit/test_rooms.py tests/unit/test_prose.py

# Files in the order that tests/conftest.py gives them: the longest first.
PYTEST = pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: test
test: $(CLASSES) ## The tests, on real servers; ARGS= goes to pytest
	@$(WITH_JAVA) $(BIN)/$(PYTEST)

.PHONY: test-sinks
test-sinks: $(CLASSES) ## More of destinations, further servers and services; ARGS= goes to pytest
	@$(WITH_JAVA) $(BIN)/$(PYTEST) -m "sinks and not chaos"

.PHONY: coverage
coverage: export COVERAGE_FILE = $(CURDIR)/build/coverage/data
coverage: $(CLASSES) ## Branch coverage by test, test-sinks and all that they start
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(WITH_JAVA) $(BIN)/coverage run -m $(PYTEST) -m "not chaos and not connectors"
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report

# The parts that speak with the source (reader, streaming, catalog, types, preflight, connections), and
# the postgres sink, whose destination has the same version.
VERSIONS ?= 14 15 16 17 18
VERSION_TESTS := $(wildcard $(foreach part,reader* stream* catalog* published_relations \
	partition_roots annotations decode_from* type* preflight* identity heartbeat connections, \
	tests/reader/test_$(part).py)) $(wildcard tests/*/test_postgres_*.py)

.PHONY: test-versions
test-versions: $(CLASSES) ## The source's side and the postgres sink on Postgres 14 to 18; VERSIONS= names some
	@$(WITH_JAVA) $(BIN)/python -m tests.postgres_builds $(VERSIONS) >/dev/null && failed= && \
	for version in $(VERSIONS); do \
		echo "Postgres $$version"; \
		WALBROOK_TEST_POSTGRES_VERSION=$$version $(BIN)/pytest -n 2 --dist loadfile \
			-m "not chaos" $(VERSION_TESTS) $(ARGS) || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "Failed on Postgres$$failed"; exit 1; fi

# The other version of Spark that is supported, with everything else as locked.
SPARK := build/spark-4.2
SPARK_READY := $(SPARK)/.ready
# What Spark Connect and pipelines need; apart, because the service must do without it.
SPARK_EXTRAS := 'grpcio>=1.76' 'grpcio-status>=1.76' 'googleapis-common-protos>=1.71' \
	'zstandard>=0.25' 'pandas>=2.2,<3'
SPARK_TESTS := tests/spark tests/unit/spark tests/unit/expressions tests/workers/test_feed_body.py \
	tests/workers/test_event_worker.py tests/service/test_service.py

$(SPARK_READY): requirements.lock pyproject.toml | $(READY)
	@echo "Making $(SPARK) ..."
	@$(BIN)/python -m venv $(SPARK) && sed -e 's/ *\\$$//' -e '/^ *--hash/d' -e '/^pyspark==/d' \
		requirements.lock >$(SPARK)/requirements.txt
	@$(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r $(SPARK)/requirements.txt 'pyspark==4.2.*'
	@$(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--no-deps --config-settings editable_mode=compat -e .
	@$(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check \
		--target $(SPARK)/pipelines --upgrade $(SPARK_EXTRAS)
	@touch $@

.PHONY: test-spark-versions
test-spark-versions: $(SPARK_READY) ## Source, feed, service and Spark's connectors on Spark 4.2; ARGS= goes to pytest
	@$(WITH_JAVA) $(SPARK)/bin/pytest -n 2 --dist loadfile $(SPARK_TESTS) $(ARGS) && \
		WALBROOK_TEST_PIPELINES=$(CURDIR)/$(SPARK)/pipelines $(SPARK)/bin/pytest -m connectors \
			tests/spark/test_spark_connectors.py $(ARGS)

.PHONY: chaos
chaos: $(CLASSES) ## The tests that take minutes; ARGS= goes to pytest
	@$(WITH_JAVA) $(BIN)/pytest -m chaos $(ARGS)

.PHONY: fuzz
fuzz: export WALBROOK_TEST_EXAMPLES_FACTOR = 20
fuzz: $(READY) ## Every property with twenty times as many examples; ARGS= goes to pytest
	@$(WITH_JAVA) $(BIN)/$(PYTEST) -m hypothesis --timeout 3600

.PHONY: demo
demo: $(READY) ## The whole pipeline on this machine, nothing else needed
	@$(WITH_JAVA) $(BIN)/python -m demo

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

.PHONY: schema
schema: $(READY) ## Write migrations/schema.txt from the migrations, functions and views
	@$(BIN)/python -m tests.schema_snapshot

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
