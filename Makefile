# make build    environment and extensions        make test     everything a change must pass
# make demo     DDP and hvd_order side by side  make lint     style, types, import rules
# make sanitize C++ tests under ThreadSanitizer and AddressSanitizer
# make model-check  every interleaving of small jobs, and broken rules that this must find
# make fuzz     arbitrary bytes into what reads bytes of others (needs clang++)
# make defects  seeded defects, each with the test that must catch it: ONLY="shim engine"
# make chaos    faults at random in real jobs: MINUTES=10 SEED=1
# make bench    all benchmarks                    make results  page of results from benchmarks/results
#                                                 make format   rewrite sources in the project's style
# make docs     the documentation as a site, in out/site
# make check    = make test                       make clean    remove what was built, keep .venv
# make test PART=servers  the tests of one wing (hvd_order/servers/README.md): unit and multiproc
# make test-long  what takes too long for every change
# make size     lines and files by room, against the limits that the rooms' READMEs name
# make wheels   wheels and the sdist, in dist/     make test-wheel  installs them into an empty environment
# make release  sdist and wheels, checked, installed, with SBOM, hashes and notes: docs/releasing.md
# make test-containers  the images of docker/, built and run by podman
# make test-third-party  training by Lightning, Accelerate, Trainer, timm and Ignite
# make test-torch TORCH=2.8  the tests of logic and of the optimizer with another PyTorch
# make lock     requirements/lock from requirements, after a change there: UPGRADE=1 takes the newest of all dependencies
# make horovod  real Horovod in .venv, to test and measure against; builds it once, for minutes
#
# Settings: PYTHON (interpreter to make the environment with), VENV (where), JOBS (compilers at once),
# WERROR=OFF (let warnings pass), UNITY=OFF (compile each file alone: slower from nothing, faster
# after a change; `make clean` before), QUICK=1 (a short demo: shows that all works, not how fast),
# PARTS_AT_ONCE=2 (parts of the tests side by side).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
WERROR ?= ON
UNITY ?= ON

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CMAKE_DIR := build/cmake
BUILD_SETTINGS = HVD_ORDER_BUILD_DIR=$(CMAKE_DIR) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
  CMAKE_ARGS="$${CMAKE_ARGS:-} -DHVD_ORDER_WERROR=$(WERROR) -DHVD_ORDER_UNITY=$(UNITY)"

.PHONY: build dev demo docs size lock wheels release test test-device test-wheel test-containers test-long test-long-share test-third-party test-torch chaos defects check lint lint-python lint-cpp lint-cpp-format lint-docker format cpp-test sanitize model-check fuzz \
  bench results horovod clean

# ------------------------------------------------------------------------------ environment
# A stamp is named after the content of the files it stands for, so a changed pin installs again and
# a mere checkout does not.
key = $(shell cat $(1) | cksum | cut -d' ' -f1)
LOCKED = --require-hashes -r requirements/lock
RUN_STAMP := $(VENV)/.installed-run-$(call key,requirements/lock/run.txt requirements/lock/torch.txt requirements/torch.txt)
DEV_STAMP := $(VENV)/.installed-dev-$(call key,requirements/lock/dev.txt)
THIRD_PARTY_STAMP := $(VENV)/.installed-third-party-$(call key,requirements/lock/third_party.txt)
DOCS_STAMP := $(VENV)/.installed-docs-$(call key,requirements/lock/docs.txt)
LOCK_STAMP := $(VENV)/.installed-lock-$(call key,requirements/lock/uv.txt)
RELEASE_STAMP := $(VENV)/.installed-release-$(call key,requirements/lock/release.txt)
FUZZ_STAMP := $(VENV)/.installed-fuzz-$(call key,requirements/lock/fuzz.txt)
CUDA_STAMP := $(VENV)/.installed-cuda-$(call key,requirements/lock/cuda.txt)
TENSORFLOW_STAMP := $(VENV)/.installed-tensorflow-$(call key,requirements/lock/tensorflow.txt)
PROJECT_STAMP := $(VENV)/.installed-project-$(call key,pyproject.toml setup.py)

