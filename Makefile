# make demo   train a small Llama on real text and print what fxckpt saved
# make test   everything a change has to pass: lint, types, tests, docs
# make slow   the long tests: every architecture
#
# Both install into their own .venv; they install again only when pyproject.toml or constraints-dev.txt change.

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -qq --constraint constraints-dev.txt
REQUIREMENTS := pyproject.toml constraints-dev.txt
RUN_STAMP := $(VENV)/.installed-transformers
DEV_STAMP := $(VENV)/.installed-dev

# One thread a process, so that parallel test processes do not fight over the cores; nothing comes from a model hub.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help demo test lint types tests slow docs format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(RUN_STAMP)
	$(BIN)/python examples/train_llama.py

test: lint types tests docs

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP)
	$(BIN)/mypy

tests: $(DEV_STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(DEV_STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf site dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fxckpt needs Python 3.11 or newer. Name one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): $(REQUIREMENTS) | $(BIN)/python
	@echo 'Installing fxckpt with transformers into $(VENV) (some minutes the first time) ...'
	$(PIP_INSTALL) --editable '.[transformers]'
	@touch $@

$(DEV_STAMP): $(REQUIREMENTS) | $(BIN)/python
	@echo 'Installing fxckpt with its development tools into $(VENV) (some minutes the first time) ...'
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(RUN_STAMP)
