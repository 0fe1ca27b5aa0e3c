# SPDX-License-Identifier: Apache-2.0
# Everything runs in a virtual environment of its own. PYTHON picks the interpreter, VENV the directory.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# What is tested, by version and hash. torch goes apart, by version alone: which of its builds a machine has (for CPUs, for
# GPUs) is the machine's matter, and each has other hashes.
LOCK := requirements/tested.txt
TORCH := $(shell grep '^torch==' requirements/tested.in)
LATEST_TORCH := torch==2.15.0

# Megatron-LM's sources, for its own scripts. MEGATRON_LM_SOURCE names a mirror.
MEGATRON_LM ?= build/megatron-lm
MEGATRON_LM_TAG ?= core_v0.16.1

# Native code built to be attacked: no bound of memory and no rule of C++ is broken without a report. Apart from setup.py,
# whose flags are for speed. SECONDS for all fuzzers together, SEED for other cases, FUZZ=NAME[:CASE] for one fuzzer.
SANITIZED := build/sanitized
SANITIZE := -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS
SECONDS ?= 60
SEED ?= 1
ROUNDS ?= 1000
FUZZ ?=

# What torch 2.8, 2.9 and 2.10, 2.11, and 2.12 come with, and the latest.
NCCL := cu12==2.27.3 cu12==2.27.5 cu13==2.28.9 cu13==2.29.7 cu13==2.32.3
# CUDA's runtime, and the package with the headers that it includes.
CUDA_12 := nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-nvcc-cu12==12.8.93
CUDA_12_FOR_C := $(CUDA_12) nvidia-cuda-cccl-cu12==12.8.90
CUDA_13 := nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37

# One stamp per step: a step is done again only if its list of requirements has changed.
CREATED := $(VENV)/.adaptra-created
FOUNDATION := $(VENV)/.adaptra-foundation
INSTALLED := $(VENV)/.adaptra-installed
NATIVE := $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help install lock demo megatron test test-slow properties test-native-sanitized fuzz-recordings test-dropin test-megatron-units test-versions \
	test-nccl test-nccl-host docs site dist \
	test-pages test-rdma bench-rdma soak campaign-deaths closed-loop postings lint
.DELETE_ON_ERROR:

help:
	@echo 'make install  virtual environment in $(VENV) with torch, Megatron-core and this package'
	@echo 'make demo     train a small GPT with and without adaptra while a link turns slow'
	@echo 'make test     every test but the slow ones'
	@echo 'make test-slow  the slow ones'
	@echo 'make properties  property tests with random examples, until one fails (SEED=7 for others, ROUNDS=1 to end)'
	@echo 'make test-native-sanitized  fuzzers on native code built with sanitizers (SECONDS=3600 SEED=1000000 for more)'
	@echo 'make fuzz-recordings  spoilt recordings into adaptra analyze: no traceback (SECONDS=3600 SEED=1000000 for more)'
	@echo 'make test-pages  pictures of reports in headless Chromium, and axe-core on them; diagrams parse (needs node, npm and Chromium)'
	@echo 'make test-rdma  the verbs transport on Soft-RoCE in a virtual machine (installs QEMU if it is missing)'
	@echo 'make soak     fault campaign: real training while paths, delegates and ranks fail (SOAK=--rounds=5 for more)'
	@echo 'make campaign-deaths  300 trainings in which ranks die at the worst moments, and much is late (DEATHS="--seed=7 --runs=50")'
	@echo 'make closed-loop  200 iterations while links turn slow, move and heal at random (CLOSED_LOOP=--seed=7 for another)'
	@echo 'make postings  20000 random jobs on a model of GPUs, for each rule of posting receives (POSTINGS=--cases=500 for fewer)'
	@echo 'make bench-rdma  its throughput there, and that of ib_write_bw'
	@echo 'make megatron  the sources of Megatron-LM $(MEGATRON_LM_TAG), into $(MEGATRON_LM)'
	@echo 'make test-dropin  its own pretrain_gpt.py with and without --adaptra (minutes)'
	@echo "make test-megatron-units  Megatron-LM's own unit tests of pipelines, on 8 CPU ranks, without and with adaptra"
	@echo 'make test-nccl  calls of NCCL and CUDA against the libraries that torch comes with (fetches 1.7 GB)'
	@echo "make test-nccl-host  NCCL's own host code, built from its sources, on a made-up CUDA (minutes; NCCL_SOURCE=DIRECTORY)"
	@echo 'make test-versions  the same for every supported release (an hour; needs Python 3.11 and 3.12)'
	@echo 'make docs     the pages and pictures of docs/ that are made from the code'
	@echo 'make site     the pages as a site with search, in build/site/html (fetches MkDocs)'
	@echo 'make dist     source distribution and wheels, checked, in dist/, for each of PYTHONS'
	@echo 'make lint     ruff and mypy'
	@echo 'make lock     pin what is installed, by version and hash (UPGRADE=upgrade for newer ones)'

