#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What a machine with one GPU can show of what is promised for GPUs, in calls of 10 minutes at most. In this order, for each
# decides what the next is worth:
#
#     scripts/gpu_check.sh first --only first     what decides the device path, in 2 minutes, with torch alone: do events and
#                                                 NCCL's trailing wait behind a transfer hold up computation (with 1, 8 and
#                                                 32 queues), which calls a full launch queue keeps, what captures survive,
#                                                 what calls cost. Where trailing waits hold up nothing with one queue:
#                                                 --adaptra-queue-model shared
#     scripts/gpu_check.sh first                  the same, then queues, host calls, blocks of links, tests that need a GPU
#     scripts/gpu_check.sh second --nccl FILE --only T2 T4 T7    does the device path work with the real NCCL: meeting,
#                                                 connecting, aborts, iterations; and is training stock's, bit for bit
#     scripts/gpu_check.sh second --nccl FILE --only T5 T6       sessions, deaths, the host path's speed
#
# Needs torch with CUDA and pytest, and no network; more where it is there: a C++ compiler for the package's native parts,
# nvcc for kernels that take multiprocessors, msgspec and megatron-core for training. For two ranks on one GPU NCCL 2.30.3
# or newer is wanted: --nccl names a library (libnccl.so.2, best built before: it takes minutes) or sources to build (a
# tarball of src, makefiles and Makefile, or a folder). The table goes to stdout and to --output, by default in $OUT, or
# else benchmarks/results; it is written anew after each check. --dry-run runs every step on stand-ins of GPUs and NCCL,
# without a GPU. PYTHON picks the interpreter.
# Exit status: 0 all was shown, 1 something was not, 2 the machine lacks something; of --dry-run: 1 if a step crashed or hung.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}

missing() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || missing "$python is not Python 3.10 or newer: set PYTHON"
# Found, not imported: on a machine that has just started torch takes half a minute, which the call's limit is to count.
"$python" -c 'import importlib.util as util, sys; sys.exit(not all(map(util.find_spec, ("pytest", "torch"))))' || missing "$python lacks torch or pytest: set PYTHON"
PYTHONPATH="$PWD:$PWD/benchmarks:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "$python" -m gpu_check "$@"
