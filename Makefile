# make demo       install, then train a small model end to end on the CPU (launch/quickstart.sh)
# make test       install, then run the test suite
# make lint       ruff and shellcheck
# make test-slow  long runs with a real pretrained model
# make sglang-env   .venv-sglang: the environment of real SGLang servers on a machine without a GPU (2.6 GB)
# make test-sglang  tests/sglang/ against real servers from there
# make gpu-check  the tests that need a CUDA device, then the benchmark on it (one card, under eight minutes)
# make clean      remove the environment and build products (never your runs)
#
# The environment: PYTHON=/path/to/python if given, else the active virtual environment, else .venv (created here).
# Without a CUDA device a CPU build of torch is installed (the default build brings gigabytes of CUDA libraries).

SHELL := /bin/bash
TORCH ?= torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BASE_PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

ifdef PYTHON
PY := $(PYTHON)
else ifdef VIRTUAL_ENV
PY := $(VIRTUAL_ENV)/bin/python
else
PY := $(CURDIR)/.venv/bin/python
endif
STAMP := build/installed$(shell printf %s "$(PY)" | tr -c 'A-Za-z0-9' '-')

.PHONY: demo test lint test-slow gpu-check sglang-env test-sglang clean install

demo: install
	PATH="$$(dirname "$(PY)"):$$PATH" PYTHON="$(PY)" bash launch/quickstart.sh

# Two files at a time: most tests keep one core busy. `python -m pytest` runs them one by one.
test: install
	"$(PY)" -m pytest -n 2 --dist loadfile

test-slow: install
	"$(PY)" -m pytest -m slow

# SGLang's own list would bring CUDA libraries; this one is what a server on a CPU imports. PYTHON_SGLANG: its Python.
PYTHON_SGLANG ?= $(CURDIR)/.venv-sglang/bin/python
sglang-env: build/sglang-env

build/sglang-env: tests/sglang/requirements.txt tests/sglang/requirements-no-deps.txt
	[ -x "$(PYTHON_SGLANG)" ] || "$(BASE_PYTHON)" -m venv .venv-sglang
	"$(PYTHON_SGLANG)" -m pip install -q "$(TORCH)+cpu" 2>/dev/null || \
		"$(PYTHON_SGLANG)" -m pip install -q --extra-index-url "$(TORCH_CPU_INDEX)" "$(TORCH)+cpu"
	"$(PYTHON_SGLANG)" -m pip install -q --no-deps -r tests/sglang/requirements-no-deps.txt
	"$(PYTHON_SGLANG)" -m pip install -q -r tests/sglang/requirements.txt
	mkdir -p build && touch build/sglang-env

test-sglang: install sglang-env
	"$(PY)" -m pytest -m sglang tests/sglang

gpu-check: install
	@"$(PY)" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "error: torch sees no CUDA device: run make gpu-check on a machine that has one" >&2; exit 1; }
	"$(PY)" -m pytest -m gpu
	"$(PY)" benchmarks/bench_gpu.py

lint: install
	@"$(PY)" -m ruff --version >/dev/null 2>&1 || "$(PY)" -m pip install -q -e '.[dev]'
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .
	@shellcheck=$$(command -v shellcheck || echo "$$(dirname "$(PY)")/shellcheck"); \
	if [ -x "$$shellcheck" ]; then "$$shellcheck" .ci/run launch/*.sh launch/*.sbatch && echo "shellcheck: ok"; \
	else echo "shellcheck is not installed: shell scripts were not checked"; fi

# The +cpu build may already be at hand (a local wheel folder); the index of CPU builds is asked otherwise.
define INSTALL_TORCH
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	"$(PY)" -m pip install "$(TORCH)"; \
else \
	"$(PY)" -m pip install -q "$(TORCH)+cpu" 2>/dev/null || \
	"$(PY)" -m pip install --extra-index-url "$(TORCH_CPU_INDEX)" "$(TORCH)"; \
fi
endef

# Installs only when setup.py changed or this checkout is not what the environment would import.
install:
	@if [ "$(STAMP)" -nt setup.py ] && "$(PY)" -P -c \
		'import sys, megappo; sys.exit(not megappo.__file__.startswith(sys.argv[1]))' "$(CURDIR)/" 2>/dev/null; \
	then exit 0; fi; \
	set -e; \
	if [ "$(PY)" = "$(CURDIR)/.venv/bin/python" ] && [ ! -x "$(PY)" ]; then \
		[ -n "$(BASE_PYTHON)" ] || { echo "error: Python 3.11 or newer is not on the PATH" >&2; exit 1; }; \
		"$(BASE_PYTHON)" -m venv .venv; \
	fi; \
	"$(PY)" -c 'import torch' 2>/dev/null || { $(INSTALL_TORCH); }; \
	"$(PY)" -m pip install -q -e '.[test]'; \
	mkdir -p build && touch "$(STAMP)"

clean:
	rm -rf .venv .venv-sglang build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
