#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment: make_venv.sh DIRECTORY. Says what to install if this machine cannot build in one.
set -euo pipefail

directory=$1
python=${PYTHON:-}
if [[ -z $python ]]; then
    for candidate in python3.11 python3.12 python3.10 python3; do
        if command -v "$candidate" >/dev/null; then
            python=$candidate
            break
        fi
    done
fi

fail() {
    echo "make_venv.sh: $1" >&2
    exit 1
}

command -v "${python:-python3}" >/dev/null || fail "no Python found: install Python 3.11 or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old: install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    fail "$python has no C headers, which the native extension needs: apt-get install python3-dev, or set PYTHON"
command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler found: apt-get install g++"

if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$directory"
elif "$python" -m pip --version >/dev/null 2>&1; then
    # Debian ships ensurepip apart, in python3-venv; a pip from outside can stand in for it.
    "$python" -m venv --without-pip "$directory"
    "$python" -m pip --python "$directory/bin/python" install --quiet pip ||
        fail "could not put pip in $directory: apt-get install python3-venv, or set PYTHON"
else
    fail "$python has neither ensurepip nor pip: apt-get install python3-venv, or set PYTHON"
fi
