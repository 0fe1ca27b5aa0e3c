#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the native parts with the Python that is there, runs the tests that need a GPU, and measures the host path
# (benchmarks/gpu.py). Needs no network. Arguments go to benchmarks/gpu.py; PYTHON picks the interpreter, one with a
# CUDA build of torch. Exit status: 0 all was shown, 1 something was not, 2 the machine lacks something.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}

missing() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || missing "$python is not Python 3.10 or newer: set PYTHON"
"$python" - <<'CHECK' || missing "see above; set PYTHON to an interpreter that has it"
import importlib.util
import sys

lacking = [name for name in ("torch", "numpy", "packaging", "pybind11", "setuptools", "pytest", "hypothesis", "psutil")
           if importlib.util.find_spec(name) is None]
if lacking:
    sys.exit(f"not installed for {sys.executable}: {', '.join(lacking)}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no GPU (CUDA build: {torch.version.cuda})")
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"{torch.cuda.get_device_name(0)}")
if importlib.util.find_spec("megatron") is None:
    print("megatron-core is not installed: training on the GPU will not be shown")
CHECK
command -v "${CXX:-c++}" >/dev/null || missing "no C++ compiler: set CXX"

"$python" setup.py --quiet build_ext --inplace || missing "the native parts do not build"
PYTHONPATH="$(pwd)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

status=0
"$python" -m pytest -q -m gpu tests/gpu || status=1
"$python" benchmarks/gpu.py "$@" || status=1
exit $status
