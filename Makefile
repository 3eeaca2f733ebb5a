# The whole of moesaic from one command: `make demo`, `make test`. CONTRIBUTING.md says more.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
SETUP  ?= yes
JOBS   ?= $(shell nproc)
SOAK   ?= 1800

# SETUP=no: nothing is installed; the current Python and the system's tools and libraries serve.
ifeq ($(SETUP),no)
  BUILD     ?= build/system
  RUN_PYTHON = $(PYTHON)
else
  BUILD     ?= build/release
  RUN_PYTHON = $(VENV)/bin/python
  export PATH := $(abspath $(VENV))/bin:$(PATH)
endif

PYTHON_IS_EXPLICIT = $(if $(filter file,$(origin PYTHON)),no,yes)
# The package as built, and nothing written into the source tree.
WITH_PACKAGE = PYTHONPATH="$(abspath $(BUILD))/python$${PYTHONPATH:+:$$PYTHONPATH}" \
               HYPOTHESIS_STORAGE_DIRECTORY="$(abspath $(BUILD))/hypothesis"
SANITIZERS   = asan ubsan tsan

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-cpp test-python test-numa soak forks bench lint format clean $(SANITIZERS)

help:
	@echo "make demo     environment, build, then fine-tune a small MoE model, stock and through the engine"
	@echo "make test     environment, build, C++ and Python tests"
	@echo "make build    environment and build: $(VENV)/bin/moesaic, and 'import moesaic' in $(VENV)/bin/python"
	@echo "make bench    the benchmark table of docs/PERFORMANCE.md, on this host"
	@echo "make lint     clang-format, clang-tidy, ruff, mypy            make format   rewrites what they can"
	@echo "make asan, make ubsan, make tsan                              the C++ tests under that sanitizer"
	@echo "make soak     trains random shapes for SOAK=$(SOAK) seconds and watches memory, descriptors, threads"
	@echo "make test-numa   weights and threads on a machine with three NUMA nodes, in a QEMU guest"
	@echo "make forks    10,000 forks beside training, on each kind of threads"
	@echo "make clean    removes $(BUILD)"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) BUILD=$(BUILD) SETUP=$(SETUP) JOBS=$(JOBS)"

setup:
ifneq ($(SETUP),no)
	@scripts/setup "$(VENV)" "$(TORCH)" "$(PYTHON)" $(PYTHON_IS_EXPLICIT)
endif

build: setup
	@scripts/configure release "$(BUILD)" "$(RUN_PYTHON)" -DMOESAIC_BUILD_PYTHON=ON
	@cmake --build "$(BUILD)" -j $(JOBS)
ifneq ($(SETUP),no)
	@scripts/link_package "$(VENV)" "$(BUILD)"
endif

demo: build
	@$(WITH_PACKAGE) $(RUN_PYTHON) examples/finetune $(ARGS)

test: test-cpp test-python

test-cpp: build
	@ctest --test-dir "$(BUILD)" -j $(JOBS) --output-on-failure --no-tests=error

test-python: build
	@$(WITH_PACKAGE) $(RUN_PYTHON) -m pytest -o cache_dir="$(abspath $(BUILD))/pytest_cache" $(ARGS)

soak: build
	@$(WITH_PACKAGE) $(RUN_PYTHON) -W ignore::DeprecationWarning scripts/soak $(SOAK)

forks: build
	@$(WITH_PACKAGE) MOESAIC_TEST_FORKS=10000 $(RUN_PYTHON) -m pytest -o cache_dir="$(abspath $(BUILD))/pytest_cache" -k forks tests/python/test_conditions.py

# In a guest with several NUMA nodes; takes minutes, and tools that make setup does not install.
test-numa: setup
	@scripts/configure release "$(BUILD)" "$(RUN_PYTHON)" -DMOESAIC_BUILD_PYTHON=ON
	@cmake --build "$(BUILD)" -j $(JOBS) --target numa_guest_test
	@scripts/test_numa "$(BUILD)"

bench: build
	@$(WITH_PACKAGE) PYTHON="$(RUN_PYTHON)" scripts/bench $(ARGS)

lint format: setup
	@scripts/configure release "$(BUILD)" "$(RUN_PYTHON)" -DMOESAIC_BUILD_PYTHON=ON
	@$(WITH_PACKAGE) PYTHON="$(RUN_PYTHON)" SETUP="$(SETUP)" scripts/$@ "$(BUILD)"

$(SANITIZERS): setup
	@scripts/configure $@ build/$@ "$(RUN_PYTHON)"
	@cmake --build build/$@ -j $(JOBS)
	@scripts/sanitized_tests $@ build/$@ $(JOBS)

clean:
	rm -rf "$(BUILD)"
