# make help         this list
# make demo         install, then make EXPERT (expert-sql) from generated data: no GPU, minutes
# make install      install into .venv, and no more; then: source .venv/bin/activate
# make run          make EXPERT: make run EXPERT=mine
# make plan         what that would run, with hours and dollars
# make compare      two reports side by side: make compare A=mine B=other, or B=elsewhere/results/mine
# make demos        all eight experts and the page that compares them
# make test         install, then the tests of a change, with WORKERS (2): minutes
# make coverage     the same, and which branches of each package they reach
# make test-long    install the extras, then the tests that need them or take minutes each
# make test-all     all tests: test, test-long, slurm-test, check-demos
# make lint         ruff, mypy, snakefmt, snakemake --lint
# make bitsandbytes install what method qlora and optimizer adamw_8bit need
# make slurm        install what profiles/slurm and profiles/cluster-generic need
# make s3           install what object storage needs
# make node         install the Node that runs generated TypeScript, in its sandbox
# make graph        install what runs generated Cypher on a small graph
# make lm-eval      install what evaluation.lm_eval needs
# make triton       install what bench/without_a_card.py needs besides a CPU build of torch
# make verify       read every file of results and state; list what is damaged, missing, unknown
# make repair       remove what is damaged, so that the next run makes it again
# make check-demos  all experts, and whether each has learned what it should
# make prune        remove states, tokens and copies that no result uses, and what killed jobs left
# make slurm-test   the chain on a single-machine Slurm; needs root and its packages
# make soak         kill trainers at random moments for MINUTES (10); weights must not change
# make mutants      change the code in MUTANTS (300) ways per module; tests must notice (hours)
# make clean        delete results and state

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXPERT ?= expert-sql
CORES ?= 8
MINUTES ?= 10
MUTANTS ?= 300
WORKERS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# If Python is set to write no bytecode, as in many images, each job would compile ours again.
unexport PYTHONDONTWRITEBYTECODE
# Machines without an NVIDIA driver take the CPU build of the same torch if they can reach it.
TORCH_CPU := https://download.pytorch.org/whl/cpu
REACHES := $(PYTHON) -c 'from urllib.request import urlopen as o; o("$(TORCH_CPU)/torch/", timeout=5)'
TORCH_INDEX = $$(command -v nvidia-smi >/dev/null || ! $(REACHES) 2>/dev/null || echo --extra-index-url $(TORCH_CPU))
# uv does in seconds what takes pip a minute. It does not read pip's settings, so pip installs torch.
UV := $(shell command -v uv)
PIP := $(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/pip install -q) --no-compile
# Importing these compiles what jobs need, a third of all bytecode, in two processes.
IMPORTED := snakemake.cli,smart_open,requests,rich.live,msgspec,altair,sqlglot,graphglot,datasets transformers.models.qwen3.modeling_qwen3,peft
TORCH := $(shell grep ^torch== envs/requirements.lock)

.PHONY: help demo run plan compare demos check-demos test coverage test-long test-all slurm-test lint install bitsandbytes slurm s3 node graph lm-eval triton verify repair prune soak mutants clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: install
	$(BIN)/snakemake --cores 8 results/$(EXPERT)/report.json

run: install
	$(BIN)/snakemake --cores all 'results/$(EXPERT)/report.json'

plan: install
	$(BIN)/snakemake -n 'results/$(EXPERT)/report.json'

# An expert of this folder, or the folder of a report elsewhere.
report = '$(if $(findstring /,$(1)),$(1),results/$(1))/report.json'

compare: install
	@$(if $(and $(A),$(B)),,echo "error: which two? make compare A=mine B=other"; exit 1)
	@$(BIN)/python workflow/scripts/show_report.py $(call report,$(A)) $(call report,$(B))
	@$(BIN)/python workflow/scripts/compare_experts.py --spec '{}' --output results/compare.json \
	  --html results/compare.html --files results/compare.html \
	  --reports $(call report,$(A)) $(call report,$(B))
	@echo "side by side           results/compare.html"

demos: install
	$(BIN)/snakemake --cores $(CORES)

check-demos: demos
	$(BIN)/python tests/workflow/check_demos.py

