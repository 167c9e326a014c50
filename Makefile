# Every target does its own set-up: a fresh machine needs only python >= 3.11 and the package registry.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test lint format types bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[demo,eval,gpu,dev]"
	touch $@

setup: $(STAMP)                 ## .venv, pinned packages, the embedded model
	$(BIN)/python -m flexicache_hf.models.embedded

demo: setup                     ## a real model answers about a 6,000-token document
	$(BIN)/flexicache generate --compare-dense

test: setup                     ## the whole suite (CPU, no network)
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup                    ## decode speed and device bytes against DynamicCache
	$(BIN)/python scripts/bench_decode.py
	$(BIN)/python scripts/plot_bytes.py

clean:
	rm -rf $(VENV) build dist *.egg-info
