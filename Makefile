# make demo    install, then make expert-sql from generated data: no GPU, minutes
# make demos   all eight experts and the page that compares them
# make test    install, then the tests
# make lint    ruff, mypy, snakefmt, snakemake --lint
# make bitsandbytes   install what method qlora and optimiser adamw_8bit need
# make verify  check every record against its sidecar
# make prune   remove training states that no result refers to
# make soak    kill trainers at random moments for MINUTES (10); weights must not notice
# make clean   forget results and state

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXPERT ?= expert-sql
MINUTES ?= 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Machines without an NVIDIA driver take the CPU build of the same torch where they can reach it.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX := $(if $(shell command -v nvidia-smi),,--extra-index-url $(TORCH_CPU_INDEX))
LOGGER := $(wildcard workflow/logger/pyproject.toml workflow/logger/*/*.py)
TORCH := $(shell grep ^torch== envs/requirements.lock)

.PHONY: demo demos test lint install bitsandbytes verify prune soak clean

demo: install
	$(BIN)/snakemake --cores 8 results/$(EXPERT)/report.json

demos: install
	$(BIN)/snakemake --cores 8

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check -l 100 Snakefile workflow/rules
	$(BIN)/snakemake --lint

install: $(VENV)/.logger

$(VENV)/.installed: envs/requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11; use PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-deps --retries 1 $(TORCH_INDEX) $(TORCH)
	$(BIN)/pip install -q -r envs/requirements.lock
	touch $@

# Built by the setuptools of the lock: no network. A build folder of before would be packed again.
$(VENV)/.logger: $(VENV)/.installed $(LOGGER)
	rm -rf workflow/logger/build
	$(BIN)/pip install -q --no-deps --no-build-isolation --force-reinstall ./workflow/logger
	touch $@

bitsandbytes: $(VENV)/.bitsandbytes

$(VENV)/.bitsandbytes: $(VENV)/.logger envs/requirements-bitsandbytes.lock
	$(BIN)/pip install -q -r envs/requirements-bitsandbytes.lock
	touch $@

$(VENV)/.dev: $(VENV)/.bitsandbytes envs/requirements-dev.lock
	$(BIN)/pip install -q -r envs/requirements-dev.lock
	touch $@

verify: install
	$(BIN)/python workflow/scripts/verify_results.py

prune: install
	$(BIN)/python workflow/scripts/prune_state.py

soak: $(VENV)/.dev
	PYTHONPATH=tests:workflow/scripts $(BIN)/python tests/train/soak.py --minutes $(MINUTES)

clean:
	rm -rf results state .snakemake