# A PyTorch that the user has installed, 2.8 or newer, is used rather than the pinned one; not that of
# an activated environment, since a new one sees the packages below it and not its own.
HAS_TORCH = "$(PYTHON)" -c "import sys, torch; v = torch.__version__.split('.'); \
  raise SystemExit(sys.prefix != sys.base_prefix or (int(v[0]), int(v[1])) < (2, 8) \
  or not torch.distributed.is_available())"

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; name one with: make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip' 2>/dev/null || \
	  { echo "This Python has no venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import os, sysconfig as s; \
	  raise SystemExit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || \
	  { echo "This Python has no C headers; on Debian and Ubuntu: apt install python3-dev" >&2; exit 1; }
	@if $(HAS_TORCH) 2>/dev/null; then \
	  echo "making $(VENV) with the PyTorch that $(PYTHON) has"; \
	  "$(PYTHON)" -m venv --system-site-packages "$(VENV)"; \
	else \
	  echo "making $(VENV)"; \
	  "$(PYTHON)" -m venv "$(VENV)"; \
	fi

$(RUN_STAMP): | $(BIN)/python
	@echo "installing requirements/lock/run.txt and PyTorch"
	@$(PIP) install $(LOCKED)/run.txt
	@grep -q 'include-system-site-packages = true' "$(VENV)/pyvenv.cfg" || \
	  { $(PIP) install $(LOCKED)/torch.txt && $(PIP) install -r requirements/torch.txt; }
	@rm -f "$(VENV)"/.installed-run-* && touch "$@"

$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing requirements/lock/dev.txt"
	@$(PIP) install $(LOCKED)/dev.txt
	@rm -f "$(VENV)"/.installed-dev-* && touch "$@"

# Only what tests TensorFlow needs it: half a minute, once.
$(TENSORFLOW_STAMP): $(RUN_STAMP)
	@echo "installing requirements/lock/tensorflow.txt"
	@$(PIP) install $(LOCKED)/tensorflow.txt
	@rm -f "$(VENV)"/.installed-tensorflow-* && touch "$@"

# nvcc, with which the build compiles the kernels for CUDA: seconds, once. The build says so if it
# goes on without.
$(CUDA_STAMP): $(RUN_STAMP)
	@echo "installing requirements/lock/cuda.txt"
	@$(PIP) install $(LOCKED)/cuda.txt || echo "nvcc could not be installed" >&2
	@rm -f "$(VENV)"/.installed-cuda-* && touch "$@"

# Half a minute, once. PyTorch stays what it is: torchvision, which timm needs, is the one that fits
# it, and what pip installs from the lock file finds both there.
$(THIRD_PARTY_STAMP): $(DEV_STAMP)
	@echo "installing requirements/lock/third_party.txt"
	@"$(BIN)/python" -c 'import torch; print("torch==" + torch.__version__)' > "$@.torch"
	@$(PIP) install torchvision -c "$@.torch"
	@$(PIP) install $(LOCKED)/third_party.txt
	@rm -f "$(VENV)"/.installed-third-party-* && touch "$@"

# Only `make docs` needs it: seconds, once.
$(DOCS_STAMP): | $(BIN)/python
	@echo "installing requirements/lock/docs.txt"
	@$(PIP) install $(LOCKED)/docs.txt
	@rm -f "$(VENV)"/.installed-docs-* && touch "$@"

# Only `make lock` needs it: seconds, once. A new pin of uv is locked by the uv before it.
$(LOCK_STAMP): | $(BIN)/python
	@echo "installing requirements/lock/uv.txt"
	@$(PIP) install $(LOCKED)/uv.txt
	@rm -f "$(VENV)"/.installed-lock-* && touch "$@"

# Only `make release` needs it: seconds, once.
$(RELEASE_STAMP): | $(BIN)/python
	@echo "installing requirements/lock/release.txt"
	@$(PIP) install $(LOCKED)/release.txt
	@rm -f "$(VENV)"/.installed-release-* && touch "$@"

# Only `make fuzz` needs it: a minute, once.
$(FUZZ_STAMP): $(RUN_STAMP)
	@echo "installing requirements/lock/fuzz.txt"
	@$(PIP) install $(LOCKED)/fuzz.txt
	@rm -f "$(VENV)"/.installed-fuzz-* && touch "$@"