# A worker takes a complete file, so that its fixtures are made once. One thread each: two workers
# with many threads would only get in each other's way.
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK := -m 'not long and not extra and not slurm'
WHAT := unit and property tests, one complete chain, what each edit reruns: 5 minutes on two cores
REST := The rest, 25 minutes more: make test-all

# Printed before the installation, which takes minutes.
say:
	@echo "$(WHAT)"

test: say $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(QUICK) --progress "$(REST)"

test-long: $(VENV)/.dev
	@echo "interruptions, bundles, studies, several processes, extras, real data: about 20 minutes"
	@OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m '(long or extra) and not slurm' --progress ""

test-all: test test-long slurm-test check-demos

# Processes that tests start write their coverage here, too.
coverage: export COVERAGE_FILE := $(CURDIR)/.coverage_cache/data
coverage: say $(VENV)/.coverage
	@rm -rf .coverage_cache && mkdir .coverage_cache
	@OMP_NUM_THREADS=1 $(BIN)/coverage run --source $(CURDIR)/workflow $(PYTEST) $(QUICK) \
	  --progress "$(REST)"
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage json -q -o - | $(BIN)/python tests/coverage_by_package.py

slurm-test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slurm tests/slurm

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check -l 100 Snakefile workflow/rules workflow/remote.smk
	$(BIN)/snakemake --lint
	$(BIN)/snakemake --lint -s workflow/remote.smk

install: $(VENV)/.plugin

# Two pips at once, each with a part of the lock, take little more than half as long as one. The last
# call adds what the CUDA build of torch needs.
$(VENV)/.installed: envs/requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11; use PYTHON=python3.11"; exit 1; }
	@echo "installing about 90 packages into $(VENV), once; this takes minutes"
	@$(PYTHON) -m venv $(VENV)
	@{ echo $(TORCH_INDEX) $(TORCH); $(if $(UV),,grep -v -e '^#' -e ^torch= $< | xargs -n 19;) } \
	  | xargs -P 2 -L 1 $(BIN)/pip install -q --no-compile --no-deps
	@$(PIP) -r $<
	@printf '%s\n' $(IMPORTED) | xargs -P 2 -n 1 $(BIN)/python -c \
	  'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1].split(",")]'
	touch $@

# Snakemake reads the plugin from this folder. A copy installed by an earlier make would shadow it.
$(VENV)/.plugin: $(VENV)/.installed
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && rm -rf "$$site"/snakemake_logger_plugin_expertflow* \
	  && echo "$$PWD/workflow/logger" > "$$site/expertflow.pth"
	@touch $@

# Extras: packages that only one feature needs have their own lock.
EXTRAS := bitsandbytes slurm s3 node graph lm-eval triton

bitsandbytes slurm s3 node graph lm-eval triton: %: $(VENV)/.%

$(EXTRAS:%=$(VENV)/.%): $(VENV)/.%: $(VENV)/.plugin envs/requirements-%.lock
	$(PIP) -r envs/requirements-$*.lock
	touch $@

# What tests without extras need, what measures coverage, and what other tests and linters need. The
# lm-eval harness has thirty dependencies, and its tests do without it.
$(VENV)/.test: $(VENV)/.plugin envs/requirements-test.lock
	$(PIP) -r envs/requirements-test.lock
	touch $@

$(VENV)/.coverage: $(VENV)/.test envs/requirements-coverage.lock
	$(PIP) -r envs/requirements-coverage.lock
	touch $@

$(VENV)/.dev: $(patsubst %,$(VENV)/.%,test $(filter-out lm-eval,$(EXTRAS))) envs/requirements-dev.lock
	$(PIP) -r envs/requirements-dev.lock
	touch $@

verify: install
	$(BIN)/python workflow/scripts/verify_results.py

repair: install
	$(BIN)/python workflow/scripts/repair_results.py

prune: install
	$(BIN)/python workflow/scripts/prune_state.py

soak: $(VENV)/.dev
	PYTHONPATH=tests:workflow/scripts $(BIN)/python tests/train/soak.py --minutes $(MINUTES) $(SEED:%=--seed %)

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants.py --sample $(MUTANTS) --workers $(WORKERS)

clean:
	rm -rf results state .snakemake
