PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: help install lock demo test fast coverage fuzz faults mutate check docs package bench
.PHONY: bench-estimators audit clean

help:
	@echo "make install  a virtual environment in .venv with everything for development, as locked"
	@echo "make lock     write requirements.lock anew"
	@echo "make demo     five optimizers at epsilon = 1, and a private model of a table: a plot and"
	@echo "              a report in demo-output/"
	@echo "make check    lint, format, types"
	@echo "make fast     the fast half of the tests, about a minute"
	@echo "make test     all tests, and the examples in the docs"
	@echo "make coverage all tests, and the lines and branches that they do not reach"
	@echo "make fuzz     the fuzzers, with TIMES (default 100) times as many examples as in make test"
	@echo "make faults   kills at random moments, full disks, wrong clocks, ...: docs/faults.md"
	@echo "make mutate   privacy bugs put into the code, each of which a test must catch: docs/mutants.md"
	@echo "make docs     the documentation as a site in site/"
	@echo "make package  sdist and wheel in dist/, and a trial of the wheel without any extra"
	@echo "make audit    attacks on this library beside its claims, about 5 minutes: docs/audit.md"
	@echo "make bench    side by side with peers, about 25 minutes"
	@echo "make bench-estimators DATA=dir    the estimators and their peers on the data sets in dir"

install: .venv/installed

# PyTorch first: what depends on it would fetch another build.
.venv/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(PIP) $$(grep '^torch==' requirements.lock)
	$(PIP) -r requirements.lock
	$(PIP) --no-deps -e .
	touch $@

# The newest versions that pyproject.toml allows, beside the PyTorch of the lock file or TORCH=x.y.z.
TORCH ?= $(shell sed -n 's/^torch==//p' requirements.lock)
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet torch==$(TORCH)
	build/lock/bin/python -m pip install --quiet '.[dev]'
	echo '# Written by make lock on Python 3.11. Everything for development, pinned.' > requirements.lock
	build/lock/bin/python -m pip freeze --exclude privagrad | sed 's/+.*//' >> requirements.lock

demo: install
	$(BIN)/python -m privagrad.experiments.demo --out demo-output

test: install
	$(PYTEST) --dist worksteal

fast: install
	$(PYTEST) --dist worksteal -m "not slow" --hypothesis-profile=fast tests

coverage: install
	$(PYTEST) --dist worksteal --cov

TIMES ?= 100
fuzz: install
	PRIVAGRAD_FUZZ_EXAMPLES=$(TIMES) $(PYTEST) tests/test_fuzz_tables.py tests/torch/guards/test_fuzz_models.py
	mkdir -p build && rm -f build/fuzz-counts
	PRIVAGRAD_FUZZ_COUNTS=build/fuzz-counts PRIVAGRAD_FUZZ_EXAMPLES=$(TIMES) $(PYTEST) tests/test_fuzz_readers.py
	@sort build/fuzz-counts && awk '{n += $$2} END {print n " files in all"}' build/fuzz-counts

faults: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --write docs/faults.md

mutate: install
	$(BIN)/python -m tests.mutants --write docs/mutants.md

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package:
	rm -rf dist build/package
	$(PYTHON) -m venv build/package
	build/package/bin/python -m pip install --quiet build
	build/package/bin/python -m build
	build/package/bin/python -m pip install --quiet dist/*.whl
	build/package/bin/python .ci/try_wheel.py

bench: install
	$(BIN)/python -W ignore -m benchmarks noise
	$(BIN)/python -W ignore -m benchmarks startup
	$(BIN)/python -W ignore -m benchmarks glm_step
	$(BIN)/python -W ignore -m benchmarks small_model
	$(BIN)/python -W ignore -m benchmarks lstm_step
	$(BIN)/python -W ignore -m benchmarks ddp_step
	$(BIN)/python -W ignore -m benchmarks layers

bench-estimators: install
	@test -n "$(DATA)" || { echo "usage: make bench-estimators DATA=dir"; exit 2; }
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks estimators --data-dir "$(DATA)" --journal build/bench-estimators.jsonl

audit: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks audit --write docs/audit.md

clean:
	rm -rf .venv build dist demo-output site .coverage* .mypy_cache .pytest_cache .ruff_cache