# ------------------------------------------------------------------------------ build and run
# Ninja knows what has changed, so it is always asked. The project itself is installed once, as a
# link to this folder.
build: $(RUN_STAMP)
	@$(BUILD_SETTINGS) "$(BIN)/python" setup.py --quiet build_ext --inplace
	@if [ ! -e "$(PROJECT_STAMP)" ]; then \
	  $(BUILD_SETTINGS) $(PIP) install --no-build-isolation --no-deps --editable .; \
	  rm -f "$(VENV)"/.installed-project-* && touch "$(PROJECT_STAMP)"; \
	fi

# The build looks for nvcc, so it comes last.
dev: $(DEV_STAMP) $(TENSORFLOW_STAMP) $(CUDA_STAMP)
	@$(MAKE) --no-print-directory build

demo: build
	@"$(BIN)/python" -m benchmarks.tools.demo $(if $(QUICK),--quick)

# Strict: a broken link, or a page that the navigation lacks, is an error.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build
	@echo out/site/index.html

# A minute. The versions of the lock files stay where they fit, so a changed pin changes little else.
lock: $(LOCK_STAMP)
	@"$(BIN)/python" scripts/lock_requirements.py $(if $(UPGRADE),--upgrade)

# For each Python from 3.10 to 3.13 that this machine has, with engines for each PyTorch release: the
# first time fetches gigabytes. WHEEL_OPTIONS: see scripts/build_wheels.py --help.
wheels: $(RUN_STAMP)
	"$(BIN)/python" scripts/build_wheels.py $(WHEEL_OPTIONS)

# Everything that a release consists of, into dist. It publishes nothing. REHEARSAL=1 says what forbids a
# release, and goes on.
release: $(RELEASE_STAMP) $(DEV_STAMP)
	rm -rf dist
	@$(MAKE) --no-print-directory wheels
	HVD_ORDER_DIST="$(abspath dist)" "$(BIN)/python" -m pytest tests/wheel/test_release.py
	"$(BIN)/python" scripts/release.py $(if $(REHEARSAL),--rehearsal)

bench: build
	"$(BIN)/cmake" --build $(CMAKE_DIR) --target cpp_benchmarks
	PATH="$(abspath $(BIN)):$$PATH" bash benchmarks/run_all.sh

# Pages, pictures and the tables of README.md and HISTORY.md, from the data files alone.
results: $(DEV_STAMP)
	@"$(BIN)/python" -m benchmarks.results_page

# Horovod is no dependency; tests and benchmarks that compare with it skip or say so without it.
horovod: build
	@VENV="$(VENV)" JOBS="$(JOBS)" bash scripts/build_horovod.sh

# ------------------------------------------------------------------------------ checks
# Tests of jobs wait for much of their time, so parts run side by side, the longest first. Three at once
# keep two cores busy all the time, and tests time out.
TEST_PARTS = launch jobs faults optimizer parity logic servers tensorflow device
TESTS_parity = tests/parity
TESTS_optimizer = tests/multiproc/optimizer
TESTS_logic = tests/unit tests/property tests/test_import_rules.py tests/test_stub_matches.py
TESTS_device = tests/multiproc/device tests/gpu
TESTS_servers = tests/multiproc/servers
TESTS_tensorflow = tests/multiproc/tensorflow
TESTS_jobs = tests/multiproc/collectives tests/multiproc/job tests/multiproc/watch
TESTS_launch = tests/multiproc/cluster tests/multiproc/launch
TESTS_faults = tests/chaos tests/hosts tests/random_programs tests/reference
PARTS_AT_ONCE ?= 2
ifdef PART
test: dev
	"$(BIN)/python" -m pytest $(or $(wildcard tests/unit/$(PART) tests/multiproc/$(PART)),\
	  $(error there are no tests of '$(PART)': PART is a folder of tests/unit or tests/multiproc))
else
test: dev
	@$(MAKE) --no-print-directory --jobs=$(JOBS) cpp-test $(LINT_PARTS)
	@$(MAKE) --no-print-directory --jobs=$(PARTS_AT_ONCE) --keep-going $(TEST_PARTS:%=test-part-%) test-device
endif

