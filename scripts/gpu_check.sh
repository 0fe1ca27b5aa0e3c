#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What a machine with one GPU can show of what is promised for GPUs, in two calls of 10 minutes at most:
#
#     scripts/gpu_check.sh first
#     scripts/gpu_check.sh second --nccl nccl.tar.gz
#
# Needs torch with CUDA, nvcc, a C++ compiler and pytest, and no network; training is shown where megatron-core is
# installed. For two ranks on one GPU NCCL 2.30.3 or newer is built from the sources that --nccl names (a tarball of
# src, makefiles and Makefile, or a folder). The table goes to stdout and to --output. PYTHON picks the interpreter.
# Exit status: 0 all was shown, 1 something was not, 2 the machine lacks something.
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
