# SPDX-License-Identifier: Apache-2.0
# Everything runs in a virtual environment of its own. PYTHON picks the interpreter, VENV the directory.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Pinned to what is tested. torch goes first and alone: as a dependency, pip might pick a newer one.
TORCH := torch==2.13.0
MEGATRON := megatron-core==0.16.1

# Megatron-LM's sources, for its own scripts; and what those import besides torch. MEGATRON_LM_SOURCE names a mirror.
MEGATRON_LM ?= build/megatron-lm
MEGATRON_LM_TAG ?= core_v0.16.1
MEGATRON_LM_NEEDS := six regex pyyaml pydantic psutil tensorboard

# What torch 2.8, 2.9 and 2.10, 2.11, and 2.12 come with, and the latest.
NCCL := cu12==2.27.3 cu12==2.27.5 cu13==2.28.9 cu13==2.29.7 cu13==2.32.3

# One stamp per step: a step is done again only if its list of requirements has changed.
CREATED := $(VENV)/.adaptra-created
FOUNDATION := $(VENV)/.adaptra-$(subst ==,-,$(TORCH)-$(MEGATRON))
INSTALLED := $(VENV)/.adaptra-installed
LINT := $(VENV)/.adaptra-lint
NATIVE := $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help install demo megatron test test-slow test-dropin test-versions test-nccl docs test-rdma bench-rdma soak closed-loop postings lint
.DELETE_ON_ERROR:

help:
	@echo 'make install  virtual environment in $(VENV) with torch, Megatron-core and this package'
	@echo 'make demo     train a small GPT with and without adaptra while a link turns slow'
	@echo 'make test     every test but the slow ones'
	@echo 'make test-slow  the slow ones'
	@echo 'make test-rdma  the verbs transport on Soft-RoCE in a virtual machine (installs QEMU if it is missing)'
	@echo 'make soak     fault campaign: real training while paths, delegates and ranks fail (SOAK=--rounds=5 for more)'
	@echo 'make closed-loop  200 iterations while links turn slow, move and heal at random (CLOSED_LOOP=--seed=7 for another)'
	@echo 'make postings  20000 random jobs on a model of GPUs, for each rule of posting receives (POSTINGS=--cases=500 for fewer)'
	@echo 'make bench-rdma  its throughput there, beside that of ib_write_bw'
	@echo 'make megatron  the sources of Megatron-LM $(MEGATRON_LM_TAG), into $(MEGATRON_LM)'
	@echo 'make test-dropin  its own pretrain_gpt.py with and without --adaptra (minutes)'
	@echo 'make test-nccl  calls of NCCL against the libraries that torch comes with (fetches 1.5 GB)'
	@echo 'make test-versions  the same for every supported release (an hour; needs Python 3.11 and 3.12)'
	@echo 'make docs     the pages and pictures of docs/ that are made from the code'
	@echo 'make lint     ruff and mypy'

install: $(INSTALLED)

$(CREATED):
	scripts/make_venv.sh $(VENV)
	@touch $@

$(FOUNDATION): $(CREATED)
	$(PIP) install '$(TORCH)'
	$(PIP) install '$(MEGATRON)' 'setuptools>=77' 'pybind11>=2.13'
	@touch $@

# Without build isolation the extension is built by what is there, not by a second environment made for each build.
$(INSTALLED): $(FOUNDATION) pyproject.toml setup.py $(NATIVE)
	$(PIP) install --no-build-isolation --editable '.[test,plot,cli]'
	@touch $@

$(LINT): $(INSTALLED)
	$(PIP) install 'adaptra-megatron[lint]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m adaptra_megatron.emulation.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -m 'not slow and not megatron_lm' --durations=30

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

megatron: $(INSTALLED)
	$(PIP) install --quiet $(MEGATRON_LM_NEEDS)
	scripts/fetch_megatron_lm.sh $(MEGATRON_LM_TAG) $(MEGATRON_LM) $(abspath $(BIN))/python

test-dropin: megatron
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) $(BIN)/python -m pytest -q -m megatron_lm

test-nccl: $(INSTALLED)
	for nccl in $(NCCL); do \
	  $(PIP) install --quiet --no-deps --upgrade --target build/nccl/$$nccl nvidia-nccl-$$nccl && \
	  NCCL_DIRECTORY=$(CURDIR)/build/nccl/$$nccl/nvidia/nccl $(BIN)/python -m pytest -q tests/transport/test_nccl_library.py || exit 1; \
	done

# Each release in an environment with the Python that it asks for.
test-versions:
	$(MAKE) megatron VENV=.venv PYTHON=python3.11
	$(MAKE) megatron VENV=.venv312 PYTHON=python3.12 MEGATRON_LM=build/megatron-lm-core_v0.19.0 MEGATRON_LM_TAG=core_v0.19.0
	$(BIN)/python scripts/try_releases.py --python 3.11=.venv/bin/python --python 3.12=.venv312/bin/python

docs: $(INSTALLED)
	$(BIN)/python scripts/write_docs.py
	$(BIN)/python scripts/draw_pictures.py

test-rdma: $(INSTALLED)
	$(BIN)/python scripts/softroce_vm.py test

soak: $(INSTALLED)
	$(BIN)/python -m adaptra_megatron.emulation.soak $(SOAK)

closed-loop: $(INSTALLED)
	$(BIN)/python -m adaptra_megatron.emulation.closed_loop $(CLOSED_LOOP)

postings: $(INSTALLED)
	$(BIN)/python scripts/play_postings.py $(POSTINGS)

bench-rdma: $(INSTALLED)
	$(BIN)/python scripts/softroce_vm.py bench

lint: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