# What a part prints is shown if it fails.
$(TEST_PARTS:%=test-part-%): test-part-%: dev
	@echo "tests of $*: build/test-$*.log"
	@"$(BIN)/python" -m pytest --durations=25 --durations-min=5 $(TESTS_$*) > build/test-$*.log 2>&1 || \
	  { cat build/test-$*.log; exit 1; }
	@echo "tests of $*: $$(tail -n 1 build/test-$*.log)"

# The test device can be loaded once, and not beside what the other tests load.
test-device: dev
	"$(BIN)/python" -m pytest tests/device

test-wheel: $(DEV_STAMP)
	"$(BIN)/python" -m pytest tests/wheel

# Skips, and says so, without root and Debian's podman, runc and mmdebstrap.
test-containers: $(DEV_STAMP)
	"$(BIN)/python" -m pytest tests/containers

test-third-party: $(THIRD_PARTY_STAMP) dev
	"$(BIN)/python" -m pytest tests/third_party
	"$(BIN)/python" -m pytest tests/parity/test_separability.py -k timm

# The oldest PyTorch that the project promises; minutes, and gigabytes where pip finds no CPU build.
TORCH ?= 2.8
test-torch:
	bash scripts/test_with_torch.sh $(TORCH)

# SHARE=3/$(SHARES): the fourth share. A share fails if it takes longer than ten minutes. In SHARES changes .ci/run
# has run all of them, one a change. TIMES=1: put the times into tests/long_times.txt, by which shares are packed.
SHARES := 20
test-long: dev
	HVD_ORDER_TEST_ALL_CASES=1 "$(BIN)/python" -m pytest --durations=25 --durations-min=5 tests -m long \
	  $(SHARE:%=--share %) $(if $(TIMES),--keep-times)

# The share of a commit follows from its hash.
test-long-share:
	@$(MAKE) --no-print-directory test-long \
	  SHARE=$$((0x$$(git rev-parse HEAD | cut -c 1-8) % $(SHARES)))/$(SHARES)

# What is drawn follows from SEED; see tests/chaos/README.md.
MINUTES ?= 10
SEED ?= 1
chaos: dev
	PYTHONPATH=.:tests "$(BIN)/python" tests/chaos/run.py --minutes $(MINUTES) --seed $(SEED) \
	  --out out/chaos/seed$(SEED).jsonl

# See tests/defects/README.md. Hours: a defect in C++ costs a build.
defects: dev
	"$(BIN)/python" tests/defects/run.py $(ONLY)

check: test

cpp-test: build
	"$(BIN)/cmake" --build $(CMAKE_DIR) --target cpp_tests
	"$(BIN)/ctest" --test-dir $(CMAKE_DIR) --output-on-failure --no-tests=error

# See tests/model_checker/README.md.
model-check: build
	"$(BIN)/cmake" --build $(CMAKE_DIR) --target model_checker mutants
	$(CMAKE_DIR)/model_checker
	$(CMAKE_DIR)/model_checker --large
	"$(BIN)/python" tests/model_checker/run_mutants.py $(CMAKE_DIR)/mutants/bin

