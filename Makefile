SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
SEEDS ?= 1
FUZZ ?=
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
# uv resolves for the machines that train, whatever machine it runs on.
COMPILE = $(PYTHON) -m uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_35 \
  --no-header --no-annotate --no-emit-index-url
GPU_INPUTS := setup.py constraints/gpu-py312-cu-source.txt --no-emit-package transformer-engine-torch \
  --extra gpu --extra dev --extra docs --extra tools --extra parquet --extra postgres
# PyTorch's CPU build of the same version needs none of them.
CUDA_OF_TORCH := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13
UPGRADE ?=
ROTATE ?=
SHARED := -n 3 --dist loadscope --no-loadscope-reorder
# Or every process of the tests compiles the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow test-all rotate test-grid test-slurm mutants lint fuzz docs site goldens tables lock check-gpu-pins

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Build the virtual environment (VENV=.venv); does nothing when it is current

$(READY): setup.py tools/setup.sh constraints/cpu-py312.txt constraints/cpu-py312-nodeps.txt
	@tools/setup.sh $(VENV)
	@touch $@

demo: $(READY) ## Train a tiny policy and show what it learned (SEEDS="1 2 3" for several, CONTROLS=1 for controls)
	@PYTHONWARNINGS=ignore $(PYTHON) -m mua.cli demo --seeds '$(SEEDS)' $(if $(CONTROLS),--controls)

test: $(READY) ## Run the tests without the slow ones (ROTATE=1: and this landing's share of those, as CI does)
	@$(PYTHON) -m pytest $(SHARED) $(if $(ROTATE),--rotate -m 'not gpu and not grid')

test-slow: $(READY) ## Run the slow tests
	@$(PYTHON) -m pytest -m slow $(SHARED)

test-all: $(READY) ## Run every test that needs no GPU: slow ones, whole grids, Slurm
	@$(PYTHON) -m pytest -m 'not gpu' $(SHARED)

rotate: $(READY) ## Begin a landing: CI takes the next third of the slow tests, and compares rooms with this commit
	@$(PYTHON) -m tests.rotation --advance

test-grid: $(READY) ## Run the rest of the grids of weight transports and of moments to be killed at, which CI leaves out
	@$(PYTHON) -m pytest -m grid

test-slurm: $(READY) ## Start a Slurm of two nodes here, run its tests, stop it (as root it installs what is missing)
	@$(PYTHON) -m pytest -m slurm tests/slurm

mutants: $(READY) ## Plant faults in a copy of the tree, one at a time; some test must notice each (about five minutes)
	@$(PYTHON) tools/mutants.py

lint: $(READY) ## Check style, format, types and the documentation's links
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m mypy
	@$(MAKE) --no-print-directory site

fuzz: $(READY) ## Damage files and texts by the thousand: each must be refused in a clear line (FUZZ="--only traces")
	@$(PYTHON) -m tools.fuzz $(FUZZ)

site: $(READY) ## Build the documentation as a site in build/site; a broken link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

docs: $(READY) ## Write what the pages have from code: configuration, commands, metrics, diagnosis, the recipes' plans
	@$(PYTHON) -m mua.cli config docs > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md
	@$(PYTHON) -m mua.cli metrics docs > docs/metrics.md.new
	@mv docs/metrics.md.new docs/metrics.md
	@$(PYTHON) -m tools.commands_page
	@$(PYTHON) -m tools.diagnosis_page
	@PYTHONWARNINGS=ignore $(PYTHON) -m tools.planning_page

goldens: $(READY) ## Write what each recipe becomes on a GPU into tests/data/golden, and what differs without TE into docs
	@PYTHONWARNINGS=ignore $(PYTHON) -m tools.goldens

tables: $(READY) ## Run the grids of layouts and write their tables into docs/ (about five minutes)
	@MUA_WRITE_TABLES=1 $(PYTHON) -m pytest -m "slow or grid" tests/parity/test_bridge_layouts.py
	@$(PYTHON) -m tools.layouts

lock: $(READY) ## Write constraints/ from setup.py; versions that are pinned already stay (UPGRADE=-U renews all)
	@$(COMPILE) $(GPU_INPUTS) $(UPGRADE) -o constraints/gpu-py312-cu.txt >/dev/null
	@$(COMPILE) setup.py --extra cpu --extra dev --extra docs --extra tools --extra parquet --extra postgres \
	  -c constraints/gpu-py312-cu.txt $(UPGRADE) --excludes <(printf '%s\n' $(CUDA_OF_TORCH)) -o constraints/cpu-py312.txt >/dev/null
	@grep -E '^(sglang|xgrammar)==' constraints/gpu-py312-cu.txt > constraints/cpu-py312-nodeps.txt

check-gpu-pins: $(READY) ## Prove that the pins for Python 3.12 with CUDA resolve (seconds; installs nothing)
	@found=$$($(COMPILE) constraints/gpu-py312-cu.txt --only-binary :all:) && diff constraints/gpu-py312-cu.txt - <<< "$$found"
	@found=$$($(COMPILE) $(GPU_INPUTS) -c constraints/gpu-py312-cu.txt) && diff constraints/gpu-py312-cu.txt - <<< "$$found"
	@$(COMPILE) constraints/gpu-py312-cu-source.txt --no-deps --no-binary :all: >/dev/null
	@echo "gpu-py312-cu.txt: $$(wc -l < constraints/gpu-py312-cu.txt) wheels go together on Python 3.12, Linux x86-64," \
	  "glibc 2.35; the source in gpu-py312-cu-source.txt is published"
