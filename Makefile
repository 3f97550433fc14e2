# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: install serve test lint bench clean

.venv/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/tidemill/ops/cpu/native/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

install: .venv/.installed

serve: install
	$(BIN)/tidemill serve $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(ARGS)

bench: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/serving.py $(ARGS)

clean:
	rm -rf .venv build src/*.egg-info
