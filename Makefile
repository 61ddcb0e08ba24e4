# Two commands: `make demo` runs the main job, `make test` runs every test. Both set up what is missing.
#   TORCH        the torch to install, e.g. TORCH=torch==2.13.0
#   TORCH_INDEX  the package index it comes from, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH ?= torch
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-fast bench check format install clean
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || \
		$(BIN)/pip install --quiet "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@

demo: install
	$(BIN)/trl-opd demo --output_dir runs/demo

test: install
	$(BIN)/python -m pytest -m "not slow" -n auto
	$(BIN)/python -m pytest -m slow

test-fast: install
	$(BIN)/python -m pytest -m "not slow" -n auto

# on a machine where nothing else runs; writes the tables of docs/benchmarks.md
bench: install
	$(BIN)/python benchmarks/train_step.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/head.py --tokens 256 --vocab 49152 --write docs/benchmarks.md
	$(BIN)/python benchmarks/prepare.py --pairs 1 --write docs/benchmarks.md

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