CPP_FILES = $(shell find csrc tests/cpp tests/device tests/fuzz tests/model_checker benchmarks -name '*.cc' -o -name '*.cu' -o -name '*.h' | sort)
# clang-tidy reads files that need neither PyTorch nor Python: those take seconds, not minutes.
PURE_FOLDERS = base torch/cuda scheduler engine transport servers servers/arithmetic servers/wire servers/worker servers/slice servers/admission planning planning/network planning/sampled planning/sampled/links
TIDY_FILES = $(wildcard $(foreach folder,$(PURE_FOLDERS),csrc/$(folder)/*.cc))
HEADERS = $(wildcard $(foreach folder,$(PURE_FOLDERS),csrc/$(folder)/*.h))

LINT_PARTS = lint-python lint-cpp lint-docker
lint: dev
	@$(MAKE) --no-print-directory --jobs=$(JOBS) $(LINT_PARTS)

# A table; fails where a room has outgrown its README.
size:
	@"$(PYTHON)" scripts/size.py

lint-python: size
	"$(BIN)/ruff" check
	"$(BIN)/ruff" format --check
	"$(BIN)/lint-imports" --no-logo
	"$(BIN)/mypy"

lint-cpp: lint-cpp-format $(TIDY_FILES:%=build/lint/%.tidy)
lint-cpp-format:
	@echo clang-format
	@"$(BIN)/clang-format" --dry-run -Werror $(CPP_FILES)

lint-docker:
	@if [ -x "$(BIN)/hadolint" ]; then "$(BIN)/hadolint" docker/Dockerfile docker/Dockerfile.cuda; \
	else echo "hadolint has no package for this machine; docker/ is not checked"; fi

# One stamp a file: what has not changed since it passed is not read again.
build/lint/%.tidy: % $(HEADERS) .clang-tidy requirements/lock/dev.txt
	@echo clang-tidy $<
	@"$(BIN)/clang-tidy" --quiet -p $(CMAKE_DIR) $< 2> >(grep -v 'warnings generated' >&2)
	@mkdir -p "$(@D)" && touch "$@"

format: $(DEV_STAMP)
	"$(BIN)/ruff" check --fix
	"$(BIN)/ruff" format
	"$(BIN)/clang-format" -i $(CPP_FILES)

# Scheduler and engine with their tests, twice, without Python.
sanitize: sanitize-thread sanitize-address
sanitize-thread: SANITIZERS := thread
sanitize-address: SANITIZERS := address,undefined
.PHONY: sanitize-thread sanitize-address
sanitize-thread sanitize-address: $(RUN_STAMP)
	"$(BIN)/cmake" -S . -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
	  -DHVD_ORDER_PYTHON=OFF -DHVD_ORDER_SANITIZE=$(SANITIZERS) -DHVD_ORDER_WERROR=$(WERROR)
	"$(BIN)/cmake" --build build/$@ --target cpp_tests
	"$(BIN)/ctest" --test-dir build/$@ --output-on-failure --no-tests=error

# One program a file of tests/fuzz; see the README there.
CLANGXX ?= clang++
FUZZ_RUNS ?= 1000000
FUZZ_TARGETS ?= $(notdir $(basename $(wildcard tests/fuzz/*_fuzz.cc tests/fuzz/*_fuzz.py)))
FUZZ_PROGRAMS = $(patsubst tests/fuzz/%.cc,build/fuzz/%,$(wildcard $(FUZZ_TARGETS:%=tests/fuzz/%.cc)))
FUZZ_SOURCES = $(wildcard $(foreach folder,base scheduler engine transport servers servers/arithmetic servers/wire servers/worker servers/slice servers/admission,csrc/$(folder)/*.cc))
FUZZ_FLAGS = -std=c++20 -O1 -g -Wall -Wextra -Wno-missing-field-initializers -Icsrc \
  -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
fuzz: $(FUZZ_STAMP) build
	@echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' | \
	  "$(CLANGXX)" -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null || \
	  { echo "make fuzz needs clang++ with libFuzzer; on Debian and Ubuntu: apt-get install clang" \
	    "(or name one with: make fuzz CLANGXX=...)" >&2; exit 1; }
	@mkdir -p build/fuzz
	@$(if $(FUZZ_PROGRAMS),$(MAKE) --no-print-directory --jobs=$(JOBS) $(FUZZ_PROGRAMS))
	@for target in $(FUZZ_TARGETS); do \
	  echo "$$target: $(FUZZ_RUNS) inputs"; \
	  mkdir -p build/fuzz/corpus/$$target; \
	  program=build/fuzz/$$target; \
	  if [ -f tests/fuzz/$$target.py ]; then program="$(BIN)/python tests/fuzz/$$target.py"; fi; \
	  $$program -runs=$(FUZZ_RUNS) -max_len=4096 -timeout=10 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus/$$target || exit 1; \
	done

build/fuzz/%: tests/fuzz/%.cc $(FUZZ_SOURCES) $(HEADERS)
	@mkdir -p "$(@D)"
	"$(CLANGXX)" $(FUZZ_FLAGS) $< $(FUZZ_SOURCES) -o $@

clean:
	rm -rf build dist out ./*.egg-info hvd_order/_native/*.so hvd_order/_native/torch_*_*
	rm -f "$(VENV)"/.installed-project-*
