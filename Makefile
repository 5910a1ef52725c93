# From a bare checkout, with Python ≥ 3.11 and pip: `make run`, `make test`. Nothing else is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint types unit torture lapped overload clean

run: $(VENV)/installed
	$(BIN)/python -m tools.demo

test: lint types unit

lint: $(VENV)/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/tested
	$(BIN)/mypy

unit: $(VENV)/tested
	$(BIN)/python -m pytest

# The ring under random deaths, for five minutes: make torture ARGS="--seconds 3600 --seed 7"
torture: $(VENV)/tested
	PYTHONPATH=tests $(BIN)/python -m torture $(ARGS)

# 10⁹ frames past a reader that is lapped, 10⁸ past two that are killed: make lapped ARGS="--frames 1e7"
lapped: $(VENV)/tested
	PYTHONPATH=tests $(BIN)/python -m lapped $(ARGS)

# More than a receiver can take, in every way: make overload ARGS="--runs 20 --seed 7"
overload: $(VENV)/tested
	PYTHONPATH=tests $(BIN)/python -m overload $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "rxring needs Python 3.11 or newer: make PYTHON=python3.12 run"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/tested: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV)
