PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install demo test fuzz check docs bench bench-estimators clean

help:
	@echo "make install  a virtual environment in .venv with everything for development"
	@echo "make demo     five optimizers at epsilon = 1, and a private model of a table: a plot and"
	@echo "              a report in demo-output/"
	@echo "make test     the tests, and the examples in the docs"
	@echo "make fuzz     the fuzzers, with TIMES (default 100) times as many examples as in make test"
	@echo "make check    lint, format, types"
	@echo "make docs     the documentation as a site in site/"
	@echo "make bench    side by side with peers, about 15 minutes"
	@echo "make bench-estimators DATA=dir    the estimators and their peers on the data sets in dir"

install: .venv/installed

# PyTorch first and pinned: what depends on it would fetch another build.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m privagrad.experiments.demo --out demo-output

test: install
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

TIMES ?= 100
fuzz: install
	PRIVAGRAD_FUZZ_EXAMPLES=$(TIMES) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_fuzz_tables.py tests/torch/guards/test_fuzz_models.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python -W ignore -m benchmarks glm_step
	$(BIN)/python -W ignore -m benchmarks lstm_step
	$(BIN)/python -W ignore -m benchmarks layers

bench-estimators: install
	@test -n "$(DATA)" || { echo "usage: make bench-estimators DATA=dir"; exit 2; }
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks estimators --data-dir "$(DATA)"

clean:
	rm -rf .venv demo-output site .mypy_cache .pytest_cache .ruff_cache
