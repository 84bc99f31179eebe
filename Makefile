# weft: everything a developer runs. `make` alone lists the targets.

PYTHON  ?= python3
# Test processes; each has one thread, since small tensors spend two threads waiting for each other.
WORKERS ?= 2

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/installed

# Larger data and published weights, for those who have them. Tests that need them are skipped elsewhere.
ifneq ($(wildcard ../shared/data/.),)
export WEFT_DATA ?= $(abspath ../shared/data)
endif
ifneq ($(wildcard ../shared/weights/.),)
export WEFT_WEIGHTS ?= $(abspath ../shared/weights)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench pictures check-long

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv with everything pinned; quick when nothing changed

# Always with the constraints: an unconstrained torch may bring gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-input $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## translate, see where the model looked, write a little Shakespeare
	@$(BIN)/python examples/demo.py

test: setup ## all tests but the long ones
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long"

lint: setup ## ruff (rules and format) and mypy, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## time every kernel against its reference and its peers
	@$(BIN)/python -m benchmarks.kernels

pictures: setup ## draw the pictures of docs/pictures/ again
	@$(BIN)/python -m docs.pictures

# pytest's 5 says that it found no test, which is no failure.
check-long: setup ## the long tests, then the kernels' benchmark
	@$(BIN)/python -m pytest -m long || [ $$? -eq 5 ]
	@$(MAKE) --no-print-directory bench