install: $(INSTALLED)

$(CREATED):
	scripts/make_venv.sh $(VENV)
	@touch $@

$(FOUNDATION): $(CREATED) $(LOCK) requirements/tested.in
	$(PIP) install --no-deps --require-hashes --requirement $(LOCK)
	$(PIP) install '$(TORCH)'
	@touch $@

# Without build isolation the extension is built by what is there, not by a second environment made for each build.
$(INSTALLED): $(FOUNDATION) pyproject.toml setup.py adaptra_megatron.pth $(NATIVE)
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

lock:
	scripts/write_lock.sh $${PYTHON:-python3.11} $(UPGRADE)

demo: $(INSTALLED)
	$(BIN)/python -m testing.demo.demo

# Two runs of pytest share the machine, since ranks mostly wait for each other: the trainings in one; in the other what has
# one process or little training, then what mostly waits, and last the fault campaign, which has deadlines.
PYTEST_ALL := $(BIN)/python -m pytest -q -m 'not slow and not megatron_lm and not nccl_host' --durations=30
CONCURRENT_TESTS := $(addprefix tests/,benchmarks common control/detector gradsync fuzz gpu patches schedule tools dropin testing) \
	$(wildcard tests/test_*.py) $(addprefix tests/,elastic/launch telemetry transport campaigns)
test: $(INSTALLED)
	@mkdir -p build
	nice -n 5 $(PYTEST_ALL) -p no:cacheprovider $(CONCURRENT_TESTS) >build/concurrent_tests.txt 2>&1 & concurrent=$$!; \
	  $(PYTEST_ALL) $(CONCURRENT_TESTS:%=--ignore=%); trainings=$$?; \
	  wait $$concurrent; others=$$?; cat build/concurrent_tests.txt; exit $$((trainings ? trainings : others))

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

# Other examples for each seed, from SEED on, until something is found or ROUNDS are over. Shrinking takes up to 5 minutes.
properties: $(INSTALLED)
	for seed in $$(seq $(SEED) $$(($(SEED) + $(ROUNDS) - 1))); do \
	  echo "== SEED=$$seed"; ADAPTRA_TEST_EXAMPLES=random $(BIN)/python -m pytest -q -m 'hypothesis and not slow' --timeout=1200 \
	    --hypothesis-seed=$$seed || exit 1; \
	done

