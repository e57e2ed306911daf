SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
SEEDS ?= 1
FUZZ ?=
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
SHARED := -n 3 --dist loadscope --no-loadscope-reorder
# Or every process of the tests compiles the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow test-grid test-slurm mutants lint fuzz docs tables bench check-gpu-pins

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Build the virtual environment (VENV=.venv); does nothing when it is current

$(READY): setup.py tools/setup.sh constraints/cpu-py312.txt constraints/cpu-py312-nodeps.txt
	@tools/setup.sh $(VENV)
	@touch $@

demo: $(READY) ## Train a tiny policy and show what it learned (SEEDS="1 2 3" for several, CONTROLS=1 for controls)
	@PYTHONWARNINGS=ignore $(PYTHON) -m tools.demo --seeds $(SEEDS) $(if $(CONTROLS),--controls)

test: $(READY) ## Run the tests, without the slow ones
	@$(PYTHON) -m pytest $(SHARED)

test-slow: $(READY) ## Run the slow tests
	@$(PYTHON) -m pytest -m slow $(SHARED)

test-grid: $(READY) ## Run the rest of the grids of weight transports and of moments to be killed at, which CI leaves out
	@$(PYTHON) -m pytest -m grid

test-slurm: $(READY) ## Start a Slurm of two nodes here, run its tests, stop it (as root it installs what is missing)
	@$(PYTHON) -m pytest -m slurm tests/slurm

mutants: $(READY) ## Plant faults in a copy of the tree, one at a time; some test must notice each (about five minutes)
	@$(PYTHON) tools/mutants.py

lint: $(READY) ## Check style, format and types
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m mypy

fuzz: $(READY) ## Damage files and texts by the thousand: each must be refused in a clear line (FUZZ="--only traces")
	@$(PYTHON) -m tools.fuzz $(FUZZ)

docs: $(READY) ## Write docs/configuration.md from the schema, the recipes' plans into docs/planning.md
	@$(PYTHON) -m mua.cli config docs > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md
	@PYTHONWARNINGS=ignore $(PYTHON) -m tools.planning_page

tables: $(READY) ## Run the grids of layouts and write their tables into docs/ (about five minutes)
	@MUA_WRITE_TABLES=1 $(PYTHON) -m pytest -m slow tests/parity/test_bridge_layouts.py
	@$(PYTHON) -m tools.layouts

bench: $(READY) ## Measure the stages of one training step on this machine
	@$(PYTHON) -m tools.bench.rl_step

check-gpu-pins: $(READY) ## Prove that the pins for Python 3.12 with CUDA resolve (minutes; installs nothing)
	@$(PYTHON) tools/check_gpu_pins.py
