# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine: `make demo` and `make test`.

# Which Python makes the environment; 3.11 to 3.13.
PYTHON ?= python3
# Where PyTorch's CPU build is, for a registry that has only the CUDA build.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# The CPU build that the stock wheel asks for.
TORCH := torch==2.13.0+cpu
# More for pytest, such as PYTEST_ARGS="-x -k hidden".
PYTEST_ARGS ?=
# More for the benchmark of extraction, such as BENCH_ARGS="--scale 0.1 --turns 3".
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DIST := build/dist
# What decides whether the wheel has to be built again.
SOURCES := CMakeLists.txt csrc vllm patches series requirements/stock-cpu.txt requirements/stock-cuda.txt \
    setup.py pyproject.toml MANIFEST.in README.md LICENSE
# What is linted; build/ may hold a tree of vLLM's own files.
PYTHON_SOURCES := benchmarks examples series tests tools vllm setup.py

# The environment's packages are the wheel's own, and nothing of the caller's.
export PYTHONPATH :=
export PYTHONNOUSERSITE := 1
# Models of the tests and the demo are made on the spot.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1

STEP = @printf '\n==> %s\n'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

##@ Use
.PHONY: help
help: ## show this
	@awk 'BEGIN {FS = ":.*## "} \
	    /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	    /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: install ## extract hidden states offline and online, compare with Transformers
	$(STEP) "demo: extraction against Transformers, with a tiny model"
	@$(BIN)/python tools/demo.py

.PHONY: wheel
wheel: build/wheel.stamp ## build the wheel into build/dist

.PHONY: install
install: build/install.stamp ## make .venv with the wheel and what the tests need

.PHONY: bench
bench: install ## measure what it costs, side by side; hours. BENCH_ARGS="--scale 0.1"
	$(STEP) "bench: the parts"
	@$(BIN)/python benchmarks/micro.py --output build/bench-parts.md
	$(STEP) "bench: the last hidden state"
	@$(BIN)/python benchmarks/last_hidden_state.py --output build/bench-last.md
	$(STEP) "bench: extraction, against plain and stock vLLM, and Transformers"
	@$(BIN)/python benchmarks/hidden_states.py --output build/bench.md $(BENCH_ARGS)

##@ Check
.PHONY: test
test: install ## run the tests with the installed wheel
	$(STEP) "test: pytest, but for what needs a GPU or very long"
	@$(BIN)/python -m pytest -m "not gpu and not soak" $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: install ## run the tests that need a CUDA device
	$(STEP) "test-gpu: pytest -m gpu"
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: soak
soak: install ## run the tests that take very long
	$(STEP) "soak: pytest -m soak"
	@$(BIN)/python -m pytest -m soak --timeout 0 $(PYTEST_ARGS)

.PHONY: check
check: build/lint.stamp ## lint, types, and the series against the stock release
	$(STEP) "check: ruff"
	@$(BIN)/ruff check $(PYTHON_SOURCES)
	@$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(STEP) "check: mypy"
	@$(BIN)/mypy
	$(STEP) "check: the series"
	@$(BIN)/python -m series verify

##@ Tidy up
.PHONY: clean
clean: ## remove what was built, and .venv
	rm -rf build dist $(VENV) .mypy_cache .pytest_cache .ruff_cache

# ---------------------------------------------------------------------------
# Files; each stamp stands for a step that has been done.

.PHONY: FORCE
FORCE:

# A hash, not times: a checkout of another commit changes times and may remove files.
# The device is in it, since the wheel of the other one will not do.
build/sources: FORCE $(BIN)/python
	@mkdir -p build
	@{ $(BIN)/python -c 'from series.release import *; print(choose_target())' && \
	    $(BIN)/python --version && \
	    find $(wildcard $(SOURCES)) -type f ! -name '*.pyc' -print0 \
	        | LC_ALL=C sort -z | xargs -0 sha256sum; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(BIN)/python:
	$(STEP) "environment: $(VENV), by $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	    || { echo "error: $(PYTHON) is not Python 3.11, 3.12 or 3.13: name one," \
	    "as in make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

build/wheel.stamp: build/sources
	$(STEP) "wheel: the stock wheel, with the series applied"
	@rm -rf $(DIST)
	@$(BIN)/python -m pip wheel . --no-deps -w $(DIST)
	@touch $@

build/install.stamp: build/wheel.stamp requirements/test.txt
	@if ! grep -qx cpu build/sources; then exit 0; fi; \
	printf '\n==> %s\n' "install: PyTorch's CPU build"; \
	$(BIN)/python -m pip install "$(TORCH)" || { \
	    printf '\n==> %s\n' "the registry has no $(TORCH): asking $(TORCH_CPU_INDEX)"; \
	    $(BIN)/python -m pip install "$(TORCH)" --index-url $(TORCH_CPU_INDEX); }
	$(STEP) "install: the wheel, what it requires, and what the tests require"
	@# By force: the same version may hold other files than before.
	@$(BIN)/python -m pip install --no-deps --force-reinstall $(DIST)/vllm-*.whl
	@$(BIN)/python -m pip install $(DIST)/vllm-*.whl -r requirements/test.txt
	@$(BIN)/python -m pip check
	@touch $@

# mypy sees what is installed: the types of vLLM, of PyTorch and of the tests' tools.
build/lint.stamp: build/install.stamp requirements/lint.txt
	$(STEP) "install: ruff and mypy"
	@$(BIN)/python -m pip install -r requirements/lint.txt
	@touch $@