$(SANITIZED)/_ring.so: $(wildcard csrc/ring/*)
$(SANITIZED)/_native.so: $(wildcard csrc/schedule/* csrc/schedule/routing/*)
$(SANITIZED)/%.so: | $(INSTALLED)
	@mkdir -p $(SANITIZED)
	$(CXX) -std=c++17 -shared -fPIC -fvisibility=hidden $(SANITIZE) $$($(BIN)/python -m pybind11 --includes) \
		$(filter %.cpp,$^) -o $@

test-native-sanitized: $(INSTALLED)
	$(MAKE) --no-print-directory -j2 $(SANITIZED)/_ring.so $(SANITIZED)/_native.so
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --extensions=$(SANITIZED) --seconds=$(SECONDS) --first=$(SEED) \
		--only='$(FUZZ)'

fuzz-recordings: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m fuzz.recordings --seconds=$(SECONDS) --first=$(SEED)

megatron: $(INSTALLED)
	$(PIP) install --quiet --no-deps --require-hashes --requirement requirements/megatron_lm.txt
	scripts/fetch_megatron_lm.sh $(MEGATRON_LM_TAG) $(MEGATRON_LM) $(abspath $(BIN))/python

test-dropin: megatron
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) $(BIN)/python -m pytest -q -m megatron_lm

# The sources come by `make megatron`; any checkout of a supported release does: MEGATRON_LM=...
test-megatron-units: megatron
	$(PIP) install --quiet 'pytest-mock==3.17.0'
	$(BIN)/python scripts/try_megatron_units.py $(MEGATRON_LM)

test-nccl: $(INSTALLED)
	for nccl in $(NCCL); do \
	  case $$nccl in cu12*) cuda="$(CUDA_12)";; *) cuda="$(CUDA_13)";; esac; \
	  $(PIP) install --quiet --no-deps --upgrade --target build/nccl/$$nccl nvidia-nccl-$$nccl $$cuda && \
	  NCCL_DIRECTORY=$(CURDIR)/build/nccl/$$nccl/nvidia/nccl $(BIN)/python -m pytest -q tests/transport/device_session/test_nccl_library.py || exit 1; \
	done

# The sources of NCCL, any tree of 2.29; where that is not named they are fetched.
NCCL_HOST := build/nccl-host
NCCL_SOURCE ?= build/nccl-source
test-nccl-host: $(INSTALLED)
	test -e $(NCCL_SOURCE)/src/init.cc || scripts/fetch_nccl.sh $(NCCL_SOURCE)
	test -e $(NCCL_HOST)/cuda/nvidia || $(PIP) install --quiet --no-deps --target $(NCCL_HOST)/cuda $(CUDA_12_FOR_C)
	$(MAKE) -f tests/support/nccl_host/build.mk SOURCE=$(NCCL_SOURCE) CUDA=$(NCCL_HOST)/cuda OUT=$(NCCL_HOST)
	NCCL_HOST=$(CURDIR)/$(NCCL_HOST) $(BIN)/python -m pytest -q -m nccl_host tests/transport/device_session/test_nccl_host.py

# Each release in an environment with the Python that it asks for.
test-versions:
	$(MAKE) megatron VENV=.venv PYTHON=python3.11
	$(MAKE) megatron VENV=.venv312 PYTHON=python3.12 MEGATRON_LM=build/megatron-lm-core_v0.19.0 MEGATRON_LM_TAG=core_v0.19.0
	.venv312/bin/python -m pip --disable-pip-version-check install --quiet msgspec  # which main imports
	$(BIN)/python scripts/try_releases.py --python 3.11=.venv/bin/python --python 3.12=.venv312/bin/python
	$(MAKE) megatron VENV=.venv-latest PYTHON=python3.11 TORCH=$(LATEST_TORCH)
	$(BIN)/python scripts/try_releases.py --apart --python 3.11=.venv-latest/bin/python --release core_v0.16.1

docs: $(INSTALLED)
	$(BIN)/python scripts/write_docs.py
	$(BIN)/python scripts/draw_pictures.py

# In an environment of its own: what makes a site is no matter of tests.
SITE := build/site
site:
	test -x $(SITE)/venv/bin/mkdocs || (scripts/make_venv.sh $(SITE)/venv && \
	  $(SITE)/venv/bin/python -m pip --disable-pip-version-check install --quiet --requirement requirements/site.txt)
	$(SITE)/venv/bin/python scripts/build_site.py $(SITE)

# A wheel runs where glibc is as old as what it was built with: in the images of manylinux, cibuildwheel does the same.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
dist:
	scripts/build_dist.sh $(PYTHONS)

# Pictures to look at are left in build/pages.
test-pages: $(INSTALLED)
	mkdir -p build/pages
	npm install --silent --no-audit --no-fund --prefix build/pages puppeteer-core axe-core mermaid@11 jsdom
	node scripts/check_diagrams.mjs build/pages README.md docs/*.md
	PYTHONPATH=tests $(BIN)/python scripts/write_example_pages.py build/pages
	node scripts/look_at_pages.mjs build/pages build/pages/*.html

test-rdma: $(INSTALLED)
	$(BIN)/python scripts/softroce_vm.py test

soak: $(INSTALLED)
	$(BIN)/python -m campaigns.soak $(SOAK)

campaign-deaths: $(INSTALLED)
	$(BIN)/python -m campaigns.deaths $(DEATHS)

closed-loop: $(INSTALLED)
	$(BIN)/python -m campaigns.closed_loop $(CLOSED_LOOP)

postings: $(INSTALLED)
	$(BIN)/python scripts/play_postings.py $(POSTINGS)

bench-rdma: $(INSTALLED)
	$(BIN)/python scripts/softroce_vm.py bench

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
