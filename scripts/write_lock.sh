#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pins what tests run with, to the newest releases that fit: requirements/tested.txt and megatron_lm.txt, by version and
# hash, for each Python from 3.10 on. write_lock.sh PYTHON [UPGRADE]: without "upgrade", pins stay that still fit.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
[[ ${2:-} == upgrade ]] && rm -f requirements/tested.txt requirements/megatron_lm.txt
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$python" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet 'uv==0.13.9'

compile() {
    "$tools/bin/uv" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
        --custom-compile-command 'make lock' "$@"
}

# torch is left out: a build for CPUs and one for GPUs have the same version, and other files. Without it, what it needs
# for GPUs is left out, too; the rest of what it needs is here.
extras=(--extra test --extra plot --extra cli --extra metrics --extra monitor --extra otel --extra traces --extra perfetto)
extras+=(--extra completion --extra lint)
compile pyproject.toml requirements/tested.in "${extras[@]}" --excludes requirements/torch_cuda.txt \
    --no-emit-package torch --output-file requirements/tested.txt
compile requirements/megatron_lm.in --constraints requirements/tested.txt --output-file requirements/megatron_lm.txt
