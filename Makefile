# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint gpu-check coverage-table clean

PYTHON ?= python3
JOBS ?= 2
PARTS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Ranks share the machine: without a limit each would start a thread per core.
export OMP_NUM_THREADS ?= 1

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv with the pinned versions (PYTHON=python3, 3.10 or newer)

$(STAMP): constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=…") if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[pyg,cuda,test]'
	$(PIP) requests tqdm psutil scipy packaging
	$(PIP) --no-deps dgl==2.1.0 || echo 'DGL has no wheel for this platform: its tests are skipped'
	$(PIP) --no-deps mtkahypar || echo 'Mt-KaHyPar has no wheel for this platform: its test is skipped'
	touch $@

demo: $(STAMP) ## Train a GCN on a real graph, on PARTS=2 processes and on one device, side by side
	$(BIN)/python examples/demo.py --parts $(PARTS)

test: $(STAMP) ## Run all tests that need no GPU, on JOBS=2 workers
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not gpu'

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

gpu-check: $(STAMP) ## Check the CUDA kernels on a GPU: correctness, and speed against a copy
	$(BIN)/python benchmarks/gpu_check.py

coverage-table: $(STAMP) ## Try every convolution of DGL and PyG, and write docs/coverage.md
	$(BIN)/python tests/coverage/table.py

clean: ## Remove what was built and cached, but not .venv
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis kernels/*.so
